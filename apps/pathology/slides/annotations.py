"""Where the tumour of a slide lies: outlines as ASAP saves them, and masks as TIFF pyramids.

Source of the groups and of the masks' values: the README of the CAMELYON16 data and ASAP's own conversion of outlines
to masks: "Tumor", "_0" and "_1" are tumour, "_2" and "Exclusion" are no tumour though an outline around them says so.
"""

import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import tifffile

from apps.pathology.slides.camelyon import SlideEntry
from apps.pathology.slides.layout import SlideMask

TUMOUR_GROUPS, EXCLUDED_GROUPS = ("Tumor", "_0", "_1"), ("_2", "Exclusion")
TUMOUR_VALUES = (1, 255)  # of a mask: those of the public bucket hold 1, those of the challenge's first release 255
_MOST_BYTES = 2**26  # of an XML file: the largest of Camelyon16 has a few MB
_MOST_APART = 0.02  # by which the sides of a slide and of its mask may differ: scanners pad slides to whole tiles


def tumour_mask(entry: SlideEntry, width: int, height: int, most_downsample: float) -> SlideMask:
    """Return where the tumour of a slide lies, from its mask where there is one, else from its outlines.

    Args:
        entry: of the slide; its mask is a TIFF pyramid of uint8 in which 1 (or 255) is tumour.
        width: of the slide, in pixels of level 0.
        height: likewise.
        most_downsample: the mask's coarsest level that is at least this fine is read; 1 or more.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: there is neither, or it is damaged or belongs to another slide; the message names the slide.
    """
    assert most_downsample >= 1, most_downsample
    try:
        if entry.mask is not None:
            return _read_mask(entry.mask, width, height, most_downsample)
        if entry.annotation is None:
            raise ValueError("neither a mask nor an annotation says where the tumour lies")
        downsample = 2 ** int(math.log2(most_downsample))
        wide, high = math.ceil(width / downsample), math.ceil(height / downsample)
        return SlideMask(rasterise(entry.annotation, wide, high, downsample), downsample)
    except ValueError as error:
        raise ValueError(f"{entry.path}: {error}") from error


def rasterise(path: Path, width: int, height: int, downsample: float) -> np.ndarray:
    """Return where the tumour of an annotation file lies, [height, width] bool: in tumour, in nothing excluded.

    A pixel belongs to an outline if its centre lies inside by the even-odd rule.

    Args:
        path: of ASAP's XML.
        width: of the result, in its own pixels.
        height: likewise.
        downsample: level-0 pixels per pixel of the result.

    Raises:
        ValueError: the file is damaged, or an outline lies beyond the slide by a pixel of the result or more.
    """
    mask = np.zeros((height, width), bool)
    outlines = [(polygon / downsample, tumour) for polygon, tumour in read_asap(path)]
    for polygon, _ in outlines:
        outside = ((polygon < -1) | (polygon > np.array([width, height]) + 1)).any(1)
        if outside.any():
            x, y = polygon[outside][0].round(1)
            raise ValueError(
                f"{path}: a vertex at ({x:g}, {y:g}) lies outside the slide, {width} x {height} pixels at the level "
                "looked at: does the annotation belong to another slide?"
            )
    for polygon, tumour in sorted(outlines, key=lambda outline: not outline[1]):  # what is excluded, last
        _fill(mask, polygon, tumour)
    return mask


def read_asap(path: Path) -> list[tuple[np.ndarray, bool]]:
    """Read the closed outlines of an annotation file of ASAP; marks that enclose nothing (dots) are passed over.

    Returns:
        Of each its vertices [K, 2] float64, (x, y) in pixels of level 0, the first not repeated, and whether it is
        tumour, or excluded.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no XML of ASAP, an outline has fewer than 3 vertices or a coordinate that is no number, or
            its group is not one of Camelyon16's.
    """
    outlines = []
    for entry in _parse(path).iter("Annotation"):
        if entry.get("Type") in ("Dot", "PointSet"):
            continue
        name, group = entry.get("Name", "without a name"), entry.get("PartOfGroup")
        if group not in TUMOUR_GROUPS + EXCLUDED_GROUPS:
            known = f"{', '.join(TUMOUR_GROUPS)} (tumour), {', '.join(EXCLUDED_GROUPS)} (no tumour)"
            raise ValueError(f"{path}: {name}: group {group!r}; known are {known}: rename it in ASAP")
        outlines.append((_vertices(entry, f"{path}: {name}"), group in TUMOUR_GROUPS))
    return outlines


def _parse(path: Path) -> ElementTree.Element:
    """Return the root of an XML file that expands no entities: they are declared in a DOCTYPE, which ASAP never has."""
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{path}: {path.stat().st_size} bytes; an annotation has at most {_MOST_BYTES}")
    try:
        text = path.read_text(encoding="utf-8-sig")
        if "<!DOCTYPE" in text:
            raise ValueError("a DOCTYPE, which is refused: it can make a small file expand without end")
        root = ElementTree.fromstring(text)
    except (ValueError, ElementTree.ParseError) as error:
        raise ValueError(f"{path}: expected the XML of ASAP in UTF-8: {error}") from error
    if root.tag != "ASAP_Annotations":
        raise ValueError(f"{path}: expected the element ASAP_Annotations, found {root.tag}")
    return root


def _vertices(entry: ElementTree.Element, where: str) -> np.ndarray:
    points = list(entry.iter("Coordinate"))
    try:
        ordered = sorted(points, key=lambda point: int(point.get("Order", "0")))
        vertices = np.array([[float(point.attrib[axis]) for axis in ("X", "Y")] for point in ordered])
    except (KeyError, ValueError) as error:
        raise ValueError(f"{where}: a vertex without a number as X, Y and Order ({error})") from error
    if len(vertices) < 3:
        raise ValueError(f"{where}: {len(vertices)} vertices; an outline has at least 3: mend or remove it in ASAP")
    if not np.isfinite(vertices).all():
        raise ValueError(f"{where}: a vertex at {vertices[~np.isfinite(vertices).all(1)][0].tolist()}")
    return vertices


def _fill(mask: np.ndarray, polygon: np.ndarray, value: bool) -> None:
    """Set the pixels of `mask` [H, W] whose centres lie in the polygon (pixels of the mask), by the even-odd rule.

    skimage.draw.polygon fills the same pixels, but looks at each vertex for each of them: of an outline of 2,000
    vertices on 2,000 x 2,000 pixels it takes 47 s, this 0.1 s.
    """
    height, width = mask.shape
    left, top = np.clip(np.floor(polygon.min(0)).astype(int), 0, (width, height))
    right, bottom = np.clip(np.ceil(polygon.max(0)).astype(int), 0, (width, height))
    flips = np.zeros((bottom - top, right - left + 1), bool)
    for (x, y), (next_x, next_y) in zip(polygon, np.roll(polygon, -1, 0), strict=True):
        # Each row whose centre the edge crosses changes sides at the first pixel centre on or right of the crossing.
        first, behind = (int(np.clip(math.ceil(end - 0.5), top, bottom)) for end in sorted((y, next_y)))
        rows = np.arange(first, behind)
        crossings = x + (rows + 0.5 - y) * (next_x - x) / (next_y - y) if len(rows) else np.empty(0)
        flips[rows - top, np.clip(np.ceil(crossings - 0.5).astype(int), left, right) - left] ^= True
    inside = np.logical_xor.accumulate(flips, axis=1)[:, :-1]
    mask[top:bottom, left:right][inside] = value


def _read_mask(path: Path, width: int, height: int, most_downsample: float) -> SlideMask:
    try:
        with tifffile.TiffFile(path) as tiff:
            base = tiff.pages.first
            sides = np.array([base.imagewidth / width, base.imagelength / height])
            if np.abs(sides - 1).max() > _MOST_APART:
                found = f"{base.imagewidth} x {base.imagelength}"
                raise ValueError(f"{found} pixels, but the slide has {width} x {height}: it belongs to another slide")
            levels = {round(base.imagewidth / page.imagewidth): page for page in tiff.pages}  # type: ignore[union-attr]
            downsample = max(factor for factor in levels if factor <= most_downsample)
            values = levels[downsample].asarray()
    except (ValueError, RuntimeError, tifffile.TiffFileError) as error:  # codecs raise RuntimeError
        raise ValueError(f"{path}: cannot be used as a mask: {error}") from error
    if values.dtype != np.uint8 or values.ndim != 2:
        raise ValueError(f"{path}: {values.dtype} of shape {values.shape}; a mask is uint8 [height, width]")
    return SlideMask(np.isin(values, TUMOUR_VALUES), downsample)
