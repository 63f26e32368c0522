"""Each part of `compare.py pathology` runs at a tiny scale, and its figures are of both sides."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import compare, pathology_parts, pathology_sides
from benchmarks.apart import Sides
from benchmarks.in_turn import in_turn
from benchmarks.pathology_parts import Sizes
from benchmarks.peers import pathology_guide
from common.training.fit import train_step
from data_scripts.make_slides import make_slides
from models.resnet18_fcn import resnet18_fcn

CPU = torch.device("cpu")


@contextmanager
def here(make: Any, *arguments: Any, keep_freed: bool) -> Iterator[Sides]:
    """Stand in for `apart`, which has tests of its own: the sides in this process, without its seconds of imports."""
    yield dict(make(*arguments))


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(pathology_parts, "apart", here)
    sizes = Sizes(patch=64, loaded=(36, 18), steps=((64, 9),), epoch=2, warm=(36, 9, 2), scan_batch=64, mask_level=4)
    monkeypatch.setattr(pathology_parts, "SIZES", sizes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_slides(tmp_path_factory.mktemp("data") / "slides", 4, 2, 1024, progress=False)


@pytest.fixture
def slides(folder):
    return pathology_parts.read_slides(folder, 4)[0]


def test_slides_with_and_without_tumour_are_taken_in_turn(folder):
    slides, count = pathology_parts.read_slides(folder, 3)
    assert [entry.tumour for entry in slides.training] == [False, True, False]
    assert sorted(entry.tumour for entry in slides.testing) == [False, True]
    assert count == 5


@pytest.mark.usefixtures("small")
def test_preparation_from_the_command_line(folder, tmp_path, monkeypatch, capsys):
    output = tmp_path / "record.json"
    words = f"compare.py pathology --data {folder} --part preparation --rounds 1 --device cpu --output {output}"
    monkeypatch.setattr(sys, "argv", words.split())
    compare.main()
    record = json.loads(output.read_text())
    preparation = record["preparation"]
    assert record["app"] == "pathology"
    best = preparation["the guide that counts"]
    rates = {name: preparation[name] for name in preparation if name.endswith("patches per s")}
    assert len(rates) == 6  # four ways of the guide, two epochs of ours
    assert rates[f"{best}, patches per s"] == max(rate for name, rate in rates.items() if name.startswith("guide"))
    ratio = rates["fast, later epoch, patches per s"] / rates[f"{best}, patches per s"]
    assert preparation["guide / fast, later epochs"] == pytest.approx(ratio, rel=0.1)
    assert "guide / fast, first epoch" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_step_has_a_ratio_for_every_pair_of_sides(slides, tmp_path):
    step = pathology_parts.step(slides, 1, CPU, tmp_path)["9 x 64x64"]
    assert step["guide / fast, both fp32"] == pytest.approx(step["guide fp32, s"] / step["fast fp32, s"], rel=0.3)
    for name in ("guide bf16, s", "fast bf16, s", "fast, with its batch, s", "guide / fast, with their batches"):
        assert step[name] > 0
    assert step["the guide that counts"].startswith("guide, ")


def test_both_sides_step_on_the_same_patches(slides, tmp_path, monkeypatch):
    """The first losses are equal where the weights are, so image, label and loss are (ours without smoothing)."""
    task = pathology_parts._make_task(slides, CPU, tmp_path)
    table = pathology_sides.draw_patches(slides.training, 9, 64)
    losses: dict[str, float] = {}
    guide_step, guide_network, fast_network = (
        pathology_guide.training_step, pathology_guide.FullyConvolutional, resnet18_fcn
    )  # fmt: skip

    def note(name: str, loss: Any) -> None:
        losses[name] = float(loss)

    def seeded(make: Any) -> Any:
        def network(*arguments: Any) -> Any:
            torch.manual_seed(3)
            made = make(*arguments)
            weights = np.random.default_rng(0)
            for parameter in made.parameters():
                parameter.data = torch.from_numpy(0.05 * weights.standard_normal(parameter.shape)).float()
            return made

        return network

    monkeypatch.setattr(pathology_sides, "_FAST", replace(pathology_sides._FAST, label_smoothing=0.0))
    monkeypatch.setattr(pathology_guide, "FullyConvolutional", seeded(guide_network))
    monkeypatch.setattr(pathology_sides, "resnet18_fcn", seeded(fast_network))
    monkeypatch.setattr(pathology_guide, "training_step", lambda *a: note("guide", guide_step(*a)))
    monkeypatch.setattr(pathology_sides, "train_step", lambda *a: note("fast", train_step(*a)))
    guide = pathology_sides.guide_steps(task, table, 9, torch.bfloat16)
    fast = pathology_sides.fast_steps(task, table, 9)
    in_turn({"guide": guide["guide fp32"], "fast": fast["fast fp32"]}, 1, warm_up=False)
    assert losses["fast"] == pytest.approx(losses["guide"], rel=1e-4)


def test_more_patches_than_there_is_room_for_are_refused(slides):
    with pytest.raises(ValueError, match=r"4 slides have room for \d+ patches of 512 pixels, not for 9000000"):
        pathology_sides.draw_patches(slides.training, 9_000_000, 512)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_inference_scores_both_maps(slides, tmp_path):
    figures = pathology_parts.inference(slides, 1, CPU, tmp_path)
    best = figures["the guide that counts"]
    assert figures["guide / fast fp32"] == pytest.approx(
        figures[f"{best}, s per slide"] / figures["fast fp32, s per slide"], rel=0.05
    )
    for side in (best, "fast fp32", "fast bf16"):
        assert 0 <= figures[f"FROC, {side}"] <= 1
        assert 0 <= figures[f"slide AUC, {side}"] <= 1


@pytest.mark.slow  # two whole runs, exports and all
def test_quality_is_of_equal_runs_of_both_recipes(slides, tmp_path, monkeypatch):
    tiny = replace(pathology_parts.QUALITY, patch_size=64, patches_per_slide=12, batch_size=6, epochs=1, held_out=0.5,
                   tile_size=1024)  # fmt: skip
    monkeypatch.setattr(pathology_parts, "QUALITY", tiny)
    figures = pathology_parts.quality(slides, 1, CPU, tmp_path)
    assert figures["fast - guide, mean"] == pytest.approx(
        figures["fast, patch AUC by seed"][0] - figures["guide, patch AUC by seed"][0], abs=1e-4
    )
    written = {side: (tmp_path / f"{side}-0" / "config.yaml").read_text() for side in ("guide", "fast")}
    assert "source: uncached" in written["guide"]
    assert "source: resident" in written["fast"]
