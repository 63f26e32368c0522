"""How far a training step is from what the device can do: its work counted, the device's ceiling measured."""

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import nn

from common.clock import repeated
from common.run import Run

# Sides of the square matrices that the ceiling is measured with: large enough to leave the caches, small enough to take
# a moment.
_SIDE = {"cpu": 1024, "cuda": 8192}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def distance_to_limit(
    network: nn.Module,
    shape: Sequence[int],
    seconds: float | None,
    precision: Literal["fp32", "bf16", "fp16"],
    run: Run,
) -> dict[str, Any] | None:
    """Count the work of a training step, measure the device's ceiling, and say what the steps reach of it.

    Args:
        network: that was trained.
        shape: of a rank's batch, [B, C, *sides].
        seconds: of a step; None where none was done, and then there is nothing to say.
        precision: of the steps, and of the products that the ceiling is measured with. (On a GPU convolutions in fp32
            may take TF32, which these products do not.)
        run: whose device it is.

    Returns:
        What the summary holds: work and seconds of a step, what is reached, the ceiling; None where it could not be
        measured, which is said.
    """
    if seconds is None:
        return None
    try:
        with run.clock.stage("limit"):
            flops, ceiling = count_flops(network, shape), measure_ceiling(run.device, _DTYPES[precision])
    except RuntimeError as error:  # no memory left on the device, or an operator that cannot be counted
        run.say(f"limit: not measured: {' '.join(str(error).split())[:200]}")
        return None
    reached, percent = flops / seconds / 1e12, 100 * flops / seconds / ceiling
    run.say(
        f"limit: {flops / 1e9:.1f} GFLOP in {seconds:.3g} s a step, {reached:.3g} TFLOP/s: {percent:.0f} percent of "
        f"what a {precision} product of matrices reaches here ({ceiling / 1e12:.3g})"
    )
    return {
        "flops_per_step": flops,
        "seconds_per_step": round(seconds, 5),
        "tflops": round(reached, 4),
        "ceiling_tflops": round(ceiling / 1e12, 4),
        "percent": round(percent, 1),
    }


def count_flops(network: nn.Module, shape: Sequence[int]) -> int:
    """Count the floating-point operations of a training step, forward and backward, without computing it.

    Args:
        network: on any device; a copy without numbers is counted, and the network is left as it is.
        shape: of a batch, [B, C, *sides].

    Returns:
        Those of the convolutions and matrix products; a multiplication with its addition counts as two.

    Source: torch.utils.flop_counter, which knows the operators.
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
    """Measure what a device can do, in less than a second and once in a process; the best of five rounds counts.

    Args:
        device: a CUDA device, or the CPU with as many threads as torch has now.
        dtype: of the matrices: that of the network's convolutions.

    Returns:
        Floating-point operations per second of a product of square matrices.
    """
    side = _SIDE[device.type]
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / min(repeated(lambda: left @ right, 5))
