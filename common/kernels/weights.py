"""Weights in half precision for a step: all cast at once, where autocast casts them one by one."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose3d)


def half_weights(network: nn.Module, device: str = "cuda") -> AbstractContextManager[object]:
    """Give a network's convolutions, inside, the weights that autocast would; gradients reach the float32 ones.

    The numbers are autocast's to the bit, with one kernel forward and one backward instead of two for each weight.
    Outside of autocast, in evaluation, and for a compiler, which does it by itself, nothing is changed.

    Args:
        network: whose forward runs inside.
        device: where it lies, and autocast works.
    """
    if torch.compiler.is_compiling() or not (network.training and torch.is_autocast_enabled(device)):
        return nullcontext()
    layers = [(name, layer) for name, layer in network.named_modules() if isinstance(layer, _CONVOLUTIONS)]
    named = [(f"{name}.{kind}", each) for name, layer in layers for kind, each in layer.named_parameters()]
    learned = {name: each for name, each in named if each.requires_grad and each.device.type == device}
    apply: Any = _Cast.apply
    halves = apply(torch.get_autocast_dtype(device), *learned.values())
    return _reparametrize_module(network, dict(zip(learned, halves, strict=True)))


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401
        return _cast(weights, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: ANN401
        return (None, *_cast(gradients, torch.float32))


def _cast(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    # Not empty_like: with one channel it forgets that the channels lie innermost.
    made = [torch.empty_strided(each.shape, each.stride(), dtype=dtype, device=each.device) for each in tensors]
    torch._foreach_copy_(made, list(tensors))
    return tuple(made)
