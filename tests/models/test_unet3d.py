import pytest
import torch

from models.unet3d import unet3d


@pytest.mark.parametrize(("channels", "classes"), [((4, 8), 2), ((4, 8, 16), 3)])
def test_logits_have_the_shape_of_the_image(channels, classes):
    network = unet3d(1, classes, channels, 1).eval()
    assert network(torch.zeros(2, 1, 16, 16, 8)).shape == (2, classes, 16, 16, 8)


def test_the_guides_network_has_the_guides_size():
    # The spleen_ct_segmentation bundle's network: 16 to 256 channels, two residual units.
    parameters = sum(value.numel() for value in unet3d(1, 2).parameters())
    assert parameters == 4_808_917


def test_multi_channel_input():
    assert unet3d(4, 2, (4, 8), 1).eval()(torch.zeros(1, 4, 8, 8, 8)).shape == (1, 2, 8, 8, 8)
