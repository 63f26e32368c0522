"""Convolutions of few channels: neighbouring voxels of a row are taken as channels, of which cuDNN's kernels need many.

With channels innermost that moves nothing: rows of 2 channels and 96 voxels are rows of 32 channels and 6 voxels. The
weights are laid out anew, with zeros where a voxel does not reach; the products left are the same.
"""

from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medspeed.common.kernels.norms import channels_innermost, norm_trial
from medspeed.common.kernels.trust import Trial, trusts

FOLDED = "folded_convolutions"  # all of them; each kind has a name of its own, too
_INPUTS, _OUTPUTS = 64, 256  # channels at most, folded; measured on an H200 with 1 to 32 channels


def fold(image: Tensor, count: int) -> Tensor:
    """Return an image [B, C, *sides] with `count` voxels of its last axis as channels [B, count C, *sides]: a view."""
    rows = image.movedim(1, -1)
    return rows.reshape(*rows.shape[:-2], -1, count * rows.shape[-1]).movedim(-1, 1)


def unfold(image: Tensor, count: int) -> Tensor:
    """Return what `fold` took."""
    rows = image.movedim(1, -1)
    return rows.reshape(*rows.shape[:-2], -1, rows.shape[-1] // count).movedim(-1, 1)


class _Folding:
    """A convolution whose input is folded, or whose output, if it is transposed; weight [O, C, *kernel] or [C, O, ...].

    Stride and padding are the same along all axes, the padding half of the kernel. State and names are torch's.
    """

    _plain: Any

    def __init__(self: Any, *given: Any, **named: Any) -> None:  # noqa: ANN401 - torch's
        super().__init__(*given, **named)
        (wide, narrow), kernel, step = self.weight.shape[:2], self.kernel_size[-1], self.stride[-1]
        most = 2 * _INPUTS if kernel == 1 else _INPUTS  # no zeros come in where a voxel sees itself alone
        counts = [each for each in (2, 4, 8, 16) if each * narrow <= most and each * wide <= _OUTPUTS * step]
        self.count, self.reach = count, reach = max(counts, default=1), -(-(kernel // 2) // max(counts, default=1))
        table = torch.zeros(max(1, count // step), 2 * reach + 1, count, kernel)
        for place, tap in product(range(len(table)), range(kernel)):
            block, voxel = divmod(step * place + tap - kernel // 2, count)
            table[place, block + reach, voxel, tap] = 1
        made = table.flatten(0, 2).bool()  # of voxels made, blocks and voxels; taps
        self.register_buffer("table", made, persistent=False)
        name = f"{'transposed ' * self.transposed}convolution {self.in_channels} to {self.out_channels}"
        self.kind = f"{name}, {kernel} wide, stride {step}, folded"

    def kernel_trial(self: Any, dtype: torch.dtype, device: torch.device, first: bool = False) -> Trial:
        """Return the trial of this kind; the image of a network's first convolution has no gradient."""
        return norm_trial(self, self.kind, dtype, device, not first)

    def forward(self: Any, image: Tensor) -> Tensor:
        """Return [B, O, *sides] of [B, C, *sides]."""
        return self.convolve(image, self.bias)  # type: ignore[no-any-return]

    def convolve(self: Any, image: Tensor, bias: Tensor | None) -> Tensor:
        """Do so with another bias [O]."""
        given, made = self.count, self.count // self.stride[-1]
        if self.transposed:
            given, made = made, given
        trusted = self.count > 1 and (trusts(FOLDED, image) or trusts(self.kind, image))
        if not trusted or image.shape[-1] % given or not channels_innermost(image):
            last = (self.output_padding,) if self.transposed else (self.dilation, self.groups)  # as torch's modules do
            return self._plain(image, self.weight, bias, self.stride, self.padding, *last)  # type: ignore[no-any-return]
        weight = self.table.to(self.weight.dtype) @ self.weight.movedim(1, -1)
        weight = weight.unflatten(-2, (-1, 2 * self.reach + 1, self.count)).movedim(-4, 0).flatten(0, 1).flatten(-2)
        bias = None if bias is None else bias.repeat(made)
        more = ((*self.output_padding[:-1], 0),) if self.transposed else ()
        stride, padding = (*self.stride[:-1], 1), (*self.padding[:-1], self.reach)
        return unfold(self._plain(fold(image, given), weight.movedim(-1, 1), bias, stride, padding, *more), made)


class Conv2d(_Folding, nn.Conv2d):
    """A 2-D convolution, folded where that is trusted."""

    _plain = staticmethod(F.conv2d)


class Conv3d(_Folding, nn.Conv3d):
    """A 3-D convolution, folded where that is trusted."""

    _plain = staticmethod(F.conv3d)


class ConvTranspose3d(_Folding, nn.ConvTranspose3d):  # type: ignore[misc]
    """A transposed 3-D convolution, folded where that is trusted."""

    _plain = staticmethod(F.conv_transpose3d)
