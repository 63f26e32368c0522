"""Label maps against references: the metrics of every case, in parallel, their means with intervals, and the tables."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.ndimage import find_objects
from scipy.spatial import KDTree

from medspeed.common.console import say
from medspeed.common.data.dataset import Dataset, read_dataset, read_split
from medspeed.common.data.geometry import box_above
from medspeed.common.data.preparation import label_map
from medspeed.common.data.threads import map_in_threads
from medspeed.common.data.volumes import Volume, check_same_grid, read_volume
from medspeed.common.files import printable, write_json
from medspeed.common.inference.folder_job import BAD_INPUT
from medspeed.common.inference.labels import LabelScheme
from medspeed.common.inference.measure import connected_components, write_measures
from medspeed.common.inference.model import VolumeModel
from medspeed.common.inference.options import EvaluateConfig, InferConfig
from medspeed.common.inference.scans import segment_scans, stem_of

Labels = Mapping[str, Sequence[int]]
"""Structures by name, each with the label numbers that make it up; they may overlap, as the regions of a tumor do."""
Scores = dict[str, Any]
"""Name ("label") and metrics (see `options.DEFINITIONS`) of a structure in a case; None for an undefined one."""

_ROUNDING = 1e-5  # mm by which a distance may exceed the tolerance: affines are stored as float32
_OVERLAP = 0.1  # of a component's voxels that the other mask must cover
_INTERVAL = "95 percent, percentile bootstrap of the mean, 2000 resamples of the cases, seed 0"
_MEAN, _SHOWN = "{mean:.3f} [{low:.3f}, {high:.3f}]", ("dice", "nsd", "hd95_mm", "error_percent")


@dataclass(frozen=True)
class Evaluation:
    """Label maps compared with their references.

    Attributes:
        tolerance_mm: of the NSD.
        cases: metrics of each structure, by case.
        missing: references without a prediction.
        refused: why a case could not be compared, by name.
    """

    tolerance_mm: float
    cases: Mapping[str, Sequence[Scores]]
    missing: Sequence[str] = ()
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def status(self) -> int:
        """Exit status of the program: 1 where a case is missing or was refused, else 0."""
        return 1 if self.missing or self.refused else 0

    @cached_property
    def summary(self) -> dict[str, dict[str, dict[str, float]]]:
        """Mean with its 95 percent interval, median and number of cases, by structure and metric."""
        rows = [each for scores in self.cases.values() for each in scores]
        by_label = {each["label"]: [row for row in rows if row["label"] == each["label"]] for each in rows}
        return {
            label: {metric: _statistics([row[metric] for row in some]) for metric in some[0] if metric != "label"}
            for label, some in by_label.items()
        }

    def write(self, folder: Path) -> None:
        """Write `evaluation.csv`, a row for each case and structure, and `evaluation.json`, with the summary."""
        columns = next((list(scores[0]) for scores in self.cases.values() if scores), ["label"])
        write_measures(folder / "evaluation.csv", self.cases, columns, key="case")
        write_json(folder / "evaluation.json", {"interval": _INTERVAL, "summary": self.summary, **asdict(self)})


def evaluate_folders(
    predictions: Path, references: Path, labels: Labels | None = None, *, tolerance: float = 2.0
) -> Evaluation:
    """Compare the label maps (.nii.gz, .nii) of two folders, matched by name, on all cores.

    Args:
        predictions: folder of label maps.
        references: folder of label maps.
        labels: structures by name, each with its label numbers: {"WT": (1, 2, 3)}; None takes every number.
        tolerance: of the NSD, mm.

    Raises:
        ValueError: no case can be compared; says why.
    """
    found, true = (
        {stem_of(file): file for file in sorted(folder.glob("[!.]*.nii*"))} for folder in (predictions, references)
    )
    pairs = {name: (found.get(name, predictions / name), file) for name, file in true.items()}
    return evaluate_files(pairs, labels, tolerance)


def evaluate_files(pairs: Mapping[str, tuple[Path, Path]], labels: Labels | None, tolerance: float) -> Evaluation:
    """Compare the prediction with the reference of each case, by its name; see `evaluate_folders`."""

    def compare(name: str) -> list[Scores] | str:
        try:
            prediction, reference = map(read_volume, pairs[name])
            return score(prediction, reference, labels, tolerance)
        except BAD_INPUT as error:
            return str(error)

    names = [name for name, (prediction, _) in pairs.items() if prediction.is_file()]
    results = dict(zip(names, map_in_threads(compare, names, "evaluate"), strict=True))
    refused = {name: found for name, found in results.items() if isinstance(found, str)}
    cases = {name: found for name, found in results.items() if not isinstance(found, str)}
    if not cases:
        why = next(iter(refused.values()), "no prediction has the name of a reference")
        raise ValueError(f"{len(pairs)} references (.nii.gz, .nii), of which none can be evaluated: {why}")
    return Evaluation(tolerance, cases, sorted(pairs.keys() - {*names}), refused)


def run_evaluation(
    config: EvaluateConfig, model: VolumeModel | None, labelling: Callable[[Dataset], LabelScheme]
) -> Evaluation:
    """Evaluate two folders, or the run of a model; write the tables, and print the means.

    `labelling` makes structures of the labels of the dataset whose folder holds the references.
    """
    source, truth = config.predictions or config.model or Path(), config.references or config.data or Path()
    output = config.output or (source / "evaluation" if model else source)
    pairs = (each.rpartition("=") for each in config.labels)
    labels: Labels | None = {name: [*map(int, numbers.split("+"))] for name, _, numbers in pairs}
    if model is not None:
        files = _segmented(source, truth, output, model)
        found = evaluate_files(files, labels or structures(model.labelling), config.tolerance)
    else:
        try:
            labels = labels or structures(labelling(read_dataset(truth.parent)))
        except BAD_INPUT as error:
            labels = None
            say(printable(f"evaluating each label number; --labels names structures ({error})"))
        found = evaluate_folders(source, truth, labels, tolerance=config.tolerance)
    found.write(output)
    for name, why in {**found.refused, **dict.fromkeys(found.missing, "MISSING prediction")}.items():
        say(printable(f"{name}: left out of the means: {why}"), "warning")
    say(f"means with 95 percent intervals, nsd at {config.tolerance:g} mm; each case: {output / 'evaluation.csv'}")
    for label, each in found.summary.items():
        means = (f"{name} {_MEAN.format(**each[name])}" for name in _SHOWN if each[name]["cases"])
        say(printable(f"{label:12} {each['dice']['cases']:4} cases  {'  '.join(means)}"), "result")
    return found


def structures(scheme: LabelScheme) -> Labels:
    """Return the structures of a scheme with their label numbers."""
    return {region.name: region.members for region in scheme.regions}


def _segmented(run: Path, data: Path, output: Path, model: VolumeModel) -> dict[str, tuple[Path, Path]]:
    """Segment the labeled cases of a dataset; of the one that a run was trained on, the validation cases."""
    dataset = read_dataset(data)
    cases = dataset.cases
    with suppress(ValueError, FileNotFoundError):  # another dataset's, or a run that was imported
        split = read_split(dataset, run / "split.json")
        cases, held_out = split.validation, "" if split.held_out else ", NOT HELD OUT: they were trained on"
        say(f"the {len(cases)} validation cases of the run{held_out}", "warning" if held_out else "note")
    segment_scans(InferConfig(run, data, output, overlays=False), model, [case.image for case in cases])
    return {case.name: (output / case.image.name, case.label) for case in cases if case.label}


def score(prediction: Volume, reference: Volume, labels: Labels | None, tolerance: float) -> list[Scores]:
    """Compare two label maps [X, Y, Z] on one grid, structure by structure; see `evaluate_folders`.

    Raises:
        ValueError: the grids differ, or a value is no label; names the file.
    """
    check_same_grid(reference, prediction, "reference")
    occupied = np.logical_or(prediction.voxels.T, reference.voxels.T).view(np.uint8)  # [z, y, x], as a file lies
    z, y, x = (slice(*each) for each in box_above(torch.from_numpy(occupied)[None], 0) or ((0, 0),) * 3)
    crops = (replace(each, voxels=each.voxels[x, y, z]) for each in (prediction, reference))
    maps = [np.ascontiguousarray(label_map(each, range(256)).T) for each in crops]
    objects = [dict(enumerate(find_objects(each) if each.size else (), start=1)) for each in maps]
    if labels is None:
        labels = {str(number): (number,) for number in range(1, 256) if any(each.get(number) for each in objects)}
    diagonal = float(np.linalg.norm(np.linalg.norm(reference.affine[:3, :3], axis=0) * reference.voxels.shape))
    scores = []
    for name, members in labels.items():
        # A structure is looked at in its own box: there may be a hundred of them.
        places = [place for each in objects for number in members if (place := each.get(number))]
        axes = zip(*(places or [(slice(0, 1),) * 3]), strict=True)
        box = tuple(slice(min(each.start for each in axis), max(each.stop for each in axis)) for axis in axes)
        one, other = (np.logical_or.reduce([each[box] == number for number in members]) for each in maps)
        scores.append({"label": name, **_score(one, other, reference.affine[:3, 2::-1], diagonal, tolerance)})
    return scores


def _score(
    prediction: np.ndarray, reference: np.ndarray, matrix: np.ndarray, diagonal: float, tolerance: float
) -> Scores:
    """Return the metrics of masks [A, B, C] that hold all of a structure; a step along an axis makes `matrix` mm."""
    predicted, true, both = (int(np.count_nonzero(mask)) for mask in (prediction, reference, prediction & reference))
    nsd, hd95, assd = (0.0, diagonal, diagonal) if predicted or true else (None,) * 3
    if predicted and true:
        distances = _surface_distances(prediction, reference, matrix)
        every = np.concatenate(distances)
        nsd, assd = float((every <= tolerance + _ROUNDING).mean()), float(every.mean())
        hd95 = max(float(np.percentile(each, 95)) for each in distances)
    (parts, found), (claimed, right) = _detected(reference, prediction), _detected(prediction, reference)
    ml, error = abs(float(np.linalg.det(matrix))) / 1000, predicted - true
    return {
        "dice": _share(2 * both, predicted + true), "nsd": nsd, "hd95_mm": hd95, "assd_mm": assd,
        "reference_ml": true * ml, "predicted_ml": predicted * ml,
        "error_ml": error * ml, "error_percent": _share(100 * error, true),
        "reference_components": parts, "found_components": found,
        "predicted_components": claimed, "true_components": right,
        "sensitivity": _share(found, parts), "precision": _share(right, claimed),
        "f1": _share(found + right, parts + claimed),
    }  # fmt: skip


def _surface_distances(one: np.ndarray, other: np.ndarray, matrix: np.ndarray) -> list[np.ndarray]:
    """Return the distances from each surface voxel of a mask to the nearest one of the other, and the other way."""
    surfaces = [_surface(mask) for mask in (one, other)]
    common = surfaces[0] & surfaces[1]  # at distance 0: no need to look for them
    steps = np.linalg.qr(matrix)[1].T  # the same distances whichever way the patient lies
    points = [np.argwhere(surface) @ steps for surface in surfaces]
    apart = [np.argwhere(surface & ~common) @ steps for surface in surfaces]
    distances: list[np.ndarray] = [np.zeros(len(every)) for every in points]
    for filled, here, there in zip(distances, apart, reversed(points), strict=True):
        filled[: len(here)] = KDTree(there).query(here)[0]
    return distances


def _surface(mask: np.ndarray) -> np.ndarray:
    """Return the voxels of a mask with a face towards a voxel outside it, with a border of one voxel."""
    mask = np.pad(mask, 1)
    inside = np.logical_and.reduce([np.roll(mask, step, axis) for axis in range(3) for step in (-1, 1)])
    return np.asarray(mask & ~inside)


def _detected(mask: np.ndarray, other: np.ndarray) -> tuple[int, int]:
    """Return how many connected components a mask has, and of how many the other mask covers enough."""
    components = connected_components(mask)
    sizes = np.bincount(components[mask])
    covered = np.bincount(components[mask & other], minlength=len(sizes))
    return max(len(sizes) - 1, 0), int(np.count_nonzero(covered[1:] >= _OVERLAP * sizes[1:]))


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _statistics(values: Sequence[float | None]) -> dict[str, float]:
    """Return how many values there are, and of them mean, interval and median where there is one."""
    found = np.array([value for value in values if value is not None], np.float64)
    if not len(found):
        return {"cases": 0}
    draws = np.random.default_rng(0).integers(len(found), size=(2000, len(found)))
    low, high = np.percentile(found[draws].mean(axis=1), [2.5, 97.5]).tolist()
    return {
        "cases": len(found),
        "mean": float(found.mean()),
        "low": low,
        "high": high,
        "median": float(np.median(found)),
    }
