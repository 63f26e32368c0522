import pytest
import torch

from medspeed.common.inference.labels import Region
from medspeed.common.kernels.trust import trusting
from medspeed.common.training.losses import soft_dice
from tests.kernels import run_compiled, run_interpreted

REGIONS = (Region("TC", (2, 3), 2), Region("WT", (1, 2, 3), 1), Region("ET", (3,), 3))
MEMBERS = (2, 3, 257, 258, 259, 515)


@pytest.mark.slow
def test_the_kernels_equal_their_twins():
    run_interpreted("tests/common/kernels/check_dice.py")


@pytest.mark.slow
def test_the_kernels_compile_without_spilling():
    run_compiled("tests/common/kernels/compile_dice.py")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("channels", "loss"), [(2, soft_dice), (5, soft_dice), (3, lambda x, y: soft_dice(x, y, REGIONS))]
)
def test_on_a_gpu_the_kernels_equal_their_twins_and_repeat_to_the_bit(channels, loss, dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (2, channels, 65, 63, 31)
    logits = (3 * torch.randn(shape, generator=generator, device="cuda")).to(dtype)
    logits = logits.contiguous(memory_format=torch.channels_last_3d).requires_grad_()
    label = torch.randint(min(channels, 4), (2, 1, *shape[2:]), generator=generator, device="cuda", dtype=torch.uint8)

    def work():
        value = loss(logits, label)
        return value.detach(), torch.autograd.grad(value * label.numel(), logits)[0]

    expected, expected_gradient = work()
    with trusting("loss"):
        value, gradient = work()
        again, again_gradient = work()
    assert torch.allclose(value, expected, rtol=1e-5)
    slack = max(1e-5, torch.finfo(dtype).eps) * expected_gradient.abs().max()
    assert (gradient - expected_gradient).abs().max() <= slack
    assert torch.equal(value, again)
    assert torch.equal(gradient, again_gradient)
