"""The region loss by hand, against MONAI, and by its gradient."""

import pytest
import torch
from monai.losses import DiceFocalLoss

from common.inference.labelling import Region
from common.training.region_losses import build_region_loss, dice_focal
from tests.support import refuse_host_sync

REGIONS = (Region("TC", (2, 3), 2), Region("WT", (1, 2, 3), 1), Region("ET", (3,), 3))


def drawn(seed: int = 0, scale: float = 4.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(2, 3, 5, 6, 7, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), torch.randint(0, 4, (2, 1, 5, 6, 7), generator=generator, dtype=torch.uint8)


def masks(label: torch.Tensor) -> torch.Tensor:
    return torch.stack([region.mask(label[:, 0]) for region in REGIONS], 1).double()


def test_one_voxel_by_hand():
    # p = 1/2 in both regions; y = 1 in the first: squared 1/4 each, sum p^2 1/4 each, sum y 1 and 0.
    two = (Region("a", (1,), 1), Region("b", (2,), 2))
    loss = dice_focal(torch.zeros(1, 2, 1, 1, 1), torch.ones(1, 1, 1, 1, 1, dtype=torch.uint8), two, smooth=0.0)
    dice = (0.25 / 1.25 + 0.25 / 0.25) / 2
    assert loss.item() == pytest.approx(dice + 0.25 * 0.6931472, rel=1e-6)


@pytest.mark.parametrize("batch", [True, False])
def test_value_and_gradient_are_monais(batch):
    logits, label = drawn()
    monai = DiceFocalLoss(sigmoid=True, squared_pred=True, batch=batch, smooth_nr=1e-5, smooth_dr=1e-5, gamma=2)
    ours, theirs = dice_focal(logits, label, REGIONS, batch=batch), monai(logits, masks(label))
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-7)  # MONAI's focal part is float32
    (one,), (other,) = torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits)
    assert (one - other).abs().max() < 1e-8
    assert torch.autograd.gradcheck(lambda z: dice_focal(z, label, REGIONS, batch=batch), (logits,))


def test_the_gradient_keeps_the_memory_format():
    logits, label = drawn()
    inner = logits.detach().float().contiguous(memory_format=torch.channels_last_3d).requires_grad_()
    dice_focal(inner, label, REGIONS).backward()
    assert inner.grad is not None
    assert inner.grad.is_contiguous(memory_format=torch.channels_last_3d)


@pytest.mark.parametrize("sign", [-1, 1])
def test_certain_answers_have_finite_losses_and_gradients(sign):
    _, label = drawn()
    logits = torch.full((2, 3, 5, 6, 7), sign * 90.0, requires_grad=True)
    loss = dice_focal(logits, label, REGIONS)
    loss.backward()
    assert loss.isfinite()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_it_never_waits_for_the_device():
    logits, label = drawn()
    with refuse_host_sync():
        dice_focal(logits, label, REGIONS).backward()


def test_a_batch_is_one_volume_or_several():
    logits, label = drawn()
    whole = dice_focal(logits, label, REGIONS)
    parts = [dice_focal(logits[row : row + 1], label[row : row + 1], REGIONS) for row in range(2)]
    each = dice_focal(logits, label, REGIONS, batch=False)
    assert each.item() == pytest.approx(sum(part.item() for part in parts) / 2)
    assert abs(whole.item() - each.item()) > 1e-6


@pytest.mark.parametrize("name", ["dice_focal", "dice_focal_per_sample", "monai_dice_focal", "monai_dice"])
def test_each_name_is_a_loss_that_falls(name):
    logits, label = drawn()
    loss = build_region_loss(name, REGIONS)
    better = (2 * masks(label) - 1) * 6
    assert loss(better, label) < loss(logits, label)


def test_ours_and_monais_names_agree():
    logits, label = drawn()
    ours = build_region_loss("dice_focal", REGIONS)(logits, label)
    assert ours.item() == pytest.approx(build_region_loss("monai_dice_focal", REGIONS)(logits, label).item(), abs=1e-5)
