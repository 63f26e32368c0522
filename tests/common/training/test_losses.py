import math
from collections.abc import Callable

import monai.losses
import pytest
import torch

from medspeed.common.inference.labels import Region
from medspeed.common.training.losses import build_loss, soft_dice
from tests.support import refuse_host_sync

REGIONS = (Region("TC", (2, 3), 2), Region("WT", (1, 2, 3), 1), Region("ET", (3,), 3))
FORMATS = [torch.contiguous_format, torch.channels_last_3d]


def example(
    classes: int,
    *,
    samples: int = 3,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
    foreground: float = 0.3,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random logits [B, K, 9, 8, 7] that lean towards a random label [B, 1, 9, 8, 7]."""
    generator = torch.Generator().manual_seed(classes)
    shape = (samples, 1, 9, 8, 7)
    label = torch.randint(1, classes, shape, generator=generator)
    label = torch.where(torch.rand(shape, generator=generator) < foreground, label, 0)
    logits = 2 * torch.randn(samples, classes, 9, 8, 7, generator=generator)
    logits.scatter_add_(1, label, torch.ones(shape))
    logits = logits.to(dtype).contiguous(memory_format=memory_format)
    return logits.requires_grad_(), label.to(torch.uint8)


def value_and_gradient(loss, logits: torch.Tensor, label: torch.Tensor) -> tuple[float, torch.Tensor]:
    value = loss(logits, label)
    (gradient,) = torch.autograd.grad(value, logits)
    assert value.shape == ()
    return value.item(), gradient


def monais() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    loss = monai.losses.DiceCELoss(to_onehot_y=True, softmax=True, squared_pred=True, batch=True)
    return loss


@pytest.mark.parametrize("memory_format", FORMATS, ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("classes", [2, 3, 4])
def test_value_and_gradient_equal_monais(classes, memory_format):
    logits, label = example(classes, memory_format=memory_format)
    value, gradient = value_and_gradient(soft_dice, logits, label)
    exact = logits.detach().double().requires_grad_()
    expected, expected_gradient = value_and_gradient(monais(), exact, label)
    in_float32 = value_and_gradient(monais(), logits, label)[0]
    assert value == pytest.approx(expected, rel=1e-6)
    assert value == pytest.approx(in_float32, rel=1e-6)
    assert (gradient - expected_gradient).abs().max() < 1e-5 * expected_gradient.abs().max()
    if classes == 2:
        assert gradient.stride() == logits.stride()


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_computed_in_float32(dtype, classes):
    logits, label = example(classes, dtype=dtype, memory_format=torch.channels_last_3d)
    value, gradient = value_and_gradient(soft_dice, logits, label)
    expected, expected_gradient = value_and_gradient(monais(), logits.detach().float().requires_grad_(), label)
    assert value == pytest.approx(expected, rel=1e-6)
    assert gradient.dtype == dtype
    if classes == 2:
        assert gradient.stride() == logits.stride()
    assert torch.allclose(gradient.float(), expected_gradient, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_large_volumes_stay_exact():
    # MONAI's vector norms, summed in float32, are off by 1e-4 here: so the answer comes from float64.
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 2, 96, 96, 96, generator=generator)
    label = (torch.rand(1, 1, 96, 96, 96, generator=generator) < 0.05).to(torch.uint8)
    expected = monais()(logits.double(), label).item()
    assert soft_dice(logits, label).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("classes", [2, 3])
def test_gradient_against_finite_differences(classes):
    logits = torch.randn(2, classes, 2, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    label = torch.randint(classes, (2, 1, 2, 3, 2), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    torch.autograd.gradcheck(lambda x: soft_dice(x, label), logits.requires_grad_())


def test_by_hand():
    # One voxel of each class, both with probability 1/2: cross entropy log 2; for each class sum (p - y)^2 = 1/2,
    # sum p^2 = 1/2, sum y = 1: Dice loss 1/3.
    label = torch.tensor([0, 1], dtype=torch.uint8).view(1, 1, 2, 1, 1)
    loss = soft_dice(torch.zeros(1, 2, 2, 1, 1), label)
    assert loss.item() == pytest.approx(1 / 3 + math.log(2), rel=1e-5)


@pytest.mark.parametrize("classes", [2, 3])
def test_perfect_prediction_costs_nothing(classes):
    _, label = example(classes)
    logits = torch.full((3, classes, 9, 8, 7), -10.0).scatter_(1, label.long(), 10.0)
    # Each voxel gives u = (K - 1) e^-20 to the cross entropy, and far less (u^2) to Dice.
    assert soft_dice(logits, label).item() == pytest.approx((classes - 1) * math.exp(-20), abs=1e-7)


@pytest.mark.parametrize("classes", [2, 3])
def test_confidently_wrong_logits_stay_finite(classes):
    _, label = example(classes)
    logits = torch.full((3, classes, 9, 8, 7), 100.0).scatter_(1, label.long(), -100.0).requires_grad_()
    value, gradient = value_and_gradient(soft_dice, logits, label)
    assert value == pytest.approx(monais()(logits, label).item(), rel=1e-6)
    assert value > 200
    assert gradient.isfinite().all()


@pytest.mark.parametrize("classes", [2, 3])
def test_order_of_samples_does_not_matter(classes):
    logits, label = example(classes)
    order = torch.tensor([2, 0, 1])
    one, other = (soft_dice(x, y) for x, y in ((logits, label), (logits[order], label[order])))
    assert one.item() == pytest.approx(other.item(), rel=1e-6)


@pytest.mark.parametrize("number", [0, 1])
def test_label_of_one_class_only_equals_monais(number):
    logits, _ = example(2)
    label = torch.full((3, 1, 9, 8, 7), number, dtype=torch.uint8)
    value, gradient = value_and_gradient(soft_dice, logits, label)
    expected, expected_gradient = value_and_gradient(monais(), logits.detach().double().requires_grad_(), label)
    assert value == pytest.approx(expected, rel=1e-6)
    assert (gradient - expected_gradient).abs().max() < 1e-5 * expected_gradient.abs().max()


def test_crops_of_a_larger_tensor_need_no_copy():
    logits, label = example(2)
    whole, crop = (slice(None), slice(None)), (slice(1, 7), slice(2, 8), slice(0, 5))
    value, gradient = value_and_gradient(lambda x, y: soft_dice(x[*whole, *crop], y[*whole, *crop]), logits, label)
    expected = value_and_gradient(monais(), logits[*whole, *crop].detach().requires_grad_(), label[*whole, *crop])
    assert value == pytest.approx(expected[0], rel=1e-6)
    assert torch.allclose(gradient[*whole, *crop], expected[1], atol=1e-7)


@pytest.mark.parametrize("classes", [2, 3])
def test_dice_ce_never_waits_for_the_device(classes):
    logits, label = example(classes)
    with refuse_host_sync():
        torch.autograd.grad(soft_dice(logits, label), logits)


@pytest.mark.gpu
@pytest.mark.parametrize("classes", [2, 3])
def test_dice_ce_on_the_gpu_equals_the_cpu_and_never_waits(classes):
    logits, label = example(classes, memory_format=torch.channels_last_3d)
    there, label_there = logits.detach().cuda().requires_grad_(), label.cuda()
    value_and_gradient(soft_dice, there, label_there)
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = soft_dice(there, label_there)
        (gradient,) = torch.autograd.grad(loss, there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected, expected_gradient = value_and_gradient(soft_dice, logits, label)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert torch.allclose(gradient.cpu(), expected_gradient, atol=1e-8)


def test_logits_and_label_are_left_untouched():
    logits, label = example(2)
    before = logits.detach().clone(), label.clone()
    value_and_gradient(soft_dice, logits, label)
    assert torch.equal(logits, before[0])
    assert torch.equal(label, before[1])


def test_wrong_shapes_are_a_programmers_error():
    logits, label = example(2)
    with pytest.raises(AssertionError, match="1 channel: background and foreground"):
        soft_dice(logits[:, :1], label)
    with pytest.raises(AssertionError, match="label"):
        soft_dice(logits, label[:, 0])


def test_losses_by_name():
    logits, label = example(3)
    assert torch.equal(build_loss("dice_ce")(logits, label), soft_dice(logits, label))
    expected = monai.losses.DiceLoss(to_onehot_y=True, softmax=True)(logits, label)
    assert torch.equal(build_loss("monai_dice")(logits, label), expected)
    guide = monai.losses.DiceCELoss(to_onehot_y=True, softmax=True, squared_pred=True, batch=True)(logits, label)
    assert torch.equal(build_loss("monai_dice_ce")(logits, label), guide)
    dice = monai.losses.DiceLoss(to_onehot_y=True, softmax=True, squared_pred=True, batch=True)(logits, label)
    focal = monai.losses.FocalLoss(to_onehot_y=True)(logits, label)  # MONAI joins it to Dice with its sigmoid
    assert torch.equal(build_loss("monai_dice_focal")(logits, label), dice + focal)


def drawn(seed: int = 0, scale: float = 4.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(2, 3, 5, 6, 7, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), torch.randint(0, 4, (2, 1, 5, 6, 7), generator=generator, dtype=torch.uint8)


def masks(label: torch.Tensor) -> torch.Tensor:
    return torch.stack([region.mask(label[:, 0]) for region in REGIONS], 1).double()


def test_one_voxel_of_two_regions_by_hand():
    # p = 1/2 in both regions; y = 1 in the first: squared 1/4 each, sum p^2 1/4 each, sum y 1 and 0.
    two = (Region("a", (1,), 1), Region("b", (2,), 2))
    loss = soft_dice(torch.zeros(1, 2, 1, 1, 1), torch.ones(1, 1, 1, 1, 1, dtype=torch.uint8), two)
    dice = (0.25 / 1.25 + 0.25 / 0.25) / 2
    assert loss.item() == pytest.approx(dice + 0.25 * 0.6931472, rel=1e-4)


@pytest.mark.parametrize("batch", [True, False])
def test_value_and_gradient_of_regions_are_monais(batch):
    logits, label = drawn()
    reference = monai.losses.DiceFocalLoss(
        sigmoid=True, squared_pred=True, batch=batch, smooth_nr=1e-5, smooth_dr=1e-5, gamma=2
    )
    ours, theirs = soft_dice(logits, label, REGIONS, batch=batch), reference(logits, masks(label))
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-7)  # MONAI's focal part is float32
    (one,), (other,) = torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits)
    assert (one - other).abs().max() < 1e-8
    assert torch.autograd.gradcheck(lambda z: soft_dice(z, label, REGIONS, batch=batch), (logits,))


def test_the_gradient_of_regions_keeps_the_memory_format():
    logits, label = drawn()
    inner = logits.detach().float().contiguous(memory_format=torch.channels_last_3d).requires_grad_()
    soft_dice(inner, label, REGIONS).backward()
    assert inner.grad is not None
    assert inner.grad.is_contiguous(memory_format=torch.channels_last_3d)


@pytest.mark.parametrize("sign", [-1, 1])
def test_certain_answers_have_finite_losses_and_gradients(sign):
    _, label = drawn()
    logits = torch.full((2, 3, 5, 6, 7), sign * 90.0, requires_grad=True)
    loss = soft_dice(logits, label, REGIONS)
    loss.backward()
    assert loss.isfinite()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_the_loss_of_regions_never_waits_for_the_device():
    logits, label = drawn()
    with refuse_host_sync():
        soft_dice(logits, label, REGIONS).backward()


def test_a_batch_is_one_volume_or_several():
    logits, label = drawn()
    whole = soft_dice(logits, label, REGIONS)
    parts = [soft_dice(logits[row : row + 1], label[row : row + 1], REGIONS) for row in range(2)]
    each = soft_dice(logits, label, REGIONS, batch=False)
    assert each.item() == pytest.approx(sum(part.item() for part in parts) / 2)
    assert abs(whole.item() - each.item()) > 1e-6


@pytest.mark.parametrize("name", ["dice_focal", "dice_focal_per_sample", "monai_dice_focal", "monai_dice"])
def test_each_name_is_a_loss_that_falls(name):
    logits, label = drawn()
    loss = build_loss(name, regions=REGIONS)
    better = (2 * masks(label) - 1) * 6
    assert loss(better, label) < loss(logits, label)


def test_ours_and_monais_names_agree():
    logits, label = drawn()
    ours = build_loss("dice_focal", regions=REGIONS)(logits, label)
    assert ours.item() == pytest.approx(build_loss("monai_dice_focal", regions=REGIONS)(logits, label).item(), abs=1e-5)


@pytest.mark.parametrize(("name", "regions"), [("dice_focal", REGIONS), ("dice_ce", ())])
def test_a_per_sample_loss_is_the_mean_of_those_of_the_samples(name, regions):
    logits, label = example(max(len(regions), 4 - len(regions)))
    label = label.clone()
    label[0] = 0  # a sample of background alone weighs as much as others
    per_sample, batch = build_loss(f"{name}_per_sample", regions=regions), build_loss(name, regions=regions)
    due = torch.stack([batch(logits[row : row + 1], label[row : row + 1]) for row in range(3)]).mean()
    torch.testing.assert_close(per_sample(logits, label), due)
    assert abs(batch(logits, label) - due) > 1e-3
