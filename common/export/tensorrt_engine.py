"""TensorRT engines from ONNX models, with a manifest beside each.

One code path serves `tensorrt` 10, 11 and `tensorrt_rtx`: the network is strongly typed, so that the precision is the
ONNX model's own. `python -m common.export.tensorrt_engine PLAN` builds an engine anew on another host.
"""

import argparse
import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch

from common.export.onnx_model import read_metadata
from common.files import atomic_path, sha256_of, write_json
from common.inference.tensorrt_host import (
    RTX_TARGETS,
    RTX_TURING,
    EngineError,
    Flavour,
    FlavourChoice,
    choose_flavour,
    failure,
    host_gpu,
    message_log,
    tensorrt_module,
)
from common.inference.tensorrt_runtime import EngineManifest, manifest_path, read_manifest, verified_plan, verify_onnx

Batches = tuple[int, int, int]
"""Windows in one call: the fewest, the number that the engine is tuned for, the most."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineRecord:
    """An engine as a run's summary holds it.

    Attributes:
        precision: of the ONNX model that it was built from.
        flavour: `tensorrt` or `tensorrt_rtx`.
        version: of that module.
        targets: compute capabilities of the GPUs that it runs on.
        path: the plan; None where the gate refused it.
        sha256: digest of the plan.
        ran: whether it ran here, through the parity gate.
        max_abs_diff: largest difference of a logit from torch in fp32; None where it did not run.
        quality_delta: change of the validation quality; None where it did not run.
        reason: why it did not run, or why it was refused; None where all went well.
        bytes: size of the plan.
    """

    precision: str
    flavour: Flavour
    version: str
    targets: tuple[str, ...]
    path: str | None
    sha256: str | None
    ran: bool = False
    max_abs_diff: float | None = None
    quality_delta: float | None = None
    reason: str | None = None
    bytes: int | None = None


def build_engine(
    onnx_path: Path, engine_path: Path, *, batch: Batches, flavour: FlavourChoice = "auto"
) -> EngineRecord:
    """Build a TensorRT engine, or keep the one at `engine_path` if it is just what would be built.

    Args:
        onnx_path: a model that `export_onnx` or `quantise` wrote, in the folder of `engine_path`.
        engine_path: where the plan goes; its manifest goes to `PLAN.json`.
        batch: the fewest windows in one call, the number to tune for, the most.
        flavour: "auto" takes full TensorRT where it is installed and there is a GPU.

    Raises:
        EngineUnavailableError: there is no TensorRT of this flavour here.
        EngineError: TensorRT cannot build the engine; the message holds its log.
        ValueError: `batch` is out of order, or `onnx_path` is not such a model.
    """
    if not 1 <= batch[0] <= batch[1] <= batch[2]:
        raise ValueError(f"batch {batch}: 1 <= fewest <= best <= most is needed")
    chosen = choose_flavour(flavour)
    trt = cast(ModuleType, tensorrt_module(chosen))
    metadata = read_metadata(onnx_path)
    wanted = EngineManifest(
        onnx=onnx_path.name,
        onnx_sha256=sha256_of(onnx_path),
        plan_sha256="",
        flavour=chosen,
        version=trt.__version__,
        targets=_targets(chosen),
        precision=cast(Any, metadata["precision"]),
        window=tuple(int(side) for side in metadata["window"].split()),
        smallest=tuple(int(side) for side in metadata["smallest"].split()),
        batch=batch,
        torch=torch.__version__,
    )
    stale = _why_stale(engine_path, wanted) if engine_path.exists() else "missing"
    if stale is not None:
        if engine_path.exists():
            logger.warning("%s is built anew: %s", engine_path, stale)
        with atomic_path(engine_path) as part:
            part.write_bytes(_serialized(trt, onnx_path, wanted))
        write_json(manifest_path(engine_path), asdict(replace(wanted, plan_sha256=sha256_of(engine_path))))
    return EngineRecord(
        wanted.precision,
        chosen,
        wanted.version,
        wanted.targets,
        str(engine_path),
        sha256_of(engine_path),
        bytes=engine_path.stat().st_size,
    )


def rebuild_engine(engine_path: Path) -> EngineRecord:
    """Build an engine for this host from the ONNX model beside it, for the batch sizes that the model names.

    The parity gate needs the validation cases and is not repeated here.

    Raises:
        FileNotFoundError: there is no ONNX model beside the plan.
        ValueError: the model is not the one that the plan was built from.
    """
    onnx_path = engine_path.with_suffix(".onnx")
    if not onnx_path.is_file():
        raise FileNotFoundError(f"{onnx_path} is missing: an engine is built from the ONNX model beside it")
    if engine_path.is_file() and manifest_path(engine_path).is_file():
        verify_onnx(engine_path, read_manifest(engine_path))
    words = read_metadata(onnx_path).get("batch", "").split()
    if len(words) != 3:
        raise ValueError(f"{onnx_path}: no `batch` (fewest, best, most) in its metadata; export the model again")
    return build_engine(onnx_path, engine_path, batch=(int(words[0]), int(words[1]), int(words[2])))


def _targets(flavour: Flavour) -> tuple[str, ...]:
    """Return the compute capabilities that an engine built here serves."""
    gpu = host_gpu()
    if flavour == "tensorrt":
        assert gpu is not None  # else there is no such flavour here
        return (gpu,)
    return (RTX_TURING,) if gpu == RTX_TURING else RTX_TARGETS


def _why_stale(engine_path: Path, wanted: EngineManifest) -> str | None:
    """Return why an existing engine is not the wanted one, or None where it is."""
    try:
        found = read_manifest(engine_path)
        if found.onnx_sha256 != wanted.onnx_sha256:
            return "the ONNX model is another one"
        verified_plan(engine_path, found)
    except (FileNotFoundError, ValueError) as error:
        return str(error)
    for name in ("flavour", "version", "targets", "precision", "window", "smallest", "batch"):
        old, new = getattr(found, name), getattr(wanted, name)
        if old != new:
            return f"its {name} was {old}, is now {new}"
    return None


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
        record = rebuild_engine(plan)
    except (OSError, ValueError, EngineError) as error:
        command.exit(2, f"{error}\n")
    logger.info("%s: %s %s, compute capability %s", plan, record.flavour, record.version, ", ".join(record.targets))


if __name__ == "__main__":
    main()
