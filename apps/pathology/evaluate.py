"""Judge scans of slides by a reference: Camelyon16's two scores, lesions found (FROC) and slides told apart (AUC)."""

from apps.pathology.config import EvaluateConfig
from common.config import parse_config

if __name__ == "__main__":
    CONFIG = parse_config(EvaluateConfig, {}, description=__doc__)  # before torch: --help answers at once

import math
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from apps.pathology.scan.froc import auc, draw_froc, find_lesions, froc, write_froc_csv
from apps.pathology.scan.outputs import read_detections_csv
from apps.pathology.slides.camelyon import DUPLICATE, SlideEntry, read_slide_set
from apps.pathology.slides.masks import tumour_mask
from common.files import read_object, write_json
from common.run import one_line_errors

# Camelyon16's slides of 0.243 um at level 6, at which MONAI's LesionFROC judges (the challenge's own code: level 5).
MASK_MPP = 0.243 * 64


def main(config: EvaluateConfig) -> int:
    """Score the scanned slides that have a reference; write froc.json, froc.csv and froc.png beside them."""
    slides = read_slide_set(config.data)
    entries = {entry.name: entry for entry in (*slides.training, *slides.testing)}
    left_out = {entry.name: "it has not been scanned" for entry in slides.testing}
    judged, for_froc, sizes = {}, [], set()
    scans = _read_scans(config.scans)
    for record, scan in tqdm(scans.items(), unit="slide", desc="reference", leave=False):
        name, entry = scan["name"], entries.get(scan["name"])
        reason = _why_not(entry, scan)
        if entry is None or reason:
            left_out[name] = reason
            continue
        left_out.pop(name, None)
        judged[name] = {"tumour": entry.tumour, "probability": scan["probability"]}
        found, lesions, mpp = _on_one_grid(entry, scan, read_detections_csv(record.with_name("detections.csv")))
        sizes |= {round(mpp, 4)} if entry.tumour else set()
        for_froc += [(lesions, found)] if entry.scored else []
    if not judged:
        raise ValueError(f"{config.scans}: none of its {len(scans)} scans has a reference in {config.data}")
    for name, reason in left_out.items():
        tqdm.write(f"{name}: left out, {reason}")
    result = froc(for_froc)
    labels, scores = np.array([[each["tumour"], each["probability"]] for each in judged.values()]).T
    # Slides are told apart where there are some of both kinds.
    slide_auc = auc(labels, scores) if 0 < labels.sum() < len(labels) else None
    content = {
        "froc": None if result is None else result.score,
        "sensitivities": None if result is None else list(result.at_rates),
        "lesions": 0 if result is None else result.lesions,
        "slide_auc": slide_auc,
        "mask_mpp": sorted(sizes),
        "slides": judged,
        "left_out": left_out,
    }
    write_json(config.scans / "froc.json", content)
    if result is None:
        print(f"FROC: none, for lack of lesions larger than isolated tumour cells in {len(judged)} slides")
    else:
        write_froc_csv(config.scans / "froc.csv", result)
        draw_froc(config.scans / "froc.png", result)
        at = " and ".join(f"{size:g}" for size in sorted(sizes))
        print(f"FROC: {result.score:.4f}, {result.lesions} lesions in {result.slides} slides, masks at {at} um")
    kinds = f"{labels.sum():.0f} slides with tumour, {len(judged)} in all"
    print(f"slide AUC: {'none, it needs both kinds' if slide_auc is None else f'{slide_auc:.4f}'}, {kinds}")
    return 0


def _read_scans(folder: Path) -> dict[Path, dict[str, Any]]:
    """Return the records of finished scans, of the same weights and options: else scores were of no network."""
    scans = {path: read_object(path, "scan the slide again") for path in sorted(folder.glob("*/slide.json"))}
    if not scans:
        raise FileNotFoundError(f"{folder}: holds no finished scans (NAME/slide.json): scan slides into it first")
    marks = {path: {**scan.get("mark", {}), "input": None} for path, scan in scans.items()}
    first = next(iter(marks))
    other = next((path for path in marks if marks[path] != marks[first]), None)
    if other is not None:
        raise ValueError(
            f"{first} and {other} are of different weights or options; scan all anew, or into folders of their own"
        )
    return scans


def _why_not(entry: SlideEntry | None, scan: dict[str, Any]) -> str:
    """Return why a scan cannot be judged, "" where it can."""
    if entry is None:
        return "it is not in the set of slides"
    if entry.name.lower() == DUPLICATE:
        return "Camelyon16 does not score it, a duplicate"
    if entry.tumour and entry.mask is None and entry.annotation is None:
        return f"it has tumour, but neither a mask ({entry.name}_mask.tif) nor an annotation ({entry.name}.xml)"
    if entry.tumour and scan["mpp"] is None:
        return "the slide gives no pixel size, and lesions are measured in um"
    return ""


def _on_one_grid(
    entry: SlideEntry, scan: dict[str, Any], found: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None, float]:
    """Return the detections of a slide in pixels of its lesions, these (None without tumour), and um per pixel."""
    if not entry.tumour:
        return found, None, 0.0
    # Levels lie a factor of two apart: the coarsest within a half-step of the wanted one is the nearest.
    coarsest = max(1.0, MASK_MPP * math.sqrt(2) / scan["mpp"])
    width, height = scan["size"]
    truth = tumour_mask(entry, width, height, coarsest)
    mpp, (height, width) = scan["mpp"] * truth.downsample, truth.mask.shape
    # A cell's centre may lie beyond the slide's edge, and so beyond the mask's.
    found[:, 1:] = np.minimum(found[:, 1:] // truth.downsample, (width - 1, height - 1))
    return found, find_lesions(truth.mask, mpp), mpp


if __name__ == "__main__":
    with one_line_errors():
        raise SystemExit(main(CONFIG))
