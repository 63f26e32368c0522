"""Sets of synthetic slides on the disk, in the layout of Camelyon16: the same bytes for the same parameters.

`slides.json` is written last; see set_folder for how an interrupted set is gone on with.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.files import write_json, write_text
from data_scripts.set_folder import MARKER, Parameters, claim, on_all_cores
from data_scripts.slides_files import Compression, tumours, write_annotations, write_pyramid
from data_scripts.slides_lesions import MACRO_UM, Lesion
from data_scripts.slides_scene import draw_slide

LIST = "slides.json"
BYTES_PER_PIXEL = 7  # held while a slide is drawn and written, measured from 1024 to 3072 px
_MOST_BYTES = 8 * 2**30  # that all slides in work may take together


@dataclass(frozen=True)
class Entry:
    """A slide of a set: its name, its half ("training" or "testing"), its number there, and whether it has tumour."""

    stem: str
    half: str
    number: int
    tumour: bool

    @property
    def compression(self) -> Compression:
        """Return how its tiles are compressed: every third slide without loss."""
        return "deflate" if self.number % 3 == 0 else "jpeg"

    def generator(self, seed: int) -> np.random.Generator:
        """Return the slide's own generator, whatever else is drawn."""
        kind = 2 if self.half == "testing" else int(self.tumour)
        return np.random.default_rng([seed, kind, self.number])


def entries(training: int, testing: int) -> list[Entry]:
    """Return the slides of a set: half of the training slides (rounded up) and every other test slide have tumour."""
    normal = [Entry(f"normal_{n:03d}", "training", n, False) for n in range(1, training // 2 + 1)]
    tumour = [Entry(f"tumor_{n:03d}", "training", n, True) for n in range(1, training - training // 2 + 1)]
    return [*normal, *tumour, *(Entry(f"test_{n:03d}", "testing", n, n % 2 == 1) for n in range(1, testing + 1))]


def write_slides(
    folder: Path,
    slides: list[Entry],
    size: int,
    seed: int,
    about: dict[str, Any],
    parameters: Parameters,
    progress: bool,
) -> Path:
    """Write the slides that are missing, the reference of the test slides, then `slides.json`; return the folder.

    Args:
        folder: where the set goes; new, empty, or holding this very set, whole or unfinished.
        slides: what to draw.
        size: side of a slide in px.
        seed: draws everything.
        about: the first entries of `slides.json`.
        parameters: all that decides the set's bytes; kept in `slides.json` under "phantom".
        progress: whether to show a progress bar with the time left.

    Raises:
        ValueError: the folder holds something else.
    """
    claim(folder, LIST, parameters)
    todo = [i for i, entry in enumerate(slides) if not all(path.exists() for path in paths(folder, entry))]

    def make(index: int) -> None:
        _write_slide(folder, slides[index], size, seed)

    if todo:
        most = max(1, _MOST_BYTES // (BYTES_PER_PIXEL * size**2))
        on_all_cores(make, todo, most, f"{about['name']}: making slides", "slide", progress)
    if todo or not (folder / LIST).exists():
        write_text(folder / "testing" / "reference.csv", _reference(folder, slides))
        halves = {half: [entry.stem for entry in slides if entry.half == half] for half in ("training", "testing")}
        write_json(folder / LIST, {**about, "synthetic": True, **halves, "phantom": parameters})
    (folder / MARKER).unlink(missing_ok=True)
    return folder


def paths(folder: Path, entry: Entry) -> tuple[Path, ...]:
    """Return the files of a slide: its image and, where it has tumour, its annotation and its mask."""
    half = folder / entry.half
    image = half / "images" / f"{entry.stem}.tif"
    if not entry.tumour:
        return (image,)
    return image, half / "annotations" / f"{entry.stem}.xml", half / "masks" / f"{entry.stem}_mask.tif"


def _write_slide(folder: Path, entry: Entry, size: int, seed: int) -> None:
    slide = draw_slide(size, entry.tumour, entry.generator(seed))
    image, *truth = paths(folder, entry)
    write_pyramid(image, slide.image, entry.compression)
    if entry.tumour:
        write_annotations(truth[0], slide.lesions)
        write_pyramid(truth[1], slide.mask, "deflate")


def _reference(folder: Path, slides: list[Entry]) -> str:
    """Return the text of `reference.csv`: stem, Tumor or Normal, type, and the size of the largest metastasis."""
    lines = []
    for entry in slides:
        if entry.half != "testing":
            continue
        if entry.tumour:
            axes = [Lesion(outline, (), group).long_axis for group, outline in tumours(paths(folder, entry)[1])]
            lines.append(f"{entry.stem},Tumor,synthetic,{'macro' if max(axes) > MACRO_UM else 'micro'}\n")
        else:
            lines.append(f"{entry.stem},Normal,None,None\n")
    return "".join(lines)
