"""MONAI's recipe for tumour in slides, with its numpy backend, as a plain script. It imports nothing of ours.

Source: Project-MONAI/tutorials, pathology/tumor_detection/torch/camelyon_train_evaluate_pytorch_gpu.py for the
training; Project-MONAI/model-zoo, pathology_tumor_detection, configs/inference.json for the scan; both Apache-2.0. What
differs favours the peer or is needed here: TorchVision's ColorJitter is what it does of PIL's images, its ResNet-18
MONAI's, workers stay alive, regions are shuffled, and the weights begin at random.

Run: python benchmarks/peers/pathology_guide.py --data FOLDER --training LIST.csv --validation LIST.csv
where FOLDER has training/images/STEM.tif and the lists are NCRF's: STEM,x,y of a region's centre and nine labels; or of
single patches, with one label.
"""

import csv
import math
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import monai.transforms as mt
import numpy as np
import torch
from monai.data import DataLoader, MaskedPatchWSIDataset, PatchWSIDataset, ThreadDataLoader
from monai.metrics import compute_roc_auc
from monai.networks.nets import resnet18
from PIL import Image, ImageEnhance
from torch import nn

from medspeed.benchmarks import peers
from medspeed.benchmarks.peers import Given, Item

METRIC, FALLS = "AUC", True  # the learning rate
SPREADS = (64.0 / 255.0, 0.75, 0.25, 0.04)  # of brightness, contrast, saturation and hue
ENHANCE = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
FORK = "fork"  # how workers start quickly; Linux's own way up to Python 3.13
CORES = len(os.sched_getaffinity(0))

# A scan has a patch for each pixel of the tissue mask at that level: every 64 at level 6.
FLAGS: dict[str, Any] = {"epochs": 10, "every": 1, "batch": 64, "rate": 1e-3, "training": Path, "validation": Path}
FLAGS |= {"patch": 224, "reader": "cucim", "workers": CORES, "mask_level": 6, "scan_batch": 64}
target = torch.Tensor.float


def parse_flags(words: Sequence[str] | None) -> Given:
    """Parse the flags."""
    given = peers.parse(__doc__, FLAGS, words)
    given.network = {"patch": given.patch}
    return given


def adjust(image: Image.Image, part: int, amount: float) -> Image.Image:
    """Change brightness, contrast or saturation (parts 0, 1, 2) by a factor; or (3) turn the hue, in turns, in HSV."""
    if part < len(ENHANCE):
        return ENHANCE[part](image).enhance(amount)
    hue, saturation, value = image.convert("HSV").split()
    turned = Image.fromarray(np.asarray(hue) + np.uint8(int(255 * amount) % 256))
    return Image.merge("HSV", (turned, saturation, value)).convert("RGB")


def jitter(image: np.ndarray) -> np.ndarray:
    """Return an image [3, Y, X] uint8 with TorchVision's ColorJitter: four factors, each uniform, in random order."""
    *near_one, turn = ((2 * torch.rand(4) - 1) * torch.tensor(SPREADS)).tolist()
    factors = [*(1.0 + each for each in near_one), turn]
    picture = Image.fromarray(np.ascontiguousarray(np.moveaxis(np.asarray(image, np.uint8), 0, -1)))
    for part in torch.randperm(4).tolist():
        picture = adjust(picture, part, factors[part])
    return np.moveaxis(np.asarray(picture), -1, 0)


def scaling() -> list[Callable[..., Any]]:
    """Return what validation and inference do: from [0, 255] to [-1, 1]."""
    return [mt.CastToTyped("image", dtype=np.float32), mt.ScaleIntensityRanged("image", 0.0, 255.0, -1.0, 1.0)]


def make_dataset(items: Sequence[Item], transforms: Sequence[Callable[..., Any]], given: Given) -> PatchWSIDataset:
    """Return the dataset of the tutorial: nine patches for each "location" (row, column), a centre; or one."""
    grid = math.isqrt(len(items[0]["label"]))
    square = mt.Lambdad("label", lambda label: label.reshape(1, grid, grid))
    split = mt.GridSplitd(("image", "label"), grid=(grid, grid), size={"image": given.patch, "label": 1})
    region = grid * given.patch + 48 * (grid - 1)  # 768 pixels of nine patches of 224
    chain = mt.Compose([square, split, *transforms])
    return PatchWSIDataset(items, patch_size=region, patch_level=0, reader=given.reader, transform=chain)


def make_loader(items: Sequence[Item], transforms: Sequence[Callable[..., Any]], given: Given, shuffle: bool) -> Any:  # noqa: ANN401
    """Return MONAI's loader with processes, or with none of them the one that loads ahead in a thread."""
    dataset, how = make_dataset(items, transforms, given), {"batch_size": given.batch, "shuffle": shuffle}
    if given.workers == 0:
        return ThreadDataLoader(dataset, num_workers=0, **how)
    ways = {"persistent_workers": True, "multiprocessing_context": FORK}
    return DataLoader(dataset, num_workers=given.workers, **how, **ways)


def training_loader(given: Given) -> Any:  # noqa: ANN401 - MONAI's
    """Return the loader of the training patches, with random transforms and the script's numpy conversions."""
    cast, scale = scaling()
    transforms = [
        mt.Lambdad("image", jitter, track_meta=False),
        mt.RandFlipd("image", spatial_axis=-1, prob=0.5),
        mt.RandRotate90d("image", prob=0.5),
        cast,
        mt.RandZoomd("image", prob=0.5, min_zoom=0.9, max_zoom=1.1),
        scale,
        mt.ToTensord("image", track_meta=False),
    ]
    return make_loader(read_list(given.training, given.data), transforms, given, shuffle=True)


def make_validation(given: Given) -> Callable[[nn.Module], float]:
    """Return what measures the AUC of the validation patches."""
    loader = make_loader(read_list(given.validation, given.data), scaling(), given, shuffle=False)

    def validate(network: nn.Module) -> float:
        half = peers.half_of(given.device)
        with torch.no_grad(), torch.autocast(given.device.split(":")[0], dtype=half, enabled=half is not None):
            pairs = [(network(item["image"].to(given.device)).flatten().cpu(), item["label"]) for item in loader]
        logits, labels = (torch.cat([each.flatten().float() for each in some]) for some in zip(*pairs, strict=True))
        return float(compute_roc_auc(logits, labels.int()))

    return validate


def make_network(patch: int = 224) -> nn.Module:
    """Return what TorchVisionFCModel("resnet18", num_classes=1, use_conv=True) makes of a ResNet-18.

    It takes patches [B, 3, Y, X] to logits [B, 1, 1, 1].
    """
    torch.backends.cudnn.benchmark = True  # as the tutorial has it with --optimized, in whichever process
    options = {"conv1_t_stride": 2, "feed_forward": False, "bias_downsample": False, "shortcut_type": "B"}
    net = resnet18(spatial_dims=2, n_input_channels=3, **options)
    used = ("conv1", "bn1", "act", "maxpool", "layer1", "layer2", "layer3", "layer4")
    features = nn.Sequential(OrderedDict((name, getattr(net, name)) for name in used))
    pool, head = nn.AvgPool2d(patch // 32, stride=1), nn.Conv2d(512, 1, kernel_size=1)  # 7 x 7
    return nn.Sequential(OrderedDict(features=features, pool=pool, head=head))


def make_loss() -> peers.Loss:
    """Return the guide's loss, of labels [B] or [B, 1, 1, 1]."""
    loss = nn.BCEWithLogitsLoss()
    return lambda logits, label: loss(logits, label.reshape(logits.shape).float())


def scan_slide(file: Path, network: nn.Module, given: Given) -> np.ndarray:
    """Return the probability map of a slide at the level of its tissue mask, as the bundle's ProbMapProducer makes it.

    One patch around each foreground pixel of that level goes through the network, which must be in evaluation mode.
    """
    sizes = {"patch_size": given.patch, "patch_level": 0, "mask_level": given.mask_level}
    transform = mt.Compose(scaling())
    dataset = MaskedPatchWSIDataset([{"image": str(file)}], transform=transform, reader=given.reader, **sizes)
    dataset.wsi_object_dict = {}  # a file that is open already must not be shared by processes
    found = np.zeros(dataset.image_data[0]["mask_size"], np.float64)
    device, amp_dtype = torch.device(given.device), peers.half_of(given.device)
    how = {"num_workers": given.workers, "multiprocessing_context": FORK if given.workers else None}
    for item in DataLoader(dataset, batch_size=given.scan_batch, **how):
        image = item["image"].as_tensor().to(device)
        with torch.no_grad(), torch.autocast(device.type, dtype=amp_dtype, enabled=amp_dtype is not None):
            probability = torch.sigmoid(network(image)).float().cpu().numpy()
        rows, columns = (np.asarray(each) for each in np.asarray(item["image"].meta["mask_location"]).T)
        found[rows, columns] = probability[:, 0, 0, 0]
    return found


def infer(files: Sequence[Path], network: nn.Module, to: Path, given: Given) -> None:
    """Scan slides, each into a probability map NAME.npy."""
    to.mkdir(parents=True, exist_ok=True)
    for file in files:
        np.save(to / f"{file.stem}.npy", scan_slide(file, network.eval(), given))


def read_list(path: Path, folder: Path) -> list[Item]:
    """Return the regions of a list: of a file, or of the name of one in training/images, as NCRF's.

    Their nine labels, which go column by column, are put row by row.
    """
    items = []
    for name, x, y, *labels in csv.reader(path.read_text().splitlines()):
        file = Path(name) if Path(name).suffix else folder / "training" / "images" / f"{name}.tif"
        grid = math.isqrt(len(labels))
        ordered = np.array(labels, float).reshape(grid, grid).T.flatten().tolist()
        items.append({"image": str(file), "location": [int(y), int(x)], "label": ordered})
    return items


if __name__ == "__main__":
    peers.train(sys.modules[__name__], parse_flags(None))
