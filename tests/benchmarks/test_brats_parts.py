"""Each part of `compare.py brats` runs at a tiny scale, and its figures are of both sides."""

import json
import sys
from contextlib import contextmanager
from dataclasses import replace

import nibabel
import numpy as np
import pytest
import torch

from benchmarks import brats_parts, brats_sides, compare, file_to_file
from benchmarks.brats_parts import Sizes
from benchmarks.in_turn import in_turn
from benchmarks.peers import brats_guide
from common.data.cases import read_dataset
from common.files import write_json
from common.training.fit import train_step

CPU = torch.device("cpu")


@contextmanager
def here(make, *arguments, keep_freed):
    """Stand in for `apart`, which has tests of its own: the sides in this process, without its seconds of imports."""
    yield dict(make(*arguments))


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(brats_parts, "apart", here)
    monkeypatch.setattr(file_to_file, "apart", here)
    sizes = Sizes(steps=(((16, 16, 16), 2),), roi=(24, 24, 24), window=(24, 24, 24), warm=((16, 16, 16), 2, 12))
    monkeypatch.setattr(brats_parts, "SIZES", sizes)


@pytest.fixture
def cases(small_heads):
    return read_dataset(small_heads).cases


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_preparation_and_inference_from_the_command_line(small_heads, tmp_path, monkeypatch, capsys):
    output = tmp_path / "record.json"
    words = (
        f"compare.py brats --data {small_heads} --part preparation inference --rounds 1 --device cpu --output {output}"
    )
    monkeypatch.setattr(sys, "argv", words.split())
    compare.main()
    record = json.loads(output.read_text())
    assert record["app"] == "brats"
    assert record["cases"] == 2
    preparation, inference = record["preparation"], record["inference"]
    assert {name for name in preparation if name.endswith("per case")} == {
        f"{side}, s per case" for side in ("guide", "deleting", "cold", "warm", "fingerprint alone")
    }
    cold, guide = preparation["cold, s per case"], preparation["guide, s per case"]
    assert preparation["guide / fast cold"] == pytest.approx(guide / cold, rel=0.05, abs=0.02)
    assert inference["least Dice, fast bf16 to fast fp32"] > 0.9
    assert inference["guide / fast"] > 0
    assert f"guide / fast: {inference['guide / fast']}" in capsys.readouterr().out


@pytest.mark.slow
def test_both_ways_of_inference_agree_where_one_window_holds_the_scan(small_heads, tmp_path, cases):
    """The heads fill 22 of 24 voxels, which the guide keeps whole and ours crops: no more than rims may differ."""
    task = brats_sides.make_task(cases, (24, 24, 24), CPU, tmp_path)
    brats_sides.save_trained(task, (16, 16, 16), 2, 30)
    brats_sides.guide_inference(task, (24, 24, 24))["guide"]()
    files = [case.image for case in task.cases]
    scans = file_to_file.lay_out("brats", task.model, brats_sides.weights_of(task), files, tmp_path, CPU)
    file_to_file.fast_side(scans, "fast fp32")["segment"]()
    for case in cases:
        maps = [np.asarray(nibabel.load(tmp_path / name / case.image.name).dataobj) for name in ("guide", "fast fp32")]
        assert (maps[0] > 0).sum() > 100
        assert (maps[0] != maps[1]).mean() < 0.02


@pytest.mark.usefixtures("small")
def test_step_has_a_ratio_for_every_pair_of_sides(tmp_path, cases):
    figures = brats_parts.step(cases, 0, CPU, tmp_path)
    step = figures["2 x 16x16x16"]
    sides = {name[: -len(", s")] for name in step if name.endswith(", s")}
    assert sides >= {
        "guide fp32", "guide bf16", "guide with its batch", "fast fp32, memory given back", "fast fp32", "fast bf16",
        "fast with its batch",
    }  # fmt: skip
    assert step["guide / fast, both fp32"] == pytest.approx(step["guide fp32, s"] / step["fast fp32, s"], abs=0.02)
    assert all(value > 0 for value in step.values())


def test_both_sides_step_on_the_same_crops(tmp_path, cases, monkeypatch):
    """The first losses are equal where the weights are, so image, regions and loss are."""
    task = brats_sides.make_task(cases, (16, 16, 16), CPU, tmp_path)
    losses = {}

    def first_loss(name, step):
        losses[name] = step()

    guide_step, fast_step = brats_guide.training_step, train_step
    monkeypatch.setattr(brats_guide, "training_step", lambda *a: first_loss("guide", lambda: guide_step(*a)))
    monkeypatch.setattr(
        "benchmarks.brats_sides.train_step", lambda *a: first_loss("fast", lambda: float(fast_step(*a)))
    )

    def make_network(*_):
        torch.manual_seed(3)
        return guide_network()

    guide_network = brats_guide.make_network
    monkeypatch.setattr(brats_guide, "make_network", make_network)
    guide = brats_sides.plain_steps(task, (16, 16, 16), 2, torch.bfloat16)
    torch.manual_seed(3)
    fast = brats_sides.fast_steps(task, (16, 16, 16), 2)  # its first network is that of fp32
    in_turn({"guide": guide["guide fp32"], "fast": fast["fast fp32"]}, 1, warm_up=False)
    assert losses["fast"] == pytest.approx(losses["guide"], rel=1e-4)


def test_regions_other_than_the_guides_are_refused(small_heads, tmp_path):
    folder = tmp_path / "others"
    folder.mkdir()
    for kind in ("imagesTr", "labelsTr"):
        (folder / kind).symlink_to(small_heads / kind)
    content = json.loads((small_heads / "dataset.json").read_text())
    labels = {"0": "background", "1": "necrosis", "2": "edema", "3": "enhancing tumour"}  # the numbers of BraTS 2023
    write_json(folder / "dataset.json", {**content, "labels": labels})
    with pytest.raises(ValueError, match="the guide knows those of MSD only"):
        brats_sides.make_task(read_dataset(folder).cases, (16, 16, 16), CPU, tmp_path)


@pytest.mark.slow  # two whole runs, exports and all
def test_quality_is_of_equal_runs_of_both_recipes(small_heads, tmp_path, cases, monkeypatch):
    tiny = replace(
        brats_parts.QUALITY, data=small_heads, split="all", crop_size=(16, 16, 16), window_size=(24, 24, 24), epochs=2
    )
    monkeypatch.setattr(brats_parts, "QUALITY", tiny)
    figures = brats_parts.quality(cases, 1, CPU, tmp_path)
    assert len(figures["guide, Dice by seed"]) == len(figures["fast, Dice by seed"]) == 1
    assert figures["fast - guide, mean"] == pytest.approx(
        figures["fast, Dice by seed"][0] - figures["guide, Dice by seed"][0], abs=1e-4
    )
    written = {side: (tmp_path / f"{side}-0" / "config.yaml").read_text() for side in ("guide", "fast")}
    for line in ("learning_rate: 0.01", "filters: 8", "epochs: 2", "split: all"):
        assert all(line in text for text in written.values()), line
    assert "loss: monai_dice_focal" in written["guide"]
