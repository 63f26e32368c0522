"""How far a training step is from what the device can do: its work counted, the device's ceilings measured."""

import copy
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from medspeed.common.clock import repeated
from medspeed.common.run import Run

# Sides of square matrices, and bytes: large enough to leave the caches, small enough to take a moment.
_SIDE, _COPIED = {"cpu": 1024, "cuda": 8192}, {"cpu": 2**26, "cuda": 2**28}
# Passes over its tensor that a normalisation with the activation behind it cannot do without: what it is given, for the
# statistics and to apply them, and what it gives; backward the same of two tensors, less one.
_FORWARD, _BACKWARD = 3, 5


class Work(NamedTuple):
    """A layer's work in one direction: operations of its convolution or matrix product, elements that it must move."""

    flops: int
    elements: int


def distance_to_limit(
    network: nn.Module, shape: Sequence[int], seconds: float | None, dtype: torch.dtype, run: Run
) -> dict[str, Any] | None:
    """Count the work of a training step, measure the device's ceilings, and say what the steps reach of them.

    `shape` is that of a rank's batch, [B, C, *sides]; `seconds` are those of a step, None where none was done. On a GPU
    convolutions in fp32 may take TF32, which the ceiling does not. Returns what the summary holds, or says why not.
    """
    if seconds is None:
        return None
    try:
        with run.clock.stage("limit"):
            work = count_work(network, shape)
            ceiling, bandwidth = measure_ceiling(run.device, dtype), measure_bandwidth(run.device)
    except Exception as error:  # no memory left, or an operator that cannot be counted: it must not cost a training
        run.say(f"limit: not measured: {' '.join(str(error).split())[:200]}", "detail")
        return None
    flops, least = sum(each.flops for each in work), floor(work, dtype.itemsize, ceiling, bandwidth)
    found = {
        "flops_per_step": flops,
        "seconds_per_step": round(seconds, 5),
        "tflops": round(flops / seconds / 1e12, 4),
        "ceiling_tflops": round(ceiling / 1e12, 4),
        "percent": round(100 * flops / seconds / ceiling, 1),
        "ceiling_gb_per_second": round(bandwidth / 1e9, 1),
        "floor_seconds": round(least, 6),
        "floor_percent": round(100 * least / seconds, 1),
    }
    run.say(f"limit ({dtype}): {', '.join(f'{name} {each:.4g}' for name, each in found.items())}", "detail")
    return found


def floor(work: Sequence[Work], itemsize: int, flops: float, bandwidth: float) -> float:
    """Return the seconds below which no step comes whose layers run one after the other in this precision.

    Convolutions take the longer of their products and their memory traffic; a normalisation and the activation behind
    it take theirs, fused; what is left (additions, loss, optimizer) takes nothing. `flops` and `bandwidth` (bytes) are
    the device's per second, `itemsize` the bytes of an element.
    """
    return sum(max(each.flops / flops, each.elements * itemsize / bandwidth) for each in work)


def count_work(network: nn.Module, shape: Sequence[int]) -> list[Work]:
    """Count the work of a training step's layers on a batch [B, C, *sides], forward and backward, without computing it.

    Convolutions, matrix products, normalisations and interpolations count; a multiplication with its addition as two.
    The network is left as it is. torch.utils.flop_counter knows the operators.
    """
    from torch.utils.flop_counter import flop_registry  # here: the start of a run has no need of it

    work = list[Work]()

    class Layers(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
            out, name = func(*args, **(kwargs or {})), func._schema.name.removeprefix("aten::")
            given, made = ([each.numel() for each in tree_leaves(x) if torch.is_tensor(each)] for x in (args, out))
            if func._overloadpacket in flop_registry:
                flops = int(flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out))
                backward = name == "convolution_backward"  # of the image, where it is wanted, and of the weight
                products, moved = (sum(args[-1][:2]), sum(given[:3])) if backward else (1, sum(given[:2]) + made[0])
                work.extend([Work(flops // max(products, 1), moved)] * products)  # none of a frozen first layer
            elif name.startswith(("native_batch_norm", "native_group_norm")):
                work.append(Work(0, given[0] * (_BACKWARD if "backward" in name else _FORWARD)))
            elif name.startswith("upsample"):
                work.append(Work(0, given[0] + made[0]))
            return out

    copied = copy.deepcopy(network).to("meta").train()  # without what torch.compile has left
    with Layers():  # type: ignore[no-untyped-call]
        torch.autograd.backward(copied(torch.empty(tuple(shape), device="meta")).sum())
    return work


@cache
def measure_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the operations per second of a product of square matrices, the best of five rounds, once in a process."""
    side = _SIDE[device.type]
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / min(repeated(lambda: left @ right, 5))


@cache
def measure_bandwidth(device: torch.device) -> float:
    """Measure the bytes per second that a device reads and writes in a copy; like `measure_ceiling`."""
    source = torch.zeros(_COPIED[device.type], dtype=torch.uint8, device=device)
    return 2 * source.nbytes / min(repeated(partial(torch.empty_like(source).copy_, source), 5))
