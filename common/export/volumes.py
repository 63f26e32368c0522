"""Export of a segmentation network: what the gate judges it on."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from common.data.dataset import Case
from common.data.preparation import PreparedCase
from common.export.export import EngineChoice, ExportRecord, export
from common.export.gate import Judge
from common.inference.labels import case_dice, dice_counts
from common.inference.model import VolumeModel
from common.inference.predict import predict_labels, read_truth, sample_windows
from common.inference.predictors import Predictor
from common.inference.windows import window_starts
from common.run import Run

GATE_CASES = 8  # the gate runs each export on so many cases,
_GATE_WINDOWS = 48  # at the end of a training on as many as have so many windows: large scans take a CPU a minute each


def export_volumes(
    network: nn.Module, model: VolumeModel, judge: Judge, app: str, engine: EngineChoice, run: Run
) -> ExportRecord:
    """Export a segmentation network behind the gate; for the arguments and errors see `export`."""
    metadata = {
        "name": f"medspeed {app}",
        "labels": " ".join(model.labelling.labels),
        "regions": " ".join(region.name for region in model.labelling.regions),
    }
    return export(network, judge, run, batch=model.window_batch, metadata=metadata, engine=engine)


def judge_training(cases: Sequence[Case], prepared: Sequence[PreparedCase], model: VolumeModel, run: Run) -> Judge:
    """Return what the gate judges on at the end of a training: the first cases, as many as take little time.

    Args:
        cases: labelled validation cases.
        prepared: the same cases, prepared.
        model: the network's.
        run: what computes.
    """
    count, windows = 0, 0
    for case in prepared[:GATE_CASES]:
        sides = zip(case.image.shape[1:], model.window_size, strict=True)
        windows += math.prod(len(window_starts(max(have, side), side, model.overlap)) for have, side in sides)
        if count and windows > _GATE_WINDOWS:
            break
        count += 1
    return judge_on(cases[:count], prepared[:count], model, run, "validation cases")


def judge_on(
    cases: Sequence[Case],
    prepared: Sequence[PreparedCase],
    model: VolumeModel,
    run: Run,
    origin: str,
    calibration: torch.Tensor | None = None,
) -> Judge:
    """Return what the gate judges on: the Dice of labelled cases, or of cases without labels the agreement with torch.

    Args:
        cases: all of them have labels, or none has.
        prepared: the same cases, prepared.
        model: the network's.
        run: what computes.
        origin: what the cases are, in words.
        calibration: windows for INT8; None makes none.
    """
    truths = [read_truth(case) for case in cases if case.label is not None]  # once: each export is judged on them
    quality = "Dice" if truths else "agreement with torch"

    def evaluate(predictor: Predictor) -> float:
        found = [torch.from_numpy(predict_labels(case, predictor, model, run.device)) for case in prepared]
        truths.extend(found if not truths else ())  # torch is the first to be judged: the exports must find its labels
        pairs = zip(found, truths, strict=True)
        return sum(case_dice(dice_counts(*pair, model.labelling.regions)) for pair in pairs) / len(found)

    return Judge(sample_windows(prepared, model), evaluate, f"{quality} on {len(cases)} {origin}", calibration)
