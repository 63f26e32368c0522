# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Trilinear doubling with a shortcut added, and its gradient, a kernel each; every tensor lies channels last.

Along each axis a voxel takes three quarters of the nearest and one quarter of the next on its side, at a border the
nearest again. Programs go along X, where neighbouring planes share what is summed over Y and Z.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS, _STEPS, _HEIGHT = 1024, 4, tl.constexpr(4)  # of a tile; planes of the image, rows of a tile, of a program


class Doubled(torch.autograd.Function):
    """An image [B, C, X, Y, Z] doubled along each side, plus a shortcut [B, C, 2 X, 2 Y, 2 Z] of its dtype."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, shortcut: Tensor) -> Tensor:
        """Return the sum, which lies as the shortcut: channels last."""
        image = image.contiguous(memory_format=torch.channels_last_3d)
        return doubling_forward(image, shortcut)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradients of both: the shortcut's is the one given."""
        gradient = gradient.contiguous(memory_format=torch.channels_last_3d)
        return doubling_backward(gradient) if ctx.needs_input_grad[0] else None, gradient


@torch.library.custom_op("medspeed::doubling_forward", mutates_args=())
def doubling_forward(image: Tensor, shortcut: Tensor) -> Tensor:
    """Return what `Doubled` says."""
    result = torch.empty_like(shortcut)
    _launch(forward_kernel, image, 2 * image.shape[3], 2 * image.shape[4], image, shortcut, result)
    return result


doubling_forward.register_fake(lambda image, shortcut: torch.empty_like(shortcut))


@torch.library.custom_op("medspeed::doubling_backward", mutates_args=())
def doubling_backward(gradient: Tensor) -> Tensor:
    """Return the image's gradient [B, C, X, Y, Z] for the sum's."""
    image: Tensor = _image_like(gradient)
    _launch(backward_kernel, image, *image.shape[3:], gradient, image)
    return image


@doubling_backward.register_fake
def _image_like(gradient: Tensor) -> Tensor:
    batch, channels, *sides = gradient.shape
    return gradient.new_empty(batch, *(side // 2 for side in sides), channels).movedim(-1, 1)


def _launch(kernel: Any, image: Tensor, height: int, width: int, *tensors: Tensor) -> None:
    """Launch programs for tiles of Z, tiles of Y, and steps along the X of each sample."""
    batch, channels, *sides = image.shape
    wide = triton.next_power_of_2(channels)
    tile = _ELEMENTS if channels % 8 == 0 else _ELEMENTS // 4  # numbers are then loaded one by one: fewer registers
    row = max(1, tile // wide // _HEIGHT.value)
    grid = triton.cdiv(width, row), triton.cdiv(height, _HEIGHT.value), batch * triton.cdiv(sides[0], _STEPS)
    kernel[grid](*tensors, *sides, channels, wide, row, _STEPS)


@triton.jit
def forward_kernel(
    image, shortcut, result, X, Y, Z, C: tl.constexpr, WIDE: tl.constexpr, ROW: tl.constexpr, STEPS: tl.constexpr
):
    """Program (i, j, n) writes tile (j, i) of 2 STEPS planes."""
    sample, x, y, z, channel, at, ok = _place(X, 2 * Y, 2 * Z, C, WIDE, ROW, STEPS)
    before = _blended(image, sample, x - 1, y, z, channel, X, Y, Z, C, 2)
    here = _blended(image, sample, x, y, z, channel, X, Y, Z, C, 2)
    for _ in range(STEPS):
        after = _blended(image, sample, x + 1, y, z, channel, X, Y, Z, C, 2)
        for half in tl.static_range(2):
            start, inside = (sample * 2 * X + 2 * x + half) * 4 * Y * Z * C, tl.where(x < X, ok, False)
            value = 0.75 * here + 0.25 * (after if half else before)
            value += tl.load(shortcut + start + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(result + start + at, value.to(result.dtype.element_ty), mask=inside)
        before, here, x = here, after, x + 1


@triton.jit
def backward_kernel(
    gradient, found, X, Y, Z, C: tl.constexpr, WIDE: tl.constexpr, ROW: tl.constexpr, STEPS: tl.constexpr
):
    """Program (i, j, n) writes tile (j, i) of STEPS planes; its first round only sums what comes before them."""
    sample, start, y, z, channel, at, ok = _place(X, Y, Z, C, WIDE, ROW, STEPS)
    before, first = tl.zeros((_HEIGHT * ROW, WIDE), tl.float32), tl.zeros((_HEIGHT * ROW, WIDE), tl.float32)
    for x in range(start - 1, start + STEPS):
        second = _blended(gradient, sample, 2 * x + 1, y, z, channel, 2 * X, 2 * Y, 2 * Z, C, 4)
        after = _blended(gradient, sample, 2 * x + 2, y, z, channel, 2 * X, 2 * Y, 2 * Z, C, 4)
        value = (0.25 * (before + after) + 0.75 * (first + second)).to(found.dtype.element_ty)
        inside = tl.where((x >= start) & (x < X), ok, False)
        tl.store(found + (sample * X + x) * Y * Z * C + at, value, mask=inside)
        before, first = second, after


@triton.jit
def _place(X, Y, Z, C: tl.constexpr, WIDE: tl.constexpr, ROW: tl.constexpr, STEPS: tl.constexpr):
    """Return a program's sample, first x, y and z [tile], channels [WIDE], and where in a plane they lie, and if."""
    place, chunks, channel = tl.arange(0, _HEIGHT * ROW), tl.cdiv(X, STEPS), tl.arange(0, WIDE)
    y, z = tl.program_id(1) * _HEIGHT + place // ROW, tl.program_id(0) * ROW + place % ROW
    at, ok = ((y * Z + z) * C)[:, None] + channel[None, :], ((y < Y) & (z < Z))[:, None] & (channel < C)[None, :]
    sample, x = tl.program_id(2) // chunks, tl.program_id(2) % chunks * STEPS
    return sample.to(tl.int64), x, y, z, channel, at, ok


@triton.jit
def _blended(image, sample, x, y, z, channel, X, Y, Z, C: tl.constexpr, COUNT: tl.constexpr):
    """Return sums over Y and Z of a plane, [tile, WIDE] float32, of what has the sides X, Y, Z; x is kept inside.

    COUNT is how many of an axis are summed: 2 of the image for the result, 4 of a gradient for the image's.
    """
    image += (sample * X + _inside(x, X)) * Y * Z * C
    total = 0.0
    for row in tl.static_range(COUNT):
        for column in tl.static_range(COUNT):
            at = (_source(y, row, Y, COUNT) * Z + _source(z, column, Z, COUNT)) * C
            value = tl.load(image + (at[:, None] + channel[None, :]), mask=(channel < C)[None, :], other=0.0)
            total += (0.75 if row % 3 else 0.25) * (0.75 if column % 3 else 0.25) * value.to(tl.float32)
    return total


@triton.jit
def _source(index, number: tl.constexpr, side, COUNT: tl.constexpr):
    """Return which of an axis is summed `number`th: of 2 the further one, then the nearest; of 4 as they lie."""
    return _inside(index // 2 + (1 - number) * (index % 2 * 2 - 1) if COUNT == 2 else 2 * index - 1 + number, side)


@triton.jit
def _inside(index, side):
    return tl.minimum(tl.maximum(index, 0), side - 1)
