"""Normalisation and activation in one module: group norm with ReLU, batch norm with PReLU and a sum.

Each has a twin in plain torch, which is the reference and the CPU's path, and a fused variant for tensors on a GPU with
the channels innermost: two passes over memory forward, two backward. One operator of torch is one kernel
(`norm_operators`), so that what is counted is what is launched.
"""

import copy
import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medspeed.common.kernels.norm_operators import norm_apply, norm_gradient, norm_gradient_sums, norm_sums
from medspeed.common.kernels.trust import Trial, trusting, trusts

GROUP, BATCH = "group_norm_relu", "batch_norm_prelu"
_SHAPE = (2, 96, 96, 96)  # of a trial: batch and sides
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


class GroupNormReLU(nn.GroupNorm):
    """Group normalisation, then ReLU; the state is `nn.GroupNorm`'s."""

    def forward(self, image: Tensor) -> Tensor:
        """Return what has the shape and dtype of the image [B, C, *sides]; sums are taken in float32."""
        return self.beside(image)[0]

    def beside(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `forward` does, and the image for a shortcut around what follows: its gradients meet here."""
        if trusts(GROUP, image) and channels_innermost(image):
            return fused_norm(image, self.weight, self.bias, self.num_groups, len(image), self.eps)
        return self._twin(image), image

    def _twin(self, image: Tensor) -> Tensor:
        weight: Tensor = self.weight
        bias: Tensor = self.bias
        if not (image.is_cuda and torch.is_autocast_enabled("cuda")):
            return F.relu(F.group_norm(image, self.num_groups, weight, bias, self.eps), inplace=True)
        with torch.autocast("cuda", enabled=False):  # which would take float32, and all that follows with it
            weight, bias = weight.to(image.dtype), bias.to(image.dtype)
            return F.relu(F.group_norm(image, self.num_groups, weight, bias, self.eps), inplace=True)


class BatchNormPReLU(nn.Module):
    """Batch normalisation N, then PReLU A.

    Args:
        channels: of the image.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.N = nn.BatchNorm3d(channels)
        self.A = nn.PReLU()

    def forward(self, image: Tensor, shift: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """Return what has the shape of the image.

        Args:
            image: [B, C, X, Y, Z].
            shift: [C], in training only: what the image lacks of each channel. Normalisation takes it out anyway; the
                running mean must have it.
            residual: is added at the end; as the image.
        """
        norm, momentum = self.N, self.N.momentum or 0.0
        mean, variance, batches = norm.running_mean, norm.running_var, norm.num_batches_tracked
        assert mean is not None
        assert variance is not None
        assert batches is not None
        if self.training and trusts(BATCH, image) and channels_innermost(image):
            running = [mean, variance, batches]
            given = (
                norm.weight,
                norm.bias,
                image.shape[1],
                1,
                norm.eps,
                self.A.weight,
                residual,
                running,
                shift,
                momentum,
            )
            return fused_norm(image, *given)[0]
        if shift is not None:  # before its update, which keeps 1 - momentum of it; past autograd, as the update itself
            mean.data.add_(shift.detach(), alpha=momentum / (1 - momentum))
        activated: Tensor = self.A(norm(image))
        return activated if residual is None else activated + residual


def channels_innermost(image: Tensor) -> bool:
    """Return whether a tensor [B, C, *sides] lies as rows of channels."""
    return image.movedim(1, -1).is_contiguous()


def fused_norm(
    image: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    samples: int,
    epsilon: float,
    slope: Tensor | None = None,
    residual: Tensor | None = None,
    running: Sequence[Tensor] = (),
    shift: Tensor | None = None,
    momentum: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the image normalised, activated, and the residual added; and the image itself. Both have gradients.

    Args:
        image: [B, C, *sides], channels innermost.
        weight: [C].
        bias: [C].
        groups: of channels; C for batch normalisation.
        samples: that are normalised each by itself: B, or 1 for batch normalisation.
        epsilon: added to variances.
        slope: [1] of PReLU; None for ReLU.
        residual: as the image.
        running: mean [C], variance [C] and number of batches [] int64, which are updated.
        shift: [C], added to the mean there.
        momentum: of that update.
    """
    apply: Any = _Norm.apply
    given = (groups, samples, epsilon, list(running), shift, momentum)
    found: tuple[Tensor, Tensor] = apply(image, weight, bias, slope, residual, given)
    return found


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, image: Tensor, *given: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        weight, bias, slope, residual, (groups, samples, epsilon, running, shift, momentum) = given
        added = None if residual is None else _like(residual, image)
        tensors = image, norm_sums(image, groups, samples), weight, bias, slope, added, running, shift
        y, statistics = norm_apply(*tensors, groups, samples, epsilon, momentum)
        ctx.save_for_backward(image, statistics, weight, bias, slope)
        ctx.set_materialize_grads(False)
        ctx.groups, ctx.samples, ctx.residual = groups, samples, None if residual is None else residual.dtype
        return y, image

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, beside: Tensor | None) -> Any:  # noqa: ANN401
        image, statistics, weight, bias, slope = ctx.saved_tensors
        laid, beside = _like(gradient, image), None if beside is None else _like(beside, image)
        given = image, statistics, weight, bias, slope
        sums = norm_gradient_sums(laid, *given, ctx.groups, ctx.samples)
        dx, dweight, dbias, dslope = norm_gradient(laid, *given, sums, beside, ctx.groups, ctx.samples)
        returned = None if ctx.residual is None else gradient.to(ctx.residual)
        return dx, dweight, dbias, None if slope is None else dslope, returned, None


def _like(tensor: Tensor, image: Tensor) -> Tensor:
    """Return a tensor with its channels where the image has them."""
    if channels_innermost(tensor):
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last_3d if image.dim() == 5 else torch.channels_last)


def trials(network: nn.Module, dtype: torch.dtype, device: torch.device) -> list[Trial]:
    """Return a trial of each of the two that a network has; of each kind the first, whose volumes are the largest.

    Args:
        network: or one such module.
        dtype: of the convolutions' outputs.
        device: to try it on.
    """
    found = []
    for kind, name in ((GroupNormReLU, GROUP), (BatchNormPReLU, BATCH)):
        first = next((module for module in network.modules() if isinstance(module, kind)), None)
        if first is not None:
            channels = first.num_channels if isinstance(first, GroupNormReLU) else first.N.num_features
            found.append(_trial(name, first, (_SHAPE[0], channels, *_SHAPE[1:]), dtype, device))
    return found


def _trial(name: str, module: nn.Module, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Trial:
    @cache
    def given() -> tuple[nn.Module, Tensor, Tensor]:
        twin = copy.deepcopy(module).to(device).train()
        # In disorder without a generator, as the run's own numbers stay as they are; the gradients of one sign, so that
        # their sums are no differences of large numbers.
        places = torch.arange(math.prod(shape), device=device).remainder(9973).view(*shape)
        layout: Any = {"memory_format": torch.channels_last_3d}
        image = places.mul(12.9898).sin().to(dtype, **layout)
        gradient = places.mul(78.233).sin().add(1).to(dtype, **layout)
        return twin, image.requires_grad_(), gradient

    def work(*trusted: str) -> list[Tensor]:
        twin, image, gradient = given()
        for each in (image, *twin.parameters()):
            each.grad = None
        with trusting(*trusted), torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            found: Tensor = twin(image)
        found.backward(gradient)  # type: ignore[no-untyped-call]
        return [found.detach()] + [each.grad for each in (image, *twin.parameters()) if each.grad is not None]

    about = f"{list(shape)} {dtype}".replace("torch.", "")
    return Trial(name, partial(work, name), work, _TOLERANCE[dtype], about)
