"""Normalisation and activation in one module: group norm with ReLU, batch norm with PReLU and a sum.

Each has a twin in plain torch, and a fused variant for tensors on a GPU with the channels innermost: two passes over
memory forward, two backward.
"""

import copy
import math
from collections.abc import Sequence
from functools import cache, partialmethod
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medspeed.common.kernels.trust import Trial, trusts

Kind = Literal["relu", "prelu", "sum_relu", "none"]
GROUP, BATCH, RELU = "group_norm_relu", "batch_norm_prelu", "batch_norm_relu"
_SHAPE = (128, 96, 96, 96)  # of a trial: channels of all samples, and sides; large, so that not the host decides
_USUAL: tuple[Any, ...] = ("relu", None, None, None, (), None, 0.0)  # of what `fused_norm` may be given
_MOST_SUMMED, _PIECE = 2**15, 1024  # voxels: on a CPU torch sums no more one by one; those of a piece beyond
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


def norm_trial(
    module: Any,  # noqa: ANN401 - one with channels of its own, too
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    differentiable: bool = True,
) -> Trial:
    """Return the trial of a module on large images of a dtype, as those between a network's layers."""
    flat, (total, *sides) = name == RELU or isinstance(module, nn.Conv2d), _SHAPE
    product = isinstance(module, nn.Conv2d | nn.Conv3d | nn.ConvTranspose3d)
    channels = module.in_channels if product else next(each.numel() for each in module.parameters())
    batch = min(16, max(2, total // max(channels, module.out_channels if product else 0)))
    shape = (batch * sides[0], channels, *sides[1:]) if flat else (batch, channels, *sides)

    def drawn(shape: Sequence[int], factor: float, least: float) -> Tensor:
        # In disorder without a generator, as the run's own numbers stay as they are.
        places = torch.arange(math.prod(shape), dtype=torch.int32, device=device).remainder(9973).view(*shape)
        layout: Any = {"memory_format": torch.channels_last_3d if len(shape) == 5 else torch.channels_last}
        return places.mul(factor).sin().add(least).to(dtype, **layout)

    @cache
    def given() -> tuple[Any, Tensor, list[Tensor]]:
        return copy.deepcopy(module).to(device).train(), drawn(shape, 12.9898, 0).requires_grad_(differentiable), []

    def work() -> list[Tensor]:
        twin, image, gradients = given()
        for each in (image, *twin.parameters()):
            each.grad = None
        statistics = [each.zero_() for each in twin.buffers() if each.is_floating_point()]
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            # With all that training gives or takes: the image serves as residual, weights as its bias and the shift.
            more = (twin.N.weight, image, twin.N.weight.to(dtype)) if name == BATCH else ()
            found: Tensor = torch.add(*twin.beside(image)) if name == GROUP else twin(image, *more)
        if not gradients:  # of one sign, so that their sums are no differences of large numbers
            gradients.append(drawn(found.shape, 78.233, 1) / 4096)  # float16 holds them, too
        found.backward(gradients[0].to(found.dtype))  # type: ignore[no-untyped-call]
        kept = [torch.cat(statistics)] if statistics else []  # together, as means may be next to 0
        return [found.detach(), *kept] + [each.grad for each in (image, *twin.parameters()) if each.grad is not None]

    tolerance = max(_TOLERANCE[dtype], _TOLERANCE[torch.float16] * product)  # products may be of TensorFloat-32
    about = f"{list(shape)} {dtype}, {[list(each.shape) for each in module.parameters()]}".replace("torch.", "")
    return Trial(name, work, tolerance, about, given.cache_clear)


class GroupNormReLU(nn.GroupNorm):
    """Group normalisation, then ReLU; the state is `nn.GroupNorm`'s."""

    kernel_trial = partialmethod(norm_trial, GROUP)

    def forward(self, image: Tensor) -> Tensor:
        """Return what has the shape and dtype of the image [B, C, *sides]; sums are taken in float32."""
        return self.beside(image)[0]

    def beside(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `forward` does, and the image for a shortcut around what follows: its gradients meet here."""
        if trusts(GROUP, image) and channels_innermost(image):
            return fused_norm(image, self.weight, self.bias, self.num_groups, len(image), self.eps)
        if image.is_cpu and _sums_long(image) and not torch.compiler.is_compiling():
            apply: Any = _GroupNormInPieces.apply
            return F.relu(apply(image, self.weight, self.bias, self.num_groups, self.eps), inplace=True), image
        if not (image.is_cuda and torch.is_autocast_enabled("cuda")):
            return F.relu(super().forward(image), inplace=True), image
        with torch.autocast("cuda", enabled=False):  # which would take float32, and all that follows with it
            weight, bias = self.weight.to(image.dtype), self.bias.to(image.dtype)
            return F.relu(F.group_norm(image, self.num_groups, weight, bias, self.eps), inplace=True), image


def _sums_long(image: Tensor) -> bool:
    inside = image.ndim == 5 and image.is_contiguous(memory_format=torch.channels_last_3d) and not image.is_contiguous()
    return inside and math.prod(image.shape[2:]) > _MOST_SUMMED


class _GroupNormInPieces(torch.autograd.Function):
    """Group normalisation of large images, channels innermost, on a CPU.

    There torch adds up all values of a group, and their squares, one by one in float32, which at 160 x 160 x 128 voxels
    may be off by more than the variance. Here it does so in pieces, whose means and variances are put together. The
    sums of the backward pass are torch's: an error of a percent matters less there.
    """

    @staticmethod
    def forward(ctx: Any, image: Tensor, weight: Tensor, bias: Tensor, groups: int, epsilon: float) -> Tensor:  # noqa: ANN401
        batch, channels, *sides = image.shape
        size = math.gcd(math.prod(sides), _PIECE)
        pieces = image.movedim(1, -1).reshape(-1, 1, size, channels).movedim(-1, 1)
        given = weight, bias, len(pieces), channels, size, groups, epsilon
        parts = [each.view(batch, -1, groups) for each in torch.native_group_norm(pieces, *given)[1:]]
        mean, within, between = parts[0].mean(1), parts[1].pow(-2).sub(epsilon).mean(1), parts[0].var(1, correction=0)
        found, figures = torch.empty_like(image), torch.stack([mean, within + between], dim=1)
        normalise: Any = torch.native_batch_norm  # whose types do not know of "out"
        for one, place, of_one in zip(torch.split(image, 1), torch.split(found, 1), figures, strict=True):
            each = weight, bias, *of_one.repeat_interleave(channels // groups, dim=1)
            normalise(one, *each, False, 0.0, epsilon, out=(place, mean.new_empty(0), mean.new_empty(0)))
        ctx.save_for_backward(image, mean, (figures[:, 1] + epsilon).rsqrt(), weight)
        ctx.sizes = batch, channels, math.prod(sides), groups
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ANN401
        gradient = gradient.contiguous(memory_format=torch.channels_last_3d)
        found = torch.ops.aten.native_group_norm_backward(gradient, *ctx.saved_tensors, *ctx.sizes, [True] * 3)
        return (*found, None, None)


class BatchNormPReLU(nn.Module):
    """Batch normalisation N of so many channels, then PReLU A."""

    kernel_trial = partialmethod(norm_trial, BATCH)

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.N = nn.BatchNorm3d(channels)
        self.A = nn.PReLU()

    def forward(
        self,
        image: Tensor,
        shift: Tensor | None = None,
        residual: Tensor | None = None,
        residual_bias: Tensor | None = None,
    ) -> Tensor:
        """Return what has the shape of the image [B, C, X, Y, Z].

        In training the `shift` [C] is what the image lacks of each channel (normalisation takes it out anyway; the
        running mean must have it). A residual, as the image, and its bias [C] are added at the end.
        """
        fused = _fused_batch_norm(self.N, image, "prelu", self.A.weight, residual, residual_bias, shift)
        if fused is not None:
            return fused
        if shift is not None:  # before its update, which keeps 1 - momentum of it; past autograd, as the update itself
            momentum, mean = self.N.momentum or 0.0, self.N.running_mean
            assert mean is not None
            mean.data.add_(shift.detach(), alpha=momentum / (1 - momentum))
        activated: Tensor = self.A(self.N(image))
        if residual_bias is not None:
            activated = activated + residual_bias.view(-1, 1, 1, 1)
        return activated if residual is None else activated + residual


def batch_norm_relu(norm: nn.BatchNorm2d, image: Tensor, residual: Tensor | None = None, relu: bool = True) -> Tensor:
    """Return an image [B, C, Y, X] normalised, a residual of its shape added, then, unless it is off, ReLU."""
    kind: Kind = ("relu" if residual is None else "sum_relu") if relu else "none"
    fused = _fused_batch_norm(norm, image, kind, None, residual)
    if fused is not None:
        return fused
    x: Tensor = norm(image)
    if residual is not None:
        x += residual
    return F.relu(x, inplace=True) if relu else x


def _fused_batch_norm(norm: Any, image: Tensor, kind: Kind, *given: Tensor | None) -> Tensor | None:  # noqa: ANN401
    """Return `fused_norm` of a module in training, if it is trusted; given are slope, residual, its bias and shift."""
    trusted = norm.training and trusts(BATCH if kind == "prelu" else RELU, image) and channels_innermost(image)
    if not trusted or image.numel() == norm.num_features:  # one value a channel: torch refuses
        return None
    *others, shift = (*given, None, None, None)[:4]
    running = [norm.running_mean, norm.running_var, norm.num_batches_tracked], shift, norm.momentum or 0.0
    return fused_norm(image, norm.weight, norm.bias, norm.num_features, 1, norm.eps, kind, *others, *running)[0]


def channels_innermost(image: Tensor) -> bool:
    """Return whether a tensor [B, C, *sides] lies as rows of channels, which may be parts of longer ones."""
    rows = image.movedim(1, -1)
    steps, sides = rows.stride()[-2::-1], rows.shape[-2:0:-1]
    even = all(outer == step * side for step, outer, side in zip(steps, steps[1:], sides, strict=False))
    return rows.is_contiguous() or (rows.stride(-1) == 1 and steps[0] > rows.shape[-1] and even)


def fused_norm(image: Tensor, weight: Tensor, bias: Tensor, *plan: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    """Return the image normalised, activated, and the residual added; and the image itself. Both have gradients.

    Args:
        image: [B, C, *sides], channels innermost.
        weight: [C].
        bias: [C].
        plan: in this order, groups of channels, C for batch normalisation; samples that are normalised each by itself,
            B, or 1 for batch normalisation; epsilon, added to variances. Then, if wanted, the `Kind` of the activation
            ("sum_relu" is that of the sum with the residual); slope [1] of PReLU; a residual as the image, anyhow in
            memory; bias [C] added to it; running mean [C], variance [C] and number of batches [] int64, which are
            updated; shift [C] added to the mean there; its momentum.
    """
    from medspeed.common.kernels.norm_operators import FusedNorm

    apply: Any = FusedNorm.apply
    groups, samples, epsilon, *wanted = plan
    kind, slope, residual, residual_bias, running, shift, momentum = (*wanted, *_USUAL[len(wanted) :])
    given = (groups, samples, epsilon, kind, list(running), shift, momentum)
    found: tuple[Tensor, Tensor] = apply(image, weight, bias, slope, residual, residual_bias, given)
    return found


def fork(image: Tensor) -> tuple[Tensor, Tensor]:
    """Return an image for each of two uses; a fused norm that it comes from adds up their gradients in its kernels."""
    node: Any = None if torch.compiler.is_compiling() else image.grad_fn
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        norm = getattr(node, "norm", None if image.output_nr else node)  # through another fork
        if type(norm).__name__ == "FusedNormBackward":
            apply: Any = _Fork.apply
            return tuple(apply(image, norm))
    return image, image


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, image: Tensor, norm: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        ctx.norm = norm
        ctx.set_materialize_grads(False)
        return image.view_as(image), image.view_as(image)

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> tuple[Tensor | None, None]:  # noqa: ANN401
        if first is None or second is None:
            return second if first is None else first, None
        ctx.norm.more = [*getattr(ctx.norm, "more", ()), second]
        return first, None


class InBlock(nn.Module):
    """Batch norms and ReLU as in a residual block; its sum is kept from 0, where rounding alone would decide."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, image: Tensor) -> Tensor:
        """Return what has the shape of the image [B, C, Y, X]."""
        x, beside = fork(batch_norm_relu(self.norm, image))
        residual = batch_norm_relu(self.norm, beside, relu=False) + 3 * image.detach().sign()
        return batch_norm_relu(self.norm, x, residual)
