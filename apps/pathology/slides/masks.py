"""Where a slide holds tissue (saturation at low power, split by Otsu's threshold), and where tumour."""

import math
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from medspeed.apps.pathology.slides.camelyon import SlideEntry
from medspeed.apps.pathology.slides.layout import DAMAGE
from medspeed.apps.pathology.slides.reader import Slide
from medspeed.common.console import hides_bar
from medspeed.common.host_memory import free_memory

ASSUMED_MPP = 0.25  # um, where neither slide nor network knows: an objective of 40x, as most of Camelyon16
MPP_TOLERANCE = 0.2  # by which a level's pixel may differ from the network's before it is resized
MASK_MPP = 8.0  # um: a lymph node section becomes about 2,000 pixels wide, a 224 pixel patch at 0.25 um is 7
_BLOCK = 2048  # pixels of a level read at a time: 12 MiB
_BYTES = 32  # that a pixel of the mask takes while tissue is told from glass
# Glass scatters about grey: its saturation stays below 0.05; pale eosin begins near 0.1, most stain lies above 0.2.
MIN_CONTRAST = 0.08  # saturation between the means of Otsu's two classes, less is one class
MAX_THRESHOLD = 0.15  # where tissue fills the field, Otsu would split pale from dark tissue
SOLE_THRESHOLD = 0.08  # where all is one class: glass, or tissue
# Haematoxylin absorbs green a little more than red, eosin far more (optical densities (0.65, 0.70, 0.29) and
# (0.07, 0.99, 0.11): Ruifrok and Johnston 2001), so that no mixture of them has a hue between yellow and blue; ink has.
INK_HUES = (60.0, 238.0)  # degrees
INK_SATURATION = 0.3  # paler bluish pixels are glass
# Of 1, the brightest channel and how far the darkest lies below: dark tissue (keratin, folds) is purple, ink grey.
BLACK, BLACK_SPREAD = 0.5, 0.1
_MIN_INK = 100.0  # um: a pen draws broader and longer; smaller pieces are refraction at torn edges, and pigment
_INK_MARGIN = 16.0  # um by which strokes are widened: their edges blend into the glass
MIN_TISSUE, MAX_HOLE = 100.0, 100.0  # um: the side of the square below which specks go and holes are filled
# The latter are no tumour though an outline around them says so. Source: the README of the CAMELYON16 data.
TUMOUR_GROUPS, EXCLUDED_GROUPS = ("Tumor", "_0", "_1"), ("_2", "Exclusion")
# In the masks of the public bucket 2 is tumour and 1 normal tissue (source: the evaluation code published with them);
# in those that ASAP makes of Camelyon16's outlines 1 is tumour, in those of the challenge's first release 255.
TUMOUR, TUMOUR_ALONE = 2, (1, 255)
_MOST_APART = 0.02  # by which the sides of a slide and of its mask may differ: scanners pad slides to whole tiles


@dataclass(frozen=True, eq=False)
class SlideMask:
    """Where a slide holds tissue, or tumour: a mask [H, W] bool, of which a pixel spans `downsample` of level 0."""

    mask: np.ndarray
    downsample: float


def tissue_mask(slide: Slide, assumed_mpp: float) -> SlideMask:
    """Find the tissue of a slide stained with haematoxylin and eosin.

    Tissue is what is more saturated than Otsu's threshold. Blue, green and black ink is left out (red ink looks like
    eosin and stays), so are pieces smaller than a square of 100 um; holes smaller than that are filled. It is looked
    for at about 8 um per pixel. `assumed_mpp` is um per pixel of level 0 where the file does not say.
    """
    base = slide.mpp or assumed_mpp
    image, downsample = low_power(slide, MASK_MPP / base)
    side = base * downsample
    spread = np.ptp(image, -1).astype(np.float32)
    saturation = spread / np.maximum(image.max(-1).astype(np.float32), 1)  # HSV's, 0 to 1
    ink = _ink(image, spread, saturation, side)
    tissue = _without_small((saturation > split(saturation[~ink])) & ~ink, (MIN_TISSUE / side) ** 2)
    tissue = ~_without_small(~tissue, (MAX_HOLE / side) ** 2) & ~ink
    return SlideMask(tissue, downsample)


def low_power(slide: Slide, downsample: float) -> tuple[np.ndarray, float]:
    """Return the slide about `downsample` times smaller, [H, W, 3] uint8, and by how much it is.

    The smallest level that is large enough is averaged over whole squares of its pixels, block by block; at the right
    and lower edge white is averaged in. A ValueError says that there is not the memory for it.
    """
    index = max((index for index, each in enumerate(slide.levels) if each.downsample <= downsample * 1.01), default=0)
    level = slide.levels[index]
    factor = max(1, round(downsample / level.downsample))
    rows, columns = math.ceil(level.height / factor), math.ceil(level.width / factor)
    require_memory(f"{slide.path}: reduced {factor * level.downsample:g}-fold", columns, rows)
    image = np.empty((rows, columns, 3), np.uint8)
    step = max(1, _BLOCK // factor)
    for row in tqdm(range(0, rows, step), "finding tissue", unit="row", leave=False, disable=hides_bar(), delay=2):
        for column in range(0, columns, step):
            x, y = (math.ceil(place * factor * level.downsample) for place in (column, row))
            high, wide = min(step, rows - row), min(step, columns - column)
            block = slide.read(x, y, wide * factor, high * factor, index)
            squares = block.reshape(high, factor, wide, factor, 3)
            image[row : row + high, column : column + wide] = np.rint(squares.mean((1, 3)))
    return image, factor * level.downsample


def require_memory(what: str, width: int, height: int, each: int = _BYTES) -> None:
    """Raise a ValueError where a mask of so many bytes for each pixel would take more memory than is free."""
    if (needed := width * height * each) > (free := free_memory(needed)):
        found = f"{width} x {height} pixels and needs {needed / 2**30:.1f} GiB, but {free / 2**30:.1f} are free"
        remedy = "see whether its pixel size is right, or take a machine with more memory"
        raise ValueError(f"{what} it has {found}: {remedy}")


def split(saturation: np.ndarray) -> float:
    """Return Otsu's threshold on saturations (0 to 1, any shape), 0.15 at most; 0.08 where they are one class."""
    from skimage.filters import threshold_otsu  # here, as what follows: with its tables drawn, training has no need

    counts = np.bincount(np.rint(saturation.ravel() * 255).astype(np.int64), minlength=256)
    if np.count_nonzero(counts) < 2:
        return SOLE_THRESHOLD
    best = int(threshold_otsu(hist=counts))
    below, above = (np.average(values, weights=counts[values]) for values in np.split(np.arange(256), [best + 1]))
    return min((best + 0.5) / 255, MAX_THRESHOLD) if above - below >= MIN_CONTRAST * 255 else SOLE_THRESHOLD


def _ink(image: np.ndarray, spread: np.ndarray, saturation: np.ndarray, side: float) -> np.ndarray:
    """Return where blue, green or black ink lies, with a margin, [H, W] bool; `side`: um of a pixel."""
    from scipy.ndimage import binary_dilation

    red, green, blue = (image[..., channel].astype(np.float32) for channel in range(3))
    # Hue by sectors, for red the least channel or green the greatest: elsewhere it is outside INK_HUES.
    most = np.maximum(spread, 1)
    hue = np.where(green >= blue, 120 + 60 * (blue - red) / most, 240 + 60 * (red - green) / most)
    first, last = INK_HUES
    coloured = (green > np.minimum(red, blue)) & (red <= np.maximum(green, blue)) & (first <= hue) & (hue <= last)
    black = (image.max(-1) < BLACK * 255) & (spread < BLACK_SPREAD * 255)
    found = _without_small((coloured & (saturation > INK_SATURATION)) | black, (_MIN_INK / side) ** 2)
    margin = round(_INK_MARGIN / side)
    return binary_dilation(found, np.ones((3, 3), bool), iterations=margin) if margin and found.any() else found


def _without_small(mask: np.ndarray, least: float) -> np.ndarray:
    """Return the mask without connected pieces (8 neighbours) of fewer than `least` pixels."""
    from skimage.morphology import remove_small_objects

    return np.asarray(remove_small_objects(mask, max_size=math.ceil(least) - 1, connectivity=2))


def tumour_mask(entry: SlideEntry, width: int, height: int, most_downsample: float) -> SlideMask:
    """Return where the tumour of a slide lies, from its outlines or its mask.

    A mask is a TIFF pyramid of uint8 in which 2, or where there is no 2, 1 or 255 is tumour; of the levels at least as
    fine as `most_downsample` (1 or more) the coarsest is read. Width and height of the slide are in pixels of level 0.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: there is neither, or it is damaged, marks nothing, or belongs to another slide.
    """
    try:
        if entry.marks is None:
            raise ValueError("neither a mask nor an annotation shows where the tumour is")
        if entry.marks.suffix == ".xml":
            downsample = 2 ** int(math.log2(most_downsample))
            size = math.ceil(width / downsample), math.ceil(height / downsample)
            require_memory(f"{entry.marks}: reduced {downsample}-fold", *size)
            found = SlideMask(rasterise(entry.marks, *size, downsample), downsample)
        else:
            found = _read_mask(entry.marks, width, height, most_downsample)
        if not found.mask.any():
            said = f"marks no tumour as large as a pixel reduced {found.downsample:g}-fold, and the slide has some"
            raise ValueError(f"{entry.marks} {said}: mend the marks, or move the slide away")
        return found
    except ValueError as error:
        raise ValueError(f"{entry.path}: {error}") from error


def rasterise(path: Path, width: int, height: int, downsample: float) -> np.ndarray:
    """Return where the tumour of an annotation file lies, [height, width] bool: in tumour, in nothing excluded.

    A pixel is `downsample` pixels of level 0, and belongs to an outline if its centre is inside by the even-odd rule.
    """
    mask = np.zeros((height, width), bool)
    for outline, tumour in sorted(read_asap(path), key=lambda found: not found[1]):  # what is excluded, last
        polygon = outline / downsample
        outside = ((polygon < -1) | (polygon > np.array([width, height]) + 1)).any(1)
        if outside.any():
            (x, y), size = outline[outside][0], f"about {width * downsample:.0f} x {height * downsample:.0f} pixels"
            what = f"a vertex at ({x:g}, {y:g}) is outside the slide, {size} at level 0"
            raise ValueError(f"{path}: {what}: does the annotation belong to another slide?")
        _fill(mask, polygon, tumour)
    return mask


def read_asap(path: Path) -> list[tuple[np.ndarray, bool]]:
    """Read the closed outlines of an annotation file of ASAP; marks that enclose nothing (dots) are passed over.

    Of each come its vertices [K, 2] float64, (x, y) in pixels of level 0, and whether it is tumour, or excluded.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no XML of ASAP, an outline is damaged, or its group is not one of Camelyon16's.
    """
    try:
        root = ElementTree.parse(path).getroot()  # expat refuses entities that expand without end
    except (ElementTree.ParseError, LookupError, ValueError) as error:  # the others: of its encoding
        raise ValueError(f"{path}: expected the XML of ASAP: {error}") from error
    if root.tag != "ASAP_Annotations":
        raise ValueError(f"{path}: expected the element ASAP_Annotations, found {root.tag}")
    outlines = []
    for entry in root.iter("Annotation"):
        if entry.get("Type") in ("Dot", "PointSet"):
            continue
        name, group = entry.get("Name", "without a name"), entry.get("PartOfGroup")
        if group not in TUMOUR_GROUPS + EXCLUDED_GROUPS:
            known = f"{', '.join(TUMOUR_GROUPS)} (tumour), {', '.join(EXCLUDED_GROUPS)} (no tumour)"
            raise ValueError(f"{path}: {name}: group {group!r}; known are {known}: rename it in ASAP")
        try:
            points = sorted(entry.iter("Coordinate"), key=lambda point: int(point.get("Order", "0")))
            vertices = np.array([[float(point.attrib[axis]) for axis in ("X", "Y")] for point in points])
        except (KeyError, ValueError) as error:
            raise ValueError(f"{path}: {name}: a vertex without a number as X, Y and Order ({error})") from error
        if len(vertices) < 3 or not np.isfinite(vertices).all():
            raise ValueError(f"{path}: {name}: {len(vertices)} vertices; an outline needs 3, all finite: fix it")
        outlines.append((vertices, group in TUMOUR_GROUPS))
    return outlines


def _fill(mask: np.ndarray, polygon: np.ndarray, value: bool) -> None:
    """Set the pixels of `mask` [H, W] with centres in the polygon; skimage's, 500 times slower, adds those on edges."""
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
    import tifffile

    try:
        with tifffile.TiffFile(path) as tiff:
            base = tiff.pages.first
            sides = np.array([base.imagewidth / width, base.imagelength / height])
            if np.abs(sides - 1).max() > _MOST_APART:
                found = f"{base.imagewidth} x {base.imagelength}"
                raise ValueError(f"{found} pixels, but the slide has {width} x {height}: it belongs to another slide")
            pages: list[Any] = list(tiff.pages)
            levels, whole = dict[int, Any](), (base.imagewidth, base.imagelength)
            for page in pages:
                factor, own = round(base.imagewidth / page.imagewidth), (page.imagewidth, page.imagelength)
                # Padded, or no whole number of times smaller, it does not lie where its pixels would say.
                if np.abs(np.multiply(own, factor) - whole).max() <= factor:
                    levels[factor] = page
            downsample = max(factor for factor in levels if factor <= most_downsample)
            page = levels[downsample]
            require_memory("its level", page.imagewidth, page.imagelength, 4)
            values = page.asarray()
        if values.dtype != np.uint8 or values.ndim != 2:
            raise ValueError(f"{values.dtype} of shape {values.shape}; a mask is uint8 [height, width]")
    except DAMAGE as error:
        raise ValueError(f"{path}: cannot be used as a mask: {error}") from error
    return SlideMask(values == TUMOUR if (values == TUMOUR).any() else np.isin(values, TUMOUR_ALONE), downsample)
