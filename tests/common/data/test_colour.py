import colorsys
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance
from scipy.stats import chisquare

from common.data.colour import BRIGHTNESS, CONTRAST, HUE, SATURATION, ColourJitter, JitterDraw, jitter
from tests.support import refuse_host_sync

LEVEL = 1 / 255
PATHOLOGY = ColourJitter(64 / 255, 0.75, 0.25, 0.04)
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


def draw_of(order, factors):
    factors = np.asarray(factors, np.float32)
    return JitterDraw(factors, np.tile(np.asarray(order, np.int8), (len(factors), 1)), np.ones(len(factors), bool))


@pytest.mark.parametrize("kind", [BRIGHTNESS, CONTRAST, SATURATION])
def test_a_blend_equals_pillows(kind):
    images = pictures()
    factors = np.tile(np.array([1, 1, 1, 0], np.float32), (6, 1))
    factors[:, kind] = [0, 0.3, 0.9, 1, 1.25, 2]
    changed = jitter(as_tensor(images), draw_of([0, 1, 2, 3], factors)).permute(0, 2, 3, 1).numpy()
    for image, factor, ours in zip(images, factors[:, kind], changed, strict=True):
        # Pillow rounds the grey that it blends with (for contrast its mean too), and then the result.
        slack = (1 + abs(1 - factor)) * LEVEL
        assert np.abs(ours - by_pillow(image, kind, factor) / 255.0).max() <= slack


@pytest.mark.parametrize("turn", [-0.5, -0.3, -0.04, 0.001, 0.04, 1 / 6, 0.5])
def test_hue_equals_colorsys(turn):
    images = pictures(2)
    changed = jitter(as_tensor(images), draw_of([3, 0, 1, 2], [[1, 1, 1, turn]] * 2)).permute(0, 2, 3, 1).numpy()
    for image, ours in zip(images, changed, strict=True):
        assert np.abs(ours - by_colorsys(image, turn)).max() < 1e-4


def test_all_orders_equal_the_operations_one_after_the_other():
    orders = np.array(list(permutations(range(4))), np.int8)
    images = pictures(24)
    factors = ColourJitter(0.8, 0.75, 0.9, 0.5).draw(0, 0, np.arange(24)).factors
    changed = jitter(as_tensor(images), JitterDraw(factors, orders, np.ones(24, bool))).permute(0, 2, 3, 1).numpy()
    for image, factor, order, ours in zip(images, factors, orders, changed, strict=True):
        expected = image / 255
        for kind in order:
            expected = exactly(expected, kind, float(factor[kind]))
        assert np.abs(ours - expected).max() < LEVEL / 10
    assert changed.min() >= 0
    assert changed.max() <= 1


def test_orders_are_uniform_and_factors_in_their_ranges():
    draw = ColourJitter(0.25, 1.5, 0.25, 0.04, p=0.5).draw(7, 1, np.arange(4800))
    _, counts = np.unique(draw.order @ [64, 16, 4, 1], return_counts=True)
    assert len(counts) == 24
    assert chisquare(counts).pvalue > 0.01
    assert np.allclose(draw.factors.min(axis=0), [0.75, 0, 0.75, -0.04], atol=0.01)
    assert np.allclose(draw.factors.max(axis=0), [1.25, 2.5, 1.25, 0.04], atol=0.01)
    assert abs(draw.applied.mean() - 0.5) < 0.03


def test_a_sample_is_jittered_alike_in_any_batch():
    images = as_tensor(pictures(24))
    whole, some = PATHOLOGY.draw(3, 2, np.arange(24)), PATHOLOGY.draw(3, 2, np.array([20, 5, 11]))
    assert np.array_equal(whole.factors[[20, 5, 11]], some.factors)
    assert np.array_equal(whole.order[[20, 5, 11]], some.order)
    first = jitter(images, whole)
    assert torch.equal(first, jitter(images, whole))
    assert torch.allclose(first[[20, 5, 11]], jitter(images[[20, 5, 11]], some), atol=1e-6)
    assert not np.array_equal(PATHOLOGY.draw(3, 3, np.arange(24)).factors, whole.factors)
    assert not np.array_equal(PATHOLOGY.draw(4, 2, np.arange(24)).factors, whole.factors)


def test_images_that_are_not_drawn_stay_exactly_as_they_are():
    images = as_tensor(pictures(64))
    assert torch.equal(jitter(images, replace(PATHOLOGY, p=0).draw(0, 0, np.arange(64))), images)
    half = replace(PATHOLOGY, p=0.5).draw(0, 0, np.arange(64))
    same = (jitter(images, half) == images).flatten(1).all(1).numpy()
    assert np.array_equal(same, ~half.applied)
    assert 20 <= same.sum() <= 44
    assert torch.equal(jitter(images, ColourJitter(0, 0, 0, 0).draw(0, 0, np.arange(64))), images)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"brightness": -0.1}, r"brightness -0.1: must be 0 or more"),
        ({"contrast": float("inf")}, r"contrast inf"),
        ({"saturation": float("nan")}, r"saturation nan"),
        ({"hue": 0.6}, r"hue 0.6: must be between 0 and 0.5"),
        ({"p": 1.5}, r"p 1.5: must be between 0 and 1"),
    ],
)
def test_what_has_no_meaning_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        replace(PATHOLOGY, **wrong)


def test_the_host_does_not_wait():
    images, draw = as_tensor(pictures(24)), PATHOLOGY.draw(0, 0, np.arange(24))
    with refuse_host_sync():
        jitter(images, draw)


def test_a_whole_batch_is_jittered_alike_or_not_at_all():
    samples = np.arange(16)
    alike = ColourJitter(0.25, 0.75, 0.25, 0.04, p=0.5, whole_batch=True)
    each = ColourJitter(0.25, 0.75, 0.25, 0.04, p=0.5)
    applied = []
    for epoch in range(200):
        draw, own = alike.draw(0, epoch, samples), each.draw(0, epoch, samples)
        for found, one in ((draw.factors, own.factors), (draw.order, own.order), (draw.applied, own.applied)):
            assert (found == one[:1]).all()  # the first image's
        applied.append(bool(draw.applied[0]))
    assert 0.35 < np.mean(applied) < 0.65
    images = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0)).expand(16, -1, -1, -1)
    jittered = jitter(images, alike.draw(0, applied.index(True), samples))
    assert (jittered == jittered[:1]).all()
    assert not torch.equal(jittered, images)
