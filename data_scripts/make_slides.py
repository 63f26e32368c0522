"""Make a set of synthetic slides: haematoxylin and eosin, lymph nodes with and without metastases, as in Camelyon16."""

import argparse
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tifffile

from common.files import atomic_path, write_text
from data_scripts.set_folder import Parameters, fill
from data_scripts.slides_paint import draw_slide
from data_scripts.slides_tissue import ISLAND, MACRO_UM, MPP, Bytes, Lesions, long_axis

SLIDES_VERSION = 2  # raised when the same parameters give other slides
DEFAULT_SIZE = 3072  # px, 1.5 mm
SMALLEST, LARGEST = 512, 65535  # px: room for a lesion, and the longest side of a JPEG
BYTES_PER_PIXEL = 7  # held while a slide is drawn and written, measured from 1024 to 3072 px
TILE_PX, JPEG_QUALITY, DEFLATE_LEVEL = 256, 85, 3
_SMALLEST_LEVEL = 48  # px, the shortest side of the last level: a slide of 3072 px has level 6, as Camelyon16's have
_MOST_BYTES = 8 * 2**30  # that all slides in work may take together
_CLASSIC_TIFF = 2**32 - 2**25  # bytes: it counts to 4 GB
_EXAMPLES = """examples:
  python data_scripts/make_slides.py --to data/slides
  python data_scripts/make_slides.py --to data/slides --training 40 --testing 20 --seed 1
  python data_scripts/make_slides.py --to data/large --training 2 --testing 2 --size 20000

what is written (the layout of Camelyon16; tiled TIFF pyramids of 256 px tiles, levels halved):
  DIR/training/images/{normal,tumor}_NNN.tif    DIR/testing/images/test_NNN.tif
  DIR/*/annotations/STEM.xml                    outlines of the metastases, as ASAP writes them
  DIR/*/masks/STEM_mask.tif                     1 = tumour, on the pixels of the image
  DIR/testing/reference.csv                     stem, Tumor or Normal, type, micro or macro
  DIR/slides.json                               written last: a folder that has it is whole
"""


@dataclass(frozen=True)
class Entry:
    """A slide of a set: its name, its half ("training" or "testing"), its number there, and whether it has tumour."""

    stem: str
    half: str
    number: int
    tumour: bool

    def paths(self, folder: Path) -> tuple[Path, ...]:
        """Return its files: the image and, where it has tumour, its annotation and its mask."""
        half = folder / self.half
        image = half / "images" / f"{self.stem}.tif"
        truth = half / "annotations" / f"{self.stem}.xml", half / "masks" / f"{self.stem}_mask.tif"
        return (image, *truth) if self.tumour else (image,)

    def write(self, folder: Path, size: int, seed: int) -> None:
        """Draw and write its files, the same whatever else is drawn; every third image is compressed without loss."""
        kind = 2 if self.half == "testing" else int(self.tumour)
        slide = draw_slide(size, self.tumour, np.random.default_rng([seed, kind, self.number]))
        image, *truth = self.paths(folder)
        write_pyramid(image, slide.image, "jpeg" if self.number % 3 else "deflate")
        if truth:
            write_annotations(truth[0], slide.lesions)
            write_pyramid(truth[1], slide.mask, "deflate")


def entries(training: int, testing: int) -> list[Entry]:
    """Return the slides of a set: half of the training slides (rounded up) and every other test slide have tumour."""
    normal = [Entry(f"normal_{n:03d}", "training", n, False) for n in range(1, training // 2 + 1)]
    tumour = [Entry(f"tumor_{n:03d}", "training", n, True) for n in range(1, training - training // 2 + 1)]
    return [*normal, *tumour, *(Entry(f"test_{n:03d}", "testing", n, n % 2 == 1) for n in range(1, testing + 1))]


def make_slides(
    folder: Path,
    training: int = 8,
    testing: int = 6,
    size: int = DEFAULT_SIZE,
    seed: int = 0,
    progress: bool = True,
) -> Path:
    """Make a set of synthetic slides of lymph nodes in the layout of Camelyon16; return its folder.

    Half of the slides have metastases, drawn so that their nuclei tell and their colour does not. The same parameters
    give the same bytes, on any number of cores, with the same packages on the same kind of processor; each slide
    depends on (seed, its kind, its number) alone. A set that is already there is left as it is, an unfinished one is
    finished. Memory: BYTES_PER_PIXEL for each pixel of the slides in work, of which there is one per core, fewer where
    they would take more than 8 GiB.

    Args:
        folder: where the set goes.
        training: how many training slides, half of them normal.
        testing: how many test slides, every other one with tumour.
        size: side of a slide at level 0 in px of 0.5 um.
        seed: draws everything.
        progress: whether to show a progress bar.

    Raises:
        ValueError: fewer than two training or test slides, a size out of bounds, a negative seed, or `folder` holds
            something else.
    """
    for name, number in (("training", training), ("testing", testing)):
        if number < 2:
            raise ValueError(f"--{name} {number}: at least 2 slides have to be made, one with tumour and one without")
    if not SMALLEST <= size <= LARGEST:
        raise ValueError(f"--size {size}: must be {SMALLEST} to {LARGEST} px")
    if seed < 0:
        raise ValueError(f"--seed {seed}: must be 0 or more")
    slides = entries(training, testing)
    numbers: Parameters = {"training": training, "testing": testing, "size": size, "seed": seed}

    def listing() -> dict[str, Any]:
        rows = [_reference(folder, entry) for entry in slides if entry.half == "testing"]
        write_text(folder / "testing" / "reference.csv", "".join(rows))
        return {
            "name": "LymphNodePhantoms",
            "description": "Synthetic slides of lymph nodes with outlined metastases; no patient was biopsied",
            "reference": "medspeed, data_scripts/make_slides.py",
            "licence": "Apache-2.0, as the program that drew them; synthetic, not for clinical use",
            **{half: [entry.stem for entry in slides if entry.half == half] for half in ("training", "testing")},
        }

    return fill(
        folder,
        "slides.json",
        {"kind": "slides", "version": SLIDES_VERSION, **numbers},
        [entry.paths(folder) for entry in slides],
        lambda index: slides[index].write(folder, size, seed),
        listing,
        max(1, _MOST_BYTES // (BYTES_PER_PIXEL * size**2)),
        progress,
    )


def _reference(folder: Path, entry: Entry) -> str:
    """Return a slide's line of `reference.csv`: stem, Tumor or Normal, type, and the size of the largest metastasis."""
    if not entry.tumour:
        return f"{entry.stem},Normal,None,None\n"
    axes = []
    for annotation in ElementTree.parse(entry.paths(folder)[1]).iter("Annotation"):
        points = [(float(point.attrib["X"]), float(point.attrib["Y"])) for point in annotation.iter("Coordinate")]
        axes.append(long_axis(np.array(points)))
    return f"{entry.stem},Tumor,synthetic,{'macro' if max(axes) > MACRO_UM else 'micro'}\n"


def pyramid(base: Bytes) -> Iterator[Bytes]:
    """Yield the levels of a pyramid, [H, W] or [H, W, 3], down to a shortest side of at least 48 px.

    Each pixel is the mean of 2 x 2 of the level before, rounded half up; an odd last line is left out. For a mask of 0
    and 1 that is the majority, tumour where two and two stand against each other.
    """
    level = base
    yield level
    while min(level.shape[:2]) // 2 >= _SMALLEST_LEVEL:
        height, width = (side // 2 * 2 for side in level.shape[:2])
        total = np.full((height // 2, width // 2, *level.shape[2:]), 2, np.uint16)
        for row, column in np.ndindex(2, 2):
            total += level[row:height:2, column:width:2]
        level = (total >> 2).astype(np.uint8)
        yield level


def write_pyramid(path: Path, base: Bytes, compression: Literal["jpeg", "deflate"]) -> None:
    """Write an image [H, W, 3] or a mask [H, W] uint8 as a tiled pyramid, atomically.

    Each level is a directory of its own on the top of the file, since cuCIM and OpenSlide read a tree of directories as
    one level; all but the first are flagged as reduced images. Resolution tags say MPP. JPEG tiles hold YCbCr, colours
    at half the resolution, as scanners write them.
    """
    jpeg = compression == "jpeg"
    with atomic_path(path) as part, tifffile.TiffWriter(part, bigtiff=base.nbytes * 4 // 3 > _CLASSIC_TIFF) as file:
        for number, level in enumerate(pyramid(base)):
            file.write(
                level,
                tile=(TILE_PX, TILE_PX),
                photometric="rgb" if base.ndim == 3 else "minisblack",
                compression="jpeg" if jpeg else "zlib",  # deflate by its official number
                compressionargs={"level": JPEG_QUALITY if jpeg else DEFLATE_LEVEL},
                subfiletype=1 if number else 0,
                resolution=(1e4 / (MPP * 2**number),) * 2,
                resolutionunit="CENTIMETER",
                software="medspeed",
                description=None,
                metadata=None,
                maxworkers=1,
            )


def write_annotations(path: Path, lesions: Lesions) -> None:
    """Write the outlines of lesions, and of islands of normal tissue in them, as ASAP's XML; level-0 pixels."""
    root = ElementTree.Element("ASAP_Annotations")
    annotations = ElementTree.SubElement(root, "Annotations")
    colour = {ISLAND: "#64FE2E"}
    for number, (group, outline) in enumerate(lesions):
        about = {"Name": f"Annotation {number}", "Type": "Polygon", "PartOfGroup": group, "Color": "#F4FA58"}
        coordinates = ElementTree.SubElement(ElementTree.SubElement(annotations, "Annotation", about), "Coordinates")
        for order, (x, y) in enumerate(outline.tolist()):
            ElementTree.SubElement(coordinates, "Coordinate", Order=str(order), X=f"{x:.2f}", Y=f"{y:.2f}")
    groups = ElementTree.SubElement(root, "AnnotationGroups")
    for name in sorted({group for group, _ in lesions}):
        about = {"Name": name, "PartOfGroup": "None", "Color": colour.get(name, "#F4FA58")}
        ElementTree.SubElement(ElementTree.SubElement(groups, "Group", about), "Attributes")
    ElementTree.indent(root, "\t")
    with atomic_path(path) as part:
        ElementTree.ElementTree(root).write(part, encoding="utf-8", xml_declaration=True)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=f"{__doc__} Same seed, same bytes.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--to", type=Path, required=True, metavar="DIR", help="new or empty folder for the set")
    add("--training", type=int, default=8, metavar="N", help="how many training slides, half with tumour (default 8)")
    add("--testing", type=int, default=6, metavar="N", help="how many test slides, half with tumour (default 6)")
    size = f"side of a slide in pixels of {MPP} um (default {DEFAULT_SIZE}); takes {BYTES_PER_PIXEL} bytes a pixel"
    add("--size", type=int, default=DEFAULT_SIZE, metavar="PX", help=size)
    add("--seed", type=int, default=0, metavar="S", help="same seed, same bytes (default 0)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0, or 2 after one line on what to change."""
    options = make_parser().parse_args(arguments)
    try:
        folder = make_slides(options.to, options.training, options.testing, options.size, options.seed)
    except (ValueError, FileNotFoundError) as error:
        print(re.sub(r"\s*\n\s*", " ", f"make_slides.py: error: {error}"), file=sys.stderr)
        return 2
    print(f"{folder}: synthetic slides in the layout of Camelyon16, seed {options.seed}; not for clinical use")
    return 0


if __name__ == "__main__":
    sys.exit(main())
