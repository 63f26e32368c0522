"""How far a training step is from what the device can do: its operations counted, the device's ceiling measured."""

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from medspeed.common.clock import repeated
from medspeed.common.run import Run

_SIDE = {
    "cpu": 1024,
    "cuda": 8192,
}  # of square matrices: they leave the caches, and take a moment


def distance_to_limit(
    network: nn.Module, shape: Sequence[int], seconds: float | None, dtype: torch.dtype, run: Run
) -> dict[str, Any] | None:
    """Count the operations of a training step, measure the device's ceiling, and say what the steps reach of it.

    `shape` is that of a rank's batch, [B, C, *sides]; `seconds` are those of a step, None where none was done. On a GPU
    convolutions in fp32 may take TF32, which the ceiling does not. Returns what the summary holds; None where it could
    not be measured, which is said.
    """
    if seconds is None:
        return None
    try:
        with run.clock.stage("limit"):
            flops, ceiling = count_flops(network, shape), measure_ceiling(run.device, dtype)
    except Exception as error:  # no memory left, or an operator that cannot be counted: it must not cost a training
        run.say(f"limit: not measured: {' '.join(str(error).split())[:200]}", "detail")
        return None
    reached, percent = flops / seconds / 1e12, 100 * flops / seconds / ceiling
    run.say(
        f"limit: a step takes {seconds:.3g} s for {flops / 1e9:.1f} GFLOP: {reached:.3g} of the {ceiling / 1e12:.3g} "
        f"TFLOP/s that products of matrices reach on this device ({dtype}), {percent:.0f} percent",
        "detail",
    )
    return {
        "flops_per_step": flops,
        "seconds_per_step": round(seconds, 5),
        "tflops": round(reached, 4),
        "ceiling_tflops": round(ceiling / 1e12, 4),
        "percent": round(percent, 1),
    }


def count_flops(network: nn.Module, shape: Sequence[int]) -> int:
    """Count the operations of a training step on a batch [B, C, *sides], without computing it.

    Convolutions and matrix products count, forward and backward; a multiplication with its addition as two. The network
    is left as it is.
    """
    from torch.utils.flop_counter import FlopCounterMode  # here: the start of a run has no need of it

    # Without what torch.compile has left.
    compiled, network._compiled_call_impl = network._compiled_call_impl, None
    try:
        copied = copy.deepcopy(network).to("meta").train()
    finally:
        network._compiled_call_impl = compiled
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(copied(torch.empty(tuple(shape), device="meta")).sum())
    return int(counter.get_total_flops())


@cache
def measure_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the operations per second of a product of square matrices, the best of five rounds, once in a process."""
    side = _SIDE[device.type]
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / min(repeated(lambda: left @ right, 5))
