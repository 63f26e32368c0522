import copy

import pytest
import torch
from torch import nn

from common.inference.upsampling import SubpixelUpsampling, fits, use_subpixel_upsampling
from models.unet3d import unet3d


def transposed(coarse: int, fine: int, bias: bool = True) -> nn.ConvTranspose3d:
    torch.manual_seed(fine)
    return nn.ConvTranspose3d(coarse, fine, 3, stride=2, padding=1, output_padding=1, bias=bias)


@pytest.mark.parametrize("fine", [1, 2, 3, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
def test_it_computes_what_the_transposed_convolution_does(fine, bias, layout):
    ours, theirs = SubpixelUpsampling(transposed(5, fine, bias)), transposed(5, fine, bias)
    image = torch.randn(2, 5, 3, 4, 1).contiguous(memory_format=layout)
    with torch.no_grad():
        found, expected = ours(image), theirs(image)
    assert found.shape == expected.shape == (2, fine, 6, 8, 2)
    assert torch.allclose(found, expected, atol=1e-6)


def test_one_voxel_lands_in_its_eight_places():
    """By hand: fine voxel 2 i is tap 1 of coarse voxel i; 2 i + 1 is its tap 2, and tap 0 of the voxel after it."""
    layer = transposed(1, 1, bias=False)
    image = torch.zeros(1, 1, 2, 1, 1)
    image[0, 0, 1] = 1
    kernel = layer.weight[0, 0, :, 1, 1]
    found = SubpixelUpsampling(layer)(image)[0, 0, :, 0, 0]
    assert torch.equal(found, torch.stack([torch.zeros(()), kernel[0], kernel[1], kernel[2]]))


def test_of_a_unet_the_last_layer_is_replaced_and_the_logits_stay():
    torch.manual_seed(0)
    network = unet3d(1, 2, (4, 8, 16)).eval()
    windows = torch.rand(2, 1, 16, 16, 16)
    changed = use_subpixel_upsampling(copy.deepcopy(network))
    assert sum(isinstance(module, SubpixelUpsampling) for module in changed.modules()) == 2  # to 2 and to 4 channels
    assert not any(isinstance(module, nn.ConvTranspose3d) for module in changed.modules())
    with torch.no_grad():
        assert torch.allclose(changed(windows), network(windows), atol=1e-5)


@pytest.mark.parametrize(
    "other",
    [
        nn.ConvTranspose3d(8, 5, 3, 2, 1, 1),  # too many channels
        nn.ConvTranspose3d(8, 2, 2, 2),
        nn.ConvTranspose3d(8, 2, 3, 2, 1, 0),
        nn.ConvTranspose3d(8, 2, 3, 2, 1, 1, groups=2),
        nn.ConvTranspose3d(8, 2, 3, 2, 1, 1, dilation=2),
        nn.Conv3d(8, 2, 3),
    ],
)
def test_what_it_does_not_compute_is_left_alone(other):
    network = nn.Sequential(other)
    assert not fits(other)
    assert list(use_subpixel_upsampling(network).children()) == [other]
