"""Numbers of the training step: which precision the device computes, its autocast and its loss scaling."""

from contextlib import AbstractContextManager
from typing import Literal

import torch

from common.inference.predictors import Precision

_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_precision(wish: Literal["auto", "fp32", "bf16", "fp16"], device: torch.device) -> Precision:
    """Return the precision to train in; "auto" is bf16 where the device computes it in hardware.

    Raises:
        ValueError: fp16 on a CPU, whose convolutions have no half-precision gradients.
    """
    if wish == "fp16" and device.type == "cpu":
        raise ValueError("precision fp16: needs a CUDA device; on this CPU use bf16 or fp32")
    if wish != "auto":
        return wish
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return "bf16" if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported() else "fp32"


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which the forward pass and the loss run."""
    return torch.autocast(device.type, dtype=_DTYPES.get(precision, torch.bfloat16), enabled=precision != "fp32")
