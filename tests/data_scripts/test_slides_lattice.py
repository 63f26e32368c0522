import numpy as np
import pytest
from scipy.spatial import cKDTree

from data_scripts.slides_lattice import MARGIN, PITCH, enlarge, grid, nodes_for, pixels, ramp, scatter, values_at, waves


def test_lengths_become_pixels_of_half_a_micrometre() -> None:
    assert pixels(100) == 200


def test_a_field_reaches_beyond_the_slide_on_both_sides() -> None:
    nodes = nodes_for(1000)
    rows, columns = grid(nodes)
    assert rows.shape == (nodes, 1)
    assert columns.shape == (1, nodes)
    assert rows[0, 0] == -MARGIN * PITCH
    assert rows[-1, 0] >= 1000 + (MARGIN - 1) * PITCH


def test_a_linear_field_is_enlarged_exactly_and_tiles_meet() -> None:
    nodes = nodes_for(256)
    rows, columns = grid(nodes)
    field = (2 * rows + 3 * columns).astype(np.float32)
    expected = 2 * np.arange(16, 96)[:, None] + 3 * np.arange(-8, 56)[None]
    assert np.allclose(enlarge(field, 16, -8, 80, 64), expected, atol=1e-3)
    noise = np.random.default_rng(0).standard_normal((nodes, nodes)).astype(np.float32)
    whole = enlarge(noise, 0, 0, 128, 128)
    assert np.array_equal(enlarge(noise, 64, 32, 64, 96), whole[64:, 32:])


def test_values_are_those_of_the_nearest_node_and_of_the_rim_outside() -> None:
    field = np.arange(nodes_for(64) ** 2, dtype=np.float32).reshape(nodes_for(64), -1)
    places = np.array([[0, 0], [3.9, 12.1], [-1000, 1e6]], np.float32)
    assert values_at(field, places).tolist() == [
        field[MARGIN, MARGIN], field[MARGIN, MARGIN + 2], field[0, -1]
    ]  # fmt: skip


def test_a_ramp_climbs_or_falls() -> None:
    values = np.array([0, 1, 2, 3, 4], np.float32)
    assert ramp(values, 1, 3).tolist() == [0, 0, 0.5, 1, 1]
    assert ramp(values, 3, 1).tolist() == [1, 1, 0.5, 0, 0]


@pytest.mark.parametrize("length", [60, 300])
def test_waves_have_mean_0_deviation_1_and_bumps_of_their_length(length: float) -> None:
    field = waves(600, length, np.random.default_rng(0))
    assert abs(float(field.mean())) < 0.2
    assert 0.6 < float(field.std()) < 1.2
    near = np.corrcoef(field[:, :-1].ravel(), field[:, 1:].ravel())[0, 1]
    steps = round(pixels(length) / PITCH)
    far = np.corrcoef(field[:, :-steps].ravel(), field[:, steps:].ravel())[0, 1]
    assert near > 0.8
    assert abs(far) < 0.4


def test_places_are_spread_all_over_at_their_spacing() -> None:
    places = scatter(2000, 20, np.random.default_rng(0))
    gaps = np.asarray(cKDTree(places).query(places, k=2)[0])
    assert 25 < np.median(gaps[:, 1]) < 40  # 40 px apart, shaken
    inside = ((places >= 0) & (places < 2000)).all(1)
    assert inside.sum() == pytest.approx(2000**2 / (40**2 * 0.75**0.5), rel=0.03)  # of a hexagonal lattice
    quarters = [(places[inside] >= corner).all(1).mean() for corner in ((1000, 1000), (0, 1000), (1000, 0))]
    assert quarters == pytest.approx([0.25, 0.5, 0.5], abs=0.02)
