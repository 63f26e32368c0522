import pytest
import torch
from torch import nn

from models.prelu import FastPReLU, use_fast_prelu
from models.unet3d import unet3d


def gradients(module, x):
    x = x.clone().requires_grad_()
    output = module(x)
    torch.autograd.backward((output * torch.arange(output.numel()).view_as(output)).sum())
    return output, x.grad, module.weight.grad


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
def test_values_and_gradients_are_torchs(layout):
    x = torch.randn(2, 3, 4, 5, 6).contiguous(memory_format=layout)
    x[0, 0, 0, 0, 0] = 0.0
    for ours, theirs in zip(gradients(FastPReLU(init=0.2), x), gradients(nn.PReLU(init=0.2), x), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5)


def test_gradients_in_double_precision():
    module = FastPReLU(init=0.3).double()
    x = torch.randn(2, 2, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, w: torch.func.functional_call(module, {"weight": w}, (x,)), (x, module.weight)
    )


def test_under_bf16_autocast_the_parameter_keeps_its_precision():
    network = nn.Sequential(nn.Conv3d(1, 2, 3), FastPReLU())
    with torch.autocast("cpu", torch.bfloat16):
        output = network(torch.randn(1, 1, 6, 6, 6))
    torch.autograd.backward(output.float().sum())
    assert output.dtype == torch.bfloat16
    gradient = network[1].get_parameter("weight").grad
    assert gradient is not None
    assert gradient.dtype == torch.float32


def test_a_network_keeps_its_parameters_and_its_results():
    plain, fast = unet3d(1, 2, (4, 8), 1), unet3d(1, 2, (4, 8), 1)
    fast.load_state_dict(plain.state_dict())
    use_fast_prelu(fast)
    assert sum(isinstance(module, FastPReLU) for module in fast.modules()) > 0
    assert fast.state_dict().keys() == plain.state_dict().keys()
    x = torch.randn(1, 1, 8, 8, 8)
    assert torch.equal(plain(x), fast(x))


def test_prelu_with_a_slope_per_channel_is_left_alone():
    network = nn.Sequential(nn.PReLU(3))
    use_fast_prelu(network)
    assert type(network[0]) is nn.PReLU
