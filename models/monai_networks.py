"""Networks of MONAI, which is loaded when one is built."""

from collections.abc import Sequence
from typing import Any

from torch import nn


def dynunet(in_channels: int, out_channels: int, channels: Sequence[int] = (32, 64, 128, 256, 320, 320)) -> nn.Module:
    """Return the U-Net of nnU-Net, with instance normalization and leaky ReLU, without deep supervision.

    There are at least 3 levels, of so many `channels`; input sides must be multiples of 2 ** (len(channels) - 1).

    Source: Isensee et al., "nnU-Net", Nature Methods 2021.
    """
    kernels, strides = [3] * len(channels), [1, *[2] * (len(channels) - 1)]
    shape = {"kernel_size": kernels, "strides": strides, "upsample_kernel_size": strides[1:], "filters": [*channels]}
    return _of_monai("DynUNet", in_channels, out_channels, shape)


def mednext(in_channels: int, out_channels: int, filters: int = 32, blocks_down: Sequence[int] = (2,) * 4) -> nn.Module:
    """Return a MedNeXt with kernels of 3 voxels (MedNeXt-S by default), without deep supervision.

    `filters` is the width of the first level, each further one has twice as many; `blocks_down` are the blocks of each
    level but the coarsest. Input sides must be multiples of 2 ** len(blocks_down).

    Source: Roy et al., "MedNeXt: transformer-driven scaling of ConvNets", MICCAI 2023.
    """
    blocks = {"blocks_down": [*blocks_down], "blocks_bottleneck": blocks_down[-1], "blocks_up": [*blocks_down][::-1]}
    shape = {"init_filters": filters, "kernel_size": 3, "use_residual_connection": True, **blocks}
    return _of_monai("MedNeXt", in_channels, out_channels, shape)


def _of_monai(name: str, in_channels: int, out_channels: int, shape: dict[str, Any]) -> nn.Module:
    from monai.networks import nets

    given = {"spatial_dims": 3, "in_channels": in_channels, "out_channels": out_channels, **shape}
    network: Any = getattr(nets, name)(**given)
    network.monai = {"_target_": name, **given}  # how a bundle names it
    return network  # type: ignore[no-any-return]
