import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medspeed.common.data.dataset import (
    Case,
    Dataset,
    make_synthetic,
    read_dataset,
    split_cases,
)
from medspeed.data_scripts.make_phantoms import CT_VERSION, MRI_VERSION

APPS = Path(__file__).parents[3] / "apps"


def write_dataset(folder: Path, names: list[str], **changes: Any) -> Path:
    content: dict[str, Any] = {
        "name": "Organ",
        "modality": {"0": "CT"},
        "labels": {"0": "background", "1": "spleen"},
        "training": [{"image": f"./imagesTr/{n}.nii.gz", "label": f"./labelsTr/{n}.nii.gz"} for n in names],
        "test": [],
    }
    for sub in ("imagesTr", "labelsTr"):
        (folder / sub).mkdir(parents=True)
        for name in names:
            (folder / sub / f"{name}.nii.gz").touch()
    content |= changes
    content = {key: value for key, value in content.items() if value is not None}
    (folder / "dataset.json").write_text(json.dumps(content))
    return folder


def dataset_of(names: list[str]) -> Dataset:
    cases = tuple(Case(name, Path(f"{name}.nii.gz"), Path(f"{name}_label.nii.gz")) for name in sorted(names))
    return Dataset(Path("somewhere"), "Organ", ("CT",), ("background", "organ"), cases, (), False)


def names(cases: tuple[Case, ...]) -> list[str]:
    return [case.name for case in cases]


def test_reads_names_modality_and_files_sorted_by_name(tmp_path):
    folder = write_dataset(
        tmp_path,
        ["b", "a"],
        modality={"1": "T1w", "0": "FLAIR"},
        labels={"1": "edema", "0": "background", "2": "tumour"},
        test=["./imagesTs/d.nii.gz", {"image": "imagesTs/c.nii"}],
    )
    dataset = read_dataset(folder)
    assert dataset.name == "Organ"
    assert dataset.modality == ("FLAIR", "T1w")
    assert dataset.labels == ("background", "edema", "tumour")
    assert dataset.cases == (
        Case("a", folder / "imagesTr/a.nii.gz", folder / "labelsTr/a.nii.gz"),
        Case("b", folder / "imagesTr/b.nii.gz", folder / "labelsTr/b.nii.gz"),
    )
    assert dataset.test_cases == (
        Case("c", folder / "imagesTs/c.nii", None),
        Case("d", folder / "imagesTs/d.nii.gz", None),
    )
    assert not dataset.synthetic


def test_label_numbers_may_leave_some_out(tmp_path):
    folder = write_dataset(tmp_path, ["a"], labels={"0": "background", "4": "ET", "1": "NCR"})
    assert read_dataset(folder).labels == ("background", "NCR", "", "", "ET")


def test_tells_phantoms(tmp_path):
    assert read_dataset(write_dataset(tmp_path, ["a"], synthetic=True)).synthetic


def test_takes_uncompressed_files(tmp_path):
    folder = write_dataset(tmp_path, ["a"], training=[{"image": "a.b.nii", "label": "l.nii"}])
    (folder / "a.b.nii").touch()
    (folder / "l.nii").touch()
    assert names(read_dataset(folder).cases) == ["a.b"]


def test_skips_the_hidden_entries_of_macos(tmp_path):
    hidden = {"image": "./imagesTr/._a.nii.gz", "label": "./labelsTr/._a.nii.gz"}
    visible = {"image": "./imagesTr/a.nii.gz", "label": "./labelsTr/a.nii.gz"}
    folder = write_dataset(tmp_path, ["a"], training=[hidden, visible], test=["./imagesTs/._b.nii.gz"])
    dataset = read_dataset(folder)
    assert names(dataset.cases) == ["a"]
    assert dataset.test_cases == ()


def test_names_the_folder_without_dataset_json(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"dataset\.json: not found.*imagesTr"):
        read_dataset(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"name": ', "expected JSON text"),
        (b"\xff\xfe", "expected JSON text"),
        (b"[]", "expected a JSON object, found"),
    ],
)
def test_refuses_what_is_no_json_object(tmp_path, text, message):
    (tmp_path / "dataset.json").write_bytes(text)
    with pytest.raises(ValueError, match=rf"dataset\.json: {message}"):
        read_dataset(tmp_path)


@pytest.mark.parametrize("key", ["name", "modality", "labels", "training"])
def test_names_a_missing_key(tmp_path, key):
    with pytest.raises(ValueError, match=rf"dataset\.json: .*missing required field `{key}`"):
        read_dataset(write_dataset(tmp_path, ["a"], **{key: None}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": {"1": "background", "2": "spleen"}}, "labels: expected .* from 0 to 255, found none for 0"),
        ({"labels": {"background": 0, "spleen": 1}}, r"Expected `str`, got `int` - at `labels"),
        ({"labels": {str(n): f"l{n}" for n in range(300)}}, "labels: .* 255, found '256', .*'260' and 39 more"),
        ({"labels": {"0": "background", "\u0661": "spleen"}}, r"labels: .* found '\\u0661'"),
        ({"labels": {"0": "background", "01": "spleen"}}, "labels: .* found '01'"),
        ({"labels": {"0": "a", "1": "ball", "2": "ball"}}, "a unique, printable name for each number, found 'ball'"),
        ({"labels": {"0": "background", "1": ""}}, "for each number, found an empty name"),
        ({"labels": {"0": "background", "1": "a\n\x1b[31m"}}, r"each number, found 'a\\n\\x1b\[31m'"),
        ({"labels": {"0": "background", "1": "\ud800"}}, "can't encode character '.ud800'"),
        ({"name": "\udcff"}, "can't encode character '.udcff'"),
        ({"labels": {"0": "background"}}, "two or more labels, .'background',"),
        ({"labels": ["background", "spleen"]}, r"Expected `object`, got `array` - at `labels`"),
        ({"modality": {}}, "modality: expected"),
        ({"modality": {"0": "CT", "2": "MR"}}, "expected names for all channels"),
        ({"modality": {"0": 5}}, r"Expected `str`, got `int` - at `modality"),
        ({"name": 5}, r"Expected `str`, got `int` - at `name`"),
        ({"synthetic": "yes"}, r"Expected `bool`, got `str` - at `synthetic`"),
        ({"training": []}, "training: expected at least one image"),
        ({"training": ["a.nii.gz"]}, r"Expected `object`, got `str` - at `training"),
        ({"training": [{"image": "a.nii.gz"}]}, r"missing required field `label` - at `training"),
        (
            {"training": [{"image": "/etc/a.nii.gz", "label": "b.nii.gz"}]},
            "'/etc/a.nii.gz' points outside the dataset folder",
        ),
        ({"training": [{"image": "a.nii.gz", "label": "x/../../b.nii.gz"}]}, "points outside the dataset folder"),
        ({"training": [{"image": "a.img", "label": "b.nii.gz"}]}, "a.img: expected an image file named NAME.nii.gz"),
        ({"test": "imagesTs"}, r"Expected `array`, got `str` - at `test`"),
        ({"test": [{"label": "a.nii.gz"}]}, "expected an image file named NAME.nii.gz"),
        ({"test": ["../a.nii.gz"]}, "points outside the dataset folder"),
    ],
)
def test_names_what_is_wrong_in_the_list(tmp_path, changes, message):
    with pytest.raises(ValueError, match=r"dataset\.json: (?s:.)*" + message):
        read_dataset(write_dataset(tmp_path, ["a"], **changes))


def test_refuses_a_case_listed_twice(tmp_path):
    entry = {"image": "./imagesTr/a.nii.gz", "label": "./labelsTr/a.nii.gz"}
    with pytest.raises(ValueError, match="a: listed more than once"):
        read_dataset(write_dataset(tmp_path, ["a"], training=[entry, entry]))


def test_counts_missing_files_and_lists_five(tmp_path):
    folder = write_dataset(tmp_path, [f"case{i}" for i in range(8)])
    for i in range(7):
        (folder / "labelsTr" / f"case{i}.nii.gz").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"7 of 16 listed files are missing: labelsTr/case0.nii.gz, .* and 2 more"
    ):
        read_dataset(folder)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.text("abcdef0123456789_", min_size=1), min_size=2, max_size=30, unique=True),
    st.floats(0.01, 0.99),
    st.integers(0, 5),
)
def test_a_fraction_divides_the_cases(case_names, fraction, seed):
    split = split_cases(dataset_of(case_names), f"{fraction}:{seed}")
    assert split.held_out
    assert sorted(names(split.training) + names(split.validation)) == sorted(case_names)
    assert split.training
    assert len(split.validation) == min(max(round(fraction * len(case_names)), 1), len(case_names) - 1)
    assert names(split.training) == sorted(names(split.training))
    assert split_cases(dataset_of(case_names[::-1]), f"{fraction}:{seed}") == split


def test_a_fraction_and_seed_always_give_the_same_cases():
    # Written down once: a change here would move cases between training and validation of runs already recorded.
    dataset = dataset_of([f"spleen_{i}" for i in range(10)])
    assert names(split_cases(dataset, "0.3").validation) == ["spleen_2", "spleen_3", "spleen_8"]
    assert names(split_cases(dataset, "0.3:0").validation) == ["spleen_2", "spleen_3", "spleen_8"]
    assert names(split_cases(dataset, "0.3:1").validation) == ["spleen_3", "spleen_4", "spleen_9"]
    assert split_cases(dataset, "0.3:1").description == ("3 of 10 cases held out for validation: fraction 0.3, seed 1")


@pytest.mark.parametrize("split", ["0", "1", "-0.2", "1.5:3", "nan", "inf"])
def test_a_fraction_lies_between_0_and_1(split):
    with pytest.raises(ValueError, match="must be above 0 and below 1"):
        split_cases(dataset_of(["a", "b"]), split)


def test_one_case_cannot_be_divided():
    with pytest.raises(ValueError, match=r"expected at least 2 labelled cases.*found 1.*use the split 'all'"):
        split_cases(dataset_of(["a"]), "0.2")


def test_all_trains_and_validates_on_every_case():
    split = split_cases(dataset_of(["a", "b"]), "all")
    assert names(split.training) == names(split.validation) == ["a", "b"]
    assert not split.held_out
    assert split.description == "all 2 cases used for both training and validation"


def test_a_file_names_the_cases(tmp_path):
    path = tmp_path / "split.json"
    path.write_text('{"training": ["c", "a"], "validation": ["b"]}')
    split = split_cases(dataset_of(["a", "b", "c", "d"]), str(path))
    assert (names(split.training), names(split.validation), split.held_out) == (["a", "c"], ["b"], True)
    assert split.description == f"2 training and 1 validation cases (1 unused) named in {path}"


@pytest.mark.parametrize("choice", ["all", "0.5"])
def test_a_recorded_split_is_a_split_file(tmp_path, choice):
    dataset = dataset_of(["a", "b", "c", "d"])
    split = split_cases(dataset, choice)
    path = tmp_path / "split.json"
    path.write_text(json.dumps(split.to_json()))
    again = split_cases(dataset, str(path))
    assert (again.training, again.validation, again.held_out) == (split.training, split.validation, split.held_out)
    assert "(0 unused)" in again.description
    path.write_text(json.dumps({**split.to_json(), "held_out": False}))  # they trained the weights of --init
    assert not split_cases(dataset, str(path)).held_out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"training": ["a"]}, ".*missing required field `validation`"),
        ({"training": "a", "validation": ["b"]}, r".*Expected `array`, got `str` - at `training`"),
        ({"training": ["a", "x", "7"], "validation": ["b"]}, r"not among the labelled cases of .*: x, 7"),
        ({"training": ["a"], "validation": []}, "expected at least one training and one validation case"),
        ({"training": ["a", "a"], "validation": ["b"]}, ".* none listed twice"),
        ({"training": ["a", "b"], "validation": ["b"]}, "b used for both training and validation"),
    ],
)
def test_names_what_is_wrong_in_a_split_file(tmp_path, content, message):
    path = tmp_path / "split.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"split\.json: {message}"):
        split_cases(dataset_of(["a", "b"]), str(path))


@pytest.mark.parametrize("split", ["nowhere.json", "0.2:", "0.2:x", "everything"])
def test_tells_the_forms_of_a_split(split):
    with pytest.raises(FileNotFoundError, match=r"no such file; expected a fraction such as 0\.2"):
        split_cases(dataset_of(["a", "b"]), split)


@pytest.mark.real_data
def test_reads_the_real_lists(real_data):
    spleen = read_dataset(real_data / "ct_spleen_real")
    assert names(spleen.cases) == ["real_a", "real_b"]
    assert (spleen.modality, spleen.labels) == (("CT",), ("background", "spleen"))
    brain = read_dataset(real_data / "brain_tumour_real")
    assert (len(brain.modality), len(brain.labels), len(brain.cases)) == (2, 4, 3)
    with pytest.raises(FileNotFoundError, match="41 of 82 listed files are missing: imagesTr/spleen_"):
        read_dataset(real_data / "msd_spleen_labels")


def test_a_set_is_made_once(tmp_path, monkeypatch):
    folder = make_synthetic(tmp_path / "set", "make_phantoms", "ct", "--cases", "1")
    assert read_dataset(folder).synthetic
    monkeypatch.setattr("subprocess.run", lambda *given, **named: pytest.fail("it is there"))
    assert make_synthetic(folder, "make_phantoms", "ct", "--cases", "1") == folder


def test_a_folder_that_holds_something_else_is_left_and_the_program_says_why(tmp_path, capfd):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(OSError, match=re.escape(f"{tmp_path}: medspeed.data_scripts.make_phantoms ct --cases 1")):
        make_synthetic(tmp_path, "make_phantoms", "ct", "--cases", "1")
    assert "contains other files (mine.txt)" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(("app", "name"), [("spleen", f"ct-small-{CT_VERSION}"), ("brats", f"mri-small-{MRI_VERSION}")])
def test_an_app_names_its_folder_by_the_version_that_is_made(app, name):
    assert f'"{name}"' in (APPS / app / "train.py").read_text()


def test_a_folder_of_nnunets_is_told_what_reads_it(tmp_path):
    content = {"channel_names": {"0": "CT"}, "labels": {"background": 0, "liver": 1}, "file_ending": ".nii.gz"}
    (tmp_path / "dataset.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"nnU-Net's: convert .* `medspeed data to-msd --nnunet {tmp_path} --to NEW`"):
        read_dataset(tmp_path)
