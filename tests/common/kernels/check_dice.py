"""The kernels of the losses against their twins; run by `test_dice.py` with Triton's interpreter."""

from dataclasses import dataclass

import pytest
import torch

from medspeed.common.inference.labels import Region
from medspeed.common.kernels import dice_triton
from medspeed.common.kernels.dice_triton import loss_gradient, loss_of_parts, loss_parts
from medspeed.common.ranks import Ranks
from medspeed.common.training import losses
from medspeed.common.training.losses import soft_dice

REGIONS = (Region("TC", (2, 3), 2), Region("WT", (1, 2, 3), 1), Region("ET", (3,), 3))
LAYOUTS = [torch.contiguous_format, torch.channels_last_3d]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dice_triton._STEPS = 2  # in this process alone: of more, most find no voxels here


@pytest.fixture
def both(monkeypatch):
    """Return what computes a loss and its gradient by the kernels, which must have run, and by the twin in float64."""

    def both(loss, logits, label):
        calls = []
        twin = value_and_gradient(loss, logits.detach().double(), label)
        monkeypatch.setattr(losses, "trusts", lambda name, tensor: not calls.append(name))  # type: ignore[func-returns-value]
        mine = value_and_gradient(loss, logits, label)
        assert calls == ["loss"]
        monkeypatch.undo()
        return *mine, *twin

    return both


@pytest.fixture
def fused(both):
    """Return what checks that the kernels give what the twin does, in the dtype and layout of the logits."""

    def check(loss, logits, label):
        value, gradient, expected, expected_gradient = both(loss, logits, label)
        assert value.item() == pytest.approx(expected.item(), rel=2e-6)
        assert (gradient.dtype, gradient.stride()) == (logits.dtype, logits.stride())
        slack = max(4e-6, torch.finfo(logits.dtype).eps) * expected_gradient.abs().max()
        assert (gradient.double() - expected_gradient).abs().max() <= slack

    return check


def value_and_gradient(loss, logits, label):
    wanted = logits.detach().requires_grad_()
    value = loss(wanted, label)
    (gradient,) = torch.autograd.grad(value * label.numel(), wanted)
    return value, gradient


def example(channels, classes, dtype=torch.float32, layout=torch.contiguous_format, scale=3.0, size=(9, 8, 7)):
    generator = torch.Generator().manual_seed(channels)
    logits = scale * torch.randn(2, channels, *size, generator=generator)
    label = torch.randint(classes, (2, 1, *size), generator=generator, dtype=torch.uint8)
    return logits.to(dtype).contiguous(memory_format=layout), label


@pytest.mark.parametrize("layout", LAYOUTS, ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [2, 3])
def test_classes(fused, classes, dtype, layout):
    logits, label = example(classes, classes, dtype, layout)
    fused(soft_dice, logits, label)


def test_many_classes_over_many_programs(fused):
    logits, label = example(21, 21, size=(9, 11, 13))  # 81 blocks of 16 voxels, 41 programs
    assert loss_parts(logits, label, []).shape == (4, 2, 41, 21)  # more rows than are added up at a time, 64
    fused(soft_dice, logits, label)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [True, False])
def test_regions(fused, dtype, layout, batch):
    logits, label = example(3, 4, dtype, layout)
    fused(lambda x, y: soft_dice(x, y, REGIONS, batch=batch), logits, label)


def test_one_region(fused):
    logits, label = example(1, 4, size=(5, 3, 1))
    fused(lambda x, y: soft_dice(x, y, REGIONS[:1]), logits, label)


@pytest.mark.parametrize("scale", [30.0, 300.0])
@pytest.mark.parametrize("classes", [2, 3])
def test_certain_logits_right_and_wrong(fused, classes, scale):
    logits, label = example(classes, classes, scale=scale)
    fused(soft_dice, logits, label)
    logits, label = example(3, 4, scale=scale)
    fused(lambda x, y: soft_dice(x, y, REGIONS), logits, label)


@pytest.mark.parametrize("classes", [2, 3])
def test_nothing_cancels_where_all_is_nearly_right(both, classes):
    _, label = example(classes, classes)
    logits = torch.full((2, classes, 9, 8, 7), -8.0).scatter_(1, label.long(), 8.0)
    value, gradient, expected, expected_gradient = both(soft_dice, logits, label)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(gradient.double(), expected_gradient, rtol=1e-4, atol=0)


@pytest.mark.parametrize("number", [0, 1])
def test_a_label_of_one_class_only(fused, number):
    logits, _ = example(2, 2)
    fused(soft_dice, logits, torch.full((2, 1, 9, 8, 7), number, dtype=torch.uint8))


@dataclass(frozen=True)
class Twice(Ranks):
    """Stands for two ranks that have the same part of a batch."""

    world: int = 2

    def sum(self, tensor):
        return tensor.detach() + self.world * tensor - (self.world - 1) * tensor.detach()


@pytest.mark.parametrize("batch", [True, False])
def test_a_batch_shared_by_ranks(fused, batch):
    logits, label = example(3, 4)
    fused(lambda x, y: soft_dice(x, y, REGIONS, batch=batch, ranks=Twice()), logits, label)
    fused(lambda x, y: soft_dice(x, y, ranks=Twice()), *example(3, 3))


def test_what_the_kernels_cannot_take_is_left_to_the_twin(monkeypatch):
    monkeypatch.setattr(losses, "trusts", lambda name, tensor: True)
    logits, label = example(2, 2)
    assert losses._fits(logits, label)
    assert not losses._fits(logits.double(), label)
    assert not losses._fits(logits[..., 1:], label[..., 1:].contiguous())
    assert not losses._fits(logits, label.transpose(2, 3))


@pytest.mark.parametrize("members", [[], [2, 3, 257, 258, 259, 515]])
def test_operators_are_what_they_tell_the_compiler(members):
    logits, label = example(3, 4, torch.bfloat16, torch.channels_last_3d)
    parts = loss_parts(logits, label, members)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(loss_parts, (logits, label, members), test_utils=checks)
    torch.library.opcheck(loss_gradient, (logits, label, parts[:, :, 0], torch.ones(()), members), test_utils=checks)
    torch.library.opcheck(loss_of_parts, (parts, True, 0.1, 1e-5), test_utils=checks)
