import json
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import openslide
import pytest
import tifffile
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from scipy.ndimage import label
from skimage.measure import regionprops
from torch import nn

from medspeed.apps.pathology.model import HALO, PathologyModel, normalised
from medspeed.apps.pathology.scan.scan import (
    ProbabilityMap,
    View,
    choose_view,
    find_detections,
    outline,
    read_detections_csv,
    scan_slide,
    write_detections_csv,
    write_geojson,
    write_probability_tif,
)
from medspeed.apps.pathology.slides.masks import SlideMask
from medspeed.apps.pathology.slides.reader import open_slide
from medspeed.common.console import say_once
from medspeed.models.resnet18_fcn import resnet18_fcn
from tests.apps.pathology.slides.slide_files import write_pyramid

PATCH, CPU = 64, torch.device("cpu")
MODEL = PathologyModel(PATCH, 0.25, 608, 2, "fp32")  # tiles of 4 x 4 cells
MARGIN = (PATCH - 32) // 2


@pytest.fixture(scope="module")
def network() -> nn.Module:
    """A network of random weights whose normalisations know what its features look like, so that logits vary."""
    torch.manual_seed(0)
    network = resnet18_fcn(PATCH)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        network(torch.rand(8, 3, 96, 96) * 2 - 1)
    return network.eval()


def predictor_of(network):
    def predict(windows):
        with torch.no_grad():
            return network(windows)

    return predict


def redness(images: torch.Tensor) -> torch.Tensor:
    """Return logits as a network would: of each patch, from its mean colour."""
    means = F.avg_pool2d(images, PATCH, 32)
    return 8 * (means[:, :1] - means[:, 1:2])


def everywhere(width: int, height: int) -> SlideMask:
    return SlideMask(np.ones((height, width), bool), 1.0)


def whole(image: np.ndarray, network: nn.Module, pitch: int = 32) -> np.ndarray:
    """Return the probabilities of all cells from one pass over the slide in white surroundings."""
    rows, columns = (-(-side // pitch) for side in image.shape[:2])
    around = HALO + MARGIN
    canvas = np.full((rows * 32 + 2 * around, columns * 32 + 2 * around, 3), 255, np.uint8)
    canvas[around : around + image.shape[0], around : around + image.shape[1]] = image
    with torch.no_grad():
        logits = network(normalised(torch.from_numpy(canvas)[None].permute(0, 3, 1, 2)))[0, 0]
    halo = HALO // 32
    return torch.sigmoid(logits[halo : halo + rows, halo : halo + columns]).numpy()


def test_tiles_give_what_one_pass_over_the_whole_slide_gives(tmp_path, network):
    (image,) = write_pyramid(tmp_path / "a.tif", (1,), (314, 210))
    slide = open_slide(tmp_path / "a.tif", "tifffile")
    found = scan_slide(
        slide,
        MODEL,
        predictor_of(network),
        CPU,
        everywhere(314, 210),
        choose_view(slide, MODEL.mpp),
    )
    expected = whole(image, network)
    assert found.values.shape == (7, 10)
    assert found.tiles == 6
    assert found.scanned.all()
    assert expected.std() > 0.005
    assert np.abs(found.values - expected).max() < 1e-4


def test_what_is_made_smaller_is_averaged(tmp_path):
    """Of four columns of 0.25 um, two at 200 and two at 100, a pixel of 1 um is their mean."""
    image = np.full((1024, 1024, 3), 100, np.uint8)
    image[:, 0::4] = image[:, 3::4] = 200
    tifffile.imwrite(tmp_path / "a.tif", image, tile=(256, 256), resolution=(40_000, 40_000), resolutionunit=3)
    slide, seen = open_slide(tmp_path / "a.tif", "tifffile"), []

    def predict(windows):
        seen.append(windows.clone())
        return torch.zeros(len(windows), 1, *(side // 32 for side in windows.shape[2:]))

    model = PathologyModel(PATCH, 1.0, 608, 2, "fp32")
    scan_slide(slide, model, predict, CPU, everywhere(1024, 1024), choose_view(slide, model.mpp))
    assert seen[0][0, :, 280:296, 280:296].numpy() == pytest.approx(150 / 127.5 - 1, abs=0.03)


def test_patches_give_what_the_network_gives_for_each(tmp_path, network):
    (image,) = write_pyramid(tmp_path / "a.tif", (1,), (300, 210))
    slide = open_slide(tmp_path / "a.tif", "tifffile")
    found = scan_slide(
        slide,
        MODEL,
        predictor_of(network),
        CPU,
        everywhere(300, 210),
        choose_view(slide, MODEL.mpp),
        stride=64,
        batch=3,
    )
    assert found.values.shape == (4, 5)
    assert (found.stride, found.tiles) == (64, 15)  # the last row's and column's centres are outside
    patch = normalised(torch.from_numpy(image[64:128, 128:192])[None].permute(0, 3, 1, 2))
    with torch.no_grad():
        assert found.values[1, 2] == pytest.approx(torch.sigmoid(network(patch)).item(), abs=1e-5)


@pytest.mark.parametrize(
    ("mpp", "level", "pitch"), [(0.25, 0, 32), (0.29, 0, 32), (0.4, 0, 51), (0.5, 1, 32), (0.7, 1, 45)]
)
def test_the_coarsest_level_that_is_fine_enough_is_read_and_resized_where_it_is_far_off(tmp_path, mpp, level, pitch):
    write_pyramid(tmp_path / "a.tif")
    slide = open_slide(tmp_path / "a.tif", "tifffile")
    view = choose_view(slide, mpp)
    assert (view.level, view.pitch) == (level, pitch)
    assert view.base_mpp * view.downsample * view.pitch / 32 == pytest.approx(mpp, rel=0.2 if pitch == 32 else 1 / 64)
    assert ("resized" in view.reason) == (pitch != 32)


def test_a_slide_too_coarse_for_the_network_is_refused(tmp_path):
    write_pyramid(tmp_path / "a.tif", mpp=(15.0, 15.0))
    slide = open_slide(tmp_path / "a.tif")
    with pytest.raises(ValueError, match=r"a\.tif: pixels of 15 um are too coarse"):
        choose_view(slide, 0.25)


def test_without_a_pixel_size_level_0_is_taken_and_it_is_said(tmp_path):
    write_pyramid(tmp_path / "a.tif")
    slide = open_slide(tmp_path / "a.tif", "tifffile")
    view = choose_view(slide, None)
    assert (view.level, view.pitch, view.base_mpp) == (0, 32, 0.25)
    assert "unknown pixel size of network" in view.reason
    slide.mpp = None
    assert choose_view(slide, 0.7).base_mpp == 0.7
    assert "unknown pixel size of slide and network" in choose_view(slide, None).reason


@pytest.mark.parametrize("mpp", [0.25, 0.5, 0.7])
def test_a_spot_lights_the_cell_that_lies_on_it_at_any_level(tmp_path, mpp):
    image = np.full((640, 960, 3), 200, np.uint8)
    image[380:400, 700:720] = (255, 0, 0)
    with tifffile.TiffWriter(tmp_path / "a.tif") as writer:
        for factor in (1, 2):
            writer.write(
                image[::factor, ::factor],
                tile=(64, 64),
                photometric="rgb",
                subfiletype=factor - 1,
                resolution=(4e4 / factor, 4e4 / factor),
                resolutionunit="CENTIMETER",
            )
    slide = open_slide(tmp_path / "a.tif", "tifffile")
    model = PathologyModel(32, mpp, 576, 2, "fp32")
    found = scan_slide(slide, model, spot, CPU, everywhere(960, 640), choose_view(slide, model.mpp))
    sparse = scan_slide(
        slide,
        model,
        spot,
        CPU,
        everywhere(960, 640),
        choose_view(slide, model.mpp),
        stride=32,
        batch=50,
    )
    row, column = np.unravel_index(found.values.argmax(), found.values.shape)
    assert abs((column + 0.5) * found.stride - 710) <= found.stride / 2 + 10
    assert abs((row + 0.5) * found.stride - 390) <= found.stride / 2 + 10
    # Cells have no halo in a patch; a resized patch has its own borders, of a pixel.
    assert np.abs(found.values - sparse.values)[sparse.scanned].max() < (1e-6 if mpp != 0.7 else 0.05)


def spot(images: torch.Tensor) -> torch.Tensor:
    return 4 * F.avg_pool2d(images[:, :1] - images[:, 1:2], 32, 32)


def test_resized_tiles_fit_together(tmp_path):
    write_pyramid(tmp_path / "a.tif", (1, 2), (700, 500))
    small, large = (PathologyModel(PATCH, 0.35, side, 3, "fp32") for side in (544, 1504))
    slide = open_slide(tmp_path / "a.tif", "tifffile")
    tissue = everywhere(700, 500)
    many, one = (
        scan_slide(slide, model, redness, CPU, tissue, choose_view(slide, model.mpp)) for model in (small, large)
    )
    assert one.tiles == 1 < many.tiles
    assert one.values.std() > 0.005
    assert np.abs(many.values - one.values).max() < 1e-6


def test_only_cells_whose_centre_is_on_tissue_are_scanned(tmp_path):
    write_pyramid(tmp_path / "a.tif", (1,), (640, 320))
    mask = np.zeros((40, 80), bool)  # 8 pixels of level 0 each
    mask[18, 50] = mask[17, 54] = True  # x 400..407 and y 144..151; x 432..439 and y 136..143
    slide = open_slide(tmp_path / "a.tif", "tifffile")
    tissue, view = SlideMask(mask, 8.0), choose_view(slide, MODEL.mpp)
    dense = scan_slide(slide, MODEL, redness, CPU, tissue, view)
    sparse = scan_slide(slide, MODEL, redness, CPU, tissue, choose_view(slide, MODEL.mpp), stride=64, batch=4)
    # The centre of cell c is at 32 c + 16: x 400 and 432, y 144, which is above the second pixel's.
    assert np.argwhere(dense.scanned).tolist() == [[4, 12]]
    assert (dense.values > 0).tolist() == dense.scanned.tolist()
    assert dense.tiles == 1
    assert not sparse.scanned.any()  # centres at 32, 96, ...: x 416, y 160


def test_a_slide_without_tissue_gives_an_empty_map(tmp_path):
    write_pyramid(tmp_path / "a.tif", (1,))
    slide = open_slide(tmp_path / "a.tif", "tifffile")
    nothing = SlideMask(np.zeros((210, 300), bool), 1.0)
    for found in (
        scan_slide(slide, MODEL, redness, CPU, nothing, choose_view(slide, MODEL.mpp)),
        scan_slide(slide, MODEL, redness, CPU, nothing, choose_view(slide, MODEL.mpp), stride=64, batch=2),
    ):
        assert not found.values.any()
        assert found.tiles == 0


def test_reading_stays_one_batch_ahead_whatever_the_size_of_the_slide(tmp_path, monkeypatch):
    write_pyramid(tmp_path / "a.tif", (1,), (700, 500))
    reads: list[int] = []
    ahead: list[int] = []
    slide = open_slide(tmp_path / "a.tif", "tifffile")
    original = slide.read_many

    def read_many(corners, size, level):
        reads.append(len(corners))
        return original(corners, size, level)

    def predict(images):
        ahead.append(len(reads) - len(ahead))
        return redness(images)

    monkeypatch.setattr(slide, "read_many", read_many)
    found = scan_slide(slide, MODEL, predict, CPU, everywhere(700, 500), choose_view(slide, MODEL.mpp))
    assert sum(reads) == found.tiles == 24
    assert max(reads) == MODEL.tile_batch
    assert 1 <= min(ahead) <= max(ahead) <= 2


def test_after_an_error_no_thread_reads_any_more(tmp_path):
    write_pyramid(tmp_path / "a.tif", (1,), (700, 500))

    def fail(images):
        raise ValueError("no such luck")

    slide = open_slide(tmp_path / "a.tif", "tifffile")
    # What pytest holds of the error keeps the frames alive, as a debugger would.
    with pytest.raises(ValueError, match="no such luck"):
        scan_slide(slide, MODEL, fail, CPU, everywhere(700, 500), choose_view(slide, MODEL.mpp))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("prefetch", "slide"))]


def test_without_memory_for_all_tiles_fewer_are_in_a_call(tmp_path, capsys):
    write_pyramid(tmp_path / "a.tif", (1,), (700, 500))
    slide, calls = open_slide(tmp_path / "a.tif", "tifffile"), []

    def short(images):
        calls.append(len(images))
        if len(images) > 1:
            raise torch.OutOfMemoryError("tried to allocate 9 GiB")
        return redness(images)

    given = CPU, everywhere(700, 500), choose_view(slide, MODEL.mpp)
    say_once.cache_clear()
    found = scan_slide(slide, MODEL, short, *given)
    assert np.array_equal(found.values, scan_slide(slide, MODEL, redness, *given).values)
    assert calls == [MODEL.tile_batch, *[1] * found.tiles]  # two are not tried again
    side = f"of {MODEL.tile_size} x {MODEL.tile_size} pixels does not fit into the device's memory"
    assert capsys.readouterr().out.splitlines() == [f"a batch of 2 windows {side}: trying 1"]


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
    values[10, 20], values[150, 250], values[5, 290] = 0.75, 0.875, 0.4
    found = find_detections(map_of(values), 0.5)
    write_detections_csv(tmp_path / "d.csv", found)
    assert (tmp_path / "d.csv").read_text() == "0.875,8016,4816\n0.75,656,336\n"
    back = read_detections_csv(tmp_path / "d.csv")
    assert back.tolist() == [[0.875, 8016, 4816], [0.75, 656, 336]]


def test_confident_detections_keep_their_order_in_the_file(tmp_path):
    scores = np.array([1 - 2**-24, 1 - 2**-23, 1 - 3 * 2**-24, 1e-7, 9e-8], np.float32)
    write_detections_csv(tmp_path / "d.csv", np.stack([scores, *np.ones((2, 5))], axis=1))
    assert read_detections_csv(tmp_path / "d.csv")[:, 0].astype(np.float32).tolist() == scores.tolist()


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


def test_cells_of_a_smaller_level_are_looked_up_where_they_lie():
    """Cells of 32 pixels of a level 4 times smaller, in a mask 16 times smaller: their centres are at 4 and 12."""
    tissue = np.zeros((12, 16), bool)
    tissue[4, 12] = True
    view = View(1, (64, 48), 4.0, 32, 0.25, "")
    assert view.on_tissue(SlideMask(tissue, 16.0), 32).tolist() == [[False, True], [False, False]]  # 12 is below it


def test_of_levels_far_apart_the_nearest_is_taken_instead_of_a_tile_that_fills_the_memory():
    levels = [SimpleNamespace(downsample=down, width=160 // down, height=160 // down) for down in (1, 16)]
    slide: Any = SimpleNamespace(mpp=0.25, levels=levels, path="a.tif")
    views = [choose_view(slide, mpp) for mpp in (1.2, 1.9, 0.9)]  # levels of 0.25 and 4 um: 5 times and more is far
    assert [(view.level, view.pitch) for view in views] == [(0, 154), (1, 15), (0, 115)]
