import pytest
import torch
from monai.networks.nets import UNet

from medspeed.models.unet3d import unet3d
from tests.models.against_monai import both, train_both


@pytest.mark.parametrize(("channels", "classes"), [((4, 8), 2), ((4, 8, 16), 3)])
def test_logits_have_the_shape_of_the_image(channels, classes):
    network = unet3d(1, classes, channels, 1).eval()
    assert network(torch.zeros(2, 1, 16, 16, 8)).shape == (2, classes, 16, 16, 8)


def test_the_guides_network_has_the_guides_size():
    # The spleen_ct_segmentation bundle's network: 16 to 256 channels, two residual units.
    parameters = sum(value.numel() for value in unet3d(1, 2).parameters())
    assert parameters == 4_808_917


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d], ids=["contiguous", "last"])
@pytest.mark.parametrize(
    ("inputs", "outputs", "channels", "units"),
    [(1, 2, (4, 8), 1), (4, 3, (4, 8, 16), 2), (1, 2, (2, 2, 6, 6), 3), (2, 1, (16, 8, 4), 2)],
)
def test_it_is_monais_unet(inputs, outputs, channels, units, layout):
    strides = (2,) * (len(channels) - 1)
    mine, other = both(
        lambda: unet3d(inputs, outputs, channels, units),
        lambda: UNet(3, inputs, outputs, channels, strides, num_res_units=units, norm="batch"),
    )
    image = torch.randn(2, inputs, 16, 32, 16).contiguous(memory_format=layout)
    for network in (mine, other):
        network.to(memory_format=layout)  # type: ignore[call-overload]
    assert torch.equal(mine.eval()(image), other.eval()(image))
    assert torch.allclose(*train_both(mine, other, image), rtol=0, atol=1e-4)
    for (name, value), expected in zip(mine.named_parameters(), other.parameters(), strict=True):
        assert expected.grad is not None
        if value.grad is None:  # its sum over a batch is taken out again: nothing but rounding is left
            assert name.endswith("conv.bias")
            assert not value.requires_grad
        else:
            assert (value.grad - expected.grad).abs().max() <= 1e-3 * expected.grad.abs().max() + 1e-4, name
    for name, value in mine.state_dict().items():
        assert torch.allclose(value, other.state_dict()[name], atol=1e-5), name  # running means hold the biases
    other.load_state_dict(mine.state_dict())
    assert torch.equal(mine.eval()(image), other.eval()(image))


def test_biases_before_a_norm_are_not_computed_in_training():
    """However large they are, logits of training keep each bit; in evaluation they count, and the mean makes up."""
    plain, biased = unet3d(1, 2, (4, 8), 2), unet3d(1, 2, (4, 8), 2)
    biased.load_state_dict(plain.state_dict())
    frozen = [value for value in biased.parameters() if not value.requires_grad]
    assert len(frozen) == 5
    for value in frozen:
        value.add_(5)
    image = torch.randn(2, 1, 8, 8, 8)
    for _ in range(200):  # until what the running means began with is forgotten
        with torch.no_grad():
            assert torch.equal(plain(image), biased(image))
    assert torch.allclose(plain.eval()(image), biased.eval()(image), atol=1e-3)
