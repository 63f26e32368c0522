"""TensorRT engines from ONNX models, with a manifest beside each.

One code path serves `tensorrt` 10, 11 and `tensorrt_rtx`: the network is strongly typed, so that the precision is the
ONNX model's own. `python -m medspeed.common.export.tensorrt_engine PLAN` builds an engine anew on another host.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Literal, cast

import torch

from medspeed.common.console import say
from medspeed.common.export.onnx_model import numbers, read_metadata
from medspeed.common.files import atomic_path, sha256_of, write_json
from medspeed.common.inference import ModelPrecision
from medspeed.common.inference.tensorrt_runtime import (
    INSTALL,
    EngineManifest,
    EngineUnavailableError,
    Flavour,
    failure,
    host_gpu,
    manifest_path,
    message_log,
    read_manifest,
    tensorrt_module,
    verify_onnx,
)

EngineChoice = Literal["auto", Flavour, "none"]
RTX_TARGETS = ("8.0", "8.6", "8.9", "12.0", "12.1")
"""Compute capabilities that one RTX engine serves by default; the H100 and H200 (9.0) are not among them.

Source: TensorRT for RTX documentation, "CPU-Only AOT and TensorRT-RTX Engines", and the 1.5 support matrix.
"""
RTX_TURING = "7.5"  # served by RTX too, but only by an engine built for it alone


def choose_flavour(choice: EngineChoice = "auto") -> Flavour:
    """Return the flavour that builds engines here; "auto" prefers full TensorRT.

    Raises:
        EngineUnavailableError: there is none; one line with the remedy.
    """
    gpu, reason = host_gpu(), "disabled"
    wanted: dict[EngineChoice, tuple[Flavour, ...]] = {"auto": tuple(INSTALL), "none": ()}
    for flavour in wanted.get(choice, (cast(Flavour, choice),)):
        if flavour == "tensorrt_rtx" and gpu not in (None, *RTX_TARGETS, RTX_TURING):
            reason = f"TensorRT-RTX does not support this GPU (capability {gpu}), TensorRT does: {INSTALL['tensorrt']}"
        elif flavour == "tensorrt" and gpu is None:
            reason = "no CUDA device: TensorRT builds an engine only on the GPU that will run it"
        elif tensorrt_module(flavour) is None:
            reason = f"{flavour} is not installed: {INSTALL[flavour]}"
        else:
            return flavour
    raise EngineUnavailableError(reason)


def build_engine(onnx_path: Path, engine_path: Path, flavour: EngineChoice = "auto") -> EngineManifest:
    """Build a TensorRT engine from a model in its folder, write its manifest beside it (`PLAN.json`), and return that.

    The metadata that `export_onnx` wrote say how many windows it takes in one call.

    Raises:
        EngineUnavailableError: there is no TensorRT of this flavour here.
        EngineError: TensorRT cannot build the engine; the message holds its log.
        ValueError: `export_onnx` did not write the model.
    """
    chosen, gpu, metadata = choose_flavour(flavour), host_gpu(), read_metadata(onnx_path)
    trt = cast(ModuleType, tensorrt_module(chosen))
    window, smallest = numbers(metadata["window"]), numbers(metadata["smallest"])
    fewest, usual, most = numbers(metadata["batch"])
    targets = (gpu,) if gpu and (chosen == "tensorrt" or gpu == RTX_TURING) else RTX_TARGETS
    shapes = (fewest, *smallest), (usual, *window), (most, *window)
    with atomic_path(engine_path) as part:
        part.write_bytes(_serialized(trt, onnx_path, shapes, chosen == "tensorrt_rtx" and gpu == RTX_TURING))
    built = EngineManifest(
        onnx=onnx_path.name,
        onnx_sha256=sha256_of(onnx_path),
        plan_sha256=sha256_of(engine_path),
        flavour=chosen,
        version=trt.__version__,
        targets=targets,
        precision=cast(ModelPrecision, metadata["precision"]),
        window=window,
        smallest=smallest,
        batch=(fewest, usual, most),
        torch=torch.__version__,
    )
    write_json(manifest_path(engine_path), asdict(built))
    return built


def rebuild_engine(engine_path: Path) -> EngineManifest:
    """Build an engine for this host from the ONNX model beside it; the gate, which needs cases, is not repeated.

    Raises:
        FileNotFoundError, ValueError: there is no such model, or another than the plan was built from.
    """
    onnx_path = engine_path.with_suffix(".onnx")
    if not onnx_path.is_file():
        raise FileNotFoundError(f"{onnx_path} is missing; an engine is built from the ONNX model beside it")
    if engine_path.is_file() and manifest_path(engine_path).is_file():
        verify_onnx(engine_path, read_manifest(engine_path))
    return build_engine(onnx_path, engine_path)


def _serialized(trt: ModuleType, onnx_path: Path, shapes: Sequence[tuple[int, ...]], turing: bool) -> bytes:
    """Return the plan for the least, the usual and the most windows, for Turing GPUs alone where that is wanted."""
    log = message_log(trt)
    log.messages.clear()
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(onnx_path)):
        errors = "; ".join(parser.get_error(index).desc() for index in range(parser.num_errors))
        raise failure(f"{onnx_path}: TensorRT cannot read the model ({errors})", trt)
    config = builder.create_builder_config()
    # TensorFloat-32 is on by default and would keep 10 bits of fp32's 23: too few for the parity gate.
    config.clear_flag(trt.BuilderFlag.TF32)
    if turing:  # these names exist in tensorrt_rtx alone; the other GPUs are its default
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.SM75, 0)
    profile = builder.create_optimization_profile()
    profile.set_shape(network.get_input(0).name, *shapes)
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise failure(f"{onnx_path}: TensorRT built no engine", trt)
    return bytes(plan)


def main(arguments: list[str] | None = None) -> None:
    """Build the engine named on the command line anew."""
    command = argparse.ArgumentParser(description="Build an engine for this host from the ONNX model beside it.")
    command.add_argument("plan", type=Path, help="for instance RUN/exports/model_fp16.plan")
    plan: Path = command.parse_args(arguments).plan
    try:
        built = rebuild_engine(plan)
    except (OSError, ValueError) as error:
        command.exit(2, f"{error}\n")
    else:
        say(f"{plan}: {built.flavour} {built.version}, compute capability {', '.join(built.targets)}", "result")


if __name__ == "__main__":
    main()
