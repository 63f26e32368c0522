"""A CUDA device whose memory is the host's, for whole programs: real numbers, by the CPU's operators.

What no CPU can show is missing: streams (all is done in order), Triton's kernels, and libraries for GPUs.
"""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from medspeed.benchmarks.fake_cuda import shim

SOURCE = Path(__file__).with_name("device.cpp")
_MEMORY = (8 * 10**9, 16 * 10**9)  # free and all


class Event:
    """A moment of the host's clock."""

    def __init__(self, **_: Any) -> None:
        self.time = 0.0

    def record(self, *_: Any) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, later: "Event") -> float:
        return 1000 * (later.time - self.time)


def load() -> None:
    """Have the device, until the process ends; before torch is loaded."""
    shim.load(SOURCE)
    import torch

    state = [torch.zeros(16, dtype=torch.uint8)]  # of random numbers: seed and offset, eight bytes each
    empty, clone = torch.empty, torch.UntypedStorage.clone

    def pin(tensor: Any, *_: Any) -> Any:
        tensor.pinned = True
        return tensor

    def on_device(storage: Any) -> Any:  # torch's own knows no storage of cuda
        flat = empty(0, dtype=torch.uint8, device="cuda").set_(storage)
        return flat.clone().untyped_storage()

    stand_ins = {
        "is_available": lambda: True, "is_initialized": lambda: True, "_lazy_init": lambda: None,
        "device_count": lambda: 1, "current_device": lambda: 0, "set_device": lambda _: None,
        "synchronize": lambda *_: None, "empty_cache": lambda: None, "is_bf16_supported": lambda **_: True,
        "get_device_name": lambda *_: "the host's memory", "get_device_capability": lambda *_: (9, 0),
        "mem_get_info": lambda *_: _MEMORY, "max_memory_allocated": lambda *_: 0, "Event": Event,
        "current_stream": lambda *_: SimpleNamespace(), "manual_seed_all": lambda _: None,
        "get_rng_state": lambda *_: state[0].clone(), "set_rng_state": lambda new, *_: state.__setitem__(0, new),
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)
    torch.backends.cudnn.enabled = False  # the device says that it has it
    made: Any = torch
    made.empty = lambda *size, pin_memory=False, **named: (pin if pin_memory else lambda it: it)(empty(*size, **named))
    tensor: Any = torch.Tensor
    tensor.pin_memory, tensor.is_pinned = pin, lambda one, *_: hasattr(one, "pinned")
    storage: Any = torch.UntypedStorage
    storage.clone = lambda one: on_device(one) if one.device.type == "cuda" else clone(one)
