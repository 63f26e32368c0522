"""Sums over voxels that Dice, cross-entropy and focal losses are made of, their gradient, and the loss of them.

Each reads logits and labels once and stores nothing of a voxel but the gradient. Parts are summed in an order of their
own, without atomic operations, so that a run repeats to the bit. Triton is imported when one is launched.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_ELEMENTS = 512  # logits that a program works on at a time
_STEPS = 32  # times that a program of the sums does so


class LossSums(torch.autograd.Function):
    """Sums over the voxels of each sample, [4, B, K] float32, or of the batch as one, [4, 1, K]; K classes or regions.

    They are penalty, missed, squared and voxels as `common.training.losses` has them. For arguments see `loss_parts`;
    `fits` says which logits it takes.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, label: Tensor, members: Sequence[int], batch: bool) -> Tensor:  # noqa: ANN401
        """Keep what the gradient is computed from: the logits and the label."""
        ctx.save_for_backward(logits, label)
        ctx.members = members
        parts: Tensor = loss_parts(logits, label, members)
        return parts.sum((1, 2) if batch else 2).view(4, -1, logits.shape[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401
        """Return the gradient of the logits."""
        logits, label = ctx.saved_tensors
        return loss_gradient(logits, label, weights.contiguous(), ctx.members), None, None, None


class LossOfSums(torch.autograd.Function):
    """The mean Dice loss of classes (and of samples), plus `share` of the sum of the penalties, from sums [4, N, K]."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, share: float, smooth: float) -> Tensor:  # noqa: ANN401
        """Compute the derivative as well."""
        loss: Tensor
        loss, slopes = loss_of_sums(sums.contiguous(), share, smooth)
        ctx.save_for_backward(slopes)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, weight: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        """Return the gradient of the sums."""
        return ctx.saved_tensors[0] * weight, None, None


def fits(logits: Tensor, label: Tensor) -> bool:
    """Return whether the kernels take logits [B, K, X, Y, Z] and a label: half or single precision, in one piece."""
    dense = logits.is_contiguous() or logits.is_contiguous(memory_format=torch.channels_last_3d)
    single = logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return dense and single and label.is_contiguous() and logits[0].numel() < 2**31


@torch.library.custom_op("medspeed::loss_parts", mutates_args=())
def loss_parts(logits: Tensor, label: Tensor, members: Sequence[int]) -> Tensor:
    """Return sums over parts of the voxels, [4, B, P, K] float32: penalty, missed, squared, voxels.

    Args:
        logits: [B, K, X, Y, Z] float32, bfloat16 or float16, contiguous or channels last.
        label: [B, 1, X, Y, Z] uint8 class numbers, contiguous.
        members: none for K classes that exclude each other, with cross entropy; else of regions, with focal loss: 256 r
            + n for each class number n of region r.
    """
    from medspeed.common.kernels.dice_triton import sums_kernel

    parts: Tensor = _parts_like(logits, label, members)
    wide, block = _tile(logits)
    tail = (tuple(members), wide, block, _STEPS)
    sums_kernel[parts.shape[2], len(logits)](logits, label, parts, *_sizes(logits), parts.stride(0), *tail)
    return parts


@loss_parts.register_fake
def _parts_like(logits: Tensor, label: Tensor, members: Sequence[int]) -> Tensor:
    samples, classes = logits.shape[:2]
    programs = -(-label[0].numel() // (_tile(logits)[1] * _STEPS))
    return torch.empty(4, samples, programs, classes, device=logits.device)


@torch.library.custom_op("medspeed::loss_gradient", mutates_args=())
def loss_gradient(logits: Tensor, label: Tensor, weights: Tensor, members: Sequence[int]) -> Tensor:
    """Return the gradient of the logits, of their dtype and layout, from that of the sums, [4, B or 1, K] float32."""
    from medspeed.common.kernels.dice_triton import gradient_kernel

    gradient = torch.empty_like(logits)
    wide, block = _tile(logits)
    step = weights.stride(1) if weights.shape[1] > 1 else 0
    grid = -(-label[0].numel() // block), len(logits)
    tail = (weights.stride(0), step, tuple(members), wide, block)
    gradient_kernel[grid](logits, label, weights, gradient, *_sizes(logits), *tail)
    return gradient


loss_gradient.register_fake(lambda logits, *_: torch.empty_like(logits))


@torch.library.custom_op("medspeed::loss_of_sums", mutates_args=())
def loss_of_sums(sums: Tensor, share: float, smooth: float) -> tuple[Tensor, Tensor]:
    """Return the loss of `LossOfSums`, a scalar, and its derivative by each of the sums [4, N, K]."""
    from medspeed.common.kernels.dice_triton import loss_kernel

    loss, slopes = _loss_like(sums, share, smooth)
    count = sums[0].numel()
    loss_kernel[1,](sums, loss, slopes, share, smooth, count, _power(count))
    return loss, slopes


@loss_of_sums.register_fake
def _loss_like(sums: Tensor, share: float, smooth: float) -> tuple[Tensor, Tensor]:
    return torch.empty((), device=sums.device), torch.empty_like(sums)


def _tile(logits: Tensor) -> tuple[int, int]:
    """Return how many classes, rounded up, and how many voxels a program takes at a time."""
    wide = _power(logits.shape[1])
    return wide, max(1, _ELEMENTS // wide)


def _power(count: int) -> int:
    """Return the next power of 2 that is at least so great."""
    return 1 << (count - 1).bit_length()


def _sizes(logits: Tensor) -> tuple[int, int, int, int]:
    """Return the voxels, the classes, and the strides of both."""
    classes, voxels = logits.shape[1], logits[0, 0].numel()
    return (voxels, classes, 1, voxels) if logits.is_contiguous() else (voxels, classes, classes, 1)
