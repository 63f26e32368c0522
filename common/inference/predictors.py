"""Predictors: one callable for a network in torch, for its ONNX export and for its TensorRT engine."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from torch import nn

from common.files import sha256_of
from common.inference.folding import folded
from common.inference.onnx_norms import with_exact_norms
from common.inference.tensorrt_runtime import EnginePredictor, host_problem, read_manifest
from common.inference.upsampling import use_subpixel_upsampling

Predictor = Callable[[torch.Tensor], torch.Tensor]
"""From windows [B, C, *sides] float32 to logits [B, K, *sides] float32 on their device; sides: X, Y, Z or Y, X."""
Precision = Literal["fp32", "bf16", "fp16"]
Exported = Literal["fp32", "bf16", "fp16", "int8"]
Backend = Literal["tensorrt", "onnxruntime", "torch"]
_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class OpenedPredictor:
    """A predictor, what runs it in which precision, and in one line why."""

    predict: Predictor
    backend: Backend
    precision: Exported
    reason: str


def torch_predictor(network: nn.Module, precision: Precision = "fp32", channels_last: bool = False) -> Predictor:
    """Return a predictor that runs a network in torch on the network's device, without gradients.

    Args:
        network: in evaluation mode.
        precision: "bf16" and "fp16" run under autocast.
        channels_last: lay windows, and the network's own weights, out with the channels last.
    """
    assert not network.training, "a predictor needs network.eval()"
    if channels_last:
        for weight in network.parameters():
            if weight.ndim in _CHANNELS_LAST:
                weight.data = weight.data.contiguous(memory_format=_CHANNELS_LAST[weight.ndim])

    def predict(windows: torch.Tensor) -> torch.Tensor:
        half = torch.autocast(windows.device.type, _DTYPES.get(precision), enabled=precision in _DTYPES)
        with torch.no_grad(), half:
            # Not contiguous(): with one channel that changes nothing, and the first convolution goes the slow way.
            laid_out = windows.clone(memory_format=_CHANNELS_LAST[windows.ndim]) if channels_last else windows
            logits: torch.Tensor = network(laid_out)
        return logits.float()

    return predict


def onnxruntime_predictor(path: Path, threads: int | None = None) -> Predictor:
    """Return a predictor that runs an ONNX model on the CPU; windows and logits may lie on another device.

    Args:
        path: the model, with one input and one output.
        threads: threads of one call, by default those of torch.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: windows do not have the shape that the model takes.
    """
    import onnxruntime  # here, since a run on a GPU has no need of it

    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: export the model first")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    session: Any = onnxruntime.InferenceSession(with_exact_norms(path), options, providers=["CPUExecutionProvider"])
    image = session.get_inputs()[0]

    def predict(windows: torch.Tensor) -> torch.Tensor:
        fixed = [isinstance(side, int) for side in image.shape[1:]]  # free sides have names
        if len(windows.shape) != len(image.shape) or any(
            is_fixed and side != due
            for is_fixed, side, due in zip(fixed, windows.shape[1:], image.shape[1:], strict=True)
        ):
            raise ValueError(f"windows {tuple(windows.shape)}: {path} takes windows of shape {tuple(image.shape[1:])}")
        logits = session.run(None, {image.name: windows.float().contiguous().cpu().numpy()})[0]
        return torch.from_numpy(logits).to(windows.device)

    return predict


def engine_predictor(path: Path, device: torch.device | None = None) -> EnginePredictor:
    """Return a predictor that runs a TensorRT engine; what it raises is told in `EnginePredictor`."""
    return EnginePredictor(path, device)


def computes_bf16(device: torch.device) -> bool:
    """Return whether a device computes bfloat16 in hardware."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def ran_file(folder: Path, opened: OpenedPredictor) -> Path:
    """Return the file, of the run in `folder`, whose numbers a predictor computes with."""
    suffix = {"tensorrt": "plan", "onnxruntime": "onnx"}.get(opened.backend)
    if suffix is None:
        return folder / "best.safetensors"
    return folder / "exports" / f"model_{opened.precision}.{suffix}"


def weights_of(onnx: Path) -> str | None:
    """Return the SHA-256 of the weights that an ONNX model was made of; None where there is no model or it has none."""
    if not onnx.is_file():
        return None
    import onnx as onnx_package  # here: a second that a run which has no exports need not wait

    try:
        model: Any = onnx_package.load_model(str(onnx))
    except DecodeError as error:
        raise ValueError(f"{onnx}: no ONNX model ({error}): export the run again") from error
    return next((entry.value for entry in model.metadata_props if entry.key == "weights_sha256"), None)


def _made_of_others(onnx: Path, weights: Path) -> bool:
    """Return whether an ONNX model says that it was made of other weights than those of its run."""
    recorded = weights_of(onnx)
    return recorded is not None and weights.is_file() and recorded != sha256_of(weights)


def open_predictor(
    folder: Path,
    build_network: Callable[[], nn.Module],
    *,
    backend: Literal["auto", "tensorrt", "onnxruntime", "torch"] = "auto",
    precision: Exported = "fp32",
    torch_precision: Precision | None = None,
    device: torch.device,
) -> OpenedPredictor:
    """Open the model that a run exported to `folder`/exports.

    "auto" takes the engine where one fits this host, else torch on a GPU or where it has bf16 in hardware (if torch may
    use it), else ONNX Runtime; bf16 is torch's alone.

    Args:
        folder: the run's folder.
        build_network: returns the trained network on the CPU; called only where torch runs it.
        backend: what runs the model.
        precision: ONNX models and engines exist in "fp32" and "fp16", and in "int8" where `export.py` made them.
        torch_precision: instead of `precision` where torch runs the model.
        device: where the windows lie; ONNX Runtime works on the CPU in any case.

    Raises:
        FileNotFoundError: the run has no such export.
        ValueError: the export is damaged, does not fit this host, or there is none in this precision.
    """
    plan, onnx = (folder / "exports" / f"model_{precision}.{suffix}" for suffix in ("plan", "onnx"))
    if backend in ("tensorrt", "onnxruntime") and precision == "bf16":
        raise ValueError(f"precision bf16: backend {backend} takes fp32 or fp16")
    if backend == "torch" and precision == "int8":
        raise ValueError("precision int8: backend torch takes fp32, bf16 or fp16; int8 is exported only")
    stale = _made_of_others(onnx, folder / "best.safetensors")
    if stale and backend in ("tensorrt", "onnxruntime"):
        raise ValueError(f"{onnx}: made of other weights than best.safetensors beside it: export the run again")
    reason = "as asked"
    if backend == "auto":
        problem = "no engine in this run" if not plan.is_file() else host_problem(plan, read_manifest(plan), device)
        problem = "the exports are of other weights than best.safetensors" if stale else problem
        if problem is None:
            backend, reason = "tensorrt", "an engine fits this GPU"
        else:
            quicker = torch_precision == "bf16" and computes_bf16(device)
            on_cpu = precision == "int8" or (device.type == "cpu" and onnx.is_file() and not quicker and not stale)
            backend, reason = "onnxruntime" if on_cpu else "torch", problem
    if backend == "tensorrt":
        return OpenedPredictor(engine_predictor(plan, device), backend, precision, reason)
    if backend == "onnxruntime":
        return OpenedPredictor(onnxruntime_predictor(onnx), backend, precision, reason)
    network = use_subpixel_upsampling(folded(build_network().to(device).eval()))
    computed: Any = torch_precision or precision
    return OpenedPredictor(torch_predictor(network, computed, channels_last=True), backend, computed, reason)
