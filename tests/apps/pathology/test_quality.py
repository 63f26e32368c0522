"""How patches are scored: in the run's precision, read ahead, each rank its share."""

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn

from medspeed.apps.pathology.model import PathologyModel
from medspeed.apps.pathology.patches.store import Patches
from medspeed.apps.pathology.patches.table import PatchTable
from medspeed.apps.pathology.quality import (
    all_scores,
    call_size,
    colour_auc,
    evaluate,
    histograms,
    patch_gate,
    patch_scores,
)
from medspeed.apps.pathology.scan.froc import auc
from medspeed.common.clock import Clock
from medspeed.common.inference import Precision
from medspeed.common.ranks import Ranks
from medspeed.common.run import Run

CPU = torch.device("cpu")
COUNT, SIZE = 22, 32


@pytest.fixture
def patches() -> Patches:
    """Patches whose brightness tells the label, mapped as a store's pages are."""
    label = np.arange(COUNT, dtype=np.uint8) % 2
    table = PatchTable((Path("a.tif"),), np.zeros(COUNT, np.int32), np.zeros((COUNT, 2), np.int32), label, SIZE)
    pixels = np.full((COUNT, 3, SIZE, SIZE), 90, np.uint8) + 60 * label[:, None, None, None]
    return Patches(table, pixels + np.arange(COUNT, dtype=np.uint8)[:, None, None, None] % 7)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path, CPU, Clock(), resumed=False, ranks=Ranks())


class Bright(nn.Module):
    """The mean of a patch as its logit; it notes the type that autocast gives a matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        flat = image.flatten(1)
        means = flat @ torch.full((flat.shape[1], 1), 1 / flat.shape[1])
        self.seen.append(means.dtype)
        return means.view(-1, 1, 1, 1)


def test_the_two_tiles_of_the_gate_differ_however_few_patches_there_are(patches: Patches, run: Run):
    """Equal ones would let an export pass that mixes up its batch; a tile holds each of the patches 22 times."""
    assert not torch.equal(*patch_gate(patches, PathologyModel(SIZE, 0.5, COUNT * SIZE, 1, "fp32"), run, "few").windows)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_validation_and_test_scores_are_computed_in_the_runs_precision(
    patches: Patches, run: Run, precision: Precision, dtype: torch.dtype
):
    network = Bright()
    assert auc(patches.table.label, all_scores(patches, network, precision, run)) == 1.0
    found = evaluate(dict.fromkeys(("training", "validation", "testing"), patches), network, precision, run)
    assert found.per_case["validation AUC"] == found.per_case["testing AUC"] == 1.0
    assert network.seen == [dtype] * 3
    assert found.without_learning == {"value": 1.0, "how": "logistic regression on color histograms"}
    assert "without learning: AUC 1.0000 (" in (run.directory / "run.log").read_text()


@pytest.mark.parametrize("parts", [("training", "validation"), ("training", "validation", "testing")])
def test_a_quality_on_what_trained_the_initial_weights_is_told(patches: Patches, run: Run, parts: tuple[str, ...]):
    (run.directory / "split.json").write_text('{"held_out": false}')
    found = evaluate(dict.fromkeys(parts, patches), Bright(), "fp32", run)
    assert found.selected_on == ("validation" if "testing" in parts else "training")
    said = (run.directory / "run.log").read_text()
    assert ("NOT HELD OUT: trained on validation cases; their AUC says" in said) == ("testing" not in parts)
    (run.directory / "split.json").write_text("{}")
    assert evaluate(dict.fromkeys(parts, patches), Bright(), "fp32", run).selected_on == "validation"


@pytest.mark.parametrize("on_device", [True, False])
def test_patches_off_the_device_are_read_while_the_last_ones_are_scored(patches: Patches, on_device: bool):
    rows = np.arange(1, COUNT)
    held = patches.on_device(rows, CPU) if on_device else patches
    due = 1 / (1 + np.exp(-(np.asarray(patches.pixels)[1:, 0, 0, 0] / 127.5 - 1)))
    threads: list[str] = []
    take = held.take

    def noting(*given: Any) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        return take(*given)

    object.__setattr__(held, "take", noting)
    scores = patch_scores(held, lambda images: images.mean((1, 2, 3), keepdim=True), rows, CPU, at_once=4)
    np.testing.assert_allclose(scores, due, atol=1e-6)
    assert len(threads) == 6
    assert all(name.startswith("prefetch") != on_device for name in threads)


def test_an_error_while_scoring_leaves_no_thread(patches: Patches):
    def fails(images: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        patch_scores(patches, fails, np.arange(COUNT), CPU, at_once=4)
    assert not [each for each in threading.enumerate() if each.name.startswith("prefetch")]


@pytest.mark.parametrize(("count", "most", "size"), [(1, 256, 1), (256, 256, 256), (257, 256, 129), (32, 1, 1)])
def test_the_fewest_calls_have_as_many_patches_each(count, most, size):
    """A compiled network is compiled again for a call of another size."""
    assert call_size(count, most) == size


def coloured(pixels, label):
    count, side = len(pixels), pixels.shape[-1]
    files, places = (Path("a.tif"),), np.zeros((count, 2), np.int32)
    return Patches(PatchTable(files, np.zeros(count, np.int32), places, np.asarray(label, np.uint8), side), pixels)


def test_histograms_are_of_each_channels_levels():
    pixels = np.zeros((2, 3, 4, 4), np.uint8)
    pixels[1, 0], pixels[1, 1, :2] = 255, 16  # red is full; green has the second level in the upper half
    found = histograms(coloured(pixels, [0, 1]), np.array([1]))
    due = np.zeros((1, 48))
    due[0, [15, 16, 17, 32]] = 1, np.sqrt(0.5), np.sqrt(0.5), 1
    np.testing.assert_allclose(found, due)


def test_colours_that_differ_tell_all_and_patterns_of_one_colour_nothing():
    label = np.arange(12) % 2
    pixels = np.full((12, 3, 8, 8), 100, np.uint8)
    pixels[label == 1, 2] = 180
    assert colour_auc(coloured(pixels, label), coloured(pixels[::-1], label[::-1])) == 1.0
    pixels = np.full((12, 3, 8, 8), 100, np.uint8)
    pixels[label == 0, :, :4], pixels[label == 1, :, 4:] = 200, 200
    assert colour_auc(coloured(pixels, label), coloured(pixels, label)) == 0.5


def test_the_regression_is_the_one_that_scipy_finds():
    draw = np.random.default_rng(0)
    label = draw.integers(0, 2, 80)
    pixels = (draw.normal(120, 40, (80, 3, 8, 8)) + 12 * label[:, None, None, None]).clip(0, 255).astype(np.uint8)
    training, judged = coloured(pixels[:50], label[:50]), coloured(pixels[50:], label[50:])
    fitted, seen = (histograms(each, np.arange(len(each.table))) for each in (training, judged))
    centre, spread = fitted.mean(0), fitted.std(0) + 1e-6
    fitted, seen, sign = (fitted - centre) / spread, (seen - centre) / spread, 2.0 * label[:50] - 1

    def loss(weights):
        return np.logaddexp(0, -sign * (fitted @ weights[1:] + weights[0])).sum() + (weights[1:] ** 2).sum() / 2

    best = minimize(loss, np.zeros(49), method="BFGS", options={"gtol": 1e-6}).x
    due = auc(label[50:], seen @ best[1:])
    assert 0.6 < due < 1.0
    assert colour_auc(training, judged) == pytest.approx(due, abs=0.01)


def test_of_fewer_patches_than_ranks_some_have_none(patches: Patches, run: Run):
    ranks: Any = SimpleNamespace(rank=COUNT, world=COUNT + 1, gather=lambda scores: scores)
    assert not all_scores(patches, Bright(), "fp32", replace(run, ranks=ranks)).size
