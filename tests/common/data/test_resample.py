from collections.abc import Sequence
from itertools import permutations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.data import MetaTensor
from monai.transforms import Orientation, Spacing
from scipy.ndimage import map_coordinates

from common.data import resample as module
from common.data.geometry import working_grid
from common.data.resample import resample, resample_sheared, to_working

Triple = tuple[int, ...]
LABELS = (("L", "R"), ("P", "A"), ("I", "S"))
ORIENTATIONS = [(axes, signs) for axes in permutations(range(3)) for signs in product((1, -1), repeat=3)]
# Native spacing, working spacing: up and down at once, exact ties (8 to 2, 3 to 2), uneven ones, unchanged ones.
SPACINGS = [
    ((0.7949, 0.9765625, 5.0), (1.5, 1.5, 2.0)),
    ((8.0, 3.0, 1.0), (2.0, 2.0, 2.0)),
    ((1.0004, 0.31, 2.5), (1.0, 1.5, 2.5)),
    ((5.0, 5.003, 1.25), (5.004, 5.0, 1.25)),  # nearer to unchanged than MONAI cares for
]


def affine_of(axes: Triple, signs: Triple, spacing: Sequence[float]) -> np.ndarray:
    affine = np.eye(4)
    affine[:3, :3] = 0
    for axis in range(3):
        affine[axes[axis], axis] = signs[axis] * spacing[axis]
    affine[:3, 3] = (10.1, -200.7, 30.3)
    return affine


def monais(voxels: np.ndarray, affine: np.ndarray, spacing: Sequence[float], mode: str) -> torch.Tensor:
    """Return what MONAI makes of [X, Y, Z] voxels: [X, Y, Z] along R, A, S."""
    image = MetaTensor(torch.from_numpy(voxels.astype(np.float64))[None], affine=torch.from_numpy(affine))
    found = Spacing(spacing, mode=mode)(Orientation("RAS", labels=LABELS)(image))
    return torch.as_tensor(found.as_tensor()[0])


def ours(voxels: np.ndarray, affine: np.ndarray, spacing: Sequence[float], *, nearest: bool) -> torch.Tensor:
    grid = working_grid(voxels.shape, affine, spacing)
    return to_working(torch.from_numpy(np.asfortranarray(voxels).T)[None], grid, nearest=nearest)[0]


@pytest.mark.parametrize(("axes", "signs"), ORIENTATIONS)
@pytest.mark.parametrize(("native", "working"), SPACINGS)
def test_axis_aligned_grids_equal_monai(axes, signs, native, working):
    """To a millionth of the intensity range, and every label, ties included."""
    rng = np.random.default_rng(axes[0] + 3 * axes[1])
    affine = affine_of(axes, signs, native)
    image = rng.integers(-1000, 1000, (15, 12, 9)).astype(np.int16)
    label = rng.integers(0, 5, image.shape).astype(np.uint8)
    expected = monais(image, affine, working, "bilinear")
    found = ours(image, affine, working, nearest=False)
    assert found.shape == expected.shape
    assert (found.float() - expected).abs().max() <= 2000 * 1e-6
    carried = ours(label, affine, working, nearest=True)
    assert carried.dtype == torch.uint8
    assert torch.equal(carried, monais(label, affine, working, "nearest").to(torch.uint8))


@pytest.mark.parametrize("shear", [0.0, 0.3], ids=["rotated", "sheared"])
@pytest.mark.parametrize("flip", [1, -1])
def test_oblique_grids_equal_monai(shear, flip):
    turn = np.array([[0.936, -0.352, 0, 5], [0.352, 0.936, 0, -7], [0, 0, 1, 3], [0, 0, 0, 1]])
    tilt = np.eye(4)
    tilt[1, 2] = shear
    affine = turn @ tilt @ np.diag([flip * 0.81, 1.23, 3.1, 1])
    rng = np.random.default_rng(0)
    image = rng.normal(size=(17, 14, 11)).astype(np.float32)
    label = rng.integers(0, 5, image.shape).astype(np.uint8)
    spacing = (1.5, 1.4, 2.0)
    assert working_grid(image.shape, affine, spacing).separable == (shear == 0)
    expected = monais(image, affine, spacing, "bilinear")
    found = ours(image, affine, spacing, nearest=False)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 1e-5
    assert torch.equal(ours(label, affine, spacing, nearest=True).float(), monais(label, affine, spacing, "nearest"))


def test_a_crop_is_that_part_of_the_whole_and_channels_go_one_by_one():
    rng = np.random.default_rng(0)
    voxels = torch.from_numpy(rng.normal(size=(2, 9, 12, 10)).astype(np.float32))
    for tilt in (0.0, 0.2):
        affine = affine_of((2, 0, 1), (-1, 1, -1), (1.0, 2.0, 1.5))
        affine[2, 1] += tilt
        grid = working_grid((10, 12, 9), affine, (1.3, 1.3, 1.3))
        whole = to_working(voxels, grid, nearest=False)
        part = to_working(voxels, grid.cropped((2, 1, 3), (4, 5, 2)), nearest=False)
        torch.testing.assert_close(part, whole[:, 2:6, 1:6, 3:5])
        assert torch.equal(whole[1:], to_working(voxels[1:], grid, nearest=False))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_separable_resampling_equals_scipy(data):
    """In whatever order the axes are taken, and however thin the slabs."""
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    shape = [data.draw(st.integers(1, 12)) for _ in range(3)]
    counts = [data.draw(st.integers(1, 24)) for _ in range(3)]
    volume = rng.normal(size=shape)
    positions = [
        rng.uniform(0, n - 1, m) if data.draw(st.booleans()) else rng.integers(0, n, m).astype(float)
        for n, m in zip(shape, counts, strict=True)
    ]
    expected = map_coordinates(volume, np.meshgrid(*positions, indexing="ij"), order=1)
    slab_voxels, module.SLAB_VOXELS = module.SLAB_VOXELS, data.draw(st.sampled_from([1, 50, 10**6]))
    try:
        found = resample(torch.from_numpy(volume), positions)
    finally:
        module.SLAB_VOXELS = slab_voxels
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_ramp_stays_a_ramp():
    """Linear interpolation of x + 10 y + 100 z is exact."""
    x, y, z = (torch.arange(n, dtype=torch.float32) for n in (5, 6, 7))
    ramp = x[:, None, None] + 10 * y[:, None] + 100 * z
    at = [np.array([0.5, 3.25]), np.array([4.0, 0.1, 2.5]), np.array([6.0, 5.5])]
    expected = at[0][:, None, None] + 10 * at[1][:, None] + 100 * at[2]
    np.testing.assert_allclose(resample(ramp, at), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float64])
def test_whole_positions_pick_voxels_and_keep_the_type(dtype):
    volume = torch.arange(60).reshape(3, 4, 5).to(dtype)
    found = resample(volume, [np.array([2.0, 0]), np.array([1.0, 1, 3]), np.array([4 - 1e-9])])
    assert found.dtype == dtype
    assert found.tolist() == [[[49], [49], [59]], [[9], [9], [19]]]


@pytest.mark.parametrize("nearest", [False, True])
def test_sheared_resampling_equals_scipy(nearest):
    """With the border repeated outside."""
    volume = np.random.default_rng(0).normal(size=(2, 8, 9, 10))
    matrix = np.array(
        [[0.913, 0.217, 0, 0.331], [-0.107, 1.129, 0.293, -0.411], [0, 0.201, 0.813, 0.707], [0, 0, 0, 1]]
    )
    start, shape = (1, 0, 2), (6, 7, 9)
    grid = np.stack(np.meshgrid(*(np.arange(a, a + n) for a, n in zip(start, shape, strict=True)), indexing="ij"))
    points = np.tensordot(matrix[:3, :3], grid, 1) + matrix[:3, 3, None, None, None]
    found = resample_sheared(torch.from_numpy(volume), matrix, start, shape, nearest=nearest)
    for channel in range(2):
        held = np.clip(points, 0, np.array([7, 8, 9])[:, None, None, None])
        expected = map_coordinates(volume[channel], np.rint(held) if nearest else held, order=1)
        np.testing.assert_allclose(found[channel], expected, atol=1e-6)


@pytest.mark.gpu
def test_the_gpu_gives_what_the_cpu_gives():
    voxels = torch.from_numpy(np.random.default_rng(0).integers(-1000, 1000, (1, 30, 40, 50)).astype(np.int16))
    for tilt in (0.0, 0.2):
        affine = np.diag([0.8, 0.9, 3.0, 1])
        affine[1, 2] = tilt
        grid = working_grid((50, 40, 30), affine, (1.5, 1.5, 2.0))
        for nearest in (False, True):
            expected = to_working(voxels, grid, nearest=nearest)
            found = to_working(voxels.cuda(), grid, nearest=nearest)
            assert found.is_cuda
            torch.testing.assert_close(found.cpu(), expected, atol=1e-3, rtol=0)
