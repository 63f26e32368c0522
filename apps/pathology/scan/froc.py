"""Camelyon16's scores: how many lesions are found at how many false positives, and how well slides are told apart."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from medspeed.common.files import write_text

# The challenge's evaluation code, which MONAI's LesionFROC follows (monai.apps.pathology), has all these numbers.
GROWTH_UM = 75.0  # lesions this close belong together: the width of five tumour cells
ITC_UM = 200.0  # a lesion whose long axis is shorter is isolated tumour cells
FALSE_POSITIVE_RATES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # per slide, at which the score takes the sensitivity
DETECTION_THRESHOLD = 0.5  # MONAI's LesionFROC, as is the box
DETECTION_BOX = 48  # pixels of the probability map
MAP_MPP = 0.243 * 64  # um of one: level 6 of Camelyon16's slides, at which LesionFROC judges (the challenge: level 5)
_CURVE, _SCORE = "#0072B2", "#D55E00"


@dataclass(frozen=True)
class FrocResult:
    """The free-response curve: one point for each score at which something is gained or lost, then (0, 0)."""

    false_positives: NDArray[np.float64]  # [K], per slide, falling
    sensitivities: NDArray[np.float64]  # [K], the share of lesions found
    at_rates: tuple[float, ...]  # sensitivities at each of FALSE_POSITIVE_RATES
    score: float  # Camelyon16's, the mean sensitivity at its rates, but interpolated, as MONAI does
    slides: int
    lesions: int


def find_lesions(mask: np.ndarray, mpp: float) -> NDArray[np.int32]:
    """Return the lesions of a tumour mask [H, W] (not 0: tumour) of `mpp` micrometres a pixel: [H, W], 0 outside.

    Lesions are numbered from 1; isolated tumour cells, neither to be found nor wrong to find, have negative numbers.
    The tumour grows by half of GROWTH_UM, holes are filled, and what touches, also corner to corner, is one lesion.
    """
    from scipy.ndimage import binary_fill_holes, distance_transform_edt, label  # here: training has no need of them
    from skimage.measure import regionprops

    labels = np.zeros(mask.shape, np.int32)
    if mask.any():
        grown = distance_transform_edt(mask == 0) < GROWTH_UM / (2 * mpp)
        label(binary_fill_holes(grown), np.ones((3, 3)), output=labels)
    isolated = [each.label for each in regionprops(labels) if each.axis_major_length < (ITC_UM + GROWTH_UM) / mpp]
    return np.where(np.isin(labels, isolated), -labels, labels)


def detect(probability: np.ndarray, box: int = DETECTION_BOX) -> np.ndarray:
    """Return the peaks of a probability map [H, W]: the highest, then the highest outside the box around it, and so on.

    A peak is a row (probability, column, row) of [D, 3] float64. Equal to MONAI's PathologyProbNMS, also where
    probabilities are equal, in one sort. A ValueError says that the map is not finite.
    """
    if not np.isfinite(probability).all():
        raise ValueError("the probability map is not finite: scan again in fp32 (--precision fp32)")
    width, before, after = probability.shape[1], box // 2, box - box // 2
    candidates = np.flatnonzero(probability > DETECTION_THRESHOLD)
    candidates = candidates[np.argsort(-probability.ravel()[candidates], kind="stable")]
    taken = np.zeros(probability.shape, bool)
    flat = taken.data.cast("B")  # a view that Python reads faster, one pixel at a time, than NumPy does
    peaks = []
    for place in candidates.tolist():
        if not flat[place]:
            peaks.append(place)
            row, column = divmod(place, width)
            taken[max(row - before, 0) : row + after, max(column - before, 0) : column + after] = True
    y, x = divmod(np.array(peaks, np.int64), width)
    return np.stack([probability[y, x], x, y], 1, dtype=np.float64)


def froc(slides: Sequence[tuple[np.ndarray | None, np.ndarray]]) -> FrocResult | None:
    """Return the free-response curve over slides; None where they hold no lesion larger than isolated tumour cells.

    Of each come `find_lesions` (None without tumour), and detections on its grid, [D, 3] rows (score, x, y). A lesion
    is found with the score of its surest detection; a detection outside all lesions is a false positive. As in the
    code published with Camelyon16, the score of 0 that a missed lesion has is no point of the curve.
    """
    false, found, lesions = [], [np.empty(0)], 0
    for labels, detections in slides:
        scores, (x, y) = detections[:, 0], detections[:, 1:].T.astype(np.int64)
        if labels is None:
            false.append(scores)
            continue
        hit = labels[y, x]
        best = np.zeros(np.abs(labels).max() + 1)  # the challenge's code keeps a score of 0 for isolated cells
        np.maximum.at(best, hit[hit > 0], scores[hit > 0])
        false.append(scores[hit == 0])
        found.append(best[1:])
        lesions += len(np.unique(labels[labels > 0]))
    if not lesions:
        return None
    wrong, right = np.sort(np.concatenate(false)), np.sort(np.concatenate(found))
    scores = np.unique(np.concatenate([wrong, right]))
    thresholds = scores[scores > 0]
    rates, shares = (
        np.append(len(scores) - np.searchsorted(scores, thresholds), 0) / count
        for scores, count in ((wrong, len(slides)), (right, lesions))
    )
    at_rates = np.interp(FALSE_POSITIVE_RATES, rates[::-1], shares[::-1])
    return FrocResult(rates, shares, tuple(at_rates.tolist()), float(np.mean(at_rates)), len(slides), lesions)


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Return the share of (positive, negative) pairs that the scores [N] put in order, ties counting half."""
    positive, scores = np.asarray(labels, bool), np.asarray(scores, np.float64)
    count, others = int(positive.sum()), int((~positive).sum())
    if not count or not others:
        raise ValueError(f"{count} positive and {others} negative labels: the AUC needs both")
    if np.isnan(scores).any():
        return math.nan
    negative = np.sort(scores[~positive])
    below, upto = (np.searchsorted(negative, scores[positive], side) for side in ("left", "right"))
    return float((below + upto).sum() / 2 / (count * others))


def write_froc(folder: Path, result: FrocResult) -> None:
    """Write the curve's points as froc.csv, most false positives first, and its picture with the score as froc.png."""
    from matplotlib.figure import Figure

    from medspeed.common.observe.plots import save_png, style

    points = zip(result.false_positives.tolist(), result.sensitivities.tolist(), strict=True)
    rows = "".join(f"{false!r},{share!r}\n" for false, share in points)
    write_text(folder / "froc.csv", "false_positives_per_slide,sensitivity\n" + rows)
    figure = Figure(figsize=(7, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    style(axes, "sensitivity, lesions", _CURVE)
    rates = np.geomspace(FALSE_POSITIVE_RATES[0] / 2, FALSE_POSITIVE_RATES[-1] * 2, 400)
    axes.plot(rates, np.interp(rates, result.false_positives[::-1], result.sensitivities[::-1]), color=_CURVE)
    axes.plot(FALSE_POSITIVE_RATES, result.at_rates, "o", color=_SCORE, clip_on=False)
    for rate, share in zip(FALSE_POSITIVE_RATES, result.at_rates, strict=True):
        axes.annotate(f"{share:.2f}", (rate, share), (0, 8), textcoords="offset points", ha="center", fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_xticks(FALSE_POSITIVE_RATES, [f"{rate:g}" for rate in FALSE_POSITIVE_RATES])
    axes.set(xlim=(rates[0], rates[-1]), ylim=(0, 1.08), xlabel="false positives per slide")
    axes.set_title(f"FROC score {result.score:.3f}: {result.lesions} lesions, {result.slides} slides", loc="left")
    save_png(folder / "froc.png", figure)
