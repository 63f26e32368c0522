"""The parts of `compare.py` for apps that segment volumes: the guide's way and ours, on the same cases.

What is true of one guide alone lies in `benchmarks/guides/APP.py`: its network, transforms, loader, step and sizes.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import torch
from monai.data import CacheDataset
from monai.transforms import Compose
from torch import nn

from medspeed.benchmarks.harness import Options, Row, Sides, endless, fast_step, row, save_start, step_rows, timed
from medspeed.common.data.batches import Batches, crop_batches
from medspeed.common.data.cache import fill_cache
from medspeed.common.data.crops import Tier
from medspeed.common.data.dataset import Case, read_dataset
from medspeed.common.data.monai_batches import monai_items
from medspeed.common.data.preparation import PreparedCase
from medspeed.common.data.store import prepared_cases
from medspeed.common.data.volumes import read_volume
from medspeed.common.export.onnx_model import export_onnx
from medspeed.common.host_memory import peak_memory
from medspeed.common.inference import Precision
from medspeed.common.inference.model import VolumeModel, import_weights, load_model, load_weights
from medspeed.common.inference.options import InferConfig
from medspeed.common.inference.scan_files import find_scans
from medspeed.common.inference.scans import Segmenter
from medspeed.common.inference.scores import score
from medspeed.common.training.losses import build_loss
from medspeed.common.training.setup import choose_precision
from medspeed.models import find_network

Size = tuple[int, int, int]
Step = Callable[[], object]

# Our ways from file to file: backend, precision, and whether windows fit the scan; else they are the plan's.
WAYS: dict[str, tuple[str, Precision, bool]] = {
    "fp32": ("torch", "fp32", True),
    "bf16": ("torch", "bf16", True),
    "fp32, windows of one size": ("torch", "fp32", False),
    "bf16, windows of one size": ("torch", "bf16", False),
    "fp32, ONNX Runtime": ("onnxruntime", "fp32", False),
}


@dataclass(frozen=True)
class Task(Options):
    """What the processes of the sides are told.

    Args:
        cases: of the measurement.
        model: network, preparation, labels and windows of the fast sides.
    """

    cases: tuple[Case, ...]
    model: VolumeModel

    def prepared(self) -> list[PreparedCase]:
        """Return the cases from the store; those that it lacks are prepared now."""
        labels = self.model.labelling.numbers
        return prepared_cases(self.cases, self.model.preparation, labels, self.folder / "store", progress=False)

    def batches(self, crop: Size, batch: int, augmented: bool = True) -> Batches:
        """Return batches of crops from where a run on this device holds the cases."""
        tier: Tier = "gpu" if self.device.type == "cuda" else "ram"
        cache = fill_cache(self.prepared(), [tier] * len(self.cases), crop, self.device)
        axes, intensity = ("xyz", 0.1) if augmented else ("", 0.0)
        return crop_batches([cache], self.own.CROPS_PER_CASE, batch, flip_axes=axes, intensity=intensity)


def open_task(options: Options, data: Path, most: int) -> Task:
    """Return what is measured on at most so many cases of a dataset in MSD layout."""
    dataset = read_dataset(data)
    cases = dataset.cases[:most]
    model = options.own.plan(replace(dataset, cases=cases), options.folder / "fingerprint")
    return Task(**vars(options), cases=cases, model=model)


def preparation(task: Task) -> list[Row]:
    """Time MONAI's CacheDataset fill against our start from nothing and from what is there, fingerprint included."""
    seconds, _ = timed(task, guide_preparation, [fast_preparation], task, warm_up=False)
    each = {name: [value / len(task.cases) for value in values] for name, values in seconds.items()}
    return [row(f"preparation, {start}", "s", each.get("guide", []), each[start]) for start in ("cold", "warm")]


def guide_preparation(task: Task) -> Sides:
    """Return MONAI's fill of a CacheDataset."""
    fixed, items = Compose(task.own.fixed(task.model, task.device)), monai_items(task.cases)
    workers = torch.get_num_threads()
    return {"guide": lambda: len(CacheDataset(items, fixed, num_workers=workers, progress=False))}


def fast_preparation(task: Task) -> Sides:
    """Return our start from nothing and from what is there; what an earlier round left is deleted in between."""
    store = task.folder / "store"
    dataset = replace(read_dataset(task.cases[0].image.parent.parent), cases=task.cases)

    def start() -> int:
        task.own.plan(dataset, store)
        return len(task.prepared())

    return {"deleting": lambda: shutil.rmtree(store, ignore_errors=True), "cold": start, "warm": start}


def step(task: Task) -> list[Row]:
    """Time the training step of the guide's network on equal crops, then each side's with its own batch."""
    task.prepared()
    rows = []
    for crop, batch in task.own.STEPS:
        seconds, _ = timed(task, guide_steps, [fast_steps], task, crop, batch, rounds=2 * task.rounds + 1)
        rows += step_rows(f"{batch} x {'x'.join(map(str, crop))}", seconds, task)
    return rows


def guide_steps(task: Task, crop: Size, batch: int) -> Sides:
    """Return the guide's steps on the same crops, and with batches of its own."""
    same = next(task.batches(crop, batch, augmented=False).epoch(0))
    given = same.image, task.own.target(same.label)
    loader = task.own.loader(task.cases, task.model, crop, batch, task.device)
    loaded = ((item["image"], item["label"]) for _ in count() for item in loader)
    make = partial(task.own.peer.make_network, task.model.preparation.channels)
    sides: dict[str, Step] = {
        f"guide {each}": partial(task.guide_step(make(), each), *given) for each in task.guide_precisions
    }
    own = task.guide_step(make(), task.usual)
    return {**sides, "guide with its batch": lambda: own(*next(loaded))}


def fast_steps(task: Task, crop: Size, batch: int) -> Sides:
    """Return our steps on the same crops as the guide's, and with batches of our own."""
    same = next(task.batches(crop, batch, augmented=False).epoch(0))
    sides: dict[str, Step] = {f"fast {each}": partial(_fast(task, each)[1], same) for each in task.precisions}
    cut, own = endless(task.batches(crop, batch)), _fast(task, task.chosen)[1]
    return {**sides, "fast with its batch": lambda: own(next(cut))}


def _fast(task: Task, precision: Precision) -> tuple[nn.Module, Callable[..., object]]:
    """Return our network and its step."""
    network = task.model.build().to(task.device)
    if task.own.channels_last(precision, task.device):
        network = network.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    loss = build_loss(task.own.LOSS, regions=task.model.labelling.regions)
    return network, fast_step(network, loss, precision, task.device)


def inference(task: Task) -> list[Row]:
    """Time segmentation from file to file: the MONAI way against ours, and compare the label maps with the labels."""
    scanned = task.cases[: max(1, len(task.cases) // 2)]
    lay_out(task, scanned)
    task = replace(task, cases=scanned)
    ways = [name for name, (_, precision, _) in WAYS.items() if precision in task.precisions]
    fast = [partial(fast_inference, name=name) for name in ways]
    seconds, peaks = timed(task, guide_inference, fast, task, warm_up=False)
    rows = []
    for name in ways:
        guide, ours = ([each / len(task.cases) for each in seconds.get(side, [])] for side in ("guide", name))
        rows.append(row(f"scan to mask, file to file, {name}", "s", guide, ours))
    for name in ways:
        sides = [[peaks[side] / 2**20] if side in peaks else [] for side in ("guide", name)]
        rows.append(row(f"peak memory of scan to mask, {name}", "MiB", *sides))
    regions = [region.members for region in task.model.labelling.regions]
    for name in ways if task.both else []:
        masks = {side: [task.folder / side / case.image.name for case in task.cases] for side in ("guide", name)}
        truth = [case.label for case in task.cases if case.label is not None]
        # A region that is in neither of two label maps counts as found.
        scores = [[float(np.nan_to_num(dices(found, truth, regions), nan=1.0).mean())] for found in masks.values()]
        rows.append(row(f"Dice of these masks, {name}", "", *scores))
        alike = np.nan_to_num(dices(masks["guide"], masks[name], regions), nan=1.0)
        rows.append(row(f"least Dice of a mask to the guide's, {name}", "", [], [float(alike.min())]))
    return rows


def lay_out(task: Task, scanned: Sequence[Case]) -> None:
    """Make a run of weights that have learned something, with its ONNX model, and a folder of links to the scans."""
    torch.manual_seed(0)
    crop, batch, steps = task.own.WARM
    deepest = [side // 2**task.own.HALVINGS for side in crop]
    network, one_step = _fast(task, choose_precision("auto", task.device, deepest))
    save_start(task, network, one_step, lambda: task.batches(crop, batch), steps)
    run, inputs, model = task.folder / "run", task.folder / "scans", task.model
    import_weights(run, task.app, model, task.weights)
    (run / "exports").mkdir()
    window = (model.preparation.channels, *model.window_size)
    export_onnx(model.build(run / "best.safetensors"), run / "exports" / "model_fp32.onnx", window, "fp32", {})
    inputs.mkdir()
    for case in scanned:
        (inputs / case.image.name).symlink_to(case.image.resolve())


def guide_inference(task: Task) -> Sides:
    """Return the MONAI way from files to label map files; it tells the process's peak memory."""
    peer, preparation = task.own.peer, task.model.preparation
    network = peer.make_network(preparation.channels).to(task.device)
    network.load_state_dict(load_weights(task.weights))
    files = [case.image for case in task.cases]

    def segment() -> int:
        peer.segment_files(files, network, task.folder / "guide", task.device, preparation.spacing)
        return peak_memory()

    return {"guide": segment}


def fast_inference(task: Task, name: str) -> Sides:
    """Return what segments all scans as `infer.py` does, opened once; it tells the process's peak memory."""
    (backend, precision, fit), folder = WAYS[name], task.folder
    config = InferConfig(
        folder / "run", folder / "scans", folder / name, backend=backend, precision=precision,  # type: ignore[arg-type]
        device=str(task.device), overlays=False, fit_windows=fit,
    )  # fmt: skip
    model = load_model(folder / "run", task.app, find_network)
    job = Segmenter(config, model).job(find_scans(folder / "scans"))

    def segment() -> int:
        failed = job.work(job.items)
        assert not failed, failed
        return peak_memory()

    return {name: segment}


def dices(some: Sequence[Path], others: Sequence[Path], regions: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the Dice of each region in each pair of files of label maps; NaN where it is in neither."""
    labels = {str(number): members for number, members in enumerate(regions)}
    pairs = zip(map(read_volume, some), map(read_volume, others), strict=True)
    return np.array([each["dice"] for one, other in pairs for each in score(one, other, labels, 0.0)], np.float64)
