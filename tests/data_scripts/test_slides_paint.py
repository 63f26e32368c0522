"""Cells, dyes, the scanner's eye, and whole slides."""

import math

import numpy as np
import pytest

from medspeed.data_scripts import slides_paint, slides_tissue
from medspeed.data_scripts.slides_paint import (
    INKS,
    LOOKS,
    Cells,
    Stain,
    develop,
    draw_slide,
    draw_stain,
    draw_stamps,
    enlarge,
    stamp,
)
from medspeed.data_scripts.slides_tissue import Fields, draw_node, long_axis, mask_of, values_at

STAIN = Stain(
    haematoxylin=np.array([0.65, 0.70, 0.29], np.float32),
    eosin=np.array([0.07, 0.99, 0.11], np.float32),
    ink=np.array(INKS["blue"], np.float32),
    white=np.array([240, 238, 242], np.float32),
    blur=0.6,
    noise=0.0,
)


def test_a_linear_field_is_enlarged_exactly_and_tiles_meet() -> None:
    nodes = Fields(128, np.random.default_rng(0))
    field = (2 * nodes.y + 3 * nodes.x).astype(np.float32)
    y, x = np.arange(16, 96), np.arange(-8, 56)
    assert np.allclose(enlarge(field, y, x), 0.5 * (2 * y[:, None] + 3 * x), atol=1e-3)
    noise = np.random.default_rng(0).standard_normal(field.shape).astype(np.float32)
    whole = enlarge(noise, np.arange(128), np.arange(128))
    assert np.array_equal(enlarge(noise, np.arange(64, 128), np.arange(32, 128)), whole[64:, 32:])


def diameters(kind: str) -> np.ndarray:
    """Return the diameters of discs as large as the stained area of each picture, px."""
    pictures, _ = draw_stamps(LOOKS[kind], np.random.default_rng(0))
    across: np.ndarray = np.sqrt((pictures > 0.2).sum(axis=(1, 2)) * 4 / math.pi)
    return across


def test_nuclei_have_the_sizes_of_textbooks() -> None:
    lymphocytes, tumour = diameters("lymphocyte"), diameters("tumour")
    assert 12 < np.median(lymphocytes) < 15.5  # 7 um
    assert 22 < np.median(tumour) < 32  # 11 to 16 um
    assert tumour.min() > lymphocytes.max()
    assert np.median(tumour) / np.median(lymphocytes) == pytest.approx(1.9, abs=0.3)
    assert tumour.std() > 2 * lymphocytes.std()


@pytest.mark.parametrize("kind", LOOKS)
def test_pictures_hold_the_whole_cell(kind: str) -> None:
    for dye in draw_stamps(LOOKS[kind], np.random.default_rng(1)):
        assert max(dye[:, edge].max() for edge in (0, -1)) == 0
        assert max(dye[:, :, edge].max() for edge in (0, -1)) == 0


def test_a_cell_is_the_same_whichever_part_of_the_slide_is_drawn() -> None:
    stamps = draw_stamps(LOOKS["tumour"], np.random.default_rng(2))
    places = np.array([[3.0, 60], [64, 64], [90, 125], [200, 200]], np.float32)
    cells = Cells(*stamps, places * np.float32(0.5), np.arange(4), np.array([1, 0.8, 1.2, 1], np.float32))

    def drawn(top: int, left: int, height: int, width: int) -> np.ndarray:
        dyes = np.zeros((2, height, width), np.float32)
        stamp(cells, dyes[0], dyes[1], top, left)
        return dyes

    whole = drawn(0, 0, 128, 128)
    assert (whole.max(axis=(1, 2)) > 0.3).all()
    assert np.array_equal(drawn(50, 40, 60, 88), whole[:, 50:110, 40:128])


def light_of(haematoxylin: float = 0, eosin: float = 0, ink: float = 0, stain: Stain = STAIN) -> np.ndarray:
    fields = [np.full((32, 32), value, np.float32) for value in (haematoxylin, eosin, ink)]
    return np.asarray(develop(fields[0], fields[1], fields[2], stain, np.random.default_rng(0))[16, 16], int)


def test_light_falls_exponentially_with_the_dyes() -> None:
    """Beer and Lambert: densities add, light is white * exp(-density)."""
    assert light_of().tolist() == STAIN.white.tolist()
    expected = [240 * np.exp(-0.5 * 0.65 - 0.8 * 0.07), 238 * np.exp(-0.5 * 0.70 - 0.8 * 0.99),
                242 * np.exp(-0.5 * 0.29 - 0.8 * 0.11)]  # fmt: skip
    assert light_of(0.5, 0.8) == pytest.approx(expected, abs=0.51)


def test_haematoxylin_is_blue_and_eosin_pink() -> None:
    red, green, blue = light_of(haematoxylin=1)
    assert blue > red > green
    red, green, blue = light_of(eosin=0.5)
    assert min(red, blue) > 1.3 * green


@pytest.mark.parametrize(("colour", "brightest"), [("blue", 2), ("green", 1), ("black", None)])
def test_ink_has_its_colour(colour: str, brightest: int | None) -> None:
    light = light_of(ink=1, stain=STAIN._replace(ink=np.array(INKS[colour], np.float32)))
    assert light.min() < 80
    assert int(light.argmax()) == brightest or (brightest is None and np.ptp(light) < 25 and light.max() < 80)


def test_focus_spreads_an_edge_and_noise_is_what_it_is_said_to_be() -> None:
    dye = np.zeros((200, 200), np.float32)
    dye[:, 100:] = 1
    nothing = np.zeros_like(dye)
    row = develop(dye, nothing, nothing, STAIN, np.random.default_rng(0))[16, :, 0].astype(int)
    assert row[90] > row[99] > row[100] > row[110]
    noisy = develop(nothing + 1, nothing, nothing, STAIN._replace(noise=2.0), np.random.default_rng(0))
    assert noisy.dtype == np.uint8
    assert noisy[..., 0].std() == pytest.approx(2.0, abs=0.1)
    assert noisy[..., 0].mean() == pytest.approx(240 * np.exp(-0.65), abs=0.1)


def test_stains_differ_from_slide_to_slide_within_what_labs_do() -> None:
    stains = [draw_stain(np.random.default_rng(seed)) for seed in range(30)]
    strengths = np.array([[np.linalg.norm(stain.haematoxylin), np.linalg.norm(stain.eosin)] for stain in stains])
    assert (strengths.std(0) > 0.1).all()
    assert ((strengths > [0.8, 0.55]) & (strengths < [1.45, 1.25])).all()
    assert all((stain.white <= 252).all() for stain in stains)


def test_a_slide_is_its_picture_its_lesions_and_their_mask() -> None:
    image, mask, lesions = draw_slide(768, True, np.random.default_rng(0))
    assert image.shape == (768, 768, 3)
    assert image.dtype == np.uint8
    assert lesions
    assert np.array_equal(mask, mask_of(lesions, 768))
    _, mask, lesions = draw_slide(768, False, np.random.default_rng(0))
    assert not lesions
    assert not mask.any()


@pytest.mark.parametrize("size", [512, 1024])
def test_each_slide_with_tumour_has_a_lesion_that_counts(size, monkeypatch) -> None:
    """Some of the first tissues have no room for it: then another is drawn."""
    nothing = np.zeros((len(Fields(size / 2, np.random.default_rng(0)).y),) * 2, np.float32)
    monkeypatch.setattr(slides_paint, "_fill", lambda *_: (nothing, nothing, []))
    for seed in range(12):
        _, _, lesions = draw_slide(size, True, np.random.default_rng(seed))
        assert max(long_axis(outline) for _, outline in lesions) > min(200, 0.2 * size)


def test_no_room_at_all_is_told(monkeypatch) -> None:
    monkeypatch.setattr(slides_tissue, "draw_lesions", lambda *_: [])
    with pytest.raises(ValueError, match=r"slides of 512 px: no room for a lesion in 40 attempts; use a larger"):
        draw_slide(512, True, np.random.default_rng(0))


@pytest.mark.parametrize("seed", range(6))
def test_each_kind_of_cell_lies_in_its_own_tissue(seed: int) -> None:
    fields = Fields(768, np.random.default_rng(seed))
    _, node_depth = draw_node(fields)
    mask = np.zeros((1536, 1536), np.uint8)
    mask[600:900, 500:800] = 1
    haze, eosin, cells = slides_paint._fill(node_depth, mask, fields)
    assert min(haze.min(), eosin.min()) >= 0
    for kind, at in zip(("histiocyte", "centre", "spindle", "lymphocyte", "tumour"), cells, strict=True):
        pixels = np.clip((at.places / 0.5).astype(int), 0, 1535)
        inside = mask[pixels[:, 0], pixels[:, 1]] == 1
        assert len(at.places) > (20 if kind != "centre" else -1)
        # the rim of a lesion lies between two nodes
        share = {"tumour": (0.9, 1.0), "lymphocyte": (0, 0.15), "spindle": (0, 0.6)}.get(kind, (0, 0.1))
        assert not len(inside) or share[0] <= inside.mean() <= share[1], kind
        assert not len(at.places) or (values_at(node_depth, at.places) > -20).all()
