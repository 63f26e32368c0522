"""The kernel of `medspeed.common.kernels.crops`."""

# mypy: ignore-errors
# What Triton compiles is not typed as Python is.

import triton
import triton.language as tl


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
