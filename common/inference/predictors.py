"""Predictors: one callable for a network in torch and for its ONNX export; a TensorRT engine's is `EnginePredictor`."""

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import torch
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from medspeed.common.console import say_once
from medspeed.common.inference import Precision

# From windows [B, C, *sides] float32 to logits [B, K, *sides] float32 on their device; sides: X, Y, Z or Y, X
Predictor = Callable[[torch.Tensor], torch.Tensor]
Result = TypeVar("Result")
DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
_CONVOLUTIONS = (torch.conv2d, torch.conv3d, torch.conv_transpose2d, torch.conv_transpose3d)
# Limits of ONEDNN_MAX_CPU_ISA below the instructions for bfloat16. Source: oneDNN, "CPU Dispatcher Control"
_WITHOUT_BF16 = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}
# [batch, C, X, Y, Z] becomes [batch, groups, C / groups * X, Y * Z], whose means are taken over the last axis first.
_EXACT_NORM = """
<opset_import: ["" : 21], domain: "exact">
GroupNormalization <num_groups: int, epsilon: float = 1e-5> (image, scale, bias) => (result) {
    wide = Cast <to = 1> (image)
    shape = Shape (image)
    zero = Constant <value_ints = [0]> ()
    rest = Constant <value_ints = [-1]> ()
    count = Constant <value_int: int = @num_groups> ()
    groups = Unsqueeze (count, zero)
    sides = Shape <start = 3> (image)
    row = ReduceProd (sides)
    split = Concat <axis = 0> (zero, groups, rest, row)
    grouped = Reshape (wide, split)
    middle = Constant <value_ints = [2]> ()
    means = ReduceMean (grouped, rest)
    mean = ReduceMean (means, middle)
    centred = Sub (grouped, mean)
    square = Mul (centred, centred)
    variances = ReduceMean (square, rest)
    variance = ReduceMean (variances, middle)
    small = Constant <value_float: float = @epsilon> ()
    positive = Add (variance, small)
    deviation = Sqrt (positive)
    unit = Div (centred, deviation)
    normal = Reshape (unit, shape)
    each = Constant <value_ints = [-1, 1, 1, 1]> ()
    wide_scale = Cast <to = 1> (scale)
    factor = Reshape (wide_scale, each)
    wide_bias = Cast <to = 1> (bias)
    shift = Reshape (wide_bias, each)
    scaled = Mul (normal, factor)
    moved = Add (scaled, shift)
    result = CastLike (moved, image)
}
"""


_LOCK, _BEFORE = Lock(), list[list[str]]()  # of `ieee_fp32`: the settings before, for each thread that is inside


@contextmanager
def ieee_fp32() -> Iterator[None]:
    """Compute what is in float32 with its 23 bits inside, on CUDA too, where convolutions take TensorFloat-32's 10.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices
    """
    settings: tuple[Any, ...] = (torch.backends.cudnn.conv, torch.backends.cuda.matmul)  # type: ignore[attr-defined]
    with _LOCK:
        _BEFORE.append([*_BEFORE, [each.fp32_precision for each in settings]][0])
        for each in settings:
            each.fp32_precision = "ieee"
    try:
        yield
    finally:
        with _LOCK:
            for each, precision in zip(settings, _BEFORE.pop(), strict=True):
                each.fp32_precision = "ieee" if _BEFORE else precision  # of threads that overlap, the last restores


@contextmanager
def autocast(precision: Precision, device: torch.device) -> Iterator[None]:
    """Compute a network, and in training its loss, in a precision, inside."""
    mode = _Convolutions() if device.type == "cpu" else nullcontext()
    with torch.autocast(device.type, DTYPES.get(precision), enabled=precision in DTYPES), mode:
        yield


class _Convolutions(TorchFunctionMode):
    """Convolves on a CPU where torch 2.13 by itself is wrong, or slow, inside.

    In bf16 its oneDNN takes values of images with a side of 1 or 2 from memory that nobody wrote, forward or backward,
    depending on the processor (tests/common/inference/test_predictors.py checks it): these are computed in float32. In
    inference in float32 it has loops of its own for a single volume, five times as slow as oneDNN, where
    channels * X * Y are at most 20480: a bound for images.
    """

    def __torch_function__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:  # noqa: ANN401
        if torch.is_autocast_enabled("cpu"):
            if function in _CONVOLUTIONS:
                image, weight = (given[n] if n < len(given) else named[key] for n, key in ((0, "input"), (1, "weight")))
                if min(image.shape[2 - weight.ndim :]) <= 2:
                    dtype, every = torch.get_autocast_dtype("cpu"), (given, named or {})
                    given, named = tree_map_only(torch.Tensor, torch.Tensor.float, every)
                    with torch.autocast("cpu", enabled=False):
                        return function(*given, **named).to(dtype)
        elif function is torch.conv3d and len(given) == 7 and isinstance(given[4], tuple) and len(given[0]) == 1:
            image, weight, bias, stride, padding, dilation, groups = given
            plain = image.dtype == weight.dtype == torch.float32 and not torch.compiler.is_compiling()
            if plain and not torch.is_grad_enabled() and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
                return torch.mkldnn_convolution(image, weight, bias, padding, stride, dilation, groups)
        return function(*given, **(named or {}))


def torch_predictor(network: nn.Module, precision: Precision = "fp32", tf32: bool = False) -> Predictor:
    """Return a predictor that runs a network, in evaluation mode, in torch on its device, without gradients.

    With `tf32` "fp32" on CUDA rounds as training does.
    """
    assert not network.training, "a predictor needs network.eval()"

    def predict(windows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), autocast(precision, windows.device), nullcontext() if tf32 else ieee_fp32():
            logits: torch.Tensor = network(windows)
        return logits.float()

    return predict


def as_fits(predictor: Predictor) -> Callable[[torch.Tensor], Iterator[torch.Tensor]]:
    """Return what yields the logits of windows part by part: of all at once, or of as many as the device can hold.

    Where a part lacks memory it is halved, for good; a torch.OutOfMemoryError says that one window is too much.
    """
    most = 2**30

    def parts(windows: torch.Tensor) -> Iterator[torch.Tensor]:
        nonlocal most
        done, sides = 0, " x ".join(map(str, windows.shape[2:]))
        kind, flag = ("voxels", "--windows.size") if windows.ndim == 5 else ("pixels", "--tile-size")
        said = f"of {sides} {kind} does not fit into the device's memory"
        while done < len(windows):
            some = windows[done : done + most]
            try:
                logits = predictor(some)
            except torch.OutOfMemoryError as error:
                if len(some) == 1:
                    remedy = f"use half precision or --device cpu, free memory, or train with smaller {flag}"
                    raise torch.OutOfMemoryError(f"one window {said}: {remedy}") from error
                most = len(some) // 2
                say_once(f"a batch of {len(some)} windows {said}: trying {most}", "warning")
                continue
            assert len(logits) == len(some), tuple(logits.shape)
            yield logits
            done += len(some)

    return parts


def with_room(work: Callable[[torch.device, Predictor], Result], predictor: Predictor, device: torch.device) -> Result:
    """Return the work on whole volumes on a predictor's device; where they do not fit there, in the host's memory.

    The work is told where, and given a predictor for windows that lie there.
    """
    try:
        return work(device, predictor)
    except torch.OutOfMemoryError as error:
        let_go(error)
    say_once("a volume does not fit into the device's memory: it stays in the host's, which is slower", "warning")
    return work(torch.device("cpu"), lambda windows: predictor(windows.to(device)).cpu())


def let_go(error: Exception) -> None:
    """Clear what the frames of an error, and of those behind it, hold: it may be all memory of the device."""
    seen, left = list[BaseException](), list[BaseException | None]([error])
    while left:
        if (one := left.pop()) is not None and not any(one is each for each in seen):
            seen.append(one)
            traceback.clear_frames(one.__traceback__)
            left += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]
    torch.cuda.empty_cache()


@contextmanager
def onnx_errors(path: Path) -> Iterator[None]:
    """Raise what onnx and ONNX Runtime say of a model as a ValueError of one line, which names the file."""
    try:
        yield
    except Exception as error:
        # They have no class in common, and those of onnx' C++ parts are RuntimeErrors.
        if not isinstance(error, (DecodeError, RuntimeError)) and not type(error).__module__.startswith("onnx"):
            raise
        said = " ".join(str(error).split())[:300]
        full, wrong = "out of memory: use a machine with more", "not a usable ONNX model: export the run again"
        raise ValueError(f"{path}: {full if 'alloc' in said else wrong} ({said})") from error


def onnxruntime_predictor(path: Path) -> Predictor:
    """Return a predictor that runs an ONNX model on the CPU; windows and logits may lie on another device.

    A damaged model, or windows of a shape that it does not take, are a ValueError.
    """
    import onnxruntime  # here, since a run on a GPU has no need of it

    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: export it with --to onnx{' --int8' * ('int8' in path.name)}")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    model = with_exact_norms(path)
    with onnx_errors(path):
        session: Any = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    if (len(session.get_inputs()), len(session.get_outputs())) != (1, 1):
        raise ValueError(f"{path}: the model must have one input and one output: export the run again")
    image = session.get_inputs()[0].name

    def predict(windows: torch.Tensor) -> torch.Tensor:
        with onnx_errors(path):
            logits = session.run(None, {image: windows.float().contiguous().cpu().numpy()})[0]
        return torch.from_numpy(logits).to(windows.device)

    return predict


def computes_bf16(device: torch.device) -> bool:
    """Return whether a device computes bfloat16 in hardware, and oneDNN's and ATen's variables let kernels use that."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()
    if most in _WITHOUT_BF16 or not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return False
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def read_onnx_metadata(path: Path) -> dict[str, str]:
    """Return the `metadata_props` of an ONNX model; a ValueError says that the file is none."""
    import onnx  # here: a second that a run which has no exports need not wait

    with onnx_errors(path):
        model: Any = onnx.load_model(str(path))
    return {entry.key: entry.value for entry in model.metadata_props}


def with_exact_norms(path: Path) -> bytes:
    """Return a model of `export_onnx` whose group and instance normalisations are means over one axis after the other.

    ONNX Runtime adds up the voxels of a group one by one in float32: for two channels of 160^3 voxels its mean is off
    by 0.2 percent of the deviation, in every layer. Means of means are exact to 1e-6. TensorRT gets the file as it is.
    """
    import onnx.inliner  # here, as in the export: inference with torch or TensorRT has no need of it
    import onnx.parser

    with onnx_errors(path):
        model: Any = onnx.load(str(path))
        widths = {each.name: each.dims[0] for each in model.graph.initializer if len(each.dims) == 1}
        for node in model.graph.node:
            if node.op_type == "InstanceNormalization" and node.input[1] in widths:  # groups of one channel each
                node.op_type = "GroupNormalization"
                node.attribute.append(onnx.helper.make_attribute("num_groups", widths[node.input[1]]))
            if node.op_type == "GroupNormalization":
                node.domain = "exact"
        if all(node.domain != "exact" for node in model.graph.node):
            return path.read_bytes()
        model.functions.append(onnx.parser.parse_function(_EXACT_NORM))
        model.opset_import.append(onnx.helper.make_opsetid("exact", 1))
        model = onnx.inliner.inline_local_functions(model)
        del model.opset_import[1:]
        exact: bytes = model.SerializeToString()
    return exact
