"""Crops gathered from one tensor on a CUDA device, flipped, scaled, cast and laid out, in one Triton kernel.

Triton is imported when it is launched.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK = 1024  # voxels that a program writes


@torch.library.custom_op("medspeed::crops", mutates_args=())
def gathered_crops(
    image: Tensor, label: Tensor, table: Tensor, size: Sequence[int], dtype: torch.dtype, channels_last: bool
) -> tuple[Tensor, Tensor]:
    """Return N crops: image [N, C, X, Y, Z] and label [N, 1, X, Y, Z] uint8.

    Args:
        image: [C, V] float16, contiguous: cases, one after the other.
        label: [V] uint8, likewise.
        table: [N, 5] int64: the voxel that comes first, how many further the next one along X, Y, Z lies, and the bits
            of two float32, by which the image is multiplied and to which it is then added.
        size: X, Y, Z.
        dtype: of the image, to which float32 is rounded.
        channels_last: layout of the image.
    """
    from medspeed.common.kernels.crops_triton import crop_kernel

    images, labels = _crops_like(image, label, table, size, dtype, channels_last)
    channels, voxels = len(image), labels[0].numel()
    strides = (1, channels) if channels_last else (voxels, 1)
    grid = -(-voxels // _BLOCK), len(table)
    bits = table.view(torch.float32)
    crop_kernel[grid](image, label, table, bits, images, labels, len(label), *size, *strides, channels, _BLOCK)
    return images, labels


@gathered_crops.register_fake
def _crops_like(
    image: Tensor, label: Tensor, table: Tensor, size: Sequence[int], dtype: torch.dtype, channels_last: bool
) -> tuple[Tensor, Tensor]:
    layout = torch.channels_last_3d if channels_last else torch.contiguous_format
    images = torch.empty((len(table), len(image), *size), dtype=dtype, device=image.device, memory_format=layout)
    return images, torch.empty((len(table), 1, *size), dtype=torch.uint8, device=image.device)
