"""From prepared cases to label maps: sliding-window logits, mapped back to the grid of the scan's file."""

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from medspeed.common.data.dataset import Case
from medspeed.common.data.geometry import Box, Shape, WorkingGrid, box_above
from medspeed.common.data.preparation import PreparedCase
from medspeed.common.data.resample import resample, resample_sheared
from medspeed.common.data.volumes import read_volume
from medspeed.common.inference.labels import LabelScheme, Region, dice_counts, painted
from medspeed.common.inference.model import VolumeModel
from medspeed.common.inference.postprocessing import Steps, logit_bars
from medspeed.common.inference.predictors import Predictor, torch_predictor
from medspeed.common.inference.windows import sliding_windows

Carry = Callable[[torch.Tensor], torch.Tensor]  # a volume on the working grid to its place in the file


def predict_logits(
    image: torch.Tensor, predictor: Predictor, model: VolumeModel, window: Shape | None = None
) -> torch.Tensor:
    """Return the logits [K, X, Y, Z] of a prepared image [C, X, Y, Z]; K == 1 for two exclusive classes.

    Another `window` than the model's needs a predictor that takes any.
    """
    overlap, batch, difference = model.overlap, model.window_batch, model.labelling.exclusive
    roi = window or model.window_size
    return sliding_windows(image, predictor, roi, overlap=overlap, batch_size=batch, difference=difference)


def predict_labels(case: PreparedCase, predictor: Predictor, model: VolumeModel, device: torch.device) -> np.ndarray:
    """Return the label map of a prepared case on the grid of its file, uint8 [X, Y, Z], computed on a device."""
    logits = predict_logits(case.image.to(device, torch.float32), predictor, model)
    return thresholded(logits, case.grid, model.labelling, model.postprocessing)


def thresholded(logits: torch.Tensor, grid: WorkingGrid, labelling: LabelScheme, steps: Steps = ()) -> np.ndarray:
    """Return the label map of logits from `predict_logits` on the grid of the file, by the thresholds of the steps."""
    bars = torch.tensor(logit_bars(labelling, steps)[-len(logits) :], dtype=logits.dtype, device=logits.device)
    logits = logits - bars[:, None, None, None] if bars.any() else logits
    return restore_labels(logits, grid, None if labelling.exclusive else labelling.regions)


def working_counts(
    cases: Sequence[PreparedCase], network: nn.Module, model: VolumeModel, check: Callable[[], None]
) -> list[torch.Tensor]:
    """Return, for each labelled case, the counts [R, 2] of its Dice on the working grid (see `dice_counts`).

    They stay on the network's device. Before each case `check` is called, which raises if the run should stop.
    """
    device = next(network.parameters()).device
    predictor = torch_predictor(network.eval(), model.precision, tf32=True)
    counts = []
    for case in cases:
        check()
        assert case.label is not None
        logits = predict_logits(case.image.to(device, non_blocking=True), predictor, model)
        truth = case.label.to(device, non_blocking=True)
        counts.append(dice_counts(model.labelling.labels_of(logits), truth, model.labelling.regions))
    return counts


def read_truth(case: Case) -> torch.Tensor:
    """Read the label map of a labelled case, uint8 [X, Y, Z] on the grid of its file; see `read_volume`."""
    assert case.label is not None, case
    return torch.from_numpy(read_volume(case.label).voxels.astype(np.uint8))


def sample_windows(prepared: Sequence[PreparedCase], model: VolumeModel, most: int = 3) -> torch.Tensor:
    """Return the central windows of some cases, [N, C, *window_size] float32, zero-padded for smaller cases."""
    windows = []
    for case in prepared[:most]:
        padding: list[int] = []  # of the last axis first; what is below 0 cuts off
        for have, want in zip(case.image.shape[1:], model.window_size, strict=True):
            start = max(have - want, 0) // 2
            padding = [-start, want - have + start, *padding]
        windows.append(F.pad(case.image.float(), padding))
    return torch.stack(windows)


def restore_labels(logits: torch.Tensor, grid: WorkingGrid, regions: Sequence[Region] | None = None) -> np.ndarray:
    """Interpolate logits linearly to the grid of the file and take the class with the highest, or paint the regions.

    As MONAI's `Invertd(nearest_interp=False)` on the logits, then argmax. Outside the crop MONAI pads all classes
    with zeros, which is background; so a voxel is foreground only where some class exceeds background in one of the
    voxels around it. Only the box of those is interpolated, class by class, as the difference class - background: no
    volume of logits on the file's grid ever exists.

    Args:
        logits: [K, X, Y, Z] on the crop of the grid, any float dtype, any device; K >= 2 classes, or K == 1: the
            difference foreground - background; with `regions`, which may overlap, one for each of them.
        grid: as the preparation returns it.
        regions: None for classes.

    Returns:
        Labels [X, Y, Z] uint8 in the file's axes, Fortran order.
    """
    assert tuple(logits.shape[1:]) == grid.crop_shape, (tuple(logits.shape), grid.crop_shape)
    labels = np.zeros(grid.native_shape, np.uint8, order="F")
    over_zero = len(logits) == 1 or regions is not None  # else over the first class, the background
    if over_zero:
        box = box_above(logits, 0)
    else:
        foreground = logits[1] if len(logits) == 2 else logits[1:].amax(dim=0)
        box = box_above((foreground > logits[0]).view(torch.uint8)[None], 0)
    if box is None:
        return labels
    box = tuple((start + first, start + stop) for start, (first, stop) in zip(grid.crop_start, box, strict=True))
    start, padding = [], list[int]()  # of the box and one voxel around it: of the last axis first; below 0 it cuts off
    for (first, stop), crop, size, whole in zip(box, grid.crop_start, grid.crop_shape, grid.shape, strict=True):
        low, high = max(first - 1, 0), min(stop + 1, whole)
        start.append(low)
        padding = [crop - low, high - crop - size, *padding]
    place, carry = (_separable_way if grid.separable else _sheared_way)(grid, box, start)
    if any(stop <= first for first, stop in place):
        return labels  # thinner than the file's voxels, and between them
    background = None if over_zero else F.pad(logits[0], padding).float()

    def carried(number: int) -> torch.Tensor:
        logit = F.pad(logits[number + (not over_zero)], padding).float()
        return carry(logit if background is None else logit - background)

    classes = [Region("", (number,), number) for number in range(1, len(logits) + over_zero)]
    z, y, x = (slice(first, stop) for first, stop in place)
    labels.T[z, y, x] = painted(regions or classes, carried).cpu().numpy()
    return labels


def _separable_way(grid: WorkingGrid, box: Box, start: Sequence[int]) -> tuple[Box, Carry]:
    """Return the box in the file that the working `box` reaches, as [z, y, x], and what carries a volume there."""
    place, positions, order = [], [], []
    by_axis = grid.native_positions()
    for file_axis in (2, 1, 0):
        axis = grid.file_axes.index(file_axis)
        (first, stop), found, size = box[axis], by_axis[axis], grid.native_shape[file_axis]
        near = np.flatnonzero((found > first - 1) & (found < stop))
        low, high = (near[0], near[-1] + 1) if len(near) else (0, 0)
        inside = found[low:high] - start[axis]
        place.append((size - high, size - low) if grid.flipped[axis] else (low, high))
        positions.append(inside[::-1] if grid.flipped[axis] else inside)
        order.append(axis)
    return tuple(place), lambda volume: resample(volume.permute(order).contiguous(), positions)


def _sheared_way(grid: WorkingGrid, box: Box, start: Sequence[int]) -> tuple[Box, Carry]:
    """As `_separable_way`, where an axis of one grid runs along several of the other."""
    to_working = np.linalg.solve(grid.affine, np.asarray(grid.native_affine))
    corners = np.array([[*corner, 1] for corner in product(*((first - 1, stop) for first, stop in box))])
    reached = (corners @ np.linalg.inv(to_working).T)[:, :3]
    # One voxel more: the outermost voxels of the file may lie a little outside the grid, and take its border's value.
    first = np.maximum(np.floor(reached.min(axis=0)).astype(int) - 1, 0)
    stop = np.minimum(np.ceil(reached.max(axis=0)).astype(int) + 2, grid.native_shape)
    to_source = to_working.copy()
    to_source[:3, 3] -= start

    def carry(volume: torch.Tensor) -> torch.Tensor:
        file_order = resample_sheared(volume[None], to_source, first, stop - first, nearest=False)[0]
        return file_order.permute(2, 1, 0)

    return tuple(reversed([(int(low), int(high)) for low, high in zip(first, stop, strict=True)])), carry
