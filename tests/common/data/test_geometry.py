import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import permutations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.data import MetaTensor
from monai.data import utils as monai
from monai.networks.utils import to_norm_affine as monai_norm_affine
from monai.transforms import Orientation, Spacing
from scipy.ndimage import map_coordinates
from scipy.spatial.transform import Rotation

from medspeed.common.data import geometry as module
from medspeed.common.data.geometry import (
    WorkingGrid,
    resample,
    resample_sheared,
    to_norm_affine,
    to_working,
    triple,
    working_affine,
    working_grid,
)
from medspeed.common.files import from_json

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


def affine_of(
    axes: tuple[int, ...],
    signs: tuple[int, ...],
    spacing: Sequence[float],
    origin: tuple[float, ...] = (10.0, -20.0, 30.0),
) -> np.ndarray:
    """Return the affine of a file whose axis i runs along world axis axes[i], in direction signs[i]."""
    affine = np.eye(4)
    affine[:3, :3] = 0
    for axis in range(3):
        affine[axes[axis], axis] = signs[axis] * spacing[axis]
    affine[:3, 3] = origin
    return affine


def test_doubling_the_spacing_takes_every_second_voxel():
    grid = working_grid((5, 6, 3), np.diag([1.0, 1, 4, 1]), (2.0, 2.0, 2.0))
    assert grid.shape == grid.crop_shape == (3, 4, 5)  # round((n - 1) * native / working + 1), halves to even
    x, y, z = grid.working_positions()
    np.testing.assert_allclose(x, [0, 2, 4])
    np.testing.assert_allclose(y, [0, 2, 4, 5])  # the fourth, at 6, is held at the last voxel
    np.testing.assert_allclose(z, [0, 0.5, 1, 1.5, 2])
    x, y, z = grid.native_positions()
    np.testing.assert_allclose(x, [0, 0.5, 1, 1.5, 2])
    np.testing.assert_allclose(y, [0, 0.5, 1, 1.5, 2, 2.5])
    np.testing.assert_allclose(z, [0, 2, 4])


def test_file_axes_and_flips_of_a_known_orientation():
    """PIR: the first file axis runs from front to back, the second downwards, the third to the right."""
    affine = affine_of((1, 2, 0), (-1, -1, 1), (1.0, 2.0, 3.0))
    grid = working_grid((4, 5, 6), affine, (3.0, 1.0, 2.0))
    assert grid.file_axes == (2, 0, 1)
    assert grid.flipped == (False, True, True)
    assert grid.oriented_shape == (6, 4, 5)
    assert grid.shape == (6, 4, 5)  # the spacing is the file's own
    np.testing.assert_allclose(grid.affine, [[3, 0, 0, 10], [0, 1, 0, -23], [0, 0, 2, 22], [0, 0, 0, 1]])


@pytest.mark.parametrize(("axes", "signs"), ORIENTATIONS)
def test_positions_and_affines_name_the_same_points(axes, signs):
    """A working voxel lies in the world where the oriented file has the position that is said."""
    native = affine_of(axes, signs, (0.7, 1.1, 3.3))
    grid = working_grid((9, 14, 8), native, (1.5, 0.9, 2.0))
    assert grid.separable
    index = np.array([2, 1, 1])
    world = grid.affine @ [*index, 1]
    for axis, positions in enumerate(grid.working_positions()):
        index_in_file = positions[index[axis]]
        if grid.flipped[axis]:
            index_in_file = grid.oriented_shape[axis] - 1 - index_in_file
        along = native[:3, grid.file_axes[axis]]
        np.testing.assert_allclose(world[axis], native[axis, 3] + along[axis] * index_in_file, atol=1e-9)


@settings(deadline=None, max_examples=50)
@given(
    st.tuples(*[st.integers(1, 40)] * 3),
    st.tuples(*[st.floats(0.3, 8)] * 3),
    st.tuples(*[st.floats(0.3, 8)] * 3),
    st.sampled_from(ORIENTATIONS),
)
def test_positions_stay_inside_and_follow_the_spacing(shape, native, working, orientation):
    grid = working_grid(shape, affine_of(orientation[0], orientation[1], native), working)
    found = np.linalg.norm(grid.affine[:3, :3], axis=0)
    assert np.all(np.abs(found - working) <= 1e-3)
    ratios = found / np.array(native)[list(grid.file_axes)]
    if grid.shape == grid.oriented_shape and np.allclose(ratios, 1, atol=1e-3):
        ratios[:] = 1  # so nearly the same grid that MONAI leaves the voxels as they are
    for axis, (forth, back) in enumerate(zip(grid.working_positions(), grid.native_positions(), strict=True)):
        size, count, ratio = grid.oriented_shape[axis], grid.shape[axis], ratios[axis]
        assert abs(count - ((size - 1) / ratio + 1)) <= 0.5 + 1e-9  # rounded to the nearest whole number
        np.testing.assert_allclose(forth, np.minimum(np.arange(count) * ratio, size - 1), atol=3e-5)
        np.testing.assert_allclose(back, np.minimum(np.arange(size) / ratio, count - 1), atol=1e-9)


def test_a_spacing_within_a_thousandth_is_left_alone():
    grid = working_grid((30, 30, 30), np.diag([1.0004, 0.9996, 1.0, 1]), (1.0, 1.0, 1.0))
    for positions in (*grid.working_positions(), *grid.native_positions()):
        np.testing.assert_allclose(positions, np.arange(30), atol=1e-12)


def test_crops_begin_where_they_say():
    grid = working_grid((9, 9, 9), np.eye(4), (0.5, 0.5, 0.5)).cropped((2, 0, 4), (3, 1, 2))
    x, y, z = grid.working_positions()
    np.testing.assert_allclose(x, [1, 1.5, 2])
    np.testing.assert_allclose(y, [0], atol=1e-12)
    np.testing.assert_allclose(z, [2, 2.5])
    assert len(grid.native_positions()[0]) == 9


def test_rotated_affines_are_separable_and_sheared_ones_are_not():
    turn = np.eye(4)
    turn[:2, :2] = [[np.cos(0.3), -np.sin(0.3)], [np.sin(0.3), np.cos(0.3)]]
    spacing = np.diag([0.8, 1.2, 3, 1])
    assert working_grid((64, 64, 20), turn @ spacing, (1.5, 1.5, 2.0)).separable
    shear = np.eye(4)
    shear[1, 2] = 0.2
    assert not working_grid((64, 64, 20), shear @ spacing, (1.5, 1.5, 2.0)).separable
    shear[1, 2] = 1e-7  # what float32 in the header may leave
    assert working_grid((64, 64, 20), shear @ spacing, (1.5, 1.5, 2.0)).separable


def test_a_grid_goes_through_json_bit_for_bit():
    affine = affine_of((2, 0, 1), (-1, 1, -1), (0.7949, 1 / 3, 5.0), (0.1, 1e-7, -804.123456789))
    grid = working_grid((31, 17, 8), affine, (1.5, 1.5, 2.0)).cropped((1, 2, 3), (4, 5, 6))
    again = from_json(WorkingGrid, json.loads(json.dumps(asdict(grid))))
    assert again == grid
    assert np.array_equal(again.affine, grid.affine)


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


def test_as_many_voxels_of_another_size_are_no_copy():
    """4 mm between the first and the last of 5 voxels, 4.2 mm in the working grid."""
    image = np.random.default_rng(0).integers(-1000, 1000, (5, 5, 5)).astype(np.int16)
    expected = monais(image, np.eye(4), (1.05, 1.05, 1.05), "bilinear")
    found = ours(image, np.eye(4), (1.05, 1.05, 1.05), nearest=False)
    assert found.shape == expected.shape == (5, 5, 5)
    assert (found - expected).abs().max() <= 2000 * 1e-6
    assert (found - torch.from_numpy(image)).abs().max() > 10


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


@pytest.mark.parametrize("angles", [(0, 0, 0), (17, -9, 5), (-8, 20, 11)])
@pytest.mark.parametrize(("spacing", "count"), [(2.0, 15 * 17 * 13), (1.5, 20 * 24 * 17)])
def test_a_background_of_zero_stays_zero_where_the_file_is_oblique(angles, spacing, count):
    """Files hold affines in float32: 1e-5 of a bright voxel beside would count as nonzero in the z-score."""
    image = np.zeros((60, 70, 50), np.float32)
    image[15:45, 17:52, 12:37] = 1000
    affine = np.eye(4)
    affine[:3] = np.column_stack((Rotation.from_euler("xyz", angles, degrees=True).as_matrix(), (-31.3, 12.7, 55.1)))
    found = ours(image, affine.astype(np.float32).astype(float), (spacing,) * 3, nearest=False)
    assert (found != 0).sum() == count


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
    found = resample(volume, [np.array([2.0, 0]), np.array([1.0, 1, 3]), np.array([4.0])])
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
