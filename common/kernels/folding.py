"""Convolutions of few channels: neighbouring voxels of a row are taken as channels, of which cuDNN's kernels need many.

With channels innermost that moves nothing: rows of 2 channels and 96 voxels are rows of 32 channels and 6 voxels. The
weights are laid out anew, with zeros where a voxel does not reach; the products left are the same.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medspeed.common.kernels.norms import channels_innermost, norm_trial
from medspeed.common.kernels.trust import Trial, trusts

FOLDED = "folded_convolutions"  # all of them; each kind has a name of its own, too
_COUNTS = 2, 4, 8, 16  # of voxels
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
    laid: Tensor | None = None  # what `lay_out` made of the weight, during a step

    def __init__(self: Any, *given: Any, **named: Any) -> None:  # noqa: ANN401 - torch's
        super().__init__(*given, **named)
        (wide, narrow), kernel, step = self.weight.shape[:2], self.kernel_size[-1], self.stride[-1]
        most = 2 * _INPUTS if kernel == 1 else _INPUTS  # no zeros come in where a voxel sees itself alone
        counts = [each for each in _COUNTS if each * narrow <= most and each * wide <= _OUTPUTS * step]
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
        if not self.folds(image) or image.shape[-1] % given or not channels_innermost(image):
            last = (self.output_padding,) if self.transposed else (self.dilation, self.groups)  # as torch's modules do
            return self._plain(image, self.weight, bias, self.stride, self.padding, *last)  # type: ignore[no-any-return]
        weight = self.lay(self.weight) if self.laid is None else self.laid
        bias = None if bias is None else bias.repeat(made)
        more = ((*self.output_padding[:-1], 0),) if self.transposed else ()
        stride, padding = (*self.stride[:-1], 1), (*self.padding[:-1], self.reach)
        return unfold(self._plain(fold(image, given), weight, bias, stride, padding, *more), made)

    def folds(self: Any, tensor: Tensor) -> bool:
        """Return whether images on a tensor's device are folded, if their sides and layout allow it."""
        return self.count > 1 and (trusts(FOLDED, tensor) or trusts(self.kind, tensor))

    def lay(self: Any, weight: Tensor) -> Tensor:
        """Return a weight like this one's, with any first axis, for folded images; channels lie innermost."""
        laid = self.table.to(weight.dtype) @ weight.movedim(1, -1)
        laid = laid.unflatten(-2, (-1, 2 * self.reach + 1, self.count)).movedim(-4, 0).flatten(0, 1).flatten(-2)
        return laid.movedim(-1, 1)  # type: ignore[no-any-return]


class Conv2d(_Folding, nn.Conv2d):
    """A 2-D convolution, folded where that is trusted."""

    _plain = staticmethod(F.conv2d)


class Conv3d(_Folding, nn.Conv3d):
    """A 3-D convolution, folded where that is trusted."""

    _plain = staticmethod(F.conv3d)


class ConvTranspose3d(_Folding, nn.ConvTranspose3d):  # type: ignore[misc]
    """A transposed 3-D convolution, folded where that is trusted."""

    _plain = staticmethod(F.conv_transpose3d)


def lay_out(weights: Mapping[str, tuple[nn.Module, Tensor]]) -> dict[str, Tensor]:
    """Return what convolutions that fold take as `laid` during a step, by name: all their weights laid out at once.

    Given are the weights [O, C, *kernel], or [C, O, ...], that layers of any kind have by then.
    """
    folding: dict[str, Any] = {name: layer for name, (layer, _) in weights.items() if isinstance(layer, _Folding)}
    folded = {name: weights[name][1] for name, layer in folding.items() if layer.folds(weights[name][1])}
    if not folded:
        return {}
    known = vars(folding[next(iter(folded))]).setdefault("places", {})  # of a network, as long as that lives
    key = tuple((name, each.shape, each.dtype, each.device) for name, each in folded.items())
    if key not in known:
        known[key] = _places([folding[name] for name in folded], [*folded.values()])
    apply: Any = _LayOut.apply
    return dict(zip(folded, apply(known[key], *folded.values()), strict=True))


class _Places(NamedTuple):
    shapes: list[torch.Size]  # of the weights laid out, channels last
    zero: Tensor  # that lies before all others
    sources: Tensor  # int32 [elements laid out]: where each comes from, among all weights behind the zero
    targets: Tensor  # int32 [elements of the weights x 16]: where each goes to, among all laid out behind the zero


def _places(layers: Sequence[Any], weights: Sequence[Tensor]) -> _Places:
    made, sources, targets, first, behind = [], [], [], 1, 1
    for layer, (wide, narrow, *kernel) in zip(layers, (each.shape for each in weights), strict=True):
        count, uses = wide * narrow * math.prod(kernel), layer.count // layer.stride[-1]
        numbers = torch.arange(first, first + count, dtype=torch.float64, device=weights[0].device)
        laid = layer.lay(numbers.view(wide, *kernel, narrow).movedim(-1, 1)).movedim(1, -1)
        made.append(laid.shape)
        sources.append(laid.flatten().int())
        used = sources[-1].argsort(stable=True)[-uses * count :].view(-1, uses)  # the others come from no weight
        targets.append(F.pad(used.int() + behind, (0, max(_COUNTS) - uses)))
        first, behind = first + count, behind + laid.numel()
    return _Places(made, weights[0].new_zeros(1), torch.cat(sources), torch.cat(targets).flatten())


class _LayOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, places: _Places, *weights: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401
        ctx.places, ctx.shapes = places, [each.movedim(1, -1).shape for each in weights]
        return _apart(_behind(places.zero, weights).index_select(0, places.sources), places.shapes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: ANN401
        used = _behind(ctx.places.zero, gradients).index_select(0, ctx.places.targets)
        return None, *_apart(used.view(-1, max(_COUNTS)).sum(1), ctx.shapes)


def _behind(zero: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([zero, *(each.movedim(1, -1).flatten() for each in tensors)])


def _apart(flat: Tensor, shapes: Sequence[torch.Size]) -> tuple[Tensor, ...]:
    parts = torch.split(flat, [math.prod(shape) for shape in shapes])
    return tuple(part.view(shape).movedim(-1, 1) for part, shape in zip(parts, shapes, strict=True))
