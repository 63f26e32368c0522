"""Each part of `compare.py pathology` runs at a tiny scale, and its rows are of both sides."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from medspeed.apps.pathology.slides.camelyon import read_slide_set
from medspeed.benchmarks import compare, harness, slides
from medspeed.benchmarks.guides import pathology
from medspeed.benchmarks.harness import Options, in_turn
from medspeed.benchmarks.peers import make_step, pathology_guide
from medspeed.common.config import replaced
from medspeed.common.training.fit import train_step
from medspeed.data_scripts.make_slides import make_slides
from medspeed.models.resnet18_fcn import resnet18_fcn

CPU = torch.device("cpu")
SMALL = {"PATCH": 64, "LOADED": (36, 18), "STEPS": ((64, 9),), "EPOCH": 2, "WARM": (36, 9, 2), "MASK_LEVEL": 4}


@pytest.fixture
def small(monkeypatch, in_this_process):
    for name, value in SMALL.items():
        monkeypatch.setattr(pathology, name, value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_slides(tmp_path_factory.mktemp("data") / "slides", 4, 2, 1024)


def rows_of(part, folder, tmp_path, guide=True):
    rows = getattr(slides, part)(slides.open_task(Options("pathology", CPU, 1, tmp_path, guide), folder, 4))
    return {each["what"].partition(" (guide")[0]: each for each in rows}


def test_slides_with_and_without_tumour_are_taken_in_turn(folder):
    found = slides.some(read_slide_set(folder).training, 3)
    assert [entry.tumour for entry in found] == [False, True, False]


@pytest.mark.usefixtures("small")
def test_preparation_from_the_command_line(folder, tmp_path, monkeypatch, capsys):
    output = tmp_path / "record.json"
    words = f"compare.py pathology --data {folder} --part preparation --rounds 1 --device cpu --output {output}"
    monkeypatch.setattr(sys, "argv", words.split())
    compare.main()
    record = json.loads(output.read_text())
    assert record["app"] == "pathology"
    first, later = record["rows"]
    assert later["what"].startswith("loading and colour jitter, later epochs (guide: ")
    assert later["ratio"] == pytest.approx(later["fast"] / later["guide"], rel=0.1)
    assert harness.show(first) in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_step_has_a_row_for_every_pair_of_sides(folder, tmp_path):
    rows = rows_of("step", folder, tmp_path)
    assert all(each["guide"] > 0 and each["fast"] > 0 for each in rows.values())
    assert any("both fp32" in each["what"] for each in rows.values()) or len(rows) == 1


def test_both_sides_step_on_the_same_patches(folder, tmp_path, monkeypatch):
    """The first losses are equal where the weights are, so image, label and loss are (ours without smoothing)."""
    entries = read_slide_set(folder)
    task = slides.open_task(Options("pathology", CPU, 1, tmp_path, True), folder, 8)
    table = slides.draw_patches(entries.training, 9, 64)
    losses: dict[str, float] = {}
    guide_step, guide_network, fast_network = make_step, pathology_guide.FullyConvolutional, resnet18_fcn

    def note(name: str, loss: Any) -> None:
        losses[name] = float(loss)

    def seeded(make: Any) -> Any:
        def network(*arguments: Any) -> Any:
            made = make(*arguments)
            weights = np.random.default_rng(0)
            for parameter in made.parameters():
                parameter.data = torch.from_numpy(0.05 * weights.standard_normal(parameter.shape)).float()
            return made

        return network

    sharp = replaced(slides._FAST, {"augmentation.label_smoothing": 0.0})
    monkeypatch.setattr(slides, "_FAST", sharp)
    monkeypatch.setattr(pathology_guide, "FullyConvolutional", seeded(guide_network))
    monkeypatch.setattr(slides, "resnet18_fcn", seeded(fast_network))

    def noted_step(*given: Any) -> Any:
        step = guide_step(*given)
        return lambda *batch: note("guide", step(*batch))

    monkeypatch.setattr(harness, "make_step", noted_step)
    monkeypatch.setattr(harness, "train_step", lambda *a: note("fast", train_step(*a)))
    guide, fast = pathology.guide_steps(task, table, 9), slides.fast_steps(task, table, 9)
    in_turn({"guide": guide["guide fp32"], "fast": fast["fast fp32"]}, 1, warm_up=False)
    assert losses["fast"] == pytest.approx(losses["guide"], rel=1e-4)


def test_more_patches_than_there_is_room_for_are_refused(folder):
    with pytest.raises(ValueError, match=r"4 slides have room for \d+ patches of 512 pixels, not for 9000000"):
        slides.draw_patches(read_slide_set(folder).training, 9_000_000, 512)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("guide", [True, False])
def test_inference_scores_both_maps(folder, tmp_path, guide):
    rows = rows_of("inference", folder, tmp_path, guide)
    scan = rows["scan of a slide, fp32"]
    assert scan["fast"] > 0
    assert ("FROC of these scans" in rows) is guide
    if guide:
        assert scan["ratio"] == pytest.approx(scan["guide"] / scan["fast"], rel=0.05)
        assert 0 <= rows["FROC of these scans"]["fast"] <= 1
        assert 0 <= rows["slide AUC of these scans"]["guide"] <= 1


@pytest.mark.slow  # two whole runs, exports and all
def test_quality_is_of_equal_runs_of_both_recipes(folder, tmp_path, monkeypatch):
    tiny = {"patch_size": 64, "patches_per_slide": 12, "batch_size": 6, "epochs": 1, "tile_size": 1024}
    monkeypatch.setattr(pathology, "QUALITY", {**pathology.QUALITY, "data": folder, "held_out": 0.5, **tiny})
    (found,) = compare.quality(Options("pathology", CPU, 1, tmp_path, True))
    assert 0 <= found["guide"] <= 1
    assert 0 <= found["fast"] <= 1
    written = {side: (tmp_path / f"{side}-0" / "config.yaml").read_text() for side in ("guide", "fast")}
    assert "source: uncached" in written["guide"]
    assert "source: resident" in written["fast"]
