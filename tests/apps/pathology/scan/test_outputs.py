import json

import numpy as np
import openslide
import pytest
import tifffile
from hypothesis import given
from hypothesis import strategies as st
from scipy.ndimage import label
from skimage.measure import regionprops

from medspeed.apps.pathology.scan.outputs import (
    find_detections,
    outline,
    read_detections_csv,
    write_detections_csv,
    write_geojson,
    write_probability_tif,
)
from medspeed.apps.pathology.scan.scan import ProbabilityMap


def map_of(values: np.ndarray, stride: float = 32.0) -> ProbabilityMap:
    values = np.asarray(values, np.float32)
    return ProbabilityMap(values, stride, values > 0, 1)


def test_the_tiff_opens_at_the_slides_place_and_size(tmp_path):
    values = np.linspace(0, 1, 300 * 400).reshape(300, 400)
    write_probability_tif(tmp_path / "p.tif", map_of(values), 0.5, "a")
    with tifffile.TiffFile(tmp_path / "p.tif") as tiff:
        page = tiff.pages.first
        assert np.array_equal(page.asarray(), np.rint(values.astype(np.float32) * 255).astype(np.uint8))
        assert page.is_tiled
        about = json.loads(page.description)
    assert about == {"slide": "a", "stride_px": 32.0, "offset_px": 16.0, "mpp": 0.5, "probability_of_255": 1.0}
    with openslide.OpenSlide(tmp_path / "p.tif") as slide:
        assert slide.dimensions == (400, 300)
        assert float(slide.properties["openslide.mpp-x"]) == pytest.approx(16)
        assert float(slide.properties["openslide.mpp-y"]) == pytest.approx(16)
        assert np.asarray(slide.read_region((399, 299), 0, (1, 1))).tolist() == [[[255, 255, 255, 255]]]
        assert np.asarray(slide.read_region((0, 0), 0, (1, 1))).tolist() == [[[0, 0, 0, 255]]]


def test_without_a_pixel_size_the_tiff_claims_none(tmp_path):
    write_probability_tif(tmp_path / "p.tif", map_of(np.ones((3, 3))), None, "a")
    with openslide.OpenSlide(tmp_path / "p.tif") as slide:
        assert "openslide.mpp-x" not in slide.properties


def test_detections_are_score_x_y_in_pixels_of_level_0(tmp_path):
    values = np.zeros((200, 300))
    values[10, 20], values[150, 250], values[5, 290] = 0.75, 0.9, 0.4
    found = find_detections(map_of(values), 0.5)
    write_detections_csv(tmp_path / "d.csv", found)
    assert (tmp_path / "d.csv").read_text() == "0.900000,8016,4816\n0.750000,656,336\n"
    back = read_detections_csv(tmp_path / "d.csv")
    assert back.tolist() == [[0.9, 8016, 4816], [0.75, 656, 336]]


def test_the_box_around_a_peak_has_one_size_in_um():
    values = np.zeros((100, 100))
    values[50, 20], values[50, 60] = 0.9, 0.8  # 40 cells apart; the box of 746 um reaches 373 to each side
    assert len(find_detections(map_of(values, 32), 0.25)) == 1  # 320 um
    assert len(find_detections(map_of(values, 64), 0.25)) == 2  # 640 um


def test_no_detections_are_an_empty_file(tmp_path):
    write_detections_csv(tmp_path / "d.csv", find_detections(map_of(np.zeros((3, 3))), 0.5))
    assert (tmp_path / "d.csv").read_text() == ""
    assert len(read_detections_csv(tmp_path / "d.csv")) == 0


def test_a_damaged_csv_is_named(tmp_path):
    (tmp_path / "d.csv").write_text("0.9,12\n")
    with pytest.raises(ValueError, match=r"d\.csv: rows must be score,x,y"):
        read_detections_csv(tmp_path / "d.csv")


def test_geojson_outlines_regions_for_qupath(tmp_path):
    values = np.zeros((4, 5))
    values[1, 1], values[1, 2], values[3, 4] = 0.5, 1.0, 0.75
    values[2, 1] = 0.49
    write_geojson(tmp_path / "d.geojson", map_of(values), (150, 120))
    content = json.loads((tmp_path / "d.geojson").read_text())
    assert content["type"] == "FeatureCollection"
    first, second = content["features"]
    assert first["geometry"] == {
        "type": "Polygon",
        "coordinates": [[[32, 32], [96, 32], [96, 64], [32, 64], [32, 32]]],
    }
    assert first["properties"]["classification"]["name"] == "Tumor"
    assert first["properties"]["measurements"] == {"max probability": 1.0, "mean probability": 0.75}
    assert second["geometry"]["coordinates"] == [[[128, 96], [150, 96], [150, 120], [128, 120], [128, 96]]]  # cut


def test_geojson_of_an_empty_map_has_no_features(tmp_path):
    write_geojson(tmp_path / "d.geojson", map_of(np.zeros((4, 5))), (150, 120))
    assert json.loads((tmp_path / "d.geojson").read_text())["features"] == []


def region_of(*rows: str) -> np.ndarray:
    return np.array([[cell == "#" for cell in row] for row in rows])


def area(ring: np.ndarray) -> float:
    x, y = ring.T
    return float((x * np.roll(y, -1) - y * np.roll(x, -1)).sum() / 2)


def test_an_l_has_six_corners():
    (ring,) = outline(region_of("#..", "###"))
    assert ring.tolist() == [[0, 0], [1, 0], [1, 1], [3, 1], [3, 2], [0, 2]]


def test_a_ring_has_a_hole_that_runs_the_other_way_round():
    outer, hole = outline(region_of("###", "#.#", "###"))
    assert sorted(outer.tolist()) == [[0, 0], [0, 3], [3, 0], [3, 3]]
    assert sorted(hole.tolist()) == [[1, 1], [1, 2], [2, 1], [2, 2]]
    assert (area(outer), area(hole)) == (9, -1)


def test_cells_that_touch_at_a_corner_are_apart():
    (ring,) = outline(region_of("###", "#.#", "##."))
    assert sorted(ring.tolist()) == [
        [0, 0], [0, 3], [1, 1], [1, 2], [2, 1], [2, 2], [2, 2], [2, 3], [3, 0], [3, 2],
    ]  # fmt: skip


@given(st.integers(1, 2**20 - 1))
def test_outlines_enclose_just_the_cells_of_their_region(bits):
    mask = np.array([bits >> place & 1 for place in range(20)], bool).reshape(4, 5)
    for region in regionprops(label(mask)[0]):
        rings = outline(region.image)
        assert sum(map(area, rings)) == np.count_nonzero(region.image)
        assert area(rings[0]) > 0 > max(map(area, rings[1:]), default=-1)
        for ring in rings:
            steps = np.diff([*ring, ring[0]], axis=0)
            assert ((steps == 0).sum(1) == 1).all()  # along x or along y
            assert (np.abs(steps[:, 0]) > 0).tolist() == (np.abs(np.roll(steps[:, 1], -1)) > 0).tolist()  # each turns
