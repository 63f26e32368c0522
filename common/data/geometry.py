"""Where voxels lie: in a file, "oriented" (along R, A, S) and in the working grid; and how they are carried there.

Grids are those of MONAI's `Orientationd` and `Spacingd`, in float64 and step by step, so that even exact ties of
nearest-neighbour sampling fall on the same side. MONAI itself takes seconds to load.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import nibabel
import numpy as np
import torch
import torch.nn.functional as F

Array = np.ndarray
Shape = tuple[int, int, int]  # X, Y, Z in voxels
Spacing = tuple[float, float, float]  # mm along R, A, S
Box = tuple[tuple[int, int], ...]  # per axis: first voxel, one past the last
AFFINE_TOL = 1e-3  # mm: a difference that does not count
_SNAP = 3e-5  # voxels: a position this near to a voxel is that voxel (files round oblique affines to float32: 2e-5)
SLAB_VOXELS = 2**18  # on a CPU as much is worked on at once as stays in its cache (1 MiB of float32)


@dataclass(frozen=True)
class WorkingGrid:
    """How the prepared voxels lie in the file they come from."""

    native_shape: Shape  # [X, Y, Z] of the file
    native_affine: tuple[tuple[float, ...], ...]  # 4 x 4, voxel index of the file to RAS mm
    spacing: Spacing  # mm along R, A, S that were asked for; a native spacing within 0.001 mm of it is kept
    shape: Shape  # [X, Y, Z] of the whole working grid, along R, A, S
    crop_start: Shape  # first voxel of the foreground crop in it
    crop_shape: Shape  # [X, Y, Z] of the crop: the shape of the prepared image

    def cropped(self, start: Sequence[int], shape: Sequence[int]) -> "WorkingGrid":
        """Return the same grid with another crop."""
        return replace(self, crop_start=triple(start), crop_shape=triple(shape))

    @cached_property
    def file_axes(self) -> Shape:
        """Which axis of the file runs along R, A and S."""
        return triple(np.argsort(self._orientation[:, 0]))

    @cached_property
    def flipped(self) -> tuple[bool, ...]:
        """Whether that axis of the file runs the other way, to L, P or I."""
        return tuple(bool(self._orientation[axis, 1] < 0) for axis in self.file_axes)

    @cached_property
    def oriented_shape(self) -> Shape:
        """[X, Y, Z] of the file's voxels once they run along R, A, S."""
        return triple(self.native_shape[axis] for axis in self.file_axes)

    @cached_property
    def affine(self) -> Array:
        """[4, 4] float64: voxel index in the whole working grid to RAS mm."""
        return working_affine(self._oriented_affine, self.oriented_shape, self.spacing)[0]

    @cached_property
    def separable(self) -> bool:
        """Whether both grids have parallel axes, so that each is resampled alone: shear displaces nothing by 0.001."""
        matrix = np.abs(np.linalg.solve(self._oriented_affine, self.affine)[:3, :3])
        return bool(((matrix - np.diag(np.diag(matrix))) @ np.asarray(self.shape)).max() < 1e-3)

    def working_positions(self) -> list[Array]:
        """Return, per axis R, A, S, where the crop's voxels lie among the oriented voxels of the file (float64 [n])."""
        whole = _positions(self._oriented_affine, self.oriented_shape, self.affine, self.shape)
        return [p[s : s + n] for p, s, n in zip(whole, self.crop_start, self.crop_shape, strict=True)]

    def native_positions(self) -> list[Array]:
        """Return, per axis R, A, S, where the file's oriented voxels lie in the whole working grid (float64 [n])."""
        return _positions(self.affine, self.shape, self._oriented_affine, self.oriented_shape)

    @cached_property
    def _orientation(self) -> Array:
        return np.asarray(nibabel.io_orientation(np.asarray(self.native_affine)))

    @cached_property
    def _oriented_affine(self) -> Array:
        turn = nibabel.orientations.inv_ornt_aff(self._orientation, self.native_shape)
        return np.asarray(np.asarray(self.native_affine) @ turn, np.float64)


def working_grid(shape: Sequence[int], affine: Array, spacing: Sequence[float]) -> WorkingGrid:
    """Return the uncropped grid at a spacing (mm along R, A, S) of a file of this shape [X, Y, Z] and affine [4, 4]."""
    native, nowhere = tuple(tuple(map(float, row)) for row in affine), (0, 0, 0)
    grid = WorkingGrid(triple(shape), native, triple(spacing, float), nowhere, nowhere, nowhere)
    whole = working_affine(grid._oriented_affine, grid.oriented_shape, grid.spacing)[1]
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
        inside = torch.nonzero(profile > float(bound)).flatten().tolist()  # torch wraps a whole number into uint8
        if not inside:
            return None
        box[axis - 1] = inside[0], inside[-1] + 1
    return tuple(box)


def working_affine(oriented: Array, shape: Shape, spacing: Sequence[float]) -> tuple[Array, Shape]:
    """Return affine and shape of the working grid of oriented voxels. Source: `monai.transforms.Spacing.__call__`."""
    current = np.sqrt(np.sum(oriented[:3, :3] * oriented[:3, :3], axis=0))
    target = np.where(np.abs(current - spacing) <= AFFINE_TOL, current, spacing)
    sheared = np.linalg.cholesky(oriented[:3, :3].T @ oriented[:3, :3]).T
    rotation = oriented[:3, :3] @ np.linalg.inv(sheared)
    affine = np.eye(4)
    affine[:3, :3] = rotation @ np.diag(np.sign(np.diag(sheared)) * np.abs(target))
    sides = np.array(shape, float)
    corners = np.asarray(np.meshgrid(*((0.0, side - 1.0) for side in sides), indexing="ij")).reshape(3, -1)
    corners = np.concatenate((corners, np.ones_like(corners[:1])))
    reached = (np.linalg.solve(affine, oriented) @ corners)[:3]
    whole = np.round(np.ptp(reached, axis=1) + 1.0)
    affine[:3, 3] = oriented[:3, :3] @ (sides / 2.0) + oriented[:3, 3] - affine[:3, :3] @ (whole / 2.0)
    for number, corner in enumerate((oriented @ corners)[:3].T):
        if np.allclose(np.min(reached - reached[:, number : number + 1], 1), 0.0, rtol=AFFINE_TOL):
            affine[:3, 3] = corner
            break
    return affine, triple(whole)


def _positions(source_affine: Array, source_shape: Shape, target_affine: Array, target_shape: Shape) -> list[Array]:
    """Return, per axis, where the target's voxels lie in the source, held inside it.

    The detour over coordinates in [-1, 1] adds nothing but the rounding of `affine_grid` and `grid_sample`, which
    decides exact ties (8 mm to 2 mm). Source: `monai.transforms.spatial.functional.spatial_resample`.
    """
    matrix = np.linalg.solve(source_affine, target_affine)
    if source_shape == target_shape and np.allclose(matrix, np.eye(4), atol=AFFINE_TOL):
        matrix = np.eye(4)  # so nearly the same grid that MONAI leaves the voxels as they are
    theta = to_norm_affine(matrix, source_shape, target_shape)
    positions = []
    for axis, (n_source, n_target) in enumerate(zip(source_shape, target_shape, strict=True)):
        centres = torch.linspace(-1, 1, n_target, dtype=torch.float64).numpy() * (n_target - 1) / n_target
        normalised = centres * theta[axis, axis] + theta[axis, 3]
        exact = np.clip(((normalised + 1) * n_source - 1) / 2, 0, n_source - 1)
        positions.append(np.where(np.abs(exact - np.rint(exact)) < _SNAP, np.rint(exact), exact))
    return positions


def triple(values: Iterable[Any], kind: type = int) -> tuple[Any, Any, Any]:
    """Return three numbers, whole ones by default."""
    x, y, z = map(kind, values)
    return x, y, z


def to_norm_affine(affine: Array, source: Sequence[int], target: Sequence[int]) -> Array:
    """Return an affine from target to source for coordinates in [-1, 1]. Source: monai.networks.utils, same name."""
    to_source, to_target = np.eye(4), np.eye(4)
    for matrix, shape in ((to_source, source), (to_target, target)):
        matrix[:3] = np.column_stack((np.diag(2.0 / np.array(shape)), 1.0 / np.array(shape) - 1.0))
    product = [torch.as_tensor(each)[None] for each in (to_source, affine, np.linalg.inv(to_target))]
    return (product[0] @ product[1] @ product[2])[0].numpy()  # by torch, as MONAI: NumPy rounds otherwise


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


def resample(volume: torch.Tensor, positions: Sequence[Array]) -> torch.Tensor:
    """Interpolate linearly between the voxels of a volume [n0, n1, n2] of any real dtype, axis by axis.

    The positions say, per axis, where the new voxels lie: float64 [m] in [0, n - 1]; whole numbers pick voxels. The
    new ones, [m0, m1, m2], are float32; of the dtype of `volume` where every position is a whole number; a view of it
    where nothing changes but the extent.
    """
    # The inner axes are done in slabs that stay in the cache, and before the outer one unless that loses half of it.
    volume, (outer, *inner) = _needed(volume, positions)
    steps = outer, *inner
    if all(each.turned is not None for each in steps):  # the same voxels, at most from the other end
        axes = [axis for axis, each in enumerate(steps) if each.turned]
        return volume.flip(axes) if axes else volume
    shape = [len(each.lower) for each in steps]
    interpolates = any(each.weight is not None for each in steps)
    result = volume.new_empty(shape, dtype=torch.float32 if interpolates else volume.dtype)
    outer_first = 2 * shape[0] <= volume.shape[0]
    if not outer_first:
        volume = _in_planes(volume, inner)
    depth = _slab_depth(volume)
    for start in range(0, shape[0], depth):
        rows = slice(start, start + depth)
        slab = _along(volume, 0, outer, rows)
        result[rows] = _in_planes(slab, inner) if outer_first else slab
    return result


def resample_sheared(
    volume: torch.Tensor, matrix: Array, start: Sequence[int], shape: Sequence[int], *, nearest: bool
) -> torch.Tensor:
    """Sample a volume [C, n0, n1, n2] at points of another grid, [C, m0, m1, m2] float32, the border repeated outside.

    `matrix` [4, 4] float64 leads from a voxel index of that grid to one of the volume; `shape` [m0, m1, m2] of its
    voxels are wanted, from `start` on.
    """
    source = volume.to(torch.float64)[None].contiguous()
    size = torch.tensor(volume.shape[1:], dtype=torch.float64, device=volume.device)
    turn = torch.as_tensor(matrix, dtype=torch.float64, device=volume.device)
    ends = zip(start, np.add(start, shape).tolist(), strict=True)
    x, y, z = (torch.arange(*each, dtype=torch.float64, device=volume.device) for each in ends)
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
    turned: bool | None  # whether they take each voxel once from the last to the first; None if not in a row


def _needed(volume: torch.Tensor, positions: Sequence[Array]) -> tuple[torch.Tensor, list[_Steps]]:
    """Return the part of the volume that the positions lie in, and the steps within it."""
    steps = []
    for axis, exact in enumerate(positions):
        lower = np.floor(exact).astype(np.int64)
        weight = (exact - lower).astype(np.float32)
        upper = lower + (weight > 0)
        first = int(lower.min())
        volume = volume.narrow(axis, first, int(upper.max()) + 1 - first)
        tensors = [torch.from_numpy(values).to(volume.device) for values in (lower - first, upper - first, weight)]
        straight, turned = ((lower[::way] - first == range(len(lower))).all() for way in (1, -1))
        in_row = not straight if (straight or turned) and not weight.any() else None
        steps.append(_Steps(tensors[0], tensors[1], tensors[2] if weight.any() else None, in_row))
    return volume, steps


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


def _along(volume: torch.Tensor, axis: int, steps: _Steps, part: slice = slice(None)) -> torch.Tensor:
    lower = volume.index_select(axis, steps.lower[part])
    if steps.weight is None:
        return lower
    weight = steps.weight[part].view([-1 if a == axis else 1 for a in range(3)])
    return torch.lerp(lower.float(), volume.index_select(axis, steps.upper[part]).float(), weight)


def _slab_depth(volume: torch.Tensor) -> int:
    """Return how many planes to work on at once: few on a CPU, all on a GPU, where each call costs."""
    return volume.shape[0] if volume.device.type != "cpu" else max(1, SLAB_VOXELS // volume[0].numel())
