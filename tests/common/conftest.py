"""A stand-in for TensorRT that runs on the CPU, shared by the tests of export and inference."""

import ctypes
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime
import pytest

from tests.common.rank_programs import start_ranks, torchrun  # noqa: F401 - fixtures

InstallFake = Callable[..., Any]


class ILogger:
    WARNING = 2


class NetworkDefinitionCreationFlag:
    STRONGLY_TYPED = 1


class BuilderFlag:
    TF32 = 7


class TensorIOMode:
    INPUT = 1


class ITensor:
    name = "image"


class ParserError:
    def desc(self) -> str:
        return "unknown operator Frobnicate"


class _Part:
    """Any other object of the stand-in; it knows its module, whose `calls` lists what was called."""

    def __init__(self, module: Any, *_: Any) -> None:
        self._module = module


class INetworkDefinition(_Part):
    _model = b""

    def get_input(self, index: int) -> ITensor:
        return ITensor()


class IBuilderConfig(_Part):
    def clear_flag(self, flag: int) -> None:
        self._module.calls.append(("clear_flag", flag))

    def add_optimization_profile(self, profile: Any) -> int:
        self._module.calls.append(("add_optimization_profile",))
        return 0


class IOptimizationProfile(_Part):
    def set_shape(self, *shapes: Any) -> None:
        self._module.calls.append(("set_shape", *shapes))


class Builder(_Part):
    def __init__(self, module: Any, log: Any) -> None:
        self._module, self._log = module, log

    def create_network(self, flags: int) -> INetworkDefinition:
        self._module.calls.append(("create_network", flags))
        return INetworkDefinition(self._module)

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig(self._module)

    def create_optimization_profile(self) -> IOptimizationProfile:
        return IOptimizationProfile(self._module)

    def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig) -> bytes | None:
        self._module.calls.append(("build_serialized_network",))
        self._log.log(1, "no kernel for this layer")
        return None if self._module.fail == "build" else network._model


class OnnxParser(_Part):
    num_errors = 1

    def __init__(self, module: Any, network: INetworkDefinition, log: Any) -> None:
        self._module, self._network = module, network

    def parse_from_file(self, path: str) -> bool:
        self._network._model = Path(path).read_bytes()
        return bool(self._module.fail != "parse")

    def get_error(self, index: int) -> ParserError:
        return ParserError()


class IExecutionContext(_Part):
    def __init__(self, module: Any, model: bytes) -> None:
        self._module = module
        self._session: Any = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        self._address: dict[str, int] = {}
        self._shape: tuple[int, ...] = ()

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._shape = shape
        return bool(self._module.fail != "shape")

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (self._shape[0], *self._session.get_outputs()[0].shape[1:])

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._address[name] = address
        return address % 64 == 0  # what torch's memory on a CPU has

    def execute_async_v3(self, stream: int) -> bool:
        self._module.calls.append(("execute_async_v3", stream))
        image = _floats(self._address["image"], self._shape)
        logits = self._session.run(None, {"image": image})[0] + self._module.drift
        _floats(self._address["logits"], logits.shape)[...] = logits
        return bool(self._module.fail != "execute")


class ICudaEngine(_Part):
    num_io_tensors = 2

    def __init__(self, module: Any, model: bytes) -> None:
        self._module, self._model = module, model

    def get_tensor_name(self, index: int) -> str:
        return ("logits", "image")[index]  # no order is promised

    def get_tensor_mode(self, name: str) -> int:
        return TensorIOMode.INPUT if name == "image" else 2

    def create_execution_context(self) -> IExecutionContext | None:
        return None if self._module.fail == "context" else IExecutionContext(self._module, self._model)


class Runtime(_Part):
    def __init__(self, module: Any, log: Any) -> None:
        self._module, self._log = module, log

    def deserialize_cuda_engine(self, plan: bytes) -> ICudaEngine | None:
        self._module.calls.append(("deserialize_cuda_engine",))
        if self._module.fail == "deserialize":
            self._log.log(1, "driver too old")
            self._log.log(3, "chatter")
            return None
        return ICudaEngine(self._module, plan)


CONSTANTS = (ILogger, NetworkDefinitionCreationFlag, BuilderFlag, TensorIOMode)
BUILD_PARTS = (Builder, OnnxParser, INetworkDefinition, IBuilderConfig, IOptimizationProfile, ITensor, ParserError)
RUN_PARTS = (Runtime, ICudaEngine, IExecutionContext)


def _fake_module(flavour: str, version: str) -> Any:
    """Return a module whose plans hold the ONNX model and whose engines compute it with ONNX Runtime.

    `calls` lists what was called; `fail` names the step that gives None or False; `drift` is added to the logits.
    """
    module: Any = ModuleType(flavour)
    module.__version__, module.calls, module.fail, module.drift = version, [], None, 0.0
    for constant in CONSTANTS:
        setattr(module, constant.__name__, constant)
    for part in (Builder, OnnxParser, Runtime):
        setattr(module, part.__name__, partial(part, module))
    return module


def _floats(address: int, shape: tuple[int, ...]) -> Any:
    memory: Any = (ctypes.c_float * int(np.prod(shape))).from_address(address)
    return np.frombuffer(memory, dtype=np.float32).reshape(shape)


@pytest.fixture(scope="session")
def fake_members() -> dict[str, set[str]]:
    """Return what the stand-in offers: class -> members."""
    parts: tuple[type, ...] = (*CONSTANTS, *BUILD_PARTS, *RUN_PARTS)
    return {part.__name__: {name for name in dir(part) if not name.startswith("_")} for part in parts}


@pytest.fixture
def fake_tensorrt(monkeypatch: pytest.MonkeyPatch) -> InstallFake:
    """Return a function that installs a stand-in TensorRT, and a GPU of a given compute capability with it."""

    def install(version: str = "11.4.0", gpu: str | None = "9.0", flavour: str = "tensorrt") -> Any:
        module = _fake_module(flavour, version)
        monkeypatch.setitem(sys.modules, flavour, module)
        monkeypatch.setattr("medspeed.common.inference.tensorrt_runtime.host_gpu", lambda device=None: gpu)
        monkeypatch.setattr("medspeed.common.inference.tensorrt_runtime._ALIGNMENT", 64)
        return module

    return install


@pytest.fixture(scope="session")
def tensorrt_names() -> dict[str, dict[str, list[str]]]:
    """Return the names that three TensorRT versions have: module -> class -> members."""
    content = json.loads((Path(__file__).parent / "export" / "tensorrt_names.json").read_text(encoding="utf-8"))
    return dict(content["modules"])
