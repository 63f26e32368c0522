import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.data.geometry import WorkingGrid, working_grid
from common.files import from_json

ORIENTATIONS = [(axes, signs) for axes in permutations(range(3)) for signs in product((1, -1), repeat=3)]


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
    for axis, (forth, back) in enumerate(zip(grid.working_positions(), grid.native_positions(), strict=True)):
        size, count = grid.oriented_shape[axis], grid.shape[axis]
        ratio = found[axis] / native[grid.file_axes[axis]]
        assert abs(count - ((size - 1) / ratio + 1)) <= 0.5 + 1e-9  # rounded to the nearest whole number
        np.testing.assert_allclose(forth, np.minimum(np.arange(count) * ratio, size - 1), atol=1e-9)
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
