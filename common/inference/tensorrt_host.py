"""TensorRT on this host: which flavour there is, which GPU, and what TensorRT logs.

`tensorrt` (10 and 11) is the full library, whose engines serve the one kind of GPU that they were built on.
`tensorrt_rtx` builds without a GPU, and its engines serve several kinds.
"""

import functools
import importlib
from collections import deque
from types import ModuleType
from typing import Any, Literal

import torch

Flavour = Literal["tensorrt", "tensorrt_rtx"]
FlavourChoice = Literal["auto", Flavour]

INSTALL: dict[Flavour, str] = {"tensorrt": "pip install -e '.[trt]'", "tensorrt_rtx": "pip install -e '.[rtx]'"}
RTX_TARGETS = ("8.0", "8.6", "8.9", "12.0", "12.1")
"""Compute capabilities that one RTX engine serves by default.

Source: TensorRT for RTX documentation, "CPU-Only AOT and TensorRT-RTX Engines", and the 1.5 support matrix.
"""
RTX_TURING = "7.5"
"""Served by RTX too, but only by an engine built for it alone (same source)."""


class EngineUnavailableError(ValueError):
    """No engine can be built or run on this host: a package or a GPU is missing, or of the wrong kind."""


class EngineError(RuntimeError):
    """TensorRT failed; the message holds what it logged."""


def host_gpu(device: torch.device | None = None) -> str | None:
    """Return the compute capability of a GPU, such as "8.9", by default the current one's; None without a GPU."""
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return f"{major}.{minor}"


def rtx_serves(gpu: str) -> bool:
    """Return whether TensorRT-RTX runs on GPUs of a compute capability; the H100 and H200 (9.0) are not among them."""
    return gpu in (*RTX_TARGETS, RTX_TURING)


def not_served(gpu: str) -> str:
    """Return the line for a GPU that TensorRT-RTX does not serve, with the remedy."""
    return f"TensorRT-RTX does not serve this GPU (compute capability {gpu}), full TensorRT does: {INSTALL['tensorrt']}"


def tensorrt_module(flavour: Flavour) -> ModuleType | None:
    """Import `tensorrt` or `tensorrt_rtx`, or return None where it is not installed whole."""
    try:
        return importlib.import_module(flavour)
    except (ImportError, OSError):  # OSError: the Python part is there, its shared libraries are not
        return None


def choose_flavour(choice: FlavourChoice = "auto") -> Flavour:
    """Return the flavour that builds engines here; "auto" prefers full TensorRT.

    Raises:
        EngineUnavailableError: there is none; one line with the remedy.
    """
    gpu, reason = host_gpu(), ""
    for flavour in INSTALL if choice == "auto" else (choice,):
        if flavour == "tensorrt_rtx" and gpu is not None and not rtx_serves(gpu):
            reason = not_served(gpu)
        elif flavour == "tensorrt" and gpu is None:
            reason = "no CUDA device here: full TensorRT builds an engine only on the GPU that it is for"
        elif tensorrt_module(flavour) is None:
            reason = f"no {flavour} here: {INSTALL[flavour]}"
        else:
            return flavour
    raise EngineUnavailableError(reason)


def why_no_engine(choice: FlavourChoice = "auto") -> str | None:
    """Return one line saying why no engine can be built here, with the remedy, or None where one can."""
    try:
        choose_flavour(choice)
    except EngineUnavailableError as error:
        return str(error)
    return None


@functools.cache
def message_log(trt: ModuleType) -> Any:  # noqa: ANN401 - a class of an untyped module
    """Return the logger of a TensorRT module; it keeps the latest warnings and errors in `messages`.

    One for the process: TensorRT keeps the first logger that it is given and ignores all later ones.
    """

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
    return EngineError(f"{what}; TensorRT says: " + ("\n".join(message_log(trt).messages) or "nothing"))
