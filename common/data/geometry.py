"""Where voxels lie: the grid of a file, the grid a network works on, and how voxels are carried from each to the other.

A file's axes [X, Y, Z] run in any anatomical direction. They are first turned and flipped to run along R, A, S
("oriented"), then the spacing is changed: the working grid keeps the first oriented voxel's centre, the directions and
the field of view. All of it is the arithmetic of MONAI's `Orientationd` and `Spacingd`, in float64, so that even exact
ties of nearest-neighbour sampling fall on the same side.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import nibabel
import numpy as np
import torch
import torch.nn.functional as F

from medspeed.common.data import affines

Shape = tuple[int, int, int]  # X, Y, Z in voxels
Spacing = tuple[float, float, float]  # mm along R, A, S
Box = tuple[tuple[int, int], ...]  # per axis: first voxel, one past the last
SNAP = 1e-7  # voxels: a position this near to a voxel is that voxel (float32 has no finer weight)
SLAB_VOXELS = 2**18  # on a CPU as much is worked on at once as stays in its cache (1 MiB of float32)


@dataclass(frozen=True)
class WorkingGrid:
    """How the prepared voxels lie in the file they come from.

    Attributes:
        native_shape: [X, Y, Z] of the file.
        native_affine: 4 x 4, voxel index of the file to RAS mm.
        spacing: Working spacing that was asked for, mm, along R, A, S. A native spacing within 0.001 mm of it is kept.
        shape: [X, Y, Z] of the whole working grid, along R, A, S.
        crop_start: First voxel of the foreground crop in the whole working grid.
        crop_shape: [X, Y, Z] of the crop: the shape of the prepared image.
    """

    native_shape: Shape
    native_affine: tuple[tuple[float, ...], ...]
    spacing: Spacing
    shape: Shape
    crop_start: Shape
    crop_shape: Shape

    def cropped(self, start: Sequence[int], shape: Sequence[int]) -> "WorkingGrid":
        """Return the same grid with another crop."""
        return replace(self, crop_start=_triple(start), crop_shape=_triple(shape))

    @cached_property
    def file_axes(self) -> Shape:
        """Which axis of the file runs along R, A and S."""
        return _triple(np.argsort(self._orientation[:, 0]))

    @cached_property
    def flipped(self) -> tuple[bool, ...]:
        """Whether that axis of the file runs the other way, to L, P or I."""
        return tuple(bool(self._orientation[axis, 1] < 0) for axis in self.file_axes)

    @cached_property
    def oriented_shape(self) -> Shape:
        """[X, Y, Z] of the file's voxels once they run along R, A, S."""
        return _triple(self.native_shape[axis] for axis in self.file_axes)

    @cached_property
    def affine(self) -> np.ndarray:
        """[4, 4] float64: voxel index in the whole working grid to RAS mm."""
        return _working_affine(self._oriented_affine, self.oriented_shape, self.spacing)[0]

    @cached_property
    def separable(self) -> bool:
        """Whether both grids have parallel axes, so that each is resampled alone: shear displaces nothing by 0.001."""
        matrix = np.abs(np.linalg.solve(self._oriented_affine, self.affine)[:3, :3])
        skew = matrix - np.diag(np.diag(matrix))
        return bool((skew @ np.asarray(self.shape)).max() < 1e-3)

    def working_positions(self) -> list[np.ndarray]:
        """Return, per axis R, A, S, where the crop's voxels lie among the oriented voxels of the file (float64 [n])."""
        whole = _positions(self._oriented_affine, self.oriented_shape, self.affine, self.shape)
        return [p[s : s + n] for p, s, n in zip(whole, self.crop_start, self.crop_shape, strict=True)]

    def native_positions(self) -> list[np.ndarray]:
        """Return, per axis R, A, S, where the file's oriented voxels lie in the whole working grid (float64 [n])."""
        return _positions(self.affine, self.shape, self._oriented_affine, self.oriented_shape)

    @cached_property
    def _orientation(self) -> np.ndarray:
        return np.asarray(nibabel.io_orientation(np.asarray(self.native_affine)))

    @cached_property
    def _oriented_affine(self) -> np.ndarray:
        turn = nibabel.orientations.inv_ornt_aff(self._orientation, self.native_shape)
        return np.asarray(np.asarray(self.native_affine) @ turn, np.float64)


def working_grid(shape: Sequence[int], affine: np.ndarray, spacing: Sequence[float]) -> WorkingGrid:
    """Return the uncropped grid at a spacing (mm along R, A, S) of a file of this shape [X, Y, Z] and affine [4, 4]."""
    right, anterior, superior = (float(value) for value in spacing)
    native, nowhere = tuple(tuple(map(float, row)) for row in affine), (0, 0, 0)
    grid = WorkingGrid(_triple(shape), native, (right, anterior, superior), nowhere, nowhere, nowhere)
    whole = _working_affine(grid._oriented_affine, grid.oriented_shape, grid.spacing)[1]
    return replace(grid, shape=whole, crop_shape=whole)


def box_above(volume: torch.Tensor, bound: float) -> Box | None:
    """Return the box of the voxels of [C, n0, n1, n2] that exceed a bound in any channel, None where there are none."""
    # Two passes in the order in which the voxels lie in memory: the maximum over planes, and the maximum of each plane.
    order = sorted((1, 2, 3), key=volume.stride, reverse=True)
    volume = volume.permute(0, *order)
    planes = volume.amax(dim=0) if len(volume) > 1 else volume[0]
    front = planes.amax(dim=0)
    box = [(0, 0)] * 3
    for axis, profile in zip(order, (planes.flatten(1).amax(1), front.amax(1), front.amax(0)), strict=True):
        inside = torch.nonzero(profile > bound).flatten().tolist()
        if not inside:
            return None
        box[axis - 1] = inside[0], inside[-1] + 1
    return tuple(box)


def to_working(voxels: torch.Tensor, grid: WorkingGrid, *, nearest: bool) -> torch.Tensor:
    """Carry voxels [C, z, y, x] (the order in which a NIfTI file lies in memory) to the crop of the working grid.

    Returns:
        [C, X, Y, Z] along R, A, S, in memory as the file has them: float32, or the dtype of `voxels` where no value had
        to be interpolated, as where the `nearest` one is taken.
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
    """Interpolate linearly between the voxels of a volume, axis by axis.

    The outermost axis is cut into slabs that stay in the cache; the two inner ones are done slab by slab. The outer
    axis comes after them, unless it loses at least half its voxels: then first, for less work.

    The volume is [n0, n1, n2] of any real dtype. The positions say, per axis, where the new voxels lie: float64 [m] in
    [0, n - 1]; whole numbers pick voxels.

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
        slab = _along(volume, 0, outer.part(start, start + depth))
        result[start : start + depth] = _in_planes(slab, inner) if outer_first else slab
    return result


def resample_sheared(
    volume: torch.Tensor, matrix: np.ndarray, start: Sequence[int], shape: Sequence[int], *, nearest: bool
) -> torch.Tensor:
    """Sample a volume [C, n0, n1, n2] at the points of another grid, slab by slab, the border repeated outside.

    `matrix` [4, 4] float64 leads from a voxel index of that grid to one of the volume; `shape` [m0, m1, m2] of its
    voxels are wanted, from `start` on.

    Returns:
        [C, m0, m1, m2] float32.
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


def _working_affine(oriented: np.ndarray, shape: Shape, spacing: Sequence[float]) -> tuple[np.ndarray, Shape]:
    """Return affine and shape of the working grid. Source: `monai.transforms.Spacing.__call__`."""
    current = affines.affine_to_spacing(oriented)
    target = np.where(np.abs(current - spacing) <= affines.AFFINE_TOL, current, spacing)
    affine = affines.zoom_affine(oriented, target)
    whole, offset = affines.compute_shape_offset(shape, oriented, affine)
    affine[:3, 3] = offset
    return np.asarray(affine, np.float64), _triple(whole)


def _positions(
    source_affine: np.ndarray, source_shape: Shape, target_affine: np.ndarray, target_shape: Shape
) -> list[np.ndarray]:
    """Return, per axis, where the target's voxels lie in the source, held inside it.

    The detour over coordinates in [-1, 1] adds nothing but its rounding: it is what `torch.nn.functional.affine_grid`
    and `grid_sample` compute, and exact ties (8 mm to 2 mm) are decided by that last bit.
    Source: `monai.transforms.spatial.functional.spatial_resample`.
    """
    matrix = np.linalg.solve(source_affine, target_affine)
    if source_shape == target_shape and np.allclose(matrix, np.eye(4), atol=affines.AFFINE_TOL):
        matrix = np.eye(4)  # so nearly the same grid that MONAI leaves the voxels as they are
    theta = affines.to_norm_affine(matrix, source_shape, target_shape)
    positions = []
    for axis, (n_source, n_target) in enumerate(zip(source_shape, target_shape, strict=True)):
        centres = torch.linspace(-1, 1, n_target, dtype=torch.float64).numpy() * (n_target - 1) / n_target
        normalised = centres * theta[axis, axis] + theta[axis, 3]
        positions.append(np.clip(((normalised + 1) * n_source - 1) / 2, 0, n_source - 1))
    return positions


def _triple(values: Any) -> Shape:  # noqa: ANN401 - anything iterable of whole numbers
    x, y, z = (int(value) for value in values)
    return x, y, z


class _Steps(NamedTuple):
    """Along one axis, each new voxel is `lower` + `weight` * (`upper` - `lower`); without weights, it is `lower`."""

    lower: torch.Tensor  # int64 [m]
    upper: torch.Tensor  # int64 [m]
    weight: torch.Tensor | None  # float32 [m] in [0, 1)

    def part(self, start: int, stop: int) -> "_Steps":
        weight = None if self.weight is None else self.weight[start:stop]
        return _Steps(self.lower[start:stop], self.upper[start:stop], weight)


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
    """Resample one axis."""
    lower = volume.index_select(axis, steps.lower)
    if steps.weight is None:
        return lower
    weight = steps.weight.view([-1 if a == axis else 1 for a in range(3)])
    return torch.lerp(lower.float(), volume.index_select(axis, steps.upper).float(), weight)


def _slab_depth(volume: torch.Tensor) -> int:
    """Return how many planes to work on at once: few on a CPU, all on a GPU, where each call costs."""
    return volume.shape[0] if volume.device.type != "cpu" else max(1, SLAB_VOXELS // volume[0].numel())
