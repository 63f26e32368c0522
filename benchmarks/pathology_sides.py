"""The sides of `compare.py pathology`, made and run in processes of their own (see `apart`)."""

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from apps.pathology.batches import PatchBatches, hold_patches
from apps.pathology.config import PathologyConfig
from apps.pathology.model import PathologyModel, normalised
from apps.pathology.patch_sampling import sample_patches
from apps.pathology.patch_store import stored_patches
from apps.pathology.patch_table import PatchTable
from apps.pathology.scan import dense_scan
from apps.pathology.slide_set import SlideEntry, SlideSet
from apps.pathology.tissue import tissue_mask
from apps.pathology.view import choose_view
from benchmarks.apart import Sides
from benchmarks.peers import pathology_guide
from common.data.batches import Batch
from common.data.colour import ColourJitter
from common.data.patch_augmentation import PatchAugmentation
from common.data.slide_pool import SlidePool
from common.data.slides import open_slide
from common.inference.folding import folded
from common.inference.predictors import Precision, torch_predictor
from common.training.checkpoints import load_weights, save_weights
from common.training.fit import train_step
from common.training.losses import binary_cross_entropy
from common.training.optimizers import build_optimizer
from common.training.precision import choose_precision
from common.training.schedules import lr_factor
from models.resnet18_fcn import resnet18_fcn

Step = Callable[[], object]

PER_REGION = pathology_guide.GRID**2
_FAST = PathologyConfig()
_CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Task:
    """What the processes of the sides are told.

    Args:
        slides: of the measurement.
        model: patches, tiles and precision as a run would choose them here.
        reader: of the slides, for both sides.
        device: where to compute.
        folder: for decoded patches, the weights and the probability maps.
    """

    slides: SlideSet
    model: PathologyModel
    reader: str
    device: torch.device
    folder: Path

    @property
    def weights(self) -> Path:
        """Return the file of the trained weights."""
        return self.folder / "trained.safetensors"


def draw_patches(entries: Sequence[SlideEntry], wanted: int, size: int) -> PatchTable:
    """Return as many patches as wanted, spread over the slides.

    Raises:
        ValueError: there is no room for so many.
    """
    pool = SlidePool()
    try:
        table = sample_patches(entries, -(-2 * wanted // len(entries)), size, 0, pool)
    finally:
        pool.close()
    if len(table) < wanted:
        raise ValueError(f"{len(entries)} slides have room for {len(table)} patches of {size} pixels, not for {wanted}")
    return table.take(np.linspace(0, len(table) - 1, wanted).astype(np.int64))


def guide_preparation(task: Task, table: PatchTable, batch: int) -> Sides:
    """Return an epoch of loading and augmenting by MONAI, by way of each of its loaders."""

    def epoch(loader: Any) -> None:  # noqa: ANN401 - MONAI's
        for item in loader:
            item["image"].to(task.device)

    return {name: partial(epoch, loader) for name, loader in _guide_loaders(task, table, batch).items()}


def fast_preparation(task: Task, table: PatchTable, batch: int) -> Sides:
    """Return our first epoch, decoding included, and a later one."""
    pool, later = SlidePool(), _held(task, table, batch)
    numbers = count(1)

    def first_epoch() -> None:
        shutil.rmtree(_store(task), ignore_errors=True)
        _exhaust(_held(task, table, batch, pool), 0)

    return {"fast, first epoch": first_epoch, "fast, later epoch": lambda: _exhaust(later, next(numbers))}


def guide_steps(task: Task, table: PatchTable, batch: int, half: torch.dtype) -> Sides:
    """Return the guide's steps on the same patches again and again."""
    same = _same_batch(task, table, batch)

    def side(amp_dtype: torch.dtype | None) -> Step:
        one_step = _make_guide(task, table.size, amp_dtype)
        return lambda: one_step(same.image, same.label)

    return {"guide fp32": side(None), f"guide {'fp16' if half is torch.float16 else 'bf16'}": side(half)}


def fast_steps(task: Task, table: PatchTable, batch: int) -> Sides:
    """Return our steps on the same patches as the guide's."""
    same = _same_batch(task, table, batch)

    def side(precision: Precision) -> Step:
        one_step = _make_fast(task, table.size, precision)[1]
        return lambda: one_step(same)

    precisions: dict[Precision, None] = dict.fromkeys(("fp32", "bf16", choose_precision("auto", task.device)))
    return {f"fast {precision}": side(precision) for precision in precisions}


def guide_epochs(task: Task, table: PatchTable, batch: int) -> Sides:
    """Return the guide's epochs over the table, loading included, by way of each of MONAI's loaders."""
    usual = torch.float16 if task.device.type == "cuda" else None  # the guide's autocast is for CUDA only

    def side(loader: Any) -> Step:  # noqa: ANN401 - MONAI's
        one_step = _make_guide(task, table.size, usual)

        def epoch() -> None:
            for item in loader:
                one_step(item["image"].to(task.device), item["label"].to(task.device, torch.float32))

        return epoch

    return {name: side(loader) for name, loader in _guide_loaders(task, table, batch).items()}


def fast_epochs(task: Task, table: PatchTable, batch: int) -> Sides:
    """Return our epochs over the table, from decoded patches."""
    batches, numbers = _held(task, table, batch), count()
    one_step = _make_fast(task, table.size, choose_precision("auto", task.device))[1]

    def epoch() -> None:
        for each in batches.epoch(next(numbers)):
            one_step(each)

    return {"fast": epoch}


def guide_inference(task: Task, batch: int, mask_level: int) -> Sides:
    """Return the bundle's scan of the test slides, with loader processes and without."""
    network = pathology_guide.FullyConvolutional(task.model.patch_size).to(task.device).eval()
    network.load_state_dict(load_weights(task.weights))

    def side(name: str, workers: int) -> Step:
        def scan_all() -> None:
            for entry in task.slides.testing:
                found = pathology_guide.scan_slide(
                    entry.path, network, task.device, batch, workers, task.model.patch_size, mask_level, task.reader
                )
                save_map(task, name, entry, found)

        return scan_all

    ways = {"guide, workers": _CORES, "guide, no workers": 0}
    return {name: side(name, workers) for name, workers in ways.items()}


def fast_inference(task: Task) -> Sides:
    """Return our dense scan of the test slides, in fp32, bf16 and what a run would choose here."""

    def side(precision: Precision) -> Step:
        network = task.model.build(task.weights).to(task.device).eval()
        predictor = torch_predictor(folded(network), precision, channels_last=True)

        def scan_all() -> None:
            for entry in task.slides.testing:
                with open_slide(entry.path) as slide:
                    view = choose_view(slide, task.model.mpp)
                    tissue = tissue_mask(slide, assumed_mpp=view.base_mpp)
                    found = dense_scan(slide, task.model, predictor, task.device, tissue, view, progress=False)
                save_map(task, f"fast {precision}", entry, found.values)

        return scan_all

    precisions: dict[Precision, None] = dict.fromkeys(("fp32", "bf16", choose_precision("auto", task.device)))
    return {f"fast {precision}": side(precision) for precision in precisions}


def save_trained(task: Task, table: PatchTable, batch: int, steps: int) -> None:
    """Train a little and keep the weights where both sides of the inference find them."""
    torch.manual_seed(0)
    network, one_step = _make_fast(task, table.size, choose_precision("auto", task.device))
    held = _held(task, table, batch)
    batches = (each for epoch in count() for each in held.epoch(epoch))
    for step in range(steps):
        one_step(next(batches), _FAST.learning_rate * lr_factor("cosine", step, steps))
    batches.close()
    save_weights(task.weights, network.state_dict(), {})


def save_map(task: Task, side: str, entry: SlideEntry, values: np.ndarray) -> None:
    """Write a probability map as both sides do, as the bundle does it: .npy, one value per cell."""
    path = map_path(task, side, entry)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, values)


def map_path(task: Task, side: str, entry: SlideEntry) -> Path:
    """Return where a side's probability map of a slide lies."""
    return task.folder / side / entry.name / "probability.npy"


def _store(task: Task) -> Path:
    return task.folder / "patches"


def _exhaust(batches: PatchBatches, number: int) -> None:
    for _ in batches.epoch(number):
        pass


def _held(task: Task, table: PatchTable, batch: int, pool: SlidePool | None = None) -> PatchBatches:
    """Return batches of decoded patches, from where a run on this device holds them."""
    patches = stored_patches(table, _store(task), pool or SlidePool(), None, progress=False)
    tier = "gpu" if task.device.type == "cuda" else "ram"
    held = hold_patches(patches, np.arange(len(table)), tier, task.device)  # type: ignore[arg-type]
    jitter = ColourJitter(_FAST.brightness, _FAST.contrast, _FAST.saturation, _FAST.hue)
    augmentation = PatchAugmentation(jitter, zoom=_FAST.zoom)
    return PatchBatches([held], len(table), batch, 1, augmentation, 0, task.device)


def _same_batch(task: Task, table: PatchTable, batch: int) -> Batch:
    """Return the first patches of the table as they are, so that both sides step on the same."""
    some = table.take(np.arange(batch))
    patches = stored_patches(some, _store(task), SlidePool(), None, progress=False)
    image = normalised(torch.from_numpy(np.array(patches.pixels)).permute(0, 2, 3, 1)).contiguous()
    label = torch.from_numpy(patches.label.astype(np.float32))
    return Batch(image.to(task.device), label.to(task.device), ("",) * batch)


def _guide_loaders(task: Task, table: PatchTable, batch: int) -> dict[str, Any]:
    """Return MONAI's loaders of as many patches as the table has: of single ones, and of regions of nine."""
    assert len(table) % PER_REGION == batch % PER_REGION == 0, (len(table), batch)
    rows = list(zip(table.file.tolist(), table.corner.tolist(), table.label.tolist(), strict=True))
    patches = [
        {"image": str(table.files[file]), "location": [y, x], "label": float(mark)} for file, (x, y), mark in rows
    ]
    half = table.size // 2
    regions = [
        {"image": str(table.files[file]), "location": [y + half, x + half], "label": [float(mark)] * PER_REGION}
        for file, (x, y), mark in rows[::PER_REGION]
    ]
    transforms = pathology_guide.patch_transforms()
    datasets = {
        "patches": (pathology_guide.patch_dataset(patches, transforms, table.size, task.reader), batch),
        "regions": (pathology_guide.region_dataset(regions, transforms, table.size, task.reader), batch // PER_REGION),
    }
    return {
        f"guide, {kind}, {way}": pathology_guide.make_loader(dataset, each, workers)
        for kind, (dataset, each) in datasets.items()
        for way, workers in (("workers", _CORES), ("thread", 0))
    }


def _make_guide(
    task: Task, patch: int, amp_dtype: torch.dtype | None
) -> Callable[[torch.Tensor, torch.Tensor], object]:
    network = pathology_guide.FullyConvolutional(patch).to(task.device)
    loss, optimizer = nn.BCEWithLogitsLoss(), pathology_guide.make_optimizer(network)
    scaler = torch.amp.GradScaler(task.device.type, enabled=amp_dtype is torch.float16)
    return lambda image, label: pathology_guide.training_step(network, image, label, loss, optimizer, scaler, amp_dtype)


def _make_fast(task: Task, patch: int, precision: Precision) -> tuple[nn.Module, Callable[..., object]]:
    """Return the network and its step: of a batch, and a learning rate where it is not the first."""
    network = resnet18_fcn(patch).to(task.device)
    network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = build_optimizer(_FAST.optimizer, network.parameters(), _FAST.learning_rate)
    scaler = torch.amp.GradScaler(task.device.type, enabled=precision == "fp16")
    loss = binary_cross_entropy(_FAST.label_smoothing)

    def step(batch: Batch, rate: float = _FAST.learning_rate) -> None:
        train_step(network, batch, loss, optimizer, scaler, precision, rate)

    return network, step
