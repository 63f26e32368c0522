"""Apply a network to prepared cases: logits, label maps on the grid of the scan's own file, and the counts of Dice."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import combinations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common.data.dataset import Case
from common.data.preparation import PreparedCase
from common.data.volumes import read_volume
from common.inference.labels import dice_counts
from common.inference.model import VolumeModel
from common.inference.predictors import Predictor, torch_predictor
from common.inference.restore import restore_labels
from common.inference.windows import fitted_window, sliding_windows


def predict_logits(
    image: torch.Tensor, predictor: Predictor, model: VolumeModel, flips: str = "", fit: bool = False
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

    def logits_of(some: torch.Tensor) -> torch.Tensor:
        return sliding_windows(
            some,
            predictor,
            window,
            overlap=model.overlap,
            batch_size=model.window_batch,
            difference=model.labelling.exclusive,
        )

    axes = ["xyz".index(letter) + 1 for letter in flips]
    mirrors = [some for count in range(1, len(axes) + 1) for some in combinations(axes, count)]
    total = logits_of(image)
    for mirror in mirrors:
        total += logits_of(image.flip(mirror)).flip(mirror)
    return total.div_(1 + len(mirrors)) if flips else total


def predict_labels(
    case: PreparedCase,
    predictor: Predictor,
    model: VolumeModel,
    device: torch.device,
    stage: Callable[[str], AbstractContextManager[object]] = nullcontext,
    flips: str = "",
    fit: bool = False,
) -> np.ndarray:
    """Return the label map of a prepared case on its file's own grid, uint8 [X, Y, Z].

    Args:
        case: prepared.
        predictor: from windows to logits, on the device.
        model: the network's.
        device: where windows are computed.
        stage: times a block, "windows" or "restore".
        flips: see `predict_logits`, as for `fit`.
        fit: windows that fit the scan.
    """
    regions = None if model.labelling.exclusive else model.labelling.regions
    with stage("windows"):
        logits = predict_logits(case.image.to(device, torch.float32), predictor, model, flips, fit)
    with stage("restore"):
        return restore_labels(logits, case.grid, regions)


def working_counts(
    cases: Sequence[PreparedCase], network: nn.Module, model: VolumeModel, check: Callable[[], None]
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


def read_truth(case: Case) -> torch.Tensor:
    """Read the label map of a labelled case, uint8 [X, Y, Z] on its file's own grid.

    Raises:
        FileNotFoundError, ValueError: it cannot be read.
    """
    assert case.label is not None, case
    return torch.from_numpy(read_volume(case.label).voxels.astype(np.uint8))


def sample_windows(prepared: Sequence[PreparedCase], model: VolumeModel, most: int = 3) -> torch.Tensor:
    """Return the middle window of some cases, [N, C, *window_size] float32; what a case lacks is filled with zeros."""
    windows = []
    for case in prepared[:most]:
        sides = [min(have, want) for have, want in zip(case.image.shape[1:], model.window_size, strict=True)]
        start = [(have - side) // 2 for have, side in zip(case.image.shape[1:], sides, strict=True)]
        middle = case.image[:, *(slice(a, a + side) for a, side in zip(start, sides, strict=True))].float()
        missing = [want - side for want, side in zip(model.window_size, sides, strict=True)]
        windows.append(F.pad(middle, [0, missing[2], 0, missing[1], 0, missing[0]]))
    return torch.stack(windows)
