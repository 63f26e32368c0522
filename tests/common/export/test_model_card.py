import json
from pathlib import Path
from typing import Any

import pytest

from medspeed.common.export.model_card import model_card
from medspeed.common.files import sha256_of

TASK = "Segmentation of structures"
SECTIONS = ["Data", "Quality", "Limits", "Preparation", "Use", "License", "Files", "Versions"]
SPLEEN = {
    "app": "spleen",
    "labelling": {
        "labels": ["background", "spleen", "liver"],
        "regions": [
            {"name": "spleen", "members": [1], "value": 1}, {"name": "liver", "members": [2], "value": 2}
        ],
        "exclusive": True,
    },
    "preparation": {
        "spacing": [1.5, 1.5, 2.0], "normalisation": "window", "window": [-57.0, 164.0], "channels": 1
    },
    "window_size": [96, 80, 64],
    "overlap": 0.25,
}  # fmt: skip
BRATS = {
    "app": "brats",
    "labelling": {
        "labels": ["background", "edema", "", "enhancing"],
        "regions": [{"name": "WT", "members": [1, 3], "value": 1}, {"name": "ET", "members": [3], "value": 3}],
        "exclusive": False,
    },
    "preparation": {"spacing": [1.0, 1.0, 1.0], "normalisation": "zscore", "window": None, "channels": 4},
    "window_size": [64, 64, 64],
    "overlap": 0.5,
}
PATHOLOGY = {"app": "pathology", "patch_size": 224, "mpp": 0.243, "tile_size": 1024, "tile_batch": 1}


def summary(folder: Path, synthetic: bool = True, **changed: Any) -> dict[str, Any]:
    return {
        "app": "spleen",
        "recipe": "fast",
        "data": {"folder": str(folder), "name": "SpleenPhantoms", "synthetic": synthetic},
        "held_out": True,
        "device": "cuda:0",
        "seed": 7,
        "cases": {"training": 16, "validation": 3},
        "steps": 400,
        "quality": {
            "name": "foreground Dice, native grid, best weights",
            "value": 0.9123456,
            "per_case": {"case_1": 0.8, "secret_name": 0.95, "case_3": 0.9},
            "selected_on": "validation",
            "per_region": {"spleen": 0.93, "liver": None},
        },
        "onnx": {"path": str(folder / "exports" / "model_fp32.onnx"), "reason": f"refused: {folder}"},
    } | changed


def make_run(folder: Path, model: dict[str, Any] | None = None, **files: Any) -> Path:
    folder.mkdir()
    for name, content in {"model": model or SPLEEN, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "exports").mkdir()
    (folder / "best.safetensors").write_bytes(b"weights")
    (folder / "exports" / "model_fp32.onnx").write_bytes(b"model")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    data = tmp_path / "data"
    data.mkdir()
    (data / "dataset.json").write_text(json.dumps({"licence": "CC-BY-SA 4.0"}))
    return make_run(
        tmp_path / "run",
        summary=summary(data),
        split={"description": f"16 training and 3 validation cases (0 unused) named in {tmp_path / 'split.json'}"},
        environment={
            "command": ["train.py", "--run", str(tmp_path)],
            "python": "3.11.7",
            "platform": "Linux-6.18-node17",
            "processor": "EPYC",
            "versions": {"torch": "2.13.0", "monai": "1.6.1", "isal": "1.9.1", "tensorrt": None},
            "git": "d1f5bb8",
        },
    )


def section(card: str, name: str) -> str:
    return card.split(f"\n## {name}\n")[1].split("\n## ")[0]


def test_every_section_is_there_once_and_in_order(run: Path):
    card = model_card(run, TASK)
    assert [line[3:] for line in card.splitlines() if line.startswith("## ")] == SECTIONS
    assert card.startswith("# Model card: medspeed spleen\n")
    assert "\nSegmentation of structures.\n" in card
    assert "Labels: 0 background, 1 spleen, 2 liver." in card
    assert "Regions" not in card  # classes that exclude each other
    assert "**Not a medical device." in card
    assert card.endswith("\n")
    assert "\n\n\n" not in card


def test_phantoms_are_called_synthetic_wherever_it_matters(run: Path):
    card = model_card(run, TASK)
    assert "SYNTHETIC phantoms" in section(card, "Data")
    assert "say nothing about patients" in section(card, "Quality")
    assert "synthetic phantoms only" in section(card, "Limits")


def test_real_scans_are_not(run: Path, tmp_path: Path):
    (run / "summary.json").write_text(json.dumps(summary(tmp_path / "data", synthetic=False)))
    card = model_card(run, TASK)
    assert "phantom" not in card.replace("SpleenPhantoms", "").lower()
    assert "Kind: not synthetic" in card


def test_the_data_are_named_counted_and_split(run: Path):
    data = section(model_card(run, TASK), "Data")
    assert "- Dataset: SpleenPhantoms" in data
    assert "- Used: 16 training, 3 validation" in data
    assert "- Split: 16 training and 3 validation cases (0 unused)\n" in data
    assert "NOT HELD OUT" not in data


@pytest.mark.parametrize(
    ("model", "warned"),
    [(SPLEEN, "the spacing, field of view or intensities"), (PATHOLOGY, "a slide's pixels are of unknown size")],
)
def test_what_infer_warns_of_is_said(tmp_path, model, warned):
    card = model_card(make_run(tmp_path / "run", model, summary=summary(tmp_path, app=model["app"])), TASK)
    assert f"medspeed infer warns when {warned}" in section(card, "Limits")


def test_cases_that_were_trained_on_are_said(run: Path, tmp_path: Path):
    (run / "summary.json").write_text(json.dumps(summary(tmp_path, held_out=False)))
    assert "NOT HELD OUT" in section(model_card(run, TASK), "Data")


def test_the_figures_stand_in_a_table_by_structure(run: Path):
    quality = section(model_card(run, TASK), "Quality")
    rows = [line for line in quality.splitlines() if line.startswith("|")]
    assert rows == [
        "| figure | value |", "|---|---|", "| mean | 0.9123 |", "| spleen | 0.9300 |", "| liver | in no case |",
        "| worst case | 0.8000 |", "| cases | 3 |",
    ]  # fmt: skip
    assert "weights selected on: validation" in quality
    assert "slightly optimistic" in quality


def test_a_classifiers_figures_are_its_own(tmp_path: Path):
    figures = {"validation AUC": 0.97, "testing AUC": 0.95}
    quality = {"name": "patch AUC, testing patches", "value": 0.95, "per_case": figures}
    quality |= {"selected_on": "validation", "per_region": {}}
    run = make_run(tmp_path / "run", PATHOLOGY, summary=summary(tmp_path, app="pathology", quality=quality))
    card = model_card(run, TASK)
    rows = [line for line in section(card, "Quality").splitlines() if line.startswith("|")]
    assert rows[2:] == ["| validation AUC | 0.9700 |", "| testing AUC | 0.9500 |"]
    assert "slightly optimistic" not in card  # no weights were selected on what was tested
    assert "224 x 224 pixels" in section(card, "Preparation")
    assert "Pixel size of the training patches: 0.243 um" in section(card, "Limits")
    assert "Hounsfield" not in card
    assert "Labels:" not in card


def test_the_preparation_of_ct_is_told(run: Path):
    card = model_card(run, TASK)
    assert "resampled linearly to 1.5 x 1.5 x 2 mm" in section(card, "Preparation")
    assert "intensities -57 to 164 scaled to the range 0 to 1" in section(card, "Preparation")
    assert "sliding windows of 96 x 80 x 64 voxels, overlap 0.25" in section(card, "Preparation")
    assert "Intensities outside -57 to 164 (Hounsfield" in section(card, "Limits")


def test_the_preparation_of_mr_and_its_regions_are_told(tmp_path: Path):
    card = model_card(make_run(tmp_path / "run", BRATS), TASK)
    assert "channels: 4" in section(card, "Preparation")
    assert "Voxels of value 0 count as background" in section(card, "Limits")
    assert "Labels: 0 background, 1 edema, 3 enhancing." in card
    assert "by label number: WT of 1, 3; ET of 3." in card


def test_weights_from_elsewhere_are_not_said_to_be_judged(tmp_path: Path):
    card = model_card(make_run(tmp_path / "run"), TASK)
    assert [line[3:] for line in card.splitlines() if line.startswith("## ")] == SECTIONS
    assert "Unknown: the weights do not come from a training run" in section(card, "Data")
    assert section(card, "Quality").strip() == "Not evaluated here."
    assert "The training data are not recorded." in section(card, "Limits")
    assert "not recorded; check with the data source" in section(card, "License")
    assert section(card, "Versions").strip() == "Not recorded."


def test_the_datas_licence_is_told_where_the_dataset_states_it(run: Path, tmp_path: Path):
    assert "Software: Apache-2.0" in section(model_card(run, TASK), "License")
    assert "as stated by the dataset: CC-BY-SA 4.0" in section(model_card(run, TASK), "License")
    (tmp_path / "data" / "dataset.json").unlink()
    assert "CC-BY-SA" not in model_card(run, TASK)


def test_the_digests_are_those_of_the_files(run: Path):
    (run / "exports" / "model_fp16.plan").write_bytes(b"engine")
    (run / "exports" / "other.bin").write_bytes(b"")
    rows = [line for line in section(model_card(run, TASK), "Files").splitlines() if line.startswith("|")][2:]
    names = ["best.safetensors", "exports/model_fp16.plan", "exports/model_fp32.onnx"]
    assert rows == [f"| {name} | `{sha256_of(run / name)}` |" for name in names]


def test_the_versions_are_the_runs(run: Path):
    rows = section(model_card(run, TASK), "Versions").strip().splitlines()
    assert rows == [
        "- Python 3.11.7", "- torch 2.13.0", "- monai 1.6.1", "- medspeed revision d1f5bb8",
        "- recipe fast, seed 7, 400 steps",
    ]  # fmt: skip


def test_an_ensemble_has_no_line_of_empty_values(tmp_path: Path):
    """Its summary says of what data its members are, and nothing of a training."""
    run = make_run(tmp_path / "both", summary={"data": {"folder": str(tmp_path), "name": "a", "synthetic": True}})
    assert section(model_card(run, TASK), "Versions").strip() == "Not recorded."


def test_no_path_host_or_case_name_gets_in(run: Path, tmp_path: Path):
    card = model_card(run, TASK)
    for word in (str(tmp_path), tmp_path.name, "node17", "EPYC", "secret_name", "case_1", "split.json"):
        assert word not in card


def test_what_a_dataset_calls_itself_stays_text(run: Path, tmp_path: Path):
    name = "a | b\n# Title <script> [link](x) `code` *b* &lt; https://x www.x a@b.c \x1b[2J\u202e"
    changed = summary(tmp_path / "data")
    (run / "summary.json").write_text(json.dumps(changed | {"data": {**changed["data"], "name": name}}))
    expected = r"- Dataset: a \| b \# Title \<script\> \[link\](x) \`code\` \*b\* \&lt; https:\//x www\.x a\@b.c \[2J "
    assert expected in section(model_card(run, TASK), "Data").splitlines()


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("summary", {"data": 5}, r"Expected `object`, got `int` - at `\$\.data`"),
        ("summary", {"data": {"folder": [1]}}, r"at `\$\.data\.folder`"),
        ("summary", {"quality": {}}, "missing required field `name`"),
        ("summary", {"quality": {"name": "Dice", "value": "x", "selected_on": "y", "per_case": {}}}, r"quality\.value"),
        ("summary", {"cases": [1]}, r"at `\$\.cases`"),
        ("split", {"validation": 5}, r"at `\$\.validation`"),
        ("split", {"description": 5}, r"at `\$\.description`"),
        ("environment", {"versions": "torch"}, r"at `\$\.versions`"),
    ],
)
def test_a_value_of_another_type_is_named(run: Path, name: str, content: dict[str, Any], problem: str):
    (run / f"{name}.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"{name}\.json: .*{problem}.*; restore it, or remove it"):
        model_card(run, TASK)


@pytest.mark.parametrize("name", ["summary", "split", "environment"])
def test_an_empty_record_is_one_that_says_nothing(run: Path, name: str):
    (run / f"{name}.json").write_text("{}")
    assert "# Model card: medspeed spleen" in model_card(run, TASK)


def test_files_that_cannot_be_read_are_named(tmp_path: Path):
    run = make_run(tmp_path / "run")
    (run / "summary.json").write_text("{")
    with pytest.raises(ValueError, match=r"summary\.json: expected JSON text"):
        model_card(run, TASK)
    (run / "summary.json").write_text("[]")
    with pytest.raises(ValueError, match=r"summary\.json: expected a JSON object, found a list"):
        model_card(run, TASK)
