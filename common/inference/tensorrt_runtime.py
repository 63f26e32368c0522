"""TensorRT engines at run time: is a plan the one that was built, does it fit this GPU, and running it.

Engines of `tensorrt` (10 and 11) serve the kind of GPU that built them, those of `tensorrt_rtx` several kinds.
"""

import functools
import hashlib
import importlib
import shlex
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

from medspeed.common.files import read_as, read_object
from medspeed.common.inference import ModelPrecision

Flavour = Literal["tensorrt", "tensorrt_rtx"]
INSTALL: dict[Flavour, str] = {"tensorrt": "pip install -e '.[trt]'", "tensorrt_rtx": "pip install -e '.[rtx]'"}
_ALIGNMENT = 256  # bytes, of an address that an engine reads or writes. Source: NvInferRuntime.h, setTensorAddress


class EngineUnavailableError(ValueError):
    """No engine can be built or run on this host: a package or a GPU is missing, or of the wrong kind."""


class EngineError(ValueError):
    """TensorRT failed; the message holds what it logged."""


@dataclass(frozen=True)
class EngineManifest:
    """What lies beside a plan as `PLAN.json`: what the plan was built from, by what, and for which GPUs."""

    onnx: str  # file name of the ONNX model, in the plan's folder
    onnx_sha256: str
    plan_sha256: str
    flavour: Flavour  # the Python module that built it and must run it
    version: str  # of that module; another cannot read the plan
    targets: tuple[str, ...]  # compute capabilities of the GPUs that it runs on, such as "8.9"
    precision: ModelPrecision
    window: tuple[int, ...]  # shape (C, *sides) of one window, the largest where its sides are free
    smallest: tuple[int, ...]  # that of the smallest
    batch: tuple[int, int, int]  # windows in one call: the fewest, what the engine is tuned for, the most
    torch: str  # version of torch at the build


def host_gpu(device: torch.device | None = None) -> str | None:
    """Return the compute capability of a GPU, such as "8.9", by default the current one's; None without a GPU."""
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return None
    return "{}.{}".format(*torch.cuda.get_device_capability(device))


def tensorrt_module(flavour: Flavour) -> ModuleType | None:
    """Import `tensorrt` or `tensorrt_rtx`, or return None where it is not installed whole."""
    try:
        return importlib.import_module(flavour)
    except (ImportError, OSError):  # OSError: the Python part is there, its shared libraries are not
        return None


@functools.cache
def message_log(trt: ModuleType) -> Any:  # noqa: ANN401 - a class of an untyped module
    """Return the logger of a TensorRT module, which keeps the first that it is given; it has the latest `messages`."""

    class Log(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.messages: deque[str] = deque(maxlen=40)

        def log(self, severity: Any, message: str) -> None:  # noqa: ANN401
            if severity <= trt.ILogger.WARNING:
                self.messages.append(message)

    return Log()


def failure(what: str, trt: ModuleType) -> EngineError:
    """Return the error that says what failed and what TensorRT logged since its messages were last cleared."""
    said = " ".join(" ".join(message_log(trt).messages).split())
    return EngineError(f"{what}; TensorRT says: {said or 'nothing'}")


def manifest_path(plan: Path) -> Path:
    """Return where the manifest of a plan lies."""
    return plan.with_name(plan.name + ".json")


def read_manifest(plan: Path) -> EngineManifest:
    """Read the manifest of a plan; a FileNotFoundError or ValueError says that one is missing or damaged."""
    path, command = manifest_path(plan), _rebuild_command(plan)
    for needed in (plan, path):
        if not needed.is_file():
            raise FileNotFoundError(f"{needed} is missing; build the engine with: {command}")
    return read_as(path, EngineManifest, f"rebuild it with: {command}")


def host_problem(plan: Path, manifest: EngineManifest, device: torch.device | None = None) -> str | None:
    """Return one line on why an engine cannot run on a GPU of this host, with the remedy; None where it should."""
    gpu = host_gpu(device)
    if gpu is None:
        return "no CUDA device in use"
    trt, built = tensorrt_module(manifest.flavour), f"built by {manifest.flavour} {manifest.version}"
    anew = f"build it for this host with: {_rebuild_command(plan)}"
    if trt is None:
        return f"{built}, which is not installed: {INSTALL[manifest.flavour]}; or {anew}"
    if trt.__version__ != manifest.version:
        return f"{built}, but {trt.__version__} is installed; {anew}"
    if gpu not in manifest.targets:
        return f"built for GPUs of compute capability {', '.join(manifest.targets)}, this one has {gpu}; {anew}"
    return None


def deserialize(trt: ModuleType, content: bytes, plan: Path) -> tuple[Any, Any]:
    """Return the runtime and the engine made of a plan, or raise an EngineError; the runtime must live as long."""
    log = message_log(trt)
    log.messages.clear()
    runtime = trt.Runtime(log)
    engine = runtime.deserialize_cuda_engine(content)
    if engine is None:
        raise failure(f"{plan}: the engine could not be loaded", trt)
    return runtime, engine


class EnginePredictor:
    """A predictor that runs a TensorRT engine on one GPU; not for use by two threads at once.

    Every call returns memory of its own. Its work is queued, not awaited: the current stream is made to wait for it.

    Raises:
        FileNotFoundError, ValueError: see `read_manifest`; or a digest does not fit; nothing was loaded then.
        EngineUnavailableError, EngineError: it is for another GPU, flavour or version; TensorRT refuses the plan.
    """

    def __init__(self, plan: Path, device: torch.device) -> None:
        self.manifest = read_manifest(plan)
        content = plan.read_bytes()  # native code, never loaded unless it fits; which does not show who made it
        onnx, digests = plan.parent / self.manifest.onnx, [(plan, content, self.manifest.plan_sha256)]
        digests += [(onnx, onnx.read_bytes(), self.manifest.onnx_sha256)] if onnx.is_file() else []
        for file, read, due in digests:
            if (found := hashlib.sha256(read).hexdigest()) != due:
                why = f"the file was changed or damaged, no engine is loaded; rebuild it with: {_rebuild_command(plan)}"
                raise ValueError(f"{file}: sha256 {found} does not match the engine's manifest ({due}): {why}")
        if (problem := host_problem(plan, self.manifest, device)) is not None:
            raise EngineUnavailableError(f"{plan}: {problem}")
        trt = tensorrt_module(self.manifest.flavour)
        assert trt is not None  # else there was a problem
        self._trt, self._plan, cuda = trt, plan, device.type == "cuda"  # else, in tests, the library is a stand-in
        self.device = torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device
        with torch.cuda.device(self.device if cuda else -1):
            # The runtime and the engine are kept, since the context lives on them.
            self._runtime, self._engine = deserialize(trt, content, plan)
            names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
            names.sort(key=lambda name: self._engine.get_tensor_mode(name) != trt.TensorIOMode.INPUT)
            self._input, self._output = names  # our own exports have one of each
            self._context: Any = self._engine.create_execution_context()
            if self._context is None:
                raise failure(f"{plan}: cannot create an execution context; is the GPU memory full?", trt)
            self._stream = torch.cuda.Stream(self.device) if cuda else None  # type: ignore[no-untyped-call]

    def __call__(self, windows: torch.Tensor) -> torch.Tensor:
        """Return logits [B, K, *sides] float32 for windows [B, C, *sides] float32 on the engine's GPU."""
        self._check(windows)
        if not windows.is_contiguous() or windows.data_ptr() % _ALIGNMENT:  # a part of an image
            windows = windows.clone(memory_format=torch.contiguous_format)
        context, stream = self._context, self._stream
        message_log(self._trt).messages.clear()
        # On the current stream itself, if it is the default one, TensorRT would wait for the device in every call.
        current = torch.cuda.current_stream(self.device) if stream else None
        with torch.cuda.device(self.device if stream else -1):
            if stream and current:
                stream.wait_stream(current)
            accepted = [context.set_input_shape(self._input, tuple(windows.shape))]
            logits = torch.empty(tuple(context.get_tensor_shape(self._output)), device=self.device)
            for name, tensor in ((self._input, windows), (self._output, logits)):
                accepted.append(context.set_tensor_address(name, tensor.data_ptr()))
            if not (all(accepted) and context.execute_async_v3(stream.cuda_stream if stream else 0)):
                raise failure(f"{self._plan}: windows {tuple(windows.shape)} could not be run", self._trt)
            if stream and current:
                current.wait_stream(stream)
        return logits

    def _check(self, windows: torch.Tensor) -> None:
        fewest, _, most = self.manifest.batch
        smallest, largest, shape = (fewest, *self.manifest.smallest), (most, *self.manifest.window), (*windows.shape,)
        sides = zip(smallest, shape, largest, strict=False)
        if len(shape) != len(largest) or not all(least <= side <= bound for least, side, bound in sides):
            raise ValueError(f"windows {shape}: {self._plan} accepts shapes from {smallest} to {largest}")
        if windows.device != self.device or windows.dtype != torch.float32:
            raise ValueError(f"windows on {windows.device} in {windows.dtype}: expected float32 on {self.device}")


def _rebuild_command(plan: Path) -> str:
    run, int8 = plan.parent.parent, " --int8" if plan.stem.endswith("int8") else ""
    app = read_object(run / "model.json")["app"] if (run / "model.json").is_file() else "APP"
    return f"medspeed export {app} --model {shlex.quote(str(run))} --to engine{int8}"
