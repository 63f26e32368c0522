"""How far a training step is from what the device can do: its work counted, the device's ceilings measured."""

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from common.clock import repeated
from common.run import Run

# Sides of the square matrices and length of the vectors that the ceilings are measured with: large enough to leave the
# caches, small enough to take a moment.
_SIDE = {"cpu": 1024, "cuda": 8192}
_NUMBERS = {"cpu": 2**24, "cuda": 2**28}
_ROUNDS = 5
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def distance_to_limit(
    network: nn.Module,
    shape: Sequence[int],
    seconds: float | None,
    precision: Literal["fp32", "bf16", "fp16"],
    run: Run,
) -> dict[str, Any] | None:
    """Count the work of a training step, measure the device's ceilings, and say what the steps reach of them.

    Args:
        network: that was trained.
        shape: of a rank's batch, [B, C, *sides].
        seconds: of a step; None where none was done, and then there is nothing to say.
        precision: of the steps, and of the products that the ceiling is measured with. (On a GPU convolutions in fp32
            may take TF32, which these products do not.)
        run: whose device it is.

    Returns:
        What the summary holds: work and seconds of a step, what is reached, the ceilings; None where it could not be
        measured, which is said.
    """
    if seconds is None:
        return None
    try:
        with run.clock.stage("limit"):
            flops, traffic = count_work(network, shape)
            most_flops, most_bytes = measure_ceilings(run.device, _DTYPES[precision])
    except RuntimeError as error:  # no memory left on the device, or an operator that cannot be counted
        run.say(f"limit: not measured: {' '.join(str(error).split())[:200]}")
        return None
    reached, percent = flops / seconds / 1e12, 100 * flops / seconds / most_flops
    run.say(
        f"limit: {flops / 1e9:.1f} GFLOP in {seconds:.3g} s a step, {reached:.3g} TFLOP/s: {percent:.0f} percent of "
        f"what a {precision} product of matrices reaches here ({most_flops / 1e12:.3g})"
    )
    return {
        "flops_per_step": flops,
        "bytes_per_step": traffic,
        "seconds_per_step": round(seconds, 5),
        "tflops": round(reached, 4),
        "ceiling_tflops": round(most_flops / 1e12, 4),
        "percent": round(percent, 1),
        "ceiling_gb_per_second": round(most_bytes / 1e9, 1),
        "memory_percent": round(100 * traffic / seconds / most_bytes, 1),
    }


def count_work(network: nn.Module, shape: Sequence[int]) -> tuple[int, int]:
    """Count the work of a training step, forward and backward, without computing it.

    Args:
        network: on any device; a copy without numbers is counted, and the network is left as it is.
        shape: of a batch, [B, C, *sides].

    Returns:
        The floating-point operations of the convolutions and matrix products (a multiplication with its addition
        counts as two), and the bytes read and written if every operator of the eager network goes to memory, in
        float32.

    Source: torch.utils.flop_counter, which knows the operators.
    """
    # Without what torch.compile has left.
    compiled, network._compiled_call_impl = network._compiled_call_impl, None
    try:
        copied = copy.deepcopy(network).to("meta").train()
    finally:
        network._compiled_call_impl = compiled
    image = torch.empty(tuple(shape), device="meta")
    with FlopCounterMode(display=False) as counter, _Traffic() as traffic:
        torch.autograd.backward(copied(image).sum())
    return int(counter.get_total_flops()), traffic.bytes


@cache
def measure_ceilings(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Measure what a device can do, in less than a second and once in a process; the best of a few rounds counts.

    Args:
        device: a CUDA device, or the CPU with as many threads as torch has now.
        dtype: of the matrices: that of the network's convolutions.

    Returns:
        Floating-point operations per second of a product of square matrices, and bytes per second of a copy, read and
        written.
    """
    side, numbers = _SIDE[device.type], _NUMBERS[device.type]
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    source, target = (torch.zeros(numbers, device=device) for _ in range(2))
    product = min(repeated(lambda: left @ right, _ROUNDS))
    copying = min(repeated(lambda: target.copy_(source), _ROUNDS))
    return 2 * side**3 / product, 2 * source.nbytes / copying


class _Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch annotates too little
    """Counts the bytes of all tensors that operators read and write; views are free."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Run the operator and count."""
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            leaves = tree_leaves((args, kwargs, result))
            self.bytes += sum(each.nbytes for each in leaves if isinstance(each, torch.Tensor))
        return result
