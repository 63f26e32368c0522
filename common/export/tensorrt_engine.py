"""TensorRT engines from ONNX models, with a manifest beside each.

One code path serves `tensorrt` 10, 11 and `tensorrt_rtx`: the network is strongly typed, so that the precision is the
ONNX model's own. `python -m medspeed.common.export.tensorrt_engine PLAN` builds an engine anew on another host.
"""

import argparse
import logging
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, cast

import torch

from medspeed.common.export.onnx_model import numbers, read_metadata
from medspeed.common.files import atomic_path, sha256_of, write_json
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

logger = logging.getLogger(__name__)

EngineChoice = Literal["auto", Flavour, "none"]
RTX_TARGETS = ("8.0", "8.6", "8.9", "12.0", "12.1")
"""Compute capabilities that one RTX engine serves by default; the H100 and H200 (9.0) are not among them.

Source: TensorRT for RTX documentation, "CPU-Only AOT and TensorRT-RTX Engines", and the 1.5 support matrix.
"""
RTX_TURING = "7.5"
"""Served by RTX too, but only by an engine built for it alone (same source)."""


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
    """Build a TensorRT engine, write its manifest beside it (`PLAN.json`), and return that.

    Args:
        onnx_path: a model that `export_onnx` or `quantise` wrote, in the folder of `engine_path`; its metadata say how
            many windows the engine takes in one call.
        engine_path: where the plan goes.
        flavour: "auto" takes full TensorRT where it is installed and there is a GPU.

    Raises:
        EngineUnavailableError: there is no TensorRT of this flavour here.
        EngineError: TensorRT cannot build the engine; the message holds its log.
        ValueError: `onnx_path` is not such a model.
    """
    chosen, gpu = choose_flavour(flavour), host_gpu()
    trt = cast(ModuleType, tensorrt_module(chosen))
    metadata = read_metadata(onnx_path)
    wanted = EngineManifest(
        onnx=onnx_path.name,
        onnx_sha256=sha256_of(onnx_path),
        plan_sha256="",
        flavour=chosen,
        version=trt.__version__,
        targets=(gpu,) if gpu and (chosen == "tensorrt" or gpu == RTX_TURING) else RTX_TARGETS,
        precision=cast(Any, metadata["precision"]),
        window=numbers(metadata["window"]),
        smallest=numbers(metadata["smallest"]),
        batch=cast(Any, numbers(metadata["batch"])),
        torch=torch.__version__,
    )
    with atomic_path(engine_path) as part:
        part.write_bytes(_serialized(trt, onnx_path, wanted))
    built = replace(wanted, plan_sha256=sha256_of(engine_path))
    write_json(manifest_path(engine_path), asdict(built))
    return built


def rebuild_engine(engine_path: Path) -> EngineManifest:
    """Build an engine for this host from the ONNX model beside it; the gate, which needs cases, is not repeated.

    Raises:
        FileNotFoundError: there is no ONNX model beside the plan.
        ValueError: the model is not the one that the plan was built from.
    """
    onnx_path = engine_path.with_suffix(".onnx")
    if not onnx_path.is_file():
        raise FileNotFoundError(f"{onnx_path} is missing; an engine is built from the ONNX model beside it")
    if engine_path.is_file() and manifest_path(engine_path).is_file():
        verify_onnx(engine_path, read_manifest(engine_path))
    return build_engine(onnx_path, engine_path)


def _serialized(trt: ModuleType, onnx_path: Path, wanted: EngineManifest) -> bytes:
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
    if wanted.targets == (RTX_TURING,) and wanted.flavour == "tensorrt_rtx":
        # These names exist in tensorrt_rtx alone; the other GPUs are its default.
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.SM75, 0)
    profile = builder.create_optimization_profile()
    fewest, usual, most = wanted.batch
    shapes = ((fewest, *wanted.smallest), (usual, *wanted.window), (most, *wanted.window))
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
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        built = rebuild_engine(plan)
    except (OSError, ValueError) as error:
        command.exit(2, f"{error}\n")
    logger.info("%s: %s %s, compute capability %s", plan, built.flavour, built.version, ", ".join(built.targets))


if __name__ == "__main__":
    main()
