"""MONAI's fast training guide for the spleen as a plain script that imports nothing of ours.

Source: Project-MONAI/tutorials, acceleration/fast_training_tutorial.ipynb in its Novograd revision (418f9db4) for the
training, 3d_segmentation/spleen_segmentation_3d.ipynb for the way back to the file's grid; both Apache-2.0. What
differs is to the peer's favour or needed here: volumes smaller than a crop are padded, the Dice leaves the background
out, and label maps are written as bytes.

Run: python benchmarks/peers/spleen_guide.py --data FOLDER [--epochs 300] [--until 0.9]
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import monai.transforms as mt
import torch
from monai.losses import DiceCELoss
from monai.networks.nets import UNet
from torch import nn

from medspeed.benchmarks import peers
from medspeed.benchmarks.peers import Given

SPACING, WINDOW = (1.5, 1.5, 2.0), (-57.0, 164.0)
CROP, ROI = (96, 96, 96), (160, 160, 160)
REGIONS = {"spleen": (1,)}
METRIC, FALLS = "foreground Dice", False  # the learning rate
HELD = 9  # of the sorted cases, the last ones validate

FLAGS: dict[str, Any] = {"epochs": 300, "every": 1, "batch": 4, "rate": 2e-4 * 10, "split": Path}
FLAGS |= {"spacing": SPACING, "crop": CROP, "roi": ROI, "overlap": 0.25}
parse_flags = partial(peers.parse, __doc__, FLAGS)
target = torch.Tensor.float  # of labels [B, 1, X, Y, Z]: what the loss takes


def fixed_transforms(keys: Sequence[str], given: Given) -> list[Callable[..., Any]]:
    """Return the deterministic transforms for image, or image and label."""
    modes = ("bilinear", "nearest")[: len(keys)]
    return [
        mt.LoadImaged(keys),
        mt.EnsureChannelFirstd(keys),
        mt.Orientationd(keys, axcodes="RAS", labels=peers.AXES),
        mt.Spacingd(keys, pixdim=given.spacing, mode=modes),
        mt.ScaleIntensityRanged("image", *WINDOW, 0.0, 1.0, clip=True),
        mt.CropForegroundd(keys, source_key="image", allow_smaller=True),
    ]


def training_loader(given: Given) -> Any:  # noqa: ANN401 - MONAI's
    """Fill the cache and return the loader of random crops, four of each case."""
    keys = ("image", "label")
    transforms = [
        *fixed_transforms(keys, given),
        mt.SpatialPadd(keys, given.crop),
        mt.FgBgToIndicesd("label", fg_postfix="_fg", bg_postfix="_bg", image_key="image"),
        mt.EnsureTyped(keys, device=given.device, track_meta=False),
        mt.RandCropByPosNegLabeld(
            keys, "label", given.crop, pos=1, neg=1, num_samples=4, fg_indices_key="label_fg", bg_indices_key="label_bg"
        ),
    ]
    return peers.cached(peers.read_pairs(given, HELD)[0], transforms, 8, given.batch, shuffle=True)


def make_validation(given: Given) -> Callable[[nn.Module], float]:
    """Fill the cache of the validation cases and return what measures the mean foreground Dice on the working grid."""
    keys = ("image", "label")
    fixed = [*fixed_transforms(keys, given), mt.EnsureTyped(keys, device=given.device, track_meta=False)]
    loader = peers.cached(peers.read_pairs(given, HELD)[1], fixed, 5)
    masks, truth = mt.AsDiscrete(argmax=True, to_onehot=2), mt.AsDiscrete(to_onehot=2)
    foreground = [lambda logits: masks(logits)[1:], lambda label: truth(label)[1:]]
    return lambda network: peers.mean_dice(network, loader, given, *foreground)


def make_network(in_channels: int = 1, **others: Any) -> nn.Module:  # noqa: ANN401 - arguments of MONAI's UNet
    """Return the guide's U-Net, 16 to 256 channels, of images with so many."""
    own = {"channels": (16, 32, 64, 128, 256), "strides": (2, 2, 2, 2), "num_res_units": 2, "norm": "batch"}
    return UNet(3, in_channels, 2, **{**own, **others})  # type: ignore[no-any-return]


def make_loss() -> peers.Loss:
    """Return the guide's loss."""
    return DiceCELoss(to_onehot_y=True, softmax=True, squared_pred=True, batch=True)  # type: ignore[no-any-return]


def infer(files: Sequence[Path], network: nn.Module, to: Path, given: Given) -> None:
    """Segment scans file to file."""
    argmax = mt.AsDiscreted("pred", argmax=True)
    peers.segment(files, network, to, given, fixed_transforms(["image"], given), [argmax], at_once=1)


if __name__ == "__main__":
    peers.train(sys.modules[__name__], parse_flags(None))
