"""The 3-D residual U-Net of the MONAI spleen recipes."""

from collections.abc import Sequence

from monai.networks.nets import UNet
from torch import nn


def unet3d(
    in_channels: int, out_channels: int, channels: Sequence[int] = (16, 32, 64, 128, 256), residual_units: int = 2
) -> nn.Module:
    """Return a 3-D U-Net with batch normalisation and PReLU; every level but the first halves each axis.

    Args:
        in_channels: channels C of the image.
        out_channels: classes K, background included.
        channels: width of each level; the sides of the input must divide by 2 ** (len(channels) - 1).
        residual_units: convolutions in each residual block.

    Returns:
        A module from [B, C, X, Y, Z] to logits [B, K, X, Y, Z].

    Source:
        Kerfoot et al., "Left-ventricle quantification using residual U-Net", STACOM 2018; widths of the MONAI fast
        training tutorial.
    """
    return UNet(  # type: ignore[no-any-return]
        spatial_dims=3,
        in_channels=in_channels,
        out_channels=out_channels,
        channels=tuple(channels),
        strides=(2,) * (len(channels) - 1),
        num_res_units=residual_units,
        norm="batch",
    )
