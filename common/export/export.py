"""The end of a run: ONNX models and TensorRT engines in fp32, fp16 and INT8, each behind the parity gate."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from common.export.int8 import quantise
from common.export.onnx_model import ModelPrecision, Window, export_onnx
from common.export.parity import (
    BATCH_SIZES,
    Evaluate,
    ParityError,
    Reference,
    check_calibration,
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
_SECONDS = "s per window in ONNX Runtime"


@dataclass(frozen=True)
class OnnxRecord:
    """An ONNX model as a run's summary holds it.

    Attributes:
        precision: "fp32", "fp16" or "int8".
        path: the file; None where the gate refused it.
        sha256: its digest.
        max_abs_diff: largest difference of a logit from torch in fp32.
        quality_delta: change of the validation quality.
        reason: why it was refused.
        bytes: size of the file.
        note: which operators INT8 computes and which not; None in the other precisions.
    """

    precision: str
    path: str | None = None
    sha256: str | None = None
    max_abs_diff: float | None = None
    quality_delta: float | None = None
    reason: str | None = None
    bytes: int | None = None
    note: str | None = None


@dataclass(frozen=True)
class ExportRecord:
    """All that was exported.

    Attributes:
        onnx: fp32, then fp16, then int8 where there were windows to calibrate it on.
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
    calibration: torch.Tensor | None = None,
) -> ExportRecord:
    """Export a trained network to `folder`/model_{fp32,fp16,int8}.{onnx,plan}; what the gate refuses is not left there.

    A refused fp16 or int8 export is recorded and the fp32 one stays; a refused fp32 export is an error. Without
    TensorRT the ONNX models stay and the record says why there is no engine.

    Args:
        network: the plain module on any device; it is left as it is.
        windows: [N, C, *sides] float32, a few real windows of the size to export.
        evaluate: returns the validation quality of a predictor, which takes windows on the network's device.
        folder: is made where it is missing.
        batch: windows in one call of the engine: the fewest, the number to tune for, the most.
        metadata: is kept in the ONNX models (name, classes, preparation, digest of the weights).
        engine: which TensorRT builds the engines.
        smallest: shape (C, *sides) of the smallest window, where the sides are to be free.
        calibration: [M, C, *sides] float32, windows of training cases that INT8 is calibrated on; None makes no INT8.

    Raises:
        ParityError: the fp32 export does not compute what torch computes.
        EngineError: an engine in fp32 or fp16 was built and cannot be loaded.
        ValueError: the calibration windows do not fit the network.
    """
    reference = take_reference(network, windows, evaluate)
    metadata = {**metadata, "batch": " ".join(str(size) for size in batch)}
    no_engine = "switched off" if engine == "none" else why_no_engine(engine)
    precisions: tuple[ModelPrecision, ...] = ("fp32", "fp16") if calibration is None else ("fp32", "fp16", "int8")
    models = tuple(
        _checked_onnx(network, reference, folder, metadata, precision, smallest, calibration)
        for precision in precisions
    )
    engines = []
    if engine != "none" and no_engine is None:
        device = next(network.parameters()).device
        paths = [Path(model.path) for model in models if model.path]
        engines = [_checked_engine(path, reference, batch, engine, device) for path in paths]
    return ExportRecord(models, tuple(engines), no_engine)


def precision_table(record: ExportRecord, seconds: Mapping[str, float] | None = None) -> str:
    """Return a Markdown table with a line for each precision, in MiB, seconds and logits; a dash is not known.

    Args:
        record: of the export.
        seconds: per window in ONNX Runtime, by precision.
    """
    rows = [
        ("precision", "ONNX MiB", "engine MiB", _SECONDS, "largest logit difference", "quality change", "verdict"),
        ("---", *["---:"] * 5, "---"),
    ]
    engines = {engine.precision: engine for engine in record.engines}
    for model in record.onnx:
        engine = engines.get(model.precision)
        verdict = model.reason or (f"kept; engine: {engine.reason}" if engine and engine.reason else "kept")
        cells = (
            _number(model.bytes, 2**-20, ".1f"),
            _number(engine.bytes if engine else None, 2**-20, ".1f"),
            _number((seconds or {}).get(model.precision), 1, ".3f"),
            _number(model.max_abs_diff, 1, ".2g"),
            _number(model.quality_delta, 1, ".4f"),
        )
        rows.append((model.precision, *cells, " ".join(verdict.replace("|", "\\|").split())))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _number(value: float | None, factor: float, form: str) -> str:
    return "—" if value is None else format(value * factor, form)


def _checked_onnx(
    network: nn.Module,
    reference: Reference,
    folder: Path,
    metadata: Mapping[str, str],
    precision: ModelPrecision,
    smallest: Window | None,
    calibration: torch.Tensor | None,
) -> OnnxRecord:
    path = folder / f"model_{precision}.onnx"
    shape = tuple(reference.windows.shape[1:])
    note = None
    try:
        if precision == "int8":
            assert calibration is not None  # else there is no such model
            check_calibration(calibration, reference.windows)
            note = quantise(folder / "model_fp32.onnx", path, calibration).note
        else:
            if precision == "fp16":
                check_half_range(network, reference.windows)
            export_onnx(network, path, shape, precision, metadata, smallest)
        parity = check_onnx(reference, path, precision)
    except ParityError as refusal:
        for refused in (path, *_plan_files(path)):
            refused.unlink(missing_ok=True)
        if precision == "fp32":
            raise
        return OnnxRecord(precision, reason=str(refusal), note=note)
    size = path.stat().st_size
    return OnnxRecord(
        precision, str(path), sha256_of(path), parity.max_abs_diff, parity.quality_delta, bytes=size, note=note
    )


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
    precision = read_manifest(plan).precision
    sizes = {size for size in (*BATCH_SIZES, batch[1]) if batch[0] <= size <= batch[2]}
    ran = False
    try:
        predict = EnginePredictor(plan, device)
        ran = True
        parity = check_predictor(reference, predict, precision, str(plan), sorted(sizes), device)
    except (ParityError, EngineError) as refusal:
        if isinstance(refusal, EngineError) and precision != "int8":  # a GPU may have no kernel for INT8
            raise
        plan.unlink()
        manifest.unlink()
        if precision == "fp32":
            raise
        return replace(record, path=None, sha256=None, bytes=None, ran=ran, reason=" ".join(str(refusal).split()))
    return replace(record, ran=True, max_abs_diff=parity.max_abs_diff, quality_delta=parity.quality_delta)


def _plan_files(onnx: Path) -> tuple[Path, Path]:
    plan = onnx.with_suffix(".plan")
    return plan, manifest_path(plan)
