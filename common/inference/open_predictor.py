"""Open the model of a run: with its engine, its ONNX model, or in torch, rewritten so that it computes the same faster.

Batch normalisations are folded into convolutions, and narrow transposed convolutions run on the coarse grid.
"""

import copy
import os
import stat
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from medspeed.common.files import check_digest, sha256_of
from medspeed.common.inference import AnyPrecision, Backend, ModelPrecision, Precision
from medspeed.common.inference.model import Ensemble, Trained
from medspeed.common.inference.predictors import (
    Predictor,
    computes_bf16,
    onnxruntime_predictor,
    read_onnx_metadata,
    torch_predictor,
)
from medspeed.common.inference.tensorrt_runtime import (
    EngineError,
    EnginePredictor,
    host_problem,
    manifest_path,
    read_manifest,
)
from medspeed.common.kernels import trust

_NORMS = (nn.BatchNorm2d, nn.BatchNorm3d)
_TRANSPOSED = (nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
# Along each axis: the parity of a fine voxel, its coarse voxel (0) or the next one (1), and the kernel's tap between.
_TAPS = ((0, 0, 1), (1, 0, 2), (1, 1, 0))
# More channels do not pay: on two cores 32 to 2 takes 0.4 of the time, to 3 0.65, to 4 0.75; 64 to 16 takes 2.1.
_MOST_CHANNELS = 4
_STORE = Path("~/.cache/medspeed")  # of verdicts, as of `--store`
_MOST_SHAPES = 2  # that are captured: each holds the memory of a call of its own
_TOLERANCE = 0.01  # of the logits: some kernels add in another order each time


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
    the training's bf16 in hardware, else ONNX Runtime; what cannot be loaded is passed over, and the line says why.

    Precision "auto" is that of the training with torch, else "fp32". ONNX Runtime works on the CPU in any case.

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
    stale = _unfit(onnx, weights)
    if stale and (backend in ("tensorrt", "onnxruntime") or exact == "int8"):
        raise ValueError(stale)

    def opened(by: Backend, reason: str) -> OpenedPredictor:
        if by == "tensorrt":
            return OpenedPredictor(EnginePredictor(plan, device), by, exact, reason, (plan,))
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
            if by == "tensorrt" and not isinstance(error, EngineError):  # damaged or changed: never passed over
                raise
            reason = " ".join(str(error).split())
    return opened(last, reason)


def _quick_in_torch(network: nn.Module, precision: Precision) -> Predictor:
    """Return what runs a network; ours is rewritten, others may not trace, or may read what we replace."""
    members = network.members if isinstance(network, Ensemble) else [network]
    ours = all(type(each).__module__.startswith("medspeed.models") for each in members)
    if ours:
        network = use_subpixel_upsampling(folded(network))
        # On a GPU torch's group normalisation gives contiguous memory back: all that follows would be turned.
        on_cpu = next(network.parameters()).device.type == "cpu"
        ours = on_cpu or not any(isinstance(each, nn.GroupNorm) for each in network.modules())
    return torch_predictor(network, precision, channels_last=ours)


def _unfit(onnx: Path, weights: Path) -> str | None:
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
    for file in (plan, manifest_path(plan)):
        status = file.stat() if file.is_file() else plan.stat()
        # A group of the owner's number is the owner's alone, by the custom of Linux.
        writable = status.st_mode & (stat.S_IWOTH if status.st_gid == status.st_uid else stat.S_IWOTH | stat.S_IWGRP)
        if status.st_uid not in (0, os.geteuid()) or writable:
            return f"{file.name} is native code that others may have written: pass --backend tensorrt to trust it"
    return host_problem(plan, read_manifest(plan), device)


def folded(network: nn.Module) -> nn.Module:
    """Return a network, in evaluation mode, whose batch normalisations are part of the convolutions right before them.

    The logits change by rounding only. A network without batch normalisation is returned as it is, others as a copy.
    What it computes must not depend on values, so that torch.fx can trace it.

    Source:
        Jacob et al., "Quantization and training of neural networks", CVPR 2018, 3.2; as torch.fx's tutorial does it.
    """
    assert not network.training, "folding needs network.eval()"
    if not any(isinstance(module, _NORMS) for module in network.modules()):
        return network
    traced = fx.symbolic_trace(copy.deepcopy(network))
    modules = dict(traced.named_modules())
    calls = Counter(str(node.target) for node in traced.graph.nodes if node.op == "call_module")
    for node in list(traced.graph.nodes):
        before = node.args[0] if node.args else None
        if not (isinstance(before, fx.Node) and node.op == before.op == "call_module"):
            continue
        convolution, norm = modules[str(before.target)], modules[str(node.target)]
        alone = len(before.users) == calls[str(before.target)] == 1  # what is read or called elsewhere stays as it is
        if alone and isinstance(norm, _NORMS) and isinstance(convolution, _CONVOLUTIONS):
            fused = fuse_conv_bn_eval(convolution, norm, transpose=isinstance(convolution, _TRANSPOSED))
            traced.set_submodule(str(before.target), fused)
            node.replace_all_uses_with(before)
            traced.graph.erase_node(node)
    traced.recompile()
    traced.delete_all_unused_submodules()
    return traced


class SubpixelUpsampling(nn.Module):
    """What a transposed convolution (kernel 3, stride 2, padding 1, output padding 1) computes, up to rounding.

    The eight fine voxels of a coarse one are channels of one convolution with a kernel of 2, and are then put into
    their places. oneDNN's transposed convolutions are slow where the channels are few.

    Source:
        Shi et al., "Is the deconvolution layer the same as a convolutional layer?", 2016.
    """

    def __init__(self, transposed: nn.ConvTranspose3d) -> None:
        super().__init__()
        assert fits(transposed), transposed
        weight, bias = transposed.weight.detach(), transposed.bias
        coarse, fine = weight.shape[:2]
        kernel = weight.new_zeros(2, 2, 2, fine, coarse, 2, 2, 2)
        for (a, x, i), (b, y, j), (c, z, k) in product(_TAPS, repeat=3):
            kernel[a, b, c, :, :, x, y, z] = weight[:, :, i, j, k].T
        self.convolution = nn.Conv3d(coarse, 8 * fine, 2, padding=1, bias=bias is not None)
        self.convolution.weight.data = kernel.flatten(0, 3)
        if self.convolution.bias is not None and bias is not None:
            self.convolution.bias.data = bias.detach().repeat(8)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return [B, K, 2 X, 2 Y, 2 Z] for [B, C, X, Y, Z], channels innermost."""
        found: torch.Tensor = self.convolution(image)[:, :, 1:, 1:, 1:]  # the first reads before the image
        batch, channels, x, y, z = found.shape
        parts = found.view(batch, 2, 2, 2, channels // 8, x, y, z).permute(0, 5, 1, 6, 2, 7, 3, 4)
        return parts.reshape(batch, 2 * x, 2 * y, 2 * z, channels // 8).permute(0, 4, 1, 2, 3)


def fits(module: nn.Module) -> bool:
    """Return whether a module is a transposed convolution that `SubpixelUpsampling` computes, with few channels."""
    return (
        isinstance(module, nn.ConvTranspose3d)
        and (module.kernel_size, module.stride, module.padding) == ((3, 3, 3), (2, 2, 2), (1, 1, 1))
        and (module.output_padding, module.dilation, module.groups) == ((1, 1, 1), (1, 1, 1), 1)
        and module.out_channels <= _MOST_CHANNELS
    )


def use_subpixel_upsampling(network: nn.Module) -> nn.Module:
    """Replace, in a network on a CPU that is not trained any more, the transposed convolutions that fit; return it."""
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.ConvTranspose3d) and fits(module) and module.weight.device.type == "cpu":
            network.set_submodule(name, SubpixelUpsampling(module))
    return network


class RepeatingPredictor:
    """A predictor on a GPU that repeats a CUDA graph, a captured call of another one, where that is equal and faster.

    The first windows of a shape decide; windows of more than two shapes go to the other predictor. Every call returns
    memory of its own.

    The other one must read nothing from the host; the verdict holds for what it is `about`, network and precision.
    """

    def __init__(self, predict: Predictor, about: str, say: Callable[[str], None]) -> None:
        self._predict, self._about, self._say = predict, about, say
        self._calls: dict[tuple[int, ...], Predictor] = {}

    def __call__(self, windows: torch.Tensor) -> torch.Tensor:
        """Return logits [B, K, *sides] float32 for windows [B, C, *sides] float32 on the GPU."""
        shape = tuple(windows.shape)
        if shape not in self._calls and len(self._calls) < _MOST_SHAPES:
            self._calls[shape] = self._decided(windows)
        return self._calls.get(shape, self._predict)(windows)

    def _decided(self, windows: torch.Tensor) -> Predictor:
        """Return what is to be called for windows of this shape; the graph is tried on others, too."""
        held, logits, replay = torch.empty_like(windows), [windows], list[Callable[[], object]]()

        def work() -> None:
            logits[0] = self._predict(held)

        def repeated(windows: torch.Tensor) -> torch.Tensor:
            held.copy_(windows)
            if not replay:  # the first call captures the work
                replay.append(trust.record(work))
            replay[0]()
            return logits[0].clone()

        some = windows, -windows.flip(-1)
        graph, eager = (lambda call=call: [call(each) for each in some] for call in (repeated, self._predict))
        trial = trust.Trial("windows in a graph", graph, eager, _TOLERANCE, f"{self._about}, {list(windows.shape)}")
        try:
            if trust.choose([trial], "auto", _STORE.expanduser(), self._say):
                repeated(windows)  # a verdict of an earlier run has captured nothing
                return repeated
        except RuntimeError as error:
            self._say(f"windows: no CUDA graph, capture failed: {str(error).splitlines()[0]}")
        return self._predict
