"""The end of a run: ONNX models and TensorRT engines in fp32 and fp16, each behind the parity gate."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from common.export.onnx_model import ExportPrecision, Window, export_onnx
from common.export.parity import (
    BATCH_SIZES,
    Evaluate,
    ParityError,
    Reference,
    check_half_range,
    check_onnx,
    check_predictor,
    take_reference,
)
from common.export.tensorrt_engine import Batches, EngineRecord, build_engine
from common.files import sha256_of
from common.inference.tensorrt_host import EngineError, FlavourChoice, choose_flavour, why_no_engine
from common.inference.tensorrt_runtime import EnginePredictor, host_problem, manifest_path, read_manifest

EngineChoice = Literal["auto", "tensorrt", "tensorrt_rtx", "none"]


@dataclass(frozen=True)
class OnnxRecord:
    """An ONNX model as a run's summary holds it.

    Attributes:
        precision: "fp32" or "fp16".
        path: the file; None where the gate refused it.
        sha256: its digest.
        max_abs_diff: largest difference of a logit from torch in fp32.
        quality_delta: change of the validation quality.
        reason: why it was refused.
    """

    precision: str
    path: str | None = None
    sha256: str | None = None
    max_abs_diff: float | None = None
    quality_delta: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class ExportRecord:
    """All that was exported.

    Attributes:
        onnx: fp32, then fp16.
        engines: the same for TensorRT, of those models that passed the gate; empty where there is no TensorRT.
        no_engine: one line saying why there are no engines; None where there are.
    """

    onnx: tuple[OnnxRecord, ...]
    engines: tuple[EngineRecord, ...]
    no_engine: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON takes it."""
        return asdict(self)


def export_model(
    network: nn.Module,
    *,
    windows: torch.Tensor,
    evaluate: Evaluate,
    folder: Path,
    batch: Batches,
    metadata: Mapping[str, str],
    engine: EngineChoice = "auto",
    smallest: Window | None = None,
) -> ExportRecord:
    """Export a trained network to `folder`/model_{fp32,fp16}.{onnx,plan}; what the gate refuses is not left there.

    A refused fp16 export is recorded and the fp32 one stays; a refused fp32 export is an error. Without TensorRT the
    ONNX models stay and the record says why there is no engine.

    Args:
        network: the plain module on any device; it is left as it is.
        windows: [N, C, *sides] float32, a few real windows of the size to export.
        evaluate: returns the validation quality of a predictor, which takes windows on the network's device.
        folder: is made where it is missing.
        batch: windows in one call of the engine: the fewest, the number to tune for, the most.
        metadata: is kept in the ONNX models (name, classes, preparation, digest of the weights).
        engine: which TensorRT builds the engines.
        smallest: shape (C, *sides) of the smallest window, where the sides are to be free.

    Raises:
        ParityError: the fp32 export does not compute what torch computes.
        EngineError: an engine was built and cannot be loaded.
    """
    reference = take_reference(network, windows, evaluate)
    metadata = {**metadata, "batch": " ".join(str(size) for size in batch)}
    no_engine = "switched off" if engine == "none" else why_no_engine(engine)
    models = tuple(
        _checked_onnx(network, reference, folder, metadata, precision, smallest) for precision in ("fp32", "fp16")
    )
    engines = []
    if engine != "none" and no_engine is None:
        device = next(network.parameters()).device
        paths = [Path(model.path) for model in models if model.path]
        engines = [_checked_engine(path, reference, batch, engine, device) for path in paths]
    return ExportRecord(models, tuple(engines), no_engine)


def _checked_onnx(
    network: nn.Module,
    reference: Reference,
    folder: Path,
    metadata: Mapping[str, str],
    precision: ExportPrecision,
    smallest: Window | None,
) -> OnnxRecord:
    path = folder / f"model_{precision}.onnx"
    shape = tuple(reference.windows.shape[1:])
    try:
        if precision == "fp16":
            check_half_range(network, reference.windows)
        export_onnx(network, path, shape, precision, metadata, smallest)
        parity = check_onnx(reference, path, precision)
    except ParityError as refusal:
        for refused in (path, *_plan_files(path)):
            refused.unlink(missing_ok=True)
        if precision == "fp32":
            raise
        return OnnxRecord(precision, reason=str(refusal))
    return OnnxRecord(precision, str(path), sha256_of(path), parity.max_abs_diff, parity.quality_delta)


def _checked_engine(
    onnx: Path, reference: Reference, batch: Batches, flavour: FlavourChoice, device: torch.device
) -> EngineRecord:
    plan, manifest = _plan_files(onnx)
    try:
        record = build_engine(onnx, plan, batch=batch, flavour=flavour)
    except EngineError as error:
        reason = " ".join(str(error).split())
        precision = onnx.stem.removeprefix("model_")
        return EngineRecord(precision, choose_flavour(flavour), "", (), None, None, reason=reason)
    problem = host_problem(plan, read_manifest(plan), device)
    if problem is not None:
        return replace(record, reason=problem)
    predict = EnginePredictor(plan, device)
    precision = predict.manifest.precision
    sizes = {size for size in (*BATCH_SIZES, batch[1]) if batch[0] <= size <= batch[2]}
    try:
        parity = check_predictor(reference, predict, precision, str(plan), sorted(sizes), device)
    except ParityError as refusal:
        plan.unlink()
        manifest.unlink()
        if precision == "fp32":
            raise
        return replace(record, path=None, sha256=None, ran=True, reason=str(refusal))
    return replace(record, ran=True, max_abs_diff=parity.max_abs_diff, quality_delta=parity.quality_delta)


def _plan_files(onnx: Path) -> tuple[Path, Path]:
    plan = onnx.with_suffix(".plan")
    return plan, manifest_path(plan)
