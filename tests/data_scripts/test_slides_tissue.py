"""Fields, tissue and lesions of slides."""

import numpy as np
import pytest
from matplotlib.path import Path as Polygon
from scipy.spatial import cKDTree

from medspeed.data_scripts.slides_tissue import (
    ISLAND,
    MACRO_UM,
    MARGIN,
    NODE,
    Fields,
    draw_ink,
    draw_lesions,
    draw_node,
    long_axis,
    mask_of,
    ramp,
    values_at,
)


def fields(extent: float, seed: int = 0) -> Fields:
    return Fields(extent, np.random.default_rng(seed))


def test_a_field_reaches_beyond_the_slide_on_both_sides() -> None:
    nodes = fields(500)
    assert (nodes.y.shape, nodes.x.shape) == ((136, 1), (1, 136))
    assert nodes.y[0, 0] == nodes.x[0, 0] == -MARGIN * NODE
    assert nodes.y[-1, 0] >= 500 + (MARGIN - 1) * NODE


def test_values_are_those_of_the_nearest_node_and_of_the_rim_outside() -> None:
    field = np.arange(19**2, dtype=np.float32).reshape(19, 19)
    places = np.array([[0, 0], [1.9, 6.1], [-1000, 1e6]], np.float32)
    assert values_at(field, places).tolist() == [field[MARGIN, MARGIN], field[MARGIN, MARGIN + 2], field[0, -1]]


def test_a_ramp_climbs_or_falls() -> None:
    values = np.array([0, 1, 2, 3, 4], np.float32)
    assert ramp(values, 1, 3).tolist() == [0, 0, 0.5, 1, 1]
    assert ramp(values, 3, 1).tolist() == [1, 1, 0.5, 0, 0]


@pytest.mark.parametrize("length", [60, 300])
def test_waves_have_mean_0_deviation_1_and_bumps_of_their_length(length: float) -> None:
    field = fields(2400).waves(length)
    assert abs(float(field.mean())) < 0.2
    assert 0.6 < float(field.std()) < 1.2
    near = np.corrcoef(field[:, :-1].ravel(), field[:, 1:].ravel())[0, 1]
    steps = round(length / NODE)
    far = np.corrcoef(field[:, :-steps].ravel(), field[:, steps:].ravel())[0, 1]
    assert near > 0.8
    assert abs(far) < 0.4


def test_places_are_spread_all_over_at_their_spacing() -> None:
    nodes = fields(1000)
    places = nodes.scatter(np.ones((len(nodes.y),) * 2), 20)
    gaps = np.asarray(cKDTree(places).query(places, k=2)[0])
    assert 12 < np.median(gaps[:, 1]) < 20  # 20 um apart, shaken
    inside = ((places >= 0) & (places < 1000)).all(1)
    assert inside.sum() == pytest.approx(1000**2 / (20**2 * 0.75**0.5), rel=0.03)  # of a hexagonal lattice
    quarters = [(places[inside] >= corner).all(1).mean() for corner in ((500, 500), (0, 500), (500, 0))]
    assert quarters == pytest.approx([0.25, 0.5, 0.5], abs=0.02)


def test_there_is_glass_on_each_slide_and_fat_and_ink_on_some() -> None:
    slides = []
    for nodes in (fields(768, seed) for seed in range(12)):
        depth, node_depth = draw_node(nodes)
        slides.append((depth, node_depth, draw_ink(depth, nodes)))
    shares = [float((depth > 0).mean()) for depth, _, _ in slides]
    assert min(shares) > 0.15
    assert max(shares) < 0.95
    for depth, node_depth, _ in slides:
        assert (node_depth[depth < -10] < 0).all()
    fat = [((node_depth < -20) & (depth > 20)).any() for depth, node_depth, _ in slides]
    inked = [(ink > 0.3).any() for _, _, ink in slides]
    assert 0 < sum(fat) <= len(fat)
    assert 0 < sum(inked) < len(inked)


def test_pixels_whose_centres_lie_inside_are_filled() -> None:
    square = np.array([[1.0, 2], [4, 2], [4, 4], [1, 4]])
    expected = np.zeros((6, 6), np.uint8)
    expected[2:4, 1:4] = 1
    assert np.array_equal(mask_of([("_0", square)], 6), expected)
    assert np.array_equal(mask_of([("_0", square + 0.4)], 6), expected)
    assert np.array_equal(mask_of([("_0", square + np.array([0.6, 0]))], 6), np.roll(expected, 1, axis=1))


def test_a_crooked_outline_is_filled_as_matplotlib_would() -> None:
    rng = np.random.default_rng(0)
    theta = np.sort(rng.uniform(0, 2 * np.pi, 60))
    radius = rng.uniform(15, 70, 60)
    crooked = 50 + radius[:, None] * np.stack([np.cos(theta), np.sin(theta)], axis=1)  # some of it lies outside
    y, x = np.mgrid[:100, :100] + 0.5
    inside = Polygon(crooked).contains_points(np.stack([x.ravel(), y.ravel()], axis=1)).reshape(100, 100)
    assert np.array_equal(mask_of([("_0", crooked)], 100), inside)


def test_the_long_axis_is_the_greatest_distance_in_um() -> None:
    assert long_axis(np.array([[0.0, 0], [300, 0], [300, 400], [10, 10]])) == pytest.approx(250)


def test_islands_are_no_tumour() -> None:
    outer, inner = (np.array([[a, a], [b, a], [b, b], [a, b]], float) for a, b in ((2, 18), (6, 10)))
    mask = mask_of([("_0", outer), (ISLAND, inner)], 20)
    assert mask.dtype == np.uint8
    assert mask.sum() == 16 * 16 - 4 * 4
    assert mask[7, 7] == 0


@pytest.mark.parametrize("seed", range(6))
def test_lesions_keep_to_their_room_and_apart_and_the_first_is_large(seed: int) -> None:
    nodes = fields(1024, seed)
    depth = np.minimum(np.minimum(nodes.y - 40, nodes.x - 40), np.minimum(920 - nodes.y, 960 - nodes.x))
    lesions = [lesion for lesion in draw_lesions(depth, nodes) if lesion[0] != ISLAND]
    assert 1 <= len(lesions) <= 5
    assert long_axis(lesions[0][1]) > MACRO_UM
    assert len({group for group, _ in lesions}) == 1
    masks = [mask_of([lesion], 2048) for lesion in lesions]
    assert np.sum(masks, axis=0).max() == 1
    for mask in masks:
        y, x = np.nonzero(mask)
        assert min(y.min(), x.min()) >= 2 * 60
        assert y.max() <= 2 * 900
        assert x.max() <= 2 * 940
