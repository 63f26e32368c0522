"""What makes the result of a scan uncertain: figures unlike those of all training cases, predictions that disagree."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from medspeed.common.console import say
from medspeed.common.data.fingerprint import CaseFigures, Fingerprint
from medspeed.common.files import read_as, read_object
from medspeed.common.inference.labels import Region, learned_nothing

if TYPE_CHECKING:  # a training's start need not wait for SciPy
    from medspeed.common.inference.measure import Measures

_FACTOR = 1.5  # by which spacing, field of view and volumes may leave the range of the training cases
_SPREAD = 0.25  # of the span of their intensities, from the lowest 5th to the highest 95th percentile, likewise
_AGREEMENT = 0.7  # Dice of several predictions of a structure with each other
_LENGTHS = [f"{what} along {axis} in mm" for what in ("spacing", "field of view") for axis in "RAS"]
_INTENSITIES = [f"percentile {percent} of the intensities" for percent in (5, 50, 95)]


def warn_of_training(*runs: Path) -> None:
    """Warn if a run was trained on synthetic data or learned nothing: its results on patients are meaningless."""
    said: list[str] = []
    for run in runs:
        try:
            summary = read_object(run / "summary.json")
        except (ValueError, OSError):
            continue
        data, quality = ({**each} if isinstance(each := summary.get(key), dict) else {} for key in ("data", "quality"))
        if data.get("synthetic") is True:
            said.append("was trained on SYNTHETIC DATA only: its results on patients are meaningless")
        if learned_nothing(quality.get("name"), quality.get("value")):
            said.append("LEARNED NOTHING: its results are meaningless; train it again")
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
    measures: "Sequence[Measures]",
    regions: Sequence[Region],
    scan: CaseFigures,
    cases: Sequence[CaseFigures],
    agreement: Sequence[float],
) -> "list[Measures]":
    """Return the measures of a scan's structures, each with what makes it uncertain.

    Args:
        measures: of each region.
        regions: the structures.
        scan: its figures.
        cases: those of the training cases; if there are none, nothing is compared with them.
        agreement: Dice of several predictions with each other, by region; empty where there is one alone.
    """
    rows = [*zip(*([*each.spacing, *each.size, *each.intensity] for each in (scan, *cases)), strict=True)]
    spare = _SPREAD * (max(rows[-1][1:], default=0) - min(rows[-3][1:], default=0))
    spares = [None] * len(_LENGTHS) + [spare] * len(_INTENSITIES)
    figures = zip([*_LENGTHS, *_INTENSITIES], rows, spares, strict=True)
    common = [doubt for what, (value, *due), room in figures for doubt in _outside(what, value, due, room)]
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
