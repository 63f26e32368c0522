"""Where voxels lie: in a file, "oriented" (its axes turned and flipped to run along R, A, S), and in the working grid.

It is the arithmetic of MONAI's `Orientationd` and `Spacingd`, in float64 and step by step, so that even exact ties of
nearest-neighbour sampling fall on the same side. MONAI itself takes seconds to load.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import nibabel
import numpy as np
import torch

Shape = tuple[int, int, int]  # X, Y, Z in voxels
Spacing = tuple[float, float, float]  # mm along R, A, S
Box = tuple[tuple[int, int], ...]  # per axis: first voxel, one past the last
AFFINE_TOL = 1e-3  # mm: a difference that does not count


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
    def affine(self) -> np.ndarray:
        """[4, 4] float64: voxel index in the whole working grid to RAS mm."""
        return working_affine(self._oriented_affine, self.oriented_shape, self.spacing)[0]

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
    grid = WorkingGrid(triple(shape), native, (right, anterior, superior), nowhere, nowhere, nowhere)
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
        inside = torch.nonzero(profile > bound).flatten().tolist()
        if not inside:
            return None
        box[axis - 1] = inside[0], inside[-1] + 1
    return tuple(box)


def working_affine(oriented: np.ndarray, shape: Shape, spacing: Sequence[float]) -> tuple[np.ndarray, Shape]:
    """Return affine and shape of the working grid of oriented voxels.

    Source: `monai.transforms.Spacing.__call__`; `affine_to_spacing`, `zoom_affine`, `compute_shape_offset` in
    `monai.data.utils`.
    """
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


def _positions(
    source_affine: np.ndarray, source_shape: Shape, target_affine: np.ndarray, target_shape: Shape
) -> list[np.ndarray]:
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
        positions.append(np.clip(((normalised + 1) * n_source - 1) / 2, 0, n_source - 1))
    return positions


def triple(values: Iterable[Any]) -> Shape:
    """Return three whole numbers."""
    x, y, z = (int(value) for value in values)
    return x, y, z


def to_norm_affine(affine: np.ndarray, source: Sequence[int], target: Sequence[int]) -> np.ndarray:
    """Return an affine from voxels of a shape `target` to those of `source` for coordinates in [-1, 1].

    Source: `monai.networks.utils.to_norm_affine`.
    """
    to_source, to_target = np.eye(4), np.eye(4)
    for matrix, shape in ((to_source, source), (to_target, target)):
        matrix[:3] = np.column_stack((np.diag(2.0 / np.array(shape)), 1.0 / np.array(shape) - 1.0))
    product = [torch.as_tensor(each)[None] for each in (to_source, affine, np.linalg.inv(to_target))]
    return (product[0] @ product[1] @ product[2])[0].numpy()  # by torch, as MONAI: NumPy rounds otherwise
