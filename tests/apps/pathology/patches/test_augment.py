import colorsys
from itertools import permutations

import numpy as np
import pytest
import torch
from monai.transforms import Zoom
from PIL import Image, ImageEnhance
from scipy.stats import chisquare

from medspeed.apps.pathology.config import Augmentation
from medspeed.apps.pathology.patches import augment as module
from medspeed.apps.pathology.patches.augment import (
    BRIGHTNESS,
    CONTRAST,
    HUE,
    SATURATION,
    augment,
    draw_patches,
    jitter_,
    set_zooms,
)
from tests.support import refuse_host_sync

LEVEL = 1 / 255
COLOURS = (64 / 255, 0.75, 0.25, 0.04)
PATHOLOGY, MOVES = Augmentation(COLOURS, (0.9, 1.1)), Augmentation((0, 0, 0, 0), (0.9, 1.1))
CORNERS = [[r, g, b] for r in (0, 255) for g in (0, 255) for b in (0, 255)]  # black, pure and mixed colours, white
EDGES = np.array([*CORNERS, [128, 128, 128], [1, 1, 1], [254, 255, 255], [10, 10, 11]], np.uint8)


def pictures(number=6, size=12, seed=0):
    """Random uint8 images [N, H, W, 3], with the edge colours in the first rows of each."""
    images = np.random.default_rng(seed).integers(0, 256, (number, size, size, 3), dtype=np.uint8)
    images[:, 0, : len(EDGES)] = EDGES[:size]
    return images


def as_tensor(images):
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous().float() / 255


def by_pillow(image, kind, factor):
    enhance = {BRIGHTNESS: ImageEnhance.Brightness, CONTRAST: ImageEnhance.Contrast, SATURATION: ImageEnhance.Color}
    return np.asarray(enhance[kind](Image.fromarray(image)).enhance(float(factor)))


def by_colorsys(image, turn):
    turned = np.empty(image.shape)
    for place in np.ndindex(image.shape[:2]):
        hue, saturation, value = colorsys.rgb_to_hsv(*(image[place] / 255))
        turned[place] = colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)
    return turned


def exactly(image, kind, factor):
    """One operation on [H, W, 3] float64 in [0, 1], written once more, without rounding."""
    if kind == HUE:
        return by_colorsys(image * 255, factor)
    grey = image @ [0.2989, 0.587, 0.114]
    other = {BRIGHTNESS: 0.0, CONTRAST: grey.mean(), SATURATION: grey[..., None]}[kind]
    return np.clip(factor * image + (1 - factor) * other, 0, 1)


def jitter(images, factors, order):
    """Return a copy, jittered; an order of [4] is that of all images."""
    changed, factors = images.clone(), np.asarray(factors, np.float32)
    jitter_(changed, factors, np.broadcast_to(np.asarray(order, np.int8), factors.shape))
    return changed


@pytest.mark.parametrize("kind", [BRIGHTNESS, CONTRAST, SATURATION])
def test_a_blend_equals_pillows(kind):
    images = pictures()
    factors = np.tile(np.array([1, 1, 1, 0], np.float32), (6, 1))
    factors[:, kind] = [0, 0.3, 0.9, 1, 1.25, 2]
    changed = jitter(as_tensor(images), factors, [0, 1, 2, 3]).permute(0, 2, 3, 1).numpy()
    for image, factor, ours in zip(images, factors[:, kind], changed, strict=True):
        # Pillow rounds the grey that it blends with (for contrast its mean too), and then the result.
        slack = (1 + abs(1 - factor)) * LEVEL
        assert np.abs(ours - by_pillow(image, kind, factor) / 255.0).max() <= slack


@pytest.mark.parametrize("turn", [-0.5, -0.3, -0.04, 0.001, 0.04, 1 / 6, 0.5])
def test_hue_equals_colorsys(turn):
    images = pictures(2)
    changed = jitter(as_tensor(images), [[1, 1, 1, turn]] * 2, [3, 0, 1, 2]).permute(0, 2, 3, 1).numpy()
    for image, ours in zip(images, changed, strict=True):
        assert np.abs(ours - by_colorsys(image, turn)).max() < 1e-4


def test_all_orders_equal_the_operations_one_after_the_other():
    orders = np.array(list(permutations(range(4))), np.int8)
    images = pictures(24)
    factors = draw_patches(Augmentation((0.8, 0.75, 0.9, 0.5), (1, 1)), 0, 0, np.arange(24), 12)["factors"]
    changed = jitter(as_tensor(images), factors, orders).permute(0, 2, 3, 1).numpy()
    for image, factor, order, ours in zip(images, factors, orders, changed, strict=True):
        expected = image / 255
        for kind in order:
            expected = exactly(expected, kind, float(factor[kind]))
        assert np.abs(ours - expected).max() < LEVEL / 10
    assert changed.min() >= 0
    assert changed.max() <= 1


def test_orders_are_uniform_and_factors_in_their_ranges():
    draw = draw_patches(Augmentation((0.25, 1.5, 0.25, 0.04), (1, 1)), 7, 1, np.arange(4800), 24)
    _, counts = np.unique(draw["order"] @ [64, 16, 4, 1], return_counts=True)
    assert len(counts) == 24
    assert chisquare(counts).pvalue > 0.01
    assert np.allclose(draw["factors"].min(axis=0), [0.75, 0, 0.75, -0.04], atol=0.01)
    assert np.allclose(draw["factors"].max(axis=0), [1.25, 2.5, 1.25, 0.04], atol=0.01)


def test_a_sample_is_jittered_alike_in_any_batch():
    images = as_tensor(pictures(24))
    whole, some = (draw_patches(PATHOLOGY, 3, 2, rows, 12) for rows in (np.arange(24), np.array([20, 5, 11])))
    assert np.array_equal(whole["factors"][[20, 5, 11]], some["factors"])
    assert np.array_equal(whole["order"][[20, 5, 11]], some["order"])
    first = jitter(images, whole["factors"], whole["order"])
    assert torch.equal(first, jitter(images, whole["factors"], whole["order"]))
    assert torch.allclose(first[[20, 5, 11]], jitter(images[[20, 5, 11]], some["factors"], some["order"]), atol=1e-6)
    assert not np.array_equal(draw_patches(PATHOLOGY, 3, 3, np.arange(24), 12)["factors"], whole["factors"])
    assert not np.array_equal(draw_patches(PATHOLOGY, 4, 2, np.arange(24), 12)["factors"], whole["factors"])


def test_a_jitter_of_nothing_leaves_images_exactly_as_they_are():
    images, draw = as_tensor(pictures(64)), draw_patches(MOVES, 0, 0, np.arange(64), 12)
    assert torch.equal(jitter(images, draw["factors"], draw["order"]), images)


def still(draw):
    """Return a draw that moves pixels of 24 a side, but neither jitters nor zooms."""
    set_zooms(draw, np.ones(len(draw)), 24)
    return draw


def patches(number=16, size=24, seed=0):
    images = np.random.default_rng(seed).integers(0, 256, (number, size, size, 3), dtype=np.uint8)
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


def scaled(images):
    return np.asarray(images, np.float32) / 127.5 - 1


def test_without_a_zoom_pixels_are_only_moved():
    images = patches(32)
    draw = still(draw_patches(MOVES, 0, 0, np.arange(32), 24))
    moved = [
        np.rot90(image[:, :, ::-1] if flip else image, turns, (1, 2))
        for image, flip, turns in zip(images.numpy(), *divmod(draw["element"], 4), strict=True)
    ]
    assert len({(bool(flip), int(turns)) for flip, turns in zip(*divmod(draw["element"], 4), strict=True)}) == 8
    result = augment(images, draw)
    assert np.array_equal(np.rint((result.numpy() + 1) * 127.5), np.stack(moved))
    assert np.abs(result.numpy() - scaled(np.stack(moved))).max() < 1e-6


@pytest.mark.parametrize("size", [24, 25, 96])
def test_a_zoom_is_monais(size):
    images = patches(8, size)
    draw, zooms = draw_patches(MOVES, 0, 0, np.arange(8), size), np.linspace(0.7, 1.5, 8)
    draw["element"] = 0
    set_zooms(draw, zooms, size)
    result = augment(images, draw)
    for image, zoom, ours in zip(scaled(images.numpy()), zooms, result.numpy(), strict=True):
        expected = Zoom(float(zoom), mode="bilinear", padding_mode="edge")(image)
        assert np.abs(ours - expected.numpy()).max() < 2e-4


def test_colours_are_jittered_before_the_patch_is_moved_and_zoomed():
    images = patches(24)
    draw = draw_patches(PATHOLOGY, 1, 0, np.arange(24), 24)
    coloured = jitter(images.float() / 255, draw["factors"], draw["order"])
    flips, turns = divmod(draw["element"], 4)
    for place in range(24):
        moved = torch.rot90(coloured[place].flip(2) if flips[place] else coloured[place], turns[place], (1, 2))
        zoomed = Zoom(float(draw["side"][place] + 0.01) / 24, mode="bilinear", padding_mode="edge")(moved)
        ours = augment(images, draw)[place]
        assert (ours - (2 * zoomed.as_tensor() - 1)).abs().max() < 2e-4


def test_draws_have_their_shares_and_ranges():
    draw = draw_patches(PATHOLOGY, 0, 0, np.arange(4000), 1000)
    flips, turns = divmod(draw["element"], 4)
    assert abs(flips.mean() - 0.5) < 0.03
    assert np.abs(np.bincount(turns, minlength=4) / 4000 - 0.25).max() < 0.03
    zoomed = draw["side"][draw["side"] != 1000] / 1000
    assert abs(len(zoomed) / 4000 - 0.5) < 0.03
    assert (round(zoomed.min(), 2), round(zoomed.max(), 2)) == (0.9, 1.1)
    assert abs(np.corrcoef(draw["factors"][:, 0], flips)[0, 1]) < 0.05


@pytest.mark.parametrize("chunk", [1, 3 * 24 * 24, 2**20])
def test_a_patch_does_not_depend_on_its_batch_or_chunk(chunk, monkeypatch):
    images = patches(16)
    whole = augment(images, draw_patches(PATHOLOGY, 5, 1, np.arange(16), 24))
    monkeypatch.setattr(module, "_CHUNK_PIXELS", chunk)
    rows = np.array([9, 2, 14, 7])
    some = augment(images[rows], draw_patches(PATHOLOGY, 5, 1, rows, 24))
    assert torch.allclose(some, whole[rows], atol=1e-5)


def test_the_host_does_not_wait():
    images, draw = patches(24), draw_patches(PATHOLOGY, 0, 0, np.arange(24), 24)
    with refuse_host_sync():
        augment(images, draw)
