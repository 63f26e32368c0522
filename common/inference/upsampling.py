"""A transposed convolution that doubles each axis, as a convolution of the coarse grid: for few channels on a CPU."""

import torch
from torch import nn

# Along each axis: the parity of a fine voxel, its coarse voxel (0) or the next one (1), and the kernel's tap between.
_TAPS = ((0, 0, 1), (1, 0, 2), (1, 1, 0))
# More channels do not pay: on two cores 32 to 2 takes 0.4 of the time, to 3 0.65, to 4 0.75; 64 to 16 takes 2.1.
_MOST_CHANNELS = 4


class SubpixelUpsampling(nn.Module):
    """What a transposed convolution (kernel 3, stride 2, padding 1, output padding 1) computes, up to rounding.

    The eight fine voxels of a coarse one are channels of one convolution with a kernel of 2, and are then put into
    their places. oneDNN's transposed convolutions are slow where the channels are few.

    Args:
        transposed: whose weights are copied.

    Source:
        Shi et al., "Is the deconvolution layer the same as a convolutional layer?", 2016.
    """

    def __init__(self, transposed: nn.ConvTranspose3d) -> None:
        super().__init__()
        assert fits(transposed), transposed
        weight, bias = transposed.weight.detach(), transposed.bias
        coarse, fine = weight.shape[:2]
        kernel = weight.new_zeros(2, 2, 2, fine, coarse, 2, 2, 2)
        for a, x, i in _TAPS:
            for b, y, j in _TAPS:
                for c, z, k in _TAPS:
                    kernel[a, b, c, :, :, x, y, z] = weight[:, :, i, j, k].T
        self.convolution = nn.Conv3d(coarse, 8 * fine, 2, padding=1, bias=bias is not None)
        self.convolution.weight.data = kernel.flatten(0, 3)
        if self.convolution.bias is not None and bias is not None:
            self.convolution.bias.data = bias.detach().repeat(8)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return [B, K, 2 X, 2 Y, 2 Z] for [B, C, X, Y, Z], channels innermost."""
        found: torch.Tensor = self.convolution(image)[:, :, 1:, 1:, 1:]  # the first reads before the image
        batch, channels, x, y, z = found.shape
        parts = found.view(batch, 2, 2, 2, channels // 8, x, y, z).permute(0, 5, 1, 6, 2, 7, 3, 4)
        return parts.reshape(batch, 2 * x, 2 * y, 2 * z, channels // 8).permute(0, 4, 1, 2, 3)


def fits(module: nn.Module) -> bool:
    """Return whether a module is a transposed convolution that `SubpixelUpsampling` computes, with few channels."""
    return (
        isinstance(module, nn.ConvTranspose3d)
        and (module.kernel_size, module.stride, module.padding) == ((3, 3, 3), (2, 2, 2), (1, 1, 1))
        and (module.output_padding, module.dilation, module.groups) == ((1, 1, 1), (1, 1, 1), 1)
        and module.out_channels <= _MOST_CHANNELS
    )


def use_subpixel_upsampling(network: nn.Module) -> nn.Module:
    """Replace, in a network on a CPU that is not trained any more, the transposed convolutions that fit; return it."""
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.ConvTranspose3d) and fits(module) and module.weight.device.type == "cpu":
            network.set_submodule(name, SubpixelUpsampling(module))
    return network
