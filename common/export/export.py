"""The end of a run: ONNX models and TensorRT engines in fp32, fp16 and INT8, each behind the parity gate."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from medspeed.common.data.dataset import Case
from medspeed.common.data.preparation import PreparedCase
from medspeed.common.export.gate import BATCH_SIZES, Gate, ParityError, Reference, check_predictor, take_reference
from medspeed.common.export.onnx_model import export_onnx
from medspeed.common.export.tensorrt_engine import EngineChoice, build_engine, choose_flavour
from medspeed.common.files import plural, record_digests, sha256_of
from medspeed.common.inference import ModelPrecision
from medspeed.common.inference.labels import case_dice, dice_counts
from medspeed.common.inference.model import VolumeModel
from medspeed.common.inference.predict import predict_labels, read_truth, sample_windows, window_starts
from medspeed.common.inference.predictors import Predictor, onnxruntime_predictor
from medspeed.common.inference.tensorrt_runtime import (
    EngineError,
    EnginePredictor,
    EngineUnavailableError,
    Flavour,
    host_problem,
    manifest_path,
)
from medspeed.common.run import Run

Quantise = Callable[[Path, Path], None]
"""Writes the INT8 model of an fp32 one."""
GATE_CASES = 8  # the gate runs each export on so many cases,
_GATE_WINDOWS = 48  # at the end of a training on as many as have so many windows: large scans take a CPU a minute each


@dataclass(frozen=True)
class Exported:
    """An ONNX model or a TensorRT engine as a run's summary holds it; also that there is no engine at all."""

    kind: Literal["onnx", "engine"]
    precision: str = ""  # "fp32", "fp16" or "int8"; "" where there is no engine
    path: str | None = None  # the file; None where the gate refused it
    sha256: str | None = None
    bytes: int | None = None
    max_abs_diff: float | None = None  # largest difference of a logit from torch in fp32; None where it did not run
    quality_delta: float | None = None  # change of the validation quality; None where it did not run
    reason: str | None = None  # why it was refused, or did not run here; None where all went well
    ran: bool = False  # here, through the parity gate
    flavour: str | None = None  # of an engine, `tensorrt` or `tensorrt_rtx`
    version: str | None = None  # of that module
    targets: tuple[str, ...] = ()  # compute capabilities of the GPUs that the engine runs on


Exports = tuple[Exported, ...]


def summary_of(exports: Exports) -> dict[str, Any]:
    """Return "onnx" and "engine" of a run's summary: the first's fields, the others under their precisions."""
    found = {}
    for kind in ("onnx", "engine"):
        first, *rest = (asdict(each) for each in exports if each.kind == kind)
        found[kind] = {**first, **{each["precision"]: each for each in rest}}
    return found


def export(
    network: nn.Module, gate: Gate, run: Run, engine: EngineChoice = "auto", quantise: Quantise | None = None
) -> Exports:
    """Export a network to `exports`/model_{fp32,fp16,int8}.{onnx,plan} of a run, and say and return what came of it.

    What the gate refuses is not left there; a refused fp32 export is an error. Of those that passed there are engines;
    without TensorRT the last record says why there are none. `quantise` makes the INT8 model; None makes none. The
    network is the plain module on any device, with the weights of the run's best.safetensors; it is left as it is.

    Raises:
        ParityError: the fp32 export does not compute what torch computes.
        EngineError: an engine in fp32 or fp16 was built and cannot be loaded.
    """
    run.say(f"parity gate: {gate.origin}")
    with run.clock.stage("export"):
        reference, folder = take_reference(network, gate), run.directory / "exports"
        metadata = {**gate.metadata, "weights_sha256": sha256_of(run.directory / "best.safetensors")}
        window, smallest = tuple(gate.windows.shape[1:]), gate.smallest
        write = partial(export_onnx, network, window=window, metadata=metadata, smallest=smallest, batch=gate.batch)
        writers: dict[ModelPrecision, Callable[[Path], object]]
        writers = {"fp32": partial(write, precision="fp32"), "fp16": partial(write, precision="fp16")}
        writers |= {} if quantise is None else {"int8": partial(quantise, folder / "model_fp32.onnx")}
        exports = [_checked_onnx(folder / f"model_{each}.onnx", each, writers[each], reference) for each in writers]
        kept = [Path(model.path) for model in exports if model.path]
        record_digests(run.directory, kept)
        try:
            flavour, device = choose_flavour(engine), next(network.parameters()).device
        except EngineUnavailableError as error:
            exports.append(Exported("engine", reason=str(error)))
        else:
            exports += [_checked_engine(path, reference, flavour, device) for path in kept]
    for each in exports:
        said = each.path or ("refused" if each.precision else "none")
        line = f"{each.kind} {each.precision}".rstrip() + f": {said}{f' ({each.reason})' if each.reason else ''}"
        run.say(line, "note" if each.path or not each.precision else "warning")
    return tuple(exports)


def training_gate(
    cases: Sequence[Case], prepared: Sequence[PreparedCase], model: VolumeModel, app: str, run: Run
) -> Gate:
    """Return the gate at the end of a training: on as many validation cases as take little time."""
    sizes = [zip(case.image.shape[1:], model.window_size, strict=True) for case in prepared[:GATE_CASES]]
    windows = (math.prod(len(window_starts(max(each), each[1], model.overlap)) for each in sides) for sides in sizes)
    count = max(1, sum(total <= _GATE_WINDOWS for total in accumulate(windows)))
    return volume_gate(cases[:count], prepared[:count], model, app, run, "of the validation set")


def volume_gate(
    cases: Sequence[Case], prepared: Sequence[PreparedCase], model: VolumeModel, app: str, run: Run, origin: str
) -> Gate:
    """Return the gate of a segmentation: the Dice of cases that all have labels, or else their agreement with torch.

    `prepared` are the same cases, prepared; `origin` says what they are.
    """
    truths = [read_truth(case) for case in cases if case.label is not None]  # once: each export is judged on them
    quality, regions = "Dice" if truths else "agreement with PyTorch", model.labelling.regions

    def evaluate(predictor: Predictor) -> float:
        found = [torch.from_numpy(predict_labels(case, predictor, model, run.device)) for case in prepared]
        truths.extend(found if not truths else ())  # torch is the first to be judged: the exports must find its labels
        return sum(case_dice(dice_counts(*pair, regions)) for pair in zip(found, truths, strict=True)) / len(found)

    words = {"labels": model.labelling.labels, "regions": [region.name for region in regions]}
    words |= {"members": [member.sha256 for member in model.members]} if model.members else {}
    metadata = {"name": f"medspeed {app}", **{name: " ".join(each) for name, each in words.items()}}
    origin = f"{quality} on {plural(len(cases), 'case')} {origin}"
    return Gate(sample_windows(prepared, model), evaluate, origin, model.window_batch, metadata=metadata)


def _checked_onnx(
    path: Path, precision: ModelPrecision, write: Callable[[Path], object], reference: Reference
) -> Exported:
    try:
        write(path)
        difference, change = check_predictor(reference, onnxruntime_predictor(path), precision, str(path))
    except ParityError as refusal:
        _remove(path, path.with_suffix(".plan"))
        if precision == "fp32":
            raise
        return Exported("onnx", precision, reason=str(refusal))
    return Exported("onnx", precision, str(path), sha256_of(path), path.stat().st_size, difference, change, ran=True)


def _checked_engine(onnx: Path, reference: Reference, flavour: Flavour, device: torch.device) -> Exported:
    plan, none = onnx.with_suffix(".plan"), Exported("engine", onnx.stem.removeprefix("model_"), flavour=flavour)
    try:
        manifest = build_engine(onnx, flavour)
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
