"""Generate synthetic slides: H&E-stained lymph nodes with and without metastases, in the layout of Camelyon16."""

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tifffile

from medspeed.common.files import atomic_path, write_text
from medspeed.common.flags import Parser
from medspeed.data_scripts import fill, run_program
from medspeed.data_scripts.slides_paint import TABLES, draw_slide
from medspeed.data_scripts.slides_tissue import ISLAND, MACRO_UM, MPP, Bytes, Lesions, long_axis

SLIDES_VERSION = 2  # raised when the same parameters give other slides
DEFAULT_SIZE = 3072  # px, 1.5 mm
MOST = 10_000  # slides of a half
SMALLEST, LARGEST = 512, 65535  # px: room for a lesion, and the longest side of a JPEG
BYTES_PER_PIXEL = 7  # held while a slide is drawn and written, measured from 1024 to 3072 px
TILE_PX, JPEG_QUALITY, DEFLATE_LEVEL = 256, 85, 3
_SMALLEST_LEVEL = 48  # px, the shortest side of the last level: a slide of 3072 px has level 6, as Camelyon16's have
_MOST_BYTES = 8 * 2**30  # that all slides in work may take together
_CLASSIC_TIFF = 2**32 - 2**25  # bytes: it counts to 4 GB
_EXAMPLES = """examples:
  medspeed data make-slides --to data/slides
  medspeed data make-slides --to data/slides --training 40 --testing 20 --seed 1
  medspeed data make-slides --to data/large --training 2 --testing 2 --size 20000

what is written (the layout of Camelyon16; tiled TIFF pyramids of 256 px tiles, levels halved):
  DIR/training/images/{normal,tumor}_NNN.tif    DIR/testing/images/test_NNN.tif
  DIR/*/annotations/STEM.xml                    outlines of the metastases, in ASAP's format
  DIR/*/masks/STEM_mask.tif                     1 = tumour, on the pixels of the image
  DIR/testing/reference.csv                     stem, Tumor or Normal, type, micro or macro
  DIR/slides.json                               written last, so it marks a complete folder
"""
_SIDE = f"side of a slide in pixels of {MPP} um (default {DEFAULT_SIZE}); needs {BYTES_PER_PIXEL} bytes per pixel"
PARSER = Parser(description=f"{__doc__} Same seed, same bytes.", epilog=_EXAMPLES)
_add = PARSER.add_argument
_add("--to", dest="folder", type=Path, required=True, metavar="DIR", help="new or empty folder for the set")
_add("--training", type=int, default=8, metavar="N", help="number of training slides, half with tumour (default 8)")
_add("--testing", type=int, default=6, metavar="N", help="number of test slides, half with tumour (default 6)")
_add("--size", type=int, default=DEFAULT_SIZE, metavar="PX", help=_SIDE)
_add("--seed", type=int, default=0, metavar="S", help="same seed, same bytes (default 0)")


def entries(training: int, testing: int) -> list[tuple[str, int, bool]]:
    """Return the slides of a set: "normal", "tumor" or "test", the number there, and whether they have tumour.

    Half of the training slides (rounded up) and every other test slide have.
    """
    normal = [("normal", number, False) for number in range(1, training // 2 + 1)]
    tumour = [("tumor", number, True) for number in range(1, training - training // 2 + 1)]
    return [*normal, *tumour, *(("test", number, number % 2 == 1) for number in range(1, testing + 1))]


def make_slides(folder: Path, training: int = 8, testing: int = 6, size: int = DEFAULT_SIZE, seed: int = 0) -> Path:
    """Make a set of synthetic slides of lymph nodes in the layout of Camelyon16; return its folder.

    Half of the slides have metastases, drawn so that their nuclei tell and their colour does not; `size` is the side of
    level 0 in px of 0.5 um. The same parameters give the same bytes, on any number of cores, with the same packages on
    the same kind of processor; each slide depends on (seed, its kind, its number) alone. A set that is already there is
    left as it is, an unfinished one is finished. Memory: BYTES_PER_PIXEL for each pixel of the slides in work, of which
    there is one per core, fewer where they would take more than 8 GiB.

    Raises:
        ValueError: a number is out of its bounds, or `folder` holds something else.
    """
    for name, number in (("training", training), ("testing", testing)):
        if not 2 <= number <= MOST:
            raise ValueError(f"--{name} {number}: must be at least 2, with tumour and without, and at most {MOST}")
    if not SMALLEST <= size <= LARGEST:
        raise ValueError(f"--size {size}: must be {SMALLEST} to {LARGEST} px")
    slides, files = entries(training, testing), []
    for group, number, tumour in slides:
        half, stem = folder / ("testing" if group == "test" else "training"), f"{group}_{number:03d}"
        truth = [half / "annotations" / f"{stem}.xml", half / "masks" / f"{stem}_mask.tif"]
        files.append([half / "images" / f"{stem}.tif", *(truth if tumour else [])])

    def make(index: int) -> None:
        """Draw a slide, the same whatever else is drawn; every third image is compressed without loss."""
        group, number, tumour = slides[index]
        rng = np.random.default_rng([seed, ("normal", "tumor", "test").index(group), number])
        image, mask, lesions = draw_slide(size, tumour, rng)
        write_pyramid(files[index][0], image, "jpeg" if number % 3 else "deflate")
        if tumour:
            write_annotations(files[index][1], lesions)
            write_pyramid(files[index][2], mask, "deflate")

    def listing() -> dict[str, Any]:
        write_text(folder / "testing" / "reference.csv", "".join(_reference(*paths) for paths in files[training:]))
        stems = [paths[0].stem for paths in files]
        return {**TABLES["about"], "training": stems[:training], "testing": stems[training:]}

    numbers = {"training": training, "testing": testing, "size": size, "seed": seed}
    parameters = {"kind": "slides", "version": SLIDES_VERSION, **numbers}
    most = max(1, _MOST_BYTES // (BYTES_PER_PIXEL * size**2))
    return fill(folder / "slides.json", parameters, files, make, listing, most)


def _reference(image: Path, annotation: Path | None = None, _: Path | None = None) -> str:
    """Return a slide's line of `reference.csv`: stem, Tumor or Normal, type, and the size of the largest metastasis."""
    if annotation is None:
        return f"{image.stem},Normal,None,None\n"
    polygons = ElementTree.parse(annotation).iter("Annotation")
    points = ([(float(at.attrib["X"]), float(at.attrib["Y"])) for at in each.iter("Coordinate")] for each in polygons)
    longest = max(long_axis(np.array(outline)) for outline in points)
    return f"{image.stem},Tumor,synthetic,{'macro' if longest > MACRO_UM else 'micro'}\n"


def pyramid(base: Bytes) -> Iterator[Bytes]:
    """Yield the levels of a pyramid, [H, W] or [H, W, 3], down to a shortest side of at least 48 px.

    Pixels are means of 2 x 2 of the level before, rounded half up (a mask's tie is tumour); an odd last line is lost.
    """
    yield base
    while min(base.shape[:2]) // 2 >= _SMALLEST_LEVEL:
        height, width = (side // 2 * 2 for side in base.shape[:2])
        rows = base[0:height:2].astype(np.uint16) + base[1:height:2]
        base = ((rows[:, 0:width:2] + rows[:, 1:width:2] + 2) >> 2).astype(np.uint8)
        yield base


def write_pyramid(path: Path, base: Bytes, compression: Literal["jpeg", "deflate"]) -> None:
    """Write an image [H, W, 3] or a mask [H, W] uint8 as a tiled pyramid, atomically.

    Each level is a directory of its own on the top of the file, since cuCIM and OpenSlide read a tree of directories as
    one level; all but the first are flagged as reduced images. Resolution tags say MPP. JPEG tiles hold YCbCr, colours
    at half the resolution, as scanners write them.
    """
    jpeg = compression == "jpeg"
    fixed: dict[str, Any] = {"software": "medspeed", "description": None, "metadata": None, "maxworkers": 1}
    fixed |= {"tile": (TILE_PX, TILE_PX), "photometric": "rgb" if base.ndim == 3 else "minisblack"}
    fixed |= {"compression": "jpeg" if jpeg else "zlib"}  # deflate by its official number
    fixed |= {"compressionargs": {"level": JPEG_QUALITY if jpeg else DEFLATE_LEVEL}, "resolutionunit": "CENTIMETER"}
    with atomic_path(path) as part, tifffile.TiffWriter(part, bigtiff=base.nbytes * 4 // 3 > _CLASSIC_TIFF) as file:
        for number, level in enumerate(pyramid(base)):
            file.write(level, subfiletype=1 if number else 0, resolution=(1e4 / (MPP * 2**number),) * 2, **fixed)


def write_annotations(path: Path, lesions: Lesions) -> None:
    """Write the outlines of lesions, and of islands of normal tissue in them, as ASAP's XML; level-0 pixels."""
    root = ElementTree.Element("ASAP_Annotations")
    annotations = ElementTree.SubElement(root, "Annotations")
    for number, (group, outline) in enumerate(lesions):
        about = {"Name": f"Annotation {number}", "Type": "Polygon", "PartOfGroup": group, "Color": "#F4FA58"}
        coordinates = ElementTree.SubElement(ElementTree.SubElement(annotations, "Annotation", about), "Coordinates")
        for order, (x, y) in enumerate(outline.tolist()):
            ElementTree.SubElement(coordinates, "Coordinate", Order=str(order), X=f"{x:.2f}", Y=f"{y:.2f}")
    groups = ElementTree.SubElement(root, "AnnotationGroups")
    for name in sorted({group for group, _ in lesions}):
        about = {"Name": name, "PartOfGroup": "None", "Color": "#64FE2E" if name == ISLAND else "#F4FA58"}
        ElementTree.SubElement(ElementTree.SubElement(groups, "Group", about), "Attributes")
    ElementTree.indent(root, "\t")
    with atomic_path(path) as part:
        ElementTree.ElementTree(root).write(part, encoding="utf-8", xml_declaration=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = vars(PARSER.parse_args(arguments))
    told = f"synthetic slides in the layout of Camelyon16, seed {options['seed']}; not for clinical use"
    return run_program("make_slides", lambda: f"{make_slides(**options)}: {told}")


if __name__ == "__main__":
    sys.exit(main())
