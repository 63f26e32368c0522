"""Losses of volumes: of classes that exclude each other (softmax), and of regions that may overlap (sigmoid)."""

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


def soft_dice(
    logits: Tensor, label: Tensor, regions: Sequence[Region] = (), *, batch: bool = True, ranks: Ranks = SINGLE
) -> Tensor:
    """Return soft Dice loss plus cross entropy of classes that exclude each other, plus focal loss of regions.

    They are MONAI's `DiceCELoss(to_onehot_y, softmax, squared_pred, batch)` and `DiceFocalLoss(sigmoid, squared_pred,
    batch)`, without waiting for the device. Dice, at most 1, is for each class or region
    1 - (2 sum(p y) + s) / (sum(p^2) + sum(y) + s), computed as sum((p - y)^2) / (the same denominator), which keeps its
    precision near 0. Sums are exact to about 1e-7; MONAI's vector norms in float32 lose up to 1e-3 on the CPU.

    Args:
        logits: [B, K, X, Y, Z], any floating dtype (computed in float32, or float64 if given that), any memory format,
            which that of the gradient is but for three classes and more; of K classes, at least 2, or regions.
        label: [B, 1, X, Y, Z] uint8 class numbers; they are not checked here: those of no class give a wrong loss.
        regions: K structures, whose masks are made here, on the device.
        batch: take Dice over the whole batch as if it were one volume, else for each sample, then the mean.
        ranks: those that share a batch; the loss is that of their batches as one, the same on each of them.

    Source:
        Milletari et al., "V-Net", 3DV 2016 (squared Dice); Isensee et al., "nnU-Net", Nature Methods 2021 (its sum with
        cross entropy); Lin et al., "Focal loss", ICCV 2017 (gamma 2, no alpha).
    """
    channels, count = logits.shape[1], (logits if regions else label).numel()
    wanted = channels == len(regions) if regions else channels >= 2
    assert wanted, f"{channels} channel: background and foreground, or {len(regions)} regions, need one each"
    assert label.shape == (len(logits), 1, *logits.shape[2:]), f"logits {logits.shape}, label {label.shape}"
    if _fits(logits, label):
        from medspeed.common.kernels.dice_triton import FusedLoss

        apply: Callable[..., Tensor] = FusedLoss.apply
        members = [256 * number + member for number, region in enumerate(regions) for member in region.members]
        loss = apply(logits, label, members, batch, _SMOOTH, ranks)
        return loss if batch else ranks.sum(loss / ranks.world)
    each = _error_sums(logits, label, regions) if regions or channels == 2 else _class_sums(logits, label)
    if not batch:
        return ranks.sum((_dice(each).mean() + each.penalty.sum() / count) / ranks.world)
    sums = _Sums(*ranks.sum(torch.stack([value.sum(0) for value in each])))
    return _dice(sums).mean() + sums.penalty.sum() / (count * ranks.world)


_MONAI = {"monai_dice_ce": "DiceCELoss", "monai_dice_focal": "DiceFocalLoss", "monai_dice": "DiceLoss"}


def build_loss(name: str, ranks: Ranks = SINGLE, regions: Sequence[Region] = ()) -> Loss:
    """Return a loss, of regions by sigmoid or of classes by softmax, the same on all ranks; MONAI's are their mean."""
    if not name.startswith("monai_"):
        assert name.startswith(("dice_ce", "dice_focal")), name
        return partial(soft_dice, regions=regions, batch=not name.endswith("_per_sample"), ranks=ranks)
    from monai import losses  # here: MONAI takes longer to load than all the rest

    arguments: dict[str, Any] = {"sigmoid": True} if regions else {"to_onehot_y": True, "softmax": True}
    if name != "monai_dice":  # all as the guides use them
        arguments |= {"squared_pred": True, "batch": True}
    elif regions:
        arguments |= {"squared_pred": True, "smooth_nr": 0, "smooth_dr": _SMOOTH}
    monai: Loss = getattr(losses, _MONAI[name])(**arguments)

    def loss(logits: Tensor, label: Tensor) -> Tensor:
        target = torch.stack([region.mask(label[:, 0]) for region in regions], 1).float() if regions else label
        return ranks.sum(monai(logits.float(), target) / ranks.world)  # in float32 whatever the network's precision

    return loss


def say_inexact(name: str, accumulate: int, run: Run) -> None:
    """Say where the parts of a batch, `accumulate` on each rank, do not add up to the loss of the whole."""
    over_batch = not name.endswith("_per_sample") and name != "monai_dice"  # which are means over samples
    parts = [f"{accumulate} accumulated parts"] if accumulate > 1 else []
    parts += [f"{run.ranks.world} ranks"] if run.ranks.world > 1 and name.startswith("monai_") else []
    if over_batch and parts:
        said = f"Dice is computed over a batch, but {' and '.join(parts)} each compute it over their part"
        differs = "the mean of the parts differs from the loss of the whole batch (that of a per-sample loss does not)"
        run.say(f"loss {name}: {said}; {differs}")


def _fits(logits: Tensor, label: Tensor) -> bool:
    """Return whether the kernels take logits and a label: trusted, half or single precision, in one piece."""
    dense = logits.is_contiguous() or logits.is_contiguous(memory_format=torch.channels_last_3d)
    single = logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return trusts(FUSED, logits) and dense and single and label.is_contiguous() and logits[0].numel() < 2**31


def _dice(sums: _Sums) -> Tensor:
    """Return the Dice loss of each class or region; 2 sum(p y) is 2 (voxels - missed)."""
    return sums.squared / (2 * sums.voxels - 2 * sums.missed + sums.squared + _SMOOTH)


def _class_sums(logits: Tensor, label: Tensor) -> _Sums:
    """Sum over the voxels of each sample, [B, K], for any number of classes."""
    log_probability = torch.log_softmax(logits, 1, dtype=torch.promote_types(logits.dtype, torch.float32))
    numbers = torch.arange(logits.shape[1], dtype=torch.uint8, device=logits.device)
    y = (label == numbers.view(1, -1, 1, 1, 1)).to(log_probability.dtype)
    error = log_probability.exp() - y
    right, missed, squared, voxels = map(_sum_voxels, (log_probability * y, error * y, error.square(), y))
    return _Sums(-right, -missed, squared, voxels)


def _error_sums(logits: Tensor, label: Tensor, regions: Sequence[Region]) -> _Sums:
    """Sum over the voxels of each sample, [B, R] of regions, or [B, 2] of two classes, of probabilities p and 1 - p."""
    sums: Tensor = _ErrorSums.apply(logits, label, regions)  # type: ignore[no-untyped-call]
    penalty, missed, extra, squared, voxels = sums.unbind(-1)
    if regions:
        return _Sums(penalty, missed, squared, voxels)
    # One penalty a voxel is shared by both classes; what the foreground has too much, the background misses.
    missed, voxels = torch.cat([extra, missed], 1), torch.cat([label[0].numel() - voxels, voxels], 1)
    return _Sums(penalty.expand(-1, 2) / 2, missed, squared.expand(-1, 2), voxels)


class _ErrorSums(torch.autograd.Function):
    """The sums of `_Sums`, [B, R, 5], of R regions with a logit each, with a derivative that needs one stored tensor.

    Two exclusive classes are one region, the foreground, whose logit is the difference of theirs. Everything follows
    from the error e = p - y: u = |e| is the probability of the wrong answer, and e < 0 says that y is 1.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, label: Tensor, regions: Sequence[Region]) -> Tensor:  # noqa: ANN401
        shape = (len(logits), len(regions) or 1, *logits.shape[2:])
        error = torch.empty(shape, dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
        ctx.samples = 1 if logits.device.type == "cpu" else len(logits)  # on a CPU what stays in its cache
        parts = zip(*(torch.split(each, ctx.samples) for each in (logits, label, error)), strict=True)
        sums = [_forward_part(some, numbers, regions, wrong) for some, numbers, wrong in parts]
        ctx.save_for_backward(error)
        ctx.dtype, ctx.shape = logits.dtype, logits.shape
        ctx.strides = torch.empty_like(logits, device="meta").stride()  # of the gradient, in the same memory format
        ctx.focal = bool(regions)
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


def _forward_part(logits: Tensor, label: Tensor, regions: Sequence[Region], error: Tensor) -> Tensor:
    """Return the sums, [B, R, 5], and fill `error` [B, R, X, Y, Z]; in few passes over memory, reusing what it can."""
    if regions:
        y = torch.stack([region.mask(label[:, 0]) for region in regions], 1).to(error.dtype)
        margin = logits.to(error.dtype).contiguous()
    else:
        y = label.to(error.dtype)
        margin = logits[:, 1:] - logits[:, :1].to(error.dtype)
    voxels = _sum_voxels(y)
    sign = y.mul(2).sub_(1)
    log_right = torch.nn.functional.logsigmoid(margin.mul(sign))
    wrong = log_right.expm1().neg_()  # u, precise also where it is tiny
    torch.mul(wrong, sign.neg_(), out=error)
    both, missed = _sum_voxels(wrong), _sum_voxels(y.mul_(wrong))
    square = wrong.square_()
    penalty = -_sum_voxels(log_right.mul_(square) if regions else log_right)
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


def _sum_voxels(values: Tensor) -> Tensor:
    return values.sum((2, 3, 4))  # pairwise: exact to about 1e-7, unlike dot products and vector norms on the CPU
