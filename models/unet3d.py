"""The 3-D residual U-Net of the MONAI spleen recipes."""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import nn


class Convolution(nn.Sequential):
    """A convolution with a kernel of 3, and, unless `norm` is off, batch normalisation and PReLU.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        stride: 2 halves each side, or doubles it where `transposed`.
        transposed: whether the convolution is.
        norm: whether normalisation and PReLU follow.
    """

    def __init__(
        self, in_channels: int, out_channels: int, stride: int = 1, transposed: bool = False, norm: bool = True
    ) -> None:
        super().__init__()
        if transposed:
            self.conv: nn.Module = nn.ConvTranspose3d(
                in_channels, out_channels, 3, stride, 1, output_padding=stride - 1
            )
        else:
            self.conv = nn.Conv3d(in_channels, out_channels, 3, stride, 1)
        if norm:
            self.adn = nn.Sequential(OrderedDict(N=nn.BatchNorm3d(out_channels), A=nn.PReLU()))


class ResidualUnit(nn.Module):
    """Convolutions beside a shortcut, which is a convolution itself where channels or sides change.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        stride: of the first convolution and of the shortcut.
        units: convolutions, at least 1.
        last_norm: whether normalisation and PReLU follow the last of them.
    """

    def __init__(
        self, in_channels: int, out_channels: int, stride: int = 1, units: int = 1, last_norm: bool = True
    ) -> None:
        super().__init__()
        self.conv = nn.Sequential()
        self.residual: nn.Module = nn.Identity()
        for number in range(units):
            norm = last_norm or number + 1 < units
            unit = Convolution(
                out_channels if number else in_channels, out_channels, 1 if number else stride, norm=norm
            )
            self.conv.add_module(f"unit{number}", unit)
        if stride > 1:
            self.residual = nn.Conv3d(in_channels, out_channels, 3, stride, 1)
        elif in_channels != out_channels:
            self.residual = nn.Conv3d(in_channels, out_channels, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return [B, out_channels, X / stride, Y / stride, Z / stride] for [B, in_channels, X, Y, Z]."""
        shortcut: torch.Tensor = self.residual(image)
        changed: torch.Tensor = self.conv(image)
        return changed + shortcut


class Skip(nn.Module):
    """Hands the input on beside what a module makes of it.

    Args:
        submodule: the coarser levels; keeps the sides.
    """

    def __init__(self, submodule: nn.Module) -> None:
        super().__init__()
        self.submodule = submodule

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return the channels of [B, C, X, Y, Z], then those of the submodule's output."""
        return torch.cat([image, self.submodule(image)], dim=1)


class UNet3d(nn.Module):
    """See `unet3d`. Names, shapes and initial values of its weights are those of MONAI's `UNet`."""

    def __init__(self, in_channels: int, out_channels: int, channels: Sequence[int], residual_units: int) -> None:
        super().__init__()
        assert len(channels) > 1 <= residual_units, (channels, residual_units)
        self.model = _level(in_channels, out_channels, channels, residual_units, top=True)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return logits [B, K, X, Y, Z] of [B, C, X, Y, Z]."""
        logits: torch.Tensor = self.model(image)
        return logits


def _level(in_channels: int, out_channels: int, channels: Sequence[int], units: int, top: bool = False) -> nn.Module:
    """Return a level and all that are coarser, drawn in MONAI's order: what lies below, the way down, the way up."""
    width, below = channels[0], channels[1]
    if len(channels) > 2:
        inner = _level(width, width, channels[1:], units)
        joined = 2 * width
    else:
        inner = ResidualUnit(width, below, units=units)
        joined = width + below
    down = ResidualUnit(in_channels, width, 2, units)
    up = Convolution(joined, out_channels, 2, transposed=True)
    return nn.Sequential(
        down, Skip(inner), nn.Sequential(up, ResidualUnit(out_channels, out_channels, last_norm=not top))
    )


def unet3d(
    in_channels: int, out_channels: int, channels: Sequence[int] = (16, 32, 64, 128, 256), residual_units: int = 2
) -> UNet3d:
    """Return a 3-D U-Net with batch normalisation and PReLU; every level but the first halves each axis.

    Args:
        in_channels: channels C of the image.
        out_channels: classes K, background included.
        channels: width of each level; the sides of the input must divide by 2 ** (len(channels) - 1).
        residual_units: convolutions in each residual block, at least 1.

    Returns:
        A module from [B, C, X, Y, Z] to logits [B, K, X, Y, Z].

    Source:
        Kerfoot et al., "Left-ventricle quantification using residual U-Net", STACOM 2018; widths of the MONAI fast
        training tutorial.
    """
    return UNet3d(in_channels, out_channels, channels, residual_units)
