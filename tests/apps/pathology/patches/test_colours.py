"""What colours tell of patches, by hand and as SciPy's optimizer finds it."""

from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize

from medspeed.apps.pathology.patches.colours import colour_auc, histograms
from medspeed.apps.pathology.patches.store import Patches
from medspeed.apps.pathology.patches.table import PatchTable
from medspeed.apps.pathology.scan.froc import auc


def patches(pixels, label):
    count, side = len(pixels), pixels.shape[-1]
    files, places = (Path("a.tif"),), np.zeros((count, 2), np.int32)
    return Patches(PatchTable(files, np.zeros(count, np.int32), places, np.asarray(label, np.uint8), side), pixels)


def test_histograms_are_of_each_channels_levels():
    pixels = np.zeros((2, 3, 4, 4), np.uint8)
    pixels[1, 0], pixels[1, 1, :2] = 255, 16  # red is full; green has the second level in the upper half
    found = histograms(patches(pixels, [0, 1]), np.array([1]))
    due = np.zeros((1, 48))
    due[0, [15, 16, 17, 32]] = 1, np.sqrt(0.5), np.sqrt(0.5), 1
    np.testing.assert_allclose(found, due)


def test_colours_that_differ_tell_all_and_patterns_of_one_colour_nothing():
    label = np.arange(12) % 2
    pixels = np.full((12, 3, 8, 8), 100, np.uint8)
    pixels[label == 1, 2] = 180
    assert colour_auc(patches(pixels, label), patches(pixels[::-1], label[::-1])) == 1.0
    pixels = np.full((12, 3, 8, 8), 100, np.uint8)
    pixels[label == 0, :, :4], pixels[label == 1, :, 4:] = 200, 200
    assert colour_auc(patches(pixels, label), patches(pixels, label)) == 0.5


def test_the_regression_is_the_one_that_scipy_finds():
    draw = np.random.default_rng(0)
    label = draw.integers(0, 2, 80)
    pixels = (draw.normal(120, 40, (80, 3, 8, 8)) + 12 * label[:, None, None, None]).clip(0, 255).astype(np.uint8)
    training, judged = patches(pixels[:50], label[:50]), patches(pixels[50:], label[50:])
    fitted, seen = (histograms(each, np.arange(len(each.table))) for each in (training, judged))
    centre, spread = fitted.mean(0), fitted.std(0) + 1e-6
    fitted, seen, sign = (fitted - centre) / spread, (seen - centre) / spread, 2.0 * label[:50] - 1

    def loss(weights):
        return np.logaddexp(0, -sign * (fitted @ weights[1:] + weights[0])).sum() + (weights[1:] ** 2).sum() / 2

    best = minimize(loss, np.zeros(49), method="BFGS", options={"gtol": 1e-6}).x
    due = auc(label[50:], seen @ best[1:])
    assert 0.6 < due < 1.0
    assert colour_auc(training, judged) == pytest.approx(due, abs=0.01)
