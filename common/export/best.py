"""Export the best weights of a run to ONNX and TensorRT, through the parity gate on its validation cases."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import nn

from common.data.cases import Case
from common.data.preparation import PreparedCase
from common.export.export import EngineChoice, ExportRecord, OnnxRecord, export_model
from common.export.tensorrt_engine import EngineRecord
from common.files import sha256_of
from common.inference.predictors import Predictor
from common.inference.segmentation import SegmentationModel, case_dice, native_counts, sample_windows
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

    def evaluate(predictor: Predictor) -> float:
        counts = native_counts(cases, prepared, predictor, model, run.device)
        return sum(case_dice(each) for each in counts) / len(counts)

    with run.clock.stage("export"):
        record = export_model(
            best,
            windows=sample_windows(prepared, model),
            evaluate=evaluate,
            folder=run.directory / "exports",
            batch=(1, model.window_batch, max(4, model.window_batch)),
            metadata={
                "name": f"medspeed {name}",
                "labels": " ".join(model.labelling.labels),
                "regions": " ".join(region.name for region in model.labelling.regions),
                "weights_sha256": sha256_of(run.directory / "best.safetensors"),
            },
            engine=engine,
        )
    say_exported(record, run)
    return record


def say_exported(record: ExportRecord, run: Run) -> None:
    """Say in a line each which models and engines there are, and why others are not."""
    for onnx in record.onnx:
        run.say(f"onnx {onnx.precision}: {onnx.path or 'refused'} {onnx.reason or ''}".rstrip())
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
