"""Figures without a window system or global state, written as small PNG files."""

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from common.files import atomic_path


def save_png(path: Path, figure: Figure, full_colour: bool = False) -> None:
    """Draw a figure and write it atomically as a PNG.

    Args:
        path: to be written.
        figure: to be drawn.
        full_colour: all its colours; otherwise 192 of them, for a quarter of the size but seconds for large pictures.

    Raises:
        OSError: the folder cannot be written or the disk is full.
    """
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    if full_colour:
        with atomic_path(path) as part:
            pixels.save(part, format="PNG")
        return
    # Maximum coverage keeps rare colours (a small structure); the median cut gives nearly all of them to the greys.
    few = pixels.quantize(192, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    with atomic_path(path) as part:
        few.save(part, format="PNG", optimize=True)


def one_line(text: str, longest: int) -> str:
    """Return a text fit for a figure: white space and control characters become single spaces, a long one is cut."""
    line = " ".join("".join(character if character.isprintable() else " " for character in text).split())
    return line if len(line) <= longest else line[: longest - 1] + "…"
