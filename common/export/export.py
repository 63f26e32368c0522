"""The end of a run: ONNX models and TensorRT engines; the parity gate removes what runs here and differs from torch."""

import copy
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from medspeed.common.data.dataset import Case
from medspeed.common.data.preparation import PreparedCase
from medspeed.common.export.onnx_model import Window, export_onnx
from medspeed.common.export.tensorrt_engine import EngineChoice, build_engine, choose_flavour
from medspeed.common.files import atomic_path, plural, record_digests, sha256_of
from medspeed.common.host_memory import free_memory
from medspeed.common.inference import ModelPrecision
from medspeed.common.inference import tensorrt_runtime as engines
from medspeed.common.inference.labels import case_dice, dice_counts
from medspeed.common.inference.model import VolumeModel
from medspeed.common.inference.predict import predict_labels, read_truth, sample_windows
from medspeed.common.inference.predictors import Predictor, onnxruntime_predictor, torch_predictor
from medspeed.common.run import Run

LOGIT_BOUND = 1e-3  # most that a logit may differ from torch in fp32, or a hundredth of it times the largest logit
LOGIT_SHARES = {"fp16": 0.1, "int8": 0.5}  # of the largest logit; default runs of the apps are off by .001 and .07
QUALITY_BOUNDS = {"fp32": 0.001, "fp16": 0.005, "int8": 0.01}  # most that the validation quality may change
HALF_BOUND = 32768.0  # largest activation in half precision, which ends at 65504: another scan may bring twice as much
BATCH_SIZES = (1, 2, 3)
GATE_CASES = 8  # the gate runs each export on so many cases,
GATE_WINDOWS = 24  # at the end of a training on as many as fill so many windows: large scans take a CPU a minute each
Quantise = Callable[[Path, Path], None]  # writes the INT8 model of an fp32 one
Writer = Callable[[Path], object]  # writes a model


class ParityError(ValueError):
    """An export that does not compute what torch computes; it must not be used."""


@dataclass(frozen=True, eq=False)
class Gate:
    """What exports are judged on, and what they are to take."""

    windows: torch.Tensor  # [N, C, *sides] float32, N >= 1, real ones of the size to export, on the CPU
    evaluate: Callable[[Predictor], float]  # quality, in [0, 1], of a predictor of windows on the network's device
    origin: str  # which quality, and on what, in words: "Dice on 3 validation cases"
    batch: int = 1  # as for `smallest` and `metadata` see `export_onnx`
    smallest: Window | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


class Reference(NamedTuple):
    """What torch computes in fp32, the measure of every export."""

    gate: Gate
    logits: torch.Tensor  # [N, K, *sides] of its windows, on the CPU
    quality: float
    activations: dict[str, torch.Tensor]  # the largest absolute value of each module's output, in the order of calls


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
    rows = {kind: [asdict(each) for each in exports if each.kind == kind] for kind in ("onnx", "engine")}
    return {kind: {**first, **{each["precision"]: each for each in rest}} for kind, (first, *rest) in rows.items()}


def export(
    network: nn.Module, gate: Gate, run: Run, engine: EngineChoice = "auto", quantise: Quantise | None = None
) -> Exports:
    """Export a network to `exports`/model_{fp32,fp16,int8}.{onnx,plan} of a run, and say and return what came of it.

    What the gate refuses is not left there; a refused fp32 export is a ParityError. Of those that passed there are
    engines; without TensorRT the last record says why there are none. `quantise` makes the INT8 model; None makes none.
    The network is the plain module on any device, with the weights of the run's best.safetensors; it is left as it is.
    """
    run.say(f"parity gate: {gate.origin}")
    with run.clock.stage("export"):
        reference = take_reference(network, gate)
        folder = run.directory / "exports"
        metadata = {**gate.metadata, "weights_sha256": sha256_of(run.directory / "best.safetensors")}
        write = partial(export_onnx, network, window=tuple(gate.windows.shape[1:]), metadata=metadata)
        write = partial(write, smallest=gate.smallest, batch=gate.batch)
        writers: dict[ModelPrecision, Writer]
        writers = {"fp32": partial(write, precision="fp32"), "fp16": partial(write, precision="fp16")}
        writers |= {} if quantise is None else {"int8": partial(quantise, folder / "model_fp32.onnx")}
        exports = [_checked_onnx(folder / f"model_{each}.onnx", each, writers[each], reference) for each in writers]
        kept = [Path(model.path) for model in exports if model.path]
        record_digests(run.directory, kept)
        try:
            flavour, device = choose_flavour(engine), next(network.parameters()).device
        except engines.EngineUnavailableError as error:
            exports.append(Exported("engine", reason=str(error)))
        else:
            exports += [_checked_engine(path, reference, flavour, device) for path in kept]
    for each in exports:
        said = each.path or ("refused" if each.precision else "none")
        line = f"{each.kind} {each.precision}".rstrip() + f": {said}{f' ({each.reason})' if each.reason else ''}"
        run.say(line, "note" if each.path or not each.precision else "warning")
    return tuple(exports)


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
        if not truths:  # torch is the first to be judged: the exports must find its labels
            truths.extend(found)
        return sum(case_dice(dice_counts(*pair, regions)) for pair in zip(found, truths, strict=True)) / len(found)

    words = {"labels": model.labelling.labels, "regions": [region.name for region in regions]}
    told = {name: json.dumps(each, ensure_ascii=False) for name, each in words.items()}
    metadata = {"name": f"medspeed {app}", **told}
    origin = f"{quality} on {plural(len(cases), 'case')} {origin}"
    windows = sample_windows(prepared, model)
    windows = windows if len(windows) > 1 else torch.cat((windows, windows.flip(-1)))  # equal ones hide a mixed batch
    return Gate(windows, evaluate, origin, batch=model.window_batch, metadata=metadata)


def _checked_onnx(path: Path, precision: ModelPrecision, write: Writer, reference: Reference) -> Exported:
    free_memory(math.inf)  # gives back what computed before; ONNX Runtime takes its own
    try:
        with atomic_path(path) as part:  # its name comes with the verdict
            write(part)
            difference, change = check_predictor(reference, onnxruntime_predictor(part), precision, str(path))
    except ParityError as refusal:
        _remove(path, path.with_suffix(".plan"))
        if precision == "fp32":
            raise
        return Exported("onnx", precision, reason=str(refusal))
    return Exported("onnx", precision, str(path), sha256_of(path), path.stat().st_size, difference, change, ran=True)


def _checked_engine(onnx: Path, reference: Reference, flavour: engines.Flavour, device: torch.device) -> Exported:
    plan, ran = onnx.with_suffix(".plan"), False
    none = Exported("engine", onnx.stem.removeprefix("model_"), flavour=flavour)
    try:
        manifest = build_engine(onnx, flavour)
        none = replace(none, version=manifest.version, targets=manifest.targets)
        built = replace(none, path=str(plan), sha256=manifest.plan_sha256, bytes=plan.stat().st_size)
        if (problem := engines.host_problem(plan, manifest, device)) is not None:
            return replace(built, reason=f"not run here: {problem}")
        predict = engines.EnginePredictor(plan, device)
        ran, sizes = True, sorted({*BATCH_SIZES, manifest.batch[1]})
        difference, change = check_predictor(reference, predict, manifest.precision, str(plan), sizes, device)
    except (ParityError, engines.EngineError) as refusal:
        _remove(plan)
        if isinstance(refusal, ParityError) and none.precision == "fp32":
            raise
        return replace(none, ran=ran, reason=" ".join(str(refusal).split()))
    return replace(built, ran=True, max_abs_diff=difference, quality_delta=change)


def _remove(*refused: Path) -> None:
    for path in (*refused, *map(engines.manifest_path, refused)):
        path.unlink(missing_ok=True)


def take_reference(network: nn.Module, gate: Gate) -> Reference:
    """Return what a network computes in fp32; the network itself, on any device and in any mode, is left as it is."""
    copied = copy.deepcopy(network).float().eval()
    quality, largest = gate.evaluate(torch_predictor(copied)), dict[str, torch.Tensor]()

    def note(name: str, module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, torch.Tensor):
            value = output.abs().amax()  # hands NaN on
            largest[name] = torch.maximum(largest.get(name, value), value)

    for name, module in copied.named_modules():
        module.register_forward_hook(partial(note, name or "(the whole network)"))
    predict = torch_predictor(copied.cpu())
    return Reference(gate, torch.cat([predict(window[None]) for window in gate.windows]), quality, largest)


def check_predictor(
    reference: Reference,
    predict: Predictor,
    precision: ModelPrecision,
    name: str,
    batch_sizes: Iterable[int] = BATCH_SIZES,
    device: torch.device | str = "cpu",
) -> tuple[float, float]:
    """Return the largest difference of a logit from torch, in batches of each size, and the change of the quality.

    `predict` takes windows on `device`; the precision chooses the bounds. In fp16 and int8 that of the logits is wide:
    it is for what the quality does not see, as where a network finds nothing. In fp16 the network's activations must
    fit, too: on the CPU ONNX Runtime computes in wider numbers, and cannot tell.
    A ParityError begins with the export's name, and names the bound that does not hold, or the first module out of it.
    """
    for module, value in reference.activations.items() if precision == "fp16" else ():
        if not value.item() <= HALF_BOUND:
            said = f"{name}: half precision: an activation of module {module} reaches {value.item():.6g}"
            raise ParityError(f"{said} (bound {HALF_BOUND:g}; the largest half-precision number is 65504)")
    windows, differences = reference.gate.windows, []
    for size in batch_sizes:
        order = torch.arange(math.ceil(len(windows) / size) * size) % len(windows)  # the first fill up the last batch
        for some in order.reshape(-1, size):
            differences.append((predict(windows[some].to(device)).cpu() - reference.logits[some]).abs().amax())
    difference = float(torch.stack(differences).amax())  # amax, unlike max of floats, hands NaN on
    largest = float(reference.logits.abs().amax())
    bound = LOGIT_SHARES.get(precision, 0.0) * largest or LOGIT_BOUND * max(1.0, largest / 100)
    if not (difference <= bound and math.isfinite(difference)):
        raise ParityError(f"{name}: a logit differs by {difference:.3g} from PyTorch in fp32 (bound {bound:g})")
    quality = reference.gate.evaluate(predict)
    change = abs(quality - reference.quality)
    if not change <= QUALITY_BOUNDS[precision]:
        said = f"{name}: validation quality {quality:.4f}, {reference.quality:.4f} in PyTorch in fp32"
        raise ParityError(f"{said}: a change of {change:.4f} (bound {QUALITY_BOUNDS[precision]})")
    return difference, change
