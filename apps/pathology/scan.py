"""Slides through the network: a map of tumour probabilities, from overlapping tiles or patch by patch."""

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from apps.pathology.model import HALO, PathologyModel, normalised
from apps.pathology.tissue import TissueMask
from apps.pathology.view import CellGrid, View, cell_grid, choose_view
from common.data.ahead import one_ahead
from common.data.slides import Slide
from common.inference.predictors import Predictor
from models.resnet18_fcn import STRIDE

PATCH_STRIDE = 64  # Source: MONAI's bundle pathology_tumor_detection, one patch per pixel of level 6


@dataclass(frozen=True)
class ProbabilityMap:
    """Probabilities of tumour over a whole slide, cell by cell from its upper left corner on.

    Attributes:
        values: [H, W] float32 in [0, 1], of the patch around each cell's centre; 0 where not scanned.
        stride: side of a cell in pixels of level 0, need not be whole.
        offset: of the centre of cell (0, 0) from the slide's left and upper edge in pixels of level 0.
        scanned: [H, W] bool.
        tiles: regions of the slide that the network was given.
    """

    values: np.ndarray
    stride: float
    offset: float
    scanned: np.ndarray
    tiles: int


def dense_scan(
    slide: Slide,
    model: PathologyModel,
    predictor: Predictor,
    device: torch.device,
    tissue: TissueMask,
    view: View | None = None,
    progress: bool = True,
) -> ProbabilityMap:
    """Scan patches, one every 32 pixels, whose centre lies on tissue, many at a time: shared features are made once.

    A tile gives the logits that the whole slide in white surroundings would give: those that its own border changes
    are thrown away. Two batches of `model.tile_batch` tiles are in memory, one in the network and one being read.

    Args:
        slide: to be scanned.
        model: sizes of patch and tile.
        predictor: of the network.
        device: where it computes.
        tissue: where to look.
        view: how the slide is seen, by default as `choose_view` chooses.
        progress: show a bar of tiles with the time left.
    """
    grid = cell_grid(slide, view or choose_view(slide, model.mpp), model.patch_size, STRIDE)
    scanned = grid.centred(tissue)
    side = model.core // STRIDE  # cells
    tiles = np.argwhere(_any_in_squares(scanned, side)) * side
    halo = HALO // STRIDE
    corners = grid.corners(tiles - halo)
    values = np.zeros(scanned.shape, np.float32)
    batches = _probabilities(slide, grid, corners, model.tile_size, predictor, device, model.tile_batch, progress)
    for (row, column), found in zip(tiles.tolist(), batches, strict=True):
        cells = values[row : row + side, column : column + side]
        cells[...] = found[halo : halo + cells.shape[0], halo : halo + cells.shape[1]]
    return _as_map(grid, values * scanned, scanned, len(tiles))


def patch_scan(
    slide: Slide,
    model: PathologyModel,
    predictor: Predictor,
    device: torch.device,
    tissue: TissueMask,
    view: View | None = None,
    progress: bool = True,
    *,
    stride: int = PATCH_STRIDE,
    batch: int,
) -> ProbabilityMap:
    """Scan patch by patch, as MONAI's bundle does: one call of the network for each centre that lies on tissue.

    Args:
        slide: to be scanned.
        model: size of the patches.
        predictor: of the network.
        device: where it computes.
        tissue: where to look.
        view: how the slide is seen, by default as `choose_view` chooses.
        progress: show a bar of patches with the time left.
        stride: pixels of the network between two patches, a multiple of 32.
        batch: patches in one call; twice as many are in memory.

    Source:
        MONAI model zoo, pathology_tumor_detection, configs/inference.json.
    """
    grid = cell_grid(slide, view or choose_view(slide, model.mpp), model.patch_size, stride)
    scanned = grid.centred(tissue)
    cells = np.argwhere(scanned)
    found = _probabilities(slide, grid, grid.corners(cells), model.patch_size, predictor, device, batch, progress)
    values = np.zeros(scanned.shape, np.float32)
    values[scanned] = [float(each[0, 0]) for each in found]
    return _as_map(grid, values, scanned, len(cells))


def _as_map(grid: CellGrid, values: np.ndarray, scanned: np.ndarray, tiles: int) -> ProbabilityMap:
    return ProbabilityMap(values, grid.stride, grid.stride / 2, scanned, tiles)


def _any_in_squares(mask: np.ndarray, side: int) -> np.ndarray:
    """Return which squares of `side` x `side` hold something, [ceil(H / side), ceil(W / side)] bool."""
    starts = [np.arange(0, length, side) for length in mask.shape]
    return np.asarray(np.logical_or.reduceat(np.logical_or.reduceat(mask, starts[0], 0), starts[1], 1))


def _probabilities(
    slide: Slide,
    grid: CellGrid,
    corners: np.ndarray,
    side: int,
    predictor: Predictor,
    device: torch.device,
    batch: int,
    progress: bool,
) -> Iterator[np.ndarray]:
    """Yield the probabilities, [h, w] float32, of each region, `side` network pixels wide, at corners of the level."""
    batches = _regions(slide, grid.view, corners, side // STRIDE * grid.view.pitch, batch)
    # Closed on the way out: no thread may read from the slide when its caller closes it after an error.
    ahead = cast(Generator[np.ndarray, None, None], one_ahead(batches, device))
    bar = tqdm(total=len(corners), desc=slide.name, unit="tile", leave=False, disable=not progress)
    with bar, closing(ahead) as regions:
        for pixels in regions:
            images = normalised(_resized(torch.from_numpy(pixels).to(device), side))
            yield from torch.sigmoid(predictor(images)[:, 0]).cpu().numpy()
            bar.update(len(pixels))


def _regions(slide: Slide, view: View, corners: np.ndarray, side: int, batch: int) -> Generator[np.ndarray, None, None]:
    """Yield the pixels, [B, side, side, 3] uint8, at corners [N, 2] in the view's level, `batch` regions at a time."""
    base = np.ceil(corners * view.downsample).astype(np.int64)  # reading takes the level's pixel to the left
    for start in range(0, len(base), batch):
        yield slide.read_many(base[start : start + batch], (side, side), view.level)


def _resized(pixels: torch.Tensor, side: int) -> torch.Tensor:
    """Return images [B, Y, X, 3] uint8 with another side; pixels are averaged where they become fewer."""
    if pixels.shape[1] == side:
        return pixels
    images = F.interpolate(pixels.permute(0, 3, 1, 2).float(), (side, side), mode="bilinear", antialias=True)
    return images.round_().clamp_(0, 255).byte().permute(0, 2, 3, 1)
