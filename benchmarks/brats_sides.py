"""The sides of `compare.py brats`, made and run in processes of their own (see `apart`)."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, repeat
from pathlib import Path
from typing import Any

import torch
from monai.data import CacheDataset
from monai.transforms import Compose
from torch import nn

from apps.brats.model import BratsModel
from apps.brats.plan import faster_channels_last
from apps.brats.regions import choose_labelling
from benchmarks.apart import Sides
from benchmarks.peers import brats_guide
from common.data.batches import Batch, CropBatches, fixed_batches
from common.data.cache_host import hold_cases
from common.data.cases import Case, Dataset, read_dataset
from common.data.fingerprint import fingerprint, plan_preparation
from common.data.monai_batches import monai_items
from common.data.preparation import PreparedCase
from common.data.store import prepared_cases
from common.inference.predictors import Precision
from common.training.checkpoints import load_weights, save_weights
from common.training.fit import train_step
from common.training.optimizers import build_optimizer
from common.training.precision import choose_precision
from common.training.region_losses import build_region_loss

Size = tuple[int, int, int]
Step = Callable[[], None]

GIVEN_BACK = "fast fp32, memory given back"
_FILTERS, _BLOCKS_DOWN = 16, (1, 2, 2, 4)  # the guide's
_OVERLAP = 0.25
_LEARNING_RATE = 0.01


@dataclass(frozen=True)
class Task:
    """What the processes of the sides are told.

    Args:
        cases: of the measurement.
        model: labelling, preparation, network and windows of the fast sides.
        device: where to compute.
        folder: for the prepared store, the weights and the label maps.
    """

    cases: tuple[Case, ...]
    model: BratsModel
    device: torch.device
    folder: Path

    def prepared(self) -> list[PreparedCase]:
        """Return the cases from the store; those that it lacks are prepared now."""
        classes = len(self.model.labelling.labels)
        return prepared_cases(self.cases, self.model.preparation, classes, self.folder / "store", progress=False)

    def batches(self, crop: Size, batch: int, augmented: bool = True) -> CropBatches:
        """Return batches of one crop of each case in an epoch, from where a run on this device holds them."""
        tier = "gpu" if self.device.type == "cuda" else "ram"
        held = hold_cases(self.prepared(), [tier] * len(self.cases), crop, self.device)  # type: ignore[list-item]
        axes, intensity = ((0, 1, 2), 0.1) if augmented else ((), 0.0)
        return fixed_batches(held, crop, 1, batch, axes, intensity, device=self.device)


def make_task(cases: Sequence[Case], window: Size, device: torch.device, folder: Path) -> Task:
    """Decide as a run does how the cases are prepared.

    Raises:
        ValueError: the regions of the data are not the guide's.
    """
    dataset = _dataset(cases)
    labelling = choose_labelling(dataset, "names")
    found = {region.name: region.members for region in labelling.regions}
    if found != brats_guide.REGIONS:
        raise ValueError(f"{dataset.folder}: regions {found}; the guide knows those of MSD only, {brats_guide.REGIONS}")
    preparation = plan_preparation(dataset, fingerprint(cases, dataset, progress=False))
    model = BratsModel(labelling, preparation, _FILTERS, _BLOCKS_DOWN, 0.0, window, 1, _OVERLAP, "fp32")
    return Task(tuple(cases), model, device, folder)


def guide_preparation(task: Task) -> Sides:
    """Return MONAI's fill of a CacheDataset."""
    fixed = Compose(brats_guide.fixed_transforms(("image", "label"), task.device, task.model.preparation.spacing))

    def guide() -> None:
        CacheDataset(monai_items(task.cases), fixed, num_workers=torch.get_num_threads(), progress=False)

    return {"guide": guide}


def fast_preparation(task: Task) -> Sides:
    """Return our start from nothing and from what is there, both with the dataset's fingerprint, and that alone.

    What an earlier round has left is deleted in a side of its own, before the start from nothing.
    """
    store, dataset = task.folder / "store", _dataset(task.cases)

    def start() -> None:
        fingerprint(task.cases, dataset, store, progress=False)
        task.prepared()

    return {
        "deleting": lambda: shutil.rmtree(store, ignore_errors=True),
        "cold": start,
        "warm": start,
        "fingerprint alone": lambda: fingerprint(task.cases, dataset, progress=False),
    }


def plain_steps(task: Task, crop: Size, batch: int, half: torch.dtype) -> Sides:
    """Return the steps of the process that gives freed memory back: the guide's, and ours for comparison."""
    same = next(task.batches(crop, batch, augmented=False).epoch(0))
    regions = torch.stack([brats_guide.label_to_regions(each[0]) for each in same.label])
    usual = torch.float16 if task.device.type == "cuda" else None  # the guide's autocast is for CUDA only
    spacing = task.model.preparation.spacing
    loader = brats_guide.training_loader(monai_items(task.cases), task.device, spacing, crop, batch)
    loaded = ((item["image"], item["label"]) for _ in count() for item in loader)
    sides = {
        "guide fp32": _guide_step(repeat((same.image, regions)), task, None),
        f"guide {'fp16' if half is torch.float16 else 'bf16'}": _guide_step(repeat((same.image, regions)), task, half),
        "guide with its batch": _guide_step(loaded, task, usual),
    }
    if task.device.type == "cpu":
        sides[GIVEN_BACK] = _fast_step(repeat(same), task, "fp32")
    return sides


def fast_steps(task: Task, crop: Size, batch: int) -> Sides:
    """Return our steps on the same crops as the guide's, and with batches of our own."""
    same = next(task.batches(crop, batch, augmented=False).epoch(0))
    own = task.batches(crop, batch)
    chosen = choose_precision("auto", task.device)
    precisions = dict.fromkeys(("fp32", "bf16", chosen))
    cut = (each for epoch in count() for each in own.epoch(epoch))
    return {
        **{f"fast {precision}": _fast_step(repeat(same), task, precision) for precision in precisions},
        "fast with its batch": _fast_step(cut, task, chosen),
    }


def guide_inference(task: Task, roi: Size) -> Sides:
    """Return the MONAI way from files to label map files."""
    network = brats_guide.make_network(task.model.preparation.channels, _FILTERS, _BLOCKS_DOWN).to(task.device)
    network.load_state_dict(load_weights(weights_of(task)))
    files = [case.image for case in task.cases]
    spacing = task.model.preparation.spacing
    return {
        "guide": lambda: brats_guide.segment_files(files, network, task.folder / "guide", task.device, spacing, roi)
    }


def save_trained(task: Task, crop: Size, batch: int, steps: int) -> None:
    """Train a little and keep the weights where both sides of the inference find them."""
    torch.manual_seed(0)
    deepest = [side // 2 ** (len(_BLOCKS_DOWN) - 1) for side in crop]
    network, one_step = _make_fast(task, choose_precision("auto", task.device, deepest))
    batches = (each for epoch in count() for each in task.batches(crop, batch).epoch(epoch))
    for _ in range(steps):
        one_step(next(batches))
    batches.close()
    save_weights(weights_of(task), network.state_dict(), {})


def weights_of(task: Task) -> Path:
    """Return the file of the weights that both sides of the inference have."""
    return task.folder / "trained.safetensors"


def _dataset(cases: Sequence[Case]) -> Dataset:
    return replace(read_dataset(cases[0].image.parent.parent), cases=tuple(cases))


def _guide_step(batches: Iterator[tuple[Any, Any]], task: Task, amp_dtype: torch.dtype | None) -> Step:
    network = brats_guide.make_network(task.model.preparation.channels, _FILTERS, _BLOCKS_DOWN).to(task.device)
    loss, optimizer = brats_guide.make_loss(), brats_guide.make_optimizer(network)
    scaler = torch.amp.GradScaler(task.device.type, enabled=amp_dtype is torch.float16)

    def step() -> None:
        image, label = next(batches)
        brats_guide.training_step(network, image, label, loss, optimizer, scaler, amp_dtype)

    return step


def _fast_step(batches: Iterator[Batch], task: Task, precision: Precision) -> Step:
    _, one_step = _make_fast(task, precision)
    return lambda: one_step(next(batches))


def _make_fast(task: Task, precision: Precision) -> tuple[nn.Module, Callable[[Batch], None]]:
    network = task.model.build().to(task.device)
    if faster_channels_last(precision, task.device):
        network = network.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    optimizer = build_optimizer("novograd", network.parameters(), _LEARNING_RATE)
    scaler = torch.amp.GradScaler(task.device.type, enabled=precision == "fp16")
    loss = build_region_loss("dice_focal", task.model.labelling.regions)

    def step(batch: Batch) -> None:
        train_step(network, batch, loss, optimizer, scaler, precision, _LEARNING_RATE)

    return network, step
