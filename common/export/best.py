"""Export the best weights of a run to ONNX and TensorRT, through the parity gate on its validation cases."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from common.data.cases import Case
from common.data.preparation import PreparedCase
from common.export.export import EngineChoice, ExportRecord, OnnxRecord, export_model
from common.export.parity import Evaluate
from common.export.tensorrt_engine import Batches, EngineRecord
from common.files import sha256_of
from common.inference.predictors import Predictor
from common.inference.quality import dice_counts
from common.inference.segmentation import (
    SegmentationModel,
    case_dice,
    native_counts,
    predict_labels,
    sample_windows,
)
from common.inference.windows import window_plan
from common.observe.run import Run

GATE_CASES = 8  # the gate runs each export on so many validation cases,
_GATE_WINDOWS = 48  # or on as many as have so many windows together: large scans take a CPU a minute each


def export_best(
    best: nn.Module,
    cases: Sequence[Case],
    prepared: Sequence[PreparedCase],
    model: SegmentationModel,
    name: str,
    engine: EngineChoice,
    run: Run,
) -> ExportRecord:
    """Export the best weights, and say what came of it.

    Args:
        best: the network with the weights of `best.safetensors`, on the run's device.
        cases: validation cases for the gate, which takes the first of them (`GATE_CASES` at most).
        prepared: the same cases, prepared.
        model: the network's.
        name: of the app, kept in the ONNX models.
        engine: which TensorRT builds the engines.
        run: where they go, and what computes.
    """
    count = _worth_their_time(prepared, model)
    cases, prepared = cases[:count], prepared[:count]
    run.say(f"gate: each export is judged on {count} validation cases")
    evaluate = dice_on(cases, prepared, model, run)
    record = export_network(best, sample_windows(prepared, model), evaluate, model, name, engine, run)
    say_exported(record, run)
    return record


def export_network(
    network: nn.Module,
    windows: torch.Tensor,
    evaluate: Evaluate,
    model: SegmentationModel,
    name: str,
    engine: EngineChoice,
    run: Run,
    calibration: torch.Tensor | None = None,
) -> ExportRecord:
    """Export a segmentation network with the weights of a run to its folder `exports`.

    Args:
        network: with the weights of `best.safetensors`, on the run's device.
        windows: real ones for the gate, [N, C, *window_size] float32.
        evaluate: the gate's measure of quality.
        model: the network's.
        name: of the app, kept in the ONNX models.
        engine: which TensorRT builds the engines.
        run: where they go, and what computes.
        calibration: windows for INT8; None makes none.
    """
    with run.clock.stage("export"):
        return export_model(
            network,
            windows=windows,
            evaluate=evaluate,
            folder=run.directory / "exports",
            batch=engine_batch(model),
            metadata={
                "name": f"medspeed {name}",
                "labels": " ".join(model.labelling.labels),
                "regions": " ".join(region.name for region in model.labelling.regions),
                "weights_sha256": sha256_of(run.directory / "best.safetensors"),
            },
            engine=engine,
            calibration=calibration,
        )


def engine_batch(model: SegmentationModel) -> Batches:
    """Return how many windows an engine takes in one call: the fewest, the number it is tuned for, the most."""
    return 1, model.window_batch, max(4, model.window_batch)


def dice_on(cases: Sequence[Case], prepared: Sequence[PreparedCase], model: SegmentationModel, run: Run) -> Evaluate:
    """Return what gives a predictor's mean Dice on labelled cases, on their own grids."""

    def evaluate(predictor: Predictor) -> float:
        counts = native_counts(cases, prepared, predictor, model, run.device)
        return sum(case_dice(each) for each in counts) / len(counts)

    return evaluate


def agreement(prepared: Sequence[PreparedCase], model: SegmentationModel, run: Run) -> Evaluate:
    """Return what gives the mean Dice of a predictor's labels with those of the first predictor it is called with."""
    truth: list[torch.Tensor] = []

    def evaluate(predictor: Predictor) -> float:
        found = [torch.from_numpy(predict_labels(case, predictor, model, run.device)) for case in prepared]
        if not truth:
            truth.extend(found)
        pairs = zip(found, truth, strict=True)
        return sum(case_dice(dice_counts(*pair, model.labelling.regions)) for pair in pairs) / len(found)

    return evaluate


def say_exported(record: ExportRecord, run: Run) -> None:
    """Say in a line each which models and engines there are, and why others are not."""
    for onnx in record.onnx:
        run.say(f"onnx {onnx.precision}: {onnx.path or 'refused'} {onnx.reason or ''}".rstrip())
        if onnx.note:
            run.say(f"  {onnx.note}")
    for built in record.engines:
        reason = f" (not run here: {built.reason})" if built.reason else ""
        run.say(f"engine {built.precision}: {built.path}{reason}")
    if record.no_engine:
        run.say(f"no engine: {record.no_engine}")


def _worth_their_time(prepared: Sequence[PreparedCase], model: SegmentationModel) -> int:
    """Return how many of the cases the gate takes, at least 1."""
    count, windows = 0, 0
    for case in prepared[:GATE_CASES]:
        shape = (case.image.shape[1], case.image.shape[2], case.image.shape[3])
        windows += len(window_plan(shape, model.window_size, model.overlap, "constant", case.image.device).starts)
        if count and windows > _GATE_WINDOWS:
            break
        count += 1
    return count


def by_precision(records: Sequence[OnnxRecord] | Sequence[EngineRecord]) -> dict[str, Any]:
    """Return the first record's fields, and those of the others under the names of their precisions."""
    first, *others = (asdict(record) for record in records)
    return {**first, **{other["precision"]: other for other in others}}
