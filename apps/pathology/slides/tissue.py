"""Where a slide holds tissue: saturation at low power, split by Otsu's threshold; ink and specks are left out."""

import math

import numpy as np
from scipy.ndimage import binary_dilation
from skimage.filters import threshold_otsu
from skimage.morphology import remove_small_objects

from apps.pathology.slides.layout import SlideMask
from apps.pathology.slides.reader import Slide

MASK_MPP = 8.0  # um: a lymph node section becomes about 2,000 pixels wide, a 224 pixel patch at 0.25 um is 7
_BLOCK = 2048  # pixels of a level read at a time: 12 MiB
# Glass scatters about grey: its saturation stays below 0.05; pale eosin begins near 0.1, most stain lies above 0.2.
MIN_CONTRAST = 0.08  # saturation between the means of Otsu's two classes, less is one class
MAX_THRESHOLD = 0.15  # where tissue fills the field, Otsu would split pale from dark tissue
# Haematoxylin absorbs green a little more than red, eosin far more (optical densities (0.65, 0.70, 0.29) and
# (0.07, 0.99, 0.11): Ruifrok and Johnston 2001), so that no mixture of them has a hue between yellow and blue; ink has.
INK_HUES = (60.0, 238.0)  # degrees
INK_SATURATION = 0.3  # paler bluish pixels are glass
# Of 1, the brightest channel and how far the darkest lies below: dark tissue (keratin, folds) is purple, ink grey.
BLACK, BLACK_SPREAD = 0.5, 0.1
_MIN_INK = 100.0  # um: a pen draws broader and longer; smaller pieces are refraction at torn edges, and pigment
_INK_MARGIN = 16.0  # um by which strokes are widened: their edges blend into the glass
MIN_TISSUE, MAX_HOLE = 100.0, 100.0  # um: the side of the square below which specks go and holes are filled


def tissue_mask(slide: Slide, assumed_mpp: float | None = None) -> SlideMask:
    """Find the tissue of a slide stained with haematoxylin and eosin.

    Tissue is what is more saturated than Otsu's threshold. Blue, green and black ink is left out (red ink looks like
    eosin and stays), so are pieces smaller than a square of 100 um; holes smaller than that are filled. It is looked
    for at about 8 um per pixel, the nearest whole multiple of a level's pixel.

    Args:
        slide: of any number of levels; with few of them a large one is read whole, block by block.
        assumed_mpp: um per pixel of level 0 where the file does not say.

    Raises:
        ValueError: the pixel size is known from neither.
    """
    base = slide.mpp if slide.mpp is not None else assumed_mpp
    if base is None:
        raise ValueError(f"{slide.path}: the file gives no pixel size: pass assumed_mpp (0.25 um at 40x, 0.5 at 20x)")
    image, downsample = low_power(slide, MASK_MPP / base)
    side = base * downsample
    ink = _ink(image, side)
    saturation = _saturation(image)
    threshold = split(saturation[~ink])
    if threshold is None:
        return SlideMask(np.zeros(ink.shape, bool), downsample)
    tissue = _without_small((saturation > threshold) & ~ink, (MIN_TISSUE / side) ** 2)
    tissue = ~_without_small(~tissue, (MAX_HOLE / side) ** 2) & ~ink
    return SlideMask(tissue, downsample)


def low_power(slide: Slide, downsample: float) -> tuple[np.ndarray, float]:
    """Return the slide about `downsample` times smaller, [H, W, 3] uint8, and by how much it is.

    The smallest level that is large enough is averaged over whole squares of its pixels; at the right and lower edge
    white is averaged in.
    """
    fitting = [index for index, level in enumerate(slide.levels) if level.downsample <= downsample * 1.01]
    index = max(fitting, default=0)
    level = slide.levels[index]
    factor = max(1, round(downsample / level.downsample))
    rows, columns = math.ceil(level.height / factor), math.ceil(level.width / factor)
    image = np.empty((rows, columns, 3), np.uint8)
    step = max(1, _BLOCK // factor)
    for row in range(0, rows, step):
        for column in range(0, columns, step):
            x, y = (math.ceil(place * factor * level.downsample) for place in (column, row))
            high, wide = min(step, rows - row), min(step, columns - column)
            block = slide.read(x, y, wide * factor, high * factor, index)
            squares = block.reshape(high, factor, wide, factor, 3)
            image[row : row + high, column : column + wide] = np.rint(squares.mean((1, 3)))
    return image, factor * level.downsample


def split(saturation: np.ndarray) -> float | None:
    """Return Otsu's threshold on saturations (0 to 1, any shape), or None where they do not fall into two classes.

    Source: Otsu 1979, over 256 bins. It is lowered to 0.15 where tissue fills the field.
    """
    counts = np.bincount(np.rint(saturation.ravel() * 255).astype(np.int64), minlength=256)
    if np.count_nonzero(counts) < 2:
        return None
    best = int(threshold_otsu(hist=counts))
    below, above = (np.average(values, weights=counts[values]) for values in np.split(np.arange(256), [best + 1]))
    return min((best + 0.5) / 255, MAX_THRESHOLD) if above - below >= MIN_CONTRAST * 255 else None


def _saturation(image: np.ndarray) -> np.ndarray:
    """Return HSV saturation, [H, W] float32, 0 to 1."""
    most, least = image.max(-1).astype(np.float32), image.min(-1).astype(np.float32)
    return np.asarray((most - least) / np.maximum(most, 1))


def _ink(image: np.ndarray, side: float) -> np.ndarray:
    """Return where blue, green or black ink lies, with a margin; [H, W] bool. `side`: um of a pixel."""
    red, green, blue = (image[..., channel].astype(np.float32) for channel in range(3))
    most, spread = image.max(-1), np.maximum(np.ptp(image, -1).astype(np.float32), 1)
    # Hue by sectors, for red the least channel or green the greatest: elsewhere it is outside INK_HUES.
    hue = np.where(green >= blue, 120 + 60 * (blue - red) / spread, 240 + 60 * (red - green) / spread)
    first, last = INK_HUES
    coloured = (green > np.minimum(red, blue)) & (red <= np.maximum(green, blue)) & (first <= hue) & (hue <= last)
    found = (coloured & (_saturation(image) > INK_SATURATION)) | ((most < BLACK * 255) & (spread < BLACK_SPREAD * 255))
    found = _without_small(found, (_MIN_INK / side) ** 2)
    margin = round(_INK_MARGIN / side)
    return binary_dilation(found, np.ones((3, 3), bool), iterations=margin) if margin and found.any() else found


def _without_small(mask: np.ndarray, least: float) -> np.ndarray:
    """Return the mask without connected pieces (8 neighbours) of fewer than `least` pixels."""
    return np.asarray(remove_small_objects(mask, max_size=math.ceil(least) - 1, connectivity=2))
