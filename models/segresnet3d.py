"""The 3-D residual encoder-decoder of the MONAI BraTS recipes."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from medspeed.common.kernels.doubling import Doubling
from medspeed.common.kernels.folding import Conv3d
from medspeed.common.kernels.norms import GroupNormReLU
from medspeed.common.kernels.weights import half_weights

_GROUPS = 8


def _convolution(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, bias: bool = False) -> nn.Sequential:
    """Return a convolution, named "conv" as MONAI's are, that keeps the sides, or halves them with stride 2."""
    return nn.Sequential(OrderedDict(conv=Conv3d(inputs, outputs, kernel, stride, kernel // 2, bias=bias)))


class ResidualBlock(nn.Module):
    """Two blocks of group normalization, ReLU and convolution, with a residual shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1 = GroupNormReLU(_GROUPS, channels)
        self.norm2 = GroupNormReLU(_GROUPS, channels)
        self.conv1 = _convolution(channels, channels)
        self.conv2 = _convolution(channels, channels)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the input's shape [B, C, X, Y, Z]."""
        x: torch.Tensor
        x, shortcut = self.norm1.beside(image)
        x = self.conv2(self.norm2(self.conv1(x)))
        return x + shortcut  # not in place: x may be a view, whose gradient autograd would copy


class SegResNet3d(nn.Module):
    """See `segresnet3d`. Names, shapes and initial values of its weights are those of MONAI's `SegResNet`."""

    def __init__(
        self, in_channels: int, out_channels: int, filters: int, blocks_down: Sequence[int], dropout: float
    ) -> None:
        super().__init__()
        self.monai: dict[str, Any] = {  # how a bundle names it
            "_target_": "SegResNet", "spatial_dims": 3, "init_filters": filters, "in_channels": in_channels,
            "out_channels": out_channels, "dropout_prob": dropout or None, "blocks_down": [*blocks_down],
            "blocks_up": [1] * (len(blocks_down) - 1),
        }  # fmt: skip
        self.convInit = _convolution(in_channels, filters)
        self.down_layers, self.up_layers, self.up_samples = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for level, blocks in enumerate(blocks_down):
            width = filters * 2**level
            halving = _convolution(width // 2, width, stride=2) if level else nn.Identity()
            self.down_layers.append(nn.Sequential(halving, *(ResidualBlock(width) for _ in range(blocks))))
        for level in reversed(range(len(blocks_down) - 1)):
            width = filters * 2**level
            self.up_layers.append(nn.Sequential(ResidualBlock(width)))
            self.up_samples.append(nn.Sequential(_convolution(2 * width, width, kernel=1)))
        last = _convolution(filters, out_channels, kernel=1, bias=True)
        norm = GroupNormReLU(_GROUPS, filters)
        self.conv_final = nn.Sequential(norm, nn.Identity(), last)  # MONAI has its ReLU in the middle
        self.dropout = nn.Dropout3d(dropout)
        self.doubling = Doubling(filters)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return logits [B, K, X, Y, Z] of [B, C, X, Y, Z]."""
        with half_weights(self):
            x: torch.Tensor = self.dropout(self.convInit(image))
            levels = []
            for down in self.down_layers:
                x = down(x)
                levels.append(x)
            for sample, up, shortcut in zip(self.up_samples, self.up_layers, levels[-2::-1], strict=True):
                x = up(self.doubling(sample(x), shortcut))
            return self.conv_final(x)  # type: ignore[no-any-return]


def segresnet3d(
    in_channels: int,
    out_channels: int,
    filters: int = 16,
    blocks_down: Sequence[int] = (1, 2, 2, 4),
    dropout: float = 0.0,
) -> SegResNet3d:
    """Return a SegResNet with group normalization and trilinear upsampling; each level but the first halves all axes.

    Args:
        in_channels: C of the image [B, C, X, Y, Z], one per MRI sequence.
        out_channels: K of the logits [B, K, X, Y, Z].
        filters: width of the first level, a multiple of 8 (the groups); each further level has twice as many.
        blocks_down: residual blocks of each level; input sides must be multiples of 2 ** (len(blocks_down) - 1).
        dropout: probability before the first block; 0 for none.

    Source: Myronenko, "3D MRI brain tumor segmentation using autoencoder regularization", BrainLes 2018; figures of the
    MONAI BraTS tutorials (distributed_training/brats_training_ddp.py).
    """
    return SegResNet3d(in_channels, out_channels, filters, blocks_down, dropout)
