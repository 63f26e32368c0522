"""Datasets of one's own, brought in MSD layout, train with no code change, and the fingerprint says what it chose."""

import json

import nibabel as nib
import numpy as np
import pytest

from medspeed.apps.spleen import infer
from medspeed.apps.spleen.config import SpleenConfig
from medspeed.apps.spleen.train import main
from medspeed.common.data.volumes import read_volume
from medspeed.common.inference.options import InferConfig
from medspeed.common.training.volume_config import Windows
from tests.apps.spleen.test_train import TINY


def ball(shape, centre, radius):
    axes = np.indices(shape)
    return ((axes - np.array(centre).reshape(3, 1, 1, 1)) ** 2).sum(0) <= radius**2


def write_set(folder, name, modality, labels, draw, spacing=(2.0, 2.0, 3.0), cases=4):
    """Write `cases` pairs; `draw(rng)` returns an image and a label volume."""
    for kind in ("imagesTr", "labelsTr"):
        (folder / kind).mkdir(parents=True)
    training = []
    for number in range(cases):
        image, label = draw(np.random.default_rng(number))
        file = f"case_{number}.nii.gz"
        affine = np.diag([*spacing, 1.0])
        nib.save(nib.Nifti1Image(image, affine), folder / "imagesTr" / file)
        nib.save(nib.Nifti1Image(label, affine), folder / "labelsTr" / file)
        training.append({"image": f"./imagesTr/{file}", "label": f"./labelsTr/{file}"})
    content = {"name": name, "modality": {"0": modality}, "labels": labels, "training": training}
    (folder / "dataset.json").write_text(json.dumps(content))
    return folder


def mr_like(rng):
    """Two structures in arbitrary units, zeros around the head, a scale that differs from case to case."""
    shape = (40, 44, 28)
    head, one, two = (ball(shape, (20, 22, 14), r) for r in (18, 9, 4))
    image = (300 * head + 200 * one + 250 * two) * rng.uniform(0.5, 2) + 10 * rng.standard_normal(shape) * head
    return image.astype(np.float32), (one.astype(np.uint8) + 3 * two).astype(np.uint8)


def lung_ct(rng):
    """A lung in air around -850 HU in soft tissue."""
    shape = (40, 40, 24)
    body, lung = ball(shape, (20, 20, 12), 18), ball(shape, rng.uniform(16, 24, 3) * (1, 1, 0.6), 8)
    image = np.where(body, 40, -1000) - 890 * (lung & body) + 20 * rng.standard_normal(shape)
    return image.astype(np.int16), (lung & body).astype(np.uint8)


def train(folder, tmp_path, **more):
    settings = {**TINY, "spacing": None, "epochs": 12, "windows": Windows(), "engine": "none", **more}
    return main(SpleenConfig(data=folder, store=tmp_path / "store", **{"run": tmp_path / "run", **settings}))


def test_mr_with_two_labels_whose_numbers_leave_some_out(tmp_path, capsys):
    labels = {0: "background", 1: "brain", 4: "nucleus"}
    folder = write_set(tmp_path / "data", "Heads", "MRI", labels, mr_like)
    summary = train(folder, tmp_path, crop_size=(24, 24, 16))
    said = capsys.readouterr().out
    assert "z-score" in said
    assert "spacing (2, 2, 3) mm: median of 3 measured cases" in said
    model = json.loads((tmp_path / "run" / "model.json").read_text())
    assert model["labelling"]["labels"] == ["background", "brain", "", "", "nucleus"]
    assert model["preparation"]["normalisation"] == "zscore"
    assert model["preparation"]["window"] is None
    assert summary["quality"]["value"] > 0.5
    assert summary["onnx"]["max_abs_diff"] <= 1e-3


@pytest.mark.usefixtures("no_export")
def test_a_case_with_nothing_to_find_is_left_out_of_the_mean_and_alone_refused(tmp_path):
    """Counted as a Dice of 1 it would lift a useless model's to 1 / n, and above what `evaluate` says."""
    folder = write_set(tmp_path / "data", "Lungs", "CT", {0: "background", 1: "lung"}, lung_ct)
    body = np.where(ball((40, 40, 24), (20, 20, 12), 18), 40, -1000).astype(np.int16)  # without a lung
    for kind, voxels in (("imagesTr", body), ("labelsTr", np.zeros(body.shape, np.uint8))):
        nib.save(nib.Nifti1Image(voxels, np.diag([2.0, 2.0, 3.0, 1.0])), folder / kind / "case_1.nii.gz")
    for number, validation in enumerate((["case_0", "case_1"], ["case_1"])):
        (tmp_path / "split.json").write_text(json.dumps({"training": ["case_2", "case_3"], "validation": validation}))
        fields = {"split": str(tmp_path / "split.json"), "crop_size": (24, 24, 16), "run": tmp_path / f"run{number}"}
        if number:
            with pytest.raises(ValueError, match="no validation case has any foreground, so there is no metric"):
                train(folder, tmp_path, **fields)
            continue
        quality = train(folder, tmp_path, epochs=60, **fields)["quality"]
        assert quality["value"] == pytest.approx(quality["per_region"]["lung"])
        assert quality["value"] == pytest.approx(quality["metrics"]["lung"]["dice"]["mean"], abs=1e-4)
        assert quality["per_case"]["case_1"] == 1.0  # nothing was found in it: it is not there to be judged
        assert quality["value"] == quality["per_case"]["case_0"] < 1


@pytest.mark.slow
@pytest.mark.usefixtures("no_export")
def test_lung_window_ct(tmp_path, capsys):
    folder = write_set(tmp_path / "data", "Lungs", "CT", {0: "background", 1: "lung"}, lung_ct)
    summary = train(folder, tmp_path, epochs=60, crop_size=(24, 24, 16))
    low, high = json.loads((tmp_path / "run" / "model.json").read_text())["preparation"]["window"]
    # 0.5 and 99.5 percentiles of N(-850, 20): -850 -+ 2.58 * 20
    assert low == pytest.approx(-902, abs=8)
    assert high == pytest.approx(-798, abs=8)
    assert "0.5 and 99.5 percentiles of the foreground of 3 measured cases" in capsys.readouterr().out
    assert summary["quality"]["value"] > 0.8


@pytest.mark.usefixtures("no_export")
def test_what_is_asked_for_wins_over_the_fingerprint(tmp_path, capsys):
    folder = write_set(tmp_path / "data", "Lungs", "CT", {0: "background", 1: "lung"}, lung_ct)
    train(folder, tmp_path, spacing=(3.0, 3.0, 3.0), window=(-1000.0, 0.0), windows=Windows(overlap=0.6), epochs=1)
    model = json.loads((tmp_path / "run" / "model.json").read_text())
    preparation = model["preparation"]
    assert model["overlap"] == 0.6
    assert preparation["spacing"] == [3.0, 3.0, 3.0]
    assert preparation["window"] == [-1000.0, 0.0]
    assert "as asked" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda image, label: (image, label[:-1]), ["labelsTr", "(39, 40, 24)", "(40, 40, 24)"]),
        (lambda image, label: (image, label * 3), ["labelsTr", "expected label values 0, 1, found 0, 3"]),
        (
            lambda image, label: (np.where(label > 0, np.nan, image).astype(np.float32), label),
            ["imagesTr", "of 38400 voxels are NaN or infinite"],
        ),
        (lambda image, label: (np.stack([image, image], -1), label), ["imagesTr", "3-D"]),
    ],
    ids=["geometry", "labels", "nan", "4-D"],
)
def test_a_bad_case_is_named_with_what_was_found(spoil, words, tmp_path):
    folder = write_set(tmp_path / "data", "Lungs", "CT", {0: "background", 1: "lung"}, lambda rng: spoil(*lung_ct(rng)))
    with pytest.raises(ValueError, match="case_") as error:
        train(folder, tmp_path)
    for word in words:
        assert word in str(error.value)


@pytest.mark.real_data
def test_a_real_scan_goes_from_file_to_file(real_data, tmp_path):
    data = real_data / "ct_spleen_real"
    settings = {**TINY, "split": "all", "epochs": 1, "spacing": (4.0, 4.0, 4.0)}
    summary = main(SpleenConfig(data=data, store=tmp_path / "store", run=tmp_path / "run", **settings))
    assert summary is not None
    assert summary["held_out"] is False
    config = InferConfig(tmp_path / "run", data / "imagesTr", tmp_path / "out", "onnxruntime", device="cpu")
    assert infer.main(config).status == 0
    for file in (data / "imagesTr").glob("*.nii.gz"):
        scan, labels = read_volume(file), read_volume(tmp_path / "out" / file.name)
        assert labels.voxels.shape == scan.voxels.shape
        assert np.array_equal(labels.affine, scan.affine)
