"""The speedrun: what counts, by hand; the judge, on masks made by hand; and one that runs, of tiny sizes."""

import json
import math
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nibabel
import numpy as np
import pytest
import torch

from medspeed.benchmarks import speedrun
from medspeed.benchmarks.peers import read_pairs, train
from medspeed.benchmarks.speedrun import Course, arrival, parse_options, summary_of
from medspeed.common import console
from medspeed.data_scripts.make_phantoms import make_phantoms

ROOT = Path(__file__).parents[2]


def run(seconds, held=True, judged=0.9):
    stages = {"start": 1.0, "train": seconds - 1.0}
    return {"held": held, "seconds": seconds, "steps": 7, "judged anew": judged, "stages": stages}


def test_the_ratio_is_the_median_over_the_seeds():
    found = summary_of({"guide": [run(60.0), run(50.0), run(90.0)], "fast": [run(10.0), run(10.0), run(30.0)]}, 0.9)
    assert found["ratio, median"] == "5.00"
    assert found["guide"]["seconds"]["median"] == 60.0
    assert found["fast"] == {
        "arrived": "3 of 3",
        "at the target when judged anew": "3 of 3",
        "seconds": {"median": 10.0, "least": 10.0, "most": 30.0},
        "steps": [7, 7, 7],
        "seconds of each stage, median": {"start": 1.0, "train": 9.0},
    }


def test_a_seed_of_ours_that_never_arrives_is_infinite_and_one_of_the_guides_makes_the_ratio_a_bound():
    guide = [run(60.0), run(80.0, held=False, judged=0.7), run(100.0)]
    fast = [run(10.0, judged=0.89), run(5.0, held=False), run(20.0)]
    found = summary_of({"guide": guide, "fast": fast}, 0.9)
    assert found["ratio, median"] == ">= 5.00"  # of 6, 0 and 5
    assert found["guide"]["arrived"] == "2 of 3"
    assert found["guide"]["seconds"] == {"median": 80.0, "least": 60.0, "most": 100.0}
    assert (found["fast"]["arrived"], found["fast"]["at the target when judged anew"]) == ("2 of 3", "2 of 3")
    assert found["fast"]["seconds"] == {"median": 20.0, "least": 10.0, "most": None}


def test_flags_of_the_app_follow_two_dashes(capsys):
    given, flags = parse_options(["spleen-small", "--sides", "fast", "--target", "0.9", "--", "--epochs", "3"])
    assert (given.task, given.target, flags) == ("spleen-small", 0.9, ["--epochs", "3"])
    with pytest.raises(SystemExit):
        parse_options(["brats", "--sides", "fast"])
    assert "--target" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_options(["brats", "--whole", "--target", "0.9"])
    assert "leave out --target" in capsys.readouterr().err
    assert parse_options(["brats", "--whole", "--sides", "fast"])[0].whole
    with pytest.raises(SystemExit):
        parse_options(["real-ct", "--whole"])
    assert "pass real data" in capsys.readouterr().err
    for words, said in (
        (["brats", "--labels", "x"], "--labels: brats has"),
        (["brats", "--sides", "guide", "--warm"], "--warm"),
    ):
        with pytest.raises(SystemExit):
            parse_options(words)
        assert said in capsys.readouterr().err


def train_until(folder, values, most):
    """Train a stand-in for a guide whose validations find these values, an epoch each; return what it tells."""
    found = iter(values)
    network = torch.nn.Linear(1, 1, bias=False)
    item = {"image": torch.ones(1, 1), "label": torch.zeros(1, 1)}

    def validate(trained):
        trained.weight.data.fill_(value := next(found))
        return value

    guide: Any = SimpleNamespace(
        training_loader=lambda given: [item, item], make_validation=lambda given: validate, METRIC="Dice", FALLS=True,
        make_network=lambda: network, make_loss=lambda: torch.nn.functional.mse_loss,
    )  # fmt: skip
    given = Namespace(to=folder, until=0.8, most=most, epochs=most, every=1, rate=0.1, network={}, device="cpu")
    train(guide, given)
    return json.loads((folder / "run.json").read_text())


def test_the_guide_ends_after_three_validations_in_a_row_at_the_target(tmp_path):
    found = train_until(tmp_path, [0.9, 0.8, 0.7, 0.8, 0.85, 0.8, 1.0], most=9)
    assert found["held"]
    assert found["steps"] == 12
    assert [(epoch, value) for epoch, _, value in found["curve"]][-2:] == [(5, 0.85), (6, 0.8)]
    assert found["seconds"] == found["curve"][-1][1] == pytest.approx(sum(found["stages"].values()), abs=0.01)
    assert list(found["stages"]) == ["start", "cache", "train", "validate"]
    assert torch.load(tmp_path / "best.pt")["weight"].item() == pytest.approx(0.9)  # of 0.9, the highest


def test_a_guide_that_never_arrives_is_told_of_at_its_end(tmp_path):
    assert train_until(tmp_path, [0.9, 0.9], most=2)["held"] is False


def test_a_run_that_set_the_target_tells_when_it_was_there(tmp_path):
    run = train_until(tmp_path, [0.5, 0.7, 0.6, 0.65, 0.7, 0.7], most=6)
    assert (run["held"], run["steps"]) == (False, 12)
    found = arrival(run, 0.6)
    assert found is not None
    assert (found["held"], found["steps"], found["seconds"]) == (True, 8, run["curve"][3][1])  # after the fourth
    assert found["seconds"] == pytest.approx(sum(found["stages"].values()), abs=0.01)
    assert arrival(run, 0.66) is None


def mask(path, columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    voxels = np.zeros((4, 4, 4), np.uint8)
    voxels[:columns] = 1
    nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), path)


@pytest.fixture
def three(tmp_path):
    """Three cases of 64 voxels, in one, two and four planes of which is spleen; the first two validate."""
    data, listed = tmp_path / "data", []
    for name, columns in (("a", 1), ("b", 2), ("c", 4)):
        mask(data / "imagesTr" / f"{name}.nii.gz", 4)
        mask(data / "labelsTr" / f"{name}.nii.gz", columns)
        listed.append({"image": f"imagesTr/{name}.nii.gz", "label": f"labelsTr/{name}.nii.gz"})
    dataset = {"name": "Any", "modality": {"0": "CT"}, "labels": {"0": "background", "1": "spleen"}, "training": listed}
    (data / "dataset.json").write_text(json.dumps(dataset))
    (tmp_path / "split.json").write_text(json.dumps({"training": ["c"], "validation": ["a", "b"]}))
    return data


def test_the_guide_trains_and_validates_on_the_cases_that_ours_does(three, tmp_path):
    train, held = read_pairs(Namespace(data=three, split=tmp_path / "split.json"), 1)
    assert [[Path(pair["image"]).name[0] for pair in part] for part in (train, held)] == [["c"], ["a", "b"]]
    train, held = read_pairs(Namespace(data=three, split=None), 1)  # its own rule
    assert [[Path(pair["label"]).name[0] for pair in part] for part in (train, held)] == [["a", "b"], ["c"]]


def test_the_validation_cases_alone_are_judged_from_files(three, tmp_path, monkeypatch):
    made = tmp_path / "run"
    made.mkdir()

    def infer(*command):
        images, output = (command[command.index(flag) + 1] for flag in ("--input", "--output"))
        for path in sorted(Path(images).iterdir()):
            mask(Path(output) / path.name, 2)  # right for b; for a twice as much

    monkeypatch.setattr(speedrun, "call", infer)
    found = Course(tmp_path, three, {"app": "spleen", "metric": "dice", "guide": ""}, [])._judged(made, 0, {})
    assert found["judged anew"] == pytest.approx((2 * 16 / 48 + 1) / 2, abs=1e-4)


@pytest.mark.slow
def test_both_sides_run_and_are_judged(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MEDSPEED_MONITOR_SECONDS", "0")
    monkeypatch.setattr(console, "_verbosity", "normal")  # put back after it: the program silences its process
    network = json.dumps({"channels": [4, 8], "strides": [2]})
    guide = f"--spacing 8 8 8 --crop 32 32 32 --roi 32 32 32 --batch 1 --network '{network}' --device cpu"
    tiny = "--spacing=[8,8,8] --crop_size=[32,32,32] --windows.size=[32,32,32] --channels=[4,8] --device cpu"
    settings = {
        "app": "spleen",
        "metric": "dice",
        "epochs": 2,
        "guide": guide,
        "fast": f"{tiny} --epochs 3 --validate_every 1",
    }
    monkeypatch.setitem(speedrun.TASKS, "spleen-small", settings)
    data, output = make_phantoms("ct", tmp_path / "data", 3), tmp_path / "record.json"
    words = f"speedrun spleen-small --data {data} --seeds 1 --target 0.0001 --output {output}"
    monkeypatch.setattr("sys.argv", words.split())
    speedrun.main()
    record = json.loads(output.read_text())
    assert record["target"] == {"value": 0.0001, "the guide's seeds": []}
    (guide_run,), (fast_run,) = record["runs"]["guide"], record["runs"]["fast"]
    for found in (guide_run, fast_run):
        assert found["seconds"] == pytest.approx(sum(found["stages"].values()), abs=0.02)
        assert 0 <= found["judged anew"] <= 1
        assert found["steps"] > 2
    assert "ratio, median" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", words.replace("--target 0.0001", "--whole").split())
    speedrun.main()
    record = json.loads(output.read_text())
    assert record["target"] is None
    assert [record["runs"][side][0]["steps"] for side in ("guide", "fast")] == [2 * 2, 3]  # all their epochs
    found = {side: record["summary"][side]["judged anew"] for side in ("guide", "fast")}
    assert found == {side: [record["runs"][side][0]["judged anew"]] for side in found}
    assert "ratio, median" not in record["summary"]


RECORDS = sorted((ROOT / "benchmarks" / "records").glob("*speedrun*"))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_readme_and_docs_say_what_a_record_says(record):
    """The README shows what was measured with bf16 instructions; the page shows all."""
    summary = json.loads((record / "record.json").read_text())["summary"]
    guide, fast = (f"{summary[side]['seconds']['median']:.1f} s" for side in ("guide", "fast"))
    *bound, ratio = str(summary["ratio, median"]).split()  # ">=" where a seed of the guide never arrives
    shown = math.floor(10 * float(ratio)) / 10 if bound else float(ratio)  # rounded up it would be none
    row = f"| {guide} | {fast} | {' '.join([*bound, f'{shown:.1f}x'])} |"
    assert (row in (ROOT / "README.md").read_text(encoding="utf-8")) == ("_cpu-bf16_" in record.name)
    (line,) = (line for line in (ROOT / "docs" / "benchmarks.md").read_text().splitlines() if record.name in line)
    assert row in line
    assert line.endswith(f"| {summary['guide']['arrived']}, {summary['fast']['arrived']} |")
