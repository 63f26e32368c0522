# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Max pooling of 3 x 3 pixels, stride 2, padding 1, of images [B, C, Y, X], channels last: a kernel each way.

A window has the number of its middle pixel. Kept is the place of its maximum, 3 (row of the window) + column.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_WARPS = 4
_BYTES = _WARPS * 32 * 16  # of a program's maxima: 16 of a thread, which one instruction loads or stores
_LAYOUT = torch.channels_last


class FusedMaxPool(torch.autograd.Function):
    """The maxima that `max_pool` returns, with their gradient."""

    @staticmethod
    def forward(ctx: Any, image: Tensor) -> Tensor:
        """Keep the places."""
        maxima: Tensor
        maxima, places = max_pool(image)
        ctx.save_for_backward(places)
        ctx.sides = image.shape[2:]
        return maxima

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradient of the image."""
        return max_pool_gradient(gradient.contiguous(memory_format=_LAYOUT), *ctx.saved_tensors, *ctx.sides)


@torch.library.custom_op("medspeed::max_pool", mutates_args=())
def max_pool(image: Tensor) -> tuple[Tensor, Tensor]:
    """Return maxima, and their places uint8, both [B, C, (Y + 1) // 2, (X + 1) // 2].

    As in torch NaN is above all, the last one of a window; else the first of equal ones counts.
    """
    maxima, places = _pooled_like(image)
    _launch(maxima_kernel, image, maxima, places, image)
    return maxima, places


@max_pool.register_fake
def _pooled_like(image: Tensor) -> tuple[Tensor, Tensor]:
    maxima = _empty(image, *((side + 1) // 2 for side in image.shape[2:]))
    return maxima, torch.empty_like(maxima, dtype=torch.uint8)


@torch.library.custom_op("medspeed::max_pool_gradient", mutates_args=())
def max_pool_gradient(gradient: Tensor, places: Tensor, y: int, x: int) -> Tensor:
    """Return the gradient [B, C, y, x] of the image from that of the maxima: summed in float32, rounded once."""
    found = _empty(gradient, y, x)
    _launch(gradient_kernel, gradient, places, found, found)
    return found


max_pool_gradient.register_fake(lambda gradient, places, y, x: _empty(gradient, y, x))


def _empty(like: Tensor, *sides: int) -> Tensor:
    return torch.empty(*like.shape[:2], *sides, dtype=like.dtype, device=like.device, memory_format=_LAYOUT)


def _launch(kernel: Any, first: Tensor, second: Tensor, third: Tensor, image: Tensor) -> None:
    batch, channels, y, x = image.shape
    windows, wide = batch * ((y + 1) // 2) * ((x + 1) // 2), triton.next_power_of_2(channels)
    block = max(1, _BYTES // image.element_size() // wide)
    grid = (triton.cdiv(windows, block),)
    kernel[grid](first, second, third, windows, y, x, channels, wide, block, num_warps=_WARPS)


@triton.jit
def _windows(windows, Y, X, C: tl.constexpr, wide: tl.constexpr, block: tl.constexpr):
    """Return of a program's windows y, x and place in memory of their middles, their own place, and which there are."""
    window, channel = tl.program_id(0) * block + tl.arange(0, block)[:, None], tl.arange(0, wide)[None, :]
    row, y, x = window // ((X + 1) // 2), 2 * (window // ((X + 1) // 2) % ((Y + 1) // 2)), 2 * (window % ((X + 1) // 2))
    middle = (row // ((Y + 1) // 2) * Y + y) * X + x
    there = (window < windows) & (channel < C)
    return y, x, middle.to(tl.int64) * C + channel, window.to(tl.int64) * C + channel, there


@triton.jit
def maxima_kernel(image, maxima, places, windows, Y, X, C: tl.constexpr, wide: tl.constexpr, block: tl.constexpr):
    """Program p writes block p of maxima and places."""
    y, x, middle, target, there = _windows(windows, Y, X, C, wide, block)
    best = tl.full((block, wide), float("-inf"), tl.float32)
    place = tl.zeros((block, wide), tl.int32) + tl.where(y > 0, 0, 3) + tl.where(x > 0, 0, 1)
    for number in tl.static_range(9):
        row, column = y + number // 3 - 1, x + number % 3 - 1
        inside = there & (row >= 0) & (row < Y) & (column >= 0) & (column < X)
        source = image + middle + ((number // 3 - 1) * X + number % 3 - 1) * C
        value = tl.load(source, mask=inside, other=float("-inf")).to(tl.float32)
        place = tl.where((value > best) | (value != value), number, place)
        best = tl.maximum(best, value, propagate_nan=tl.PropagateNan.ALL)  # of two in half precision at once
    tl.store(maxima + target, best.to(maxima.dtype.element_ty), mask=there)
    tl.store(places + target, place.to(tl.uint8), mask=there)


@triton.jit
def gradient_kernel(gradient, places, found, windows, Y, X, C: tl.constexpr, wide: tl.constexpr, block: tl.constexpr):
    """Program p writes what the middles of block p get, and the pixels right of, below, and right below each.

    These four lie in no other windows than this one, and those right of, below, and right below it.
    """
    y, x, middle, source, there = _windows(windows, Y, X, C, wide, block)
    right, below = there & (x + 2 < X), there & (y + 2 < Y)
    down = source + (X + 1) // 2 * C
    here, at = _gradient(gradient, places, source, there)
    beside, at_beside = _gradient(gradient, places, source + C, right)
    under, at_under = _gradient(gradient, places, down, below)
    across, at_across = _gradient(gradient, places, down + C, right & below)
    kind: tl.constexpr = found.dtype.element_ty
    found, right, below = found + middle, there & (x + 1 < X), there & (y + 1 < Y)
    tl.store(found, tl.where(at == 4, here, 0.0).to(kind), mask=there)
    two = tl.where(at == 5, here, 0.0) + tl.where(at_beside == 3, beside, 0.0)
    tl.store(found + C, two.to(kind), mask=right)
    two = tl.where(at == 7, here, 0.0) + tl.where(at_under == 1, under, 0.0)
    tl.store(found + X * C, two.to(kind), mask=below)
    two = tl.where(at == 8, here, 0.0) + tl.where(at_beside == 6, beside, 0.0)
    four = two + (tl.where(at_under == 2, under, 0.0) + tl.where(at_across == 0, across, 0.0))
    tl.store(found + (X + 1) * C, four.to(kind), mask=right & below)


@triton.jit
def _gradient(gradient, places, source, there):
    """Return gradient and place of windows; 9, which is none, where they are not there."""
    value = tl.load(gradient + source, mask=there, other=0.0).to(tl.float32)
    return value, tl.load(places + source, mask=there, other=9).to(tl.int32)
