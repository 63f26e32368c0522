"""From logits on the working grid back to a mask on the file's own grid."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F

from common.data.geometry import Box, WorkingGrid, box_above
from common.data.resample import resample, resample_sheared
from common.inference.labels import Region, painted

Carry = Callable[[torch.Tensor], torch.Tensor]  # a volume on the working grid to its place in the file


def restore_labels(logits: torch.Tensor, grid: WorkingGrid, regions: Sequence[Region] | None = None) -> np.ndarray:
    """Interpolate logits linearly onto the file's grid and take the class with the highest, or paint the regions.

    Equal to MONAI's `Invertd(nearest_interp=False)` on the logits, then argmax. Outside the crop MONAI pads all classes
    with zeros, which is background; so a voxel is foreground only where some class exceeds background in one of the
    voxels around it. Only the box of those is interpolated, class by class, as the difference class - background: no
    volume of logits on the file's grid ever exists.

    Args:
        logits: [K, X, Y, Z] on the crop of the grid, any float dtype, any device; K >= 2 classes, or K == 1: the
            difference foreground - background; with `regions` one for each of them.
        grid: As the preparation made it.
        regions: Structures that may overlap (see `LabelScheme`); None for classes, which do not.

    Returns:
        [X, Y, Z] uint8 in the file's axes, Fortran order; class numbers.
    """
    assert tuple(logits.shape[1:]) == grid.crop_shape, (tuple(logits.shape), grid.crop_shape)
    labels = np.zeros(grid.native_shape, np.uint8, order="F")
    over_zero = len(logits) == 1 or regions is not None  # else over the first class, the background
    box = _positive_box(logits, grid, over_zero)
    if box is None:
        return labels
    source, padding, start = _with_neighbours(logits, grid, box)
    place, carry = (_separable_way if grid.separable else _sheared_way)(grid, box, start)
    if any(stop <= first for first, stop in place):
        return labels  # thinner than the file's voxels, and between them
    background = 0.0 if over_zero else source[0].float()
    if regions is None:
        chosen = _highest(carry(F.pad(logit.float() - background, padding)) for logit in source[not over_zero :])
    else:
        chosen = painted(regions, lambda number: carry(F.pad(source[number].float(), padding)))
    z, y, x = (slice(first, stop) for first, stop in place)
    labels.T[z, y, x] = chosen.cpu().numpy()
    return labels


def _highest(differences: Iterator[torch.Tensor]) -> torch.Tensor:
    """Return, as uint8, the number (from 1) of the class that exceeds background most; 0 where none does."""
    best = next(differences)
    chosen = (best > 0).view(torch.uint8)
    for number, difference in enumerate(differences, start=2):
        best.clamp_(min=0)
        chosen.masked_fill_(difference > best, number)
        torch.maximum(best, difference, out=best)
    return chosen


def _positive_box(logits: torch.Tensor, grid: WorkingGrid, over_zero: bool) -> Box | None:
    """Return the box, in the whole working grid, where any class exceeds background; None where there is none."""
    if over_zero:
        box = box_above(logits, 0)
    else:
        foreground = logits[1] if len(logits) == 2 else logits[1:].amax(dim=0)
        box = box_above((foreground > logits[0]).view(torch.uint8)[None], 0)
    if box is None:
        return None
    return tuple((start + first, start + stop) for start, (first, stop) in zip(grid.crop_start, box, strict=True))


def _with_neighbours(
    logits: torch.Tensor, grid: WorkingGrid, box: Box
) -> tuple[torch.Tensor, list[int], tuple[int, ...]]:
    """Cut out the box and one voxel around it.

    Returns:
        The part of it inside the crop, a view; the zeros to pad it with for what lies outside, as `F.pad` wants them;
        where the padded part starts in the whole grid.
    """
    start: list[int] = []
    padding: list[int] = []
    for axis, (first, stop) in enumerate(box):
        crop, size = grid.crop_start[axis], grid.crop_shape[axis]
        low, high = max(first - 1, 0) - crop, min(stop + 1, grid.shape[axis]) - crop
        inside, end = max(low, 0), min(high, size)
        logits = logits.narrow(axis + 1, inside, end - inside)
        start.append(low + crop)
        padding = [inside - low, high - end, *padding]  # F.pad counts from the last axis
    return logits, padding, tuple(start)


def _separable_way(grid: WorkingGrid, box: Box, start: tuple[int, ...]) -> tuple[Box, Carry]:
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


def _sheared_way(grid: WorkingGrid, box: Box, start: tuple[int, ...]) -> tuple[Box, Carry]:
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
