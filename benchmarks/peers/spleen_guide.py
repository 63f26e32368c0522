"""MONAI's fast training guide for the spleen as a plain script: what people use today. It imports nothing of ours.

Source: Project-MONAI/tutorials, acceleration/fast_training_tutorial.ipynb in its Novograd revision (418f9db4) for the
training, 3d_segmentation/spleen_segmentation_3d.ipynb for the way back to the file's grid; both Apache-2.0. Two things
differ, each to the peer's favour or needed here: volumes smaller than a crop are padded, and the Dice leaves the
background out.

Run: python benchmarks/peers/spleen_guide.py --data FOLDER [--epochs 300] [--until 0.9]
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import monai.transforms as mt
import torch
from monai.data import CacheDataset, DataLoader, Dataset, ThreadDataLoader, decollate_batch
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet
from monai.optimizers import Novograd
from torch import nn

from medspeed.benchmarks.peers import Item, Loss, Watch, make_step, parse, read_pairs

SPACING, WINDOW = (1.5, 1.5, 2.0), (-57.0, 164.0)
CROP, VALIDATION_ROI = (96, 96, 96), (160, 160, 160)
AXES = (("L", "R"), ("P", "A"), ("I", "S"))


def fixed_transforms(keys: Sequence[str], spacing: Sequence[float] = SPACING) -> list[Callable[[Item], Item]]:
    """Return the deterministic transforms for image, or image and label."""
    modes = ("bilinear", "nearest")[: len(keys)]
    return [
        mt.LoadImaged(keys),
        mt.EnsureChannelFirstd(keys),
        mt.Orientationd(keys, axcodes="RAS", labels=AXES),
        mt.Spacingd(keys, pixdim=spacing, mode=modes),
        mt.ScaleIntensityRanged("image", *WINDOW, 0.0, 1.0, clip=True),
        mt.CropForegroundd(keys, source_key="image", allow_smaller=True),
    ]


def training_transforms(device: torch.device, spacing: Sequence[float], crop: Sequence[int]) -> mt.Compose:
    """Return the deterministic transforms, the copy to the device and the random crops."""
    keys = ("image", "label")
    return mt.Compose(
        [
            *fixed_transforms(keys, spacing),
            mt.SpatialPadd(keys, crop),
            mt.FgBgToIndicesd("label", fg_postfix="_fg", bg_postfix="_bg", image_key="image"),
            mt.EnsureTyped(keys, device=device, track_meta=False),
            mt.RandCropByPosNegLabeld(
                keys, "label", crop, pos=1, neg=1, num_samples=4, fg_indices_key="label_fg", bg_indices_key="label_bg"
            ),
        ]
    )


def training_loader(
    items: Sequence[Item],
    device: torch.device,
    batch: int = 4,
    spacing: Sequence[float] = SPACING,
    crop: Sequence[int] | None = None,
) -> ThreadDataLoader:
    """Fill the cache and return the loader of random crops, four of each case and so many cases at a time."""
    transforms = training_transforms(device, spacing, crop or CROP)
    training = CacheDataset(items, transforms, num_workers=8, copy_cache=False, progress=False)
    return ThreadDataLoader(training, num_workers=0, batch_size=batch, shuffle=True)


def make_network(in_channels: int = 1, **others: Any) -> nn.Module:  # noqa: ANN401 - arguments of MONAI's UNet
    """Return the guide's U-Net, 16 to 256 channels, of images with so many."""
    own = {"channels": (16, 32, 64, 128, 256), "strides": (2, 2, 2, 2), "num_res_units": 2, "norm": "batch"}
    return UNet(3, in_channels, 2, **{**own, **others})  # type: ignore[no-any-return]


def make_optimizer(network: nn.Module) -> torch.optim.Optimizer:
    """Return the guide's optimizer."""
    return Novograd(network.parameters(), 2e-4 * 10)  # type: ignore[no-any-return]


def make_loss() -> Loss:
    """Return the guide's loss."""
    return DiceCELoss(to_onehot_y=True, softmax=True, squared_pred=True, batch=True)  # type: ignore[no-any-return]


def segment_files(
    files: Sequence[Path],
    network: nn.Module,
    output: Path,
    device: torch.device,
    spacing: Sequence[float] = SPACING,
    roi: Sequence[int] = VALIDATION_ROI,
) -> None:
    """Segment scans file to file: transforms, sliding windows, Invertd, argmax, SaveImaged."""
    chain = mt.Compose(fixed_transforms(["image"], spacing))
    back = mt.Compose(
        [
            mt.Invertd("pred", transform=chain, orig_keys="image", nearest_interp=False, to_tensor=True),
            mt.AsDiscreted("pred", argmax=True),
            mt.SaveImaged("pred", output_dir=output, output_postfix="", separate_folder=False, print_log=False),
        ]
    )
    loader = DataLoader(Dataset([{"image": str(file)} for file in files], chain), batch_size=1, num_workers=0)
    network.eval()
    with torch.no_grad():
        for item in loader:
            item["pred"] = sliding_window_inference(item["image"].to(device), roi, 1, network, overlap=0.25)
            for case in decollate_batch(item):
                back(case)


def validate(
    network: nn.Module,
    loader: DataLoader,
    device: torch.device,
    amp_dtype: torch.dtype | None,
    roi: Sequence[int] = VALIDATION_ROI,
) -> float:
    """Return the mean foreground Dice on the working grid."""
    metric = DiceMetric(include_background=False)
    argmax, one_hot = mt.AsDiscrete(argmax=True, to_onehot=2), mt.AsDiscrete(to_onehot=2)
    network.eval()
    with torch.no_grad():
        for item in loader:
            with torch.autocast(device.type, dtype=amp_dtype, enabled=amp_dtype is not None):
                logits = sliding_window_inference(item["image"].to(device), roi, 4, network)
            labels = decollate_batch(item["label"].to(device))
            metric([argmax(each) for each in decollate_batch(logits)], [one_hot(each) for each in labels])
    return float(metric.aggregate().item())


def main() -> None:
    """Train as the guide does: the last nine of the sorted cases validate, each epoch."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--split", type=Path, help="JSON file of the names that train, and of those that validate")
    parser.add_argument("--cases", type=int, default=4, help="in a batch, four crops of each")
    given = parse(parser, epochs=300, every=1, spacing=SPACING, crop=CROP, roi=VALIDATION_ROI)
    watch, device = Watch(given), torch.device(given.device)
    amp_dtype = torch.float16 if device.type == "cuda" else None
    keys = ("image", "label")
    fixed = mt.Compose([*fixed_transforms(keys, given.spacing), mt.EnsureTyped(keys, device=device, track_meta=False)])
    train, held = read_pairs(given.data, given.split, 9)
    train_loader = training_loader(train, device, given.cases, given.spacing, given.crop)
    validation = CacheDataset(held, fixed, num_workers=5, copy_cache=False, progress=False)
    validation_loader = ThreadDataLoader(validation, num_workers=0, batch_size=1)
    watch.lap("cache")
    network = make_network(**given.network).to(device)
    step = make_step(network, make_optimizer(network), make_loss(), amp_dtype)
    for epoch in range(1, given.most + 1):
        network.train()
        for item in train_loader:
            step(item["image"].to(device), item["label"].to(device))
            watch.steps += 1
        watch.lap("train")
        if epoch % given.every == 0 or epoch == given.most:
            dice = validate(network, validation_loader, device, amp_dtype, given.roi)
            print(f"epoch {epoch}: foreground Dice {dice:.4f}")
            if watch.ends(network, epoch, dice):
                break


if __name__ == "__main__":
    main()
