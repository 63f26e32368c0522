"""The 3-D residual U-Net of the MONAI spleen recipes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from medspeed.common.kernels.folding import Conv3d, ConvTranspose3d
from medspeed.common.kernels.norms import BATCH, BatchNormPReLU, fork
from medspeed.common.kernels.trust import trusts
from medspeed.common.kernels.weights import half_weights


class Convolution(nn.Module):
    """A convolution with kernel size 3, followed by batch normalization and PReLU unless `norm` is off.

    A `stride` of 2 halves each side, or doubles it where the convolution is `transposed`. Before the normalisation a
    bias has no effect in training, but for the running mean: there it is neither computed nor learned, and only added
    to that mean. It keeps its name and value, as MONAI's weights have one.
    """

    def __init__(
        self, in_channels: int, out_channels: int, stride: int = 1, transposed: bool = False, norm: bool = True
    ) -> None:
        super().__init__()
        self.conv: Conv3d | ConvTranspose3d
        if transposed:
            self.conv = ConvTranspose3d(in_channels, out_channels, 3, stride, 1, output_padding=stride - 1)
        else:
            self.conv = Conv3d(in_channels, out_channels, 3, stride, 1)
        self.adn = BatchNormPReLU(out_channels) if norm else None
        if norm and self.conv.bias is not None:
            self.conv.bias.requires_grad_(False)

    def forward(self, image: Tensor, residual: Tensor | None = None, residual_bias: Tensor | None = None) -> Tensor:
        """Return [B, out_channels, *sides] for [B, in_channels, X, Y, Z], and the residual and its bias added."""
        x: Tensor
        if self.adn is None or not self.training:
            x = self.conv(image) if self.adn is None else self.adn(self.conv(image))
            return x if residual is None else x + residual
        return self.adn(self.conv.convolve(image, None), self.conv.bias, residual, residual_bias)  # type: ignore[no-any-return]


class ResidualUnit(nn.Module):
    """At least one convolution (`units`) with a residual shortcut, a convolution itself if channels or sides change.

    The `stride` is that of the first convolution and of the shortcut; `last_norm`: normalisation and PReLU follow the
    last one too.
    """

    def __init__(
        self, in_channels: int, out_channels: int, stride: int = 1, units: int = 1, last_norm: bool = True
    ) -> None:
        super().__init__()
        self.conv = nn.Sequential()
        self.residual: nn.Module = nn.Identity()
        for number in range(units):
            first = (out_channels, 1) if number else (in_channels, stride)
            unit = Convolution(first[0], out_channels, first[1], norm=last_norm or number + 1 < units)
            self.conv.add_module(f"unit{number}", unit)
        if stride > 1:
            self.residual = Conv3d(in_channels, out_channels, 3, stride, 1)
            self.alike = ("conv.unit0.conv.weight", "residual.weight") if units > 1 else ()  # see `half_weights`
        elif in_channels != out_channels:
            self.residual = Conv3d(in_channels, out_channels, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Return [B, out_channels, X / stride, Y / stride, Z / stride] for [B, in_channels, X, Y, Z]."""
        *units, last = self.conv
        x, shortcut = fork(image)
        bias = None
        if self.training and trusts(BATCH, image) and isinstance(self.residual, Conv3d) and last.adn is not None:
            bias = self.residual.bias  # added with the rest, where its gradient is summed with theirs
            first: Any = self.conv[0]
            if len(first.conv.weight) > self.residual.out_channels:  # `half_weights` joined the shortcut's
                x, shortcut = first.conv.convolve(image, None).chunk(2, 1)
                x, units = first.adn(x, first.conv.bias), units[1:]
            else:
                shortcut = self.residual.convolve(shortcut, None)
        else:
            shortcut = self.residual(shortcut)
        for unit in units:
            x = unit(x)
        return last(x, shortcut, bias)  # type: ignore[no-any-return]


class Skip(nn.Module):
    """The coarser levels, which keep the sides, beside the input."""

    def __init__(self, submodule: nn.Module) -> None:
        super().__init__()
        self.submodule = submodule

    def forward(self, image: Tensor) -> Tensor:
        """Return the channels of [B, C, X, Y, Z], then those of the coarser levels."""
        image, below = fork(image)
        return torch.cat([image, self.submodule(below)], dim=1)


class UNet3d(nn.Module):
    """See `unet3d`. Names, shapes and initial values of its weights are those of MONAI's `UNet`."""

    def __init__(self, in_channels: int, out_channels: int, channels: Sequence[int], residual_units: int) -> None:
        super().__init__()
        assert len(channels) > 1 <= residual_units, (channels, residual_units)
        self.monai: dict[str, Any] = {  # how a bundle names it
            "_target_": "UNet", "spatial_dims": 3, "in_channels": in_channels, "out_channels": out_channels,
            "channels": [*channels], "strides": [2] * (len(channels) - 1), "num_res_units": residual_units,
            "norm": "batch",
        }  # fmt: skip
        self.model = _level(in_channels, out_channels, channels, residual_units, top=True)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits [B, K, X, Y, Z] of [B, C, X, Y, Z]."""
        with half_weights(self, join=self.training and trusts(BATCH, image)):
            return self.model(image)  # type: ignore[no-any-return]


def _level(in_channels: int, out_channels: int, channels: Sequence[int], units: int, top: bool = False) -> nn.Module:
    """Return a level and all that are coarser, drawn in MONAI's order: what lies below, the way down, the way up."""
    width, below = channels[0], channels[1]
    deepest = len(channels) == 2
    inner = ResidualUnit(width, below, units=units) if deepest else _level(width, width, channels[1:], units)
    down = ResidualUnit(in_channels, width, 2, units)
    up = Convolution(width + (below if deepest else width), out_channels, 2, transposed=True)
    last = ResidualUnit(out_channels, out_channels, last_norm=not top)
    return nn.Sequential(down, Skip(inner), nn.Sequential(up, last))


def unet3d(
    in_channels: int, out_channels: int, channels: Sequence[int] = (16, 32, 64, 128, 256), residual_units: int = 2
) -> UNet3d:
    """Return a 3-D U-Net with batch normalization and PReLU; each level after the first halves every axis.

    Args:
        in_channels: C of the image [B, C, X, Y, Z].
        out_channels: classes K of the logits [B, K, X, Y, Z], background included.
        channels: width of each level; input sides must be multiples of 2 ** (len(channels) - 1).
        residual_units: convolutions in each residual block, at least 1.

    Source: Kerfoot et al., "Left-ventricle quantification using residual U-Net", STACOM 2018; widths of the MONAI fast
    training tutorial.
    """
    return UNet3d(in_channels, out_channels, channels, residual_units)
