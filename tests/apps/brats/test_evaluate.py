"""Regions of a tumor by the names of a dataset's labels; the real program."""

import json

import numpy as np
import pytest

from medspeed.apps.brats import evaluate
from medspeed.common.data.label_files import write_label
from medspeed.common.data.volumes import read_volume
from medspeed.common.inference.options import EvaluateConfig


def test_regions_go_by_the_names_of_the_labels(heads, tmp_path, capsys):
    """Edema that is called enhancing: the whole tumor is right, and nothing else."""
    for path in sorted((heads / "labelsTr").glob("*.nii.gz")):
        truth = read_volume(path)
        wrong = np.where(truth.voxels == 1, 3, truth.voxels)  # MSD: edema 1, non-enhancing 2, enhancing 3
        write_label(tmp_path / path.name, np.asfortranarray(wrong.astype(np.uint8)), truth.affine)
    assert evaluate.main(EvaluateConfig(tmp_path, heads / "labelsTr")).status == 0
    summary = json.loads((tmp_path / "evaluation.json").read_text())["summary"]
    assert set(summary) == {"TC", "WT", "ET"}
    assert summary["WT"]["dice"]["mean"] == summary["WT"]["nsd"]["mean"] == 1.0
    assert summary["WT"]["hd95_mm"]["mean"] == 0.0
    assert summary["TC"]["dice"]["high"] < 0.9
    assert summary["ET"]["error_ml"]["low"] > 0.0
    assert "WT " in capsys.readouterr().out


def test_regions_may_be_given_for_label_maps_without_a_dataset(tmp_path):
    voxels = np.zeros((5, 5, 5), np.uint8, order="F")
    voxels[1:4, 1, 1], voxels[1:4, 2, 2] = 4, 2
    for folder in ("found", "true"):
        (tmp_path / folder).mkdir()
        write_label(tmp_path / folder / "a.nii.gz", voxels, np.eye(4))
    regions = ("WT=1+2+4", "ET=4")
    assert evaluate.main(EvaluateConfig(tmp_path / "found", tmp_path / "true", labels=regions)).status == 0
    summary = json.loads((tmp_path / "found" / "evaluation.json").read_text())["summary"]
    assert {name: each["reference_ml"]["mean"] for name, each in summary.items()} == pytest.approx(
        {"WT": 0.006, "ET": 0.003}
    )
