"""The parts of `compare.py pathology`: each runs the guide and fast in turn and returns its figures by name.

The guide has its numpy backend, which is what runs without cuPy. Of its ways to load (single patches or regions of
nine, processes or a thread) the fastest counts. On a CPU the fast sides run in a process that keeps freed memory, as
our runs do, and the guide's in one that does not.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apps.pathology.config import GUIDE, PathologyConfig
from apps.pathology.evaluate import main as evaluate
from apps.pathology.options import EvaluateConfig
from apps.pathology.outputs import find_detections, write_detections_csv
from apps.pathology.plan import plan_run
from apps.pathology.scan import ProbabilityMap
from apps.pathology.slide_set import SlideEntry, SlideSet, read_slide_set
from apps.pathology.train import main as train
from apps.pathology.view import choose_view
from benchmarks.apart import apart
from benchmarks.in_turn import in_turn, median, ratio
from benchmarks.pathology_sides import (
    Task,
    draw_patches,
    fast_epochs,
    fast_inference,
    fast_preparation,
    fast_steps,
    guide_epochs,
    guide_inference,
    guide_preparation,
    guide_steps,
    map_path,
    save_trained,
)
from benchmarks.peers import pathology_guide
from common.data.slides import open_slide
from common.files import write_json
from common.training.precision import choose_precision
from models.resnet18_fcn import STRIDE

Figures = dict[str, Any]
Seconds = dict[str, list[float]]


@dataclass(frozen=True)
class Sizes:
    """What the parts are measured at; patches and batches are multiples of nine, the patches of a region.

    Args:
        patch: side of the patches that are loaded and scanned, in pixels.
        loaded: patches in an epoch of loading, and in a batch.
        steps: side and batch of each training step.
        epoch: steps in an epoch with loading.
        warm: patches, batch and steps of the training before the scan, so that it finds something.
        scan_batch: patches in one call of the guide's scan; the bundle has 400.
        mask_level: of the guide's tissue mask; one patch for each of its pixels, every 64 pixels at level 6.
    """

    patch: int = pathology_guide.PATCH
    loaded: tuple[int, int] = (1152, 72)
    steps: tuple[tuple[int, int], ...] = ((224, 18), (96, 36))
    epoch: int = 4
    warm: tuple[int, int, int] = (1152, 9, 400)
    scan_batch: int = 64
    mask_level: int = pathology_guide.MASK_LEVEL


SIZES = Sizes()
# The app's own figures for a CPU, 300 steps, with our learning rate for both sides: the guide's is made for 40,000.
QUALITY = PathologyConfig(
    patch_size=96,
    patches_per_slide=160,
    batch_size=32,
    epochs=10,
    validate_every=10,
    engine="none",
)
_EQUAL = (
    "data", "device", "store", "precision", "patch_size", "patches_per_slide", "batch_size", "learning_rate", "epochs",
    "validate_every", "engine",
)  # fmt: skip


def read_slides(folder: Path, most: int) -> tuple[SlideSet, int]:
    """Return a set of slides with at most so many to train on and half as many to test on, and how many that is."""
    slides = read_slide_set(folder)
    slides = replace(slides, training=_some(slides.training, most), testing=_some(slides.testing, max(2, most // 2)))
    return slides, len(slides.training) + len(slides.testing)


def preparation(slides: SlideSet, rounds: int, device: torch.device, folder: Path) -> Figures:
    """Time an epoch of loading and augmenting: MONAI's against our first one, decoding included, and a later one."""
    task = _make_task(slides, device, folder)
    wanted, batch = SIZES.loaded
    table = draw_patches(slides.training, wanted, SIZES.patch)
    plain = apart(guide_preparation, task, table, batch, keep_freed=False)
    kept = apart(fast_preparation, task, table, batch, keep_freed=device.type == "cpu")
    with plain as guide, kept as fast:
        seconds = in_turn({**guide, **fast}, rounds)
    best = _quickest(seconds, guide)
    return {
        "reader of both sides": task.reader,
        **{f"{name}, patches per s": round(wanted / median(seconds[name]), 1) for name in seconds},
        "the guide that counts": best,
        "guide / fast, first epoch": ratio(seconds[best], seconds["fast, first epoch"]),
        "guide / fast, later epochs": ratio(seconds[best], seconds["fast, later epoch"]),
    }


def step(slides: SlideSet, rounds: int, device: torch.device, folder: Path) -> Figures:
    """Time the training step of the guide's network on equal patches, then each side's with its own loading."""
    task = _make_task(slides, device, folder)
    half = torch.float16 if device.type == "cuda" else torch.bfloat16
    guide_half = "guide fp16" if device.type == "cuda" else "guide bf16"
    usual = guide_half if device.type == "cuda" else "guide fp32"  # the guide's autocast is for CUDA only
    chosen = choose_precision("auto", device)
    figures: Figures = {"precision that fast chooses here": chosen}
    for patch, batch in SIZES.steps:
        table = draw_patches(slides.training, SIZES.epoch * batch, patch)
        plain = apart(guide_steps, task, table, batch, half, keep_freed=False)
        kept = apart(fast_steps, task, table, batch, keep_freed=device.type == "cpu")
        with plain as guide, kept as fast:
            seconds = in_turn({**guide, **fast}, 2 * rounds + 1)
        figures[f"{batch} x {patch}x{patch}"] = {
            **{f"{name}, s": median(seconds[name]) for name in seconds},
            "guide / fast": ratio(seconds[usual], seconds[f"fast {chosen}"]),
            "guide / fast, both fp32": ratio(seconds["guide fp32"], seconds["fast fp32"]),
            "guide / fast, both half": ratio(seconds[guide_half], seconds["fast bf16"]),
            **_with_loading(task, table, batch, rounds),
        }
    return figures


def _with_loading(task: Task, table: Any, batch: int, rounds: int) -> Figures:  # noqa: ANN401
    plain = apart(guide_epochs, task, table, batch, keep_freed=False)
    kept = apart(fast_epochs, task, table, batch, keep_freed=task.device.type == "cpu")
    with plain as guide, kept as fast:
        seconds = in_turn({**guide, **fast}, rounds)
    best = _quickest(seconds, guide)
    per_step = {name: median([each / SIZES.epoch for each in seconds[name]]) for name in seconds}
    return {
        **{f"{name}, with its batch, s": per_step[name] for name in seconds},
        "the guide that counts": best,
        "guide / fast, with their batches": ratio(seconds[best], seconds["fast"]),
    }


def inference(slides: SlideSet, rounds: int, device: torch.device, folder: Path) -> Figures:
    """Time the scan of the test slides: the bundle's way against our dense one, and score both maps."""
    task = _make_task(slides, device, folder)
    patches, batch, steps = SIZES.warm
    save_trained(task, draw_patches(slides.training, patches, SIZES.patch), batch, steps)
    plain = apart(guide_inference, task, SIZES.scan_batch, SIZES.mask_level, keep_freed=False)
    kept = apart(fast_inference, task, keep_freed=device.type == "cpu")
    with plain as guide, kept as fast:
        seconds = in_turn({**guide, **fast}, rounds, warm_up=False)
    best, chosen = _quickest(seconds, guide), choose_precision("auto", device)
    scores = {
        **{name: _score(task, name, 2**SIZES.mask_level) for name in guide},
        **{name: _score(task, name, STRIDE) for name in fast},
    }
    return {
        "precision that fast chooses here": chosen,
        **{f"{name}, s per slide": median([each / len(slides.testing) for each in seconds[name]]) for name in seconds},
        "the guide that counts": best,
        "guide / fast": ratio(seconds[best], seconds[f"fast {chosen}"]),
        "guide / fast fp32": ratio(seconds[best], seconds["fast fp32"]),
        "guide / fast bf16": ratio(seconds[best], seconds["fast bf16"]),
        **{f"FROC, {name}": scores[name]["froc"] for name in scores},
        **{f"slide AUC, {name}": scores[name]["slide_auc"] for name in scores},
    }


def quality(slides: SlideSet, rounds: int, device: torch.device, folder: Path) -> Figures:
    """Train the guide and fast over `rounds` seeds: patches, batch, steps and learning rate equal."""
    precision = choose_precision("auto", device)
    fast = replace(QUALITY, data=slides.folder, device=str(device), store=folder, precision=precision)
    guide = replace(GUIDE, **{name: getattr(fast, name) for name in _EQUAL})
    scores: dict[str, list[float]] = {"guide": [], "fast": []}
    for seed in range(rounds):
        for name, config in (("guide", guide), ("fast", fast)):
            summary = train(replace(config, seed=seed, run=folder / f"{name}-{seed}"))
            assert summary is not None
            scores[name].append(round(summary.quality.value, 4))
    return {
        "learning rate of both sides": fast.learning_rate,
        "precision of both sides": precision,
        "guide, patch AUC by seed": scores["guide"],
        "fast, patch AUC by seed": scores["fast"],
        "fast - guide, mean": round(float(np.mean(scores["fast"]) - np.mean(scores["guide"])), 4),
    }


def _make_task(slides: SlideSet, device: torch.device, folder: Path) -> Task:
    """Decide as a run does what patches and tiles are like."""
    with open_slide(slides.training[0].path) as slide:
        mpp, reader = slide.mpp, slide.reader
    plan = plan_run(PathologyConfig(), SIZES.patch, mpp, SIZES.loaded[0], ("", ""), device)
    return Task(slides, plan.model, reader, device, folder)


def _some(entries: Sequence[SlideEntry], most: int) -> tuple[SlideEntry, ...]:
    """Return the first slides with tumour and the first without, in turn."""
    kinds = [[entry for entry in entries if entry.tumour == tumour] for tumour in (True, False)]
    places = {entry.name: place for kind in kinds for place, entry in enumerate(kind)}
    return tuple(sorted(entries, key=lambda entry: (places[entry.name], entry.name))[:most])


def _quickest(seconds: Seconds, names: Mapping[str, object]) -> str:
    return min(names, key=lambda name: statistics.median(seconds[name]))


def _score(task: Task, side: str, stride: int) -> Figures:
    """Judge the maps of a side, one value every `stride` pixels, as the app judges its scans."""
    for entry in task.slides.testing:
        path = map_path(task, side, entry)
        values = np.load(path).astype(np.float32)
        with open_slide(entry.path) as slide:
            base_mpp, mpp, level = choose_view(slide, task.model.mpp).base_mpp, slide.mpp, slide.levels[0]
        found = ProbabilityMap(values, stride, stride / 2, values > 0, 0)
        write_detections_csv(path.with_name("detections.csv"), find_detections(found, base_mpp))
        size, greatest = [level.width, level.height], float(values.max(initial=0))
        record = {"name": entry.name, "probability": greatest, "mpp": mpp, "size": size}
        write_json(path.with_name("slide.json"), record)
    evaluate(EvaluateConfig(task.folder / side, task.slides.folder))
    content: Figures = json.loads((task.folder / side / "froc.json").read_text(encoding="utf-8"))
    return content
