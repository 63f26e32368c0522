"""Pictures as small PNG files, and the texts in them."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

from PIL import Image, ImageFont

from medspeed.common.files import atomic_path


def save_image(path: Path, pixels: Image.Image, full_colour: bool = False) -> None:
    """Write an RGB picture atomically as a PNG: in full colour, or in 192 colours for a quarter of the size."""
    if not full_colour:
        # Maximum coverage keeps rare colours (a small structure); the median cut gives nearly all of them to the greys.
        pixels = pixels.quantize(192, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    with atomic_path(path) as part:
        pixels.save(part, format="PNG")  # zlib's best level takes eight times as long for 3 percent


def one_line(text: str, longest: int) -> str:
    """Return a text fit for a figure: white space and control characters become single spaces, a long one is cut."""
    line = " ".join("".join(character if character.isprintable() else " " for character in text).split())
    return line if len(line) <= longest else line[: longest - 1] + "…"


@cache
def font(pixels: float, bold: bool = False) -> ImageFont.FreeTypeFont:
    """Return DejaVu Sans of a size, which matplotlib brings along; matplotlib itself is not loaded."""
    (folder,) = find_spec("matplotlib").submodule_search_locations  # type: ignore[union-attr, misc]
    file = Path(folder) / "mpl-data" / "fonts" / "ttf" / f"DejaVuSans{'-Bold' * bold}.ttf"
    return ImageFont.truetype(file, pixels, layout_engine=ImageFont.Layout.BASIC)
