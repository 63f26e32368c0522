"""How far a training step is from what the device can do: its work counted, the device's ceilings measured."""

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from common.observe.timing import repeated

# Sides of the square matrices and length of the vectors that the ceilings are measured with: large enough to leave the
# caches, small enough to take a moment.
_SIDE = {"cpu": 1024, "cuda": 8192}
_NUMBERS = {"cpu": 2**24, "cuda": 2**28}
_ROUNDS = 5


@dataclass(frozen=True)
class Work:
    """What one training step asks of a device.

    Args:
        flops: floating-point operations of the convolutions and matrix products, forward and backward; a
            multiplication with its addition counts as two.
        bytes: read and written if every operator of the eager network goes to memory, in float32.
    """

    flops: int
    bytes: int


@dataclass(frozen=True)
class Ceilings:
    """What a device reached in a measurement just now.

    Args:
        flops_per_second: of a product of square matrices.
        bytes_per_second: of a copy, read and written.
    """

    flops_per_second: float
    bytes_per_second: float


def count_work(network: nn.Module, shape: Sequence[int]) -> Work:
    """Count the work of a training step, forward and backward, without computing it.

    Args:
        network: on any device; a copy without numbers is counted, and the network is left as it is.
        shape: of a batch, [B, C, *sides].

    Source: torch.utils.flop_counter, which knows the operators.
    """
    copied = _uncompiled(network).to("meta").train()
    image = torch.empty(tuple(shape), device="meta")
    with FlopCounterMode(display=False) as counter, _Traffic() as traffic:
        torch.autograd.backward(copied(image).sum())
    return Work(int(counter.get_total_flops()), traffic.bytes)


@cache
def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure what a device can do, in less than a second and once in a process; the best of a few rounds counts.

    Args:
        device: a CUDA device, or the CPU with as many threads as torch has now.
        dtype: of the matrices: that of the network's convolutions.
    """
    side, numbers = _SIDE[device.type], _NUMBERS[device.type]
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    source, target = (torch.zeros(numbers, device=device) for _ in range(2))
    product = min(repeated(lambda: left @ right, _ROUNDS))
    copying = min(repeated(lambda: target.copy_(source), _ROUNDS))
    return Ceilings(2 * side**3 / product, 2 * source.nbytes / copying)


def distance_to_limit(work: Work, seconds: float, ceilings: Ceilings) -> dict[str, Any]:
    """Return what a step reaches of the ceilings, as a summary tells it.

    Args:
        work: of a step.
        seconds: that it takes.
        ceilings: of the device.
    """
    return {
        **{f"{name}_per_step": value for name, value in asdict(work).items()},
        "seconds_per_step": round(seconds, 5),
        "tflops": round(work.flops / seconds / 1e12, 4),
        "ceiling_tflops": round(ceilings.flops_per_second / 1e12, 4),
        "percent": round(100 * work.flops / seconds / ceilings.flops_per_second, 1),
        "ceiling_gb_per_second": round(ceilings.bytes_per_second / 1e9, 1),
        "memory_percent": round(100 * work.bytes / seconds / ceilings.bytes_per_second, 1),
    }


def _uncompiled(network: nn.Module) -> nn.Module:
    """Return a copy without what torch.compile has left."""
    compiled, network._compiled_call_impl = network._compiled_call_impl, None
    try:
        return copy.deepcopy(network)
    finally:
        network._compiled_call_impl = compiled


class _Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch annotates too little
    """Counts the bytes of all tensors that operators read and write; views are free."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - an operator of torch
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run the operator and count."""
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            leaves = tree_leaves((args, kwargs, result))
            self.bytes += sum(each.nbytes for each in leaves if isinstance(each, torch.Tensor))
        return result
