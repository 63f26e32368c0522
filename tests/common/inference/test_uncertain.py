import csv
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from scipy.ndimage import binary_dilation

import medspeed
from medspeed.common.data.fingerprint import CaseFigures, Fingerprint
from medspeed.common.inference.labels import Region, dice_of_counts, one_region_per_label
from medspeed.common.inference.measure import measure, read_figures, with_doubts
from medspeed.common.inference.options import InferConfig
from medspeed.common.inference.runs import load_models, pair_counts
from medspeed.common.inference.scans import segment_scans
from medspeed.data_scripts.make_phantoms import make_phantoms
from medspeed.models import find_network

ONE = CaseFigures((1.0, 1.0, 3.0), (300.0, 300.0, 240.0), (-100.0, 30.0, 200.0), (0.0, 2.0, 1.0))
OTHER = CaseFigures((2.0, 2.0, 6.0), (400.0, 400.0, 360.0), (-80.0, 50.0, 300.0), (0.0, 4.0, 0.0))
SCAN = replace(ONE, volumes_ml=())
REGIONS = (Region("whole", (1, 2), 1), Region("core", (2,), 2))


def labelled(first: int, second: int) -> np.ndarray:
    """A label map of so many voxels of labels 1 and 2, each of a tenth of a milliliter."""
    labels = np.zeros((10, 10, 10), np.uint8)
    labels.reshape(-1)[:first] = 1
    labels.reshape(-1)[500 : 500 + second] = 2
    return labels


def doubts(scan=SCAN, first=20, second=10, cases=(ONE, OTHER), agreement=(), empty=()):
    affine = np.diag([10.0, 10.0, 1.0, 1.0])
    found = with_doubts(measure(labelled(first, second), affine, REGIONS), REGIONS, scan, cases, agreement, empty)
    return [each.uncertain for each in found]


def test_a_scan_like_those_of_the_training_is_not_doubted():
    assert doubts() == ["", ""]
    assert doubts(OTHER) == ["", ""]


def test_a_training_case_whose_first_channel_is_empty_says_nothing_about_intensities():
    empty, bright = replace(ONE, intensity=(-500.0, -500.0, -500.0)), replace(SCAN, intensity=(-100.0, 30.0, 401.0))
    assert doubts(bright, cases=(ONE, OTHER, empty)) == doubts(bright) != ["", ""]


def test_a_scan_whose_first_channel_is_empty_has_no_intensities_to_doubt():
    """They are made up, in HU, and would be called standard deviations; a CT without voxels above them is too dark."""
    dark = replace(SCAN, intensity=(-500.0, -500.0, -500.0))
    assert doubts(dark, empty=[0]) == ["channel 0 is EMPTY"] * 2
    assert "percentile 50 of the intensities: -500" in doubts(dark)[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        # 1 / 1.5 to 2 * 1.5, and 3 / 1.5 to 6 * 1.5
        ({"spacing": (3.0, 0.67, 9.0)}, ""),
        ({"spacing": (3.1, 1.0, 3.0)}, "spacing along R in mm: 3.1 (training cases: 1 to 2)"),
        ({"spacing": (1.0, 0.66, 3.0)}, "spacing along A in mm: 0.66 (training cases: 1 to 2)"),
        # 240 / 1.5 to 360 * 1.5
        ({"size": (300.0, 300.0, 160.0)}, ""),
        ({"size": (300.0, 300.0, 1550.0)}, "field of view along S in mm: 1550 (training cases: 240 to 360)"),
        # from -100 to 300 it is 400, a quarter of that 100
        ({"intensity": (-200.0, 150.0, 400.0)}, ""),
        ({"intensity": (-100.0, 151.0, 300.0)}, "percentile 50 of the intensities: 151 (training cases: 30 to 50)"),
        ({"intensity": (-201.0, 30.0, 300.0)}, "percentile 5 of the intensities: -201 (training cases: -100 to -80)"),
        ({"intensity": (0.0, 30.0, 99.0)}, "percentile 95 of the intensities: 99 (training cases: 200 to 300)"),
    ],
)
def test_a_scan_unlike_those_of_the_training_is_doubted_in_each_row(change, said):
    assert doubts(replace(SCAN, **change)) == [said, said]


@pytest.mark.parametrize(
    ("first", "second", "whole", "core"),
    [
        # The whole has 3 and 4 ml in the training cases, so 2 to 6 pass; the core 1 and 0, so 0 to 1.5 do.
        (20, 0, "", ""),
        (45, 15, "", ""),
        (0, 15, "whole in ml: 1.5 (training cases: 3 to 4)", ""),
        (46, 15, "whole in ml: 6.1 (training cases: 3 to 4)", ""),
        (20, 16, "", "core in ml: 1.6 (training cases: 0 to 1)"),
        (
            0,
            0,
            "EMPTY: no structure was found; whole in ml: 0 (training cases: 3 to 4)",
            "EMPTY: no structure was found",
        ),
    ],
)
def test_volumes_outside_those_of_the_training_are_doubted(first, second, whole, core):
    assert doubts(first=first, second=second) == [whole, core]


def test_without_training_cases_an_empty_map_is_doubted_still():
    strange = replace(SCAN, spacing=(99.0, 99.0, 99.0))
    assert doubts(strange, cases=()) == ["", ""]
    assert doubts(strange, 0, 0, cases=()) == ["EMPTY: no structure was found"] * 2


def test_predictions_that_disagree_are_doubted():
    assert doubts(agreement=(0.69, 0.7)) == ["whole: Dice 0.69 between flips or models", ""]
    assert doubts(agreement=(float("nan"), 1.0)) == ["", ""]


def test_the_agreement_of_three_label_maps_by_hand():
    regions = one_region_per_label(("background", "organ", "lesion", "none")).regions
    maps = torch.tensor([[1, 1, 2, 0], [1, 0, 2, 0], [1, 2, 2, 0]], dtype=torch.uint8)
    counts = pair_counts([*maps], regions)
    # Organ: 1 voxel in both of each pair; sizes 2, 1 and 1, each in two pairs. Lesion: 1 in each; sizes 1, 1 and 2.
    assert counts.tolist() == [[3, 8], [3, 8], [0, 0]]
    assert dice_of_counts(counts).tolist()[:2] == [0.75, 0.75]


def test_figures_of_a_run_are_read_or_their_lack_is_said(tmp_path, capsys):
    assert read_figures(tmp_path) == ()
    assert "no figures of training cases" in capsys.readouterr().out
    kept = Fingerprint(("CT",), 2, (1.0, 1.0, 3.0), (9, 9, 9), (9, 9, 9), None, (ONE, OTHER))
    path = tmp_path / "fingerprint.json"
    path.write_text(json.dumps(asdict(kept)))
    assert read_figures(tmp_path) == (ONE, OTHER)
    assert capsys.readouterr().out == ""
    old = {name: value for name, value in asdict(kept).items() if name != "scans"}
    path.write_text(json.dumps(old))
    assert read_figures(tmp_path) == ()
    assert "no figures of training cases" in capsys.readouterr().out
    for wrong in ({"spacing": [1, 2]}, {"volumes_ml": "much"}, {"size": None}):
        path.write_text(json.dumps({**old, "scans": [{**asdict(ONE), **wrong}]}))
        with pytest.raises(ValueError, match=rf"fingerprint\.json: .*scans.*{next(iter(wrong))}.*restore or remove it"):
            read_figures(tmp_path)


def plant(image: np.ndarray, label: np.ndarray, affine: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Scans that are uncertain, each in its own way, made of one that is not: voxels [X, Y, Z] and affine."""
    around = binary_dilation(label, iterations=4)
    slices = int(np.argmax(np.abs(affine[2, :3])))  # the file's axis along the patient
    middle = int(np.median(np.nonzero(label)[slices]))
    below = around & (np.expand_dims(np.arange(label.shape[slices]), [a for a in range(3) if a != slices]) < middle + 3)
    thick = affine @ np.diag([*np.where(np.arange(3) == slices, 3, 1), 1])
    return {
        "empty": (np.where(around, -100, image), affine),
        "volume": (np.where(below, -100, image), affine),
        "spacing": (image, thick),
        "view": (image.take(range(middle - 10, middle + 10), slices), affine),
        "intensity": (image + 1024, affine),
    }


@pytest.mark.slow
def test_planted_uncertain_scans_are_said_and_twenty_ordinary_ones_are_not(tmp_path, capsys):
    """The shipped weights, on phantoms that they have not seen."""
    ordinary = make_phantoms("ct", tmp_path / "data", 20, seed=9)
    run = shutil.copytree(Path(medspeed.__file__).parent / "demo", tmp_path / "run")

    def said(scans: Path, name: str, flips: str = "") -> tuple[dict[str, str], str]:
        given = InferConfig(run, scans, tmp_path / name, device="cpu", backend="torch", overlays=False, flips=flips)
        assert segment_scans(given, load_models([run], "spleen", find_network)).status == 0
        rows = list(csv.DictReader((tmp_path / name / "measurements.csv").read_text().splitlines()))
        return {row["scan"].split(".")[0]: row["uncertain"] for row in rows}, capsys.readouterr().out

    found, lines = said(ordinary / "imagesTr", "ordinary")
    assert len(found) == 20
    assert set(found.values()) == {""}
    assert "UNCERTAIN" not in lines
    assert "SYNTHETIC DATA" in lines

    scan = nibabel.load(ordinary / "imagesTr" / "phantom_000.nii.gz")
    label = np.asarray(nibabel.load(ordinary / "labelsTr" / "phantom_000.nii.gz").dataobj)
    (tmp_path / "planted").mkdir()
    for name, (voxels, affine) in plant(np.asarray(scan.dataobj), label, scan.affine).items():
        nibabel.save(nibabel.Nifti1Image(voxels.astype(np.int16), affine), tmp_path / "planted" / f"{name}.nii.gz")
    found, lines = said(tmp_path / "planted", "found")
    signs = {
        "empty": "EMPTY: no structure was found",
        "volume": "spleen in ml: ",
        "spacing": "spacing along S in mm: ",
        "view": "field of view along S in mm: ",
        "intensity": "percentile 95 of the intensities: ",
    }
    for name, sign in signs.items():
        assert sign in found[name]
        assert f"{name}.nii.gz: UNCERTAIN: {found[name]}, decode" in lines

    summary = json.loads((run / "summary.json").read_text())
    summary["quality"]["value"] = 0.0
    (run / "summary.json").write_text(json.dumps(summary))
    found, lines = said(ordinary / "imagesTr" / "phantom_000.nii.gz", "flipped", flips="x")
    assert "spleen: Dice 0.0" in found["phantom_000"]  # it was not trained on mirror images
    assert "LEARNED NOTHING" in lines
