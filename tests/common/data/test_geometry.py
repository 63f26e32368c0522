"""Our arithmetic of affines against MONAI's own, to the last bit: exact ties of resampling hang on it."""

import numpy as np
import pytest
import torch
from monai.data import utils as monai
from monai.networks.utils import to_norm_affine as monai_norm_affine

from medspeed.common.data.geometry import affine_to_spacing, compute_shape_offset, to_norm_affine, zoom_affine


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
    assert np.array_equal(affine_to_spacing(affine), monai.affine_to_spacing(affine))
    zoomed = zoom_affine(affine, spacing)
    assert np.array_equal(zoomed, monai.zoom_affine(affine, spacing, diagonal=False))
    whole, offset = compute_shape_offset(shape, affine, zoomed)
    due, due_offset = monai.compute_shape_offset(shape, affine, zoomed)
    assert whole == due.tolist()
    assert np.array_equal(offset, due_offset)
    matrix = np.linalg.solve(affine, zoomed)
    found = to_norm_affine(matrix, shape, whole)
    assert np.array_equal(found, monai_norm_affine(torch.as_tensor(matrix)[None], shape, whole)[0].numpy())


def test_an_axis_without_length_counts_as_1_mm():
    assert affine_to_spacing(np.diag([0.0, 2.0, 3.0, 1.0])).tolist() == [1.0, 2.0, 3.0]
