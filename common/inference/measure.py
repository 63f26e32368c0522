"""Measurements of the structures of label maps, and what makes them uncertain."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import nibabel
import numpy as np
from scipy.ndimage import find_objects
from scipy.spatial import ConvexHull
from scipy.spatial.distance import pdist, squareform

from medspeed.common.console import say
from medspeed.common.data.fingerprint import AIR, CaseFigures, Fingerprint
from medspeed.common.files import read_as, read_object
from medspeed.common.inference.labels import Region, learned_nothing
from medspeed.common.inference.postprocessing import connected_components, foreground

_MIDDLES = np.array([[-0.5, 0], [0.5, 0], [0, -0.5], [0, 0.5]])  # of a pixel's edges, in pixels
_FACTOR = 1.5  # by which spacing, field of view and volumes may leave the range of the training cases
_SPREAD = 0.25  # of the span of their intensities, from the lowest 5th to the highest 95th percentile, likewise
_AGREEMENT = 0.7  # Dice of several predictions of a structure with each other
_LENGTHS = [f"{what} along {axis} in mm" for what in ("spacing", "field of view") for axis in "RAS"]
_INTENSITIES = [f"percentile {percent} of the intensities" for percent in (5, 50, 95)]


@dataclass(frozen=True)
class Measures:
    """Measurements of one structure in one scan."""

    structure: str  # its name; its voxels and volume follow
    voxels: int
    volume_ml: float
    parts: int  # number of connected components (26-connected)
    # longest diameter in any axial slice, from pixel edge to pixel edge; 0 for an empty structure
    longest_axial_mm: float
    short_axial_mm: float  # extent perpendicular to it in the same slice
    # distance between the outer edges of the rightmost and leftmost voxels; likewise posterior to anterior and inferior
    # to superior. Measured along the axes of the file, which may be oblique
    extent_rl_mm: float
    extent_pa_mm: float
    extent_is_mm: float
    uncertain: str = field(default="", kw_only=True)  # what makes it so; empty where nothing does


def measure(labels: np.ndarray, affine: np.ndarray, regions: Sequence[Region]) -> tuple[Measures, ...]:
    """Measure each structure of a label map [X, Y, Z] uint8; the affine [4, 4], to RAS mm, may be sheared."""
    labels = labels[foreground(labels)]  # not looked at again: a scan has a hundred times its voxels
    return tuple(_measure(region.name, np.isin(labels, region.members), affine) for region in regions)


def _measure(name: str, mask: np.ndarray, affine: np.ndarray) -> Measures:
    voxels = int(np.count_nonzero(mask))
    if not voxels:
        return Measures(name, 0, 0.0, 0, 0.0, 0.0, 0.0, 0.0, 0.0)
    mask = mask[find_objects(mask.view(np.uint8))[0]]
    # Which axis of the file runs along right-left, posterior-anterior, inferior-superior.
    order = np.argsort(nibabel.io_orientation(affine)[:, 0])
    vectors, mask = affine[:3, order], mask.transpose(order)
    extents = mask.shape * np.linalg.norm(vectors, axis=0)
    # In the plane itself, so that a tilted slice is measured as it lies; a step along an axis makes a column of it.
    plane = np.linalg.qr(vectors[:, :2])[1]
    diameters = max(_diameters(each, plane) for each in np.moveaxis(mask, 2, 0) if each.any())
    lengths = [round(float(each), 2) for each in (*diameters, *extents)]
    parts = int(connected_components(mask).max())
    volume_ml = round(voxels * abs(float(np.linalg.det(vectors))) / 1000, 9)  # as in the fingerprint
    return Measures(name, voxels, volume_ml, parts, *lengths)


def _diameters(mask: np.ndarray, plane: np.ndarray) -> tuple[float, float]:
    """Return the largest distance of two points of a slice [R, A] in mm, and the extent of all across that line."""
    pixels = np.argwhere(mask)
    first, last = mask.argmax(axis=1), mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)
    ends = pixels[(pixels[:, 1] == first[pixels[:, 0]]) | (pixels[:, 1] == last[pixels[:, 0]])]  # of columns: enough
    points = (ends[:, None] + _MIDDLES).reshape(-1, 2) @ plane.T
    corners = points[ConvexHull(points).vertices]
    distances = squareform(pdist(corners))
    one, other = np.unravel_index(distances.argmax(), distances.shape)
    along = (corners[other] - corners[one]) / distances[one, other]
    return float(distances[one, other]), float(np.ptp(corners @ np.array([-along[1], along[0]])))


def warn_of_training(*runs: Path, flips: str = "") -> None:
    """Warn if a run was trained on synthetic data, learned nothing, or never saw one of the `flips` that are asked."""
    said: list[str] = []
    for run in runs:
        with suppress(ValueError, OSError, AttributeError):  # there is none, or it is damaged
            summary = read_object(run / "summary.json")
            data, quality = (summary.get(key) or {} for key in ("data", "quality"))
            if data.get("synthetic") is True:
                said.append("was trained on SYNTHETIC DATA only: its results on patients are meaningless")
            if learned_nothing(quality.get("name"), quality.get("value")):
                said.append("LEARNED NOTHING: its results are meaningless; train it again")
        with suppress(ValueError, OSError, LookupError, TypeError):
            learned = read_object(run / "plan.json")["crops"]["flips"] or ""
            if unseen := ", ".join(sorted(set(flips) - set(learned))):
                said.append(f"was trained without flips of {unseen}: --flips can make its label maps much worse")
    for each in dict.fromkeys(said):
        say(f"WARNING: this model {each}", "warning")


def read_figures(*runs: Path) -> tuple[CaseFigures, ...]:
    """Return the figures of runs' training cases; say it where there are none. A damaged file is a ValueError."""
    cases: list[CaseFigures] = []
    for run in runs:
        path = run / "fingerprint.json"
        found = read_as(path, Fingerprint, "restore or remove it").scans if path.is_file() else ()
        if not found:
            say(f"{path}: no figures of training cases: spacing, size, intensities and volumes are not checked")
        cases += found
    return tuple(cases)


def with_doubts(
    measures: Sequence[Measures],
    regions: Sequence[Region],
    scan: CaseFigures,
    cases: Sequence[CaseFigures],
    agreement: Sequence[float],
    empty: Sequence[int] = (),
) -> list[Measures]:
    """Return the measures of a scan's structures, each with what makes it uncertain.

    That is a figure of the scan that is unlike those of all training cases, if there are any, or a low `agreement`, the
    Dice of several predictions with each other, by region; empty for one alone. Of `empty` channels all voxels are 0.
    """
    told = [case for case in cases if case.intensity[0] > AIR]  # of the others the first channel is empty
    rows = [*zip(*([*each.spacing, *each.size, *each.intensity] for each in (scan, *told)), strict=True)]
    spare = _SPREAD * (max(rows[-1][1:], default=0) - min(rows[-3][1:], default=0))
    spares = [None] * len(_LENGTHS) + [spare] * len(_INTENSITIES)
    names = [*_LENGTHS, *(() if 0 in empty else _INTENSITIES)]  # which are those of the first channel
    figures = zip(names, rows, spares, strict=False)
    common = [f"channel {number} is EMPTY" for number in empty]
    common += (doubt for what, (value, *due), room in figures for doubt in _outside(what, value, due, room))
    if not any(each.voxels for each in measures):
        common.append("EMPTY: no structure was found")
    found = []
    for number, (each, region) in enumerate(zip(measures, regions, strict=True)):
        labelled = (enumerate(case.volumes_ml) for case in cases if case.volumes_ml)
        volumes = [sum(ml for label, ml in each_label if label in region.members) for each_label in labelled]
        doubts = [*common, *_outside(f"{each.structure} in ml", each.volume_ml, volumes)]
        if agreement and agreement[number] < _AGREEMENT:
            doubts.append(f"{each.structure}: Dice {agreement[number]:.2f} between flips or models")
        found.append(replace(each, uncertain="; ".join(doubts)))
    return found


def _outside(what: str, value: float, due: Sequence[float], spare: float | None = None) -> list[str]:
    """Return a line on a value that leaves the range of the training cases by a factor, or by more than `spare`."""
    low, high = (min(due), max(due)) if due else (value, value)
    inside = low / _FACTOR <= value <= high * _FACTOR if spare is None else low - spare <= value <= high + spare
    shown = [f"{float(f'{each:.3g}'):g}" for each in (value, low, high)]
    return [] if inside else [f"{what}: {shown[0]} (training cases: {shown[1]} to {shown[2]})"]
