"""MONAI's fast multi-GPU recipe for BraTS as a plain script on one device. It imports nothing of ours.

Source: Project-MONAI/tutorials, acceleration/distributed_training/brats_training_ddp.py for the training,
3d_segmentation/brats_segmentation_3d.ipynb for the way back to the file's grid; both Apache-2.0. What differs is to the
peer's favour or needed here: the enhancing tumour is MSD's label 3, what was cached is not copied whole for each crop,
and volumes smaller than a crop are padded.

Run: python benchmarks/peers/brats_guide.py --data FOLDER [--epochs 300]
"""

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import monai.transforms as mt
import torch
from monai.losses import DiceFocalLoss
from monai.networks.nets import SegResNet
from torch import nn

from medspeed.benchmarks import peers
from medspeed.benchmarks.peers import Given

SPACING = (1.0, 1.0, 1.0)
CROP, ROI = (224, 224, 144), (240, 240, 160)
# MSD's labels: 1 edema, 2 non-enhancing, 3 enhancing tumour. The tutorial has 2 as the enhancing one, and what it
# reports as ET is the other (tutorials issue 1355); TC and WT are the same either way.
LABELS = ["edema", "non-enhancing", "enhancing"]
REGIONS = {"TC": (2, 3), "WT": (1, 2, 3), "ET": (3,)}
METRIC, FALLS = "mean Dice of TC, WT and ET", True  # the learning rate
HELD = 2  # of the sorted cases, the last ones validate
NORMALISE = mt.NormalizeIntensityd("image", nonzero=True, channel_wise=True)  # after the crop, and so in every step

# The overlap is without effect where a window is as large as a scan.
FLAGS: dict[str, Any] = {"epochs": 300, "every": 20, "batch": 1, "rate": 1e-4, "split": Path}
FLAGS |= {"spacing": SPACING, "crop": CROP, "roi": ROI, "overlap": 0.6}
parse_flags = partial(peers.parse, __doc__, FLAGS)


def label_to_regions(label: torch.Tensor) -> torch.Tensor:
    """Return the regions [3, X, Y, Z] float32 of a label map [X, Y, Z], as the tutorial's own transform does."""
    masks = [torch.stack([label == each for each in members]).any(0) for members in REGIONS.values()]
    return torch.stack(masks).float()


def regions_to_label(regions: torch.Tensor) -> torch.Tensor:
    """Return the label map [1, X, Y, Z] of regions [3, X, Y, Z]; of those that overlap the smaller one counts."""
    tumour_core, whole_tumour, enhancing = regions > 0
    label: torch.Tensor = whole_tumour.to(torch.uint8)
    label[tumour_core] = 2
    label[enhancing] = 3
    return label[None]


def target(label: torch.Tensor) -> torch.Tensor:
    """Return the regions [B, 3, X, Y, Z] of labels [B, 1, X, Y, Z]."""
    return torch.stack([label_to_regions(each[0]) for each in label])


def fixed_transforms(keys: Sequence[str], given: Given) -> list[Callable[..., Any]]:
    """Return the deterministic transforms for image, or image and label, without the normalisation (see below)."""
    modes = ("bilinear", "nearest")[: len(keys)]
    return [
        mt.LoadImaged(keys),
        mt.ToDeviced(keys, given.device),
        mt.EnsureChannelFirstd("image"),
        *([mt.Lambdad("label", label_to_regions)] if "label" in keys else []),
        mt.Orientationd(keys, axcodes="RAS", labels=peers.AXES),
        mt.Spacingd(keys, pixdim=given.spacing, mode=modes),
    ]


def training_loader(given: Given) -> Any:  # noqa: ANN401 - MONAI's
    """Fill the cache and return the loader of random crops.

    Raises:
        ValueError: the labels of the data are not MSD's.
    """
    names = list(json.loads((given.data / "dataset.json").read_text())["labels"].values())[1:]
    if [name.split()[0] for name in names] != LABELS:
        raise ValueError(f"{given.data}: labels {names}; the guide knows those of MSD only, {LABELS}")
    keys = ("image", "label")
    transforms = [
        *fixed_transforms(keys, given),
        mt.SpatialPadd(keys, given.crop),
        mt.RandSpatialCropd(keys, roi_size=given.crop, random_size=False),
        mt.Lambdad("image", torch.clone),  # the normalisation writes into the crop, which is a view of the cache
        *(mt.RandFlipd(keys, prob=0.5, spatial_axis=axis) for axis in range(3)),
        NORMALISE,
        mt.RandScaleIntensityd("image", factors=0.1, prob=0.5),
        mt.RandShiftIntensityd("image", offsets=0.1, prob=0.5),
    ]
    return peers.cached(peers.read_pairs(given, HELD)[0], transforms, 4, given.batch, shuffle=True)


def make_validation(given: Given) -> Callable[[nn.Module], float]:
    """Fill the cache of the validation cases and return what measures the mean Dice of the regions."""
    fixed = [*fixed_transforms(("image", "label"), given), NORMALISE]
    loader = peers.cached(peers.read_pairs(given, HELD)[1], fixed, 4)
    masks = mt.Compose([mt.Activations(sigmoid=True), mt.AsDiscrete(threshold=0.5)])
    return lambda network: peers.mean_dice(network, loader, given, masks, mt.Identity())


def make_network(in_channels: int = 4, **others: Any) -> nn.Module:  # noqa: ANN401 - arguments of MONAI's SegResNet
    """Return the guide's SegResNet, from the images' channels to 3 regions."""
    torch.backends.cudnn.benchmark = True  # as the tutorial has it, in whichever process
    own = {"init_filters": 16, "blocks_down": (1, 2, 2, 4), "blocks_up": (1, 1, 1), "dropout_prob": 0.0}
    return SegResNet(in_channels=in_channels, out_channels=3, **{**own, **others})  # type: ignore[no-any-return]


def make_loss() -> peers.Loss:
    """Return the guide's loss."""
    smooth = {"smooth_nr": 1e-5, "smooth_dr": 1e-5}
    return DiceFocalLoss(**smooth, squared_pred=True, to_onehot_y=False, sigmoid=True, batch=True)  # type: ignore[no-any-return]


def infer(files: Sequence[Path], network: nn.Module, to: Path, given: Given) -> None:
    """Segment scans file to file."""
    masks = mt.Activationsd("pred", sigmoid=True), mt.AsDiscreted("pred", threshold=0.5)
    discrete = [*masks, mt.Lambdad("pred", regions_to_label)]
    peers.segment(files, network, to, given, [*fixed_transforms(["image"], given), NORMALISE], discrete, at_once=4)


if __name__ == "__main__":
    peers.train(sys.modules[__name__], parse_flags(None))
