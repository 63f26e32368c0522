"""The distance of a run's training steps to the limit of its device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from common.inference.predictors import Precision
from common.observe.limits import count_work, distance_to_limit, measure_ceilings
from common.observe.run import Run

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def measured_limit(
    network: nn.Module, shape: Sequence[int], seconds: float | None, precision: Precision, run: Run
) -> dict[str, Any] | None:
    """Count the work of a step, measure the device's ceilings, and say what the steps reach of them.

    Args:
        network: that was trained.
        shape: of a rank's batch, [B, C, *sides].
        seconds: of a step; None where none was done, and then there is nothing to say.
        precision: of the steps, and of the products that the ceiling is measured with. (On a GPU convolutions in fp32
            may take TF32, which these products do not.)
        run: whose device it is.
    """
    if seconds is None:
        return None
    try:
        with run.clock.stage("limit"):
            work = count_work(network, shape)
            found = distance_to_limit(work, seconds, measure_ceilings(run.device, _DTYPES[precision]))
    except RuntimeError as error:  # no memory left on the device, or an operator that cannot be counted
        run.say(f"limit: not measured: {' '.join(str(error).split())[:200]}")
        return None
    run.say(
        f"limit: {found['flops_per_step'] / 1e9:.1f} GFLOP in {found['seconds_per_step']:.3g} s a step, "
        f"{found['tflops']:.3g} TFLOP/s: {found['percent']:.0f} percent of what a {precision} product of matrices "
        f"reaches here ({found['ceiling_tflops']:.3g})"
    )
    return found
