"""Export the weights of a run to ONNX and TensorRT, through the parity gate on its validation cases."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import nn

from apps.spleen.config import SpleenConfig
from apps.spleen.data import stored_cases
from apps.spleen.evaluate import native_dice, sample_windows
from apps.spleen.plan import SpleenPlan
from common.data.cases import Split
from common.export.export import ExportRecord, OnnxRecord, export_model
from common.export.tensorrt_engine import EngineRecord
from common.files import sha256_of
from common.inference.predictors import Predictor
from common.observe.run import Run

GATE_CASES = 8  # the gate runs each export on so many validation cases


def export_best(best: nn.Module, split: Split, plan: SpleenPlan, config: SpleenConfig, run: Run) -> ExportRecord:
    """Export the best weights to ONNX and TensorRT, each through the parity gate."""
    cases = split.validation[:GATE_CASES]
    prepared = stored_cases(cases, plan, config)

    def evaluate(predictor: Predictor) -> float:
        dice = native_dice(cases, prepared, predictor, plan.model, run.device)
        return sum(dice.values()) / len(dice)

    with run.clock.stage("export"):
        record = export_model(
            best,
            windows=sample_windows(prepared, plan.model),
            evaluate=evaluate,
            folder=run.directory / "exports",
            batch=(1, plan.model.window_batch, max(4, plan.model.window_batch)),
            metadata={
                "name": "medspeed spleen",
                "labels": " ".join(plan.model.labels),
                "weights_sha256": sha256_of(run.directory / "best.safetensors"),
            },
            engine=config.engine,
        )
    for onnx in record.onnx:
        run.say(f"onnx {onnx.precision}: {onnx.path or 'refused'} {onnx.reason or ''}".rstrip())
    for engine in record.engines:
        run.say(
            f"engine {engine.precision}: {engine.path}" + (f" (not run here: {engine.reason})" if engine.reason else "")
        )
    if record.no_engine:
        run.say(f"no engine: {record.no_engine}")
    return record


def by_precision(records: Sequence[OnnxRecord] | Sequence[EngineRecord]) -> dict[str, Any]:
    """Return the first record's fields, and those of the others under the names of their precisions."""
    first, *others = (asdict(record) for record in records)
    return {**first, **{other["precision"]: other for other in others}}
