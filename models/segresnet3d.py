"""The 3-D residual encoder-decoder of the MONAI BraTS recipes."""

from collections.abc import Sequence

from monai.networks.nets import SegResNet
from torch import nn


def segresnet3d(
    in_channels: int,
    out_channels: int,
    filters: int = 16,
    blocks_down: Sequence[int] = (1, 2, 2, 4),
    dropout: float = 0.0,
) -> nn.Module:
    """Return a SegResNet with group normalisation and trilinear upsampling; every level but the first halves each axis.

    Args:
        in_channels: channels C of the image, one per MRI sequence.
        out_channels: channels K of the logits.
        filters: width of the first level, a multiple of 8 (the groups); each further level has twice as many.
        blocks_down: residual blocks of each level; the sides of the input must divide by 2 ** (len(blocks_down) - 1).
        dropout: probability before the first block; 0 for none.

    Returns:
        A module from [B, C, X, Y, Z] to logits [B, K, X, Y, Z].

    Source:
        Myronenko, "3D MRI brain tumor segmentation using autoencoder regularization", BrainLes 2018; figures of the
        MONAI BraTS tutorials (distributed_training/brats_training_ddp.py).
    """
    return SegResNet(  # type: ignore[no-any-return]
        spatial_dims=3,
        init_filters=filters,
        in_channels=in_channels,
        out_channels=out_channels,
        dropout_prob=dropout or None,
        blocks_down=tuple(blocks_down),
        blocks_up=(1,) * (len(blocks_down) - 1),
    )
