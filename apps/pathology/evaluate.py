"""Evaluate scanned slides against a reference: Camelyon16's lesion score (FROC) and slide score (AUC)."""

from medspeed.apps.pathology.config import EvaluateConfig
from medspeed.common.config import parse_config

if __name__ == "__main__":
    CONFIG = parse_config(EvaluateConfig, {}, description=__doc__)  # before torch: --help answers at once

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import numpy as np
from msgspec import Meta
from tqdm import tqdm

from medspeed.apps.pathology.scan.froc import MAP_MPP, auc, find_lesions, froc, write_froc
from medspeed.apps.pathology.scan.scan import read_detections_csv
from medspeed.apps.pathology.slides.camelyon import MARKED, SlideEntry, read_slide_set
from medspeed.apps.pathology.slides.layout import MAX_MPP, MIN_MPP
from medspeed.apps.pathology.slides.masks import tumour_mask
from medspeed.common.console import hides_bar, say
from medspeed.common.files import plural, printable, read_as, write_json
from medspeed.common.run import one_line_errors


class Scan(TypedDict):
    """What is judged of a slide's record, as `infer.Scanner.write` made it; there is more in it."""

    name: str
    probability: Annotated[float, Meta(ge=0, le=1)]
    mpp: Annotated[float, Meta(ge=MIN_MPP, le=MAX_MPP)] | None
    size: tuple[Annotated[int, Meta(ge=1)], Annotated[int, Meta(ge=1)]]
    stride_px: NotRequired[float]
    uncertain: NotRequired[list[str]]  # the guide's has none
    mark: NotRequired[dict[str, Any]]


@dataclass(frozen=True)
class SlideScores:
    """The scores of scanned slides: the content of `froc.json`.

    Attributes:
        froc: mean of the sensitivities at Camelyon16's rates of false positives; None, as they are, without lesions.
        slide_auc: None unless there are slides with tumor and without.
        mask_mpp: um per pixel of the masks in which lesions were found.
        training: slides of the training half, which the model may have been trained on.
        left_out: why a slide was not judged, by name; `refused` are those whose scan or reference is damaged.
    """

    froc: float | None
    sensitivities: list[float] | None
    lesions: int
    slide_auc: float | None
    mask_mpp: list[float]
    slides: dict[str, dict[str, Any]]
    training: list[str]
    left_out: dict[str, str]
    refused: dict[str, str]

    @property
    def status(self) -> int:
        """Exit status of the program: 1 where a scan or a reference is damaged, else 0."""
        return 1 if self.refused else 0


def main(config: EvaluateConfig) -> SlideScores:
    """Score the scanned slides that have a reference; write froc.json, froc.csv and froc.png beside them."""
    slides = read_slide_set(config.data)
    entries = {entry.name: entry for entry in (*slides.training, *slides.testing)}
    left_out = {entry.name: "it has not been scanned" for entry in slides.testing}
    judged, for_froc, sizes = {}, [], set()
    scans, broken = _read_scans(config.scans)
    for record, scan in tqdm(scans.items(), unit="slide", desc="reference", leave=False, disable=hides_bar()):
        name, entry = scan["name"], entries.get(scan["name"])
        reason = _why_not(entry, scan)
        if entry is None or reason:
            left_out[name] = reason
            continue
        try:
            found, lesions, mpp = _on_one_grid(entry, scan, read_detections_csv(record.with_name("detections.csv")))
        except (ValueError, OSError) as error:
            broken[name] = str(error)
            continue
        left_out.pop(name, None)
        judged[name] = {
            "tumour": entry.tumour,
            "probability": scan["probability"],
            "uncertain": scan.get("uncertain", []),
        }
        sizes |= {round(mpp, 4)} if entry.tumour else set()
        if entry.part:
            say(printable(f"{name}: its lesions are not in the FROC: {MARKED}"), "warning")
        for_froc += [] if entry.part else [(lesions, found)]
    left_out |= broken
    for name, reason in left_out.items():
        say(printable(f"{name}: skipped, {reason}")[:1000], "warning")
    if not judged:
        raise ValueError(f"{config.scans}: none of {len(scans) + len(broken)} scans can be judged by {config.data}")
    if seen := sorted(judged.keys() & {entry.name for entry in slides.training}):
        said = f"in the training set of {config.data}, so NOT HELD OUT from a model trained on it: {', '.join(seen)}"
        say(printable(f"{len(seen)} of {plural(len(judged), 'slide')} {said}")[:1000], "warning")
    labels, scores = np.array([[each["tumour"], each["probability"]] for each in judged.values()]).T
    slide_auc = auc(labels, scores) if 0 < labels.sum() < len(labels) else None
    curve, masks = froc(for_froc), sorted(sizes)
    score, rates, count = (curve.score, list(curve.at_rates), curve.lesions) if curve else (None, None, 0)
    scored = SlideScores(score, rates, count, slide_auc, masks, judged, seen, left_out, broken)
    write_json(config.scans / "froc.json", asdict(scored))
    if curve is None:
        for name in ("froc.csv", "froc.png"):  # of an earlier time
            (config.scans / name).unlink(missing_ok=True)
        say(f"FROC: not computed, no lesions larger than isolated tumour cells in {len(judged)} slides", "result")
    else:
        write_froc(config.scans, curve)
        at = " and ".join(f"{size:g}" for size in masks)
        say(f"FROC: {score:.4f}, {count} lesions in {curve.slides} slides, masks at {at} um", "result")
    kinds = f"{labels.sum():.0f} of {len(judged)} slides with tumour"
    say(f"slide AUC: {'none, needs both kinds' if slide_auc is None else f'{slide_auc:.4f}'}, {kinds}", "result")
    return scored


def _read_scans(folder: Path) -> tuple[dict[Path, Scan], dict[str, str]]:
    """Return the records of finished scans, of the same weights and options, and why the others cannot be read."""
    scans: dict[Path, Scan] = {}
    broken: dict[str, str] = {}
    for path in sorted(folder.glob("*/slide.json")):
        try:
            scan = read_as(path, Scan, "scan the slide again")
            if scan["name"] != path.parent.name:
                raise ValueError(f"{path}: it is the record of {scan['name']!r}; scan the slide again")
            scans[path] = scan
            if doubts := ", ".join(scan.get("uncertain", [])):
                say(printable(f"{scan['name']}: UNCERTAIN: {doubts}"), "warning")
        except (ValueError, OSError) as error:
            broken[path.parent.name] = str(error)
    if not scans and not broken:
        raise FileNotFoundError(f"{folder}: contains no finished scans (NAME/slide.json): scan slides into it first")
    marks = {path: {**scan.get("mark", {}), "input": None} for path, scan in scans.items()}
    other = next((path for path in marks if marks[path] != marks[min(marks)]), None)
    if other is not None:
        raise ValueError(f"{min(marks)} and {other} differ in weights or options; scan all again, or use two folders")
    return scans, broken


def _why_not(entry: SlideEntry | None, scan: Scan) -> str:
    if entry is None:
        return "it is not in the set of slides, or the duplicate that Camelyon16 does not score"
    if entry.tumour and entry.marks is None:
        return f"it has tumour but neither a mask ({entry.name}_mask.tif) nor an annotation ({entry.name}.xml)"
    if entry.tumour and scan["mpp"] is None:
        return "the slide has no pixel size, which is needed to measure lesions"
    return ""


def _on_one_grid(entry: SlideEntry, scan: Scan, found: np.ndarray) -> tuple[np.ndarray, np.ndarray | None, float]:
    """Return the detections of a slide in pixels of its lesions, these (None without tumour), and um per pixel."""
    (width, height), mpp = scan["size"], scan["mpp"]
    if (found[:, 1:] > np.array(scan["size"]) + scan.get("stride_px", 0.0)).any():
        raise ValueError(f"a detection is outside the {width} x {height} pixels: scan the slide again")
    if not entry.tumour or mpp is None:
        return found, None, 0.0
    # Levels lie a factor of two apart: the coarsest within a half-step of the wanted one is the nearest.
    truth = tumour_mask(entry, width, height, max(1.0, MAP_MPP * math.sqrt(2) / mpp))
    mpp, (height, width) = mpp * truth.downsample, truth.mask.shape
    # A cell's centre may lie beyond the slide's edge, and so beyond the mask's.
    found[:, 1:] = np.minimum(found[:, 1:] // truth.downsample, (width - 1, height - 1))
    return found, find_lesions(truth.mask, mpp), mpp


if __name__ == "__main__":
    with one_line_errors():
        raise SystemExit(main(CONFIG).status)
