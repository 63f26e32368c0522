"""The parts of `compare.py` for apps that segment volumes: the guide's way and ours, on the same cases.

What is true of one guide alone lies in `benchmarks/guides/APP.py`: its network, transforms, loader, step and sizes.
"""

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, repeat
from pathlib import Path
from types import ModuleType
from typing import Any

import nibabel
import numpy as np
import torch
from monai.data import CacheDataset
from monai.transforms import Compose
from torch import nn
from tqdm import tqdm

from benchmarks.harness import Options, Row, Sides, amp_dtype, guide_of, quality, row, step_rows, timed
from common.data.batches import Batch, KeyedBatches, crop_batches
from common.data.cache import fill_cache
from common.data.crops import Tier
from common.data.dataset import Case, read_dataset
from common.data.monai_batches import monai_items
from common.data.preparation import PreparedCase
from common.data.store import prepared_cases
from common.export.onnx_model import export_onnx
from common.inference.model import VolumeModel, import_weights, load_model, load_weights, save_weights
from common.inference.options import InferConfig, Precision
from common.inference.scan_files import find_scans
from common.inference.scans import open_segmenter
from common.run import peak_memory
from common.training.fit import train_step
from common.training.losses import build_loss
from common.training.optimizers import build_optimizer
from common.training.setup import choose_precision

Size = tuple[int, int, int]
Step = Callable[[], object]

_RATE = 0.01
# Our ways from file to file: backend, precision, and whether windows fit the scan; else they are the plan's.
WAYS: dict[str, tuple[str, Precision, bool]] = {
    "fp32": ("torch", "fp32", True),
    "bf16": ("torch", "bf16", True),
    "fp32, windows of one size": ("torch", "fp32", False),
    "bf16, windows of one size": ("torch", "bf16", False),
    "fp32, ONNX Runtime": ("onnxruntime", "fp32", False),
}


@dataclass(frozen=True)
class Task:
    """What the processes of the sides are told.

    Args:
        options: how it is measured.
        cases: of the measurement.
        model: network, preparation, labels and windows of the fast sides.
    """

    options: Options
    cases: tuple[Case, ...]
    model: VolumeModel

    @property
    def guide(self) -> ModuleType:
        """What is true of this guide alone."""
        return guide_of(self.options.app)

    @property
    def weights(self) -> Path:
        """File of the weights that both sides of the inference have."""
        return self.options.folder / "trained.safetensors"

    def prepared(self) -> list[PreparedCase]:
        """Return the cases from the store; those that it lacks are prepared now."""
        labels = self.model.labelling.numbers
        return prepared_cases(self.cases, self.model.preparation, labels, self.options.folder / "store", progress=False)

    def batches(self, crop: Size, batch: int, augmented: bool = True) -> KeyedBatches:
        """Return batches of crops from where a run on this device holds the cases."""
        tier: Tier = "gpu" if self.options.device.type == "cuda" else "ram"
        cache = fill_cache(self.prepared(), [tier] * len(self.cases), crop, self.options.device)
        axes, intensity = ("xyz", 0.1) if augmented else ("", 0.0)
        return crop_batches([cache], self.guide.CROPS_PER_CASE, batch, flip_axes=axes, intensity=intensity)


def compare(parts: Sequence[str], options: Options, data: Path, most: int) -> Iterator[tuple[str, list[Row]]]:
    """Measure the parts on at most so many cases of a dataset in MSD layout; yield each with its rows."""
    dataset = read_dataset(data)
    cases = dataset.cases[:most]
    task = Task(options, cases, guide_of(options.app).plan(replace(dataset, cases=cases), None))
    for part in parts:
        yield part, quality(options, None, "Dice on phantoms") if part == "quality" else PARTS[part](task)


def preparation(task: Task) -> list[Row]:
    """Time MONAI's CacheDataset fill against our start from nothing and from what is there, fingerprint included."""
    seconds, _ = timed(task.options, guide_preparation, [fast_preparation], task, warm_up=False)
    each = {name: [value / len(task.cases) for value in values] for name, values in seconds.items()}
    return [row(f"preparation, {start}", "s", each.get("guide", []), each[start]) for start in ("cold", "warm")]


def guide_preparation(task: Task) -> Sides:
    """Return MONAI's fill of a CacheDataset."""
    fixed, items = Compose(task.guide.fixed(task.model, task.options.device)), monai_items(task.cases)
    workers = torch.get_num_threads()
    return {"guide": lambda: len(CacheDataset(items, fixed, num_workers=workers, progress=False))}


def fast_preparation(task: Task) -> Sides:
    """Return our start from nothing and from what is there; what an earlier round left is deleted in between."""
    store = task.options.folder / "store"
    dataset = replace(read_dataset(task.cases[0].image.parent.parent), cases=task.cases)

    def start() -> int:
        task.guide.plan(dataset, store)
        return len(task.prepared())

    return {"deleting": lambda: shutil.rmtree(store, ignore_errors=True), "cold": start, "warm": start}


def step(task: Task) -> list[Row]:
    """Time the training step of the guide's network on equal crops, then each side's with its own batch."""
    task.prepared()
    rows = []
    for crop, batch in task.guide.STEPS:
        rounds = 2 * task.options.rounds + 1
        seconds, _ = timed(task.options, guide_steps, [fast_steps], task, crop, batch, rounds=rounds)
        rows += step_rows(f"{batch} x {'x'.join(map(str, crop))}", seconds, task.options)
    return rows


def guide_steps(task: Task, crop: Size, batch: int) -> Sides:
    """Return the guide's steps on the same crops, and with batches of its own."""
    same = next(task.batches(crop, batch, augmented=False).epoch(0))
    crops, options = (same.image, task.guide.target(same.label)), task.options
    loader = task.guide.loader(task.cases, task.model, crop, batch, options.device)
    loaded = ((item["image"], item["label"]) for _ in count() for item in loader)
    precisions = dict.fromkeys(each for each in ("fp32", options.half) if each is not None)
    return {
        **{f"guide {precision}": _guide_step(task, repeat(crops), precision) for precision in precisions},
        "guide with its batch": _guide_step(task, loaded, options.usual),
    }


def _guide_step(task: Task, batches: Iterator[tuple[Any, Any]], precision: str) -> Step:
    peer, device = task.guide.peer, task.options.device
    network = task.guide.network(task.model).to(device)
    loss, optimizer = peer.make_loss(), peer.make_optimizer(network)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    return lambda: peer.training_step(network, *next(batches), loss, optimizer, scaler, amp_dtype(precision))


def fast_steps(task: Task, crop: Size, batch: int) -> Sides:
    """Return our steps on the same crops as the guide's, and with batches of our own."""
    same = next(task.batches(crop, batch, augmented=False).epoch(0))
    sides = {f"fast {each}": _fast_step(task, repeat(same), each)[1] for each in task.options.precisions}
    own = task.batches(crop, batch)
    cut = (each for epoch in count() for each in own.epoch(epoch))
    return {**sides, "fast with its batch": _fast_step(task, cut, task.options.chosen)[1]}


def _fast_step(task: Task, batches: Iterator[Batch], precision: Precision) -> tuple[nn.Module, Step]:
    """Return our network and what does a step of it."""
    device = task.options.device
    network = task.model.build().to(device)
    if task.guide.channels_last(precision, device):
        network = network.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    optimizer = build_optimizer("novograd", network.parameters(), _RATE)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    loss = build_loss(task.guide.LOSS, regions=task.model.labelling.regions)
    return network, lambda: train_step(network, next(batches), loss, optimizer, scaler, precision, _RATE)


def inference(task: Task) -> list[Row]:
    """Time segmentation from file to file: the MONAI way against ours, and compare the label maps with the labels.

    Fast alone needs no label maps to compare: its network stays as it begins.
    """
    options, folder = task.options, task.options.folder
    save_start(task, train=options.guide)
    task = replace(task, cases=task.cases[: max(1, len(task.cases) // 2)])
    lay_out(task)
    ways = [name for name, (_, precision, _) in WAYS.items() if precision in options.precisions]
    fast = [partial(fast_inference, name=name) for name in ways]
    seconds, peaks = timed(options, guide_inference, fast, task, warm_up=False)
    regions = [region.members for region in task.model.labelling.regions]
    rows = []
    for name in ways:
        guide, ours = ([each / len(task.cases) for each in seconds.get(side, [])] for side in ("guide", name))
        rows.append(row(f"scan to mask, file to file, {name}", "s", guide, ours))
    for name in ways:
        sides = [[peaks[side] / 2**20] if side in peaks else [] for side in ("guide", name)]
        rows.append(row(f"peak memory of scan to mask, {name}", "MiB", *sides))
    for name in ways if options.guide else []:
        masks = {side: [folder / side / case.image.name for case in task.cases] for side in ("guide", name)}
        truth = [case.label for case in task.cases if case.label is not None]
        scores = ([mean_dice(masks[side], truth, regions)] for side in masks)
        rows.append(row(f"Dice of these masks, {name}", "", *scores))
        least = float(np.nan_to_num(dices(masks["guide"], masks[name], regions), nan=1.0).min())
        rows.append(row(f"least Dice of a mask to the guide's, {name}", "", [], [least]))
    return rows


def save_start(task: Task, train: bool) -> None:
    """Keep the weights that both sides of the inference begin with, those of a network that has learned something."""
    torch.manual_seed(0)
    crop, batch, steps = task.guide.WARM
    deepest = [side // 2**task.guide.HALVINGS for side in crop]
    cut = (each for epoch in count() for each in task.batches(crop, batch).epoch(epoch))
    network, one_step = _fast_step(task, cut, choose_precision("auto", task.options.device, deepest))
    for _ in tqdm(range(steps if train else 0), desc="training before inference", leave=False):
        one_step()
    cut.close()
    save_weights(task.weights, network.state_dict(), {})


def lay_out(task: Task) -> None:
    """Make a run of the weights, with its ONNX model, and a folder of links to the scans."""
    run, inputs, model = task.options.folder / "run", task.options.folder / "scans", task.model
    import_weights(run, task.options.app, model, task.weights)
    (run / "exports").mkdir()
    window = (model.preparation.channels, *model.window_size)
    export_onnx(model.build(run / "best.safetensors"), run / "exports" / "model_fp32.onnx", window, "fp32", {})
    inputs.mkdir()
    for case in task.cases:
        (inputs / case.image.name).symlink_to(case.image.resolve())


def guide_inference(task: Task) -> Sides:
    """Return the MONAI way from files to label map files; it tells the process's peak memory."""
    network = task.guide.network(task.model).to(task.options.device)
    network.load_state_dict(load_weights(task.weights))
    files, output = [case.image for case in task.cases], task.options.folder / "guide"

    def segment() -> int:
        task.guide.segment(files, network, output, task.model, task.options.device)
        return peak_memory()

    return {"guide": segment}


def fast_inference(task: Task, name: str) -> Sides:
    """Return what segments all scans as `infer.py` does, opened once; it tells the process's peak memory."""
    (backend, precision, fit), folder = WAYS[name], task.options.folder
    config = InferConfig(
        folder / "run", folder / "scans", folder / name, backend=backend, precision=precision,  # type: ignore[arg-type]
        device=str(task.options.device), overlays=False, fit_windows=fit,
    )  # fmt: skip
    model = load_model(folder / "run", task.options.app, task.model.network)
    job = open_segmenter(config, model).job(find_scans(folder / "scans"))

    def segment() -> int:
        failed = job.work(job.items)
        assert not failed, failed
        return peak_memory()

    return {name: segment}


def dices(some: Sequence[Path], others: Sequence[Path], regions: Sequence[Sequence[int]]) -> list[float]:
    """Return the Dice of each region in each pair of files of label maps; NaN where it is in neither."""
    found = []
    for pair in zip(some, others, strict=True):
        labels = [np.asarray(nibabel.load(path).dataobj) for path in pair]
        for members in regions:
            one, other = (np.isin(each, members) for each in labels)
            voxels = int(one.sum()) + int(other.sum())
            found.append(2 * int((one & other).sum()) / voxels if voxels else math.nan)
    return found


def mean_dice(some: Sequence[Path], others: Sequence[Path], regions: Sequence[Sequence[int]]) -> float:
    """Return the mean Dice over pairs of files of label maps and regions; 1 where there is none."""
    return float(np.mean(np.nan_to_num(dices(some, others, regions), nan=1.0)))


PARTS: dict[str, Callable[[Task], list[Row]]] = {"preparation": preparation, "step": step, "inference": inference}
