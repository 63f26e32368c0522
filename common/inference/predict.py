"""From prepared cases to label maps: the mean logits of overlapping windows, mapped back to the grid of the file."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import product
from types import EllipsisType

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from medspeed.common.data.dataset import Case
from medspeed.common.data.geometry import Box, Shape, WorkingGrid, box_above, resample, resample_sheared
from medspeed.common.data.preparation import PreparedCase
from medspeed.common.data.volumes import ALWAYS_TRIED, read_volume
from medspeed.common.host_memory import free_memory
from medspeed.common.inference.labels import LabelScheme, dice_counts, painted
from medspeed.common.inference.model import VolumeModel
from medspeed.common.inference.postprocessing import Steps, over_bars
from medspeed.common.inference.predictors import Predictor, as_fits, torch_predictor, with_room

Carry = Callable[[torch.Tensor], torch.Tensor]  # a volume on the working grid to its place in the file


def predict_labels(case: PreparedCase, predictor: Predictor, model: VolumeModel, device: torch.device) -> np.ndarray:
    """Return the label map of a prepared case on the grid of its file, uint8 [X, Y, Z], computed on a device."""

    def labels(place: torch.device, predictor: Predictor) -> np.ndarray:
        logits = predict_logits(case.image.to(place, torch.float32), predictor, model)
        return restore_labels(logits, case.grid, model.labelling, model.postprocessing)

    return with_room(labels, predictor, device)


def working_counts(
    cases: Sequence[PreparedCase], network: nn.Module, model: VolumeModel, check: Callable[[], None]
) -> list[torch.Tensor]:
    """Return the counts [R, 2] of each labelled case's Dice on the working grid, on the device (see `dice_counts`).

    Before each case `check` is called, which raises if the run should stop.
    """
    device = next(network.parameters()).device
    predictor = torch_predictor(network.eval(), model.precision, tf32=True)

    def counts(case: PreparedCase, place: torch.device, predictor: Predictor) -> torch.Tensor:
        check()
        assert case.label is not None
        # Where the GPU's memory is short, its cases come back: the host would not wait for a copy that does not block.
        image, truth = (each.to(place, non_blocking=place == device) for each in (case.image, case.label))
        labels = model.labelling.labels_of(predict_logits(image, predictor, model))
        return dice_counts(labels, truth, model.labelling.regions).to(device)

    return [with_room(partial(counts, case), predictor, device) for case in cases]


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
            start = int((have - want) / 2)
            padding = [-start, want - have + start, *padding]
        windows.append(F.pad(case.image.float(), padding))
    return torch.stack(windows)


def restore_labels(logits: torch.Tensor, grid: WorkingGrid, labelling: LabelScheme, steps: Steps = ()) -> np.ndarray:
    """Interpolate logits linearly to the grid of the file and take the class with the highest, or paint the regions.

    As MONAI's `Invertd(nearest_interp=False)` on the logits, then argmax. Outside the crop MONAI pads all classes
    with zeros, which is background; so a voxel is foreground only where some class exceeds background in one of the
    voxels around it. Only the box of those is interpolated, class by class, as the difference class - background: no
    volume of logits on the file's grid ever exists.

    The logits, [K, X, Y, Z] of any float dtype on any device, are those of `predict_logits` on the crop of the grid.
    The steps' thresholds hold, by default one half. Labels are [X, Y, Z] uint8 in the file's axes, Fortran order.
    """
    assert tuple(logits.shape[1:]) == grid.crop_shape, (tuple(logits.shape), grid.crop_shape)
    logits, labels = over_bars(logits, labelling, steps), np.zeros(grid.native_shape, np.uint8, order="F")
    over_zero = len(logits) == 1 or not labelling.exclusive  # else over the first class, the background
    box = box_above(logits if over_zero else (logits[1:].amax(dim=0) > logits[0]).view(torch.uint8)[None], 0)
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
        logit = F.pad(logits[number if over_zero else labelling.regions[number].value], padding).float()
        return carry(logit if background is None else logit - background)

    z, y, x = (slice(first, stop) for first, stop in place)
    labels.T[z, y, x] = painted(labelling.regions, carried).cpu().numpy()
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
        return resample_sheared(volume[None], to_source, first, stop - first, nearest=False)[0].permute(2, 1, 0)

    return tuple(reversed([(int(low), int(high)) for low, high in zip(first, stop, strict=True)])), carry


@torch.no_grad()
def predict_logits(
    image: torch.Tensor, predictor: Predictor, model: VolumeModel, window: Shape | None = None
) -> torch.Tensor:
    """Return the logits [K, X, Y, Z] float32 of a prepared image [C, X, Y, Z], as means over overlapping windows.

    Every call of the predictor gets as many windows as the model says, since an engine has a fixed profile: the last
    batch is filled up with its last window. Where a call runs out of memory, the batch is halved with a warning and the
    work goes on from there (`as_fits`). The host waits for the device once, at the end. Source: as
    `monai.inferers.sliding_window_inference` with its constant weights.

    Of two exclusive classes only the difference foreground - background is summed, which halves memory and all later
    work: K == 1, and the foreground is where it is > 0.

    The image is of any float dtype; an axis shorter than the window is padded with zeros on both sides. The predictor,
    on its device, must neither write into its input nor keep it; one that takes any size may be given another `window`,
    X, Y, Z in voxels, than the model's. Non-finite logits are a ValueError, too large windows a torch.OutOfMemoryError.
    """
    assert image.ndim == 4, image.shape
    roi = window or model.window_size
    missing = [max(side - length, 0) for length, side in zip(image.shape[1:], roi, strict=True)]
    padding = [voxels for each in reversed(missing) for voxels in (each // 2, each - each // 2)]  # Z first, for F.pad
    padded = F.pad(image, padding) if any(padding) else image
    starts, scales = window_plan((padded.shape[1], padded.shape[2], padded.shape[3]), roi, model.overlap, image.device)
    total = _sum_windows(padded, predictor, roi, starts, model.window_batch, model.labelling.exclusive)
    for scale in scales:
        total *= scale
    # The extremes carry NaN and infinity along; they take one pass and no memory, isfinite().all() 40 times as long.
    if not torch.stack(total.aminmax()).isfinite().all():
        bad, bad_input = int((~total.isfinite()).any(dim=0).sum()), int((~image.isfinite()).sum())
        raise ValueError(
            f"{bad} of {total[0].numel()} voxels have non-finite logits, {bad_input} voxels of the image are not "
            "finite. Where the image is finite, the network overflows: use bf16 or fp32, or check its weights"
        )
    return total[_box([each // 2 for each in missing], image.shape[1:])]


@lru_cache(maxsize=4)
def window_plan(
    shape: Shape, roi: Shape, overlap: float, device: torch.device
) -> tuple[tuple[Shape, ...], tuple[torch.Tensor, ...]]:
    """Return the first voxel of each window in an image that is no smaller, X slowest; shared, so change nothing in it.

    And float32 factors [X, 1, 1] and [Y, Z] whose product turns a sum over windows into their mean, 1 / (windows that
    cover a voxel); () for one window.
    """
    along = [window_starts(length, side, overlap) for length, side in zip(shape, roi, strict=True)]
    starts = tuple((x, y, z) for x, y, z in product(*along))
    if len(starts) == 1:
        return starts, ()
    counts = [torch.zeros(length) for length in shape]
    for count, firsts, side in zip(counts, along, roi, strict=True):
        for first in firsts:
            count[first : first + side] += 1
    x, y, z = (1 / count for count in counts)
    return starts, (x[:, None, None].to(device), (y[:, None] * z).to(device))


def window_starts(length: int, side: int, overlap: float) -> tuple[int, ...]:
    """Return the first voxels of the windows of `side` voxels along one axis; the last window ends with the axis."""
    interval = max(int(side * (1 - overlap)), 1)
    last = max(length - side, 0)
    return (*range(0, last, interval), last)


def _box(start: Sequence[int], sides: Sequence[int]) -> tuple[EllipsisType | slice, ...]:
    """Return the index of a box in [C, X, Y, Z] or [X, Y, Z]: `...` leaves the axes before X alone."""
    return (..., *(slice(first, first + side) for first, side in zip(start, sides, strict=True)))


def _sum_windows(
    image: torch.Tensor, predictor: Predictor, roi: Shape, starts: Sequence[Shape], batch_size: int, difference: bool
) -> torch.Tensor:
    """Return the sum over all windows of their logits, [K, X, Y, Z] float32 on the padded image's grid."""
    total, parts = torch.empty(0), as_fits(predictor)
    windows = torch.empty((batch_size, image.shape[0], *roi), dtype=torch.float32, device=image.device)
    for done in range(0, len(starts), batch_size):
        batch = starts[done : done + batch_size]
        for number, window in enumerate(windows):
            window.copy_(image[_box(batch[min(number, len(batch) - 1)], roi)])
        places = iter(batch)
        for logits in parts(windows):
            assert tuple(logits.shape[2:]) == roi, tuple(logits.shape)
            assert logits.device == image.device, logits.device
            subtract = difference and logits.shape[1] == 2
            if not len(total):
                channels = 1 if subtract else logits.shape[1]
                needed = 4 * channels * math.prod(image.shape[1:])
                if image.device.type == "cpu" and needed > ALWAYS_TRIED and needed > (free := free_memory(needed)):
                    said = f"the logits of {channels} labels need {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free"
                    raise ValueError(f"{said}: crop the scan, train with a coarser --spacing, or use more memory")
                total = torch.zeros((channels, *image.shape[1:]), dtype=torch.float32, device=image.device)
            for window, start in zip(logits, places, strict=False):  # those that fill up the last batch are left out
                place = total[_box(start, roi)]
                place.add_(window[1:] if subtract else window)
                if subtract:  # two passes in place are faster than one over a difference that needs memory first
                    place.sub_(window[:1])
    return total
