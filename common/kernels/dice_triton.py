# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Dice loss with cross-entropy or focal loss: sums over voxels, the loss of them, and its gradient, a kernel each.

Nothing of a voxel is stored but the gradient. Parts are summed in a fixed order, so that a run repeats to the bit.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 512  # logits that a program works on at a time
_STEPS = 32  # times that a program of the sums does so
_LEAST = tl.constexpr(-3e38)  # stands for the logit of a class that there is not


class FusedLoss(torch.autograd.Function):
    """The mean Dice loss of classes or regions (and of samples), plus the mean of the penalties, a scalar.

    `batch` takes Dice over the batches of the ranks as one, whose sums they add up: the gradient is then exact after
    DDP's mean. For logits, label and members see `loss_parts`, for `smooth` `loss_of_parts`.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, label: Tensor, *given: Any) -> Tensor:
        """Keep what the gradient is computed from; given are members, batch, smooth and ranks."""
        members, batch, smooth, ranks = given
        parts: Tensor = loss_parts(logits, label, members)
        ctx.members, ctx.world = members, ranks.world if batch else 1
        if not batch:
            parts = parts.sum(2, keepdim=True)
        elif ranks.world > 1:
            parts = ranks.sum(parts.sum((1, 2), keepdim=True))
        loss: Tensor
        loss, slopes = loss_of_parts(parts, batch, 1 / (logits if members else label).numel() / ctx.world, smooth)
        ctx.save_for_backward(logits, label, slopes)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, weight: Tensor) -> Any:
        """Return the gradient of the logits."""
        logits, label, slopes = ctx.saved_tensors
        weight = weight if ctx.world == 1 else weight * ctx.world
        return loss_gradient(logits, label, slopes, weight, ctx.members), *[None] * 5


@torch.library.custom_op("medspeed::loss_parts", mutates_args=())
def loss_parts(logits: Tensor, label: Tensor, members: Sequence[int]) -> Tensor:
    """Return sums over parts of the voxels, [4, B, P, K] float32: penalty, missed, squared, voxels.

    Args:
        logits: [B, K, X, Y, Z] float32, bfloat16 or float16, contiguous or channels last.
        label: [B, 1, X, Y, Z] uint8 class numbers, contiguous.
        members: none for K classes that exclude each other, with cross entropy; else of regions, with focal loss: 256 r
            + n for each class number n of region r.
    """
    parts: Tensor = _parts_like(logits, label, members)
    tail = parts.stride(0), tuple(members), *_tile(logits), _STEPS
    sums_kernel[parts.shape[2], len(logits)](logits, label, parts, *_sizes(logits), *tail)
    return parts


@loss_parts.register_fake
def _parts_like(logits: Tensor, label: Tensor, members: Sequence[int]) -> Tensor:
    programs = triton.cdiv(label[0].numel(), _tile(logits)[1] * _STEPS)
    return torch.empty(4, len(logits), programs, logits.shape[1], device=logits.device)


@torch.library.custom_op("medspeed::loss_gradient", mutates_args=())
def loss_gradient(logits: Tensor, label: Tensor, slopes: Tensor, weight: Tensor, members: Sequence[int]) -> Tensor:
    """Return the gradient of the logits, of their dtype and layout.

    It is `weight`, a scalar, times that from the derivative by the sums, [4, B or 1, K] float32.
    """
    gradient, (wide, block) = torch.empty_like(logits), _tile(logits)
    step = slopes.stride(1) if slopes.shape[1] > 1 else 0
    grid, tail = (triton.cdiv(label[0].numel(), block), len(logits)), (slopes.stride(0), step, tuple(members))
    gradient_kernel[grid](logits, label, slopes, weight, gradient, *_sizes(logits), *tail, wide, block)
    return gradient


loss_gradient.register_fake(lambda logits, *_: torch.empty_like(logits))


@torch.library.custom_op("medspeed::loss_of_parts", mutates_args=())
def loss_of_parts(parts: Tensor, batch: bool, share: float, smooth: float) -> tuple[Tensor, Tensor]:
    """Return the loss of `FusedLoss`, a scalar, and its derivative by each of the sums, [4, N, K].

    Parts are [4, B, P, K] float32, contiguous; for the `batch` as one added up (N is 1), else with P of 1 (N is B).
    `smooth` is added to numerator and denominator of Dice.
    """
    loss, slopes = _loss_like(parts, batch, share, smooth)
    count, wide = slopes[0].numel(), triton.next_power_of_2(slopes[0].numel())
    block = max(1, 4 * _ELEMENTS // wide)
    loss_kernel[1,](parts, loss, slopes, share, smooth, count, parts[0].numel() // count, wide, block)
    return loss, slopes


@loss_of_parts.register_fake
def _loss_like(parts: Tensor, batch: bool, share: float, smooth: float) -> tuple[Tensor, Tensor]:
    samples, _, classes = parts.shape[1:]
    return parts.new_empty(()), parts.new_empty(4, 1 if batch else samples, classes)


def _tile(logits: Tensor) -> tuple[int, int]:
    """Return how many classes, rounded up, and how many voxels a program takes at a time."""
    wide = triton.next_power_of_2(logits.shape[1])
    return wide, max(1, _ELEMENTS // wide)


def _sizes(logits: Tensor) -> tuple[int, int, int, int]:
    """Return the voxels, the classes, and the strides of both."""
    classes, voxels = logits.shape[1], logits[0, 0].numel()
    return (voxels, classes, 1, voxels) if logits.is_contiguous() else (voxels, classes, classes, 1)


@triton.jit
def sums_kernel(
    logits, label, parts, voxels, classes, voxel_stride, class_stride, plane,
    members: tl.constexpr, wide: tl.constexpr, block: tl.constexpr, steps: tl.constexpr,
):  # fmt: skip
    """Program (p, b) sums some blocks of voxels of sample b."""
    penalty = tl.zeros((block, wide), tl.float32)
    missed = tl.zeros((block, wide), tl.float32)
    squared = tl.zeros((block, wide), tl.float32)
    count = tl.zeros((block, wide), tl.float32)
    sample, sizes = tl.program_id(1).to(tl.int64), (voxels, classes, voxel_stride, class_stride)
    for step in range(steps):
        voxel = (tl.program_id(0) * steps + step) * block + tl.arange(0, block)
        error, log_right, here, _, _ = _errors(logits, label, sample, voxel, sizes, members, wide)
        wrong = tl.abs(error)
        if len(members):
            penalty -= log_right * wrong * wrong
        else:
            penalty -= tl.where(here, log_right, 0.0)
        missed += tl.where(here, wrong, 0.0)
        squared += error * error
        count += here.to(tl.float32)
    number = tl.arange(0, wide)
    target = parts + (sample * tl.num_programs(0) + tl.program_id(0)) * classes + number
    tl.store(target, tl.sum(penalty, 0), mask=number < classes)
    tl.store(target + plane, tl.sum(missed, 0), mask=number < classes)
    tl.store(target + 2 * plane, tl.sum(squared, 0), mask=number < classes)
    tl.store(target + 3 * plane, tl.sum(count, 0), mask=number < classes)


@triton.jit
def gradient_kernel(
    logits, label, slopes, weight, gradient, voxels, classes, voxel_stride, class_stride, plane, sample_stride,
    members: tl.constexpr, wide: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Program (p, b) writes the gradient of block p of sample b.

    Of classes it is p_j (g_j - sum g_k p_k), g the derivative by the probabilities, here less that of the right class,
    so that nothing cancels where the right class is certain.
    """
    sample, sizes = tl.program_id(1).to(tl.int64), (voxels, classes, voxel_stride, class_stride)
    voxel = tl.program_id(0) * block + tl.arange(0, block)
    error, log_right, here, place, inside = _errors(logits, label, sample, voxel, sizes, members, wide)
    source = slopes + sample * sample_stride + tl.arange(0, wide)
    known = tl.arange(0, wide) < classes
    penalty = tl.load(source, mask=known, other=0.0)[None, :]
    missed = tl.load(source + plane, mask=known, other=0.0)[None, :]
    squared = tl.load(source + 2 * plane, mask=known, other=0.0)[None, :]
    steep = 2 * error * squared - tl.where(here, missed, 0.0)
    if len(members):
        wrong = tl.abs(error)
        slope = wrong * (1 - wrong) * steep + penalty * error * wrong * (wrong - 2 * (1 - wrong) * log_right)
    else:
        steep -= tl.sum(tl.where(here, steep, 0.0), 1)[:, None]
        probability = tl.where(here, 1 + error, error)
        slope = probability * (steep - tl.sum(steep * probability, 1)[:, None])
        slope += error * tl.sum(tl.where(here, penalty, 0.0), 1)[:, None]
    tl.store(gradient + place, (slope * tl.load(weight)).to(gradient.dtype.element_ty), mask=inside)


@triton.jit
def _errors(logits, label, sample, voxel, sizes, members: tl.constexpr, wide: tl.constexpr):
    """Return of voxels and classes, [block, wide], p - y; log(1 - |p - y|), of classes that of the right one; y; where.

    The last are the places in memory and which of them there are; beyond them p - y, the logarithm and y are 0.
    """
    voxels, classes, voxel_stride, class_stride = sizes
    number = tl.arange(0, wide)
    inside = (voxel < voxels)[:, None] & (number < classes)[None, :]
    place = sample * voxels * classes + (voxel * voxel_stride)[:, None] + (number * class_stride)[None, :]
    value = tl.load(logits + place, mask=inside, other=0.0).to(tl.float32)
    truth = tl.load(label + sample * voxels + voxel, mask=voxel < voxels, other=0).to(tl.int32)[:, None]
    if len(members):
        here = number[None, :] + truth < 0
        for index in tl.static_range(len(members)):
            here = here | ((number == members[index] // 256)[None, :] & (truth == members[index] % 256))
        margin = tl.where(inside, tl.where(here, value, -value), 0.0)
        small = tl.exp(-tl.abs(margin))
        wrong = tl.where(margin >= 0, small, 1.0) / (1 + small)
        error = tl.where(here, -wrong, wrong)
        log_right = tl.minimum(margin, 0.0) - _log1p(small)
    else:
        here = number[None, :] == truth
        value = tl.where(inside, value, _LEAST)
        behind = value - tl.max(value, 1)[:, None]
        weight = tl.exp(behind)
        rest = tl.sum(tl.where(here, 0.0, weight), 1)
        own = tl.sum(tl.where(here, weight, 0.0), 1)
        error = tl.where(here, -rest[:, None], weight) / (rest + own)[:, None]
        # What there is besides the largest weight, which is 1: exact where that is the right class's.
        right = tl.sum(tl.where(here, behind, 0.0), 1) - _log1p(rest + (own - 1))
        log_right = right[:, None]
    here = here & inside
    return tl.where(inside, error, 0.0), tl.where(inside, log_right, 0.0), here, place, inside


@triton.jit
def _log1p(value):
    """Return log(1 + value), precise near 0. Source: W. Kahan; N. Higham, "Accuracy and Stability", section 1.14."""
    sum = 1 + value
    return tl.where(sum == 1, value, tl.log(sum) * (value / tl.where(sum == 1, 1.0, sum - 1)))


@triton.jit
def loss_kernel(parts, loss, slopes, share, smooth, count, rows, wide: tl.constexpr, block: tl.constexpr):
    """Compute, in one program, what `FusedLoss` says."""
    number = tl.arange(0, wide)
    known, plane = number < count, rows * count
    penalty, missed = tl.zeros((wide,), tl.float32), tl.zeros((wide,), tl.float32)
    squared, voxels = tl.zeros((wide,), tl.float32), tl.zeros((wide,), tl.float32)
    for begin in range(0, rows, block):
        row = begin + tl.arange(0, block)[:, None]
        at, here = parts + row * count + number[None, :], (row < rows) & known[None, :]
        penalty += tl.sum(tl.load(at, mask=here, other=0.0), 0)
        missed += tl.sum(tl.load(at + plane, mask=here, other=0.0), 0)
        squared += tl.sum(tl.load(at + 2 * plane, mask=here, other=0.0), 0)
        voxels += tl.sum(tl.load(at + 3 * plane, mask=here, other=0.0), 0)
    whole = 2 * (voxels - missed) + squared + smooth
    dice = squared / whole
    tl.store(loss, tl.sum(dice) / count + tl.sum(penalty) * share)
    tl.store(slopes + number, tl.zeros((wide,), tl.float32) + share, mask=known)
    tl.store(slopes + count + number, 2 * dice / whole / count, mask=known)
    tl.store(slopes + 2 * count + number, (1 - dice) / whole / count, mask=known)
    tl.store(slopes + 3 * count + number, -2 * dice / whole / count, mask=known)
