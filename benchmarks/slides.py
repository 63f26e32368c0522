"""The parts of `compare.py` for slides: the guide's way and ours, on the same patches and slides.

The guide has its numpy backend, which is what runs without cuPy. Of its ways to load (single patches or regions of
nine, processes or a thread) the fastest counts, and its rows name it.
"""

import shutil
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from medspeed.apps.pathology.config import EvaluateConfig, PathologyConfig
from medspeed.apps.pathology.evaluate import main as evaluate
from medspeed.apps.pathology.model import PathologyModel, choose, model_of
from medspeed.apps.pathology.patches.draw import sample_patches
from medspeed.apps.pathology.patches.store import patch_batches, stored_patches
from medspeed.apps.pathology.patches.table import PatchTable
from medspeed.apps.pathology.scan.outputs import find_detections, write_detections_csv
from medspeed.apps.pathology.scan.scan import ProbabilityMap, choose_view, scan_slide
from medspeed.apps.pathology.slides.camelyon import SlideEntry, SlideSet, read_slide_set
from medspeed.apps.pathology.slides.masks import tissue_mask
from medspeed.apps.pathology.slides.reader import open_slide
from medspeed.benchmarks.harness import Options, Row, Sides, Values, fast_step, row, save_start, step_rows, timed
from medspeed.common.config import replaced
from medspeed.common.console import say
from medspeed.common.data.batches import Batches
from medspeed.common.files import read_object, write_json
from medspeed.common.inference import Precision
from medspeed.common.inference.open_predictor import folded
from medspeed.common.inference.predictors import torch_predictor
from medspeed.common.training.losses import binary_cross_entropy
from medspeed.models.resnet18_fcn import STRIDE, resnet18_fcn

Step = Callable[[], object]

_FAST = PathologyConfig()


@dataclass(frozen=True)
class Task(Options):
    """What the processes of the sides are told.

    Args:
        slides: of the measurement.
        model: patches, tiles and precision as a run would choose them here.
        reader: of the slides, for both sides.
    """

    slides: SlideSet
    model: PathologyModel
    reader: str

    def map_path(self, side: str, entry: SlideEntry) -> Path:
        """Return where a side's probability map of a slide lies."""
        return self.folder / side / entry.name / "probability.npy"


def open_task(options: Options, data: Path, most: int) -> Task:
    """Return what is measured on a set of slides.

    At most so many slides are trained on and half as many scanned, those with tumour and those without in turn.
    """
    slides, own = read_slide_set(data), options.own
    slides = replace(slides, training=some(slides.training, most), testing=some(slides.testing, max(2, most // 2)))
    slide = open_slide(slides.training[0].path)
    config = choose(replace(_FAST, patch_size=own.PATCH, mpp=slide.mpp), own.LOADED[0], options.device)
    return Task(**vars(options), slides=slides, model=model_of(config, options.device), reader=slide.reader)


def some(entries: Sequence[SlideEntry], most: int) -> tuple[SlideEntry, ...]:
    """Return the first slides with tumour and the first without, in turn."""
    kinds = [[entry for entry in entries if entry.tumour == tumour] for tumour in (True, False)]
    places = {entry.name: place for kind in kinds for place, entry in enumerate(kind)}
    return tuple(sorted(entries, key=lambda entry: (places[entry.name], entry.name))[:most])


def draw_patches(entries: Sequence[SlideEntry], wanted: int, size: int) -> PatchTable:
    """Return as many patches as wanted, spread over the slides.

    Raises:
        ValueError: there is no room for so many.
    """
    config = replace(_FAST, patch_size=size, patches_per_slide=-(-2 * wanted // len(entries)))
    table = sample_patches(entries, config)
    if len(table) < wanted:
        raise ValueError(f"{len(entries)} slides have room for {len(table)} patches of {size} pixels, not for {wanted}")
    return table.take(np.linspace(0, len(table) - 1, wanted).astype(np.int64))


def quickest(seconds: Values) -> tuple[str, list[float]]:
    """Return which of the guide's ways to load counts, in words for a row, and its seconds."""
    guides = {name: values for name, values in seconds.items() if name.startswith("guide, ")}
    if not guides:
        return "", []
    best = min(guides, key=lambda name: statistics.median(guides[name]))
    return f" (guide: {best.removeprefix('guide, ')})", guides[best]


def preparation(task: Task) -> list[Row]:
    """Time an epoch of loading and augmenting: MONAI's against our first one, decoding included, and a later one."""
    wanted, batch = task.own.LOADED
    table = draw_patches(task.slides.training, wanted, task.own.PATCH)
    seconds, _ = timed(task, task.own.guide_preparation, [fast_preparation], task, table, batch)
    way, guide = quickest(seconds)
    rows = []
    for epoch in ("first epoch", "later epochs"):
        rates = [[wanted / each for each in values] for values in (guide, seconds[epoch])]
        rows.append(row(f"loading and colour jitter, {epoch}{way}", "/s", *rates))
    return rows


def fast_preparation(task: Task, table: PatchTable, batch: int) -> Sides:
    """Return our first epoch, decoding included, and a later one."""

    def first_epoch() -> None:
        shutil.rmtree(task.folder / "patches", ignore_errors=True)
        deque(held(task, table, batch).epoch(0), maxlen=0)

    later, numbers = held(task, table, batch), count(1)
    return {"first epoch": first_epoch, "later epochs": lambda: deque(later.epoch(next(numbers)), maxlen=0)}


def held(task: Task, table: PatchTable, batch: int) -> Batches:
    """Return batches of decoded patches, from where a run on this device holds them."""
    patches = stored_patches(table, task.folder / "patches", _FAST, progress=False, tell=say)
    if task.device.type == "cuda":
        patches = patches.on_device(np.arange(len(table)), task.device)
    config = replaced(_FAST, {"batch_size": batch, "parallel.partitions": 1})
    return patch_batches(patches, range(1), config, task.device)


def step(task: Task) -> list[Row]:
    """Time the training step of the guide's network on equal patches, then each side's with its own loading."""
    rows = []
    for patch, batch in task.own.STEPS:
        table = draw_patches(task.slides.training, task.own.EPOCH * batch, patch)
        rounds = 2 * task.rounds + 1
        seconds, _ = timed(task, task.own.guide_steps, [fast_steps], task, table, batch, rounds=rounds)
        epochs, _ = timed(task, task.own.guide_epochs, [fast_epochs], task, table, batch)
        each = {name: [value / task.own.EPOCH for value in values] for name, values in epochs.items()}
        way, guide = quickest(each)
        seconds |= {"guide with its batch": guide, "fast with its batch": each["fast"]}
        rows += step_rows(f"{batch} x {patch}x{patch}{way}", seconds, task)
    return rows


def fast_steps(task: Task, table: PatchTable, batch: int) -> Sides:
    """Return our steps on the same patches as the guide's."""
    same = next(held(task, table, batch).epoch(0))
    return {f"fast {each}": partial(_fast(task, table.size, each)[1], same) for each in task.precisions}


def fast_epochs(task: Task, table: PatchTable, batch: int) -> Sides:
    """Return our epochs over the table, from decoded patches."""
    batches, numbers = held(task, table, batch), count()
    one_step = _fast(task, table.size, task.chosen)[1]

    def epoch() -> None:
        for each in batches.epoch(next(numbers)):
            one_step(each)

    return {"fast": epoch}


def _fast(task: Task, patch: int, precision: Precision) -> tuple[nn.Module, Callable[..., object]]:
    """Return our network and its step."""
    network = resnet18_fcn(patch).to(task.device)
    network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    loss = binary_cross_entropy(_FAST.augmentation.label_smoothing)
    return network, fast_step(network, loss, precision, task.device)


def inference(task: Task) -> list[Row]:
    """Time the scan of the test slides: the bundle's way against our dense one, and score both maps."""
    torch.manual_seed(0)
    wanted, batch, steps = task.own.WARM
    network, one_step = _fast(task, task.own.PATCH, task.chosen)

    def batches() -> Batches:
        return held(task, draw_patches(task.slides.training, wanted, task.own.PATCH), batch)

    save_start(task, network, one_step, batches, steps)
    seconds, _ = timed(task, task.own.guide_inference, [fast_inference], task, warm_up=False)
    each = {name: [value / len(task.slides.testing) for value in values] for name, values in seconds.items()}
    way, guide = quickest(each)
    rows = [row(f"scan of a slide, {name}{way}", "s", guide, each[name]) for name in task.precisions]
    if task.both:
        theirs = score(task, "guide, no workers", 2**task.own.MASK_LEVEL)
        ours = score(task, task.chosen, STRIDE)
        for name, key in (("FROC", "froc"), ("slide AUC", "slide_auc")):
            rows.append(row(f"{name} of these scans", "", [theirs[key]], [ours[key]]))
    return rows


def fast_inference(task: Task) -> Sides:
    """Return our dense scan of the test slides, in fp32, bf16 and what a run would choose here."""

    def side(precision: Precision) -> Step:
        network = task.model.build(task.weights).to(task.device).eval()
        predictor = torch_predictor(folded(network), precision, channels_last=True)

        def scan_all() -> None:
            for entry in task.slides.testing:
                slide = open_slide(entry.path)
                view = choose_view(slide, task.model.mpp)
                tissue = tissue_mask(slide, assumed_mpp=view.base_mpp)
                found = scan_slide(slide, task.model, predictor, task.device, tissue, view)
                save_map(task.map_path(precision, entry), found.values)

        return scan_all

    return {precision: side(precision) for precision in task.precisions}


def save_map(path: Path, values: np.ndarray) -> None:
    """Write a probability map as both sides do, as the bundle does it: .npy, one value per cell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, values)


def score(task: Task, side: str, stride: int) -> dict[str, Any]:
    """Judge the maps of a side, one value every `stride` pixels, as the app judges its scans."""
    for entry in task.slides.testing:
        path = task.map_path(side, entry)
        values = np.load(path).astype(np.float32)
        slide = open_slide(entry.path)
        base_mpp, mpp, level = choose_view(slide, task.model.mpp).base_mpp, slide.mpp, slide.levels[0]
        found = find_detections(ProbabilityMap(values, stride, values > 0, 0), base_mpp)
        write_detections_csv(path.with_name("detections.csv"), found)
        about = {"name": entry.name, "probability": float(values.max(initial=0)), "mpp": mpp}
        write_json(path.with_name("slide.json"), {**about, "size": [level.width, level.height]})
    evaluate(EvaluateConfig(task.folder / side, task.slides.folder))
    return read_object(task.folder / side / "froc.json")
