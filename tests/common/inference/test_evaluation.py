"""The metrics against libraries of the same definition and against the hand; folders, tables and what is refused."""

import csv
import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter
from scipy.spatial import KDTree
from scipy.spatial.distance import dice as dissimilarity
from skimage.measure import regionprops

from medspeed.apps.brats.regions import choose_labelling
from medspeed.common.data.dataset import Case, Dataset, Split
from medspeed.common.data.label_files import write_label
from medspeed.common.data.volumes import Volume
from medspeed.common.inference import evaluation, scores
from medspeed.common.inference.evaluation import evaluate_folders, merged_split, run_evaluation
from medspeed.common.inference.labels import LabelScheme, one_region_per_label
from medspeed.common.inference.options import EvaluateConfig
from medspeed.common.inference.scores import Evaluation, score
from medspeed.models import find_network

SHAPE = (9, 10, 11)
OF_NO_RUN: Any = ("", find_network, lambda dataset: pytest.fail("there is no dataset"))


def volume(voxels: np.ndarray, spacing: Any = (1.0, 1.0, 1.0), name: str = "a.nii.gz") -> Volume:
    affine = np.diag([*spacing, 1.0]) if np.ndim(spacing) == 1 else np.asarray(spacing)
    return Volume(voxels, affine, Path(name))


def one(prediction: np.ndarray, reference: np.ndarray, spacing: Any = (1.0, 1.0, 1.0), tolerance: float = 2.0) -> Any:
    """Return the scores of label 1."""
    (found,) = score(volume(prediction, spacing), volume(reference, spacing), {"it": (1,)}, tolerance)
    assert found.pop("label") == "it"
    return found


def block(*sides: tuple[int, int], shape: tuple[int, int, int] = SHAPE) -> np.ndarray:
    labels = np.zeros(shape, np.uint8)
    labels[tuple(slice(*side) for side in sides)] = 1
    return labels


def random_pair(seed: int) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """Return two masks that look like organs, specks or nets, and a spacing that float32 holds exactly."""
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(4, 20, 3))
    field, noise = (gaussian_filter(rng.standard_normal(shape), rng.uniform(0.4, 2.5)) for _ in range(2))
    other = field + rng.choice([0.0, 0.3, 2.0]) * noise * field.std() / noise.std()
    bounds = rng.uniform(0.2, 0.97, 2)
    masks = [each >= np.quantile(each, bound) for each, bound in zip((field, other), bounds, strict=True)]
    return masks[0].astype(np.uint8), masks[1].astype(np.uint8), rng.choice([0.5, 0.75, 1.0, 1.5, 2.5, 5.0], 3).tolist()


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 200), marks=pytest.mark.slow)], ids=str)
@pytest.mark.filterwarnings("ignore:.*always_return_as_numpy.*:FutureWarning")
def test_metrics_equal_those_of_libraries_on_200_random_shapes(seeds):
    """Dice of MONAI and SciPy, volumes of scikit-image and by count, surface metrics of MONAI."""
    from monai import metrics

    of_monai = {
        "dice": lambda pair, spacing: metrics.DiceMetric()(*pair),
        "nsd": lambda pair, spacing: metrics.compute_surface_dice(
            *pair, [2.0], include_background=True, spacing=spacing
        ),
        "hd95_mm": lambda pair, spacing: metrics.compute_hausdorff_distance(
            *pair, include_background=True, percentile=95, spacing=spacing
        ),
        "assd_mm": lambda pair, spacing: metrics.compute_average_surface_distance(
            *pair, include_background=True, symmetric=True, spacing=spacing
        ),
    }
    for seed in seeds:
        prediction, reference, spacing = random_pair(seed)
        found = one(prediction, reference, spacing)
        pair = [torch.from_numpy(each)[None, None].float() for each in (prediction, reference)]
        due = {name: metric(pair, spacing).item() for name, metric in of_monai.items()}
        assert {name: found[name] for name in due} == pytest.approx(due, rel=1e-5, abs=1e-6), seed  # float32
        assert found["dice"] == pytest.approx(1 - dissimilarity(prediction.ravel() > 0, reference.ravel() > 0))
        for name, mask in (("predicted_ml", prediction), ("reference_ml", reference)):
            (region,) = regionprops(mask, spacing=spacing)
            assert found[name] == pytest.approx(region.area / 1000)
            assert found[name] == pytest.approx(mask.sum() * math.prod(spacing) / 1000)
        assert found["error_ml"] == pytest.approx(found["predicted_ml"] - found["reference_ml"])
        assert found["error_percent"] == pytest.approx(100 * found["predicted_ml"] / found["reference_ml"] - 100)


def test_cubes_that_are_shifted_by_known_millimeters():
    """4 x 4 x 4 voxels of 1 x 2 x 4 mm, one of them a voxel further along y.

    Of the 56 surface voxels of a cube 16 face the gap, 2 mm from the other's side. 4 lie within the other cube, behind
    its face, 1 mm from its surface. 36 are surface of both.
    """
    found = one(block((1, 5), (1, 5), (1, 5)), block((1, 5), (2, 6), (1, 5)), (1.0, 2.0, 4.0), tolerance=1.5)
    assert found["dice"] == pytest.approx(2 * 48 / 128)
    assert found["assd_mm"] == pytest.approx((16 * 2 + 4 * 1) / 56)
    assert found["hd95_mm"] == pytest.approx(2.0)
    assert found["nsd"] == pytest.approx(40 / 56)
    assert one(block((1, 5), (1, 5), (1, 5)), block((1, 5), (2, 6), (1, 5)), (1.0, 2.0, 4.0), 2.0)["nsd"] == 1.0
    assert found["reference_ml"] == found["predicted_ml"] == pytest.approx(64 * 8 / 1000)
    assert (found["error_ml"], found["error_percent"]) == (0.0, 0.0)


@pytest.mark.parametrize(("axis", "spacing"), [(0, 0.7), (1, 1.3), (2, 5.0)])
def test_plates_are_as_far_apart_as_they_are(axis, spacing):
    """Every distance of two plates of one voxel is the same."""
    spacings = np.insert([1.0, 1.0], axis, spacing).tolist()
    plates = np.zeros((2, *SHAPE), np.uint8)
    for plate, place in zip(plates, (2, 6), strict=True):
        np.moveaxis(plate, axis, 0)[place] = 1
    found = one(plates[0], plates[1], spacings, 4 * spacing - 0.01)
    assert (found["dice"], found["nsd"]) == (0.0, 0.0)
    assert (found["hd95_mm"], found["assd_mm"]) == pytest.approx((4 * spacing, 4 * spacing))
    assert one(plates[0], plates[1], spacings, 4 * spacing)["nsd"] == 1.0


def test_a_tolerance_of_one_voxel_holds_for_spacings_as_files_hold_them():
    exact = float(np.float32(0.8))  # a little more than 0.8
    assert exact > 0.8
    assert one(block((1, 2), (1, 2), (1, 2)), block((2, 3), (1, 2), (1, 2)), (exact, 1.0, 1.0), 0.8)["nsd"] == 1.0


def test_the_percentile_is_the_larger_of_the_two_directions():
    """A speck far away is 1 of the prediction's 11 voxels; the reference has nothing that lies as far from it."""
    reference, prediction = (
        block((0, 10), (2, 3), (2, 3), shape=(10, 10, 50)),
        block((0, 10), (2, 3), (2, 3), shape=(10, 10, 50)),
    )
    prediction[0, 2, 42] = 1
    found = one(prediction, reference)
    assert found["hd95_mm"] == pytest.approx(np.percentile([0] * 10 + [40], 95)) == pytest.approx(20.0)
    assert one(reference, prediction)["hd95_mm"] == found["hd95_mm"]
    assert found["assd_mm"] == pytest.approx(40 / 21)


@pytest.mark.parametrize("seed", range(4))
def test_of_large_surfaces_a_part_of_both_is_measured(seed, monkeypatch):
    field = gaussian_filter(np.random.default_rng(seed).standard_normal((60, 60, 60)), 1.0)
    noise, ball = (field > 0).astype(np.uint8), block((20, 40), (20, 40), (20, 40), shape=(60, 60, 60))
    whole = one(noise, ball)
    asked: list[int] = []

    class Tree(KDTree):
        def query(self, x: Any, *rest: Any, **options: Any) -> Any:
            asked.append(len(x))
            return super().query(x, *rest, **options)

    monkeypatch.setattr(scores, "KDTree", Tree)
    monkeypatch.setattr(scores, "_MOST_POINTS", 10_000)
    part = one(noise, ball)
    assert 10_000 > max(asked) > 5_000
    assert part == pytest.approx(whole, rel=0.03)
    assert part != whole


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 0, 2)])
def test_the_files_axes_do_not_matter(order):
    prediction, reference, spacing = random_pair(3)
    turned = np.eye(4)
    turned[:3, :3] = np.diag(spacing)[:, order]
    turned[:, 0] *= -1  # and one of them runs the other way
    there = one(prediction.transpose(order), reference.transpose(order), turned)
    assert there == pytest.approx(one(prediction, reference, spacing))


def test_a_sheared_grid_is_measured_as_it_lies():
    tilted = np.diag([1.0, 1.0, 3.0, 1.0])
    tilted[1, 2] = 4.0  # a slice further is 3 mm up and 4 mm back
    found = one(block((1, 2), (5, 6), (1, 2)), block((1, 2), (5, 6), (2, 3)), tilted)
    assert found["hd95_mm"] == found["assd_mm"] == pytest.approx(5.0)
    assert found["reference_ml"] == pytest.approx(0.003)


def test_the_grid_around_changes_nothing():
    prediction, reference, spacing = random_pair(5)
    found, true = (np.pad(each, ((3, 1), (0, 7), (2, 2))) for each in (prediction, reference))
    assert one(found, true, spacing) == pytest.approx(one(prediction, reference, spacing))


def test_empty_masks_have_the_values_that_the_help_promises():
    some, none = block((1, 3), (1, 3), (1, 3)), np.zeros(SHAPE, np.uint8)
    diagonal = pytest.approx(math.hypot(9 * 1.0, 10 * 2.0, 11 * 3.0))
    missed, invented, nothing = (
        one(found, true, (1.0, 2.0, 3.0)) for found, true in ((none, some), (some, none), (none, none))
    )
    for found in (missed, invented):
        assert (found["dice"], found["nsd"], found["f1"]) == (0.0, 0.0, 0.0)
        assert found["hd95_mm"] == found["assd_mm"] == diagonal
    assert missed["error_percent"] == -100.0
    assert (missed["sensitivity"], missed["precision"]) == (0.0, None)
    assert (invented["sensitivity"], invented["precision"], invented["error_percent"]) == (None, 0.0, None)
    assert [name for name, value in nothing.items() if value is None] == [
        "dice", "nsd", "hd95_mm", "assd_mm", "error_percent", "sensitivity", "precision", "f1"
    ]  # fmt: skip
    assert nothing["reference_ml"] == nothing["predicted_ml"] == nothing["predicted_components"] == 0


def test_components_are_found_from_a_tenth_on():
    reference, prediction = np.zeros((2, 30, 12), np.uint8)[:, :, :, None]
    reference[0:10, 1], reference[0:10, 4], reference[20:25, 4] = 1, 1, 1  # three, of 10, 10 and 5 voxels
    prediction[0:1, 1] = 1  # a tenth of the first
    prediction[20:30, 4] = 1  # all of the third, and half beside it
    prediction[0:11, 8], prediction[12:14, 8] = 1, 1  # two that are nowhere
    found = one(prediction, reference)
    assert (found["reference_components"], found["found_components"]) == (3, 2)
    assert (found["predicted_components"], found["true_components"]) == (4, 2)
    assert (found["sensitivity"], found["precision"], found["f1"]) == (2 / 3, 2 / 4, 4 / 7)
    reference[10, 1] = 1  # now it is less than a tenth of the first, but all of the predicted one lies in it
    found = one(prediction, reference)
    assert (found["found_components"], found["true_components"]) == (1, 2)


def test_voxels_that_share_a_corner_are_one_component():
    diagonal = np.zeros((3, 3, 3), np.uint8)
    diagonal[range(3), range(3), range(3)] = 1
    assert one(diagonal, diagonal)["reference_components"] == 1


def test_regions_overlap_and_numbers_speak_for_themselves():
    reference, prediction = block((1, 5), (1, 5), (1, 5)), block((1, 5), (1, 5), (1, 5))
    reference[1:3, 1:5, 1:5], prediction[1:3, 1:3, 1:5] = 4, 4
    whole, core = score(volume(prediction), volume(reference), {"WT": (1, 4), "ET": (4,)}, 2.0)
    assert (whole["label"], whole["dice"]) == ("WT", 1.0)
    assert (core["label"], core["dice"]) == ("ET", pytest.approx(2 * 16 / (16 + 32)))
    by_number = score(volume(prediction), volume(reference), None, 2.0)
    assert [each["label"] for each in by_number] == ["1", "4"]
    assert by_number[1] == {**core, "label": "4"}
    prediction[0, 0, 0], reference[8, 9, 10] = 7, 9  # one is found alone, the other due alone
    by_number = score(volume(prediction), volume(reference), None, 2.0)
    assert [(each["label"], each["predicted_ml"] > 0) for each in by_number[2:]] == [("7", True), ("9", False)]
    assert score(volume(np.zeros(SHAPE, np.uint8)), volume(np.zeros(SHAPE, np.uint8)), None, 2.0) == []


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float32, np.float64])
def test_label_maps_may_be_of_any_type(dtype):
    prediction, reference, spacing = random_pair(7)
    assert one(prediction.astype(dtype), reference, spacing) == one(prediction, reference, spacing)


@pytest.mark.parametrize("value", [0.5, -1.0, 300.0])
def test_what_is_no_label_is_refused_by_name(value):
    voxels = np.zeros(SHAPE, np.float32)
    voxels[4, 4, 4] = value
    with pytest.raises(ValueError, match=rf"probabilities.nii: expected label values 0 to 255, found .*{value:g}"):
        score(volume(voxels, name="probabilities.nii"), volume(block((1, 5), (1, 5), (1, 5))), None, 2.0)


def write(folder: Path, name: str, labels: np.ndarray, spacing: tuple[float, ...] = (1.0, 1.0, 2.0)) -> None:
    folder.mkdir(exist_ok=True)
    write_label(folder / name, np.asfortranarray(labels), np.diag([*spacing, 1.0]))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two cases that can be compared, one whose prediction is missing, and predictions that are refused."""
    found, true = tmp_path / "found", tmp_path / "true"
    cube = block((1, 5), (1, 5), (1, 5))
    for name in ("a.nii.gz", "=b.nii", "missing.nii.gz", "shape.nii.gz", "affine.nii.gz", "broken.nii.gz"):
        write(true, name, cube)
    write(found, "a.nii.gz", cube)
    write(found, "=b.nii.gz", block((1, 5), (2, 6), (1, 5)))
    write(found, "shape.nii.gz", block((1, 5), (1, 5), (1, 5), shape=(9, 10, 12)))
    write(found, "affine.nii.gz", cube, (1.0, 1.0, 3.0))
    (found / "broken.nii.gz").write_bytes(b"\x1f\x8b")
    write(found, "extra.nii.gz", cube)
    write(found, "other.nii", cube)
    (found / "._a.nii.gz").write_bytes(b"macOS")
    return found, true


def test_folders_are_matched_by_name_and_nothing_is_dropped_silently(folders):
    found = evaluate_folders(folders[0], folders[1], {"cube": (1,)})
    assert list(found.cases) == ["=b", "a"]
    assert found.missing == ["missing"]
    assert found.extra == ["extra", "other"]
    assert set(found.refused) == {"shape", "affine", "broken"}
    assert "shape.nii.gz is not on the grid of its reference" in found.refused["shape"]
    assert "(9, 10, 12)" in found.refused["shape"]
    assert "affine.nii.gz is not on the grid of its reference" in found.refused["affine"]
    assert "broken.nii.gz" in found.refused["broken"]
    assert found.summary["cube"]["dice"]["mean"] == pytest.approx((1.0 + 0.75) / 2)


def test_tables_hold_every_case_and_the_means(folders, capsys):
    found = run_evaluation(
        EvaluateConfig(folders[0], folders[1], labels=("cube=1", "none=7+9"), tolerance=0.5), *OF_NO_RUN
    )
    assert found.status == 1
    with (folders[0] / "evaluation.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["case"], row["label"]) for row in rows] == [
        ("'=b", "cube"),
        ("'=b", "none"),
        ("a", "cube"),
        ("a", "none"),
    ]
    assert float(rows[0]["dice"]) == 0.75
    assert float(rows[0]["nsd"]) == pytest.approx(36 / 56)
    assert (rows[1]["dice"], rows[1]["reference_ml"]) == ("", "0.0")
    content = json.loads((folders[0] / "evaluation.json").read_text())
    assert content["tolerance_mm"] == 0.5
    assert (content["missing"], content["extra"]) == (["missing"], ["extra", "other"])
    assert set(content["refused"]) == {"shape", "affine", "broken"}
    assert content["cases"]["a"][0]["dice"] == 1.0
    dice = content["summary"]["cube"]["dice"]
    assert dice == {"cases": 2, "mean": 0.875, "low": 0.75, "high": 1.0, "median": 0.875}
    assert content["summary"]["none"]["dice"] == {"cases": 0}
    said = capsys.readouterr().out
    assert "missing: left out of the means: MISSING prediction" in said
    assert "affine: left out of the means:" in said
    assert "2 predictions without a reference, not evaluated: extra, other\n" in said
    assert "2 cases  dice 0.875 [0.750, 1.000]  nsd " in said
    assert "none" in said


def test_a_case_that_memory_does_not_hold_costs_no_other(folders, monkeypatch):
    def compare(prediction: Volume, *rest: Any) -> Any:
        if prediction.path.name == "a.nii.gz":
            raise MemoryError
        return score(prediction, *rest)

    monkeypatch.setattr(evaluation, "score", compare)
    found = evaluate_folders(folders[0], folders[1], {"cube": (1,)})
    assert list(found.cases) == ["=b"]
    assert "out of memory" in found.refused["a"]


def test_a_missing_case_and_a_refused_one_are_each_a_failure():
    given: tuple[dict[str, Any], ...] = ({}, {"missing": ["a"]}, {"refused": {"a": "damaged"}})
    assert [Evaluation(2.0, {}, **each).status for each in given] == [0, 1, 1]


def test_predictions_without_a_reference_are_listed_and_no_failure(folders, capsys):
    found, true = folders
    for name in ("missing", "shape", "affine", "broken"):
        (true / f"{name}.nii.gz").unlink()
    output = found.parent / "tables"
    assert run_evaluation(EvaluateConfig(found, true, labels=("cube=1",), output=output), *OF_NO_RUN).status == 0
    assert {path.name for path in output.iterdir()} == {"evaluation.csv", "evaluation.json"}
    said = capsys.readouterr().out
    assert "5 predictions without a reference, not evaluated: affine, broken, extra, other, shape\n" in said


def test_a_dataset_above_the_references_names_the_labels(folders, capsys, monkeypatch):
    found, true = folders
    write(true.parent / "images", "a.nii.gz", block((1, 5), (1, 5), (1, 5)))
    entry = {"image": "images/a.nii.gz", "label": "true/a.nii.gz"}
    content = {"name": "x", "modality": {"0": "CT"}, "labels": {"0": "background", "1": "liver"}, "training": [entry]}
    (true.parent / "dataset.json").write_text(json.dumps(content))

    def labelling(dataset: Any) -> LabelScheme:
        return one_region_per_label(dataset.labels)

    assert run_evaluation(EvaluateConfig(found, true), "", find_network, labelling).status == 1
    assert "liver " in capsys.readouterr().out
    monkeypatch.chdir(true)
    run_evaluation(EvaluateConfig(found.absolute(), Path()), "", find_network, labelling)
    assert "liver " in capsys.readouterr().out
    (true.parent / "dataset.json").unlink()
    assert run_evaluation(EvaluateConfig(found, true), "", find_network, labelling).status == 1
    assert "\n1 " in capsys.readouterr().out


def test_nothing_to_compare_is_an_error_that_says_why(folders):
    found, true = folders
    empty = found.parent / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"none of 6 references .* can be evaluated: no prediction has the name"):
        evaluate_folders(empty, true)
    with pytest.raises(ValueError, match="0 references"):
        evaluate_folders(found, empty)
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder"):
        evaluate_folders(found, found.parent / "nowhere")
    for name in ("a", "=b"):
        (found / f"{name}.nii.gz").unlink()
    with pytest.raises(ValueError, match=r"can be evaluated: .*affine\.nii\.gz is not on the grid"):
        evaluate_folders(found, true)


def test_other_files_are_passed_over_and_a_name_given_twice_is_refused(folders):
    found, true = folders
    (true / "a.nii.gz.md5").write_text("0")
    assert sorted(evaluate_folders(found, true).cases) == ["=b", "a"]
    write(true, "a.nii", block((1, 5), (1, 5), (1, 5)))
    with pytest.raises(ValueError, match="have one name but for the suffix"):
        evaluate_folders(found, true)


@pytest.mark.parametrize("numbers", [(0,), (0, 1), (300,)])
def test_the_background_is_no_structure(numbers, folders):
    found, true = folders
    with pytest.raises(ValueError, match=r"labels \[(0|300)\]: must be from 1 to 255"):
        evaluate_folders(found, true, {"it": numbers})


def test_every_case_has_a_row_of_each_structure(folders):
    """Whether the structures are named or found: those that a case lacks have a volume of 0, and count as such."""
    found, true = folders
    for folder in folders:
        write(folder, "empty.nii.gz", np.zeros(SHAPE, np.uint8))
    named, every = evaluate_folders(found, true, {"1": (1,)}), evaluate_folders(found, true)
    assert every.cases == named.cases
    assert every.summary["1"]["reference_ml"]["cases"] == 3
    assert every.summary["1"]["dice"]["cases"] == 2


def test_a_dataset_without_its_images_does_not_lose_the_names_of_labels(folders):
    found, true = folders
    entry = {"image": "images/a.nii.gz", "label": "true/a.nii.gz"}
    content = {"name": "x", "modality": {"0": "CT"}, "labels": {"0": "background", "1": "liver"}, "training": [entry]}
    (true.parent / "dataset.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"or name the structures, such as --labels liver=1"):
        run_evaluation(EvaluateConfig(found, true), *OF_NO_RUN)
    assert run_evaluation(EvaluateConfig(found, true, labels=("liver=1",)), *OF_NO_RUN).summary["liver"]


def test_intervals_are_seeded_and_hold_the_mean():
    values = np.random.default_rng(1).random(40).tolist()
    found = Evaluation(2.0, {str(number): [{"label": "x", "dice": value}] for number, value in enumerate(values)})
    dice = found.summary["x"]["dice"]
    assert dice["mean"] == pytest.approx(np.mean(values))
    assert dice["median"] == pytest.approx(np.median(values))
    error = np.std(values) / math.sqrt(40)
    assert dice["mean"] - dice["low"] == pytest.approx(1.96 * error, rel=0.15)
    assert dice["high"] - dice["mean"] == pytest.approx(1.96 * error, rel=0.15)
    assert Evaluation(2.0, found.cases).summary == found.summary


@pytest.mark.parametrize(
    "given", [{}, {"predictions": Path("a")}, {"model": Path("a"), "references": Path("b")}, {"data": Path("a")}]
)
def test_what_is_compared_must_be_two_things(given):
    with pytest.raises(ValueError, match="expected --predictions and --references, or --model and --data, found"):
        EvaluateConfig(**given)


def test_no_network_is_named_where_no_model_runs():
    with pytest.raises(ValueError, match=r"network mine:net: only with --model"):
        EvaluateConfig(Path("a"), Path("b"), network="mine:net")


@pytest.mark.parametrize("tolerance", [-1.0, float("inf"), float("nan")])
def test_the_tolerance_has_bounds(tolerance):
    with pytest.raises(ValueError, match=r"tolerance .*: must be a distance in mm"):
        EvaluateConfig(Path("a"), Path("b"), tolerance=tolerance)


def test_each_structure_has_a_name_of_its_own():
    with pytest.raises(ValueError, match=r"labels A=1 A=2: must have a name of its own"):
        EvaluateConfig(Path("a"), Path("b"), labels=("A=1", "A=2"))


@pytest.mark.parametrize("wrong", ["WT", "WT=", "=1", "WT=1,2", "WT=-1", "WT=1+"])
def test_labels_have_a_name_and_numbers(wrong):
    with pytest.raises(ValueError, match=r"labels .*: must be NAME=NUMBER"):
        EvaluateConfig(Path("a"), Path("b"), labels=("ET=3", wrong))


@pytest.mark.parametrize(
    "kind", ["validation", "trained on", "another", "another name", "another before", "fewer", "another, none"]
)
def test_a_run_is_evaluated_on_what_it_has_not_seen_of_its_dataset(kind, folders, monkeypatch, capsys):
    """Of another dataset every case is evaluated."""
    found, true = folders
    run, output = true.parent / "run", true.parent / "output"
    names = ["a", "=b", "missing"]
    entries = []
    for name in names:
        label = next(true.glob(f"{name}.nii*"))
        write(true.parent / "images", f"{name}.nii.gz", block((1, 5), (1, 5), (1, 5)))
        entries.append({"image": f"images/{name}.nii.gz", "label": f"true/{label.name}"})
    content = {"name": "x", "modality": {"0": "CT"}, "labels": {"0": "background", "1": "liver"}, "training": entries}
    (true.parent / "dataset.json").write_text(json.dumps(content))
    training, validation = {
        "validation": (["=b", "missing"], ["a"]), "trained on": (["a"], ["a"]), "another": (["c"], ["d"]),
        "another name": (["=b", "missing"], ["a"]),  # of a dataset with cases of the same names
        "another before": (["c"], ["d"]),  # the weights that it began with had them
        "another, none": ([], []),  # as of weights from elsewhere
        "fewer": (["=b", "gone"], ["a"]),  # of its own dataset, which has lost a case
    }[kind]  # fmt: skip
    split: dict[str, Any] = {"training": training, "validation": validation, "held_out": kind != "trained on"}
    split |= {"trained_before": ["a"]} if kind == "another before" else {}
    run.mkdir()
    if kind != "another, none":
        (run / "split.json").write_text(json.dumps(split))
    own = {"name": "y" if kind == "another name" else "x", "folder": str(true.parent)}
    (run / "summary.json").write_text(json.dumps({"data": own}))

    def segment(config: Any, model: Any, scans: list[Path]) -> None:
        output.mkdir()
        for scan in scans:
            if scan.name != "missing.nii.gz":
                (output / scan.name).write_bytes((found / scan.name).read_bytes())

    model = SimpleNamespace(labelling=one_region_per_label(("background", "liver")), modality=())
    monkeypatch.setattr(evaluation, "load_models", lambda *_: model)
    monkeypatch.setattr(evaluation, "segment_scans", segment)
    if kind == "fewer":
        with pytest.raises(ValueError, match=r"not among the labelled cases|not among the labeled cases"):
            run_evaluation(EvaluateConfig(model=run, data=true.parent, output=output), *OF_NO_RUN)
        return
    result = run_evaluation(EvaluateConfig(model=run, data=true.parent, output=output), *OF_NO_RUN)
    assert sorted(result.cases) == (["=b", "a"] if "another" in kind else ["a"])
    assert result.missing == (["missing"] if "another" in kind else [])
    said = capsys.readouterr().out
    assert ("the 1 validation cases of the run" in said) == ("another" not in kind)
    assert ("NOT HELD OUT" in said) == (kind in ("trained on", "another name", "another before"))
    assert ("may be among them" in said) == (kind == "another, none")


BRATS = ("background", "edema", "non-enhancing tumor", "enhancing tumor")
CHANNELS = ("FLAIR", "T1w", "t1gd", "T2w")


def tumour(labels: tuple[str, ...] = BRATS, modality: tuple[str, ...] = CHANNELS) -> Dataset:
    return Dataset(Path("set"), "x", modality, labels, (), (), False)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (("background", "necrotic core", "edema", "enhancing tumor"), "set: its labels are background, necrotic core,"),
        ((*BRATS[:3], "", "enhancing tumor"), "set: its labels are .* pass --labels"),
        (("background", "one", "two", "three"), None),
        (("background", "one", "two", "", "three"), "set: its labels are .* pass --labels"),
        (("bg", "Oedema", "NCR", "ET"), ""),
        (("background", "edema", "non-enhancing_tumour", "Enhancing Tumour"), ""),
    ],
)
@pytest.mark.parametrize("regions", ["names", "labels"])
def test_a_dataset_in_which_numbers_mean_something_else_is_refused(labels, said, regions, capsys):
    """Names that are not known are told, others by which the numbers mean the same are taken."""
    model: Any = SimpleNamespace(labelling=choose_labelling(tumour(), regions), modality=CHANNELS)
    names = partial(choose_labelling, regions="names")
    if said:
        with pytest.raises(ValueError, match=said):
            evaluation._check_labels(tumour(labels), model, names)
    else:
        evaluation._check_labels(tumour(labels), model, names)
        assert ("equal numbers are taken for equal structures" in capsys.readouterr().out) == (said is None)


def test_organs_by_other_names_are_taken_and_told_unless_they_changed_places(capsys):
    organs = [("background", "liver", "left kidney"), ("bg", "Liver", "left_kidney"), ("", "Leber", "left kidney")]

    def labelling(dataset: Dataset) -> LabelScheme:
        return one_region_per_label(dataset.labels)

    model: Any = SimpleNamespace(labelling=one_region_per_label(organs[0]))
    for names, told in zip(organs[1:], (False, True), strict=True):
        evaluation._check_labels(tumour(names), model, labelling)
        assert ("equal numbers are taken for equal structures" in capsys.readouterr().out) == told
    with pytest.raises(
        ValueError, match="its labels are background, left kidney, liver, the model's background, liver"
    ):
        evaluation._check_labels(tumour(("background", "left kidney", "liver")), model, labelling)


@pytest.mark.parametrize(
    ("due", "found", "taken"),
    [
        (CHANNELS, ("flair", "t1", "t1ce", "t2"), True),
        (CHANNELS, ("T2f", "T1n", "T1c", "T2w"), True),
        (CHANNELS, ("T2w", "t1gd", "T1w", "FLAIR"), False),
        (CHANNELS, CHANNELS[:3], False),
        (("T2 sag", "T2 cor"), ("t2 Sag", "T2 cor"), True),
        (("T2 sag", "T2 cor"), ("T2 cor", "T2 sag"), False),
        ((), CHANNELS, True),  # of files that do not name them
    ],
)
def test_a_dataset_whose_channels_are_others_is_refused(due, found, taken, capsys):
    model: Any = SimpleNamespace(modality=due)
    if taken:
        evaluation._check_channels(tumour(modality=found), model)
        assert ("in this order: FLAIR, T1w, t1gd, T2w" in capsys.readouterr().out) == (not due)
    else:
        with pytest.raises(ValueError, match=r"set: its channels are .*, the model's .*: reorder them"):
            evaluation._check_channels(tumour(modality=found), model)


def test_a_number_that_the_dataset_does_not_list_is_no_background(folders):
    """Of a scheme; structures that are named by the user leave the others out."""
    found, true = folders
    strange = block((1, 5), (1, 5), (1, 5))
    strange[0, 0, 0] = 4
    write(true, "a.nii.gz", strange)
    result = evaluate_folders(found, true, one_region_per_label(("background", "cube")))
    assert "a.nii.gz: expected label values 0, 1, found 0, 1, 4" in result.refused["a"]
    assert "a" in evaluate_folders(found, true, {"cube": (1,)}).cases


def test_several_models_are_judged_on_what_none_was_trained_on():
    a, b, c, d = (Case(name, Path(name), Path(name)) for name in "abcd")
    first, second = Split((c, d), (a, b), True, ""), Split((a, d), (b, c), True, "")
    assert merged_split([first]) == first
    merged = merged_split([first, second])
    assert (merged.training, merged.validation, merged.held_out) == ((a, c, d), (b,), True)
    folds = merged_split([Split((b,), (a,), True, ""), Split((a,), (b,), True, "")])
    assert (folds.training, folds.validation, folds.held_out) == ((a, b), (a, b), False)
    assert not merged_split([first, Split((a, b), (a, b), False, "")]).held_out
    assert not merged_split([first, Split((d,), (b,), False, "")]).held_out  # --init has seen b


def test_numbers_of_no_structure_are_told_since_they_may_be_voxels_that_nobody_annotated(tmp_path, capsys):
    labels = block((1, 5), (1, 5), (1, 5))
    labels[5, 6, 6] = 4
    write(tmp_path / "found", "a.nii", labels)
    labels[5, 6, 6], labels[6, 6, 6], labels[6, 6, 7] = 0, 5, 255
    write(tmp_path / "true", "a.nii", labels)
    evaluate_folders(tmp_path / "found", tmp_path / "true", {"cube": (1,)})
    assert "labels 4, 5, 255 of the files belong to no structure and count as background" in capsys.readouterr().out
    evaluate_folders(tmp_path / "found", tmp_path / "true", {"cube": (1,), "other": (4, 5, 255)})
    evaluate_folders(tmp_path / "found", tmp_path / "true")
    assert "belong to no structure" not in capsys.readouterr().out


def test_as_many_cases_are_compared_at_a_time_as_half_of_the_memory_holds(tmp_path, monkeypatch):
    """A voxel takes two float64 and two flags, 18 bytes; the largest scan decides, one that is no scan does not."""
    for name, size in (("a.nii.gz", 10), ("b.nii.gz", 20)):
        write(tmp_path, name, np.zeros((size, 10, 10), np.uint8))
    bad = tmp_path / "c.nii.gz"
    bad.write_bytes(b"no scan")
    pairs = {file.name: (file, file) for file in (*tmp_path.glob("[ab]*"), bad)}
    monkeypatch.setattr(evaluation, "usable_cores", lambda: 4)
    for held, workers in ((3, 3), (9, 4), (0.5, 1)):
        monkeypatch.setattr(evaluation, "free_memory", lambda: int(2 * held * 18 * 2000))  # noqa: B023
        assert evaluation._workers(pairs) == workers
