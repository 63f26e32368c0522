"""Our arithmetic of affines against MONAI's own, to the last bit: exact ties of resampling hang on it."""

import numpy as np
import pytest
import torch
from monai.data import utils as monai
from monai.networks.utils import to_norm_affine as monai_norm_affine

from medspeed.common.data.geometry import to_norm_affine, triple, working_affine


def random_affine(seed: int) -> np.ndarray:
    """Axes in any direction, some sheared or flipped, 0.3 to 8 mm, anywhere."""
    rng = np.random.default_rng(seed)
    rotation = np.linalg.qr(rng.normal(size=(3, 3)))[0] if seed % 3 else np.eye(3)[rng.permutation(3)]
    shear = np.eye(3) + (np.triu(rng.normal(size=(3, 3)), 1) * 0.2 if seed % 4 == 1 else 0)
    affine = np.eye(4)
    affine[:3, :3] = rotation @ shear @ np.diag(rng.uniform(0.3, 8, 3) * rng.choice([-1, 1], 3))
    affine[:3, 3] = rng.uniform(-500, 500, 3)
    return affine


@pytest.mark.parametrize("seed", range(40))
def test_each_step_equals_monais_bit_for_bit(seed):
    rng = np.random.default_rng(1000 + seed)
    affine, spacing = random_affine(seed), rng.choice([0.5, 1.0, 1.5, 2.0, 8.0], 3)
    shape = [int(side) for side in rng.integers(1, 300, 3)]
    spacing[0] = monai.affine_to_spacing(affine)[0] + rng.choice([-5e-4, 1e-2])  # nearly the file's own, which is kept
    found, whole = working_affine(affine, triple(shape), spacing.tolist())
    own = monai.affine_to_spacing(affine)
    zoomed = monai.zoom_affine(affine, np.where(np.abs(own - spacing) <= 1e-3, own, spacing), diagonal=False)
    due, offset = monai.compute_shape_offset(shape, affine, zoomed)
    assert whole == tuple(due.tolist())
    assert np.array_equal(found[:3, :3], zoomed[:3, :3])
    assert np.array_equal(found[:3, 3], offset)
    matrix = np.linalg.solve(affine, zoomed)
    norm = to_norm_affine(matrix, shape, whole)
    assert np.array_equal(norm, monai_norm_affine(torch.as_tensor(matrix)[None], shape, whole)[0].numpy())
