"""MONAI's fast multi-GPU recipe for BraTS as a plain script on one device. It imports nothing of ours.

Source: Project-MONAI/tutorials, acceleration/distributed_training/brats_training_ddp.py for the training,
3d_segmentation/brats_segmentation_3d.ipynb for the way back to the file's grid; both Apache-2.0. What differs is to the
peer's favour or needed here: the enhancing tumour is MSD's label 3, what was cached is not copied whole for each crop,
and volumes smaller than a crop are padded.

Run: python benchmarks/peers/brats_guide.py --data FOLDER [--epochs 300]
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import monai.transforms as mt
import torch
from monai.data import CacheDataset, DataLoader, Dataset, ThreadDataLoader, decollate_batch
from monai.inferers import sliding_window_inference
from monai.losses import DiceFocalLoss
from monai.metrics import DiceMetric
from monai.networks.nets import SegResNet
from monai.optimizers import Novograd
from torch import nn

from medspeed.benchmarks.peers import Item, Loss, Watch, make_step, parse, read_pairs

SPACING = (1.0, 1.0, 1.0)
CROP, VALIDATION_ROI = (224, 224, 144), (240, 240, 160)
AXES = (("L", "R"), ("P", "A"), ("I", "S"))
# MSD's labels: 1 edema, 2 non-enhancing, 3 enhancing tumour. The tutorial has 2 as the enhancing one, and what it
# reports as ET is the other (tutorials issue 1355); TC and WT are the same either way.
REGIONS = {"TC": (2, 3), "WT": (1, 2, 3), "ET": (3,)}

Size = tuple[int, int, int]


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


def fixed_transforms(keys: Sequence[str], device: torch.device, spacing: Sequence[float]) -> list[Callable[..., Any]]:
    """Return the deterministic transforms for image, or image and label, without the normalisation (see below)."""
    modes = ("bilinear", "nearest")[: len(keys)]
    return [
        mt.LoadImaged(keys),
        mt.ToDeviced(keys, device),
        mt.EnsureChannelFirstd("image"),
        *([mt.Lambdad("label", label_to_regions)] if "label" in keys else []),
        mt.Orientationd(keys, axcodes="RAS", labels=AXES),
        mt.Spacingd(keys, pixdim=spacing, mode=modes),
    ]


def normalisation() -> mt.NormalizeIntensityd:
    """Return the normalisation, which the guide does after the crop and so in every step."""
    return mt.NormalizeIntensityd("image", nonzero=True, channel_wise=True)


def training_transforms(device: torch.device, spacing: Sequence[float], crop: Size) -> mt.Compose:
    """Return the deterministic transforms, the copy to the device and the random ones."""
    keys = ("image", "label")
    return mt.Compose(
        [
            *fixed_transforms(keys, device, spacing),
            mt.SpatialPadd(keys, crop),
            mt.RandSpatialCropd(keys, roi_size=crop, random_size=False),
            mt.Lambdad("image", torch.clone),  # the normalisation writes into the crop, which is a view of the cache
            *(mt.RandFlipd(keys, prob=0.5, spatial_axis=axis) for axis in range(3)),
            normalisation(),
            mt.RandScaleIntensityd("image", factors=0.1, prob=0.5),
            mt.RandShiftIntensityd("image", offsets=0.1, prob=0.5),
        ]
    )


def make_network(in_channels: int = 4, **others: Any) -> nn.Module:  # noqa: ANN401 - arguments of MONAI's SegResNet
    """Return the guide's SegResNet, from the images' channels to 3 regions."""
    own = {"init_filters": 16, "blocks_down": (1, 2, 2, 4), "blocks_up": (1, 1, 1), "dropout_prob": 0.0}
    return SegResNet(in_channels=in_channels, out_channels=3, **{**own, **others})  # type: ignore[no-any-return]


def make_optimizer(network: nn.Module, rate: float = 1e-4) -> torch.optim.Optimizer:
    """Return the guide's optimizer."""
    return Novograd(network.parameters(), rate)  # type: ignore[no-any-return]


def training_loader(
    items: Sequence[Item], device: torch.device, spacing: Sequence[float], crop: Size, batch: int
) -> Any:  # noqa: ANN401
    """Fill the cache and return the loader of random crops."""
    transforms = training_transforms(device, spacing, crop)
    dataset = CacheDataset(items, transforms, num_workers=4, copy_cache=False, progress=False)
    return ThreadDataLoader(dataset, num_workers=0, batch_size=batch, shuffle=True)


def make_loss() -> Loss:
    """Return the guide's loss."""
    smooth = {"smooth_nr": 1e-5, "smooth_dr": 1e-5}
    return DiceFocalLoss(**smooth, squared_pred=True, to_onehot_y=False, sigmoid=True, batch=True)  # type: ignore[no-any-return]


def predict(
    network: nn.Module, image: torch.Tensor, amp_dtype: torch.dtype | None, roi: Sequence[int] | None = None
) -> torch.Tensor:
    """Return the logits; the window is as large as a scan, so that overlap and batch of windows have no effect."""
    with torch.no_grad(), torch.autocast(image.device.type, dtype=amp_dtype, enabled=amp_dtype is not None):
        return sliding_window_inference(image, roi or VALIDATION_ROI, 4, network, overlap=0.6)  # type: ignore[no-any-return]


def segment_files(
    files: Sequence[Path],
    network: nn.Module,
    output: Path,
    device: torch.device,
    spacing: Sequence[float] = SPACING,
    roi: Sequence[int] | None = None,
) -> None:
    """Segment scans file to file: transforms, window, Invertd, sigmoid, threshold, label map, SaveImaged."""
    chain = mt.Compose([*fixed_transforms(["image"], device, spacing), normalisation()])
    saving: dict[str, Any] = {"output_dir": output, "output_dtype": "uint8"}
    back = mt.Compose(
        [
            mt.Invertd("pred", transform=chain, orig_keys="image", nearest_interp=False, to_tensor=True),
            mt.Activationsd("pred", sigmoid=True),
            mt.AsDiscreted("pred", threshold=0.5),
            mt.Lambdad("pred", regions_to_label),
            mt.SaveImaged("pred", **saving, output_postfix="", separate_folder=False, print_log=False),
        ]
    )
    loader = DataLoader(Dataset([{"image": str(file)} for file in files], chain), batch_size=1, num_workers=0)
    amp_dtype = torch.float16 if device.type == "cuda" else None
    network.eval()
    for item in loader:
        item["pred"] = predict(network, item["image"], amp_dtype, roi)
        for case in decollate_batch(item):
            back(case)


def validate(
    network: nn.Module,
    loader: Any,  # noqa: ANN401
    amp_dtype: torch.dtype | None,
    roi: Sequence[int] | None = None,
) -> list[float]:
    """Return the mean Dice of each region on the working grid."""
    metric = DiceMetric(include_background=True, reduction="mean_batch")
    discrete = mt.Compose([mt.Activations(sigmoid=True), mt.AsDiscrete(threshold=0.5)])
    network.eval()
    for item in loader:
        logits = predict(network, item["image"], amp_dtype, roi)
        metric(y_pred=[discrete(each) for each in decollate_batch(logits)], y=item["label"])
    return [float(each) for each in metric.aggregate()]


def main() -> None:
    """Train as the guide does, on one device: a fifth of the cases validates, every 20 epochs."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--split", type=Path, help="JSON file of the names that train, and of those that validate")
    parser.add_argument("--batch", type=int, default=1, help="crops in it")
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate at the start")
    given = parse(parser, epochs=300, every=20, spacing=SPACING, crop=CROP, roi=VALIDATION_ROI)
    watch, device = Watch(given), torch.device(given.device)
    amp_dtype = torch.float16 if device.type == "cuda" else None
    train, held = read_pairs(given.data, given.split, 2)
    fixed = mt.Compose([*fixed_transforms(("image", "label"), device, given.spacing), normalisation()])
    train_loader = training_loader(train, device, given.spacing, tuple(given.crop), given.batch)
    validation = CacheDataset(held, fixed, num_workers=4, copy_cache=False, progress=False)
    validation_loader = ThreadDataLoader(validation, num_workers=0, batch_size=1)
    watch.lap("cache")
    network = make_network(**given.network).to(device)
    optimizer = make_optimizer(network, given.rate)
    step = make_step(network, optimizer, make_loss(), amp_dtype)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=given.epochs)
    for epoch in range(1, given.most + 1):
        network.train()
        for item in train_loader:
            step(item["image"], item["label"])
            watch.steps += 1
        if epoch <= given.epochs:
            schedule.step()
        watch.lap("train")
        if epoch % given.every == 0 or epoch == given.most:
            dice = dict(zip(REGIONS, validate(network, validation_loader, amp_dtype, given.roi), strict=True))
            shown = ", ".join(f"{name} {value:.4f}" for name, value in dice.items())
            print(f"epoch {epoch}: Dice {shown}")
            if watch.ends(network, epoch, sum(dice.values()) / len(dice)):
                break


if __name__ == "__main__":
    main()
