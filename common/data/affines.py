"""MONAI's arithmetic of affines, step by step as it does it, so that the last bits agree; MONAI itself stays unloaded.

Affines are [4, 4] float64, voxel index to RAS mm.
"""

from collections.abc import Sequence

import numpy as np
import torch

AFFINE_TOL = 1e-3
"""Difference, mm, that does not count. Source: `monai.data.utils.AFFINE_TOL`."""


def affine_to_spacing(affine: np.ndarray) -> np.ndarray:
    """Return the spacing, [3] mm, along the axes of the voxels; 1 for an axis without length.

    Source: `monai.data.utils.affine_to_spacing`.
    """
    spacing: np.ndarray = np.sqrt(np.sum(affine[:3, :3] * affine[:3, :3], axis=0))
    spacing[spacing == 0] = 1.0
    return spacing


def zoom_affine(affine: np.ndarray, spacing: np.ndarray) -> np.ndarray:
    """Return the affine of this rotation and a spacing, [3] mm, without shear and translation.

    Source: `monai.data.utils.zoom_affine` with `diagonal=False`.
    """
    matrix = affine[:3, :3]
    zoomed_sheared = np.linalg.cholesky(matrix.T @ matrix).T
    rotation = matrix @ np.linalg.inv(zoomed_sheared)
    result = np.eye(4)
    result[:3, :3] = rotation @ np.diag(np.sign(np.diag(zoomed_sheared)) * np.abs(spacing))
    return result


def compute_shape_offset(
    shape: Sequence[int], source: np.ndarray, target: np.ndarray
) -> tuple[tuple[int, ...], np.ndarray]:
    """Return the shape that voxels [X, Y, Z] of the affine `source` have with `target`, and its translation, [3] mm.

    Source: `monai.data.utils.compute_shape_offset`.
    """
    sides = np.array(shape, float)
    corners = np.asarray(np.meshgrid(*((0.0, side - 1.0) for side in sides), indexing="ij")).reshape(3, -1)
    corners = np.concatenate((corners, np.ones_like(corners[:1])))
    reached = np.linalg.solve(target, source) @ corners
    corners = source @ corners
    whole = np.round(np.ptp(reached[:-1] / reached[-1], axis=1) + 1.0)
    for corner in range(corners.shape[1]):
        if np.allclose(np.min(reached[:-1] - reached[:-1, corner : corner + 1], 1), 0.0, rtol=AFFINE_TOL):
            return tuple(whole.astype(int).tolist()), corners[:-1, corner]
    middle = source[:3, :3] @ (sides / 2.0) + source[:3, 3]
    return tuple(whole.astype(int).tolist()), middle - target[:3, :3] @ (whole / 2.0)


def to_norm_affine(affine: np.ndarray, source: Sequence[int], target: Sequence[int]) -> np.ndarray:
    """Return an affine from voxels of a shape `target` to those of `source` for coordinates in [-1, 1].

    Source: `monai.networks.utils.to_norm_affine` with `align_corners=False`.
    """
    to_source, to_target = _normalised(source), _normalised(target)
    found = to_source @ torch.as_tensor(affine)[None] @ torch.from_numpy(np.linalg.inv(to_target.numpy()))
    return found[0].numpy()


def _normalised(shape: Sequence[int]) -> torch.Tensor:
    """Return the affine [1, 4, 4] from voxels to coordinates in [-1, 1]."""
    sides = torch.tensor(tuple(shape), dtype=torch.float64)
    matrix = torch.diag(torch.cat((2.0 / sides, torch.ones(1, dtype=torch.float64))))
    matrix[:-1, -1] = 1.0 / sides - 1.0
    return matrix[None]
