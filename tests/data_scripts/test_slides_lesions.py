"""Lesions: outlines, masks, sizes."""

import numpy as np
import pytest
from matplotlib.path import Path as Outline

from data_scripts.slides_lattice import MARGIN, PITCH, nodes_for
from data_scripts.slides_lesions import MACRO_UM, Lesion, draw_lesions, mask_of, rasterise


def test_pixels_whose_centres_lie_inside_are_filled() -> None:
    square = np.array([[1.0, 2], [4, 2], [4, 4], [1, 4]])
    expected = np.zeros((6, 5), bool)
    expected[2:4, 1:4] = True
    assert np.array_equal(rasterise([square], (6, 5)), expected)
    assert np.array_equal(rasterise([square + np.array([0.4, 0.4])], (6, 5)), expected)
    assert np.array_equal(rasterise([square + np.array([0.6, 0])], (6, 5)), np.roll(expected, 1, axis=1))


def test_a_crooked_outline_is_filled_as_matplotlib_would() -> None:
    rng = np.random.default_rng(0)
    theta = np.sort(rng.uniform(0, 2 * np.pi, 60))
    radius = rng.uniform(15, 70, 60)
    crooked = 50 + radius[:, None] * np.stack([np.cos(theta), np.sin(theta)], axis=1)  # some of it lies outside
    y, x = np.mgrid[:100, :100] + 0.5
    inside = Outline(crooked).contains_points(np.stack([x.ravel(), y.ravel()], axis=1)).reshape(100, 100)
    assert np.array_equal(rasterise([crooked], (100, 100)), inside)


def test_the_long_axis_is_the_greatest_distance_in_um() -> None:
    assert Lesion(np.array([[0.0, 0], [300, 0], [300, 400], [10, 10]]), (), "_0").long_axis == pytest.approx(250)


def test_islands_are_no_tumour() -> None:
    outer, inner = (np.array([[a, a], [b, a], [b, b], [a, b]], float) for a, b in ((2, 18), (6, 10)))
    mask = mask_of([Lesion(outer, (inner,), "_0")], 20)
    assert mask.dtype == np.uint8
    assert mask.sum() == 16 * 16 - 4 * 4
    assert mask[7, 7] == 0


@pytest.mark.parametrize("seed", range(6))
def test_lesions_keep_to_their_room_and_apart_and_the_first_is_large(seed: int) -> None:
    size = 2048
    room = np.zeros((nodes_for(size),) * 2, bool)
    room[MARGIN + 10 : MARGIN + 230, MARGIN + 10 : MARGIN + 240] = True
    lesions = draw_lesions(room, size, np.random.default_rng(seed))
    assert 1 <= len(lesions) <= 5
    assert lesions[0].long_axis > MACRO_UM
    masks = [mask_of([Lesion(lesion.outline, (), "_0")], size) for lesion in lesions]
    assert max(np.sum(masks, axis=0).ravel()) == 1
    for mask in masks:
        rows, columns = np.nonzero(mask)
        assert rows.min() >= 9 * PITCH
        assert rows.max() <= 231 * PITCH
        assert columns.min() >= 9 * PITCH
        assert columns.max() <= 241 * PITCH
