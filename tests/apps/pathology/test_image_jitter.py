import colorsys

import pytest
import torch

from apps.pathology.image_jitter import ADJUST, adjust_brightness, adjust_contrast, adjust_hue, adjust_saturation
from common.data.colour import ColourJitter, JitterDraw, jitter

EDGES = (
    torch.tensor(
        [[0, 0, 0], [1, 1, 1], [0.5, 0.5, 0.5], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [0, 1, 1], [1, 0, 1]]
    )
    .T[:, None]
    .float()
)  # [3, 1, 9]


def test_blends_by_hand():
    image = torch.tensor([0.2, 0.4, 0.8])[:, None, None]
    grey = 0.2989 * 0.2 + 0.587 * 0.4 + 0.114 * 0.8
    assert adjust_brightness(image, 1.5).flatten().tolist() == pytest.approx([0.3, 0.6, 1.0])
    expected = [0.5 * value + 0.5 * grey for value in (0.2, 0.4, 0.8)]
    assert adjust_saturation(image, 0.5).flatten().tolist() == pytest.approx(expected)
    assert adjust_contrast(image, 0.5).flatten().tolist() == pytest.approx(expected)  # one pixel is its own mean


@pytest.mark.parametrize("turn", [-0.5, -0.04, 0.0, 0.3])
def test_hue_is_that_of_the_standard_library(turn: float):
    torch.manual_seed(0)
    image = torch.cat([EDGES, torch.rand(3, 1, 200)], 2)
    found = adjust_hue(image, turn)[:, 0].T.tolist()
    for pixel, mine in zip(image[:, 0].T.tolist(), found, strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
        assert mine == pytest.approx(colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value), abs=1e-5)


def test_the_fast_jitter_computes_the_same():
    torch.manual_seed(0)
    images = torch.rand(6, 3, 20, 20)
    draw: JitterDraw = ColourJitter(0.25, 0.75, 0.25, 0.04).draw(1, 2, torch.arange(6).numpy())
    found = jitter(images, draw)
    for image, factors, order, mine in zip(images, draw.factors, draw.order, found, strict=True):
        for part in order:
            image = ADJUST[part](image, float(factors[part]))
        assert (mine - image).abs().max() < 1e-5
