"""Each part of `compare.py` for volumes runs at a tiny scale, and its rows are of both sides."""

import json
import sys

import nibabel
import numpy as np
import pytest
import torch

from medspeed.benchmarks import compare, harness, volumes
from medspeed.benchmarks.guides import brats, spleen
from medspeed.benchmarks.harness import Options, in_turn
from medspeed.benchmarks.peers import brats_guide, make_step, spleen_guide
from medspeed.common.data.dataset import read_dataset
from medspeed.common.files import write_json
from medspeed.common.inference.model import VolumeModel
from medspeed.common.training.fit import train_step
from medspeed.common.training.volume_config import Windows
from medspeed.data_scripts.make_phantoms import make_ct_phantoms

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch, in_this_process):
    monkeypatch.setattr(brats, "STEPS", (((16, 16, 16), 2),))
    monkeypatch.setattr(brats, "WINDOW", (24, 24, 24))
    monkeypatch.setattr(brats, "WARM", ((16, 16, 16), 2, 30))
    monkeypatch.setattr(brats_guide, "VALIDATION_ROI", (24, 24, 24))
    monkeypatch.setattr(spleen, "STEPS", (((16, 16, 16), 4),))
    monkeypatch.setattr(spleen_guide, "CROP", (16, 16, 16))


def run_compare(monkeypatch, words, tmp_path):
    output = tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", [*f"compare.py {words} --rounds 1 --device cpu --output".split(), str(output)])
    compare.main()
    record = json.loads(output.read_text())
    return record, {each["what"]: each for each in record["rows"]}


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_preparation_and_inference_from_the_command_line(small_heads, tmp_path, monkeypatch, capsys):
    words = f"brats --data {small_heads} --part preparation inference"
    record, rows = run_compare(monkeypatch, words, tmp_path)
    assert (record["app"], record["cases"]) == ("brats", 8)
    cold, scan = rows["preparation, cold"], rows["scan to mask, file to file, fp32"]
    for each in (cold, scan):
        assert each["ratio"] == pytest.approx(each["guide"] / each["fast"], rel=0.05, abs=0.02)
        assert harness.show(each) in capsys.readouterr().out or each is scan
    assert rows["peak memory of scan to mask, fp32"]["guide"] > 0
    # The heads fill 22 of 24 voxels, which the guide keeps whole and ours crops: no more than rims may differ.
    assert rows["least Dice of a mask to the guide's, fp32"]["fast"] > 0.9
    dice = rows["Dice of these masks, fp32, windows of one size"]
    assert abs(dice["guide"] - dice["fast"]) < 0.05


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("bf16", [True, False])
def test_ours_alone_steps_without_the_guide_and_without_what_is_emulated(
    small_heads, tmp_path, monkeypatch, capsys, bf16
):
    monkeypatch.setattr(harness, "computes_bf16", lambda device: bf16)
    monkeypatch.setattr(harness, "choose_precision", lambda *_: "bf16" if bf16 else "fp32")
    _, rows = run_compare(monkeypatch, f"brats --data {small_heads} --part step --sides fast --cases 1", tmp_path)
    assert all(each["guide"] is None and each["fast"] > 0 for each in rows.values())
    assert any("bf16" in name for name in rows) is bf16
    assert ("only emulates" in capsys.readouterr().out) is not bf16


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("module", [spleen, brats], ids=["spleen", "brats"])
def test_both_sides_step_on_the_same_crops(small_heads, tmp_path, monkeypatch, module):
    """The first losses are equal where the weights are, so image, labels and loss are."""
    app = module.__name__.rpartition(".")[2]
    folder = small_heads if module is brats else make_ct_phantoms(tmp_path / "data", 1)
    made = volumes.open_task(Options(app, CPU, 1, tmp_path, True), folder, 8)
    losses: dict[str, float] = {}
    (crop, batch) = module.STEPS[0]
    peer, ours = make_step, train_step

    def noting(name, step):
        return lambda *given: losses.setdefault(name, float(step(*given)))

    def same_weights(network):
        draw = np.random.default_rng(0)
        for name, value in network.named_parameters():
            if value.ndim > 1 or name.endswith("bias"):
                value.data = torch.from_numpy(0.1 * draw.standard_normal(value.shape)).float()
        return network

    plain, build = module.peer.make_network, VolumeModel.build
    monkeypatch.setattr(module.peer, "make_network", lambda channels: same_weights(plain(channels)))
    monkeypatch.setattr(VolumeModel, "build", lambda model, *given: same_weights(build(model, *given)))
    monkeypatch.setattr(harness, "make_step", lambda *given: noting("guide", peer(*given)))
    monkeypatch.setattr(harness, "train_step", noting("fast", ours))
    guide, fast = volumes.guide_steps(made, crop, batch), volumes.fast_steps(made, crop, batch)
    in_turn({"guide": guide["guide fp32"], "fast": fast["fast fp32"]}, 1, warm_up=False)
    assert losses["fast"] == pytest.approx(losses["guide"], rel=1e-4)
    in_turn({"guide": guide["guide with its batch"], "fast": fast["fast with its batch"]}, 1, warm_up=False)


def test_regions_other_than_the_guides_are_refused(small_heads, tmp_path):
    folder = tmp_path / "others"
    folder.mkdir()
    for kind in ("imagesTr", "labelsTr"):
        (folder / kind).symlink_to(small_heads / kind)
    content = json.loads((small_heads / "dataset.json").read_text())
    labels = {"0": "background", "1": "necrosis", "2": "edema", "3": "enhancing tumour"}  # the numbers of BraTS 2023
    write_json(folder / "dataset.json", {**content, "labels": labels})
    with pytest.raises(ValueError, match="the guide knows those of MSD only"):
        brats.plan(read_dataset(folder), folder)


@pytest.mark.slow  # two whole runs, exports and all
@pytest.mark.usefixtures("small")
def test_quality_is_of_equal_runs_of_both_recipes(small_heads, tmp_path, monkeypatch):
    tiny = {"split": "all", "epochs": 2, "crop_size": (16, 16, 16), "windows": Windows(size=(24, 24, 24))}
    monkeypatch.setattr(brats, "QUALITY", {**brats.QUALITY, "data": small_heads, **tiny})
    (found,) = compare.quality(Options("brats", CPU, 1, tmp_path, True))
    assert found["what"] == "Dice on phantoms, 1 seeds, equal epochs"
    assert 0 <= found["guide"] <= 1
    assert 0 <= found["fast"] <= 1
    written = {side: (tmp_path / f"{side}-0" / "config.yaml").read_text() for side in ("guide", "fast")}
    assert "learning_rate: 0.01" in written["guide"]
    for line in ("filters: 8", "epochs: 2", "split: all"):
        assert all(line in text for text in written.values()), line
    assert "loss: monai_dice_focal" in written["guide"]


@pytest.fixture
def pair(tmp_path):
    """Label 1 in 2 and 1 of 4 voxels, 1 of them common; label 2 in 1 and 1, none common; no label 3 in either."""
    for name, values in (("one", [1, 1, 2, 0]), ("other", [1, 0, 0, 2])):
        voxels = np.array(values, np.uint8).reshape(4, 1, 1)
        nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), tmp_path / f"{name}.nii")
    return [tmp_path / "one.nii"], [tmp_path / "other.nii"]


def test_the_dice_of_label_maps(pair):
    one, other = pair
    found = volumes.dices(one, other, [(1,), (2,), (3,), (1, 2)])  # of either label: voxels 3 and 2, one common
    assert found == pytest.approx([2 / 3, 0.0, float("nan"), 0.4], nan_ok=True)
