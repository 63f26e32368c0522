"""MONAI's fast training guide for the spleen as a plain script: what people use today. It imports nothing of ours.

Source: Project-MONAI/tutorials, acceleration/fast_training_tutorial.ipynb in its Novograd revision (418f9db4) for the
training, 3d_segmentation/spleen_segmentation_3d.ipynb for the way back to the file's grid; both Apache-2.0. Two things
differ, each to the peer's favour or needed here: volumes smaller than a crop are padded, and the Dice leaves the
background out.

Run: python benchmarks/peers/spleen_guide.py --data FOLDER [--epochs 300]
"""

import argparse
import json
import time
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

from medspeed.benchmarks.peers import Loss, make_step

SPACING, WINDOW = (1.5, 1.5, 2.0), (-57.0, 164.0)
CROP, VALIDATION_ROI = (96, 96, 96), (160, 160, 160)
AXES = (("L", "R"), ("P", "A"), ("I", "S"))

Item = dict[str, Any]


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


def training_transforms(device: torch.device) -> mt.Compose:
    """Return the deterministic transforms, the copy to the device and the random crops."""
    keys = ("image", "label")
    return mt.Compose(
        [
            *fixed_transforms(keys),
            mt.SpatialPadd(keys, CROP),
            mt.FgBgToIndicesd("label", fg_postfix="_fg", bg_postfix="_bg", image_key="image"),
            mt.EnsureTyped(keys, device=device, track_meta=False),
            mt.RandCropByPosNegLabeld(
                keys, "label", CROP, pos=1, neg=1, num_samples=4, fg_indices_key="label_fg", bg_indices_key="label_bg"
            ),
        ]
    )


def training_loader(items: Sequence[Item], device: torch.device, batch: int = 4) -> ThreadDataLoader:
    """Fill the cache and return the loader of random crops, four of each case and so many cases at a time."""
    training = CacheDataset(items, training_transforms(device), num_workers=8, copy_cache=False, progress=False)
    return ThreadDataLoader(training, num_workers=0, batch_size=batch, shuffle=True)


def make_network(channels: int = 1) -> nn.Module:
    """Return the guide's U-Net, 16 to 256 channels, of images with so many."""
    widths, strides = (16, 32, 64, 128, 256), (2, 2, 2, 2)
    return UNet(3, channels, 2, widths, strides, num_res_units=2, norm="batch")  # type: ignore[no-any-return]


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
            item["pred"] = sliding_window_inference(item["image"].to(device), VALIDATION_ROI, 1, network, overlap=0.25)
            for case in decollate_batch(item):
                back(case)


def validate(network: nn.Module, loader: DataLoader, device: torch.device, amp_dtype: torch.dtype | None) -> float:
    """Return the mean foreground Dice on the working grid."""
    metric = DiceMetric(include_background=False)
    argmax, one_hot = mt.AsDiscrete(argmax=True, to_onehot=2), mt.AsDiscrete(to_onehot=2)
    network.eval()
    with torch.no_grad():
        for item in loader:
            with torch.autocast(device.type, dtype=amp_dtype, enabled=amp_dtype is not None):
                logits = sliding_window_inference(item["image"].to(device), VALIDATION_ROI, 4, network)
            labels = decollate_batch(item["label"].to(device))
            metric([argmax(each) for each in decollate_batch(logits)], [one_hot(each) for each in labels])
    return float(metric.aggregate().item())


def main() -> None:
    """Train as the guide does: the last nine of the sorted cases validate, each epoch."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--data", type=Path, required=True, help="folder in MSD layout")
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    amp_dtype = torch.float16 if device.type == "cuda" else None
    listed = json.loads((arguments.data / "dataset.json").read_text())["training"]
    pairs = sorted(({key: str(arguments.data / path) for key, path in pair.items()} for pair in listed), key=str)
    held = min(9, len(pairs) // 4)
    began = time.perf_counter()
    keys = ("image", "label")
    fixed = mt.Compose([*fixed_transforms(keys), mt.EnsureTyped(keys, device=device, track_meta=False)])
    train_loader = training_loader(pairs[:-held], device)
    validation = CacheDataset(pairs[-held:], fixed, num_workers=5, copy_cache=False, progress=False)
    validation_loader = ThreadDataLoader(validation, num_workers=0, batch_size=1)
    print(f"cache filled in {time.perf_counter() - began:.1f} s")
    network = make_network().to(device)
    step = make_step(network, make_optimizer(network), make_loss(), amp_dtype)
    began = time.perf_counter()
    for epoch in range(arguments.epochs):
        network.train()
        for item in train_loader:
            step(item["image"].to(device), item["label"].to(device))
        dice = validate(network, validation_loader, device, amp_dtype)
        print(f"epoch {epoch + 1}: foreground Dice {dice:.4f} after {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
