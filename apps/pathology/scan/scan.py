"""Slides through the network: a map of tumour probabilities, from overlapping tiles or patch by patch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from medspeed.apps.pathology.model import HALO, PathologyModel, normalised
from medspeed.apps.pathology.slides.masks import SlideMask
from medspeed.apps.pathology.slides.reader import Slide
from medspeed.common.console import hides_bar
from medspeed.common.data.threads import prefetch
from medspeed.common.inference.predictors import Predictor
from medspeed.models.resnet18_fcn import STRIDE

MPP_TOLERANCE = 0.2  # by which a level's pixel may differ from the network's before it is resized
MOST_COARSE = 4.0  # times the network's pixel that a slide's finest may have: beyond, nuclei are not seen
ASSUMED_MPP = 0.25  # um, where neither slide nor network knows: an objective of 40x, as most of Camelyon16


@dataclass(frozen=True)
class View:
    """How a network sees a slide, and how the square cells of its answer lie on it, from the upper left corner on.

    Attributes:
        level: what is read, an index into `Slide.levels`.
        size: (width, height) of that level in its pixels.
        downsample: pixels of level 0 per pixel of that level.
        pitch: pixels of that level that become 32 of the network's; 32 where nothing is resized.
        base_mpp: um per pixel of level 0, known or assumed.
        reason: in one line, why.
    """

    level: int
    size: tuple[int, int]
    downsample: float
    pitch: int
    base_mpp: float
    reason: str

    @property
    def seen_mpp(self) -> float:
        """Um per pixel as the network sees them."""
        return self.base_mpp * self.downsample * self.pitch / STRIDE

    def span(self, pixels: int) -> int:
        """Return how many pixels of the level become so many of the network's, a multiple of 32."""
        return pixels // STRIDE * self.pitch

    def on_tissue(self, tissue: SlideMask, stride: int) -> np.ndarray:
        """Return the cells, `stride` pixels of the network wide, whose centre lies on tissue, [rows, columns] bool."""
        cell = self.span(stride)
        row, column = (
            ((np.arange(math.ceil(side / cell)) + 0.5) * (cell * self.downsample) / tissue.downsample).astype(np.int64)
            for side in self.size[::-1]
        )
        height, width = tissue.mask.shape
        beyond = np.pad(tissue.mask, ((0, 1), (0, 1)))
        return np.asarray(beyond[np.minimum(row, height)[:, None], np.minimum(column, width)])

    def corners(self, cells: np.ndarray, patch_size: int, stride: int) -> np.ndarray:
        """Return the upper left corners, [N, 2] (x, y) in the level, of patches centred on cells (row, column)."""
        patch, cell = self.span(patch_size), self.span(stride)
        return np.asarray(cells[:, ::-1] * cell - -(-(patch - cell) // 2))


@dataclass(frozen=True)
class ProbabilityMap:
    """Probabilities of tumour over a whole slide, cell by cell from its upper left corner on.

    Attributes:
        values: [H, W] float32 in [0, 1], of the patch around each cell's centre; 0 where not scanned ([H, W] bool).
        stride: side of a cell in pixels of level 0, need not be whole.
        tiles: regions of the slide that the network was given.
    """

    values: np.ndarray
    stride: float
    scanned: np.ndarray
    tiles: int


def choose_view(slide: Slide, mpp: float | None) -> View:
    """Return the level whose pixel is nearest to the network's of `mpp` um, resized where it is over 20 percent off.

    The resized side of 32 pixels is a whole number of the level's pixels, so that tiles fit together exactly; the
    network's own pixel size is met to half a pixel in 32.

    Raises:
        ValueError: the slide's finest pixels are more than 4 times as large as the network's.
    """
    level, pitch = 0, STRIDE
    unknown = [name for name, size in (("slide", slide.mpp), ("network", mpp)) if size is None]
    reason = f"level 0 unscaled, unknown pixel size of {' and '.join(unknown)}"
    if slide.mpp is not None and mpp is not None:
        sizes = [slide.mpp * level.downsample for level in slide.levels]
        if sizes[0] > MOST_COARSE * mpp:
            raise ValueError(
                f"{slide.path}: pixels of {sizes[0]:.4g} um are too coarse for a network of {mpp:.4g} um (at most "
                f"{MOST_COARSE:g} times as large): scan the slide at a higher magnification, or correct its pixel size"
            )
        level = min(range(len(sizes)), key=lambda each: abs(math.log(sizes[each] / mpp)))
        far = abs(sizes[level] - mpp) > MPP_TOLERANCE * mpp
        pitch = max(1, round(STRIDE * mpp / sizes[level])) if far else STRIDE
        reason = f"level {level} of {sizes[level]:.4g} um for a network of {mpp:.4g} um" + (", resized" if far else "")
    place = slide.levels[level]
    base_mpp = slide.mpp or mpp or ASSUMED_MPP
    return View(level, (place.width, place.height), place.downsample, pitch, base_mpp, reason)


def scan_slide(
    slide: Slide,
    model: PathologyModel,
    predictor: Predictor,
    device: torch.device,
    tissue: SlideMask,
    view: View,
    stride: int | None = None,
    batch: int | None = None,
) -> ProbabilityMap:
    """Scan the patches whose centre lies on tissue, under a bar of tiles on a terminal.

    A dense scan takes one patch every 32 pixels, many at a time, whose shared features are made once: a tile gives the
    logits that the whole slide in white surroundings would give, those that its own border changes are thrown away.
    With a stride (pixels of the network, a multiple of 32) the network is called for each patch by itself, as MONAI's
    bundle does (MONAI model zoo, pathology_tumor_detection, configs/inference.json). `batch` tiles or patches are in
    one call, by default the model's tiles; twice as many are in memory.
    """
    # Cells of a tile along its side, cells around them, and the tile's side in pixels of the network.
    side, halo, pixels = model.core // STRIDE, HALO // STRIDE, model.tile_size
    if stride is not None:
        side, halo, pixels = 1, 0, model.patch_size
    scanned = view.on_tissue(tissue, stride or STRIDE)
    starts = [np.arange(0, length, side) for length in scanned.shape]
    occupied = np.logical_or.reduceat(np.logical_or.reduceat(scanned, starts[0], 0), starts[1], 1)
    tiles = np.argwhere(occupied) * side
    corners = view.corners(tiles - halo, model.patch_size, stride or STRIDE)
    values = np.zeros(scanned.shape, np.float32)
    found = _probabilities(slide, view, corners, pixels, predictor, device, batch or model.tile_batch)
    for (row, column), probabilities in zip(tiles.tolist(), found, strict=True):
        cells = values[row : row + side, column : column + side]
        cells[...] = probabilities[halo : halo + cells.shape[0], halo : halo + cells.shape[1]]
    return ProbabilityMap(values * scanned, view.span(stride or STRIDE) * view.downsample, scanned, len(tiles))


def _probabilities(
    slide: Slide, view: View, corners: np.ndarray, side: int, predictor: Predictor, device: torch.device, batch: int
) -> Iterator[np.ndarray]:
    """Yield the probabilities, [h, w] float32, of each region, `side` network pixels wide, at corners of the level."""
    base = np.ceil(corners * view.downsample).astype(np.int64)  # reading takes the level's pixel to the left
    size = (view.span(side), view.span(side))
    starts = range(0, len(base), batch)
    batches = (slide.read_many(base[start : start + batch], size, view.level) for start in starts)
    with tqdm(total=len(corners), desc=repr(slide.name), unit="tile", leave=False, disable=hides_bar()) as bar:
        for pixels in prefetch(batches, device):
            images = torch.from_numpy(pixels).to(device).permute(0, 3, 1, 2)
            if size[0] != side:  # averaged where they become fewer
                images = F.interpolate(images.float(), (side, side), mode="bilinear", antialias=True)
                images = images.round_().clamp_(0, 255).byte()
            yield from torch.sigmoid(predictor(normalised(images))[:, 0]).cpu().numpy()
            bar.update(len(pixels))
