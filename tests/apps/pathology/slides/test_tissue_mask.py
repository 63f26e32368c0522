from pathlib import Path

import numpy as np
import pytest
import tifffile
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage

from medspeed.apps.pathology.slides.masks import (
    MAX_THRESHOLD,
    MIN_CONTRAST,
    SOLE_THRESHOLD,
    SlideMask,
    low_power,
    split,
    tissue_mask,
)
from medspeed.apps.pathology.slides.reader import open_slide
from medspeed.data_scripts import slides_paint

GLASS, EOSIN, HAEMATOXYLIN = (243, 242, 244), (222, 150, 190), (120, 80, 150)
INKS = {"blue": (35, 60, 170), "green": (30, 140, 70), "black": (25, 24, 28)}
SIDE = 4  # level-0 pixels of 2 um per pixel of the mask


def glass(height: int = 160, width: int = 200) -> np.ndarray:
    """Return an empty field, [height, width, 3] float64, at the mask's 8 um."""
    return np.tile(np.array(GLASS, np.float64), (height, width, 1))


def write(path: Path, field: np.ndarray, factors: tuple[int, ...] = (1,), mpp: float | None = 2.0) -> Path:
    """Write a field, each of its pixels a square of 4 x 4 noisy ones at level 0."""
    large = field.repeat(SIDE, 0).repeat(SIDE, 1)
    large = large + np.random.default_rng(0).normal(0, 3, large.shape)
    with tifffile.TiffWriter(path) as writer:
        for factor in factors:
            height, width = large.shape[0] // factor, large.shape[1] // factor
            level = large[: height * factor, : width * factor].reshape(height, factor, width, factor, 3).mean((1, 3))
            writer.write(
                np.clip(level.round(), 0, 255).astype(np.uint8),
                photometric="rgb",
                tile=(128, 128),
                subfiletype=int(factor > 1),
                resolution=(1e4 / mpp / factor,) * 2 if mpp else None,
                resolutionunit="CENTIMETER",
                compression="deflate",
                metadata=None,
            )
    return path


def mask_of(path: Path) -> SlideMask:
    slide = open_slide(path, "tifffile")
    return tissue_mask(slide, assumed_mpp=0.0)  # the file says


def disc(field: np.ndarray, row: int, column: int, radius: int) -> np.ndarray:
    y, x = np.mgrid[: field.shape[0], : field.shape[1]]
    return np.asarray((y - row) ** 2 + (x - column) ** 2 <= radius**2)


@pytest.mark.parametrize("factors", [(1,), (1, 2, 4)], ids=["one level", "pyramid"])
@pytest.mark.parametrize("colour", [EOSIN, HAEMATOXYLIN])
def test_painted_tissue_is_found(tmp_path, colour, factors):
    field = glass()
    tissue = disc(field, 70, 90, 40)
    field[tissue] = colour
    found = mask_of(write(tmp_path / "a.tif", field, factors))
    assert found.downsample == SIDE
    assert np.array_equal(found.mask, tissue)


@pytest.mark.parametrize("ink", INKS)
def test_pen_strokes_are_left_out(tmp_path, ink):
    field = glass()
    tissue = disc(field, 80, 70, 30)
    field[tissue] = EOSIN
    stroke = np.zeros(tissue.shape, bool)
    stroke[10:150, 140:180] = True  # 0.3 mm wide, beside the tissue
    stroke[75:106, 80:140] = True  # and across it
    field[stroke] = INKS[ink]
    found = mask_of(write(tmp_path / "a.tif", field)).mask
    assert not (
        found & ndimage.binary_dilation(stroke, np.ones((3, 3), bool), 2)
    ).any()  # strokes' edges blend into tissue
    assert not (found & ~tissue).any()
    assert (found & tissue).sum() > 0.8 * (tissue & ~stroke).sum()


@pytest.mark.parametrize("strength", [0.6, 0.8, 1.0])
@pytest.mark.parametrize("colour", slides_paint.INKS)
def test_thin_strokes_of_every_pen_that_is_drawn_are_left_out(tmp_path, colour, strength):
    """80 um wide and 720 long on glass, as pale or dark as make_slides draws them."""
    nothing = np.zeros((160, 200), np.float32)
    ink = nothing.copy()
    ink[40:50, 60:150] = strength
    rng = np.random.default_rng(0)
    pen = np.array(slides_paint.INKS[colour], np.float32)
    stain = slides_paint.draw_stain(rng)._replace(blur=0.5, noise=0.0, ink=pen)
    field = np.asarray(slides_paint.develop(nothing, nothing, ink, stain, rng), np.float64)
    field[disc(field, 110, 70, 30)] = EOSIN
    found = mask_of(write(tmp_path / "a.tif", field)).mask
    assert not found[38:52, 58:152].any()
    assert found[disc(field, 110, 70, 30)].mean() > 0.95


def test_dark_tissue_and_refraction_at_its_edge_are_no_ink(tmp_path):
    field = glass()
    tissue = disc(field, 80, 100, 40)
    field[tissue] = (72, 36, 68)  # keratin
    field[60:70, 70:80] = (90, 130, 150)  # bluish, 80 um
    assert np.array_equal(mask_of(write(tmp_path / "a.tif", field)).mask, tissue)


def test_specks_go_and_small_holes_are_filled(tmp_path):
    field = glass()
    tissue = disc(field, 80, 100, 50)
    hole, vessel = disc(field, 80, 80, 4), disc(field, 80, 120, 12)  # 50 and 450 pixels; 156 are 100 um squared
    field[tissue & ~hole & ~vessel] = EOSIN
    field[disc(field, 10, 10, 5)] = EOSIN
    assert np.array_equal(mask_of(write(tmp_path / "a.tif", field)).mask, tissue & ~vessel)


def test_an_empty_slide_has_no_tissue(tmp_path):
    for name, field in {
        "noisy": glass(),
        "white": np.full((160, 200, 3), 300.0),
        "black": np.zeros((160, 200, 3)),
    }.items():
        found = mask_of(write(tmp_path / f"{name}.tif", field))
        assert found.mask.shape == (160, 200)
        assert not found.mask.any()


def test_where_tissue_fills_the_field_pale_parts_count_too(tmp_path):
    field = glass()
    field[:, :] = EOSIN  # saturation 0.32
    field[:, :100] = HAEMATOXYLIN  # 0.47
    assert mask_of(write(tmp_path / "a.tif", field)).mask.all()


def otsu_by_search(values: np.ndarray) -> int:
    """Return the number t for which {<= t} and {> t} vary least within: every t tried, variances by numpy."""
    tried = []
    for threshold in range(int(values.max())):
        low, high = values[values <= threshold], values[values > threshold]
        if len(low) and len(high):
            tried.append((low.var() * len(low) + high.var() * len(high), threshold))
    return min(tried)[1]


@given(st.integers(0, 2**32 - 1), st.integers(0, 12), st.integers(20, 28), st.floats(0.1, 0.9))
def test_the_threshold_is_otsus(seed, low, high, share):
    rng = np.random.default_rng(seed)
    values = np.concatenate([rng.normal(low, 3, int(400 * share)), rng.normal(high + 14, 5, 400 - int(400 * share))])
    values = np.clip(values.round(), 0, 255)
    due = otsu_by_search(values)
    found = split(values / 255)
    gap = values[values > due].mean() - values[values <= due].mean()
    if gap < MIN_CONTRAST * 255:
        assert found == SOLE_THRESHOLD
    else:
        assert np.array_equal(values / 255 > found, values > due) or found == MAX_THRESHOLD


def test_stain_that_fills_the_field_is_tissue_beside_black_too(tmp_path):
    """One class alone is judged by its saturation: a region cut from tissue, or one on the black of a scanner."""
    for colour in (EOSIN, (243, 212, 230)):  # the latter of saturation 0.13
        stained = np.tile(np.array(colour, np.float64), (160, 200, 1))
        assert mask_of(write(tmp_path / "a.tif", stained)).mask.all()
    black = np.full((160, 200, 3), 8.0)
    black[40:120, 40:160] = EOSIN
    found = mask_of(write(tmp_path / "b.tif", black)).mask
    assert found[48:112, 48:152].all()  # the border of black is widened, as that of ink
    assert not found[:36].any()
    assert not mask_of(write(tmp_path / "c.tif", glass())).mask.any()


def test_where_there_is_one_class_or_none_a_fixed_threshold_counts():
    assert split(np.full(100, 0.02)) == SOLE_THRESHOLD
    assert split(np.empty(0)) == SOLE_THRESHOLD
    assert split(np.array([0.0] * 50 + [0.07] * 50)) == SOLE_THRESHOLD
    assert split(np.array([0.0] * 50 + [0.1] * 50)) < MAX_THRESHOLD


def test_low_power_is_the_mean_over_squares_whatever_the_level(tmp_path):
    field = np.random.default_rng(0).uniform(0, 255, (37, 53, 3))
    for factors in ((1,), (1, 2), (1, 16)):  # the last level is too small
        slide = open_slide(write(tmp_path / "a.tif", field, factors), "tifffile")
        whole = slide.read(0, 0, 212, 148).astype(np.float64)
        image, downsample = low_power(slide, 8.0)
        assert downsample == 8
        padded = np.pad(whole, ((0, 4), (0, 4), (0, 0)), constant_values=255)
        due = padded.reshape(19, 8, 27, 8, 3).mean((1, 3))
        assert np.abs(image - due)[:-1, :-1].max() <= 1  # the level itself is rounded
        assert np.abs(image - due).max() <= 1


def test_a_slide_larger_than_a_block_is_read_block_by_block(tmp_path, monkeypatch):
    path = write(tmp_path / "a.tif", np.random.default_rng(0).uniform(0, 255, (37, 53, 3)))
    slide = open_slide(path, "tifffile")
    whole, _ = low_power(slide, 4.0)
    monkeypatch.setattr("medspeed.apps.pathology.slides.masks._BLOCK", 30)
    sizes = []
    read = slide.read

    def watched(x: int, y: int, width: int, height: int, level: int = 0) -> np.ndarray:
        sizes.append(width * height)
        return read(x, y, width, height, level)

    monkeypatch.setattr(slide, "read", watched)
    assert np.array_equal(low_power(slide, 4.0)[0], whole)
    assert max(sizes) <= 30 * 30


def test_an_unknown_pixel_size_must_be_given(tmp_path):
    slide = open_slide(write(tmp_path / "a.tif", glass(), mpp=None), "tifffile")
    assert tissue_mask(slide, assumed_mpp=2.0).downsample == SIDE


@pytest.mark.real_data
@pytest.mark.parametrize(
    ("name", "share", "tissue", "background"),
    [
        # Places in level-0 pixels, read off the slides by eye.
        ("cmu-1-small-region.svs", (0.3, 0.45), [(880, 1500), (1600, 2800), (1250, 2090)], [(300, 2500), (2000, 400)]),
        ("tcga-cr-7395-01a-01-ts1.svs", (0.55, 0.75), [(1000, 2000), (3300, 500)], [(200, 200), (4000, 400)]),
    ],
)
def test_tissue_of_real_slides(real_data, name, share, tissue, background):
    slide = open_slide(real_data / "slides_real" / name)
    found = tissue_mask(slide, assumed_mpp=0.25)
    assert share[0] < found.mask.mean() < share[1]
    for places, due in ((tissue, True), (background, False)):
        for x, y in places:
            assert found.mask[int(y / found.downsample), int(x / found.downsample)] == due, (x, y)
