"""Sets on the disk: bytes, interruption, and folders that hold something else."""

import gzip
import json
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from data_scripts.phantom_sets import Scan, write_set
from data_scripts.set_folder import Parameters

AFFINE = np.array([[0, -2.0, 0, 5], [1.5, 0, 0, -7], [0, 0, 3.0, 11], [0, 0, 0, 1]])
NAMES = ["a", "b", "c", "d"]
DATASET: dict[str, Any] = {"name": "Blocks", "modality": {"0": "CT"}, "labels": {"0": "background", "1": "block"}}
PARAMETERS: Parameters = {"kind": "blocks", "cases": 4, "seed": 0}


def draw(index: int) -> Scan:
    rng = np.random.default_rng([0, index])
    image = rng.integers(-1000, 1000, (12, 10, 8)).astype(np.int16)
    return Scan(image.transpose(1, 0, 2)[::-1], (image > 900).astype(np.uint8).transpose(1, 0, 2)[::-1], AFFINE)


def write(folder: Path, **changes: Any) -> Path:
    arguments: dict[str, Any] = {
        "names": NAMES,
        "draw": draw,
        "dataset": DATASET,
        "parameters": PARAMETERS,
        "progress": False,
    }
    return write_set(folder, **{**arguments, **changes})


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def fail_at(index: int) -> Any:
    def draw_or_fail(i: int) -> Scan:
        if i == index:
            raise OSError("no space left on device")
        return draw(i)

    return draw_or_fail


def test_a_set_is_in_msd_layout_and_reads_back(tmp_path: Path) -> None:
    folder = write(tmp_path / "set")
    dataset = json.loads((folder / "dataset.json").read_text())
    assert dataset["name"] == "Blocks"
    assert (dataset["numTraining"], dataset["numTest"], dataset["test"]) == (4, 0, [])
    assert dataset["synthetic"] is True
    assert dataset["phantom"] == PARAMETERS
    assert dataset["tensorImageSize"] == "3D"
    assert dataset["training"][1] == {"image": "./imagesTr/b.nii.gz", "label": "./labelsTr/b.nii.gz"}
    for index, pair in enumerate(dataset["training"]):
        image, label = nib.load(folder / pair["image"]), nib.load(folder / pair["label"])
        assert image.get_data_dtype() == np.int16
        assert label.get_data_dtype() == np.uint8
        assert np.array_equal(np.asarray(image.dataobj), draw(index).image)
        assert np.array_equal(np.asarray(label.dataobj), draw(index).label)
        assert np.array_equal(image.affine, AFFINE)
        assert np.array_equal(label.affine, AFFINE)
        assert b"not a patient" in image.header["descrip"].item()
    assert sorted(path.name for path in folder.iterdir()) == ["dataset.json", "imagesTr", "labelsTr"]


def test_images_of_several_channels_make_a_set_of_four_axes(tmp_path: Path) -> None:
    def draw_two(index: int) -> Scan:
        scan = draw(index)
        return Scan(np.stack([scan.image, 2 * scan.image], axis=-1), scan.label, scan.affine)

    modality = {"0": "T1w", "1": "T2w"}
    folder = write(tmp_path, draw=draw_two, dataset={**DATASET, "modality": modality})
    dataset = json.loads((folder / "dataset.json").read_text())
    assert (dataset["modality"], dataset["tensorImageSize"]) == (modality, "4D")
    image = nib.load(folder / "imagesTr" / "c.nii.gz")
    assert np.array_equal(np.asarray(image.dataobj), draw_two(2).image)
    assert nib.load(folder / "labelsTr" / "c.nii.gz").shape == image.shape[:3]


def test_bytes_depend_neither_on_time_nor_cores_nor_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = contents(write(tmp_path / "first"))
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setattr("time.time", lambda: 1.0)
    assert contents(write(tmp_path / "second")) == first
    # RFC 1952: bytes 4 to 7 of a gzip header are the time, byte 3 says whether a file name follows
    header = first["imagesTr/a.nii.gz"][:10]
    assert (header[3], header[4:8]) == (0, bytes(4))
    assert len(gzip.decompress(first["labelsTr/a.nii.gz"])) == 352 + 12 * 10 * 8


def test_a_whole_set_is_left_alone(tmp_path: Path) -> None:
    before = contents(write(tmp_path))
    assert contents(write(tmp_path, draw=fail_at(0))) == before


def test_a_missing_file_is_made_again(tmp_path: Path) -> None:
    before = contents(write(tmp_path))
    (tmp_path / "labelsTr" / "c.nii.gz").unlink()
    assert contents(write(tmp_path, draw=fail_at(0))) == before


def test_an_interrupted_run_has_no_dataset_json_and_is_finished_by_the_next(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no space left"):
        write(tmp_path / "set", draw=fail_at(3))
    assert not (tmp_path / "set" / "dataset.json").exists()
    left = contents(tmp_path / "set")
    with pytest.raises(ValueError, match=r"holds another set \(seed 0 instead of 1\): name another folder"):
        write(tmp_path / "set", parameters={**PARAMETERS, "seed": 1})
    assert contents(tmp_path / "set") == left
    (tmp_path / "set" / "imagesTr" / ".part-x-a.nii.gz").write_bytes(b"torn")
    write(tmp_path / "set")
    (tmp_path / "set" / "imagesTr" / ".part-x-a.nii.gz").unlink()
    assert contents(tmp_path / "set") == contents(write(tmp_path / "whole"))


def test_a_run_killed_before_its_last_step_is_tidied(tmp_path: Path) -> None:
    before = contents(write(tmp_path))
    (tmp_path / "unfinished.json").write_text(json.dumps(PARAMETERS))
    assert contents(write(tmp_path, draw=fail_at(0))) == before


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("notes.txt", "mine"),
        ("dataset.json", '{"name": "Spleen", "training": []}'),
        ("dataset.json", "{torn"),
        ("dataset.json", "[1]"),
        ("unfinished.json", "3"),
    ],
)
def test_a_folder_with_other_things_is_refused_and_untouched(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"holds other files \\({name}\\): name a new or empty folder"):
        write(tmp_path)
    assert contents(tmp_path) == {name: text.encode()}


def test_another_set_is_refused_naming_what_differs(tmp_path: Path) -> None:
    before = contents(write(tmp_path))
    with pytest.raises(ValueError, match=r"\(cases 4 instead of 9, size None instead of 'msd'\)"):
        write(tmp_path, parameters={**PARAMETERS, "cases": 9, "size": "msd"})
    assert contents(tmp_path) == before


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "set").write_text("mine")
    with pytest.raises(ValueError, match="is a file: name a folder"):
        write(tmp_path / "set")


def test_progress_shows_cases_and_time_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a", progress=True)
    shown = capsys.readouterr().err
    assert "Blocks: making phantoms" in shown
    assert "4/4" in shown
    write(tmp_path / "b")
    assert capsys.readouterr().err == ""
