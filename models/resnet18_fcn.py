"""The fully convolutional ResNet-18 of the MONAI pathology recipes."""

from collections.abc import Sequence

import torch
from monai.networks.nets import ResNet
from monai.networks.nets.resnet import ResNetBlock
from torch import nn

STRIDE = 32
"""Pixels of the image between two neighbouring logits."""
RECEPTIVE_FIELD = 435
"""Pixels of the image, on each axis, that one cell of the last features can see."""
_BLOCKS: Sequence[int] = (2, 2, 2, 2)
_WIDTHS = [64, 128, 256, 512]


class ResNet18FCN(nn.Module):
    """ResNet-18 whose last features are averaged over a patch and judged by a 1x1 convolution.

    Args:
        patch_size: side of the patches it is trained on, in pixels, a multiple of 32.
    """

    def __init__(self, patch_size: int) -> None:
        super().__init__()
        assert patch_size % STRIDE == 0, patch_size
        self.features = ResNet(
            ResNetBlock,
            list(_BLOCKS),
            _WIDTHS,
            spatial_dims=2,
            n_input_channels=3,
            conv1_t_size=7,
            conv1_t_stride=2,
            feed_forward=False,
            bias_downsample=False,
        )
        self.pool = nn.AvgPool2d(patch_size // STRIDE, stride=1)
        self.head = nn.Conv2d(_WIDTHS[-1], 1, kernel_size=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return logits [B, 1, h, w] of images [B, 3, Y, X] in [-1, 1]; of a patch [B, 1, 1, 1].

        Logit (i, j) belongs to the patch whose upper left corner is pixel (32 i, 32 j).
        """
        network = self.features
        x = network.maxpool(network.act(network.bn1(network.conv1(image))))
        x = network.layer4(network.layer3(network.layer2(network.layer1(x))))
        logits: torch.Tensor = self.head(self.pool(x))
        return logits


def resnet18_fcn(patch_size: int = 224) -> ResNet18FCN:
    """Return a fully convolutional ResNet-18 with batch normalisation, its weights drawn by MONAI's rule.

    On a patch it is MONAI's `TorchVisionFCModel("resnet18", num_classes=1, use_conv=True)`; the names of the weights
    below `features` are torchvision's, so that a file of ImageNet weights fits.

    Args:
        patch_size: side of the patches it is trained on, in pixels, a multiple of 32.

    Source:
        He et al., "Deep residual learning for image recognition", CVPR 2016; MONAI tutorials,
        pathology/tumor_detection.
    """
    return ResNet18FCN(patch_size)
