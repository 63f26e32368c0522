import json
from pathlib import Path

import nibabel
import numpy as np
import pytest

from medspeed.benchmarks import time_to_target
from medspeed.benchmarks.time_to_target import judge_segmentation, summary_of
from medspeed.common.inference.model import write_model
from tests.support import unet_model


def run(seconds, held=True, holds=True):
    return {"seconds to target": seconds, "held": held, "holds": holds}


def test_the_median_is_of_the_runs_that_reached_it():
    found = summary_of([run(30.0), run(10.0), run(99.0, held=False), run(20.0, holds=False)])
    assert found == {
        "reached": "3 of 4",
        "held when judged anew": "2 of 4",
        "cold seconds, median": 20.0,
        "cold seconds, interval": [10.0, 30.0],
    }


def test_none_reached_is_none():
    found = summary_of([run(5.0, held=False)])
    assert (found["reached"], found["cold seconds, median"], found["cold seconds, interval"]) == ("0 of 1", None, None)


def mask(path, columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    voxels = np.zeros((4, 4, 4), np.uint8)
    voxels[:columns] = 1
    nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), path)


def test_the_validation_cases_alone_are_judged_from_files(tmp_path, monkeypatch):
    data, made = tmp_path / "data", tmp_path / "run"
    for name, columns in (("a", 1), ("b", 2), ("c", 4)):
        mask(data / "imagesTr" / f"{name}.nii.gz", 4)
        mask(data / "labelsTr" / f"{name}.nii.gz", columns)
    made.mkdir()
    listed = [{"image": f"imagesTr/{name}.nii.gz", "label": f"labelsTr/{name}.nii.gz"} for name in "abc"]
    dataset = {"name": "Any", "modality": {"0": "CT"}, "labels": {"0": "background", "1": "spleen"}, "training": listed}
    (data / "dataset.json").write_text(json.dumps(dataset))
    (made / "split.json").write_text(json.dumps({"training": ["c"], "validation": ["a", "b"]}))
    write_model(made, "spleen", unet_model((2.0, 2.0, 2.0), (4, 8), (4, 4, 4)))
    (made / "summary.json").write_text(json.dumps({"data": {"folder": str(data)}}))

    def infer(*command):
        images, output = (command[command.index(flag) + 1] for flag in ("--input", "--output"))
        for path in sorted(Path(images).iterdir()):
            mask(Path(output) / path.name, 2)  # right for b; for a twice as much

    monkeypatch.setattr(time_to_target, "call", infer)
    assert judge_segmentation("spleen", made) == pytest.approx((2 * 16 / 48 + 1) / 2)


def test_flags_of_the_app_follow_two_dashes():
    given = ["--app", "spleen", "--until", "dice=0.9", "--data", "x", "--seeds", "2", "--", "--epochs", "3"]
    options = time_to_target.PARSER.parse_args(given)
    assert (options.app, options.seeds, options.flags) == ("spleen", 2, ["--epochs", "3"])
