"""MONAI's recipe for tumour in slides, as `compare.py` calls it, and what it is measured at.

Patches and batches are multiples of nine, the patches of a region.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from medspeed.apps.pathology.patches.table import PatchTable
from medspeed.benchmarks import slides
from medspeed.benchmarks.harness import Sides
from medspeed.benchmarks.peers import pathology_guide as peer
from medspeed.benchmarks.slides import Task, held, save_map
from medspeed.common.inference.model import load_weights
from medspeed.data_scripts.make_slides import make_slides

Step = Callable[[torch.Tensor, torch.Tensor], object]

parts = slides

PER_REGION = peer.GRID**2
_CORES = len(os.sched_getaffinity(0))

PATCH = peer.PATCH  # side of the patches that are loaded and scanned, in pixels
LOADED = (1152, 72)  # patches in an epoch of loading, and in a batch
STEPS = ((224, 18), (96, 36))  # side of the patches and batch of each training step
EPOCH = 4  # steps in an epoch with loading
WARM = (1152, 9, 400)  # patches, batch and steps of the training before the scan, so that it finds something
SCAN_BATCH = 64  # patches in one call of the guide's scan; the bundle has 400
MASK_LEVEL = peer.MASK_LEVEL  # of the guide's tissue mask; one patch for each of its pixels, every 64 at level 6
# The app's own figures for a CPU, 300 steps, with our learning rate for both sides: the guide's is made for 40,000.
QUALITY = {
    "patch_size": 96, "patches_per_slide": 160, "batch_size": 32, "learning_rate": 0.01, "epochs": 10,
    "validate_every": 10,
}  # fmt: skip
JUDGED = "patch AUC on synthetic slides"


def make_data(folder: Path, small: bool) -> Path:
    """Make the data of a ladder, or of a record."""
    return make_slides(folder, 8, 2) if small else make_slides(folder)


def guide_preparation(task: Task, table: PatchTable, batch: int) -> Sides:
    """Return an epoch of loading and augmenting by MONAI, by way of each of its loaders."""
    return _epochs(task, table, batch, lambda: lambda image, label: None)


def guide_epochs(task: Task, table: PatchTable, batch: int) -> Sides:
    """Return the guide's epochs over the table, loading included, by way of each of MONAI's loaders."""
    return _epochs(task, table, batch, lambda: task.guide_step(peer.FullyConvolutional(table.size), task.usual))


def _epochs(task: Task, table: PatchTable, batch: int, make_step: Callable[[], Step]) -> Sides:
    def epoch(loader: Any, step: Step) -> None:  # noqa: ANN401 - MONAI's
        for item in loader:
            step(item["image"].to(task.device), item["label"].to(task.device, torch.float32))

    return {name: partial(epoch, loader, make_step()) for name, loader in guide_loaders(task, table, batch).items()}


def guide_loaders(task: Task, table: PatchTable, batch: int) -> dict[str, Any]:
    """Return MONAI's loaders of as many patches as the table has: of single ones, and of regions of nine."""
    assert len(table) % PER_REGION == batch % PER_REGION == 0, (len(table), batch)
    half, transforms = table.size // 2, peer.patch_transforms()
    patches, regions = [], []
    for file, (x, y), mark in zip(table.file.tolist(), table.corner.tolist(), table.label.tolist(), strict=True):
        image, label = str(table.files[file]), float(mark)
        patches.append({"image": image, "location": [y, x], "label": label})
        regions.append({"image": image, "location": [y + half, x + half], "label": [label] * PER_REGION})
    datasets = {
        "patches": (peer.patch_dataset(patches, transforms, table.size, task.reader), batch),
        "regions": (
            peer.region_dataset(regions[::PER_REGION], transforms, table.size, task.reader), batch // PER_REGION,
        ),
    }  # fmt: skip
    return {
        f"guide, {kind}, {way}": peer.make_loader(dataset, each, workers)
        for kind, (dataset, each) in datasets.items()
        for way, workers in (("workers", _CORES), ("thread", 0))
    }


def guide_steps(task: Task, table: PatchTable, batch: int) -> Sides:
    """Return the guide's steps on the same patches again and again."""
    same = next(held(task, table, batch).epoch(0))
    return {
        f"guide {each}": partial(task.guide_step(peer.FullyConvolutional(table.size), each), same.image, same.label)
        for each in task.guide_precisions
    }


def guide_inference(task: Task) -> Sides:
    """Return the bundle's scan of the test slides, with loader processes and without."""
    device, size = task.device, task.model.patch_size
    network = peer.FullyConvolutional(size).to(device).eval()
    network.load_state_dict(load_weights(task.weights))

    def scan_all(name: str, workers: int) -> None:
        for entry in task.slides.testing:
            found = peer.scan_slide(entry.path, network, device, SCAN_BATCH, workers, size, MASK_LEVEL, task.reader)
            save_map(task.map_path(name, entry), found)

    ways = {"guide, workers": _CORES, "guide, no workers": 0}
    return {name: partial(scan_all, name, workers) for name, workers in ways.items()}
