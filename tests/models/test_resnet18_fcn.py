import pytest
import torch
from monai.networks.nets import ResNet
from torch import nn

from medspeed.models.resnet18_fcn import STRIDE, ResNet18, resnet18_fcn
from tests.models.against_monai import both, check_to_the_bit

RECEPTIVE_FIELD = 435  # pixels of the image, on each axis, that one cell of the last features can see


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    return resnet18_fcn(96).eval()


def test_a_patch_has_one_logit_and_an_image_one_per_stride(network: nn.Module):
    with torch.no_grad():
        assert network(torch.zeros(2, 3, 96, 96)).shape == (2, 1, 1, 1)
        assert network(torch.zeros(1, 3, 96 + 3 * STRIDE, 96 + STRIDE)).shape == (1, 1, 4, 2)


def test_names_and_number_of_weights_are_those_of_torchvision(network: nn.Module):
    """TorchVision's ResNet-18 has 11,689,512 weights, 513,000 of them in its last layer."""
    features = network.features
    assert isinstance(features, nn.Module)
    names = set(features.state_dict())
    assert {"conv1.weight", "bn1.running_var", "layer2.0.downsample.0.weight", "layer4.1.conv2.weight"} <= names
    assert not any(name.startswith("fc.") for name in names)
    assert sum(weight.numel() for weight in features.parameters()) == 11_689_512 - 513_000
    assert "layer2.0.downsample.0.bias" not in names


def test_the_receptive_field_is_what_it_is_said_to_be():
    """The gradient of one cell of the last features reaches that many pixels, on each axis."""
    torch.manual_seed(0)
    network = resnet18_fcn(32).eval()  # its pool is one cell
    image = torch.randn(1, 3, 32 * 25, 32 * 25, requires_grad=True)
    logits = network(image)
    logits[0, 0, 12, 12].backward()
    assert image.grad is not None
    touched = image.grad.abs().sum((0, 1)).nonzero()
    extent = touched.amax(0) - touched.amin(0) + 1
    assert extent.max() <= RECEPTIVE_FIELD
    assert extent.min() > RECEPTIVE_FIELD - 32  # the outermost weights may be near nothing


class MonaiFeatures(ResNet):  # type: ignore[misc]
    """MONAI's ResNet-18 up to its last features."""

    def __init__(self):
        sides = {"spatial_dims": 2, "n_input_channels": 3, "conv1_t_size": 7, "conv1_t_stride": 2}
        super().__init__("basic", [2] * 4, [64, 128, 256, 512], feed_forward=False, bias_downsample=False, **sides)

    def forward(self, x):
        x = self.maxpool(self.act(self.bn1(self.conv1(x))))
        return self.layer4(self.layer3(self.layer2(self.layer1(x))))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "last"])
def test_its_features_are_those_of_monais_resnet(layout):
    mine, other = both(ResNet18, MonaiFeatures)
    check_to_the_bit(mine, other, torch.randn(3, 3, 64, 96), layout)
    for name, value in mine.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
