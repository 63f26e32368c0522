"""The painter: volumes, borders and order of what it paints, by hand and by property."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_scripts import painting
from data_scripts.painting import (
    LONG,
    Ellipsoid,
    Grid,
    Look,
    Part,
    Stencil,
    ValueNoise,
    distance,
    ellipsoid,
    grown,
    paint,
    posed,
    rotation,
    tube,
)

CLEAN = Look(empty=0.0, noise=0.0, texture=0.0, bounds=(-2000.0, 2000.0))
GRID = Grid((40, 36, 30), (1.0, 1.5, 2.0), (-19.5, -26.25, -29.0))


def painted(*parts: Part | Stencil, grid: Grid = GRID) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.uint8]]:
    return paint(grid, parts, CLEAN, np.random.default_rng(0))


@settings(deadline=None, max_examples=25)
@given(
    radii=st.tuples(*[st.floats(7, 12)] * 3),
    spacing=st.tuples(*[st.floats(0.6, 1.5)] * 3),
    degrees=st.floats(-90, 90),
    axis=st.sampled_from([0, 1, 2]),
)
def test_an_ellipsoid_covers_its_volume(
    radii: tuple[float, float, float], spacing: tuple[float, float, float], degrees: float, axis: int
) -> None:
    nx, ny, nz = (int(30 / h) for h in spacing)
    hx, hy, hz = spacing
    grid = Grid((nx, ny, nz), spacing, (-(nx - 1) / 2 * hx, -(ny - 1) / 2 * hy, -(nz - 1) / 2 * hz))
    image, _ = painted(
        Part("x", 1000.0, (ellipsoid((0.3, -0.2, 0.1), radii, turn=rotation(axis, degrees)),)), grid=grid
    )
    volume = image.sum(dtype=float) / 1000 * np.prod(spacing)
    assert volume == pytest.approx(4 / 3 * np.pi * np.prod(radii), rel=0.02)


def test_distance_counts_voxels_along_each_axis() -> None:
    solid = ellipsoid((0.5, 0.75, -1.0), (8, 9, 10))
    gap = np.broadcast_to(distance(solid, GRID), GRID.shape)
    # the voxel (x, y, z) = (10.5, 0.75, -1) lies 10 mm right of the centre, 2 mm outside, and voxels are 1 mm wide
    assert gap[30, 18, 14] == pytest.approx(2.0)
    # 15 mm anterior, 6 mm outside, 1.5 mm voxels; 8 mm superior, 2 mm inside, 2 mm voxels
    assert gap[20, 28, 14] == pytest.approx(4.0)
    assert gap[20, 18, 18] == pytest.approx(-1.0)


def test_a_cylinder_needs_no_volume() -> None:
    assert distance(ellipsoid((0, 0, 0), (8, 8, LONG)), GRID).shape == (40, 36, 1)


def test_a_voxel_cut_in_half_is_half_painted_and_labelled() -> None:
    # a slab whose surface passes through the middle of the voxels at x = 5.5
    image, label = painted(Part("x", 100.0, (ellipsoid((-94.5, 0, 0), (100, LONG, LONG)),), label=3))
    assert image[:, 0, 0].tolist() == [100] * 25 + [50] + [0] * 14
    assert label[:, 0, 0].tolist() == [3] * 26 + [0] * 14


def test_later_parts_lie_on_top_and_take_labels_back() -> None:
    ball = ellipsoid((0, 0, 0), (10, 10, 10))
    image, label = painted(Part("a", 100.0, (ball,), label=1), Part("b", 50.0, (grown(ball, -5.0),)))
    assert (image[20, 18, 14], label[20, 18, 14]) == (50, 0)
    assert (image[27, 18, 14], label[27, 18, 14]) == (100, 1)


def test_inside_carved_and_surface_cut_a_part() -> None:
    ball, left = ellipsoid((0, 0, 0), (12, 12, 12)), ellipsoid((-100, 0, 0), (100, LONG, LONG))
    below = ellipsoid((0, 0, -100), (LONG, LONG, 100))
    level = np.array([50.0, 0.0, 50.0])
    image, _ = painted(Part("x", 100.0, (ball,), inside=(left,), carved=(below,), surface=level))
    x, y, z = GRID.axes()
    keep = (x < -1) & (z > 2) & (y > 1.5)
    gone = (x > 1) | (z < -2) | (y < -1.5)
    whole, _ = painted(Part("x", 100.0, (ball,)))
    assert np.array_equal(image[np.broadcast_to(keep, GRID.shape)], whole[np.broadcast_to(keep, GRID.shape)])
    assert not image[np.broadcast_to(gone, GRID.shape)].any()
    assert image.any()


def test_a_tube_runs_from_end_to_end() -> None:
    solid = tube((-9.5, -8.25, -9.0), (6.5, 9.75, 13.0), 4.0)
    along = np.array([16.0, 18.0, 22.0])
    u = np.linalg.solve(solid.axes, np.array([6.5, 9.75, 13.0]) - solid.centre)
    assert np.linalg.norm(u) == pytest.approx(1.0)
    across = np.cross(along, [1.0, 2.0, 3.0])
    u = np.linalg.solve(solid.axes, across / np.linalg.norm(across) * 4.0)
    assert np.linalg.norm(u) == pytest.approx(1.0)
    assert solid.axes.T @ solid.axes == pytest.approx(np.diag([266.0, 16.0, 16.0]))


def test_growing_changes_half_axes_and_never_turns_inside_out() -> None:
    solid = ellipsoid((0, 0, 0), (8, 9, 3), turn=rotation(2, 30))
    assert np.linalg.norm(grown(solid, 2.0).axes, axis=0) == pytest.approx([10, 11, 5])
    assert np.linalg.norm(grown(solid, -4.0).axes, axis=0) == pytest.approx([4, 5, 0.3])


def test_a_mirrored_scene_is_the_mirror_image() -> None:
    part = Part(
        "x", 900.0, (ellipsoid((6, 3, 2), (6, 10, 7), turn=rotation(2, 25)),), surface=np.array([6.0, 0.0, 0.0])
    )
    mirrored = posed(part, np.diag([-1.0, 1, 1]), np.zeros(3))
    assert np.array_equal(painted(mirrored)[0], painted(part)[0][::-1])
    moved = posed(part, np.eye(3), np.array([2.0, 3.0, -4.0]))
    assert np.array_equal(painted(moved)[0][2:, 2:, :-2], painted(part)[0][:-2, :-2, 2:])


def test_a_rotation_turns_right_to_anterior() -> None:
    assert rotation(2, 90) @ [1.0, 0, 0] == pytest.approx([0, 1, 0])


def test_a_stencil_is_painted_by_its_cover() -> None:
    cover = np.linspace(0, 1, 8, dtype=np.float32).reshape(2, 2, 2)
    image, label = painted(Stencil(200.0, (slice(38, 40), slice(0, 2), slice(5, 7)), cover))
    assert np.array_equal(image[38:40, 0:2, 5:7], np.rint(200 * cover))
    assert image.sum() == image[38:40, 0:2, 5:7].sum()
    assert not label.any()


def test_what_lies_outside_the_field_of_view_changes_nothing() -> None:
    far = Part("x", 100.0, (ellipsoid((500, 0, 0), (9, 9, 9)),), label=1)
    beyond = replace(far, solids=(ellipsoid((0, 0, 0), (9, 9, 9)),), inside=far.solids)
    image, label = painted(far, beyond)
    assert not image.any()
    assert not label.any()


def test_the_slabs_leave_no_seams(monkeypatch: pytest.MonkeyPatch) -> None:
    look = replace(CLEAN, noise=5.0, texture=5.0)
    parts: list[Part | Stencil] = [
        Part("x", 100.0, (Ellipsoid(np.zeros(3), np.diag([15.0, 20, 25]), lumps=0.1),), label=1),
        Stencil(50.0, (slice(3, 30), slice(4, 8), slice(2, 9)), np.ones((27, 4, 7), np.float32)),
    ]
    whole = paint(GRID, parts, look, np.random.default_rng(1))
    monkeypatch.setattr(painting, "_SLAB_VOXELS", 36 * 30 * 3)
    thin = paint(GRID, parts, look, np.random.default_rng(1))
    assert np.array_equal(whole[0], thin[0])
    assert np.array_equal(whole[1], thin[1])


def test_noise_and_texture_have_the_deviation_asked_for() -> None:
    grid = Grid((64, 64, 64), (2.0, 2.0, 2.0), (0.0, 0.0, 0.0))
    noise, _ = paint(grid, [], replace(CLEAN, noise=25.0), np.random.default_rng(0))
    assert noise.std() == pytest.approx(25.0, rel=0.02)
    texture, _ = paint(grid, [], replace(CLEAN, texture=100.0), np.random.default_rng(0))
    assert 30 < texture.std() < 100
    # smooth: neighbours are alike, where noise is not
    assert np.corrcoef(texture[1:].ravel(), texture[:-1].ravel())[0, 1] > 0.8
    assert abs(np.corrcoef(noise[1:].ravel(), noise[:-1].ravel())[0, 1]) < 0.02


def test_values_stay_in_bounds() -> None:
    image, _ = paint(GRID, [], Look(-1000.0, 60.0, 0.0, (-1024.0, -990.0)), np.random.default_rng(0))
    assert (image.min(), image.max()) == (-1024, -990)


def test_bumps_of_a_part_are_those_of_the_whole() -> None:
    noise = ValueNoise(GRID, 7.0, np.random.default_rng(2))
    box = (slice(5, 17), slice(3, 36), slice(29, 30))
    assert noise.sample(GRID.part(box)) == pytest.approx(noise.sample(GRID)[box], abs=1e-5)
