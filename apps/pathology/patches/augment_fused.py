"""The augmentation of patches for a CUDA device: what `augment` does in some 270 launches, in two Triton kernels.

What differs between patches stands in a table, a row for each, so that every batch of a size launches the same, with
one small upload. Colours are jittered where they are read: of a zoomed patch four times, which costs no memory.
Triton is imported when a kernel is launched.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from medspeed.apps.pathology.patches.augment import CONTRAST, PatchDraw, augment, zoomed_sides
from medspeed.common.data.crops import upload
from medspeed.common.kernels.trust import trusts

FUSED = "augmentation"
"""The name that `trusts` knows the kernels by."""
ROW, ORDER, FACTORS = 16, 7, 11
"""Numbers of 32 bits in a row of the table; places in it of the four operations in order, and of the four factors."""
_BLOCK = 512  # pixels that a program works on at a time
_STEPS = 8  # blocks whose grey one program sums


def augment_rows(
    pixels: Tensor, places: np.ndarray | None, draw: PatchDraw, dtype: torch.dtype, channels_last: bool
) -> Tensor:
    """Return patches as drawn for each, by the kernels where they are trusted, else by `augment`.

    Args:
        pixels: [M, 3, S, S] uint8, red, green, blue.
        places: [N] int, of the patches among them; None where they are all.
        draw: of the N patches.
        dtype: that the kernels give them in.
        channels_last: layout that the kernels give them in.

    Returns:
        [N, 3, S, S]; by `augment` float32 and contiguous.
    """
    if not trusts(FUSED, pixels):
        return augment(pixels if places is None else pixels.index_select(0, upload(places, pixels.device)), draw)
    rows = np.arange(len(pixels)) if places is None else places
    return augmented_by(upload(draw_table(draw, rows, pixels.shape[2]), pixels.device), pixels, dtype, channels_last)


def augmented_by(table: Tensor, pixels: Tensor, dtype: torch.dtype, channels_last: bool) -> Tensor:
    """Return the patches of a table on the device (see `draw_table`), augmented by the kernels, [N, 3, S, S]."""
    images: Tensor = augmented(pixels, table, grey_sums(pixels, table), dtype, channels_last)
    return images


def draw_table(draw: PatchDraw, places: np.ndarray, size: int) -> np.ndarray:
    """Return what the kernels read of a draw of N patches of so many pixels a side, [N, 16] int32.

    A row: place ([N] int, of the patch among those on the device); the pixel that comes to the upper left, and how many
    further the next ones down and to the right lie; the side that is resampled to, and its first pixel; operations
    before the contrast; their order; their factors, the bits of float32.
    """
    resized, first = zoomed_sides(draw.zooms, size)
    before = np.argmax(draw.order == CONTRAST, axis=1)
    moves = _moves(size)[4 * draw.flips + draw.turns]
    table = np.zeros((len(places), ROW), np.int32)
    table[:, :FACTORS] = np.column_stack([places, moves, resized, first, before, draw.order])
    table[:, FACTORS : FACTORS + 4] = draw.factors.view(np.int32)
    return table


@cache
def _moves(size: int) -> np.ndarray:
    """Return of each of the 8 flips and turns which pixel comes first, and the steps from it down and right, [8, 3]."""
    pixels = np.arange(size**2).reshape(size, size)
    moved = [np.rot90(flipped, turns) for flipped in (pixels, pixels[:, ::-1]) for turns in range(4)]
    return np.array([(each[0, 0], each[1, 0] - each[0, 0], each[0, 1] - each[0, 0]) for each in moved])


@torch.library.custom_op("medspeed::grey_sums", mutates_args=())
def grey_sums(pixels: Tensor, table: Tensor) -> Tensor:
    """Return parts of each patch's sum of grey, as it is when its contrast is changed, [N, P] float32.

    Args:
        pixels: [M, 3, S, S] uint8, contiguous.
        table: [N, 16] int32 of `draw_table`.
    """
    from medspeed.apps.pathology.patches.augment_triton import grey_kernel

    sums: Tensor = _sums_like(pixels, table)
    grey_kernel[sums.shape](pixels, table, sums, pixels.shape[2], block=_BLOCK, steps=_STEPS)
    return sums


@grey_sums.register_fake
def _sums_like(pixels: Tensor, table: Tensor) -> Tensor:
    parts = -(-(pixels.shape[2] ** 2) // (_BLOCK * _STEPS))
    return torch.empty(len(table), parts, device=pixels.device)


@torch.library.custom_op("medspeed::augmented", mutates_args=())
def augmented(pixels: Tensor, table: Tensor, greys: Tensor, dtype: torch.dtype, channels_last: bool) -> Tensor:
    """Return the patches of a table's rows, augmented, [N, 3, S, S] of a floating dtype.

    Args:
        pixels: [M, 3, S, S] uint8, contiguous.
        table: [N, 16] int32 of `draw_table`.
        greys: [N, P] of `grey_sums`.
        dtype: of the result, to which float32 is rounded.
        channels_last: layout of the result.
    """
    from medspeed.apps.pathology.patches.augment_triton import augment_kernel

    images: Tensor = _images_like(pixels, table, greys, dtype, channels_last)
    size, parts = pixels.shape[2], greys.shape[1]
    _, channel, _, pixel = images.stride()
    wide = 1 << (parts - 1).bit_length()
    grid = len(table), -(-(size**2) // _BLOCK)
    augment_kernel[grid](pixels, table, greys, images, size, parts, channel, pixel, wide=wide, block=_BLOCK)
    return images


@augmented.register_fake
def _images_like(pixels: Tensor, table: Tensor, greys: Tensor, dtype: torch.dtype, channels_last: bool) -> Tensor:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty((len(table), *pixels.shape[1:]), dtype=dtype, device=pixels.device, memory_format=layout)
