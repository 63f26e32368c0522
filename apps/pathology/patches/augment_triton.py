# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The augmentation of `medspeed.apps.pathology.patches.augment` in two kernels.

Colours are jittered where they are read: of a zoomed patch four times, which costs no memory.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from medspeed.apps.pathology.patches.augment import CONTRAST, DRAW, GREY, HUE, SATURATION

_BLOCK = 512  # pixels that a program works on at a time
_STEPS = 8  # blocks whose grey one program sums
_FIELDS: Any = DRAW.fields  # and in bytes, where each begins
_ROW = tl.constexpr(DRAW.itemsize // 4)
_ORDER, _FACTORS = (tl.constexpr(_FIELDS[name][1] // 4) for name in ("order", "factors"))
_CONTRAST, _SATURATION, _HUE = tl.constexpr(CONTRAST), tl.constexpr(SATURATION), tl.constexpr(HUE)
_RED, _GREEN, _BLUE = tl.constexpr(GREY[0]), tl.constexpr(GREY[1]), tl.constexpr(GREY[2])


@torch.library.custom_op("medspeed::augmented", mutates_args=())
def augmented(pixels: Tensor, table: Tensor, dtype: torch.dtype, channels_last: bool) -> Tensor:
    """Return the patches of a table's rows, augmented, [N, 3, S, S] of a floating dtype, to which float32 is rounded.

    Pixels are [M, 3, S, S] uint8, contiguous; the table is [N, 16] int32, of `draw_table`.
    """
    images: Tensor = _images_like(pixels, table, dtype, channels_last)
    size, (_, channel, _, pixel) = pixels.shape[2], images.stride()
    parts = triton.cdiv(size**2, _BLOCK * _STEPS)
    sums = torch.empty(len(table), parts, device=pixels.device)  # of grey, as it is when the contrast is changed
    grey_kernel[sums.shape](pixels, table, sums, size, block=_BLOCK, steps=_STEPS)
    wide, grid = triton.next_power_of_2(parts), (len(table), triton.cdiv(size**2, _BLOCK))
    augment_kernel[grid](pixels, table, sums, images, size, parts, channel, pixel, wide=wide, block=_BLOCK)
    return images


@augmented.register_fake
def _images_like(pixels: Tensor, table: Tensor, dtype: torch.dtype, channels_last: bool) -> Tensor:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty((len(table), *pixels.shape[1:]), dtype=dtype, device=pixels.device, memory_format=layout)


@triton.jit
def grey_kernel(pixels, table, sums, size, block: tl.constexpr, steps: tl.constexpr):
    """Program (n, p) sums the grey of some blocks of patch n."""
    row = table + tl.program_id(0) * _ROW
    total = tl.zeros((block,), tl.float32)
    for step in range(steps):
        place = (tl.program_id(1) * steps + step) * block + tl.arange(0, block)
        inside = place < size * size
        red, green, blue = _jittered(pixels, row, place, size, 0.0, tl.load(row + 6), inside)
        total += tl.where(inside, _grey(red, green, blue), 0.0)
    tl.store(sums + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.sum(total))


@triton.jit
def augment_kernel(pixels, table, sums, images, size, parts, channel, pixel, wide: tl.constexpr, block: tl.constexpr):
    """Program (n, p) writes block p of patch n."""
    number = tl.program_id(0)
    row = table + number * _ROW
    part = tl.arange(0, wide)
    mean = tl.sum(tl.load(sums + number * parts + part, mask=part < parts, other=0.0)) / (size * size)
    place = tl.program_id(1) * block + tl.arange(0, block)
    inside = place < size * size
    resized = tl.load(row + 4)
    down, below = _along(place // size, size, resized, tl.load(row + 5))
    right, beside = _along(place % size, size, resized, tl.load(row + 5))
    red = tl.zeros((block,), tl.float32)
    green = tl.zeros((block,), tl.float32)
    blue = tl.zeros((block,), tl.float32)
    for corner in range(tl.where(resized == size, 1, 4)):
        y = tl.minimum(down + corner // 2, size - 1)
        x = tl.minimum(right + corner % 2, size - 1)
        share = tl.where(corner // 2 == 1, below, 1 - below) * tl.where(corner % 2 == 1, beside, 1 - beside)
        source = tl.load(row + 1) + y * tl.load(row + 2) + x * tl.load(row + 3)
        r, g, b = _jittered(pixels, row, source, size, mean, 4, inside)
        red += r * share
        green += g * share
        blue += b * share
    target = images + number.to(tl.int64) * 3 * size * size + place * pixel
    tl.store(target, (2 * red - 1).to(images.dtype.element_ty), mask=inside)
    tl.store(target + channel, (2 * green - 1).to(images.dtype.element_ty), mask=inside)
    tl.store(target + 2 * channel, (2 * blue - 1).to(images.dtype.element_ty), mask=inside)


@triton.jit
def _along(place, size, resized, first):
    """Return from which pixel along a side each place comes, and the next one's share of it."""
    pixel = tl.minimum(tl.maximum(place + first, 0), resized - 1)
    source = tl.clamp((pixel + 0.5) * (size / resized) - 0.5, 0.0, (size - 1).to(tl.float32))
    lower = tl.floor(source)
    return lower.to(tl.int32), source - lower


@triton.jit
def _jittered(pixels, row, place, size, mean, steps, inside):
    """Return red, green and blue at places of a row's patch, in [0, 1], after the first operations on it."""
    source = pixels + tl.load(row).to(tl.int64) * 3 * size * size + place
    red = tl.load(source, mask=inside, other=0).to(tl.float32) * (1 / 255)
    green = tl.load(source + size * size, mask=inside, other=0).to(tl.float32) * (1 / 255)
    blue = tl.load(source + 2 * size * size, mask=inside, other=0).to(tl.float32) * (1 / 255)
    for step in range(steps):
        kind = tl.load(row + _ORDER + step)
        factor = tl.load(row + _FACTORS + kind).to(tl.float32, bitcast=True)
        if kind == _HUE:
            if factor != 0:
                red, green, blue = _turned(red, green, blue, 6 * factor)
        else:
            grey = _grey(red, green, blue)
            other = (1 - factor) * tl.where(kind == _SATURATION, grey, tl.where(kind == _CONTRAST, mean, 0.0))
            red = tl.clamp(red * factor + other, 0.0, 1.0)
            green = tl.clamp(green * factor + other, 0.0, 1.0)
            blue = tl.clamp(blue * factor + other, 0.0, 1.0)
    return red, green, blue


@triton.jit
def _turned(red, green, blue, turn):
    """Turn the hue by sextants; the formulas are those of `_turn_hue_`."""
    high = tl.maximum(tl.maximum(red, green), blue)
    chroma = high - tl.minimum(tl.minimum(red, green), blue)
    scale = 1 / tl.maximum(chroma, 1.1754944e-38)
    lean = (green - blue) * scale
    hue = tl.abs(lean) + (high - red) * scale * (3 - 2 * tl.abs(lean))
    hue = tl.where(lean < 0, -hue, hue) + turn
    hue -= 6 * tl.floor(hue / 6)
    red = tl.clamp(high - 2 * chroma + chroma * tl.clamp(tl.abs(hue - 3), 1.0, 2.0), 0.0, 1.0)
    green = tl.clamp(high + chroma - chroma * tl.clamp(tl.abs(hue - 2), 1.0, 2.0), 0.0, 1.0)
    blue = tl.clamp(high + chroma - chroma * tl.clamp(tl.abs(hue - 4), 1.0, 2.0), 0.0, 1.0)
    return red, green, blue


@triton.jit
def _grey(red, green, blue):
    return red * _RED + green * _GREEN + blue * _BLUE
