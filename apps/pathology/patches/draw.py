"""Patches drawn from annotated slides, half of them tumour where a slide has any."""

import hashlib
import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from medspeed.apps.pathology.config import PathologyConfig
from medspeed.apps.pathology.patches.table import PatchTable
from medspeed.apps.pathology.scan.scan import ASSUMED_MPP
from medspeed.apps.pathology.slides.camelyon import SlideEntry
from medspeed.apps.pathology.slides.masks import SlideMask, tissue_mask, tumour_mask
from medspeed.apps.pathology.slides.reader import Slide, open_slide
from medspeed.common.data.threads import map_in_threads
from medspeed.common.training.config import decided

TUMOUR_SHARE = 0.5  # of a tumour patch's area, at least: its label is then beyond doubt
_PIXELS_PER_PATCH = 8  # along a side of a patch, at least, of the mask that is looked at
_MASK_PIXELS = 2**26  # that a mask has at most: a coarser one is taken of larger slides
_PLACES = 2**21  # pixels of a mask that patches are drawn from at most, evenly spread


def sample_patches(entries: Sequence[SlideEntry], config: PathologyConfig, progress: bool = False) -> PatchTable:
    """Draw patches from annotated slides: half of those of a slide with tumour show tumour, the others normal tissue.

    A tumour patch has its centre in the tumour, and tumour covers half of it at least. A normal patch has its centre
    in tissue, and there is no tumour in it nor within a patch's side around it; shares are counted to a pixel of the
    mask, an eighth of a patch or less. No patch is drawn twice, none leaves the slide; of slides that are marked in
    part only tumour is drawn. What is drawn depends on the seed and the slide's name alone; where a slide has less
    room it gives fewer patches than `config` (size and patches per slide decided) says.

    Raises:
        FileNotFoundError: a slide, its mask or its annotation is missing.
        ValueError: one is damaged, a slide with tumour has neither, or there is no room for a single patch.
    """
    ordered, size = sorted(entries, key=lambda entry: entry.name), decided(config.patch_size)
    draw = partial(_draw, config=config, per_slide=decided(config.patches_per_slide), size=size)
    pairs = map_in_threads(draw, ordered, "drawing patches", config.workers, progress)
    parts = [corners for pair in pairs for corners in pair]
    place = np.repeat(np.arange(len(parts)), [len(corners) for corners in parts])
    if not len(place):
        raise ValueError(f"{len(entries)} slides: no room for a patch of {size} pixels; choose a smaller --patch-size")
    return PatchTable(
        files=tuple(entry.path for entry in ordered),
        file=(place // 2).astype(np.int32),
        corner=np.concatenate(parts).astype(np.int32),
        label=(1 - place % 2).astype(np.uint8),
        size=size,
    )


def _draw(entry: SlideEntry, config: PathologyConfig, per_slide: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the corners of a slide's tumour and of its normal patches, each [M, 2] int64."""
    slide, named = open_slide(entry.path, config.reader), hashlib.sha256(entry.name.encode()).digest()[:8]
    generator = np.random.default_rng([config.seed, int.from_bytes(named)])
    base, wanted = slide.levels[0], per_slide // 2 if entry.tumour else 0
    positive = negative = np.empty((0, 2), np.int64)
    if entry.tumour:
        finest = max(1.0, size / _PIXELS_PER_PATCH, math.sqrt(base.width * base.height / _MASK_PIXELS))
        tumour = tumour_mask(entry, base.width, base.height, finest)
        sums = _sums(tumour.mask)
        centres = _centres(tumour)
        fitting = centres[_shares(sums, tumour.downsample, centres, size) >= TUMOUR_SHARE]
        positive = _pick(fitting, tumour.downsample, slide, size, wanted, generator)
    if not entry.part:
        tissue = tissue_mask(slide, assumed_mpp=ASSUMED_MPP)
        centres = _centres(tissue)
        if entry.tumour:
            # A patch, a patch's side around it, and the mask pixel within which `_pick` moves the centre.
            centres = centres[_shares(sums, tumour.downsample, centres, 3 * size + tissue.downsample) == 0]
        negative = _pick(centres, tissue.downsample, slide, size, per_slide - wanted, generator)
    return positive, negative


def _sums(mask: np.ndarray) -> np.ndarray:
    """Return how many pixels of a mask lie above and left of each corner, [H + 1, W + 1] int32."""
    sums = np.zeros((mask.shape[0] + 1, mask.shape[1] + 1), np.int32)
    np.cumsum(mask, 0, np.int32, out=sums[1:, 1:])
    np.cumsum(sums[1:, 1:], 1, np.int32, out=sums[1:, 1:])
    return sums


def _shares(sums: np.ndarray, downsample: float, centres: np.ndarray, side: float) -> np.ndarray:
    """Return which share of each square around centres [N, 2] a mask covers; squares are widened to its pixels."""
    first = np.floor((centres - side / 2) / downsample).astype(np.int64)
    behind = np.ceil((centres + side / 2) / downsample).astype(np.int64)
    most = np.array(sums.shape)[::-1] - 1
    (left, top), (right, bottom) = np.clip(first, 0, most).T, np.clip(behind, 0, most).T
    inside = sums[bottom, right] - sums[top, right] - sums[bottom, left] + sums[top, left]
    return np.asarray(inside / (behind - first).prod(1))


def _centres(where: SlideMask) -> np.ndarray:
    """Return the centres of pixels of a mask, evenly spread, [N, 2] float64 (x, y) in pixels of level 0."""
    places = np.flatnonzero(where.mask)
    places = places[:: -(-len(places) // _PLACES) or 1]
    return (np.stack(np.divmod(places, where.mask.shape[1])[::-1], 1) + 0.5) * where.downsample


def _pick(
    centres: np.ndarray, downsample: float, slide: Slide, size: int, count: int, generator: np.random.Generator
) -> np.ndarray:
    """Return the corners, [M, 2] int64, of `count` patches (or all) whose centre is in a mask pixel of `centres`."""
    side = max(1, int(downsample))
    origins = np.floor(centres - downsample / 2).astype(np.int64) - size // 2
    most = np.array([slide.levels[0].width, slide.levels[0].height]) - size
    # Of pixels at an edge all of whose places lie within are taken, so that each number below names another patch.
    origins = origins[((origins >= 0) & (origins + side - 1 <= most)).all(1)]
    places = len(origins) * side**2
    numbers = generator.choice(places, min(count, places), replace=False) if places else np.empty(0, np.int64)
    pixel, within = np.divmod(numbers, side**2)
    return np.asarray(origins[pixel] + np.stack(np.divmod(within, side)[::-1], 1))
