"""Losses of regions that may overlap: logits [B, R, X, Y, Z], one sigmoid each, and class numbers [B, 1, X, Y, Z]."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from monai.losses import DiceFocalLoss, DiceLoss
from torch import Tensor

from common.inference.labelling import Region
from common.training.distributed import SINGLE, Ranks
from common.training.losses import Loss, mean_over_ranks

_GAMMA = 2  # of the focal loss; its derivative below is written for it
_LEAST = 1e-30  # probability of the right class below which its logarithm no longer counts

RegionLossName = Literal["dice_focal", "dice_focal_per_sample", "monai_dice_focal", "monai_dice"]


def dice_focal(
    logits: Tensor,
    label: Tensor,
    regions: Sequence[Region],
    *,
    batch: bool = True,
    smooth: float = 1e-5,
    ranks: Ranks = SINGLE,
) -> Tensor:
    """Return soft Dice loss plus focal loss, equal to MONAI's `DiceFocalLoss(sigmoid=True, squared_pred=True, ...)`.

    The regions' masks are made from the class numbers here, on the device. It never waits for the device.

    Args:
        logits: [B, R, X, Y, Z], any floating dtype (computed in float32, or float64 if given that), any memory format.
        label: [B, 1, X, Y, Z] uint8 class numbers.
        regions: R structures, each made of one class or of several.
        batch: take Dice over the whole batch as if it were one volume, else for each sample, then the mean.
        smooth: added to numerator and denominator of Dice.
        ranks: those that share a batch; the loss is that of their batches as one, the same on each of them.

    Returns:
        The loss, a scalar tensor: Dice's part in [0, 1], the focal part at least 0.

    Source:
        Milletari et al., "V-Net", 3DV 2016 (squared Dice); Lin et al., "Focal loss", ICCV 2017 (gamma 2, no alpha).
    """
    assert logits.shape[1] == len(regions), f"logits {logits.shape}, {len(regions)} regions"
    assert label.shape == (len(logits), 1, *logits.shape[2:]), f"logits {logits.shape}, label {label.shape}"
    sums: Tensor = _RegionSums.apply(logits, label, regions)  # type: ignore[no-untyped-call]
    focal, parts = sums[..., 0].sum() / (logits.numel() * ranks.world), sums[..., 1:]
    if batch:
        parts = parts.sum(0, keepdim=True)
        together = ranks.sum(torch.cat([focal.view(1), parts.flatten()]))  # one message
        focal, parts = together[0], together[1:].view_as(parts)
    missed, squared, voxels = parts.unbind(-1)
    dice = (squared / (2 * voxels - 2 * missed + squared + smooth)).mean()
    return dice + focal if batch else ranks.sum(dice / ranks.world + focal)


class _RegionSums(torch.autograd.Function):
    """What the losses need of each sample and region, [B, R, 4], with a derivative that needs one stored tensor.

    With p the probability of a region and y 1 inside it, all follows from e = p - y: u = |e| is the probability of the
    wrong answer. The sums over the voxels are those of -u^2 log(1 - u) (focal), y u (what is missed), u^2, and y.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, label: Tensor, regions: Sequence[Region]) -> Tensor:  # noqa: ANN401
        error = torch.empty(logits.shape, dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
        ctx.samples = 1 if logits.device.type == "cpu" else len(logits)  # on a CPU what stays in its cache
        parts = zip(*(torch.split(each, ctx.samples) for each in (logits, label[:, 0], error)), strict=True)
        sums = [_forward_part(some, regions, right, wrong) for some, right, wrong in parts]
        ctx.save_for_backward(error)
        ctx.layout = torch.empty_like(logits, device="meta")  # dtype and memory format for the gradient, no memory
        return torch.cat(sums)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        (error,) = ctx.saved_tensors
        gradient = torch.empty_like(ctx.layout, device=error.device)
        parts = zip(*(torch.split(each, ctx.samples) for each in (error, weights, gradient)), strict=True)
        for some, weight, result in parts:
            result.copy_(_backward_part(some, weight))
        return gradient, None, None


def _forward_part(logits: Tensor, regions: Sequence[Region], label: Tensor, error: Tensor) -> Tensor:
    """Return the sums, [B, R, 4], and fill `error` [B, R, X, Y, Z]; in few passes over memory."""
    y = torch.stack([region.mask(label) for region in regions], 1).to(error.dtype)
    voxels = _sum_voxels(y)
    sign = y.mul(2).sub_(1)
    log_right = torch.nn.functional.logsigmoid(logits.to(error.dtype).contiguous().mul(sign))
    wrong = log_right.expm1().neg_()  # u, precise also where it is tiny
    torch.mul(wrong, sign.neg_(), out=error)
    missed = _sum_voxels(y.mul_(wrong))
    square = wrong.square_()
    squared = _sum_voxels(square)
    focal = -_sum_voxels(log_right.mul_(square))
    return torch.stack([focal, missed, squared, voxels], -1)


def _backward_part(error: Tensor, weights: Tensor) -> Tensor:
    """Return the gradient of the logits, [B, R, X, Y, Z], from the weights of the sums, [B, R, 4].

    With u = |e| and x the logit: de/dx = u (1 - u); d(focal)/dx = e u (u - 2 (1 - u) log(1 - u)); d(u^2)/dx =
    2 e u (1 - u); what is missed grows by -u (1 - u) where e < 0, which is u (e - u) (1 - u) / 2u.
    """
    focal, missed, squared, _ = weights[:, :, None, None, None].unbind(-1)
    wrong = error.abs()
    right = 1 - wrong
    slope = torch.addcmul(missed / 2, wrong, 2 * squared).mul_(error).addcmul_(wrong, -missed / 2).mul_(right)
    penalty = right.clamp(min=_LEAST).log_().mul_(right).mul_(-_GAMMA).add_(wrong).mul_(wrong).mul_(error)
    return slope.addcmul_(penalty, focal)


def _sum_voxels(values: Tensor) -> Tensor:
    return values.sum((2, 3, 4))  # pairwise: exact to about 1e-7, unlike dot products and vector norms on the CPU


# MONAI's own, as the guides use them; computed in float32 whatever the network's precision.
_MONAI: dict[RegionLossName, Callable[[Tensor, Tensor], Tensor]] = {
    "monai_dice_focal": DiceFocalLoss(
        sigmoid=True, squared_pred=True, batch=True, smooth_nr=1e-5, smooth_dr=1e-5, gamma=_GAMMA
    ),
    "monai_dice": DiceLoss(sigmoid=True, squared_pred=True, smooth_nr=0, smooth_dr=1e-5),
}


def build_region_loss(name: RegionLossName, regions: Sequence[Region], ranks: Ranks = SINGLE) -> Loss:
    """Return a loss that is the same number on all ranks; MONAI's are the mean of what each rank has by itself."""
    if name in ("dice_focal", "dice_focal_per_sample"):
        return partial(dice_focal, regions=regions, batch=name == "dice_focal", ranks=ranks)

    def monai(logits: Tensor, label: Tensor) -> Tensor:
        masks = torch.stack([region.mask(label[:, 0]) for region in regions], 1)
        return _MONAI[name](logits.float(), masks.float())

    return mean_over_ranks(monai, ranks)
