"""The kernels of `medspeed.common.kernels.dice`."""

# mypy: ignore-errors
# What Triton compiles is not typed as Python is.

import triton
import triton.language as tl

_LEAST = tl.constexpr(-3e38)  # stands for the logit of a class that there is not


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
