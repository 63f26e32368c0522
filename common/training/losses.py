"""Losses on logits [B, K, X, Y, Z] and class numbers [B, 1, X, Y, Z]."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from monai.losses import DiceCELoss, DiceFocalLoss, DiceLoss
from torch import Tensor

from common.observe.run import Run
from common.training.distributed import SINGLE, Ranks

LossName = Literal["dice_ce", "monai_dice_ce", "monai_dice_focal", "monai_dice"]
Loss = Callable[[Tensor, Tensor], Tensor]


class _Sums(NamedTuple):
    """What a loss needs to know of each sample: p is the probability of a class, y is 1 at its voxels and else 0."""

    cross_entropy: Tensor  # [B]: -log p of the true class
    missed: Tensor  # [B, K]: sum of y * (1 - p)
    extra: Tensor  # [B, K]: sum of (1 - y) * p
    squared: Tensor  # [B, K]: sum of (p - y)^2
    voxels: Tensor  # [B, K]: sum of y


def dice_ce(
    logits: Tensor,
    label: Tensor,
    *,
    batch: bool = True,
    include_background: bool = True,
    squared_pred: bool = True,
    smooth: float = 1e-5,
    ranks: Ranks = SINGLE,
) -> Tensor:
    """Return soft Dice loss plus cross entropy, equal to MONAI's `DiceCELoss(to_onehot_y=True, softmax=True, ...)`.

    It never waits for the device. The Dice loss of a class is 1 - (2 sum(p y) + s) / (sum(p^2) + sum(y) + s); here it
    is computed as sum((p - y)^2) / (the same denominator), which is equal and keeps its precision as it nears 0.
    Sums are exact to about 1e-7, where MONAI's vector norms in float32 lose up to 1e-3 on the CPU.

    Args:
        logits: [B, K, X, Y, Z], K at least 2, any floating dtype (computed in float32, or float64 if given that) and
            any memory format; for K = 2, the case made fast, the gradient has the same format.
        label: [B, 1, X, Y, Z] uint8 class numbers below K; they are not checked here, and others give a wrong loss.
        batch: take Dice over the whole batch as if it were one volume, else for each sample, then the mean.
        include_background: let class 0 count in the mean over classes of the Dice loss.
        squared_pred: sum p^2 in the denominator, else p.
        smooth: s above, added to numerator and denominator.
        ranks: those that share a batch; the loss is that of their batches as one, the same on each of them.

    Returns:
        The loss, a scalar tensor: at least 0, Dice's part at most 1.

    Source:
        Milletari et al., "V-Net", 3DV 2016 (squared Dice); Isensee et al., "nnU-Net", Nature Methods 2021 (the sum).
    """
    classes = logits.shape[1]
    assert classes >= 2, f"{classes} channel: background and foreground need one each"
    assert label.shape == (len(logits), 1, *logits.shape[2:]), f"logits {logits.shape}, label {label.shape}"
    sums = _two_class_sums(logits, label) if classes == 2 else _class_sums(logits, label)
    if batch:
        sums = _Sums(*(each.sum(0, keepdim=True) for each in sums))
        if ranks.world > 1:
            sums = _over_ranks(sums, ranks)
    _, missed, extra, squared, voxels = sums
    if squared_pred:
        dice = squared / (2 * voxels - 2 * missed + squared + smooth)
    else:
        dice = (missed + extra) / (2 * voxels - missed + extra + smooth)
    if not include_background:
        dice = dice[:, 1:]
    cross_entropy = sums.cross_entropy.sum() / (label.numel() * ranks.world)
    loss: Tensor = dice.mean() + cross_entropy
    return loss if batch else ranks.sum(dice.mean() / ranks.world + cross_entropy)


def _over_ranks(sums: _Sums, ranks: Ranks) -> _Sums:
    """Add up the sums of all ranks, in one message."""
    flat = ranks.sum(torch.cat([each.to(sums.missed.dtype).flatten() for each in sums]))
    parts = torch.split(flat, [each.numel() for each in sums])
    return _Sums(*(part.view_as(each) for part, each in zip(parts, sums, strict=True)))


# MONAI's own, as the guides use them; computed in float32 whatever the network's precision.
_MONAI_DICE = DiceLoss(to_onehot_y=True, softmax=True)
_MONAI_DICE_CE = DiceCELoss(to_onehot_y=True, softmax=True, squared_pred=True, batch=True)
_MONAI_DICE_FOCAL = DiceFocalLoss(to_onehot_y=True, softmax=True, squared_pred=True, batch=True)

LOSSES: dict[LossName, Loss] = {
    "dice_ce": dice_ce,
    "monai_dice_ce": lambda logits, label: _MONAI_DICE_CE(logits.float(), label),
    "monai_dice_focal": lambda logits, label: _MONAI_DICE_FOCAL(logits.float(), label),
    "monai_dice": lambda logits, label: _MONAI_DICE(logits.float(), label),
}


def build_loss(name: LossName, ranks: Ranks = SINGLE) -> Loss:
    """Return a loss that is the same number on all ranks; MONAI's are the mean of what each rank has by itself."""
    if name == "dice_ce":
        return partial(dice_ce, ranks=ranks)
    return mean_over_ranks(LOSSES[name], ranks)


def mean_over_ranks(loss: Loss, ranks: Ranks) -> Loss:
    """Return the mean over the ranks of a loss that each computes from its own part of the batch."""
    if ranks.world == 1:
        return loss
    return lambda logits, label: ranks.sum(loss(logits, label) / ranks.world)


def binary_cross_entropy(smoothing: float = 0.0) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the mean binary cross-entropy of logits [B, 1, 1, 1] against labels [B] float, 0 or 1.

    It is a mean over samples, so that the losses of equal parts of a batch average to the batch's.

    Args:
        smoothing: the targets are `smoothing` and 1 - `smoothing` instead of 0 and 1.
    """

    def loss(logits: Tensor, label: Tensor) -> Tensor:
        targets = label * (1 - 2 * smoothing) + smoothing
        return torch.nn.functional.binary_cross_entropy_with_logits(logits.float().flatten(), targets)

    return loss


def say_inexact(name: str, ranks: Ranks, accumulate: int, run: Run) -> None:
    """Say where the parts of a batch do not add up to the loss of the whole.

    Args:
        name: of the loss. Those called "..._per_sample" are a mean over samples, and "monai_dice" is; the others take
            Dice over the batch as one volume, ours over that of all ranks.
        ranks: those that share a batch.
        accumulate: parts that each of them computes one after the other.
        run: says it.
    """
    over_batch = not name.endswith("_per_sample") and name != "monai_dice"
    parts = [f"{accumulate} accumulated parts"] if accumulate > 1 else []
    parts += [f"{ranks.world} ranks"] if ranks.world > 1 and name.startswith("monai_") else []
    if over_batch and parts:
        run.say(
            f"loss {name}: Dice is taken over the batch, and {' and '.join(parts)} each take it over their own part; "
            "their mean is not the loss of the whole batch, as that of a loss per sample is"
        )


def _class_sums(logits: Tensor, label: Tensor) -> _Sums:
    """Sum over the voxels of each sample, for any number of classes."""
    axes = (2, 3, 4)
    log_probability = torch.log_softmax(logits, 1, dtype=_working_dtype(logits))
    numbers = torch.arange(logits.shape[1], dtype=torch.uint8, device=logits.device)
    y = (label == numbers.view(1, -1, 1, 1, 1)).to(log_probability.dtype)
    error = log_probability.exp() - y
    missed = -(error * y).sum(axes)
    return _Sums(
        cross_entropy=-(log_probability * y).sum((1, *axes)),
        missed=missed,
        extra=error.sum(axes) + missed,
        squared=error.square().sum(axes),
        voxels=y.sum(axes),
    )


def _two_class_sums(logits: Tensor, label: Tensor) -> _Sums:
    """Sum over the voxels of each sample for two classes, whose probabilities are p and 1 - p."""
    sums: Tensor = _TwoClassSums.apply(logits, label)  # type: ignore[no-untyped-call]
    cross_entropy, missed, extra, squared, voxels = sums.unbind(1)
    return _Sums(
        cross_entropy=cross_entropy,
        missed=torch.stack([extra, missed], 1),  # what the foreground has too much, the background misses
        extra=torch.stack([missed, extra], 1),
        squared=torch.stack([squared, squared], 1),
        voxels=torch.stack([label[0].numel() - voxels, voxels], 1),
    )


class _TwoClassSums(torch.autograd.Function):
    """The sums of `_Sums` for the foreground, [B, 5], with a derivative that needs one stored tensor.

    Everything follows from the error e = p - y of the foreground: with u = |e|, the probability of the wrong class,
    cross entropy is -log(1 - u), and e < 0 says that the voxel is foreground.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, label: Tensor) -> Tensor:  # noqa: ANN401 - torch's context has no type
        error = torch.empty(label[:, 0].shape, dtype=_working_dtype(logits), device=logits.device)
        ctx.samples = _samples_at_once(logits)
        parts = zip(*(torch.split(each, ctx.samples) for each in (logits, label[:, 0], error)), strict=True)
        sums = [_forward_part(*part) for part in parts]
        ctx.save_for_backward(error)
        ctx.layout = torch.empty_like(logits, device="meta")  # dtype and memory format for the gradient, no memory
        return torch.cat(sums)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        (error,) = ctx.saved_tensors
        gradient = torch.empty_like(ctx.layout, device=error.device)
        for part in zip(*(torch.split(each, ctx.samples) for each in (error, weights, gradient)), strict=True):
            _backward_part(*part)
        return gradient, None


def _forward_part(logits: Tensor, label: Tensor, error: Tensor) -> Tensor:
    """Return the sums, [B, 5], and fill `error`; in few passes over memory, reusing what is no longer needed."""
    y = label.to(error.dtype)
    voxels = _sum_voxels(y)
    sign = y.mul_(2).sub_(1)
    margin = (logits[:, 1] - logits[:, 0].to(error.dtype)).mul_(sign)  # the true class's logit less the other's
    log_probability = torch.nn.functional.logsigmoid(margin)
    cross_entropy = -_sum_voxels(log_probability)
    wrong = log_probability.expm1_().neg_()  # u = 1 - p(true class), precise also where it is tiny
    both = _sum_voxels(wrong)
    torch.mul(wrong, sign.neg_(), out=error)
    missed = -_sum_voxels(torch.clamp(error, max=0, out=wrong))
    squared = _sum_voxels(torch.square(error, out=wrong))
    return torch.stack([cross_entropy, missed, both - missed, squared, voxels], 1)


def _backward_part(error: Tensor, weights: Tensor, gradient: Tensor) -> None:
    """Fill the gradient of the logits, [B, 2, X, Y, Z], from the weights of the sums, [B, 5].

    With d the logit of the foreground less that of the background: de/dd = u (1 - u), d(cross entropy)/dd = e, so the
    derivative is e * w_ce + u (1 - u) * (w_extra where e > 0, -w_missed where e < 0, + 2 e * w_squared).
    """
    cross_entropy, missed, extra, squared, _ = weights.t().reshape(5, -1, 1, 1, 1)
    wrong = error.abs()
    # The step function of e times u is written as a sum of e and u: a `where` between scalars is slow on the CPU.
    slope = torch.addcmul((extra + missed) / 2, wrong, 2 * squared).mul_(error).addcmul_(wrong, (extra - missed) / 2)
    slope.addcmul_(slope, wrong, value=-1).addcmul_(error, cross_entropy)
    gradient[:, 1] = slope
    gradient[:, 0] = slope.neg_()


def _samples_at_once(logits: Tensor) -> int:
    """Return how many samples to treat at once: on the CPU one, whose intermediate results stay in the cache."""
    return 1 if logits.device.type == "cpu" else len(logits)


def _working_dtype(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _sum_voxels(values: Tensor) -> Tensor:
    return values.sum((1, 2, 3))  # pairwise: exact to about 1e-7, unlike dot products and vector norms on the CPU
