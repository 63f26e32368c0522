"""One scan as NIfTI, NRRD and MetaImage: the same in training data, scans and evaluations."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from medspeed import evaluate, predict
from medspeed.common.data.dataset import read_dataset
from medspeed.common.data.label_files import write_label
from medspeed.common.data.preparation import Preparation, prepare_case
from medspeed.common.data.volumes import read_volume
from medspeed.data_scripts.make_phantoms import make_phantoms

ENDINGS = (".nii.gz", ".nrrd", ".mha")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A phantom in MSD layout, three times: case_nii, case_nrrd and case_mha, as SimpleITK converts it."""
    itk = pytest.importorskip("SimpleITK", reason="needs SimpleITK: pip install SimpleITK")
    itk.ProcessObject.SetGlobalWarningDisplay(False)  # of NIfTI's fields that the others lack
    folder = make_phantoms("ct", tmp_path_factory.mktemp("formats") / "data", 1, seed=9)
    names = [f"case_{ending.split('.')[1]}{ending}" for ending in ENDINGS]
    for kind in ("imagesTr", "labelsTr"):
        source = folder / kind / "phantom_000.nii.gz"
        image = itk.ReadImage(str(source))
        source.rename(folder / kind / names[0])
        for name in names[1:]:
            itk.WriteImage(image, str(folder / kind / name), True)
    listing = json.loads((folder / "dataset.json").read_text())
    listing["training"] = [{"image": f"./imagesTr/{name}", "label": f"./labelsTr/{name}"} for name in names]
    (folder / "dataset.json").write_text(json.dumps(listing))
    return folder


def test_training_data_are_prepared_to_the_same_voxels(data):
    cases = read_dataset(data).cases
    assert [case.name for case in cases] == ["case_mha", "case_nii", "case_nrrd"]
    preparation = Preparation(spacing=(3.0, 3.0, 3.0), normalisation="window", window=(-57.0, 164.0))
    first, *others = (prepare_case(case, preparation, (0, 1)) for case in cases)
    for other in others:
        assert first.label is not None
        assert other.label is not None
        assert torch.equal(first.image, other.image)
        assert torch.equal(first.label, other.label)


def test_infer_gives_the_same_mask_in_the_format_of_the_scan_and_evaluate_reads_it(data, tmp_path):
    found = predict("demo", data / "imagesTr", tmp_path / "out", quiet=True, device="cpu", overlays=False)
    assert found.status == 0
    masks = [read_volume(path) for path in sorted((tmp_path / "out").glob("case_*"))]
    assert [mask.path.name for mask in masks] == ["case_mha.mha", "case_nii.nii.gz", "case_nrrd.nrrd"]
    for mask in masks:
        assert mask.voxels.any()
        assert np.array_equal(mask.voxels, masks[0].voxels)
        assert np.array_equal(mask.affine, masks[0].affine)
    with (tmp_path / "out" / "measurements.csv").open() as table:
        rows = [{**row, "scan": ""} for row in csv.DictReader(table)]
    assert rows == [rows[0]] * 3
    scores = evaluate(tmp_path / "out", data / "labelsTr", quiet=True)
    assert scores.missing == []
    dices = [each[0]["dice"] for each in scores.cases.values()]
    assert dices == [dices[0]] * 3


def test_a_name_in_two_formats_is_refused(tmp_path):
    for ending in ENDINGS[1:]:
        write_label(tmp_path / f"a{ending}", np.ones((4, 4, 4), np.uint8), np.eye(4))
    with pytest.raises(ValueError, match=r"a\.mha and a\.nrrd have one name but for the suffix"):
        predict("demo", tmp_path, Path(tmp_path / "out"), quiet=True, device="cpu")
