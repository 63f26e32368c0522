"""Open the model of a run: with its engine, its ONNX model, or in torch, where batch normalisations are folded."""

import copy
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from medspeed.common.files import DIGESTS, read_object, sha256_of
from medspeed.common.inference import AnyPrecision, Backend, ModelPrecision, Precision
from medspeed.common.inference import tensorrt_runtime as engines
from medspeed.common.inference.model import Trained, first_line
from medspeed.common.inference.predictors import (
    Predictor,
    computes_bf16,
    onnxruntime_predictor,
    read_onnx_metadata,
    torch_predictor,
)
from medspeed.common.kernels import trust
from medspeed.common.kernels.doubling import DOUBLING
from medspeed.common.kernels.folding import FOLDED
from medspeed.common.kernels.norms import GROUP

_NORMS = (nn.BatchNorm2d, nn.BatchNorm3d)
_TRANSPOSED = (nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_STORE = Path("~/.cache/medspeed")  # of verdicts, as of `--store`
_MOST_SHAPES = 2  # that are captured: each holds the memory of a call of its own
# Graphs to try, in this order, and which of our kernels each may use: those that evaluation has, or none.
_GRAPHS = (("windows in a graph of our kernels", (FOLDED, GROUP, DOUBLING)), ("windows in a graph", ()))
_TOLERANCE = 0.01  # of the logits: some kernels add in another order each time


class Ensemble(nn.Module):
    """Several networks that take the same windows."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return the mean of their logits, [B, K, X, Y, Z] float32, of windows [B, C, X, Y, Z]."""
        total: torch.Tensor = reduce(torch.add, (each(image).float() for each in self.members))
        return total / len(self.members)


@dataclass(frozen=True)
class OpenedPredictor:
    """A predictor, what runs it in which precision, in one line why, and the files whose numbers it computes with."""

    predict: Predictor
    backend: Backend
    precision: AnyPrecision
    reason: str
    files: tuple[Path, ...]


def open_predictor(
    folder: Path,
    trained: Trained,
    *,
    backend: Literal["auto", Backend] = "auto",
    precision: Literal["auto", AnyPrecision] = "auto",
    device: torch.device,
) -> OpenedPredictor:
    """Open the model of a run: its weights in torch, or what lies in `folder`/exports.

    Backend "auto" takes the engine where one fits this host and is this user's own, else torch on a GPU or where it has
    the training's bf16 in hardware, else ONNX Runtime, on the CPU; what cannot be loaded is passed over, and the line
    says why. Precision "auto" is that of the training with torch, else "fp32".

    Raises:
        FileNotFoundError: the run has no such export.
        ValueError: what is to run is damaged, does not fit this host, or is not there in this precision.
    """
    exact: AnyPrecision = "fp32" if precision == "auto" else precision
    computed: Any = trained.precision if precision == "auto" else precision
    weights, exports = folder / "best.safetensors", folder / "exports"
    plan, onnx = exports / f"model_{exact}.plan", exports / f"model_{exact}.onnx"
    takes = get_args(Precision if backend == "torch" else ModelPrecision)
    if backend != "auto" and exact not in takes:
        raise ValueError(f"precision {exact}: backend {backend} takes {', '.join(takes)}")
    stale = unfit(onnx, weights)
    if stale and (backend in ("tensorrt", "onnxruntime") or exact == "int8"):
        raise ValueError(stale)

    def opened(by: Backend, reason: str) -> OpenedPredictor:
        if by == "tensorrt":
            return OpenedPredictor(engines.EnginePredictor(plan, device), by, exact, reason, (plan,))
        if by == "onnxruntime":
            check_digest(folder, onnx)
            return OpenedPredictor(onnxruntime_predictor(onnx), by, exact, reason, (onnx,))
        network = trained.build(weights).to(device).eval()
        return OpenedPredictor(_quick_in_torch(network, computed), by, computed, reason, (weights,))

    if backend != "auto":
        return opened(backend, "as asked")
    problem = stale or (_engine_problem(plan, device) if plan.is_file() else "no engine in this run")
    quicker = computed == "bf16" and computes_bf16(device)
    on_cpu = exact == "int8" or (device.type == "cpu" and onnx.is_file() and not quicker and not stale)
    able: dict[Backend, bool] = {"tensorrt": problem is None, "onnxruntime": on_cpu, "torch": exact != "int8"}
    *others, last = (name for name, taken in able.items() if taken)
    reason = problem or "there is an engine for this GPU"
    for by in others:
        try:
            return opened(by, reason)
        except ValueError as error:
            if by == "tensorrt" and not isinstance(error, engines.EngineError):  # damaged or changed: never passed over
                raise
            reason = " ".join(str(error).split())
    return opened(last, reason)


def _quick_in_torch(network: nn.Module, precision: Precision) -> Predictor:
    """Return what runs a network; ours is rewritten, others may not trace, or may read what we replace."""
    members = network.members if isinstance(network, Ensemble) else [network]
    ours = all(type(each).__module__.startswith("medspeed.models") for each in members)
    if not ours:
        return torch_predictor(network, precision)
    network = fold_norms(network)
    if next(network.parameters()).is_cpu or not any(isinstance(each, nn.GroupNorm) for each in network.modules()):
        return channels_last_predictor(network, precision)
    # On a GPU torch's group normalisation gives contiguous memory back, and all that follows would be turned: ours not.
    last, plain = channels_last_predictor(copy.deepcopy(network), precision), torch_predictor(network, precision)
    return lambda windows: (last if trust.trusts(GROUP) else plain)(windows)


def channels_last_predictor(network: nn.Module, precision: Precision) -> Predictor:
    """Return a `torch_predictor` of weights, laid out anew, and windows whose channels are innermost."""
    for weight in network.parameters():
        if weight.ndim in _CHANNELS_LAST:
            weight.data = weight.data.contiguous(memory_format=_CHANNELS_LAST[weight.ndim])
    predict = torch_predictor(network, precision)
    # Not contiguous(): with one channel that changes nothing, and the first convolution goes the slow way.
    return lambda windows: predict(windows.clone(memory_format=_CHANNELS_LAST[windows.ndim]))


def unfit(onnx: Path, weights: Path) -> str | None:
    """Return a line on an ONNX model that cannot be read, or was made of other weights than its run's."""
    if not (onnx.is_file() and weights.is_file()):
        return None
    try:
        if read_onnx_metadata(onnx).get("weights_sha256") in (None, sha256_of(weights)):
            return None
    except ValueError as error:
        return str(error)
    return f"{onnx}: exported from other weights than best.safetensors beside it: export the run again"


def _engine_problem(plan: Path, device: torch.device) -> str | None:
    """Return one line on why an engine is not taken unasked: another user could have made it, or it cannot run here."""
    if engines.host_gpu(device) is None:  # its manifest may be damaged, too
        return "no CUDA device in use"
    for file in (plan, engines.manifest_path(plan)):
        status = file.stat() if file.is_file() else plan.stat()
        # A group of the owner's number is the owner's alone, by the custom of Linux.
        writable = status.st_mode & (stat.S_IWOTH if status.st_gid == status.st_uid else stat.S_IWOTH | stat.S_IWGRP)
        if status.st_uid not in (0, os.geteuid()) or writable:
            return f"{file.name} is native code that others may have written: pass --backend tensorrt to trust it"
    return engines.host_problem(plan, engines.read_manifest(plan), device)


def fold_norms(network: nn.Module) -> nn.Module:
    """Make the batch normalisations of a network of ours, in evaluation mode, part of the convolutions before them.

    The logits change by rounding only. In our networks a normalisation takes what the module before it gives.

    Source:
        Jacob et al., "Quantization and training of neural networks", CVPR 2018, 3.2.
    """
    assert not network.training, "folding needs network.eval()"
    leaves = [(name, module) for name, module in network.named_modules() if not any(module.children())]
    for (name, convolution), (after, norm) in pairwise(leaves):
        if isinstance(norm, _NORMS) and isinstance(convolution, _CONVOLUTIONS):
            transposed = isinstance(convolution, _TRANSPOSED)
            network.set_submodule(name, fuse_conv_bn_eval(convolution, norm, transpose=transposed))
            network.set_submodule(after, nn.Identity().eval())
    return network


def repeating_predictor(predict: Predictor, about: str, say: Callable[[str], None]) -> Predictor:
    """Return a predictor on a GPU that repeats a CUDA graph, a captured call of `predict`, where equal and faster.

    The first windows of a shape decide; windows of more than two shapes go to `predict`. Every call returns memory of
    its own. `predict` must read nothing from the host; the verdict holds for what it is `about`, network and precision.
    """
    calls: dict[tuple[int, ...], Predictor] = {}

    def repeating(windows: torch.Tensor) -> torch.Tensor:
        shape = tuple(windows.shape)
        if shape not in calls and len(calls) < _MOST_SHAPES:
            held_for = f"{about}, {list(shape)}"
            graphs = (_graph_of(predict, windows, name, kernels, held_for, say) for name, kernels in _GRAPHS)
            calls[shape] = next(filter(None, graphs), predict)
        return calls.get(shape, predict)(windows)

    return repeating


def _graph_of(
    predict: Predictor, windows: torch.Tensor, name: str, kernels: Sequence[str], about: str, say: Callable[[str], None]
) -> Predictor | None:
    """Return a captured call in which kernels are trusted, if a trial on these and other windows shows it to pay."""
    held, logits, replay = torch.empty_like(windows), [windows], list[Callable[[], object]]()

    def work() -> None:
        with trust.trusting(*kernels):
            logits[0] = predict(held)

    def repeated(windows: torch.Tensor) -> torch.Tensor:
        held.copy_(windows)
        if not replay:  # the first call captures the work
            replay.append(trust.record(work))
        replay[0]()
        return logits[0].clone()

    def tried() -> list[torch.Tensor]:
        call = repeated if trust.trusts(name) else predict
        return [call(windows), call(-windows.flip(-1))]

    trial = trust.Trial(name, tried, _TOLERANCE, about, launched=work)
    try:
        if trust.choose([trial], "auto", _STORE.expanduser(), say):
            repeated(windows)  # a verdict of an earlier run has captured nothing
            return repeated
    except RuntimeError as error:
        say(f"{name}: capture failed: {first_line(error)}")
    return None


def check_digest(folder: Path, file: Path) -> None:
    """Check that a file of a folder is the one that `digests.json` names, where it names it.

    Raises:
        ValueError: the file was changed or damaged, or the record is.
    """
    record = folder / DIGESTS
    due = read_object(record).get(file.relative_to(folder).as_posix()) if record.is_file() else None
    if due is not None and file.is_file() and (found := sha256_of(file)) != due:
        raise ValueError(
            f"{file}: SHA-256 {found} does not match {record.name} ({due}): the file was changed or damaged; "
            f"restore it, or remove {record.name} if you changed it yourself"
        )
