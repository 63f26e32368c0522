"""The SegResNet of the BraTS recipes."""

import pytest
import torch
import torch.nn.functional as F
from monai.networks.nets import SegResNet

from medspeed.common.kernels.doubling import HalfDoubling
from medspeed.models.segresnet3d import segresnet3d
from tests.models.against_monai import both, check_to_the_bit


def test_parameters_are_those_of_the_tutorials_network():
    tutorial = SegResNet(blocks_down=[1, 2, 2, 4], blocks_up=[1, 1, 1], init_filters=16, in_channels=4, out_channels=3)
    shapes = {name: value.shape for name, value in tutorial.state_dict().items()}
    assert {name: value.shape for name, value in segresnet3d(4, 3).state_dict().items()} == shapes


@pytest.mark.parametrize("filters", [8, 16])
def test_shapes(filters):
    network = segresnet3d(4, 3, filters, (1, 2, 2))
    assert network(torch.zeros(1, 4, 16, 24, 8)).shape == (1, 3, 16, 24, 8)


def test_samples_do_not_mix():
    network = segresnet3d(1, 2, 8, (1, 1))
    image = torch.randn(2, 1, 8, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(network(image)[1:], network(image[1:]), atol=1e-5)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d], ids=["contiguous", "last"])
@pytest.mark.parametrize(
    ("inputs", "outputs", "filters", "blocks", "dropout"),
    [(1, 2, 8, (1, 1), 0.0), (4, 3, 16, (1, 2, 2), 0.2), (2, 1, 24, (2,), 0.5), (4, 3, 8, (1, 2, 2, 4), 0.0)],
)
def test_it_is_monais_segresnet(inputs, outputs, filters, blocks, dropout, layout):
    given = {"blocks_down": blocks, "blocks_up": (1,) * (len(blocks) - 1), "init_filters": filters}
    mine, other = both(
        lambda: segresnet3d(inputs, outputs, filters, blocks, dropout),
        lambda: SegResNet(in_channels=inputs, out_channels=outputs, dropout_prob=dropout or None, **given),
    )
    check_to_the_bit(mine, other, torch.randn(2, inputs, 16, 8, 24), layout)


def test_doubling_in_half_precision_rounds_once():
    """Values are those of float32, rounded; the gradient's sums are taken in float32."""
    image = torch.randn(2, 3, 4, 5, 6).bfloat16().requires_grad_()
    wide = image.detach().float().requires_grad_()
    gradient = torch.randn(2, 3, 8, 10, 12).bfloat16()
    found = HalfDoubling.apply(image)
    expected = F.interpolate(wide, scale_factor=2, mode="trilinear", align_corners=False)
    found.backward(gradient)
    expected.backward(gradient.float())
    assert torch.allclose(found.float(), expected, rtol=2**-8, atol=1e-6)
    assert image.grad is not None
    assert wide.grad is not None
    assert torch.equal(image.grad, wide.grad.bfloat16())
