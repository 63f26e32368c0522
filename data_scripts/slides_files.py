"""Files of whole-slide images: tiled pyramids in TIFF, and annotations as ASAP writes them."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import tifffile

from common.files import atomic_path
from data_scripts.slides_lattice import MPP
from data_scripts.slides_lesions import Lesion, Outline
from data_scripts.slides_stain import Bytes

Compression = Literal["jpeg", "deflate"]
TILE_PX = 256
JPEG_QUALITY = 85
ISLAND_GROUP = "_2"  # Camelyon16's group of what is not tumour within tumour
_SMALLEST = 48  # px, the shortest side of the last level: a slide of 3072 px has level 6, as Camelyon16's have
_DEFLATE_LEVEL = 3
_BIG = 2**32 - 2**25  # bytes: a classic TIFF counts to 4 GB
_MICROMETRES = 1e4  # per centimetre
_COLOURS = {"_0": "#F4FA58", "_1": "#F4FA58", "Tumor": "#F4FA58", "_2": "#F4FA58", "Exclusion": "#64FE2E"}


def halved(level: Bytes) -> Bytes:
    """Return the mean of each 2 x 2 pixels of [H, W] or [H, W, 3] uint8, rounded half up; an odd last line is left out.

    For a mask of 0 and 1 that is the majority, tumour where two and two stand against each other.
    """
    height, width = (side // 2 * 2 for side in level.shape[:2])
    total = np.full((height // 2, width // 2, *level.shape[2:]), 2, np.uint16)
    for row in (0, 1):
        for column in (0, 1):
            total += level[row:height:2, column:width:2]
    total >>= 2
    return total.astype(np.uint8)


def pyramid(base: Bytes) -> Iterator[Bytes]:
    """Yield the levels of a pyramid, each half of the former, down to a shortest side of at least 48 px."""
    level = base
    yield level
    while min(level.shape[:2]) // 2 >= _SMALLEST:
        level = halved(level)
        yield level


def write_pyramid(path: Path, base: Bytes, compression: Compression) -> None:
    """Write an image [H, W, 3] or a mask [H, W] uint8 as a tiled pyramid, atomically.

    Each level is a directory of its own on the top of the file, since cuCIM and OpenSlide read a tree of directories as
    one level; all but the first are flagged as reduced images. Resolution tags say MPP. JPEG tiles hold YCbCr, colours
    at half the resolution, as scanners write them.
    """
    colour = base.ndim == 3
    jpeg = compression == "jpeg"
    with atomic_path(path) as part, tifffile.TiffWriter(part, bigtiff=base.nbytes * 4 // 3 > _BIG) as file:
        for number, level in enumerate(pyramid(base)):
            per_centimetre = _MICROMETRES / (MPP * 2**number)
            file.write(
                level,
                tile=(TILE_PX, TILE_PX),
                photometric="rgb" if colour else "minisblack",
                compression="jpeg" if jpeg else "zlib",  # deflate by its official number
                compressionargs={"level": JPEG_QUALITY if jpeg else _DEFLATE_LEVEL},
                subfiletype=1 if number else 0,
                resolution=(per_centimetre, per_centimetre),
                resolutionunit="CENTIMETER",
                software="medspeed",
                description=None,
                metadata=None,
                maxworkers=1,
            )


def write_annotations(path: Path, lesions: Iterable[Lesion]) -> None:
    """Write the outlines of lesions, and of islands of normal tissue in them, as ASAP's XML; level-0 pixels."""
    root = ElementTree.Element("ASAP_Annotations")
    annotations = ElementTree.SubElement(root, "Annotations")
    outlines = [(lesion.group, lesion.outline) for lesion in lesions]
    outlines += [(ISLAND_GROUP, island) for lesion in lesions for island in lesion.islands]
    for number, (group, outline) in enumerate(outlines):
        _add_polygon(annotations, number, group, outline)
    groups = ElementTree.SubElement(root, "AnnotationGroups")
    for name in sorted({group for group, _ in outlines}):
        group_entry = ElementTree.SubElement(groups, "Group", Name=name, PartOfGroup="None", Color=_COLOURS[name])
        ElementTree.SubElement(group_entry, "Attributes")
    ElementTree.indent(root, "\t")
    with atomic_path(path) as part:
        ElementTree.ElementTree(root).write(part, encoding="utf-8", xml_declaration=True)


def _add_polygon(annotations: ElementTree.Element, number: int, group: str, outline: Outline) -> None:
    entry = ElementTree.SubElement(
        annotations, "Annotation", Name=f"Annotation {number}", Type="Polygon", PartOfGroup=group, Color="#F4FA58"
    )
    coordinates = ElementTree.SubElement(entry, "Coordinates")
    for order, (x, y) in enumerate(outline.tolist()):
        ElementTree.SubElement(coordinates, "Coordinate", Order=str(order), X=f"{x:.2f}", Y=f"{y:.2f}")


def tumours(path: Path) -> list[tuple[str, Outline]]:
    """Return the group and the outline [N, 2] (x, y px) of each lesion in what `write_annotations` wrote."""
    found = []
    for entry in ElementTree.parse(path).iter("Annotation"):
        points = [(float(point.attrib["X"]), float(point.attrib["Y"])) for point in entry.iter("Coordinate")]
        if entry.attrib["PartOfGroup"] != ISLAND_GROUP:
            found.append((entry.attrib["PartOfGroup"], np.array(points)))
    return found
