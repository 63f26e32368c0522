"""Judge scans of slides by a reference: Camelyon16's two scores, lesions found (FROC) and slides told apart (AUC)."""

from apps.pathology.config import EvaluateConfig
from common.config import parse_config

if __name__ == "__main__":
    CONFIG = parse_config(EvaluateConfig, {}, description=__doc__)  # before torch: --help answers at once

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from apps.pathology.scan.froc import auc, draw_froc, find_lesions, froc, write_froc_csv
from apps.pathology.scan.outputs import read_detections_csv
from apps.pathology.slides.camelyon import DUPLICATE, SlideEntry, read_slide_set
from apps.pathology.slides.masks import tumour_mask
from common.files import write_json
from common.run import one_line_errors

# Camelyon16's slides of 0.243 um at level 6, at which MONAI's LesionFROC judges (the challenge's own code: level 5).
MASK_MPP = 0.243 * 64


@dataclass(frozen=True)
class Judged:
    """A scanned slide with its reference.

    Attributes:
        entry: the slide.
        probability: greatest of its map.
        detections: [D, 3] float64 rows (score, x, y) in pixels of `lesions`.
        lesions: of `find_lesions`, [H, W] at about 15.6 um per pixel; None without tumour.
        mask_mpp: um per pixel of `lesions`; None without tumour.
    """

    entry: SlideEntry
    probability: float
    detections: np.ndarray
    lesions: np.ndarray | None = None
    mask_mpp: float | None = None


def main(config: EvaluateConfig) -> int:
    """Score the scanned slides that have a reference; write froc.json, froc.csv and froc.png beside them."""
    judged, left_out = _judge_all(config)
    for name, reason in left_out.items():
        tqdm.write(f"{name}: left out, {reason}")
    result = froc([(each.lesions, each.detections) for each in judged if each.entry.scored])
    labels = np.array([each.entry.tumour for each in judged])
    # Slides are told apart where there are some of both kinds.
    slide_auc = auc(labels, np.array([each.probability for each in judged])) if 0 < labels.sum() < len(labels) else None
    sizes = sorted({round(each.mask_mpp, 4) for each in judged if each.mask_mpp is not None})
    content = {
        "froc": None if result is None else result.score,
        "sensitivities": None if result is None else list(result.at_rates),
        "lesions": 0 if result is None else result.lesions,
        "slide_auc": slide_auc,
        "mask_mpp": sizes,
        "slides": {each.entry.name: {"tumour": each.entry.tumour, "probability": each.probability} for each in judged},
        "left_out": left_out,
    }
    write_json(config.scans / "froc.json", content)
    if result is None:
        print(f"FROC: none, for lack of lesions larger than isolated tumour cells in {len(judged)} slides")
    else:
        write_froc_csv(config.scans / "froc.csv", result)
        draw_froc(config.scans / "froc.png", result)
        at = " and ".join(f"{size:g}" for size in sizes)
        print(f"FROC: {result.score:.4f}, {result.lesions} lesions in {result.slides} slides, masks at {at} um")
    kinds = f"{labels.sum()} slides with tumour, {len(judged)} in all"
    print(f"slide AUC: {'none, it needs both kinds' if slide_auc is None else f'{slide_auc:.4f}'}, {kinds}")
    return 0


def _judge_all(config: EvaluateConfig) -> tuple[list[Judged], dict[str, str]]:
    """Return the scanned slides with their reference, and why others were left out."""
    slides = read_slide_set(config.data)
    entries = {entry.name: entry for entry in (*slides.training, *slides.testing)}
    records = sorted(config.scans.glob("*/slide.json"))
    if not records:
        raise FileNotFoundError(f"{config.scans}: holds no finished scans (NAME/slide.json): scan slides into it first")
    scans = [json.loads(record.read_text(encoding="utf-8")) for record in records]
    marks = [{**scan.get("mark", {}), "input": None} for scan in scans]
    other = next((record for record, mark in zip(records, marks, strict=True) if mark != marks[0]), None)
    if other is not None:  # their scores would be of no network
        raise ValueError(
            f"{records[0]} and {other} are of different weights or options; scan all anew, or into folders of their own"
        )
    left_out = {entry.name: "it has not been scanned" for entry in slides.testing}
    judged = []
    for record, scan in tqdm(list(zip(records, scans, strict=True)), unit="slide", desc="reference", leave=False):
        name = scan["name"]
        if (entry := entries.get(name)) is None:
            left_out[name] = "it is not in the set of slides"
        elif name.lower() == DUPLICATE:
            left_out[name] = "Camelyon16 does not score it, a duplicate"
        elif entry.tumour and entry.mask is None and entry.annotation is None:
            left_out[name] = f"it has tumour, but neither a mask ({name}_mask.tif) nor an annotation ({name}.xml)"
        elif entry.tumour and scan["mpp"] is None:
            left_out[name] = "the slide gives no pixel size, and lesions are measured in um"
        else:
            left_out.pop(name, None)
            judged.append(_judge(entry, scan, read_detections_csv(record.with_name("detections.csv"))))
    if not judged:
        raise ValueError(f"{config.scans}: none of its {len(records)} scans has a reference in {config.data}")
    return judged, left_out


def _judge(entry: SlideEntry, scan: dict[str, Any], found: np.ndarray) -> Judged:
    if not entry.tumour:
        return Judged(entry, scan["probability"], found)
    # Levels lie a factor of two apart: the coarsest within a half-step of the wanted one is the nearest.
    coarsest = max(1.0, MASK_MPP * math.sqrt(2) / scan["mpp"])
    width, height = scan["size"]
    truth = tumour_mask(entry, width, height, coarsest)
    mpp, (height, width) = scan["mpp"] * truth.downsample, truth.mask.shape
    # A cell's centre may lie beyond the slide's edge, and so beyond the mask's.
    found[:, 1:] = np.minimum(found[:, 1:] // truth.downsample, (width - 1, height - 1))
    return Judged(entry, scan["probability"], found, find_lesions(truth.mask, mpp), mpp)


if __name__ == "__main__":
    with one_line_errors():
        raise SystemExit(main(CONFIG))
