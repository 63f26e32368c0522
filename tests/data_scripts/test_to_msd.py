"""Own scans into MSD layout: pairing, nnU-Net's raw layout, checks, and a folder that appears whole or not at all."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from medspeed.apps.brats.regions import choose_labelling
from medspeed.common.data.dataset import read_dataset
from medspeed.common.data.volumes import read_volume
from medspeed.data_scripts import to_msd, whole_folder
from medspeed.data_scripts.raw_sets import RawCase, RawSet, examine
from medspeed.data_scripts.to_msd import main

SHAPE = (8, 7, 6)
AFFINE = np.diag([2.0, 2, 3, 1])


def scan(seed: int = 0, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(seed).integers(-1000, 1000, shape).astype(np.int16)


def mask(value: float = 1, dtype: type = np.uint8) -> np.ndarray:
    """Return a label of 2 x 3 x 2 voxels, 12 x 12 mm3 of 12 voxels: 0.144 ml."""
    label: np.ndarray = np.zeros(SHAPE, dtype)
    label[2:4, 2:5, 1:3] = value
    return label


def save(path: Path, voxels: np.ndarray, affine: np.ndarray = AFFINE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(voxels, affine), path)
    return path


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Return a folder with images/ and labels/ of the cases a and b."""
    for seed, name in enumerate("ab"):
        save(tmp_path / "images" / f"{name}.nii.gz", scan(seed))
        save(tmp_path / "labels" / f"{name}.nii.gz", mask())
    return tmp_path


def convert(folder: Path, *flags: str, names: tuple[str, ...] = ("background", "organ"), modality: str = "CT") -> int:
    sources = ["--images", str(folder / "images"), "--labels", str(folder / "labels"), "--to", str(folder / "set")]
    return main([*sources, "--names", *names, "--modality", modality, *flags])


def test_nrrd_and_metaimage_become_nifti_on_the_same_grid(pairs):
    itk = pytest.importorskip("SimpleITK", reason="needs SimpleITK: pip install SimpleITK")
    for kind in ("images", "labels"):
        for name, ending in (("a", ".nrrd"), ("b", ".mha")):
            path = pairs / kind / f"{name}.nii.gz"
            itk.WriteImage(itk.ReadImage(str(path)), str(pairs / kind / f"{name}{ending}"))
            path.rename(pairs / f"{kind}_{path.name}")
    assert convert(pairs) == 0
    for name, files in written(pairs).items():
        for kind, path in zip(("images", "labels"), files, strict=True):
            assert path.name == f"{name}.nii.gz"
            found, due = read_volume(path), read_volume(pairs / f"{kind}_{name}.nii.gz")
            assert np.array_equal(found.voxels, due.voxels)
            assert np.array_equal(found.affine, due.affine)


def written(folder: Path) -> dict[str, tuple[Path, Path]]:
    """Return the files of each case, as training finds them."""
    found = {}
    for case in read_dataset(folder / "set").cases:
        assert case.label is not None
        found[case.name] = (case.image, case.label)
    return found


def assert_nothing_written(folder: Path) -> None:
    assert not (folder / "set").exists()
    assert not list(folder.glob(".*"))


def test_pairs_become_a_set_that_training_reads(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (pairs / "images" / "._a.nii.gz").write_bytes(b"a desktop's note")
    (pairs / "images" / "notes.txt").write_text("by hand")
    assert convert(pairs) == 0
    dataset = read_dataset(pairs / "set")
    assert (dataset.name, dataset.modality, dataset.labels) == ("set", ("CT",), ("background", "organ"))
    assert [case.name for case in dataset.cases] == ["a", "b"]
    assert (pairs / "set/imagesTr/a.nii.gz").read_bytes() == (pairs / "images/a.nii.gz").read_bytes()
    assert (pairs / "set/imagesTr/a.nii.gz").stat().st_nlink == 1
    printed = capsys.readouterr().out
    assert "2 labelled, 0 for test" in printed
    assert "8x7x6" in printed
    assert "2x2x3" in printed
    assert "RAS 2" in printed
    assert "in 2 of 2 cases, 0.144 to 0.144 ml" in printed
    assert f"medspeed train spleen --data {pairs / 'set'}" in printed
    assert not list(pairs.glob(".*"))


def test_figures_are_told_along_the_bodys_axes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    affine = np.array([[0, 0, 3.0, 0], [-2, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]])  # axes run P, S, R
    save(tmp_path / "images/a.nii.gz", scan(), affine)
    save(tmp_path / "labels/a.nii.gz", mask(), affine)
    assert convert(tmp_path) == 0
    printed = capsys.readouterr().out
    assert "6x8x7" in printed  # R is the third axis, A the first, S the second
    assert "3x2x1" in printed
    assert "PSR 1" in printed


@pytest.mark.parametrize(
    ("image", "label"),
    [
        ("case_0000", "case"),
        ("case", "case_seg"),
        ("case", "case_label"),
        ("case-img", "case-mask"),
        ("case_CT", "case_Segmentation"),
        ("a case", "a case"),
    ],
)
def test_common_endings_pair(tmp_path: Path, image: str, label: str) -> None:
    save(tmp_path / "images" / f"{image}.nii.gz", scan())
    save(tmp_path / "labels" / f"{label}.nii.gz", mask())
    assert convert(tmp_path) == 0
    assert list(written(tmp_path)) == ["a case" if image == "a case" else "case"]


def test_a_name_that_pairs_as_it_is_keeps_all_of_it(tmp_path: Path) -> None:
    for name in ("case", "case_ct"):
        save(tmp_path / "images" / f"{name}.nii.gz", scan(len(name)))
        save(tmp_path / "labels" / f"{name}.nii.gz", mask())
    assert convert(tmp_path) == 0
    assert list(written(tmp_path)) == ["case", "case_ct"]


def test_a_leftover_takes_no_pair_apart(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(pairs / "images/a_ct.nii.gz", scan(5))
    assert convert(pairs, "--skip-bad") == 0
    assert list(written(pairs)) == ["a", "b"]
    assert "skipped: a_ct: expected an image and a label" in capsys.readouterr().err


def test_everything_wrong_is_told_at_once_and_nothing_is_written(
    pairs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shifted = AFFINE.copy()
    shifted[0, 3] = 0.5  # a quarter of a voxel
    save(pairs / "images/scan_alone.nii.gz", scan(2))
    save(pairs / "labels/mask_alone.nii.gz", mask())
    save(pairs / "images/moved.nii.gz", scan(3))
    save(pairs / "labels/moved.nii.gz", mask(), shifted)
    save(pairs / "images/cut.nii.gz", scan(4))
    whole = (pairs / "images/cut.nii.gz").read_bytes()
    (pairs / "images/cut.nii.gz").write_bytes(whole[: len(whole) // 2])
    save(pairs / "labels/cut.nii.gz", mask(7))
    assert convert(pairs) == 1
    told = capsys.readouterr().err
    for name in ("scan_alone", "mask_alone", "moved", "cut"):
        assert f"bad: {name}" in told
    assert "corners up to 0.5 mm apart" in told
    assert told.count("bad: cut") == 2  # the image is damaged, and the label holds a 7
    assert "2 of 6 cases are usable" in told
    assert_nothing_written(pairs)


def test_bad_cases_are_left_out_on_request_with_their_reason(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        save(pairs / "labels" / f"{name}.nii.gz", mask(7))
    assert convert(pairs, "--skip_bad") == 1, "a set of bad cases alone is no set"
    assert_nothing_written(pairs)
    save(pairs / "labels/a.nii.gz", mask())
    assert convert(pairs, "--skip_bad") == 0
    assert list(written(pairs)) == ["a"]
    (left_out,) = json.loads((pairs / "set/dataset.json").read_text())["left_out"]
    assert left_out["case"] == "b"
    assert "found the values 7" in left_out["reason"]
    assert "skipped: b" in capsys.readouterr().err


def test_values_are_mapped(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(pairs / "labels/b.nii.gz", mask(255))
    assert convert(pairs) == 1
    assert "found the values 255; known labels are 0 background, 1 organ" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        convert(pairs, "--values", "255=1", "255=0")
    assert "--values: gives a value two meanings" in capsys.readouterr().err
    assert convert(pairs, "--values", "255=1", "--values", "9=0") == 0
    label = read_volume(written(pairs)["b"][1])
    assert label.voxels.dtype == np.uint8
    assert np.array_equal(label.voxels, mask())
    assert np.array_equal(label.affine, AFFINE)
    assert (pairs / "set/labelsTr/a.nii.gz").read_bytes() == (pairs / "labels/a.nii.gz").read_bytes()


def test_values_a_little_off_are_rounded_and_told(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(pairs / "labels/b.nii.gz", mask(0.9999, np.float32))
    assert convert(pairs) == 0
    assert "rounded: b" in capsys.readouterr().out
    assert np.array_equal(read_volume(written(pairs)["b"][1]).voxels, mask())


@pytest.mark.parametrize(
    ("part", "voxels", "words"),
    [
        ("labels", mask(0.5, np.float32), "nearest neighbours"),
        ("labels", scan().astype(np.int32) * 1000, "is it an image?"),
        ("labels", np.arange(np.prod(SHAPE), dtype=np.int16).reshape(SHAPE) - 50, "are images and labels swapped?"),
        ("labels", np.stack([mask(), mask()], axis=3), "expected 3-D, one channel"),
        ("images", np.zeros(SHAPE, np.int16), "every voxel is 0"),
    ],
)
def test_a_case_that_cannot_be_used_is_named(
    pairs: Path, part: str, voxels: np.ndarray, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(pairs / part / "b.nii.gz", voxels).rename(pairs / part / "b.NII.GZ")
    assert convert(pairs) == 1
    told = capsys.readouterr().err
    assert words in told
    assert str(path) in told


def test_what_is_a_little_odd_can_be_used(pairs: Path) -> None:
    near = AFFINE.copy()
    near[0, 3] = 0.05  # a fortieth of a voxel
    save(pairs / "labels/a.nii.gz", mask(), near)
    label = mask().astype(np.int16)
    label[0] = -1
    save(pairs / "labels/b.nii.gz", label[..., None])
    assert convert(pairs, "--values=-1=0") == 0
    assert np.array_equal(read_volume(written(pairs)["b"][1]).voxels, mask())


def test_a_number_without_a_name_is_no_label(pairs: Path) -> None:
    """BraTS until 2021: 0, 1, 2, 4."""
    case = RawCase("a", (pairs / "images/a.nii.gz",), pairs / "labels/a.nii.gz")
    examine(case, RawSet("set", ("CT",), ("background", "", "organ"), (case,)))
    (problem,) = case.problems
    assert "found the values 1; known labels are 0 background, 2 organ" in problem


def test_brats_labels_are_mapped_by_the_value_that_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("background", "necrotic core", "edema", "enhancing tumour")
    for number, values in enumerate(((1, 2, 4), (4,))):
        label = mask(0)
        for place, value in enumerate(values):
            label[place + 2, 2:5] = value
        save(tmp_path / "images" / f"{number}.nii.gz", np.stack([scan(4 * number + each) for each in range(4)], 3))
        save(tmp_path / "labels" / f"{number}.nii.gz", label)
    flags = ("--modality", "FLAIR", "T1w", "T1gd", "T2w")
    assert convert(tmp_path, *flags, names=names) == 1
    told = capsys.readouterr().err
    assert told.count("found the values 4; known labels are 0 background") == told.count("map them: --values=4=3") == 2
    assert convert(tmp_path, "--values", "4=3", *flags, names=names) == 0
    assert np.unique(read_volume(written(tmp_path)["0"][1]).voxels).tolist() == [0, 1, 2, 3]
    assert "medspeed train brats --data" in capsys.readouterr().out
    labelling = choose_labelling(read_dataset(tmp_path / "set"), "names")
    assert {region.name: region.members for region in labelling.regions} == {"TC": (1, 3), "WT": (1, 2, 3), "ET": (3,)}


@pytest.mark.parametrize(
    ("values", "names", "hint"),
    [
        ((255,), ("background", "organ"), "255=1"),
        ((1, 255), ("background", "organ"), "255=0"),
        ((1, 255), ("background", "organ", "tumour"), "255=2"),
        ((-1, 1), ("background", "organ"), "-1=0"),
    ],
)
def test_the_value_that_is_proposed(pairs: Path, values: tuple[int, ...], names: tuple[str, ...], hint: str) -> None:
    label = mask(0, np.int16)
    for place, value in enumerate(values):
        label[place] = value
    case = RawCase("a", (pairs / "images/a.nii.gz",), save(pairs / "labels/a.nii.gz", label))
    examine(case, RawSet("set", ("CT",), names, (case,)))
    assert case.problems[0].endswith(f"map them: --values={hint}")


def test_the_app_is_named_that_takes_the_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        save(tmp_path / "images" / f"{name}.nii.gz", np.stack([scan(1), scan(2)], 3))
        save(tmp_path / "labels" / f"{name}.nii.gz", mask())
    assert convert(tmp_path, "--modality", "T2", "ADC", names=("background", "prostate")) == 0
    assert "medspeed train brats --regions labels --data" in capsys.readouterr().out


def test_a_tumour_with_more_tissues_is_learned_label_by_label(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "images/a.nii.gz", np.stack([scan(1), scan(2)], 3))
    save(tmp_path / "labels/a.nii.gz", mask())
    names = ("background", "NETC", "SNFH", "ET", "RC")  # of BraTS 2024, after treatment
    assert convert(tmp_path, "--modality", "T1", "T2", names=names) == 0
    assert "medspeed train brats --regions labels --data" in capsys.readouterr().out


def test_names_in_capitals_and_plain_nii_are_taken_over(tmp_path: Path) -> None:
    for part, voxels in (("images", scan()), ("labels", mask())):
        save(tmp_path / part / "a.nii.gz", voxels).rename(tmp_path / part / "a.NII.GZ")
        save(tmp_path / part / "b.nii", voxels)
    assert convert(tmp_path, "--link") == 0
    for image, label in written(tmp_path).values():
        assert image.name in {"a.nii.gz", "b.nii.gz"}
        assert np.array_equal(read_volume(image).voxels, scan())
        assert np.array_equal(read_volume(label).voxels, mask())


def test_two_files_of_one_name_are_no_case(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(pairs / "images/a.nii", scan(5))
    save(pairs / "images/c_0000.nii.gz", scan(6))
    save(pairs / "images/c_img.nii.gz", scan(7))
    save(pairs / "labels/c.nii.gz", mask())
    assert convert(pairs) == 1
    told = capsys.readouterr().err
    assert "bad: a: expected an image and a label with the same name" in told
    assert "c_img.nii.gz" in told


def test_links_share_the_bytes_and_what_changes_is_a_file_of_its_own(pairs: Path) -> None:
    save(pairs / "labels/b.nii.gz", mask(255))
    assert convert(pairs, "--link", "--values", "255=1") == 0
    assert (pairs / "set/imagesTr/a.nii.gz").samefile(pairs / "images/a.nii.gz")
    assert (pairs / "set/labelsTr/a.nii.gz").samefile(pairs / "labels/a.nii.gz")
    assert not (pairs / "set/labelsTr/b.nii.gz").samefile(pairs / "labels/b.nii.gz")
    assert read_volume(pairs / "labels/b.nii.gz").voxels.max() == 255


def test_another_file_system_gets_symbolic_links(pairs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("Invalid cross-device link")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    assert convert(pairs, "--link") == 0
    assert (pairs / "set/imagesTr/a.nii.gz").is_symlink()
    assert len(written(pairs)) == 2


def test_what_is_worth_a_look_is_told(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(pairs / "labels/b.nii.gz", mask(0))
    save(pairs / "images/c.nii.gz", np.abs(scan(0)))
    save(pairs / "labels/c.nii.gz", mask())
    save(pairs / "images/d.nii.gz", scan(0))  # the same as a
    save(pairs / "labels/d.nii.gz", mask())
    assert convert(pairs, names=("background", "organ", "tumour")) == 0
    printed = capsys.readouterr().out
    assert "the label is empty: b" in printed
    assert "no value below -200" in printed
    assert ": c\n" in printed
    assert "may be in training and validation: a, d" in printed
    assert "no case contains this label: 2 tumour" in printed


def test_a_folder_that_is_there_is_never_touched(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (pairs / "set").mkdir()
    assert convert(pairs) == 2
    assert "already exists" in capsys.readouterr().err
    assert list((pairs / "set").iterdir()) == []


def test_a_full_disk_leaves_nothing(pairs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(to_msd, "write_json", fail)
    assert convert(pairs) == 2
    assert_nothing_written(pairs)


def test_what_a_killed_run_left_is_cleared(pairs: Path) -> None:
    save(pairs / ".set.unfinished/imagesTr/old.nii.gz", scan())
    assert convert(pairs) == 0
    assert sorted(path.name for path in (pairs / "set/imagesTr").iterdir()) == ["a.nii.gz", "b.nii.gz"]


def test_two_programs_do_not_make_one_set(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with whole_folder(pairs / "set") as place:
        place.mkdir()
        (place / "mine").touch()
        assert convert(pairs) == 2
        assert ".set.unfinished: in use by this process already" in capsys.readouterr().err
    assert [path.name for path in (pairs / "set").iterdir()] == ["mine"]
    assert sorted(path.name for path in pairs.iterdir()) == ["images", "labels", "set"]


@pytest.mark.parametrize("name", ["left\u00a0kidney", "left\nkidney"])
def test_a_label_that_training_would_refuse_is_not_left(
    pairs: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(pairs, names=("background", name)) == 2
    assert "printable name" in capsys.readouterr().err
    assert_nothing_written(pairs)


def test_a_file_name_that_is_no_text_is_not_left(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part in ("images", "labels"):
        (pairs / part / "a.nii.gz").rename(pairs / part / os.fsdecode(b"M\xfcller.nii.gz"))
    assert convert(pairs) == 2
    assert "utf-8" in capsys.readouterr().err
    assert_nothing_written(pairs)


# --- nnU-Net ---


def nnunet(folder: Path, channels: tuple[str, ...] = ("T1", "T2"), **more: object) -> Path:
    """Write a raw nnU-Net set of the cases a and b and the test case t; return its folder."""
    raw = folder / "Dataset012_Organ"
    content = {
        "channel_names": {str(number): name for number, name in enumerate(channels)},
        "labels": {"background": 0, "organ": 1},
        "numTraining": 2,
        "file_ending": ".nii.gz",
    }
    for seed, (part, name) in enumerate([("imagesTr", "a"), ("imagesTr", "b"), ("imagesTs", "t")]):
        for number in range(len(channels)):
            save(raw / part / f"{name}_{number:04d}.nii.gz", scan(10 * seed + number))
    for name in "ab":
        save(raw / "labelsTr" / f"{name}.nii.gz", mask())
    (raw / "dataset.json").write_text(json.dumps(content | more))
    return raw


def convert_nnunet(raw: Path, *flags: str) -> int:
    return main(["--nnunet", str(raw), "--to", str(raw.parent / "set"), *flags])


def test_nnunet_channels_are_stacked(tmp_path: Path) -> None:
    assert convert_nnunet(nnunet(tmp_path)) == 0
    dataset = read_dataset(tmp_path / "set")
    assert (dataset.name, dataset.modality, dataset.labels) == ("Organ", ("T1", "T2"), ("background", "organ"))
    image = read_volume(dataset.cases[1].image, channels=2)
    assert np.array_equal(image.voxels, np.stack([scan(10), scan(11)], axis=3))
    assert np.array_equal(image.affine, AFFINE)
    assert [case.name for case in dataset.test_cases] == ["t"]
    assert np.array_equal(read_volume(dataset.test_cases[0].image, 2).voxels[..., 1], scan(21))


def test_nnunets_first_version_is_read(tmp_path: Path) -> None:
    raw = nnunet(tmp_path, channels=("CT",))
    content = {"modality": {"0": "CT"}, "labels": {"0": "background", "1": "organ"}}
    (raw / "dataset.json").write_text(json.dumps(content))
    assert convert_nnunet(raw) == 0
    assert read_dataset(tmp_path / "set").labels == ("background", "organ")


def test_nnunet_cases_that_lack_something_are_all_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = nnunet(tmp_path)
    save(raw / "imagesTr/e_0000.nii.gz", scan(8))
    save(raw / "imagesTr/e_0001.nii.gz", scan(9), np.diag([2.0, 2, 4, 1]))
    save(raw / "labelsTr/e.nii.gz", mask())
    (raw / "imagesTr/a_0001.nii.gz").unlink()
    (raw / "labelsTr/b.nii.gz").unlink()
    save(raw / "labelsTr/c.nii.gz", mask())
    save(raw / "imagesTr/d.nii.gz", scan())
    (raw / "imagesTs/t_0000.nii.gz").unlink()
    assert convert_nnunet(raw) == 1
    told = capsys.readouterr().err
    assert "bad: a: channel 0001 missing" in told
    assert "bad: b: no label" in told
    assert "bad: c: a label, but no image" in told
    assert "bad: d: " in told
    assert "bad: t: channel 0000 missing" in told
    assert "e_0001.nii.gz is not on the grid of its first channel" in told
    assert told.count("bad: a") == 1
    assert_nothing_written(tmp_path)


def test_a_sequence_of_one_value_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = nnunet(tmp_path)
    save(raw / "imagesTr/b_0001.nii.gz", np.zeros_like(scan()))
    assert convert_nnunet(raw) == 0
    assert "T2: every voxel has one value; is the sequence missing?: b" in capsys.readouterr().out


def test_nnunet_regions_need_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = nnunet(tmp_path, labels={"background": 0, "whole": [1, 2], "core": 2})
    assert convert_nnunet(raw) == 2
    assert "--names background FIRST SECOND" in capsys.readouterr().err
    assert convert_nnunet(raw, "--names", "background", "rim", "core") == 0
    assert read_dataset(tmp_path / "set").labels == ("background", "rim", "core")


def test_nnunets_ignored_voxels_are_not_a_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = nnunet(tmp_path, labels={"background": 0, "organ": 1, "ignore": 2})
    save(raw / "labelsTr/b.nii.gz", mask(2))
    assert convert_nnunet(raw) == 1
    told = capsys.readouterr().err
    assert "bad: b" in told
    assert "map them: --values=2=0 (dataset.json says ignore, " in told
    assert convert_nnunet(raw, "--values", "2=0") == 0
    assert "note: voxels that dataset.json says to ignore become background: a, b" in capsys.readouterr().out


def test_nnunets_labels_may_have_gaps(tmp_path: Path) -> None:
    raw = nnunet(tmp_path, labels={"background": 0, "organ": 1, "tumour": 3})
    save(raw / "labelsTr/b.nii.gz", mask(3))
    assert convert_nnunet(raw) == 0
    dataset = read_dataset(tmp_path / "set")
    assert dataset.labels == ("background", "organ", "", "tumour")
    assert np.unique(read_volume(tmp_path / "set/labelsTr/b.nii.gz").voxels).tolist() == [0, 3]


def test_suffixes_of_test_images_are_taken_in_any_case(tmp_path: Path) -> None:
    raw = nnunet(tmp_path, channels=("CT",))
    (raw / "imagesTs/t_0000.nii.gz").rename(raw / "imagesTs/t_0000.NII.GZ")
    assert convert_nnunet(raw) == 0
    assert [case.name for case in read_dataset(tmp_path / "set").test_cases] == ["t"]


def test_links_to_files_that_are_gone_are_bad_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = nnunet(tmp_path, channels=("CT",))
    for path in (raw / "imagesTr/b_0000.nii.gz", raw / "labelsTr/b.nii.gz"):
        path.unlink()
        path.symlink_to(tmp_path / "gone" / path.name)
    assert convert_nnunet(raw) == 1
    told = capsys.readouterr().err
    assert told.count("bad: b") == 2
    assert "b_0000.nii.gz: no such file" in told
    assert_nothing_written(tmp_path)


def test_a_set_that_no_training_would_read_is_not_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = nnunet(tmp_path, labels={"background": 0, "organ": 1, " ": 2})
    assert convert_nnunet(raw) == 2
    assert "expected printable names for all, different for labels" in capsys.readouterr().err
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--names", "background", "organ", "organ"], "expected printable names for all, different for labels"),
        (["--names", "background", " "], "expected printable names for all, different for labels"),
        (["--names", "", "organ", "tumour"], "expected printable names for all"),
        (["--values", "1=2"], "--values 1=2: there is no label 2; name it, too"),
    ],
)
def test_names_that_no_training_would_take_are_refused_before_the_cases_are_read(
    tmp_path: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = nnunet(tmp_path)
    (raw / "labelsTr/b.nii.gz").write_bytes(b"no volume")
    assert convert_nnunet(raw, *flags) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"file_ending": ".png"}, "only .nii.gz, .nii, .nrrd, .mha are read"),
        ({"labels": {"organ": 1}}, "found none for 0"),
        ({"labels": []}, "labels: expected"),
        ({"channel_names": None}, "channel_names"),
    ],
)
def test_a_dataset_json_that_cannot_be_used_is_named(
    tmp_path: Path, more: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = nnunet(tmp_path, **more)
    assert convert_nnunet(raw) == 2
    told = capsys.readouterr().err
    assert words in told
    assert "dataset.json" in told
    assert told.count("\n") == 1


# --- a folder in MSD layout ---


def test_a_set_is_checked_and_left_as_it_is(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(pairs) == 0
    before = {path: path.stat().st_mtime_ns for path in (pairs / "set").rglob("*")}
    capsys.readouterr()
    assert main(["--check", str(pairs / "set")]) == 0
    assert "2 labelled" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (pairs / "set").rglob("*")} == before


@pytest.mark.parametrize("label", [mask(2), mask(0.9999, np.float32)], ids=["unnamed", "not whole"])
def test_what_training_would_refuse_is_bad(pairs: Path, label: np.ndarray, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(pairs) == 0
    save(pairs / "set/labelsTr/b.nii.gz", label)
    assert main(["--check", str(pairs / "set")]) == 1
    told = capsys.readouterr().err
    assert "bad: b" in told
    assert "--skip-bad" not in told, "--check refuses it"


# --- the command line ---


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--images", "a", "--labels", "b", "--modality", "CT", "--to", "c"], "--names is missing"),
        (["--images", "a", "--names", "x", "y", "--modality", "CT", "--to", "c"], "--labels is missing"),
        (["--images", "a", "--labels", "b", "--names", "x", "y", "--to", "c"], "--modality is missing"),
        (["--images", "a", "--labels", "b", "--names", "x", "--modality", "CT", "--to", "c"], "at least one structure"),
        (["--nnunet", "a"], "--to is missing"),
        (["--nnunet", "a", "--modality", "CT", "--to", "c"], "has its dataset.json"),
        (["--check", "a", "--to", "b"], "--to: drop it: --check writes nothing"),
        (["--nnunet", "a", "--to", "c", "--values", "255"], "expected OLD=NEW"),
        ([], "required"),
    ],
)
def test_wrong_flags_are_told(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(flags)
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("part", "words"), [("images", "no such folder"), ("labels", "only ['.img']")], ids=["missing", "other files"]
)
def test_folders_without_volumes_are_told(
    pairs: Path, part: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (pairs / part).iterdir():
        path.unlink()
    (pairs / "labels" / "a.img").touch()
    if part == "images":
        (pairs / "images").rmdir()
    assert convert(pairs) == 2
    assert words in capsys.readouterr().err


def test_a_path_with_spaces_can_be_pasted(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--images", str(pairs / "images"), "--labels", str(pairs / "labels"), "--modality", "CT"]
    assert main([*flags, "--names", "background", "left kidney", "--to", str(pairs / "my set")]) == 0
    assert f"--data '{pairs / 'my set'}'" in capsys.readouterr().out
    assert read_dataset(pairs / "my set").labels == ("background", "left kidney")


# --- docs/own_data.md, whose commands tests/test_docs.py parses ---


def test_the_page_shows_every_step() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "own_data.md").read_text()
    for step in (
        "data to-msd --images",
        "doctor --app",
        "train spleen --data",
        "infer spleen --model",
        "export spleen",
    ):
        assert f"\nmedspeed {step}" in page, step
    assert "\ndocker build -t medspeed ." in page


def test_nnunets_test_images_alone_become_scans_to_infer_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = nnunet(tmp_path)
    shutil.rmtree(raw / "imagesTr")
    assert convert_nnunet(raw) == 2  # labels without images are a mistake
    shutil.rmtree(raw / "labelsTr")
    assert convert_nnunet(raw) == 0
    stacked = read_volume(tmp_path / "set" / "imagesTs" / "t.nii.gz", 2)
    assert np.array_equal(stacked.voxels, np.stack([scan(20), scan(21)], axis=3))
    told = capsys.readouterr().out
    assert f"next: medspeed infer brats --model RUN --input {tmp_path}/set/imagesTs" in told
    assert "no case contains this label" not in told


def test_a_set_whose_labelled_cases_are_all_bad_is_not_written(tmp_path: Path) -> None:
    raw = nnunet(tmp_path)
    for name in "ab":
        save(raw / "labelsTr" / f"{name}.nii.gz", mask(9))
    assert convert_nnunet(raw, "--skip-bad") == 1
    assert_nothing_written(tmp_path)
