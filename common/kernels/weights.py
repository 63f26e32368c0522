"""Weights in half precision for a step: all cast at once, where autocast casts them one by one."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from medspeed.common.kernels.folding import lay_out

_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose3d)


def half_weights(network: nn.Module, device: str = "cuda", join: bool = False) -> AbstractContextManager[object]:
    """Give a network's convolutions, inside, the weights that autocast would; gradients reach the float32 ones.

    The numbers are autocast's to the bit, with one kernel forward and one backward instead of two for each weight.
    Outside of autocast, in evaluation, and for a compiler, which does it by itself, nothing is changed. To `join` is to
    give modules that name two weights as `alike` the channels of both in place of the first.
    """
    if torch.compiler.is_compiling() or not (network.training and torch.is_autocast_enabled(device)):
        return nullcontext()
    layers = [(name, layer) for name, layer in network.named_modules() if isinstance(layer, _CONVOLUTIONS)]
    named = [(f"{name}.{kind}", each) for name, layer in layers for kind, each in layer.named_parameters()]
    learned = {name: each for name, each in named if each.requires_grad and each.device.type == device}
    alike: list[Any] = [(name, vars(layer).get("alike")) for name, layer in network.named_modules() if join]
    both = ([f"{name}.{each}" for each in two] for name, two in alike if two)
    pairs = {two[0]: two for two in both if learned.keys() >= {*two}}
    seconds = {other for _, other in pairs.values()}
    groups = [pairs.get(name, [name]) for name in learned if name not in seconds]
    sizes = [[len(learned[name]) for name in group] for group in groups]
    apply: Any = _Cast.apply
    halves = apply(torch.get_autocast_dtype(device), sizes, *(learned[name] for group in groups for name in group))
    given = dict(zip((group[0] for group in groups), halves, strict=True))
    known = [(name, layer, given[f"{name}.weight"]) for name, layer in layers if f"{name}.weight" in given]
    return _reparametrize_module(network, given | lay_out({f"{name}.laid": (*each,) for name, *each in known}))


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, sizes: list[list[int]], *weights: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401
        ctx.sizes = sizes
        return _cast(weights, dtype, sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: ANN401
        parts = [part for whole, sizes in zip(gradients, ctx.sizes, strict=True) for part in torch.split(whole, sizes)]
        return (None, None, *_cast(parts, torch.float32, [[len(part)] for part in parts]))


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype, sizes: list[list[int]]) -> tuple[Tensor, ...]:
    """Return tensors cast, some of them with others behind them as one."""
    made, rest = [], iter(tensors)
    for together in sizes:
        first, *_ = [next(rest) for _ in together]
        # Not empty_like: with one channel it forgets that the channels lie innermost.
        shape = sum(together), *first.shape[1:]
        made.append(torch.empty_strided(shape, first.stride(), dtype=dtype, device=first.device))
    parts = [part for whole, together in zip(made, sizes, strict=True) for part in torch.split(whole, together)]
    torch._foreach_copy_(parts, list(tensors))
    return tuple(made)
