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


class FusedLoss(torch.autograd.Function):
    """The mean Dice loss of classes or regions (and of samples), plus `share` of the sum of the penalties, a scalar.

    `batch` takes Dice over the batch as one, whose sums `total`, where it is not None, adds up over `world` ranks: the
    gradient is then exact after DDP's mean. For the rest see `loss_parts`; `fits` says which logits it takes.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, label: Tensor, *given: Any) -> Tensor:  # noqa: ANN401
        """Keep what the gradient is computed from; given are members, batch, share, smooth, total and world."""
        members, batch, share, smooth, total, world = given
        parts: Tensor = loss_parts(logits, label, members)
        if not batch:
            parts = parts.sum(2, keepdim=True)
        elif total is not None:
            parts = total(parts.sum((1, 2), keepdim=True))
        loss: Tensor
        loss, slopes = loss_of_parts(parts, batch, share, smooth)
        ctx.save_for_backward(logits, label, slopes)
        ctx.members, ctx.world = members, world
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, weight: Tensor) -> Any:  # noqa: ANN401
        """Return the gradient of the logits."""
        logits, label, slopes = ctx.saved_tensors
        weight = weight if ctx.world == 1 else weight * ctx.world
        return loss_gradient(logits, label, slopes, weight, ctx.members), *[None] * 7


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
def loss_gradient(logits: Tensor, label: Tensor, slopes: Tensor, weight: Tensor, members: Sequence[int]) -> Tensor:
    """Return the gradient of the logits, of their dtype and layout.

    It is `weight`, a scalar, times that from the derivative by the sums, [4, B or 1, K] float32.
    """
    from medspeed.common.kernels.dice_triton import gradient_kernel

    gradient = torch.empty_like(logits)
    wide, block = _tile(logits)
    step = slopes.stride(1) if slopes.shape[1] > 1 else 0
    grid = -(-label[0].numel() // block), len(logits)
    tail = (slopes.stride(0), step, tuple(members), wide, block)
    gradient_kernel[grid](logits, label, slopes, weight, gradient, *_sizes(logits), *tail)
    return gradient


loss_gradient.register_fake(lambda logits, *_: torch.empty_like(logits))


@torch.library.custom_op("medspeed::loss_of_parts", mutates_args=())
def loss_of_parts(parts: Tensor, batch: bool, share: float, smooth: float) -> tuple[Tensor, Tensor]:
    """Return the loss of `FusedLoss`, a scalar, and its derivative by each of the sums, [4, N, K].

    Args:
        parts: [4, B, P, K] float32, contiguous; for the `batch` as one added up (N is 1), else with P of 1 (N is B).
        batch: see `FusedLoss`, also for share.
        share: of the penalties.
        smooth: added to numerator and denominator of Dice.
    """
    from medspeed.common.kernels.dice_triton import loss_kernel

    loss, slopes = _loss_like(parts, batch, share, smooth)
    count, wide = slopes[0].numel(), _power(slopes[0].numel())
    block = max(1, 4 * _ELEMENTS // wide)
    loss_kernel[1,](parts, loss, slopes, share, smooth, count, parts[0].numel() // count, wide, block)
    return loss, slopes


@loss_of_parts.register_fake
def _loss_like(parts: Tensor, batch: bool, share: float, smooth: float) -> tuple[Tensor, Tensor]:
    samples, _, classes = parts.shape[1:]
    return parts.new_empty(()), parts.new_empty(4, 1 if batch else samples, classes)


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
