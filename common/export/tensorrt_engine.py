"""TensorRT engines from ONNX models, by one code path for `tensorrt` 10, 11 and `tensorrt_rtx`."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Literal, cast

import torch

from medspeed.common.export.onnx_model import read_metadata
from medspeed.common.files import atomic_path, sha256_of, write_json
from medspeed.common.inference import ModelPrecision
from medspeed.common.inference import tensorrt_runtime as engines

EngineChoice = Literal["auto", engines.Flavour, "none"]
# Compute capabilities that one RTX engine serves by default; the H100 and H200 (9.0) are not among them.
# Source: TensorRT for RTX documentation, "CPU-Only AOT and TensorRT-RTX Engines", and the 1.5 support matrix.
RTX_TARGETS = ("8.0", "8.6", "8.9", "12.0", "12.1")
RTX_TURING = "7.5"  # served by RTX too, but only by an engine built for it alone


def choose_flavour(choice: EngineChoice = "auto") -> engines.Flavour:
    """Return the flavour that builds engines here, "auto" full TensorRT first; or raise an EngineUnavailableError."""
    gpu, install, reason = engines.host_gpu(), engines.INSTALL, "disabled"
    wanted: dict[EngineChoice, tuple[engines.Flavour, ...]] = {"auto": tuple(install), "none": ()}
    for flavour in wanted.get(choice, (cast(engines.Flavour, choice),)):
        if flavour == "tensorrt_rtx" and gpu not in (None, *RTX_TARGETS, RTX_TURING):
            reason = f"TensorRT-RTX does not support this GPU (capability {gpu}), TensorRT does: {install['tensorrt']}"
        elif flavour == "tensorrt" and gpu is None:
            reason = "no CUDA device: TensorRT builds an engine only on the GPU that will run it"
        elif engines.tensorrt_module(flavour) is None:
            reason = f"{flavour} is not installed: {install[flavour]}"
        else:
            return flavour
    raise engines.EngineUnavailableError(reason)


def build_engine(onnx_path: Path, flavour: engines.Flavour) -> engines.EngineManifest:
    """Build the engine of a model beside it (`MODEL.plan`), write its manifest (`MODEL.plan.json`), and return that.

    The metadata that `export_onnx` wrote, without which it is a ValueError, say how many windows it takes in one call;
    the flavour is installed. Where TensorRT cannot build the engine, an EngineError holds its log.
    """
    trt = cast(ModuleType, engines.tensorrt_module(flavour))
    metadata, gpu = read_metadata(onnx_path), engines.host_gpu()
    window, smallest, batch = (tuple(map(int, metadata[name].split())) for name in ("window", "smallest", "batch"))
    turing = flavour == "tensorrt_rtx" and gpu == RTX_TURING
    shapes = [(count, *sides) for count, sides in zip(batch, (smallest, window, window), strict=True)]
    plan = onnx_path.with_suffix(".plan")
    with atomic_path(plan) as part:
        part.write_bytes(_serialized(trt, onnx_path, shapes, turing))
    built = engines.EngineManifest(
        onnx=onnx_path.name,
        onnx_sha256=sha256_of(onnx_path),
        plan_sha256=sha256_of(plan),
        flavour=flavour,
        version=trt.__version__,
        targets=(gpu,) if gpu and (flavour == "tensorrt" or turing) else RTX_TARGETS,
        precision=cast(ModelPrecision, metadata["precision"]),
        window=window,
        smallest=smallest,
        batch=cast(tuple[int, int, int], batch),
        torch=torch.__version__,
    )
    write_json(engines.manifest_path(plan), asdict(built))
    return built


def _serialized(trt: ModuleType, onnx_path: Path, shapes: Sequence[tuple[int, ...]], turing: bool) -> bytes:
    """Return the plan for the least, the usual and the most windows, for Turing GPUs alone where that is wanted."""
    log = engines.message_log(trt)
    log.messages.clear()
    builder = trt.Builder(log)
    # Strongly typed: the precision is the ONNX model's own.
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(onnx_path)):
        errors = "; ".join(parser.get_error(index).desc() for index in range(parser.num_errors))
        raise engines.failure(f"{onnx_path}: TensorRT cannot read the model ({errors})", trt)
    config = builder.create_builder_config()
    # TensorFloat-32 is on by default and would keep 10 bits of fp32's 23: too few for the parity gate.
    config.clear_flag(trt.BuilderFlag.TF32)
    if turing:  # these names exist in tensorrt_rtx alone; the other GPUs are its default
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.SM75, 0)
    profile = builder.create_optimization_profile()
    profile.set_shape(network.get_input(0).name, *shapes)
    config.add_optimization_profile(profile)
    torch.cuda.empty_cache()  # what torch keeps of a training's memory
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise engines.failure(f"{onnx_path}: TensorRT built no engine", trt)
    return bytes(plan)
