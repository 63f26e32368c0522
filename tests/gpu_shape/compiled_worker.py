"""Lets Inductor write its code for an H200 that is not there, of one app's network, and writes down what that costs."""

import re
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from medspeed.benchmarks.fake_cuda import shim

if __name__ == "__main__":
    shim.load()  # before torch is loaded

import torch
import torch._dynamo.device_interface as interfaces
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from medspeed.benchmarks.fake_cuda.device import fake_cuda
from medspeed.benchmarks.visit_parts import NETWORKS
from medspeed.common.files import write_json
from medspeed.common.kernels import norms, pooling, trust
from medspeed.common.kernels.doubling import DOUBLING

_H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, total_memory=141 << 30, multi_processor_count=132,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, warp_size=32,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    L2_cache_size=60 << 20, gcnArchName="", is_integrated=False, max_threads_per_block=1024,
    clock_rate=1980000, memory_clock_rate=3201000, memory_bus_width=6144,
)  # fmt: skip


class _Driver:
    """Stands for Triton's driver of an H200."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda


def _stand_ins() -> list[Any]:
    interface, no_state = interfaces.CudaInterface, torch.zeros(16, dtype=torch.uint8)
    stream = SimpleNamespace(cuda_stream=0, device=torch.device("cuda", 0), synchronize=lambda: None)
    given: dict[Any, dict[str, Any]] = {
        torch.cuda: {
            "get_device_properties": lambda device=None: _H200, "get_rng_state": lambda device="cuda": no_state,
            "set_rng_state": lambda state, device="cuda": None, "_exchange_device": lambda device: 0,
            "_maybe_exchange_device": lambda device: 0, "current_stream": lambda device=None: stream,
        },
        interface.Worker: {
            "get_device_properties": staticmethod(lambda device=None: _H200), "current_device": staticmethod(lambda: 0),
        },
        interface: {
            "is_available": staticmethod(lambda: True), "current_device": staticmethod(lambda: 0),
            "get_compute_capability": staticmethod(lambda device=None: 90),
            "get_device_properties": staticmethod(lambda device=None: _H200),
            "is_bf16_supported": staticmethod(lambda including_emulation=False: True),
            "set_device": staticmethod(lambda device: None), "synchronize": staticmethod(lambda device=None: None),
            "maybe_exchange_device": staticmethod(lambda device: 0), "exchange_device": staticmethod(lambda device: 0),
        },
        torch.version: {"cuda": "13.0"},
    }  # fmt: skip
    return [mock.patch.object(place, name, value) for place, names in given.items() for name, value in names.items()]


def on_device(network: torch.nn.Module) -> torch.nn.Module:
    """Put empty tensors of the device in place of a network's own."""
    for module in network.modules():
        for held in (module._parameters, module._buffers):
            for name, value in held.items():
                if value is not None:
                    made: Any = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda:0")
                    held[name] = torch.nn.Parameter(made, value.requires_grad) if held is module._parameters else made
    return network


class WrittenError(Exception):
    """Raised where what Inductor has written would run, which nothing here can."""


def refuse(arguments: object) -> None:
    raise WrittenError


def costs(app: str, folder: Path) -> list[dict[str, int]]:
    """Return of each graph, forward then backward: its kernels, those that Inductor wrote, and the bytes these move."""
    found: list[dict[str, int]] = []

    def written(self: GraphLowering) -> Any:
        code = self.codegen()[0]
        source = str(getattr(code, "value", code))
        path = folder / f"{app}-{len(found)}.py"
        path.write_text(source)
        calls = source[source.index("def call(") :]
        own = len(re.findall(r"^ +triton_\w+\.run\(", calls, re.MULTILINE))
        others = len(re.findall(r"= (?:extern_kernels|torch\.ops)\.", calls))
        found.append({"kernels": own + others, "written": own, "bytes": int(self.count_bytes()[0])})
        self.cache_key, self.cache_path, self.cache_linemap = "written", str(path), []
        return SimpleNamespace(__file__=str(path), key="written", call=refuse)

    build, _, shape = NETWORKS[app]
    layout: Any = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    network: Any = build().train()
    network = network.to(memory_format=layout)
    with ExitStack() as stack:
        stack.enter_context(fake_cuda())
        for change in (*_stand_ins(), mock.patch.object(GraphLowering, "_compile_to_module", written)):
            stack.enter_context(change)
        driver.set_active(_Driver())
        inductor, functorch = torch._inductor.config, torch._functorch.config
        stack.enter_context(inductor.patch(fx_graph_cache=False, compile_threads=1, joint_graph_constant_folding=False))
        stack.enter_context(functorch.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True))
        stack.enter_context(_disable_current_modes())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        on_device(network)
        image = torch.empty(shape, dtype=torch.bfloat16, device="cuda:0").to(memory_format=layout)
        stack.enter_context(trust.trusting(norms.GROUP, norms.BATCH, norms.RELU, pooling.NAME, DOUBLING))
        stack.enter_context(torch.autocast("cuda", torch.bfloat16))
        try:
            torch.compile(network, dynamic=False, fullgraph=True)(image)
        except WrittenError:
            return found
    raise AssertionError("nothing was compiled")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write_json(folder / "found.json", {app: costs(app, folder) for app in sys.argv[2:]})
