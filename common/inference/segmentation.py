"""Segment a scan with a model, and judge what comes out on the grid of the scan's own file."""

from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common.data.cases import Case
from common.data.preparation import Preparation, PreparedCase
from common.data.volumes import read_volume
from common.inference.labelling import Labelling
from common.inference.predictors import Precision, Predictor, torch_predictor
from common.inference.quality import dice_counts
from common.inference.restore import restore_labels
from common.inference.windows import fitted_window, sliding_windows
from common.observe.overlays import draw_overlay
from common.observe.report_case import write_report_case
from common.observe.timing import UNTIMED, Stages


class SegmentationModel(Protocol):
    """What inference must know of a trained network; each app has its own, kept as a run's `model.json`."""

    @property
    def labelling(self) -> Labelling:
        """What the logits stand for."""
        ...

    @property
    def preparation(self) -> Preparation:
        """How a scan becomes the network's input."""
        ...

    @property
    def window_size(self) -> tuple[int, int, int]:
        """Sliding window X, Y, Z in voxels of the working grid."""
        ...

    @property
    def window_batch(self) -> int:
        """Windows computed at once."""
        ...

    @property
    def overlap(self) -> float:
        """Part of a window that its neighbour also covers."""
        ...

    @property
    def precision(self) -> Precision:
        """What the network was trained in, and runs in with torch."""
        ...

    def build(self, weights: Path | None = None) -> nn.Module:
        """Return the network, with weights from a file if one is given, else with random ones."""
        ...


def predict_logits(
    image: torch.Tensor, predictor: Predictor, model: SegmentationModel, flips: str = "", fit: bool = False
) -> torch.Tensor:
    """Return the logits [K, X, Y, Z] of a prepared image [C, X, Y, Z]; K == 1 for two exclusive classes.

    Args:
        image: on the predictor's device.
        predictor: from windows to logits.
        model: the network's.
        flips: axes x, y, z along which the image is mirrored too, in all combinations; the logits are averaged.
        fit: take windows that fit the image (see `fitted_window`), for a predictor that takes windows of any size.
    """
    window = fitted_window(image.shape[1:], model.window_size, model.overlap) if fit else model.window_size
    axes = ["xyz".index(letter) + 1 for letter in flips]
    mirrors = [some for count in range(len(axes) + 1) for some in combinations(axes, count)]
    total = _window_logits(image, predictor, model, window)
    for mirror in mirrors[1:]:
        total += _window_logits(image.flip(mirror), predictor, model, window).flip(mirror)
    return total.div_(len(mirrors)) if flips else total


def _window_logits(
    image: torch.Tensor, predictor: Predictor, model: SegmentationModel, window: tuple[int, int, int]
) -> torch.Tensor:
    return sliding_windows(
        image,
        predictor,
        window,
        overlap=model.overlap,
        batch_size=model.window_batch,
        difference=model.labelling.exclusive,
    )


def predict_labels(
    case: PreparedCase,
    predictor: Predictor,
    model: SegmentationModel,
    device: torch.device,
    stages: Stages = UNTIMED,
    flips: str = "",
    fit: bool = False,
) -> np.ndarray:
    """Return the label map of a prepared case on its file's own grid, uint8 [X, Y, Z].

    Args:
        case: prepared.
        predictor: from windows to logits, on the device.
        model: the network's.
        device: where windows are computed.
        stages: times the stages "windows" and "restore".
        flips: see `predict_logits`, as for `fit`.
        fit: windows that fit the scan.
    """
    regions = None if model.labelling.exclusive else model.labelling.regions
    with stages.stage("windows"):
        logits = predict_logits(case.image.to(device, torch.float32), predictor, model, flips, fit)
    with stages.stage("restore"):
        return restore_labels(logits, case.grid, regions)


def working_counts(
    cases: Sequence[PreparedCase], network: nn.Module, model: SegmentationModel, check: Callable[[], None]
) -> list[torch.Tensor]:
    """Return, for each labelled case, the voxels that its Dice on the working grid is made of.

    Args:
        cases: prepared, with labels.
        network: on the device where windows are computed.
        model: the network's.
        check: called before each case; it raises when the run is to stop.

    Returns:
        [R, 2] int64 of each case, on the device (see `dice_counts`); the host has not waited for it.
    """
    device = next(network.parameters()).device
    predictor = torch_predictor(network.eval(), model.precision)
    counts = []
    for case in cases:
        check()
        assert case.label is not None
        logits = predict_logits(case.image.to(device, non_blocking=True), predictor, model)
        truth = case.label.to(device, non_blocking=True)
        counts.append(dice_counts(model.labelling.labels_of(logits), truth, model.labelling.regions))
    return counts


def native_counts(
    cases: Sequence[Case],
    prepared: Sequence[PreparedCase],
    predictor: Predictor,
    model: SegmentationModel,
    device: torch.device,
    overlays: Path | None = None,
) -> list[torch.Tensor]:
    """Return, for each case, the voxels that its Dice on the grid of its own file is made of.

    Args:
        cases: labelled cases.
        prepared: the same cases, prepared.
        predictor: from windows to logits.
        model: the network's.
        device: where windows are computed.
        overlays: folder for a picture of each case; None draws none.

    Returns:
        [R, 2] int64 of each case (see `dice_counts`).
    """
    counts = []
    for case, voxels in zip(cases, prepared, strict=True):
        assert case.label is not None
        labels = predict_labels(voxels, predictor, model, device)
        truth = read_volume(case.label).voxels.astype(np.uint8)
        counts.append(dice_counts(torch.from_numpy(labels), torch.from_numpy(truth), model.labelling.regions))
        if overlays is not None:
            dice = case_dice(counts[-1])
            draw_case(overlays / f"{case.name}.png", case, labels, model, truth, f"{case.name}: Dice {dice:.3f}")
    return counts


def case_dice(counts: torch.Tensor) -> float:
    """Return a case's mean Dice over its regions, from [R, 2].

    A case whose label and prediction are both empty has Dice 1: nothing is there, and nothing was found.
    """
    mean = float((2 * counts[:, 0].double() / counts[:, 1].double()).nanmean())
    return 1.0 if np.isnan(mean) else mean


def keep_case(
    directory: Path,
    case: Case,
    voxels: PreparedCase,
    predictor: Predictor,
    model: SegmentationModel,
    device: torch.device,
) -> None:
    """Write a labelled case into a run's folder, small, for the run's report to look through (see `write_report_case`).

    Args:
        directory: folder of the run.
        case: the case.
        voxels: the same, prepared.
        predictor: from windows to logits.
        model: the network's.
        device: where windows are computed.
    """
    assert case.label is not None
    labels = predict_labels(voxels, predictor, model, device)
    truth = read_volume(case.label).voxels.astype(np.uint8)
    image, affine = _first_channel(case, model)
    write_report_case(directory, case.name, image, truth, labels, affine, model.preparation.window)


def draw_case(
    path: Path, case: Case, labels: np.ndarray, model: SegmentationModel, truth: np.ndarray | None, title: str
) -> None:
    """Draw the overlay of one case on its file's own grid; of several channels the first."""
    image, affine = _first_channel(case, model)
    names, window = model.labelling.labels, model.preparation.window
    draw_overlay(path, image, labels, affine, truth=truth, names=names, window=window, title=title)


def _first_channel(case: Case, model: SegmentationModel) -> tuple[np.ndarray, np.ndarray]:
    """Return the scan [X, Y, Z], of several channels the first, and its affine."""
    volume = read_volume(case.image, model.preparation.channels, first_only=model.preparation.channels > 1)
    return volume.voxels.reshape(volume.voxels.shape[:3], order="F"), volume.affine


def sample_windows(prepared: Sequence[PreparedCase], model: SegmentationModel, most: int = 3) -> torch.Tensor:
    """Return the middle window of some cases, [N, C, *window_size] float32; what a case lacks is filled with zeros."""
    windows = []
    for case in prepared[:most]:
        sides = [min(have, want) for have, want in zip(case.image.shape[1:], model.window_size, strict=True)]
        start = [(have - side) // 2 for have, side in zip(case.image.shape[1:], sides, strict=True)]
        middle = case.image[:, *(slice(a, a + side) for a, side in zip(start, sides, strict=True))].float()
        missing = [want - side for want, side in zip(model.window_size, sides, strict=True)]
        windows.append(F.pad(middle, [0, missing[2], 0, missing[1], 0, missing[0]]))
    return torch.stack(windows)
