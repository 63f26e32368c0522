"""Voxels carried from the grid of a file to the working grid and between grids, linearly or to the nearest one."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from medspeed.common.data.geometry import WorkingGrid

SNAP = 1e-7  # voxels: a position this near to a voxel is that voxel (float32 has no finer weight)
SLAB_VOXELS = 2**18  # on a CPU as much is worked on at once as stays in its cache (1 MiB of float32)


def to_working(voxels: torch.Tensor, grid: WorkingGrid, *, nearest: bool) -> torch.Tensor:
    """Carry voxels [C, z, y, x] (a NIfTI file's order in memory) to the crop of the working grid, [C, X, Y, Z].

    They are float32, or keep their dtype where nothing is interpolated.
    """
    if not grid.separable:
        matrix = np.linalg.solve(np.asarray(grid.native_affine), grid.affine)
        return resample_sheared(voxels.permute(0, 3, 2, 1), matrix, grid.crop_start, grid.crop_shape, nearest=nearest)
    by_file_axis = [np.empty(0)] * 3
    for positions, size, axis, flipped in zip(
        grid.working_positions(), grid.oriented_shape, grid.file_axes, grid.flipped, strict=True
    ):
        chosen = np.rint(positions) if nearest else positions  # ties to even, as grid_sample has them
        by_file_axis[axis] = size - 1 - chosen if flipped else chosen
    resampled = torch.stack([resample(channel, by_file_axis[::-1]) for channel in voxels])
    return resampled.permute(0, *(3 - axis for axis in grid.file_axes))


def resample(volume: torch.Tensor, positions: Sequence[np.ndarray]) -> torch.Tensor:
    """Interpolate linearly between the voxels of a volume [n0, n1, n2] of any real dtype, axis by axis.

    The positions say, per axis, where the new voxels lie: float64 [m] in [0, n - 1]; whole numbers pick voxels. The
    inner axes are done in slabs that stay in the cache, and before the outer one unless that loses half its voxels.

    Returns:
        [m0, m1, m2] float32; the dtype of `volume` where every position is a whole number; a view of it where nothing
        changes but the extent.
    """
    volume, (outer, *inner) = _needed(volume, positions)
    backwards = [_direction(steps) for steps in (outer, *inner)]
    if None not in backwards:  # the same voxels, at most from the other end
        axes = [axis for axis, turned in enumerate(backwards) if turned]
        return volume.flip(axes) if axes else volume
    shape = [len(steps.lower) for steps in (outer, *inner)]
    interpolates = any(steps.weight is not None for steps in (outer, *inner))
    result = volume.new_empty(shape, dtype=torch.float32 if interpolates else volume.dtype)
    outer_first = 2 * shape[0] <= volume.shape[0]
    if not outer_first:
        volume = _in_planes(volume, inner)
    depth = _slab_depth(volume)
    for start in range(0, shape[0], depth):
        rows = slice(start, start + depth)
        weight = None if outer.weight is None else outer.weight[rows]
        slab = _along(volume, 0, _Steps(outer.lower[rows], outer.upper[rows], weight))
        result[start : start + depth] = _in_planes(slab, inner) if outer_first else slab
    return result


def resample_sheared(
    volume: torch.Tensor, matrix: np.ndarray, start: Sequence[int], shape: Sequence[int], *, nearest: bool
) -> torch.Tensor:
    """Sample a volume [C, n0, n1, n2] at points of another grid, [C, m0, m1, m2] float32, the border repeated outside.

    `matrix` [4, 4] float64 leads from a voxel index of that grid to one of the volume; `shape` [m0, m1, m2] of its
    voxels are wanted, from `start` on.
    """
    source = volume.to(torch.float64)[None].contiguous()
    size = torch.tensor(volume.shape[1:], dtype=torch.float64, device=volume.device)
    turn = torch.as_tensor(matrix, dtype=torch.float64, device=volume.device)
    x, y, z = (
        torch.arange(a, a + n, dtype=torch.float64, device=volume.device) for a, n in zip(start, shape, strict=True)
    )
    result = torch.empty((len(volume), *shape), dtype=torch.float32, device=volume.device)
    for i in range(len(x)):
        points = torch.cartesian_prod(x[i : i + 1], y, z) @ turn[:3, :3].T + turn[:3, 3]
        normalised = ((2 * points + 1) / size - 1).flip(-1).view(1, 1, len(y), len(z), 3)  # grid_sample wants z, y, x
        mode = "nearest" if nearest else "bilinear"
        result[:, i] = F.grid_sample(source, normalised, mode, padding_mode="border", align_corners=False)[0, :, 0]
    return result


class _Steps(NamedTuple):
    """Along one axis, each new voxel is `lower` + `weight` * (`upper` - `lower`); without weights, it is `lower`."""

    lower: torch.Tensor  # int64 [m]
    upper: torch.Tensor  # int64 [m]
    weight: torch.Tensor | None  # float32 [m] in [0, 1)


def _needed(volume: torch.Tensor, positions: Sequence[np.ndarray]) -> tuple[torch.Tensor, list[_Steps]]:
    """Return the part of the volume that the positions lie in, and the steps within it."""
    steps = []
    for axis, exact in enumerate(positions):
        whole = np.rint(exact)
        snapped = np.where(np.abs(exact - whole) < SNAP, whole, exact)
        lower = np.floor(snapped).astype(np.int64)
        weight = (snapped - lower).astype(np.float32)
        upper = lower + (weight > 0)
        first = int(lower.min())
        volume = volume.narrow(axis, first, int(upper.max()) + 1 - first)
        tensors = [torch.from_numpy(values).to(volume.device) for values in (lower - first, upper - first, weight)]
        steps.append(_Steps(tensors[0], tensors[1], tensors[2] if weight.any() else None))
    return volume, steps


def _direction(steps: _Steps) -> bool | None:
    """Return whether the steps take each voxel once from the last to the first; None if not in a row at all."""
    if steps.weight is not None:
        return None
    row = torch.arange(len(steps.lower), device=steps.lower.device)
    if torch.equal(steps.lower, row):
        return False
    return True if torch.equal(steps.lower.flip(0), row) else None


def _in_planes(volume: torch.Tensor, inner: Sequence[_Steps]) -> torch.Tensor:
    """Resample the two inner axes: rows before columns (whole rows move fast), unless that would mean more work."""
    rows, columns = inner
    order = [(1, rows), (2, columns)]
    if len(rows.lower) > volume.shape[1] and len(columns.lower) < volume.shape[2]:
        order.reverse()
    parts = []
    for part in torch.split(volume, _slab_depth(volume)):
        for axis, steps in order:
            part = _along(part, axis, steps)
        parts.append(part)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _along(volume: torch.Tensor, axis: int, steps: _Steps) -> torch.Tensor:
    lower = volume.index_select(axis, steps.lower)
    if steps.weight is None:
        return lower
    weight = steps.weight.view([-1 if a == axis else 1 for a in range(3)])
    return torch.lerp(lower.float(), volume.index_select(axis, steps.upper).float(), weight)


def _slab_depth(volume: torch.Tensor) -> int:
    """Return how many planes to work on at once: few on a CPU, all on a GPU, where each call costs."""
    return volume.shape[0] if volume.device.type != "cpu" else max(1, SLAB_VOXELS // volume[0].numel())
