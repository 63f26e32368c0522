"""The fully convolutional ResNet-18 of the MONAI pathology recipes."""

import torch
from torch import nn

from medspeed.common.kernels.folding import Conv2d
from medspeed.common.kernels.norms import RELU, InBlock, batch_norm_relu, fork, norm_trial
from medspeed.common.kernels.pooling import MaxPool
from medspeed.common.kernels.trust import Trial
from medspeed.common.kernels.weights import half_weights

STRIDE = 32  # pixels of the image between two neighbouring logits
_WIDTHS = (64, 128, 256, 512)


class ResidualBlock(nn.Module):
    """Two convolutions with batch normalization and a shortcut, which is a convolution if the shape changes."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        shortcut = None
        if stride > 1:  # drawn first, registered last, as TorchVision and MONAI do
            convolution = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
            shortcut = nn.Sequential(convolution, nn.BatchNorm2d(out_channels))
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.downsample = shortcut

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return [B, out_channels, Y / stride, X / stride] for [B, in_channels, Y, X]."""
        image, beside = fork(image)
        x = self.conv2(batch_norm_relu(self.bn1, self.conv1(image)))
        if self.downsample is not None:
            convolution, norm = self.downsample
            beside = batch_norm_relu(norm, convolution(beside), relu=False)  # type: ignore[arg-type]
        return batch_norm_relu(self.bn2, x, beside)

    def kernel_trial(self, dtype: torch.dtype, device: torch.device) -> Trial:
        """Return the `norm_trial` of the normalisations."""
        return norm_trial(InBlock(self.bn1.num_features), RELU, dtype, device)


class ResNet18(nn.Module):
    """ResNet-18 up to its last features, with TorchVision's weight names and MONAI's initial values."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = Conv2d(3, _WIDTHS[0], 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(_WIDTHS[0])
        self.maxpool = MaxPool()
        before = _WIDTHS[0]
        for number, width in enumerate(_WIDTHS, 1):
            first = ResidualBlock(before, width, 1 if number == 1 else 2)
            self.add_module(f"layer{number}", nn.Sequential(first, ResidualBlock(width, width)))
            before = width
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return the features [B, 512, Y / 32, X / 32] of images [B, 3, Y, X]."""
        x: torch.Tensor = self.maxpool(batch_norm_relu(self.bn1, self.conv1(image)))
        for number in range(1, len(_WIDTHS) + 1):
            x = self.get_submodule(f"layer{number}")(x)
        return x


class ResNet18FCN(nn.Module):
    """ResNet-18 whose last features are averaged over a patch and classified by a 1x1 convolution."""

    def __init__(self, patch_size: int) -> None:
        super().__init__()
        assert patch_size % STRIDE == 0, patch_size
        self.features = ResNet18()
        self.pool = nn.AvgPool2d(patch_size // STRIDE, stride=1)
        self.head = nn.Conv2d(_WIDTHS[-1], 1, kernel_size=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return logits [B, 1, h, w] of images [B, 3, Y, X] in [-1, 1]; of a patch [B, 1, 1, 1].

        Logit (i, j) belongs to the patch whose upper left corner is pixel (32 i, 32 j).
        """
        with half_weights(self):
            return self.head(self.pool(self.features(image)))  # type: ignore[no-any-return]


def resnet18_fcn(patch_size: int = 224) -> ResNet18FCN:
    """Return a fully convolutional ResNet-18 with batch normalization, initialized as in MONAI.

    On a patch, whose side in pixels is `patch_size`, a multiple of 32, it is MONAI's `TorchVisionFCModel("resnet18",
    num_classes=1, use_conv=True)`; the names of the weights below `features` are torchvision's, so that a file of
    ImageNet weights fits.

    Source: He et al., "Deep residual learning for image recognition", CVPR 2016; MONAI's pathology/tumor_detection.
    """
    return ResNet18FCN(patch_size)
