"""The phantom maker: its command line, its sets, and that the task stays a task."""

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from scipy import ndimage

from medspeed.data_scripts.make_phantoms import CT_VERSION, main, make_phantoms

SCRIPT = Path(__file__).resolve().parents[2] / "data_scripts" / "make_phantoms.py"
CASES = 4


@pytest.fixture(scope="module")
def phantoms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_phantoms("ct", tmp_path_factory.mktemp("phantoms") / "set", CASES)


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    """Return a folder in MSD layout with two label volumes and no images."""
    folder = tmp_path / "Task09"
    (folder / "labelsTr").mkdir(parents=True)
    entries = {
        "name": "Spleen",
        "licence": "CC-BY-SA 4.0",
        "reference": "A clinic",
        "labels": {"0": "air", "1": "spleen"},
    }
    (folder / "dataset.json").write_text(json.dumps(entries))
    for index, name in enumerate(["spleen_3", "spleen_12"]):
        label = np.zeros((70, 60, 24), np.uint8)
        label[10 + index : 22, 18:32, 8:15] = 1
        nib.save(nib.Nifti1Image(label, np.diag([5.0, 5, 6, 1])), folder / "labelsTr" / f"{name}.nii.gz")
    (folder / "labelsTr" / "._spleen_3.nii.gz").write_bytes(b"a desktop's note")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_same_seed_same_bytes_whatever_the_cores(
    phantoms: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    again = contents(make_phantoms("ct", tmp_path / "again", 2))
    first = contents(phantoms)
    # fewer cases: the ones there are the same, since each depends on the seed and its index alone
    assert {name: data == first[name] for name, data in again.items() if name.endswith(".gz")} == {
        f"{kind}/phantom_00{i}.nii.gz": True for kind in ("imagesTr", "labelsTr") for i in (0, 1)
    }


def test_another_seed_gives_other_bytes(phantoms: Path, tmp_path: Path) -> None:
    other = contents(make_phantoms("ct", tmp_path / "other", 1, seed=1))
    first = contents(phantoms)
    assert all(first[name] != data for name, data in other.items())


def test_files_hold_what_the_set_says_and_nothing_of_time_or_place(phantoms: Path) -> None:
    image, label = (nib.load(phantoms / kind / "phantom_001.nii.gz") for kind in ("imagesTr", "labelsTr"))
    assert (image.get_data_dtype(), label.get_data_dtype()) == (np.int16, np.uint8)
    assert image.shape == label.shape
    assert np.array_equal(image.affine, label.affine)
    assert b"not a patient" in image.header["descrip"].item()
    # RFC 1952: bytes 4 to 7 of a gzip header are the time, byte 3 says whether a file name follows
    packed = (phantoms / "labelsTr" / "phantom_001.nii.gz").read_bytes()
    assert (packed[3], packed[4:8]) == (0, bytes(4))
    assert len(gzip.decompress(packed)) == 352 + np.prod(label.shape)


def test_the_set_says_what_it_is(phantoms: Path) -> None:
    dataset = json.loads((phantoms / "dataset.json").read_text())
    assert dataset["name"] == "SpleenPhantoms"
    assert dataset["modality"] == {"0": "CT"}
    assert dataset["labels"] == {"0": "background", "1": "spleen"}
    assert dataset["synthetic"] is True
    assert "not for clinical use" in dataset["licence"]
    assert dataset["phantom"] == {"kind": "ct", "version": CT_VERSION, "cases": CASES, "size": "small", "seed": 0}
    assert len(dataset["training"]) == dataset["numTraining"] == CASES


def dice(mask: np.ndarray, truth: np.ndarray) -> float:
    return float(2 * (mask & truth).sum() / (mask.sum() + truth.sum()))


def largest(mask: np.ndarray) -> np.ndarray:
    pieces, count = ndimage.label(mask)
    return pieces == 1 + np.bincount(pieces.ravel())[1:].argmax() if count else mask


def test_a_trivial_solver_stays_poor(phantoms: Path) -> None:
    """The best HU window of the whole set, chosen with the truth in hand, then the largest piece; smoothed or not."""
    files = sorted((phantoms / "imagesTr").iterdir())
    truths = [np.asarray(nib.load(phantoms / "labelsTr" / file.name).dataobj) == 1 for file in files]
    images = [np.asarray(nib.load(file).dataobj).astype(np.float32) for file in files]
    for sigma in (0.0, 1.0):
        smooth = [ndimage.gaussian_filter(image, sigma) if sigma else image for image in images]
        best = max(
            np.mean([dice(largest((s >= low) & (s <= high)), t) for s, t in zip(smooth, truths, strict=True)])
            for low in (65, 80, 90, 100)
            for high in (110, 125, 150, 4000)
        )
        assert best <= 0.6
    # and the solver is no straw man: where the spleen alone is bright it finds it
    bright = np.where(truths[0], images[0] + 500, images[0])
    assert dice(largest(bright > 450), truths[0]) > 0.95


def test_scans_around_labels_keep_labels_grids_names_and_licence(labels: Path, tmp_path: Path) -> None:
    folder = make_phantoms("ct", tmp_path / "out", None, labels=labels)
    dataset = json.loads((folder / "dataset.json").read_text())
    assert (dataset["name"], dataset["labels"]) == ("Spleen", {"0": "air", "1": "spleen"})
    assert dataset["synthetic"] is True
    assert "Synthetic CT drawn around real labels" in dataset["description"]
    assert "CC-BY-SA 4.0" in dataset["licence"]
    assert [pair["image"] for pair in dataset["training"]] == [
        "./imagesTr/spleen_12.nii.gz",
        "./imagesTr/spleen_3.nii.gz",
    ]
    for name in ("spleen_3", "spleen_12"):
        given, label = (nib.load(f / "labelsTr" / f"{name}.nii.gz") for f in (labels, folder))
        image = nib.load(folder / "imagesTr" / f"{name}.nii.gz")
        assert np.array_equal(np.asarray(label.dataobj), np.asarray(given.dataobj))
        assert image.shape == given.shape
        assert np.array_equal(image.affine, given.affine)
        assert np.array_equal(label.affine, given.affine)
        voxels = np.asarray(image.dataobj)
        assert 80 < voxels[np.asarray(given.dataobj) == 1].mean() < 115
        assert voxels.min() >= -1024


def test_the_first_labels_by_name_and_a_plain_folder(labels: Path, tmp_path: Path) -> None:
    (labels / "labelsTr" / "spleen_12.nii.gz").rename(tmp_path / "b.nii.gz")
    source = nib.load(labels / "labelsTr" / "spleen_3.nii.gz")
    three = np.asarray(source.dataobj) * 3
    nib.save(nib.Nifti1Image(three.astype(np.int16), source.affine), tmp_path / "a.nii.gz")
    folder = make_phantoms("ct", tmp_path / "out", 1, labels=tmp_path)
    dataset = json.loads((folder / "dataset.json").read_text())
    assert [Path(pair["label"]).name for pair in dataset["training"]] == ["a.nii.gz"]
    assert dataset["labels"] == {"0": "background", "1": "spleen", "2": "label_2", "3": "label_3"}
    label = nib.load(folder / "labelsTr" / "a.nii.gz")
    assert label.get_data_dtype() == np.uint8
    assert np.array_equal(np.asarray(label.dataobj), three)


def test_a_list_that_training_would_refuse_is_refused_before_drawing(labels: Path, tmp_path: Path) -> None:
    (labels / "dataset.json").write_text('{"labels": {"background": 0, "spleen": 1}}')  # nnU-Net's
    with pytest.raises(ValueError, match=r"dataset\.json: labels: expected"):
        make_phantoms("ct", tmp_path / "out", 1, labels=labels)
    assert not (tmp_path / "out").exists()


def test_changed_labels_are_another_set(labels: Path, tmp_path: Path) -> None:
    make_phantoms("ct", tmp_path / "out", 1, labels=labels)
    file = labels / "labelsTr" / "spleen_12.nii.gz"
    nib.save(nib.Nifti1Image(np.ones((9, 9, 9), np.uint8), np.eye(4)), file)
    with pytest.raises(ValueError, match="contains another dataset \\(labels_sha256"):
        make_phantoms("ct", tmp_path / "out", 1, labels=labels)


@pytest.mark.parametrize(
    ("voxels", "complaint"),
    [
        (np.zeros((4, 4, 4, 2), np.uint8), "expected 3-D, one channel, found \\(4, 4, 4, 2\\)"),
        (np.full((4, 4, 4), 0.5, np.float32), "other than the integers 0 to 255"),
        (np.full((4, 4, 4), 300, np.int16), "other than the integers 0 to 255"),
        (None, "truncated or damaged"),
    ],
)
def test_a_bad_label_volume_is_named(tmp_path: Path, voxels: np.ndarray | None, complaint: str) -> None:
    path = tmp_path / "labels" / "bad.nii.gz"
    path.parent.mkdir()
    if voxels is None:
        path.write_bytes(b"\x1f\x8b torn")
    else:
        nib.save(nib.Nifti1Image(voxels, np.eye(4)), path)
    with pytest.raises(ValueError, match=f"bad.nii.gz.*{complaint}"):
        make_phantoms("ct", tmp_path / "out", None, labels=path.parent)
    assert not (tmp_path / "out" / "dataset.json").exists()


@pytest.mark.parametrize(
    ("text", "complaint"), [("{torn", "expected JSON text"), ("[1]", "expected a JSON object, found a list")]
)
def test_a_bad_dataset_json_of_the_labels_is_named(labels: Path, tmp_path: Path, text: str, complaint: str) -> None:
    (labels / "dataset.json").write_text(text)
    with pytest.raises(ValueError, match=f"dataset.json: {complaint}"):
        make_phantoms("ct", tmp_path / "out", None, labels=labels)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--cases", "0"], "--cases 0: must be at least 1"),
        (["--cases", "2", "--seed", "-1"], "--seed -1: must be 0 or more"),
        ([], "--cases is missing: give the number of phantoms, such as --cases 20"),
        (["--labels", "nowhere"], "--labels nowhere: no such folder; expected one with labelsTr"),
        (["--labels", "empty"], "--labels empty: no .nii.gz files in empty; pass the folder that contains them"),
        (["--labels", "Task09", "--cases", "3"], "--cases 3: Task09 contains 2 label volumes; use at most that many"),
    ],
)
def test_bad_input_exits_2_with_one_line(
    labels: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert main(["ct", "--to", "out", *arguments]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"make_phantoms: error: {complaint}")
    assert shown.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--case", "2"], ["--size", "large", "--cases", "2"], ["--cases", "many"],
        ["--labels", "Task09", "--size", "msd"], ["--labels", "Task09", "--size", "small"],
    ],
)  # fmt: skip
def test_mistyped_options_exit_2_and_are_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["ct", "--to", "out", *arguments])
    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_it_runs_from_another_folder_without_torch(tmp_path: Path) -> None:
    # an import of torch or monai would fail: they are hidden behind broken twins
    for name in ("torch", "monai"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('a data script needs no torch')")
    command = [sys.executable, str(SCRIPT), "ct", "--to", "made", "--cases", "1", "--seed", "5"]
    ran = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{SCRIPT.parents[1]}"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert "synthetic CT" in ran.stdout
    assert (tmp_path / "made" / "dataset.json").is_file()


def test_a_killed_run_is_finished_by_the_next(phantoms: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "ct", "--to", str(tmp_path / "set"), "--cases", "12"]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (tmp_path / "set" / "labelsTr" / "phantom_000.nii.gz").exists():
        assert run.poll() is None
        time.sleep(0.01)
    run.kill()
    run.wait()
    assert not (tmp_path / "set" / "dataset.json").exists()
    make_phantoms("ct", tmp_path / "set", 12)
    assert json.loads((tmp_path / "set" / "dataset.json").read_text())["numTraining"] == 12
    made, first = contents(tmp_path / "set"), contents(phantoms)
    assert all(made[name] == data for name, data in first.items() if name.endswith(".gz"))


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["ct", "--help"]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 0
        assert "medspeed data make-phantoms ct --to" in capsys.readouterr().out


@pytest.mark.real_data
def test_a_scan_around_a_real_label_is_of_msd_size(real_data: Path, tmp_path: Path) -> None:
    folder = make_phantoms("ct", tmp_path, 1, labels=real_data / "msd_spleen_labels")
    image = folder / json.loads((folder / "dataset.json").read_text())["training"][0]["image"]
    shape = nib.load(image).shape
    assert shape[:2] == (512, 512)
    # noisy int16: gzip takes away about half, as from real scans
    assert 0.4 < image.stat().st_size / (2 * np.prod(shape)) < 0.7
