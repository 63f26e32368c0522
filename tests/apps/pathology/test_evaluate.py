import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

import medspeed
from medspeed.apps.pathology import evaluate
from medspeed.apps.pathology.config import EvaluateConfig
from tests.apps.pathology.scan_runs import disc, write_slide

SIDE, MPP = 512, 2.0
LESIONS = [(150, 150, 60), (380, 380, 60)]  # 240 um wide, more than isolated tumour cells with the margin of 75


def write_set(folder: Path, masks: bool = True) -> Path:
    """Write a set with a training slide of each kind, and test slides of which one has two lesions."""
    for place in ("training/images/normal_001", "training/images/tumor_001", "testing/images/test_001"):
        write_slide(folder / f"{place}.tif", LESIONS)
    for name in ("test_002", "test_049"):
        write_slide(folder / "testing" / "images" / f"{name}.tif", [])
    mask = np.logical_or(*(disc(*lesion) for lesion in LESIONS)).astype(np.uint8)
    for place in ("training/masks/tumor_001", "testing/masks/test_001"):
        if masks or "training" in place:
            path = folder / f"{place}_mask.tif"
            path.parent.mkdir(parents=True, exist_ok=True)
            with tifffile.TiffWriter(path) as writer:
                for factor in (1, 2, 4, 8):
                    level = mask[::factor, ::factor]
                    writer.write(level, tile=(128, 128), photometric="minisblack", subfiletype=int(factor > 1))
    reference = "test_001,Tumor,synthetic,macro\ntest_002,Normal,None,None\ntest_049,Normal,None,None\n"
    (folder / "testing" / "reference.csv").write_text(reference)
    return folder


def write_scan(folder: Path, name: str, probability: float, rows: str, mpp: float | None = MPP) -> None:
    (folder / name).mkdir(parents=True)
    doubts = ["NO TISSUE found"] if probability == 0 else []
    record = {"name": name, "probability": probability, "mpp": mpp, "size": [SIDE, SIDE], "uncertain": doubts}
    (folder / name / "slide.json").write_text(json.dumps(record))
    (folder / name / "detections.csv").write_text(rows)


def judge(scans: Path, data: Path) -> dict[str, Any]:
    assert evaluate.main(EvaluateConfig(scans, data)).status == 0
    content: dict[str, Any] = json.loads((scans / "froc.json").read_text())
    return content


def test_scores_follow_from_hits_and_false_positives(tmp_path, capsys):
    data, scans = write_set(tmp_path / "set"), tmp_path / "scans"
    write_scan(scans, "test_001", 0.9, "0.900000,160,140\n0.700000,300,60\n0.600000,380,390\n")
    write_scan(scans, "test_002", 0.8, "0.800000,511,511\n0.510000,9,9\n")
    found = judge(scans, data)
    capsys.readouterr()
    scored = medspeed.evaluate(scans, data, app="pathology", quiet=True)
    assert asdict(scored) == found
    assert capsys.readouterr() == ("", "")
    judge(scans, data)
    # At 0.9 one of two lesions and no false positive, at 0.6 both and two, which is one a slide; the lowest score of
    # all is no point of the curve.
    assert found["lesions"] == 2
    assert found["mask_mpp"] == [16.0]
    assert found["sensitivities"][3:] == [1.0, 1.0, 1.0]
    assert found["sensitivities"][:2] == [0.5, 0.5]
    assert found["slide_auc"] == 1.0
    said = capsys.readouterr().out.splitlines()
    assert said[-2].startswith(f"FROC: {found['froc']:.4f}, 2 lesions in 2 slides, masks at 16 um")
    assert said[-1] == "slide AUC: 1.0000, 1 of 2 slides with tumour"
    assert (scans / "froc.csv").is_file()
    assert (scans / "froc.png").is_file()


def test_detections_lie_where_the_mask_says(tmp_path):
    data, scans = write_set(tmp_path / "set"), tmp_path / "scans"
    write_scan(scans, "test_001", 0.9, "0.900000,150,150\n0.800000,380,380\n")
    write_scan(scans, "test_002", 0.51, "0.510000,9,9\n")
    assert judge(scans, data)["froc"] == 1.0
    (scans / "test_001" / "detections.csv").write_text("0.900000,150,380\n0.800000,380,150\n")  # the other diagonal
    assert judge(scans, data)["froc"] < 1.0
    assert judge(scans, data)["sensitivities"][0] == 0.0


def test_slides_that_cannot_be_scored_are_left_out_and_said(tmp_path, capsys):
    data, scans = write_set(tmp_path / "set", masks=False), tmp_path / "scans"
    write_scan(scans, "test_001", 0.9, "")
    write_scan(scans, "test_049", 0.9, "0.9,1,1\n")
    write_scan(scans, "stranger", 0.9, "")
    write_scan(scans, "tumor_001", 0.9, "", mpp=None)
    write_scan(scans, "normal_001", 0.2, "")
    (scans / "froc.csv").write_text("of an earlier time")
    found = judge(scans, data)
    assert not (scans / "froc.csv").exists()
    assert list(found["slides"]) == found["training"] == ["normal_001"]
    assert set(found["left_out"]) == {"test_001", "test_002", "test_049", "stranger", "tumor_001"}
    assert "neither a mask" in found["left_out"]["test_001"]
    assert (found["froc"], found["slide_auc"]) == (None, None)
    said = capsys.readouterr().out
    assert "FROC: not computed" in said
    assert "slide AUC: none" in said
    assert f"1 of 1 slide in the training set of {data}, so NOT HELD OUT" in said


def test_lesions_of_slides_that_are_marked_in_part_do_not_count_which_is_said(tmp_path, capsys):
    data, scans = write_set(tmp_path / "set"), tmp_path / "scans"
    for path in [path for path in data.rglob("tumor_001*") if path.is_file()]:
        path.rename(path.with_name(path.name.replace("001", "010")))
    write_scan(scans, "tumor_010", 0.9, "0.900000,160,140\n0.700000,300,60\n")
    assert judge(scans, data)["lesions"] == 0
    assert "tumor_010: its lesions are not in the FROC: Camelyon16's slide of this name" in capsys.readouterr().out
    (data / "slides.json").write_text(json.dumps({"name": "Own slides"}))
    assert judge(scans, data)["lesions"] == 2


def test_a_slide_of_an_own_set_counts_whatever_camelyons_duplicate_is_called(tmp_path):
    data, scans = write_set(tmp_path / "set"), tmp_path / "scans"
    write_scan(scans, "test_001", 0.5, "")
    write_scan(scans, "test_002", 0.4, "")
    write_scan(scans, "test_049", 0.9, "")
    found = judge(scans, data)
    assert (found["slide_auc"], found["left_out"].keys()) == (1.0, {"test_049"})
    (data / "slides.json").write_text(json.dumps({"name": "Own slides"}))
    found = judge(scans, data)
    assert (found["slide_auc"], found["left_out"]) == (0.5, {})


def test_nothing_to_score_is_an_error(tmp_path):
    data, scans = write_set(tmp_path / "set"), tmp_path / "scans"
    with pytest.raises(FileNotFoundError, match="no finished scans"):
        evaluate.main(EvaluateConfig(scans, data))
    write_scan(scans, "stranger", 0.9, "")
    with pytest.raises(ValueError, match="none of 1 scans can be judged by"):
        evaluate.main(EvaluateConfig(scans, data))


def test_scans_by_different_weights_are_refused(tmp_path):
    data, scans = write_set(tmp_path / "set"), tmp_path / "scans"
    for name, weights in (("test_001", "a"), ("test_002", "b")):
        write_scan(scans, name, 0.9, "0.900000,160,140\n")
        record = json.loads((scans / name / "slide.json").read_text())
        mark = {"weights": {"best.safetensors": weights}, "input": [name, 1]}
        (scans / name / "slide.json").write_text(json.dumps({**record, "mark": mark}))
    with pytest.raises(ValueError, match=r"test_001.slide\.json and .*test_002.slide\.json differ in weights"):
        judge(scans, data)


def test_test_slides_without_a_scan_are_said(tmp_path, capsys):
    data, scans = write_set(tmp_path / "set"), tmp_path / "scans"
    write_scan(scans, "test_001", 0.9, "0.900000,160,140\n")
    assert judge(scans, data)["left_out"] == {"test_002": "it has not been scanned"}


def test_a_slide_marked_in_part_counts_for_the_auc_alone(tmp_path):
    data, scans = write_set(tmp_path / "set"), tmp_path / "scans"
    for file in (data / "testing").rglob("test_001*"):
        file.rename(file.with_name(file.name.replace("test_001", "test_114")))
    reference = data / "testing" / "reference.csv"
    reference.write_text(reference.read_text().replace("test_001", "test_114"))
    write_scan(scans, "test_114", 0.9, "0.900000,160,140\n")
    write_scan(scans, "test_002", 0.8, "0.800000,511,511\n")
    found = judge(scans, data)
    assert (found["slide_auc"], found["froc"], found["lesions"]) == (1.0, None, 0)


def judged_with(scans: Path, data: Path) -> dict[str, Any]:
    """Return what is left out where one slide is damaged: the others are judged, and the status says so."""
    assert evaluate.main(EvaluateConfig(scans, data)).status == 1
    left_out: dict[str, Any] = json.loads((scans / "froc.json").read_text())["left_out"]
    return left_out


@pytest.mark.parametrize(
    "change",
    [
        {"probability": "x"},
        {"probability": float("nan")},
        {"probability": 1.5},
        {"mark": 5},
        {"mpp": "x"},
        {"mpp": 1e-9},
        {"size": [0, 5]},
        {"name": "test_002"},
        {"name": None},
    ],
)
def test_a_damaged_record_is_left_out_by_name(tmp_path, change):
    data, scans = write_set(tmp_path / "set"), tmp_path / "scans"
    write_scan(scans, "test_001", 0.9, "")
    write_scan(scans, "test_002", 0.2, "")
    record = scans / "test_001" / "slide.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), **change}))
    assert "scan the slide again" in judged_with(scans, data)["test_001"]


@pytest.mark.parametrize(
    "rows",
    ["nan,1,2", "1.5,1,2", "0.5,-5,5", "0.5,99999,5", f"0.5,{'9' * 400},5", "=1+1,1,1", "0.5,1"],
)
def test_detections_on_no_slide_are_left_out_by_name(tmp_path, rows):
    data, scans = write_set(tmp_path / "set"), tmp_path / "scans"
    write_scan(scans, "test_001", 0.9, "")
    write_scan(scans, "test_002", 0.2, rows + "\n")
    assert "scan the slide again" in judged_with(scans, data)["test_002"]


def test_a_tumour_slide_whose_marks_enclose_nothing_is_left_out_by_name(tmp_path):
    data, scans = write_set(tmp_path / "set"), tmp_path / "scans"
    (data / "testing" / "masks" / "test_001_mask.tif").unlink()
    (data / "testing" / "annotations").mkdir()
    (data / "testing" / "annotations" / "test_001.xml").write_text("<ASAP_Annotations/>")
    write_scan(scans, "test_001", 0.9, "")
    write_scan(scans, "test_002", 0.2, "")
    assert "test_001.xml marks no tumour" in judged_with(scans, data)["test_001"]


def test_a_name_cannot_forge_a_line(tmp_path, capsys):
    data, scans = write_set(tmp_path / "set"), tmp_path / "scans"
    write_scan(scans, "test_002", 0.2, "")
    write_scan(scans, "x\n\x1b[31mtest_001: judged", 0.9, "")
    judge(scans, data)
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "\ntest_001: judged" not in said
