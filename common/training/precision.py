"""Numbers of the training step: which precision the device computes, its autocast and its loss scaling."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal

import torch

from common.inference.predictors import Precision, computes_bf16

_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_precision(
    wish: Literal["auto", "fp32", "bf16", "fp16"], device: torch.device, deepest: Sequence[int] = ()
) -> Precision:
    """Return the precision to train in; "auto" is bf16 where the device computes it in hardware, and rightly.

    Args:
        wish: what was asked for.
        device: where the network trains.
        deepest: sides X, Y, Z of a training crop at the coarsest level of a network of volumes.

    Raises:
        ValueError: fp16 on a CPU, whose convolutions have no half-precision gradients; or bf16 on a CPU with crops of
            which the network leaves two planes.
    """
    if wish == "fp16" and device.type == "cpu":
        raise ValueError("precision fp16: needs a CUDA device; on this CPU use bf16 or fp32")
    # torch 2.13's oneDNN (AVX-512 BF16) takes the weights' gradients of conv3d from memory that nobody wrote where the
    # first axis has exactly two planes, whatever the others; tests/common/training/test_precision.py has the check.
    wrong = device.type == "cpu" and len(deepest) == 3 and deepest[0] <= 2
    if wish == "bf16" and wrong:
        raise ValueError(
            f"precision bf16: the network leaves {deepest[0]} planes of a crop, and bf16 gradients go wrong on a CPU; "
            "take fp32, or crops longer along their first axis"
        )
    if wish != "auto":
        return wish
    if computes_bf16(device) and not wrong:
        return "bf16"
    return "fp16" if device.type == "cuda" else "fp32"


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which the forward pass and the loss run."""
    return torch.autocast(device.type, dtype=_DTYPES.get(precision, torch.bfloat16), enabled=precision != "fp32")
