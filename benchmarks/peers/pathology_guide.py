"""MONAI's recipe for tumour in slides, with its numpy backend, as a plain script. It imports nothing of ours.

Source: Project-MONAI/tutorials, pathology/tumor_detection/torch/camelyon_train_evaluate_pytorch_gpu.py for the
training; Project-MONAI/model-zoo, pathology_tumor_detection, configs/inference.json for the scan; both Apache-2.0. What
differs favours the peer or is needed here: TorchVision's ColorJitter and ResNet-18 are written down here and taken from
MONAI, jitter computes with floats, workers stay alive, regions are shuffled, and the weights begin at random.

Run: python benchmarks/peers/pathology_guide.py --data FOLDER --training LIST.csv --validation LIST.csv
where FOLDER has training/images/STEM.tif and the lists are NCRF's: STEM,x,y and nine labels. With --patch SIDE they are
of single patches instead: file, x and y of the upper left corner, label.
"""

import argparse
import csv
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import monai.transforms as mt
import numpy as np
import torch
from monai.data import DataLoader, MaskedPatchWSIDataset, PatchWSIDataset, ThreadDataLoader
from monai.metrics import compute_roc_auc
from monai.networks.nets import resnet18
from monai.optimizers import Novograd
from torch import nn

from medspeed.benchmarks.peers import Item, Loss, Watch, make_step, parse

REGION, GRID, PATCH = 768, 3, 224
BRIGHTNESS, CONTRAST, SATURATION, HUE = 64.0 / 255.0, 0.75, 0.25, 0.04
LABELS = (0, 3, 6, 1, 4, 7, 2, 5, 8)  # of the nine in NCRF's list, which go column by column: row by row
MASK_LEVEL = 6  # of the tissue mask: one patch for each of its pixels, every 64 pixels of level 0
GREY = (0.2989, 0.587, 0.114)
FORK = "fork"  # how workers start quickly; Linux's own way up to Python 3.13

Image = torch.Tensor  # [3, Y, X] float32 in [0, 1]


def blend(image: Image, other: Image, factor: float) -> Image:
    """Return factor * image + (1 - factor) * other, clamped."""
    return (factor * image + (1.0 - factor) * other).clamp(0.0, 1.0)


def to_grey(image: Image) -> Image:
    """Return the grey [1, Y, X] of an image."""
    red, green, blue = image.unbind(0)
    return (GREY[0] * red + GREY[1] * green + GREY[2] * blue).unsqueeze(0)


def rgb_to_hsv(image: Image) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hue, saturation and value, [Y, X] each, in [0, 1]."""
    red, green, blue = image.unbind(0)
    value, least = image.max(dim=0).values, image.min(dim=0).values
    flat, chroma, one = value == least, value - least, torch.ones_like(value)
    saturation = chroma / torch.where(flat, one, value)
    divisor = torch.where(flat, one, chroma)
    r, g, b = (value - red) / divisor, (value - green) / divisor, (value - blue) / divisor
    is_red, is_green = value == red, (value == green) & (value != red)
    is_blue = (value != green) & (value != red)
    hue = is_red * (b - g) + is_green * (2.0 + r - b) + is_blue * (4.0 + g - r)
    return torch.fmod(hue / 6.0 + 1.0, 1.0), saturation, value


def hsv_to_rgb(hue: torch.Tensor, saturation: torch.Tensor, value: torch.Tensor) -> Image:
    """Return the image of hue, saturation and value."""
    sector = torch.floor(hue * 6.0)
    rest = hue * 6.0 - sector
    p = (value * (1.0 - saturation)).clamp(0.0, 1.0)
    q = (value * (1.0 - saturation * rest)).clamp(0.0, 1.0)
    t = (value * (1.0 - saturation * (1.0 - rest))).clamp(0.0, 1.0)
    chosen = (sector.to(torch.int32) % 6)[None] == torch.arange(6)[:, None, None]
    channels = ((value, q, p, p, t, value), (t, value, value, q, p, p), (p, p, t, value, value, q))
    sectors = torch.stack([torch.stack(each) for each in channels])
    return torch.einsum("kyx,ckyx->cyx", chosen.to(value.dtype), sectors)


def turn_hue(image: Image, turn: float) -> Image:
    """Turn the hue, in full turns, by way of HSV."""
    hue, saturation, value = rgb_to_hsv(image)
    return hsv_to_rgb((hue + turn) % 1.0, saturation, value)


ADJUST: tuple[Callable[[Image, float], Image], ...] = (  # brightness, contrast, saturation and hue
    lambda image, factor: blend(image, torch.zeros_like(image), factor),
    lambda image, factor: blend(image, to_grey(image).mean(), factor),
    lambda image, factor: blend(image, to_grey(image), factor),
    turn_hue,
)


class ColorJitterd(mt.RandomizableTransform):  # type: ignore[misc] # monai has no types
    """TorchVision's ColorJitter of one image: four factors, each uniform, in random order."""

    def __init__(self) -> None:
        super().__init__(prob=1.0)

    def __call__(self, data: Item) -> Item:
        """Return the item with its "image" [3, Y, X] in [0, 255] jittered."""
        spreads = (BRIGHTNESS, CONTRAST, SATURATION)
        factors = [self.R.uniform(max(0.0, 1.0 - spread), 1.0 + spread) for spread in spreads]
        factors.append(self.R.uniform(-HUE, HUE))
        image = torch.as_tensor(data["image"]).float() / 255.0
        for part in self.R.permutation(4):
            image = ADJUST[part](image, factors[part])
        return {**data, "image": image * 255.0}


def scaling() -> list[Callable[..., Any]]:
    """Return what validation and inference do: from [0, 255] to [-1, 1]."""
    return [
        mt.CastToTyped("image", dtype=np.float32),
        mt.ScaleIntensityRanged("image", a_min=0.0, a_max=255.0, b_min=-1.0, b_max=1.0),
    ]


def patch_transforms() -> list[Callable[..., Any]]:
    """Return the random transforms of one patch, with the conversions of the script's numpy backend."""
    return [
        mt.ToTensord("image", track_meta=False),
        ColorJitterd(),
        mt.ToNumpyd("image"),
        mt.RandFlipd("image", spatial_axis=-1, prob=0.5),
        mt.RandRotate90d("image", prob=0.5),
        mt.CastToTyped("image", dtype=np.float32),
        mt.RandZoomd("image", prob=0.5, min_zoom=0.9, max_zoom=1.1),
        *scaling()[1:],
        mt.ToTensord("image", track_meta=False),
    ]


def region_dataset(
    items: Sequence[Item], transforms: Sequence[Callable[..., Any]], patch: int = PATCH, reader: str = "cucim"
) -> PatchWSIDataset:
    """Return the dataset of the tutorial: nine patches for each "location" (row, column), the centre of a region."""
    split = [
        mt.Lambdad("label", lambda label: label.reshape(1, GRID, GRID)),
        mt.GridSplitd(("image", "label"), grid=(GRID, GRID), size={"image": patch, "label": 1}),
    ]
    chain, region = mt.Compose([*split, *transforms]), REGION - GRID * (PATCH - patch)
    return PatchWSIDataset(items, patch_size=region, patch_level=0, reader=reader, transform=chain)


def patch_dataset(
    items: Sequence[Item], transforms: Sequence[Callable[..., Any]], patch: int = PATCH, reader: str = "cucim"
) -> PatchWSIDataset:
    """Return a dataset of single patches; "location" (row, column) is the upper left corner of each."""
    chain = mt.Compose(list(transforms))
    return PatchWSIDataset(
        items, patch_size=patch, patch_level=0, center_location=False, reader=reader, transform=chain
    )


def make_loader(dataset: PatchWSIDataset, batch: int, workers: int, shuffle: bool = True) -> DataLoader:
    """Return MONAI's loader with processes, or with none of them the one that loads ahead in a thread."""
    if workers == 0:
        return ThreadDataLoader(dataset, num_workers=0, batch_size=batch, shuffle=shuffle)
    ways = {"persistent_workers": True, "multiprocessing_context": FORK}
    return DataLoader(dataset, num_workers=workers, batch_size=batch, shuffle=shuffle, **ways)


class FullyConvolutional(nn.Module):
    """What TorchVisionFCModel("resnet18", num_classes=1, use_conv=True) makes of a ResNet-18."""

    def __init__(self, patch: int = PATCH) -> None:
        super().__init__()
        options = {"conv1_t_stride": 2, "feed_forward": False, "bias_downsample": False, "shortcut_type": "B"}
        self.features = resnet18(spatial_dims=2, n_input_channels=3, **options)
        self.pool = nn.AvgPool2d(patch // 32, stride=1)  # 7 x 7
        self.head = nn.Conv2d(512, 1, kernel_size=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return logits [B, 1, 1, 1] of patches [B, 3, Y, X]."""
        net = self.features
        x = net.maxpool(net.act(net.bn1(net.conv1(image))))
        x = net.layer4(net.layer3(net.layer2(net.layer1(x))))
        logits: torch.Tensor = self.head(self.pool(x))
        return logits


def make_optimizer(network: nn.Module, rate: float = 1e-3) -> torch.optim.Optimizer:
    """Return the guide's optimizer."""
    return Novograd(network.parameters(), rate)  # type: ignore[no-any-return]


def make_loss() -> Loss:
    """Return the guide's loss, of labels [B] or [B, 1, 1, 1]."""
    loss = nn.BCEWithLogitsLoss()
    return lambda logits, label: loss(logits, label.reshape(logits.shape))


def scan_slide(
    file: Path,
    network: nn.Module,
    device: torch.device,
    batch: int,
    workers: int,
    patch: int = PATCH,
    mask_level: int = MASK_LEVEL,
    reader: str = "cucim",
) -> np.ndarray:
    """Return the probability map of a slide at the level of its tissue mask, as the bundle's ProbMapProducer makes it.

    One patch around each foreground pixel of that level goes through the network, which must be in evaluation mode.
    """
    sizes = {"patch_size": patch, "patch_level": 0, "mask_level": mask_level}
    dataset = MaskedPatchWSIDataset([{"image": str(file)}], transform=mt.Compose(scaling()), reader=reader, **sizes)
    dataset.wsi_object_dict = {}  # a file that is open already must not be shared by processes
    found = np.zeros(dataset.image_data[0]["mask_size"], np.float64)
    if not len(dataset):
        return found
    amp_dtype = torch.float16 if device.type == "cuda" else None
    context = FORK if workers else None
    for item in DataLoader(dataset, batch_size=batch, num_workers=workers, multiprocessing_context=context):
        image = item["image"].as_tensor().to(device)
        with torch.no_grad(), torch.autocast(device.type, dtype=amp_dtype, enabled=amp_dtype is not None):
            probability = torch.sigmoid(network(image)).float().cpu().numpy()
        rows, columns = (np.asarray(each) for each in np.asarray(item["image"].meta["mask_location"]).T)
        found[rows, columns] = probability[:, 0, 0, 0]
    return found


def read_list(path: Path, folder: Path) -> list[Item]:
    """Return the regions of NCRF's list."""
    items = []
    for name, x, y, *labels in csv.reader(path.read_text().splitlines()):
        file = folder / "training" / "images" / f"{name}.tif"
        ordered = [float(labels[place]) for place in LABELS]
        items.append({"image": str(file), "location": [int(y), int(x)], "label": ordered})
    return items


def read_patches(path: Path) -> list[Item]:
    """Return the single patches of a list."""
    rows = csv.reader(path.read_text().splitlines())
    return [{"image": file, "location": [int(y), int(x)], "label": float(label)} for file, x, y, label in rows]


def validate(network: nn.Module, loader: DataLoader, device: torch.device) -> tuple[float, float]:
    """Return the accuracy and the AUC of the validation patches."""
    logits, labels = list[torch.Tensor](), list[torch.Tensor]()
    network.eval()
    for item in loader:
        with torch.no_grad():
            logits.append(network(item["image"].to(device)).flatten().cpu())
        labels.append(item["label"].flatten())
    found, true = torch.cat(logits), torch.cat(labels) > 0.5
    return float(((found > 0) == true).float().mean()), float(compute_roc_auc(found, true.int()))


def main() -> None:
    """Train as the guide does, on one device."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--training", type=Path, required=True, help="NCRF's list of regions")
    parser.add_argument("--validation", type=Path, required=True, help="likewise")
    parser.add_argument("--regions", type=int, default=64, help="in a batch; nine patches each")
    parser.add_argument("--patch", type=int, help="the lists are of single patches with such a side, --regions of them")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate at the start")
    parser.add_argument("--reader", default="cucim")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    given = parse(parser, epochs=10, every=1)
    watch, device = Watch(given), torch.device(given.device)
    amp_dtype = torch.float16 if device.type == "cuda" else None

    def load(path: Path, transforms: Sequence[Callable[..., Any]], shuffle: bool) -> DataLoader:
        if given.patch:
            dataset = patch_dataset(read_patches(path), transforms, given.patch, given.reader)
        else:
            dataset = region_dataset(read_list(path, given.data), transforms, reader=given.reader)
        return make_loader(dataset, given.regions, given.workers, shuffle)

    loader, held = load(given.training, patch_transforms(), True), load(given.validation, scaling(), False)
    network = FullyConvolutional(given.patch or PATCH).to(device)
    optimizer = make_optimizer(network, given.rate)
    step = make_step(network, optimizer, make_loss(), amp_dtype)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=given.epochs)
    watch.lap("prepare")
    for epoch in range(1, given.most + 1):
        network.train()
        for item in loader:
            step(item["image"].to(device), item["label"].to(device, torch.float32))
            watch.steps += 1
        if epoch <= given.epochs:
            schedule.step()
        watch.lap("train")
        if epoch % given.every == 0 or epoch == given.most:
            accuracy, auc = validate(network, held, device)
            print(f"epoch {epoch}: accuracy {accuracy:.4f}, AUC {auc:.4f}")
            if watch.ends(network, epoch, auc):
                break


if __name__ == "__main__":
    main()
