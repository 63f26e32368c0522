# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Crops gathered from one tensor on a CUDA device, flipped, scaled, cast and laid out, in one kernel."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
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
    images, labels = _crops_like(image, label, table, size, dtype, channels_last)
    channels, voxels = len(image), labels[0].numel()
    strides = (1, channels) if channels_last else (voxels, 1)
    grid, bits = (triton.cdiv(voxels, _BLOCK), len(table)), table.view(torch.float32)
    crop_kernel[grid](image, label, table, bits, images, labels, len(label), *size, *strides, channels, _BLOCK)
    return images, labels


@gathered_crops.register_fake
def _crops_like(
    image: Tensor, label: Tensor, table: Tensor, size: Sequence[int], dtype: torch.dtype, channels_last: bool
) -> tuple[Tensor, Tensor]:
    layout = torch.channels_last_3d if channels_last else torch.contiguous_format
    images = torch.empty((len(table), len(image), *size), dtype=dtype, device=image.device, memory_format=layout)
    return images, torch.empty((len(table), 1, *size), dtype=torch.uint8, device=image.device)


@triton.jit
def crop_kernel(
    image, label, table, bits, images, labels, case_voxels, size_x, size_y, size_z, channel_stride, voxel_stride,
    channels: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Program (p, n) writes block p of crop n."""
    crop, voxels = tl.program_id(1).to(tl.int64), size_x * size_y * size_z
    voxel = tl.program_id(0) * block + tl.arange(0, block)
    inside = voxel < voxels
    row = table + 5 * crop
    x, y, z = voxel // (size_y * size_z), voxel // size_z % size_y, voxel % size_z
    place = tl.load(row) + x * tl.load(row + 1) + y * tl.load(row + 2) + z * tl.load(row + 3)
    scale, shift = tl.load(bits + 10 * crop + 8), tl.load(bits + 10 * crop + 9)
    tl.store(labels + crop * voxels + voxel, tl.load(label + place, mask=inside), mask=inside)
    target = images + crop * channels * voxels + voxel * voxel_stride
    for channel in tl.static_range(channels):
        value = tl.load(image + place, mask=inside).to(tl.float32) * scale + shift
        tl.store(target + channel * channel_stride, value.to(images.dtype.element_ty), mask=inside)
        image += case_voxels  # step by step: a multiple of it need not be a number of 32 bits
