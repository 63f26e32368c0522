"""Losses: of classes that exclude each other (softmax), of regions that may overlap (sigmoid), and of patches."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from medspeed.common.inference.labels import Region
from medspeed.common.kernels.trust import trusts
from medspeed.common.ranks import SINGLE, Ranks
from medspeed.common.run import Run

Loss = Callable[[Tensor, Tensor], Tensor]

FUSED = "loss"  # the name that `trusts` knows the kernels by
_SMOOTH = 1e-5  # added to numerator and denominator of Dice, so that an empty class has a value
_LEAST = 1e-30  # probability of the right class below which its logarithm no longer counts


class _Sums(NamedTuple):
    """Sums over voxels; p is the probability of a class, y is 1 at its voxels and else 0, u = |p - y|."""

    penalty: Tensor  # cross entropy, -log(1 - u), or focal, -u^2 log(1 - u)
    missed: Tensor  # y u
    squared: Tensor  # u^2
    voxels: Tensor  # y


def dice_ce(logits: Tensor, label: Tensor, *, ranks: Ranks = SINGLE) -> Tensor:
    """Return soft Dice loss plus cross entropy: MONAI's `DiceCELoss(to_onehot_y, softmax, squared_pred, batch)`.

    It never waits for the device. Dice, at most 1, is taken over the whole batch as one volume: for a class it is
    1 - (2 sum(p y) + s) / (sum(p^2) + sum(y) + s), computed as sum((p - y)^2) / (the same denominator), which keeps its
    precision near 0. Sums are exact to about 1e-7; MONAI's vector norms in float32 lose up to 1e-3 on the CPU.

    Args:
        logits: [B, K, X, Y, Z], K at least 2, any floating dtype (computed in float32, or float64 if given that) and
            any memory format; for K = 2, the case made fast, the gradient has the same format.
        label: [B, 1, X, Y, Z] uint8 class numbers below K; they are not checked here, and others give a wrong loss.
        ranks: those that share a batch; the loss is that of their batches as one, the same on each of them.

    Source:
        Milletari et al., "V-Net", 3DV 2016 (squared Dice); Isensee et al., "nnU-Net", Nature Methods 2021 (the sum).
    """
    classes = logits.shape[1]
    assert classes >= 2, f"{classes} channel: background and foreground need one each"
    assert label.shape == (len(logits), 1, *logits.shape[2:]), f"logits {logits.shape}, label {label.shape}"
    if _fits(logits, label):
        return _fused(logits, label, (), True, ranks)
    return _over_batch((_two_class_sums if classes == 2 else _class_sums)(logits, label), label.numel(), ranks)


def dice_focal(
    logits: Tensor, label: Tensor, regions: Sequence[Region], *, batch: bool = True, ranks: Ranks = SINGLE
) -> Tensor:
    """Return soft Dice loss plus focal loss, equal to MONAI's `DiceFocalLoss(sigmoid=True, squared_pred=True, ...)`.

    Args:
        logits: [B, R, X, Y, Z], any floating dtype (computed in float32, or float64 if given that), any memory format.
        label: [B, 1, X, Y, Z] uint8 class numbers, of which the regions' masks are made here, on the device.
        regions: R structures.
        batch: take Dice over the whole batch as if it were one volume, else for each sample, then the mean.
        ranks: those that share a batch; the loss is that of their batches as one, the same on each of them.

    Source:
        Milletari et al., "V-Net", 3DV 2016 (squared Dice); Lin et al., "Focal loss", ICCV 2017 (gamma 2, no alpha).
    """
    assert logits.shape[1] == len(regions), f"logits {logits.shape}, {len(regions)} regions"
    assert label.shape == (len(logits), 1, *logits.shape[2:]), f"logits {logits.shape}, label {label.shape}"
    if _fits(logits, label):
        members = [256 * number + member for number, region in enumerate(regions) for member in region.members]
        return _fused(logits, label, members, batch, ranks)
    penalty, missed, _, squared, voxels = _ErrorSums.apply(logits, label, regions).unbind(-1)  # type: ignore[no-untyped-call]
    each = _Sums(penalty, missed, squared, voxels)
    if not batch:
        return ranks.sum((_dice(each).mean() + each.penalty.sum() / logits.numel()) / ranks.world)
    return _over_batch(each, logits.numel(), ranks)


def binary_cross_entropy(smoothing: float = 0.0) -> Loss:
    """Return the mean binary cross-entropy of logits [B, 1, 1, 1] and labels [B] float, 0 or 1, each smoothed."""

    def loss(logits: Tensor, label: Tensor) -> Tensor:
        targets = label * (1 - 2 * smoothing) + smoothing
        return torch.nn.functional.binary_cross_entropy_with_logits(logits.float().flatten(), targets)

    return loss


# MONAI's own, by class and arguments as the guides use them; computed in float32 whatever the network's precision.
_MONAI_CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "monai_dice_ce": ("DiceCELoss", {"to_onehot_y": True, "softmax": True, "squared_pred": True, "batch": True}),
    "monai_dice_focal": ("DiceFocalLoss", {"to_onehot_y": True, "softmax": True, "squared_pred": True, "batch": True}),
    "monai_dice": ("DiceLoss", {"to_onehot_y": True, "softmax": True}),
}
_MONAI_REGIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "monai_dice_focal": ("DiceFocalLoss", {"sigmoid": True, "squared_pred": True, "batch": True}),
    "monai_dice": ("DiceLoss", {"sigmoid": True, "squared_pred": True, "smooth_nr": 0, "smooth_dr": _SMOOTH}),
}


def build_loss(name: str, ranks: Ranks = SINGLE, regions: Sequence[Region] = ()) -> Loss:
    """Return a loss, of regions by sigmoid or of classes by softmax, the same on all ranks; MONAI's are their mean."""
    if name == "dice_ce":
        return partial(dice_ce, ranks=ranks)
    if not name.startswith("monai_"):
        return partial(dice_focal, regions=regions, batch=name == "dice_focal", ranks=ranks)
    from monai import losses  # here: MONAI takes longer to load than all the rest

    kind, arguments = (_MONAI_REGIONS if regions else _MONAI_CLASSES)[name]
    monai: Loss = getattr(losses, kind)(**arguments)

    def loss(logits: Tensor, label: Tensor) -> Tensor:
        target = torch.stack([region.mask(label[:, 0]) for region in regions], 1).float() if regions else label
        return ranks.sum(monai(logits.float(), target) / ranks.world)

    return loss


def say_inexact(name: str, ranks: Ranks, accumulate: int, run: Run) -> None:
    """Say where the parts of a batch, `accumulate` on each rank, do not add up to the loss of the whole."""
    over_batch = not name.endswith("_per_sample") and name != "monai_dice"  # which are means over samples
    parts = [f"{accumulate} accumulated parts"] if accumulate > 1 else []
    parts += [f"{ranks.world} ranks"] if ranks.world > 1 and name.startswith("monai_") else []
    if over_batch and parts:
        said = f"Dice is computed over a batch, but {' and '.join(parts)} each compute it over their part"
        differs = "the mean of the parts differs from the loss of the whole batch (that of a per-sample loss does not)"
        run.say(f"loss {name}: {said}; {differs}")


def _fits(logits: Tensor, label: Tensor) -> bool:
    """Return whether the kernels take logits and a label: trusted, half or single precision, in one piece."""
    dense = logits.is_contiguous() or logits.is_contiguous(memory_format=torch.channels_last_3d)
    single = logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return trusts(FUSED, logits) and dense and single and label.is_contiguous() and logits[0].numel() < 2**31


def _fused(logits: Tensor, label: Tensor, members: Sequence[int], batch: bool, ranks: Ranks) -> Tensor:
    """Return the loss by its kernels; `members` are those of regions, none of classes."""
    from medspeed.common.kernels.dice_triton import FusedLoss

    share = 1 / (logits if members else label).numel()
    apply: Callable[..., Tensor] = FusedLoss.apply
    if not batch:
        return ranks.sum(apply(logits, label, members, False, share, _SMOOTH, None, 1) / ranks.world)
    total = ranks.sum if ranks.world > 1 else None
    return apply(logits, label, members, True, share / ranks.world, _SMOOTH, total, ranks.world)


def _dice(sums: _Sums) -> Tensor:
    """Return the Dice loss of each class or region; 2 sum(p y) is 2 (voxels - missed)."""
    return sums.squared / (2 * sums.voxels - 2 * sums.missed + sums.squared + _SMOOTH)


def _over_batch(each: _Sums, count: int, ranks: Ranks) -> Tensor:
    """Return the loss of the samples of all ranks as one, whose sums are added up in one message."""
    sums = _Sums(*ranks.sum(torch.stack([value.sum(0) for value in each])))
    return _dice(sums).mean() + sums.penalty.sum() / (count * ranks.world)


def _class_sums(logits: Tensor, label: Tensor) -> _Sums:
    """Sum over the voxels of each sample, [B, K], for any number of classes."""
    log_probability = torch.log_softmax(logits, 1, dtype=_working_dtype(logits))
    numbers = torch.arange(logits.shape[1], dtype=torch.uint8, device=logits.device)
    y = (label == numbers.view(1, -1, 1, 1, 1)).to(log_probability.dtype)
    error = log_probability.exp() - y
    right, missed, squared, voxels = map(_sum_voxels, (log_probability * y, error * y, error.square(), y))
    return _Sums(-right, -missed, squared, voxels)


def _two_class_sums(logits: Tensor, label: Tensor) -> _Sums:
    """Sum over the voxels of each sample, [B, 2], for two classes, whose probabilities are p and 1 - p."""
    sums: Tensor = _ErrorSums.apply(logits, label, None)  # type: ignore[no-untyped-call]
    penalty, missed, extra, squared, voxels = sums.unbind(-1)
    # One penalty a voxel is shared by both classes; what the foreground has too much, the background misses.
    both = torch.cat([extra, missed], 1), squared.expand(-1, 2), torch.cat([label[0].numel() - voxels, voxels], 1)
    return _Sums(penalty.expand(-1, 2) / 2, *both)


class _ErrorSums(torch.autograd.Function):
    """The sums of `_Sums`, [B, R, 5], of R regions with a logit each, with a derivative that needs one stored tensor.

    Two exclusive classes are one region, the foreground, whose logit is the difference of theirs. Everything follows
    from the error e = p - y: u = |e| is the probability of the wrong answer, and e < 0 says that y is 1.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, label: Tensor, regions: Sequence[Region] | None) -> Tensor:  # noqa: ANN401
        shape = (len(logits), 1 if regions is None else len(regions), *logits.shape[2:])
        error = torch.empty(shape, dtype=_working_dtype(logits), device=logits.device)
        ctx.samples = 1 if logits.device.type == "cpu" else len(logits)  # on a CPU what stays in its cache
        parts = zip(*(torch.split(each, ctx.samples) for each in (logits, label, error)), strict=True)
        sums = [_forward_part(some, numbers, regions, wrong) for some, numbers, wrong in parts]
        ctx.save_for_backward(error)
        ctx.dtype, ctx.shape = logits.dtype, logits.shape
        ctx.strides = torch.empty_like(logits, device="meta").stride()  # of the gradient, in the same memory format
        ctx.focal = regions is not None
        return torch.cat(sums)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        (error,) = ctx.saved_tensors
        gradient = torch.empty_strided(ctx.shape, ctx.strides, dtype=ctx.dtype, device=error.device)
        parts = zip(*(torch.split(each, ctx.samples) for each in (error, weights, gradient)), strict=True)
        for some, weight, result in parts:
            slope = _backward_part(some, weight, ctx.focal)
            result[:, -slope.shape[1] :] = slope
            if slope.shape[1] < result.shape[1]:  # two classes
                result[:, :1] = slope.neg_()
        return gradient, None, None


def _forward_part(logits: Tensor, label: Tensor, regions: Sequence[Region] | None, error: Tensor) -> Tensor:
    """Return the sums, [B, R, 5], and fill `error` [B, R, X, Y, Z]; in few passes over memory, reusing what it can."""
    if regions is None:
        y = label.to(error.dtype)
        margin = logits[:, 1:] - logits[:, :1].to(error.dtype)
    else:
        y = torch.stack([region.mask(label[:, 0]) for region in regions], 1).to(error.dtype)
        margin = logits.to(error.dtype).contiguous()
    voxels = _sum_voxels(y)
    sign = y.mul(2).sub_(1)
    log_right = torch.nn.functional.logsigmoid(margin.mul(sign))
    wrong = log_right.expm1().neg_()  # u, precise also where it is tiny
    torch.mul(wrong, sign.neg_(), out=error)
    both, missed = _sum_voxels(wrong), _sum_voxels(y.mul_(wrong))
    square = wrong.square_()
    penalty = -_sum_voxels(log_right if regions is None else log_right.mul_(square))
    return torch.stack([penalty, missed, both - missed, _sum_voxels(square), voxels], -1)


def _backward_part(error: Tensor, weights: Tensor, focal: bool) -> Tensor:
    """Return the gradient of the regions' logits, [B, R, X, Y, Z], from the weights of the sums, [B, R, 5].

    With x the logit: de/dx = u (1 - u); d(cross entropy)/dx = e; d(focal)/dx = e u (u - 2 (1 - u) log(1 - u)); of the
    other sums u (1 - u) (w_extra where e > 0, -w_missed where e < 0, + 2 e w_squared). The step function of e times u
    is written as a sum of e and u: a `where` between scalars is slow on the CPU.
    """
    penalty, missed, extra, squared, _ = weights[..., None, None, None].unbind(2)
    wrong = error.abs()
    slope = torch.addcmul((extra + missed) / 2, wrong, 2 * squared).mul_(error).addcmul_(wrong, (extra - missed) / 2)
    if not focal:
        return slope.addcmul_(slope, wrong, value=-1).addcmul_(error, penalty)
    right = 1 - wrong
    steep = right.clamp(min=_LEAST).log_().mul_(right).mul_(-2).add_(wrong).mul_(wrong).mul_(error)
    return slope.mul_(right).addcmul_(steep, penalty)


def _working_dtype(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _sum_voxels(values: Tensor) -> Tensor:
    return values.sum((2, 3, 4))  # pairwise: exact to about 1e-7, unlike dot products and vector norms on the CPU
