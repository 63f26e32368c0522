"""The end of a run: ONNX models and TensorRT engines in fp32, fp16 and INT8, each behind the parity gate."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn

from medspeed.common.data.dataset import Case
from medspeed.common.data.preparation import PreparedCase
from medspeed.common.export.gate import (
    BATCH_SIZES,
    Judge,
    ParityError,
    Reference,
    check_half_range,
    check_predictor,
    take_reference,
)
from medspeed.common.export.onnx_model import Window, export_onnx
from medspeed.common.export.tensorrt_engine import EngineChoice, build_engine, choose_flavour
from medspeed.common.files import plural, record_digests, sha256_of
from medspeed.common.inference import ModelPrecision
from medspeed.common.inference.labels import case_dice, dice_counts
from medspeed.common.inference.model import VolumeModel
from medspeed.common.inference.predict import predict_labels, read_truth, sample_windows
from medspeed.common.inference.predictors import Predictor, onnxruntime_predictor
from medspeed.common.inference.tensorrt_runtime import (
    EngineError,
    EnginePredictor,
    EngineUnavailableError,
    Flavour,
    host_problem,
    manifest_path,
)
from medspeed.common.inference.windows import window_starts
from medspeed.common.run import Run

Quantise = Callable[[Path, Path, torch.Tensor], str]
"""Writes the INT8 model of an fp32 one, to be judged on windows [N, C, *sides]; returns what it did, in words."""
GATE_CASES = 8  # the gate runs each export on so many cases,
_GATE_WINDOWS = 48  # at the end of a training on as many as have so many windows: large scans take a CPU a minute each


@dataclass(frozen=True)
class Exported:
    """An ONNX model or a TensorRT engine as a run's summary holds it.

    Attributes:
        precision: "fp32", "fp16" or "int8".
        path: the file; None where the gate refused it, as its digest and size are then.
        sha256: its digest.
        bytes: its size.
        max_abs_diff: largest difference of a logit from torch in fp32; None where it did not run.
        quality_delta: change of the validation quality; None where it did not run.
        reason: why it was refused, or did not run here; None where all went well.
        ran: whether it ran here, through the parity gate.
        note: of INT8, which operators compute in it and which not.
        flavour: of an engine, `tensorrt` or `tensorrt_rtx`.
        version: of that module.
        targets: compute capabilities of the GPUs that the engine runs on.
    """

    precision: str
    path: str | None = None
    sha256: str | None = None
    bytes: int | None = None
    max_abs_diff: float | None = None
    quality_delta: float | None = None
    reason: str | None = None
    ran: bool = False
    note: str | None = None
    flavour: str | None = None
    version: str | None = None
    targets: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExportRecord:
    """All that was exported.

    Attributes:
        onnx: fp32, then fp16, then int8 where it was wanted.
        engines: the same for TensorRT, of those models that passed the gate; empty where there is no TensorRT.
        no_engine: one line saying why there are no engines; None where there are.
    """

    onnx: tuple[Exported, ...]
    engines: tuple[Exported, ...]
    no_engine: str | None

    def summary(self) -> dict[str, Any]:
        """Return "onnx" and "engine" of a run's summary: the first's fields, the others under their precisions."""
        kinds = {"onnx": self.onnx, "engine": self.engines or (Exported("", reason=self.no_engine),)}
        rows = {kind: [asdict(each) for each in records] for kind, records in kinds.items()}
        return {kind: {**first, **{row["precision"]: row for row in rest}} for kind, (first, *rest) in rows.items()}


def export(
    network: nn.Module,
    judge: Judge,
    run: Run,
    *,
    batch: int,
    metadata: Mapping[str, str],
    engine: EngineChoice = "auto",
    smallest: Window | None = None,
    quantise: Quantise | None = None,
) -> ExportRecord:
    """Export a network to `exports`/model_{fp32,fp16,int8}.{onnx,plan} of a run, and say what came of it.

    What the gate refuses is not left there. A refused fp16 or int8 export is recorded, a refused fp32 export an error.
    Without TensorRT the ONNX models stay and the record says why there is no engine.

    Args:
        network: the plain module on any device, with the weights of the run's best.safetensors; it is left as it is.
        judge: what the gate judges on.
        run: where the exports go, and what computes.
        batch: windows in one call that an engine is tuned for; it takes 1 to this many, or to 4.
        metadata: is kept in the ONNX models (name, labels), beside the digest of the weights.
        engine: which TensorRT builds the engines.
        smallest: shape (C, *sides) of the smallest window, where the sides are to be free.
        quantise: makes the INT8 model (`medspeed.common.export.int8.quantiser`); None makes none.

    Raises:
        ParityError: the fp32 export does not compute what torch computes.
        EngineError: an engine in fp32 or fp16 was built and cannot be loaded.
    """
    run.say(f"parity gate: {judge.origin}")
    with run.clock.stage("export"):
        reference = take_reference(network, judge)
        metadata = {**metadata, "weights_sha256": sha256_of(run.directory / "best.safetensors")}

        def write(path: Path, precision: ModelPrecision) -> str | None:
            if precision == "int8":
                assert quantise is not None  # else there is no such precision
                return quantise(path.with_stem("model_fp32"), path, judge.windows)
            if precision == "fp16":
                check_half_range(network, judge.windows)
            export_onnx(network, path, tuple(judge.windows.shape[1:]), precision, metadata, smallest, batch)
            return None

        precisions: list[ModelPrecision] = ["fp32", "fp16"] if quantise is None else ["fp32", "fp16", "int8"]
        folder = run.directory / "exports"
        models = tuple(_checked_onnx(folder / f"model_{each}.onnx", each, write, reference) for each in precisions)
        kept = [Path(model.path) for model in models if model.path]
        record_digests(run.directory, kept)
        flavour, no_engine, device = None, None, next(network.parameters()).device
        try:
            flavour = choose_flavour(engine)
        except EngineUnavailableError as error:
            no_engine = str(error)
        engines = tuple(_checked_engine(path, reference, flavour, device) for path in kept if flavour)
    record = ExportRecord(models, engines, no_engine)
    _say(record, run)
    return record


def export_volumes(
    network: nn.Module,
    model: VolumeModel,
    judge: Judge,
    app: str,
    engine: EngineChoice,
    run: Run,
    quantise: Quantise | None = None,
) -> ExportRecord:
    """Export a segmentation network behind the gate; for the arguments and errors see `export`."""
    metadata = {
        "name": f"medspeed {app}",
        "labels": " ".join(model.labelling.labels),
        "regions": " ".join(region.name for region in model.labelling.regions),
    }
    if model.members:
        metadata["members"] = " ".join(member.sha256 for member in model.members)
    batch = model.window_batch
    return export(network, judge, run, batch=batch, metadata=metadata, engine=engine, quantise=quantise)


def judge_training(cases: Sequence[Case], prepared: Sequence[PreparedCase], model: VolumeModel, run: Run) -> Judge:
    """Return what the gate judges on at the end of a training: as many validation cases as take little time."""

    def windows(case: PreparedCase) -> int:
        sides = zip(case.image.shape[1:], model.window_size, strict=True)
        return math.prod(len(window_starts(max(have, side), side, model.overlap)) for have, side in sides)

    totals = accumulate(windows(case) for case in prepared[:GATE_CASES])
    count = max(1, sum(total <= _GATE_WINDOWS for total in totals))
    return judge_on(cases[:count], prepared[:count], model, run, "of the validation set")


def judge_on(
    cases: Sequence[Case], prepared: Sequence[PreparedCase], model: VolumeModel, run: Run, origin: str
) -> Judge:
    """Return what the gate judges on: the Dice of labelled cases, or of cases without labels the agreement with torch.

    Args:
        cases: all of them have labels, or none has.
        prepared: the same cases, prepared.
        model: the network's.
        run: what computes.
        origin: what the cases are, in words.
    """
    truths = [read_truth(case) for case in cases if case.label is not None]  # once: each export is judged on them
    quality = "Dice" if truths else "agreement with PyTorch"

    def evaluate(predictor: Predictor) -> float:
        found = [torch.from_numpy(predict_labels(case, predictor, model, run.device)) for case in prepared]
        truths.extend(found if not truths else ())  # torch is the first to be judged: the exports must find its labels
        pairs = zip(found, truths, strict=True)
        return sum(case_dice(dice_counts(*pair, model.labelling.regions)) for pair in pairs) / len(found)

    return Judge(sample_windows(prepared, model), evaluate, f"{quality} on {plural(len(cases), 'case')} {origin}")


def _checked_onnx(
    path: Path,
    precision: ModelPrecision,
    write: Callable[[Path, ModelPrecision], str | None],
    reference: Reference,
) -> Exported:
    note = None
    try:
        note = write(path, precision)
        difference, change = check_predictor(reference, onnxruntime_predictor(path), precision, str(path))
    except ParityError as refusal:
        _remove(path, path.with_suffix(".plan"))
        if precision == "fp32":
            raise
        return Exported(precision, reason=str(refusal), note=note)
    return Exported(precision, str(path), sha256_of(path), path.stat().st_size, difference, change, None, True, note)


def _checked_engine(onnx: Path, reference: Reference, flavour: Flavour, device: torch.device) -> Exported:
    plan, none = onnx.with_suffix(".plan"), Exported(onnx.stem.removeprefix("model_"), flavour=flavour)
    try:
        manifest = build_engine(onnx, plan, flavour)
    except EngineError as error:
        return replace(none, reason=" ".join(str(error).split()))
    none = replace(none, version=manifest.version, targets=manifest.targets)
    built = replace(none, path=str(plan), sha256=manifest.plan_sha256, bytes=plan.stat().st_size)
    if (problem := host_problem(plan, manifest, device)) is not None:
        return replace(built, reason=problem)
    sizes, ran = sorted({*BATCH_SIZES, manifest.batch[1]}), False
    try:
        predict = EnginePredictor(plan, device)
        ran = True
        difference, change = check_predictor(reference, predict, manifest.precision, str(plan), sizes, device)
    except (ParityError, EngineError) as refusal:
        if isinstance(refusal, EngineError) and manifest.precision != "int8":  # a GPU may have no kernel for INT8
            raise
        _remove(plan)
        if manifest.precision == "fp32":
            raise
        return replace(none, ran=ran, reason=" ".join(str(refusal).split()))
    return replace(built, ran=True, max_abs_diff=difference, quality_delta=change)


def _remove(*refused: Path) -> None:
    for path in refused:
        for each in (path, manifest_path(path)):
            each.unlink(missing_ok=True)


def _say(record: ExportRecord, run: Run) -> None:
    """Say in a line each which models and engines there are, and why others are not."""
    for model in record.onnx:
        line = f"onnx {model.precision}: {model.path or 'refused'} {model.reason or ''}".rstrip()
        run.say(line, "note" if model.path else "warning")
        if model.note:
            run.say(f"  {model.note}")
    for built in record.engines:
        reason = f" (not run here: {built.reason})" if built.reason else ""
        run.say(f"engine {built.precision}: {built.path}{reason}")
    if record.no_engine:
        run.say(f"no engine: {record.no_engine}")
