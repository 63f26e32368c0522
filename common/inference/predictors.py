"""Predictors: one callable for a network in torch and for its ONNX export; a TensorRT engine's is `EnginePredictor`."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from torch import nn

from common.inference.options import Precision

Predictor = Callable[[torch.Tensor], torch.Tensor]
"""From windows [B, C, *sides] float32 to logits [B, K, *sides] float32 on their device; sides: X, Y, Z or Y, X."""
_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Limits of ONEDNN_MAX_CPU_ISA below the instructions for bfloat16. Source: oneDNN, "CPU Dispatcher Control"
_WITHOUT_BF16 = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


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


def onnxruntime_predictor(path: Path) -> Predictor:
    """Return a predictor that runs an ONNX model on the CPU; windows and logits may lie on another device.

    Args:
        path: the model, with one input and one output.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: windows do not have the shape that the model takes.
    """
    import onnxruntime  # here, since a run on a GPU has no need of it

    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: export the model first")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
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


def computes_bf16(device: torch.device) -> bool:
    """Return whether a device computes bfloat16 in hardware, and the kernels on it may use that.

    On a CPU `ONEDNN_MAX_CPU_ISA` and `ATEN_CPU_CAPABILITY` keep oneDNN and ATen from instructions that are there.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()
    if most in _WITHOUT_BF16 or not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return False
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def read_onnx_metadata(path: Path) -> dict[str, str]:
    """Return the `metadata_props` of an ONNX model.

    Raises:
        ValueError: the file is no ONNX model.
    """
    import onnx  # here: a second that a run which has no exports need not wait

    try:
        model: Any = onnx.load_model(str(path))
    except DecodeError as error:
        raise ValueError(f"{path}: no ONNX model ({error}): export the run again") from error
    return {entry.key: entry.value for entry in model.metadata_props}


def with_exact_norms(path: Path) -> bytes:
    """Return an ONNX model whose group normalisations are written out as means over one axis after the other.

    ONNX Runtime adds up the voxels of a group one by one in float32: for two channels of 160^3 voxels its mean is off
    by 0.2 percent of the deviation, in every layer. Means of means are exact to 1e-6. The file itself keeps the
    operator GroupNormalization, for which TensorRT has a kernel.

    Args:
        path: a model that `export_onnx` wrote: image sizes are fixed, the batch size is not.
    """
    import onnx  # here, as in the export: inference with torch or TensorRT has no need of it

    model: Any = onnx.load(str(path))
    if not any(node.op_type == "GroupNormalization" for node in model.graph.node):
        return path.read_bytes()
    model = onnx.shape_inference.infer_shapes(model)
    graph = model.graph
    shapes = {
        value.name: [side.dim_value for side in value.type.tensor_type.shape.dim]
        for value in [*graph.input, *graph.value_info]
    }
    nodes = []
    for number, node in enumerate(graph.node):
        if node.op_type == "GroupNormalization":
            nodes += _written_out(node, shapes[node.input[0]], f"norm{number}", graph.initializer)
        else:
            nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    exact: bytes = model.SerializeToString()
    return exact


def _written_out(node: Any, shape: list[int], name: str, constants: Any) -> list[Any]:  # noqa: ANN401 - onnx is untyped
    """Return the nodes that stand for one GroupNormalization of a [batch, C, X, Y, Z] tensor."""
    from onnx import TensorProto, helper, numpy_helper

    options = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    channels, *sides = shape[1:]

    def constant(suffix: str, values: Any) -> str:  # noqa: ANN401
        constants.append(numpy_helper.from_array(np.asarray(values), f"{name}_{suffix}"))
        return f"{name}_{suffix}"

    nodes: list[Any] = []

    def add(operator: str, suffix: str, *inputs: str, **attributes: Any) -> str:  # noqa: ANN401
        nodes.append(helper.make_node(operator, list(inputs), [f"{name}_{suffix}"], **attributes))
        return f"{name}_{suffix}"

    def mean(of: str, suffix: str) -> str:
        rows = add("ReduceMean", f"{suffix}_rows", of, constant(f"{suffix}_last", np.array([3])), keepdims=1)
        return add("ReduceMean", suffix, rows, constant(f"{suffix}_rest", np.array([2])), keepdims=1)

    wide = add("Cast", "wide", node.input[0], to=TensorProto.FLOAT)
    groups = [0, options["num_groups"], -1, int(np.prod(sides[1:]))]  # 0 keeps the batch
    grouped = add("Reshape", "grouped", wide, constant("groups", np.array(groups, np.int64)))
    centred = add("Sub", "centred", grouped, mean(grouped, "mean"))
    variance = mean(add("Mul", "square", centred, centred), "variance")
    epsilon = constant("epsilon", np.float32(options.get("epsilon", 1e-5)))
    deviation = add("Sqrt", "deviation", add("Add", "positive", variance, epsilon))
    whole = constant("whole", np.array([0, channels, *sides], np.int64))
    normal = add("Reshape", "normal", add("Div", "unit", centred, deviation), whole)
    each = constant("each", np.array([channels, 1, 1, 1], np.int64))
    factors = [
        add("Reshape", f"{kind}_each", add("Cast", f"{kind}_wide", given, to=TensorProto.FLOAT), each)
        for kind, given in zip(("scale", "bias"), node.input[1:], strict=True)
    ]
    result = add("Add", "result", add("Mul", "scaled", normal, factors[0]), factors[1])
    nodes.append(helper.make_node("CastLike", [result, node.input[0]], [node.output[0]]))
    return nodes
