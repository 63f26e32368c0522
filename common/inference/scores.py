"""How well label maps agree with references: overlap, surface distances, volumes and components; means and tables."""

import csv
import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.ndimage import binary_erosion, find_objects
from scipy.spatial import KDTree

from medspeed.common.data.preparation import label_map
from medspeed.common.data.volumes import Volume, check_same_grid
from medspeed.common.files import printable, write_json, write_text
from medspeed.common.inference.postprocessing import connected_components, foreground

Labels = Mapping[str, Sequence[int]]  # label numbers of structures, by name; they may overlap, as a tumor's regions do
Scores = dict[str, Any]  # name ("label") and metrics (see `options.DEFINITIONS`) of a structure; None: undefined

OUT_OF_MEMORY = "out of memory while surfaces were compared: take a machine with more memory"
_ROUNDING = 1e-5  # mm by which a distance may exceed the tolerance: affines are stored as float32
_MOST_POINTS = 1_000_000  # measured of a surface; noise over a volume of MSD's size has ten times as many
_OVERLAP = 0.1  # of a component's voxels that the other mask must cover
_INTERVAL = "95 percent, percentile bootstrap of the mean, 2000 resamples of the cases, seed 0"


@dataclass(frozen=True)
class Evaluation:
    """Label maps compared with their references."""

    tolerance_mm: float  # of the NSD
    cases: Mapping[str, Sequence[Scores]]  # metrics of each structure, by case
    missing: Sequence[str] = ()  # references without a prediction
    refused: Mapping[str, str] = field(default_factory=dict)  # why a case could not be compared, by name
    extra: Sequence[str] = ()  # predictions without a reference

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
        write_measures(folder / "evaluation.csv", self.cases, "case")
        write_json(folder / "evaluation.json", {"interval": _INTERVAL, "summary": self.summary, **asdict(self)})


def write_measures(
    path: Path, scans: Mapping[str, Sequence[Mapping[str, Any]]], key: str = "scan", columns: Sequence[str] = ()
) -> None:
    """Write a CSV with a row for each structure of each scan, atomically; all have the same columns.

    Without a row, the header names those given.
    """
    text = io.StringIO()
    columns = next((list(each) for found in scans.values() for each in found), columns)
    writer = csv.DictWriter(text, [key, *columns], lineterminator="\n")
    writer.writeheader()
    for scan, found in scans.items():
        writer.writerows({name: _cell(value) for name, value in {key: scan, **each}.items()} for each in found)
    write_text(path, text.getvalue())


def _cell(value: object) -> object:
    """Return a value as a spreadsheet will not compute it; of a text, control characters are escaped too."""
    if not isinstance(value, str):
        return value
    return ("'" if value.lstrip()[:1] in {*"=+-@\uff1d\uff0b\uff0d\uff20"} else "") + printable(value)


def score(
    prediction: Volume,
    reference: Volume,
    labels: Labels | None,
    tolerance: float,
    allowed: Collection[int] = range(256),
) -> list[Scores]:
    """Compare two label maps [X, Y, Z], structure by structure; other grids, or numbers, are a ValueError."""
    check_same_grid(reference, prediction, "reference")
    box = foreground(np.logical_or(prediction.voxels, reference.voxels).view(np.uint8))
    crops = (replace(each, voxels=each.voxels[box]) for each in (prediction, reference))
    maps = [np.ascontiguousarray(label_map(each, allowed).T) for each in crops]
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
        scores.append({"label": name, **score_masks(one, other, reference.affine[:3, 2::-1], diagonal, tolerance)})
    return scores


def score_masks(found: np.ndarray, true: np.ndarray, matrix: np.ndarray, diagonal: float, tolerance: float) -> Scores:
    """Return the metrics of masks [A, B, C] that hold all of a structure; a step along an axis makes `matrix` mm."""
    predicted, due, both = (int(np.count_nonzero(mask)) for mask in (found, true, found & true))
    nsd, hd95, assd = (0.0, diagonal, diagonal) if predicted or due else (None,) * 3
    if predicted and due:
        steps = np.linalg.qr(matrix)[1].T  # the same distances whichever way the patient lies
        points = [np.argwhere(mask & ~binary_erosion(mask)) @ steps for mask in (found, true)]
        trees = (KDTree(each, 16, compact_nodes=False, balanced_tree=False) for each in reversed(points))
        cores = torch.get_num_threads()  # 1 where the cases share the cores
        step = -(-max(map(len, points)) // _MOST_POINTS)  # of both, so that they keep their weights
        distances = [tree.query(each[::step], workers=cores)[0] for tree, each in zip(trees, points, strict=True)]
        every = np.concatenate(distances)
        nsd, assd = float((every <= tolerance + _ROUNDING).mean()), float(every.mean())
        hd95 = max(float(np.percentile(each, 95)) for each in distances)
    (parts, hit), (claimed, right) = _detected(true, found), _detected(found, true)
    ml, error = abs(float(np.linalg.det(matrix))) / 1000, predicted - due
    return {
        "dice": _share(2 * both, predicted + due), "nsd": nsd, "hd95_mm": hd95, "assd_mm": assd,
        "reference_ml": due * ml, "predicted_ml": predicted * ml,
        "error_ml": error * ml, "error_percent": _share(100 * error, due),
        "reference_components": parts, "found_components": hit,
        "predicted_components": claimed, "true_components": right,
        "sensitivity": _share(hit, parts), "precision": _share(right, claimed),
        "f1": _share(hit + right, parts + claimed),
    }  # fmt: skip


def _detected(mask: np.ndarray, other: np.ndarray) -> tuple[int, int]:
    """Return how many connected components a mask has, and of how many the other mask covers enough."""
    components = connected_components(mask)
    sizes = np.bincount(components[mask])
    covered = np.bincount(components[mask & other], minlength=len(sizes))
    return max(len(sizes) - 1, 0), int(np.count_nonzero(covered[1:] >= _OVERLAP * sizes[1:]))


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _statistics(values: Sequence[float | None]) -> dict[str, float]:
    found = np.array([value for value in values if value is not None], np.float64)
    if not len(found):
        return {"cases": 0}
    draws = np.random.default_rng(0).integers(len(found), size=(2000, len(found)))
    low, high = np.percentile(found[draws].mean(axis=1), [2.5, 97.5]).tolist()
    mean, median = found.mean().item(), np.median(found).item()
    return {"cases": len(found), "mean": mean, "low": low, "high": high, "median": median}
