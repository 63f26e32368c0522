"""MONAI's arithmetic of affines ([4, 4] float64, voxel to RAS mm), step by step, so that the last bits agree.

Source: the functions of these names in `monai.data.utils` and `monai.networks.utils`, which take seconds to load.
"""

from collections.abc import Sequence

import numpy as np
import torch

AFFINE_TOL = 1e-3
"""Difference, mm, that does not count."""


def affine_to_spacing(affine: np.ndarray) -> np.ndarray:
    """Return the spacing, [3] mm, along the axes of the voxels; 1 for an axis without length."""
    spacing: np.ndarray = np.sqrt(np.sum(affine[:3, :3] * affine[:3, :3], axis=0))
    return np.where(spacing == 0, 1.0, spacing)


def zoom_affine(affine: np.ndarray, spacing: np.ndarray) -> np.ndarray:
    """Return the affine of this rotation and a spacing, [3] mm, without shear and translation."""
    matrix, result = affine[:3, :3], np.eye(4)
    sheared = np.linalg.cholesky(matrix.T @ matrix).T
    rotation = matrix @ np.linalg.inv(sheared)
    result[:3, :3] = rotation @ np.diag(np.sign(np.diag(sheared)) * np.abs(spacing))
    return result


def compute_shape_offset(shape: Sequence[int], source: np.ndarray, target: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Return the shape that voxels [X, Y, Z] of the affine `source` have with `target`, and its translation, [3] mm."""
    sides = np.array(shape, float)
    corners = np.asarray(np.meshgrid(*((0.0, side - 1.0) for side in sides), indexing="ij")).reshape(3, -1)
    corners = np.concatenate((corners, np.ones_like(corners[:1])))
    reached = (np.linalg.solve(target, source) @ corners)[:3]
    corners = source @ corners
    whole = np.round(np.ptp(reached, axis=1) + 1.0)
    for corner in range(8):
        if np.allclose(np.min(reached - reached[:, corner : corner + 1], 1), 0.0, rtol=AFFINE_TOL):
            return whole.astype(int).tolist(), corners[:3, corner]
    middle = source[:3, :3] @ (sides / 2.0) + source[:3, 3]
    return whole.astype(int).tolist(), middle - target[:3, :3] @ (whole / 2.0)


def to_norm_affine(affine: np.ndarray, source: Sequence[int], target: Sequence[int]) -> np.ndarray:
    """Return an affine from voxels of a shape `target` to those of `source` for coordinates in [-1, 1]."""
    to_source, to_target = (_normalised(torch.tensor(tuple(shape), dtype=torch.float64)) for shape in (source, target))
    from_target = torch.from_numpy(np.linalg.inv(to_target.numpy()))
    return (to_source @ torch.as_tensor(affine)[None] @ from_target)[0].numpy()


def _normalised(sides: torch.Tensor) -> torch.Tensor:
    """Return the affine [1, 4, 4] from voxels of a shape [3] to coordinates in [-1, 1]."""
    matrix = torch.diag(torch.cat((2.0 / sides, sides.new_ones(1))))
    matrix[:-1, -1] = 1.0 / sides - 1.0
    return matrix[None]
