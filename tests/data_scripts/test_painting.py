"""The painter: volumes, borders and order of what it paints, by hand and by property."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medspeed.data_scripts import painting
from medspeed.data_scripts.painting import (
    Organ,
    Part,
    Scan,
    Solid,
    ball,
    draw,
    paint,
    rotation,
    slabs,
    tube,
    value_noise,
)

LONG = 1e5  # mm: the half axis of a cylinder, far beyond any field of view
SHAPE = (40, 36, 30)
BOX = (slice(0, 40), slice(0, 36), slice(0, 30))
MIDDLE = np.array([19.5, 17.5, 14.5])


def laid(
    *parts: Part, shape: tuple[int, int, int] = SHAPE, channels: tuple[int, ...] = ()
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
    """Return the values, over 0, and the labels that parts leave."""
    values, labels = np.zeros((*channels, *shape), np.float32), np.empty(shape, np.uint8)
    relief = value_noise(shape, (1, 1, 1), 9, np.random.default_rng(0))
    for slab in slabs(shape):
        labels[slab] = paint(values[..., *slab], slab, parts, relief(slab))
    return values, labels


def part(value: float, *solids: Solid, label: int = 0) -> Part:
    return Part(value, label, solids)


def hollow(solid: Solid) -> Solid:
    return replace(solid, hollow=True)


@settings(deadline=None, max_examples=25)
@given(radii=st.tuples(*[st.floats(6, 10)] * 3), degrees=st.floats(-90, 90), axis=st.sampled_from([0, 1, 2]))
def test_an_ellipsoid_covers_its_volume(radii: tuple[float, float, float], degrees: float, axis: int) -> None:
    values, _ = laid(part(1, ball(MIDDLE + 0.3, radii, degrees * np.eye(3)[axis])))
    assert values.sum(dtype=float) == pytest.approx(4 / 3 * np.pi * np.prod(radii), rel=0.02)


def test_distance_counts_voxels_along_the_normal() -> None:
    gap = np.broadcast_to(ball((20, 18, 14), (8, 9, 10)).distance(BOX), SHAPE)
    assert gap[30, 18, 14] == pytest.approx(2.0)
    assert gap[20, 33, 14] == pytest.approx(6.0)
    assert gap[20, 18, 20] == pytest.approx(-4.0)


def test_a_cylinder_needs_no_volume() -> None:
    assert ball((20, 18, 0), (8, 8, LONG)).distance(BOX).shape == (40, 36, 1)


def test_a_voxel_cut_in_half_is_half_painted_and_labelled() -> None:
    # a slab whose surface passes through the middle of the voxels at x = 25
    values, labels = laid(part(100.0, ball((-75, 0, 0), (100, LONG, LONG)), label=3))
    assert values[:, 0, 0].tolist() == [100] * 25 + [50] + [0] * 14
    assert labels[:, 0, 0].tolist() == [3] * 26 + [0] * 14


def test_later_parts_lie_on_top_and_take_labels_back() -> None:
    solid = ball(MIDDLE, (10, 10, 10))
    values, labels = laid(part(100.0, solid, label=1), part(50.0, solid.grown(-5.0)))
    assert (values[20, 18, 14], labels[20, 18, 14]) == (50, 0)
    assert (values[27, 18, 14], labels[27, 18, 14]) == (100, 1)


def test_a_part_lies_in_all_its_solids_and_out_of_hollow_ones() -> None:
    solid, left = ball(MIDDLE, (12, 12, 12)), ball((-80.5, 0, 0), (100, LONG, LONG))
    below = ball((0, 0, -85.5), (LONG, LONG, 100))
    values, _ = laid(part(100.0, solid, left, hollow(below)))
    whole, _ = laid(part(100.0, solid))
    x, _, z = np.broadcast_arrays(*np.ogrid[BOX])
    keep, gone = (x < 18) & (z > 16), (x > 21) | (z < 13)
    assert np.array_equal(values[keep], whole[keep])
    assert values[keep].any()
    assert not values[gone].any()


def test_a_value_for_each_channel_is_laid_over_each_by_the_same_share() -> None:
    values, labels = laid(
        Part(np.array([10.0, -2.0]), 2, [ball((4, 4, 4), (3.5, 3.5, 3.5))]), shape=(9, 9, 9), channels=(2,)
    )
    # along x the surface lies 3.5 voxels out: voxel 7 is just inside, voxel 8 outside
    assert values[0, 4:, 4, 4].tolist() == pytest.approx([10, 10, 10, 10, 0], abs=1e-5)
    assert values[1, 4:, 4, 4].tolist() == pytest.approx([-2, -2, -2, -2, 0], abs=1e-5)
    assert labels[4, 4].tolist() == [0, 2, 2, 2, 2, 2, 2, 2, 0]


def test_a_tube_runs_from_end_to_end() -> None:
    solid = tube((-9.5, -8.25, -9.0), (6.5, 9.75, 13.0), 4.0)
    axes, along = solid.frame[:3, :3], np.array([16.0, 18.0, 22.0])
    u = np.linalg.solve(solid.frame, [6.5, 9.75, 13.0, 1])
    assert np.linalg.norm(u[:3]) == pytest.approx(1.0)
    across = np.cross(along, [1.0, 2.0, 3.0])
    u = np.linalg.solve(axes, across / np.linalg.norm(across) * 4.0)
    assert np.linalg.norm(u) == pytest.approx(1.0)
    assert axes.T @ axes == pytest.approx(np.diag([266.0, 16.0, 16.0]))


def half_axes(solid: Solid) -> npt.NDArray[np.float64]:
    lengths: npt.NDArray[np.float64] = np.linalg.norm(solid.frame[:3, :3], axis=0)
    return lengths


def test_growing_changes_half_axes_and_never_turns_inside_out() -> None:
    solid = ball((0, 0, 0), (8, 9, 3), turn=(0, 0, 30))
    assert half_axes(solid.grown(2.0)) == pytest.approx([10, 11, 5])
    assert half_axes(solid.grown(-4.0)) == pytest.approx([4, 5, 0.3])


def test_mirrored_solids_are_mirror_images_and_a_rotation_turns_right_to_anterior() -> None:
    row = Organ("x", balls=[(6, 3, 2, 6, 10, 7)], turn=(0, 0, 25), mirrored=True)
    right, left = row.solids(np.random.default_rng(0))
    assert left.frame[:3, 3].tolist() == [-6, 3, 2]
    at = np.eye(4)
    at[:3, 3] = MIDDLE
    assert laid(part(9, left.moved(at)))[0] == pytest.approx(laid(part(9, right.moved(at)))[0][::-1], abs=1e-4)
    assert rotation((0, 0, 90)) @ [1.0, 0, 0] == pytest.approx([0, 1, 0])
    assert rotation((90, 0, 90)) @ [0, 1.0, 0] == pytest.approx([0, 0, 1])  # first about right, last about superior


def test_what_lies_outside_the_field_of_view_changes_nothing() -> None:
    far, near = ball((500, 0, 0), (9, 9, 9)), ball((20, 18, 15), (9, 9, 9))
    values, labels = laid(part(100.0, far, label=1), part(100.0, near, far, label=1))
    assert not values.any()
    assert not labels.any()


def test_the_slabs_leave_no_seams(monkeypatch: pytest.MonkeyPatch) -> None:
    solid = replace(ball(MIDDLE, (15.0, 20, 25)), lumps=0.1)
    whole = laid(part(100.0, solid, label=1))
    monkeypatch.setattr(painting, "_SLAB_VOXELS", 36 * 30 * 3)
    thin = laid(part(100.0, solid, label=1))
    assert thin[0] == pytest.approx(whole[0], abs=1e-2)
    assert np.array_equal(whole[1], thin[1])


def test_an_organ_is_drawn_in_layers_within_and_beside_others() -> None:
    shell = Organ("shell", {"wall": 0, "content": -2}, [(0, 0, 0, 10, 10, 10)], gas=1.0)
    hole = Organ("hole", balls=[(5, 0, 0, 3, 3, 3)])
    core = Organ("core", {"wall": 0}, [(0, 0, 0, 5, 5, 5)], inside={"shell": -1}, carved={"hole": (2, 2)})
    to_voxels = np.diag([0.5, 1.0, 2.0, 1.0])
    tissues = {"wall": (1.0, 1.0), "content": (2.0, 3.0), "gas": (-9.0, -9.0)}
    wall, content, gas, last = draw([shell, hole, core], tissues, {"wall": 4}, to_voxels, np.random.default_rng(0))
    assert (wall.value, wall.label, content.label, gas.value) == (1.0, 4, 0, -9.0)
    assert 2 <= content.value <= 3
    assert half_axes(content.solids[0]).tolist() == [4, 8, 16]  # grown in mm, then carried to voxels
    assert [half_axes(solid).tolist() for solid in last.solids] == [[2.5, 5, 10], [4.5, 9, 18], [2.5, 5, 10]]
    assert [solid.hollow for solid in last.solids] == [False, False, True]
    # the bubble lies anterior of a level near the middle
    assert half_axes(gas.solids[0]).tolist() == half_axes(content.solids[0]).tolist()
    assert -12 <= gas.solids[1].bounds()[0][1] <= 18


def test_a_repeated_organ_is_drawn_at_each_combination_of_its_offsets() -> None:
    row = Organ("x", {"wall": 0}, [(1, 2, 3, 4, 4, 4)], repeat=((0, 10), (0,), (0, 20, 40)))
    parts = draw([row], {"wall": (0.0, 1.0)}, {}, np.eye(4), np.random.default_rng(0))
    centres = [part.solids[0].frame[:3, 3].tolist() for part in parts]
    assert centres == [[x, 2, z] for x in (1, 11) for z in (3, 23, 43)]
    assert len({part.value for part in parts}) == 6


def test_distances_to_others_may_be_drawn() -> None:
    row = Organ("x", {"wall": 0}, [(0, 0, 0, 9, 9, 9)], carved={"y": (1, 3)})
    rows, tissues = [Organ("y", balls=[(0, 0, 0, 5, 5, 5)]), row], {"wall": (0.0, 1.0)}
    halves = [half_axes(draw(rows, tissues, {}, np.eye(4), np.random.default_rng(s))[0].solids[1])[0] for s in range(9)]
    assert 6 <= min(halves) < 7 < max(halves) <= 8


def test_organs_vary_as_far_as_they_are_said_to() -> None:
    row = Organ("x", balls=[(1, 2, 3, 10, 20, 30)], shift=3.0, sized=0.2, tilt=10.0, lumps=0.1)
    solids = [row.solids(np.random.default_rng(seed))[0] for seed in range(60)]
    centres = np.array([solid.frame[:3, 3] for solid in solids]) - (1, 2, 3)
    sizes = np.array([half_axes(solid) for solid in solids]) / (10, 20, 30)
    assert 2.5 < np.abs(centres).max() <= 3.0
    assert 0.8 <= sizes.min() < 0.85 < 1.15 < sizes.max() <= 1.2
    assert max(np.degrees(np.arccos(s.frame[2, 2] / half_axes(s)[2])) for s in solids) > 8
    assert {solid.lumps for solid in solids} == {0.1}


def test_bumps_of_a_part_are_those_of_the_whole() -> None:
    noise = value_noise(SHAPE, (1.0, 1.5, 2.0), 7.0, np.random.default_rng(2))
    box = (slice(5, 17), slice(3, 36), slice(29, 30))
    assert np.array_equal(noise(box), noise(BOX)[box])


def test_noise_is_smooth_and_of_the_deviation_asked_for() -> None:
    shape = (64, 64, 64)
    noise = value_noise(shape, (2, 2, 2), 7, np.random.default_rng(0))((slice(0, 64),) * 3)
    assert 0.3 < noise.std() < 1
    assert np.corrcoef(noise[1:].ravel(), noise[:-1].ravel())[0, 1] > 0.8


def test_turning_a_scan_moves_no_voxel_in_the_patient() -> None:
    image = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    scan = Scan(image, image.astype(np.uint8), np.diag([2.0, 3.0, 4.0, 1.0]))
    turned = scan.turned("SPL")
    assert turned.image.shape == (4, 3, 2)
    # the voxel (1, 0, 3) of the first is (3, 2, 0) of the second: superior, then posterior, then left
    assert turned.image[3, 2, 0] == turned.label[3, 2, 0] == image[1, 0, 3]
    assert (turned.affine @ [3, 2, 0, 1]).tolist() == (scan.affine @ [1, 0, 3, 1]).tolist()
