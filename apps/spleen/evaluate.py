"""The figure a run is judged by: Dice on the native grid of the validation cases, and the pictures that go with it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from apps.spleen.config import SpleenConfig
from apps.spleen.data import stored_cases
from apps.spleen.model import SpleenModel
from apps.spleen.plan import SpleenPlan
from common.data.cases import Case, Split
from common.data.preparation import PreparedCase
from common.data.volumes import read_volume
from common.inference.predictors import Predictor, torch_predictor
from common.inference.quality import dice_per_class
from common.inference.restore import restore_labels
from common.inference.windows import sliding_windows
from common.observe.overlays import draw_overlay
from common.observe.run import Run
from common.observe.summary import Quality
from common.observe.timing import Clock


def predict_labels(
    case: PreparedCase, predictor: Predictor, model: SpleenModel, device: torch.device, clock: Clock | None = None
) -> np.ndarray:
    """Return the label map of a prepared case on its file's own grid, uint8 [X, Y, Z]."""
    clock = clock or Clock()
    with clock.stage("windows"):
        image = case.image.to(device, torch.float32)
        logits = sliding_windows(image, predictor, model.window_size, batch_size=model.window_batch)
    with clock.stage("restore"):
        return restore_labels(logits, case.grid)


def native_dice(
    cases: Sequence[Case],
    prepared: Sequence[PreparedCase],
    predictor: Predictor,
    model: SpleenModel,
    device: torch.device,
    overlays: Path | None = None,
) -> dict[str, float]:
    """Return each case's mean foreground Dice on the grid of its own file.

    A case whose label and prediction are both empty has Dice 1: nothing is there, and nothing was found.

    Args:
        cases: labelled cases.
        prepared: the same cases, prepared.
        predictor: from windows to logits.
        model: window and labels.
        device: where windows are computed.
        overlays: folder for a picture of each case; None draws none.
    """
    dice = {}
    for case, voxels in zip(cases, prepared, strict=True):
        assert case.label is not None
        labels = predict_labels(voxels, predictor, model, device)
        truth = read_volume(case.label).voxels.astype(np.uint8)
        per_class = dice_per_class(torch.from_numpy(labels), torch.from_numpy(truth), len(model.labels))
        mean = float(per_class.nanmean())
        dice[case.name] = 1.0 if np.isnan(mean) else mean
        if overlays is not None:
            draw_case(
                overlays / f"{case.name}.png", case, labels, model, truth, f"{case.name}: Dice {dice[case.name]:.3f}"
            )
    return dice


def draw_case(
    path: Path, case: Case, labels: np.ndarray, model: SpleenModel, truth: np.ndarray | None, title: str
) -> None:
    """Draw the overlay of one case on its file's own grid; of several channels the first."""
    volume = read_volume(case.image, model.preparation.channels)
    image = volume.voxels if volume.voxels.ndim == 3 else volume.voxels[..., 0]
    window = model.preparation.window
    draw_overlay(path, image, labels, volume.affine, truth=truth, names=model.labels, window=window, title=title)


def sample_windows(prepared: Sequence[PreparedCase], model: SpleenModel, most: int = 3) -> torch.Tensor:
    """Return the middle window of some cases, [N, C, *window_size] float32; what a case lacks is filled with zeros."""
    windows = []
    for case in prepared[:most]:
        sides = [min(have, want) for have, want in zip(case.image.shape[1:], model.window_size, strict=True)]
        start = [(have - side) // 2 for have, side in zip(case.image.shape[1:], sides, strict=True)]
        middle = case.image[:, *(slice(a, a + side) for a, side in zip(start, sides, strict=True))].float()
        missing = [want - side for want, side in zip(model.window_size, sides, strict=True)]
        windows.append(F.pad(middle, [0, missing[2], 0, missing[1], 0, missing[0]]))
    return torch.stack(windows)


def judge(best: nn.Module, split: Split, plan: SpleenPlan, config: SpleenConfig, run: Run) -> Quality:
    """Return the Dice of the best weights on the native grid of the validation cases, and draw each case."""
    with run.clock.stage("validate"):
        prepared = stored_cases(split.validation, plan, config)
        dice = native_dice(
            split.validation, prepared, torch_predictor(best), plan.model, run.device, run.directory / "overlays"
        )
    mean = sum(dice.values()) / len(dice)
    selected = "validation" if split.held_out else "training"
    run.say(f"Dice on the native grid: {mean:.4f}, worst {min(dice.values()):.4f} ({min(dice, key=dice.__getitem__)})")
    if not split.held_out:
        run.say(
            "NOT HELD OUT: these cases were trained on; the Dice says that the run works, not how good the model is"
        )
    return Quality("foreground Dice, native grid, best weights", mean, dice, selected_on=selected)
