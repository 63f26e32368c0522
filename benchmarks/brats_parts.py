"""The parts of `compare.py brats`: each runs the guide and fast in turn and returns its figures by name.

On a CPU the fast sides run in a process that keeps freed memory, as our runs do, and the guide's in one that does not.
The working spacing is the median of the data for both sides: the guide's 1 mm for MSD's scans.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apps.brats.config import GUIDE, BratsConfig
from apps.brats.train import main as train
from benchmarks import file_to_file
from benchmarks.apart import apart
from benchmarks.brats_sides import (
    GIVEN_BACK,
    Size,
    fast_preparation,
    fast_steps,
    guide_inference,
    guide_preparation,
    make_task,
    plain_steps,
    save_trained,
    weights_of,
)
from benchmarks.in_turn import in_turn, median, ratio
from benchmarks.masks import least_dice, mean_dice
from benchmarks.peers import brats_guide
from common.data.cases import Case
from common.training.precision import choose_precision

Figures = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """What the parts are measured at.

    Args:
        steps: crop X, Y, Z in voxels and batch of each training step.
        roi: the guide's window.
        window: ours.
        warm: crop, batch and steps of the training before inference, so that the label maps that it compares are those
            of a network that has learned something.
    """

    steps: tuple[tuple[Size, int], ...] = (((96, 96, 96), 1), ((64, 64, 64), 2))
    roi: Size = brats_guide.VALIDATION_ROI
    window: Size = (144, 104, 144)  # what the app plans for MSD's scans: two windows cover a brain
    warm: tuple[Size, int, int] = ((64, 64, 64), 2, 40)


SIZES = Sizes()
# The app's own figures for a CPU, for both sides: 112 steps of four crops, here one of each case in an epoch, since the
# guide's transforms give no more. The guide's learning rate, 1e-4, needs tens of thousands of steps; with ours it
# learns in the hundred that there is time for.
QUALITY = BratsConfig(
    crop_size=(48, 48, 48),
    crops_per_case=1,
    batch_size=4,
    window_size=(96, 64, 64),
    window_batch=1,
    filters=8,
    blocks_down=(1, 2, 2),
    learning_rate=0.01,
    epochs=28,
    validate_every=28,
    engine="none",
)
_EQUAL = (
    "data", "split", "device", "store", "precision", "crop_size", "crops_per_case", "batch_size", "window_size",
    "window_batch", "overlap", "filters", "blocks_down", "learning_rate", "epochs", "validate_every", "engine",
)  # fmt: skip


def preparation(cases: Sequence[Case], rounds: int, device: torch.device, folder: Path) -> Figures:
    """Time MONAI's CacheDataset fill against our start from nothing and from what is there, fingerprint included."""
    task = make_task(cases, SIZES.window, device, folder)
    plain = apart(guide_preparation, task, keep_freed=False)
    kept = apart(fast_preparation, task, keep_freed=device.type == "cpu")
    with plain as guide, kept as fast:
        seconds = in_turn({**guide, **fast}, rounds, warm_up=False)
    return {
        **{f"{name}, s per case": median([each / len(cases) for each in seconds[name]]) for name in seconds},
        "guide / fast cold": ratio(seconds["guide"], seconds["cold"]),
        "guide / fast warm, digests checked": ratio(seconds["guide"], seconds["warm"]),
    }


def step(cases: Sequence[Case], rounds: int, device: torch.device, folder: Path) -> Figures:
    """Time the training step of the guide's network on equal crops, then each side's with its own batch."""
    task = make_task(cases, SIZES.window, device, folder)
    task.prepared()
    half = torch.float16 if device.type == "cuda" else torch.bfloat16
    guide_half = "guide fp16" if device.type == "cuda" else "guide bf16"
    usual = guide_half if device.type == "cuda" else "guide fp32"  # the guide's autocast is for CUDA only
    chosen = choose_precision("auto", device)
    figures: Figures = {"precision that fast chooses here": chosen}
    for crop, batch in SIZES.steps:
        plain = apart(plain_steps, task, crop, batch, half, keep_freed=False)
        kept = apart(fast_steps, task, crop, batch, keep_freed=device.type == "cpu")
        with plain as sides, kept as fast:
            seconds = in_turn({**sides, **fast}, 2 * rounds + 1)
        ratios = {
            "guide / fast": (usual, f"fast {chosen}"),
            "guide / fast, both fp32": ("guide fp32", "fast fp32"),
            "guide / fast, both half": (guide_half, "fast bf16"),
            "guide / fast, with their batches": ("guide with its batch", "fast with its batch"),
        }
        if device.type == "cpu":
            ratios["guide / fast, both fp32, memory given back"] = ("guide fp32", GIVEN_BACK)
            ratios["fast fp32, memory given back / kept"] = (GIVEN_BACK, "fast fp32")
        figures[f"{batch} x {'x'.join(map(str, crop))}"] = {
            **{f"{name}, s": median(seconds[name]) for name in seconds},
            **{name: ratio(seconds[slow], seconds[quick]) for name, (slow, quick) in ratios.items()},
        }
    return figures


def inference(cases: Sequence[Case], rounds: int, device: torch.device, folder: Path) -> Figures:
    """Time segmentation from file to file: the MONAI way against ours in fp32 and bf16, and compare the label maps."""
    task = make_task(cases, SIZES.window, device, folder)
    task = replace(task, cases=task.cases[: max(1, len(cases) // 2)])
    save_trained(task, *SIZES.warm)
    scans = file_to_file.lay_out(
        "brats", task.model, weights_of(task), [case.image for case in task.cases], folder, device
    )
    figures = file_to_file.compare(scans, rounds, guide_inference, task, SIZES.roi)
    regions = [region.members for region in task.model.labelling.regions]
    chosen = choose_precision("auto", device)

    def pairs(one: str, other: str | None = None) -> list[tuple[Path, Path]]:
        names = [(case.image.name, case.label) for case in task.cases]
        return [(folder / one / name, folder / other / name if other else label or Path()) for name, label in names]

    return {
        "precision that fast chooses here": chosen,
        **figures,
        "guide / fast": figures[f"guide / fast {chosen}"],
        **{
            f"least Dice, {name} to the guide": least_dice(pairs("guide", name), regions) for name in file_to_file.SIDES
        },
        "least Dice, fast bf16 to fast fp32": least_dice(pairs("fast fp32", "fast bf16"), regions),
        **{f"Dice of {name} to the labels": mean_dice(pairs(name), regions) for name in ("guide", *file_to_file.SIDES)},
    }


def quality(cases: Sequence[Case], rounds: int, device: torch.device, folder: Path) -> Figures:
    """Train the guide and fast on the small phantoms over `rounds` seeds, network, crops, batch and epochs equal."""
    fast = replace(QUALITY, device=str(device), store=folder, precision=choose_precision("auto", device))
    guide = replace(GUIDE, **{name: getattr(fast, name) for name in _EQUAL})
    dice: dict[str, list[float]] = {"guide": [], "fast": []}
    for seed in range(rounds):
        for name, config in (("guide", guide), ("fast", fast)):
            summary = train(replace(config, seed=seed, run=folder / f"{name}-{seed}"))
            assert summary is not None
            dice[name].append(round(summary.quality.value, 4))
    return {
        "learning rate of both sides": fast.learning_rate,
        "precision of both sides": fast.precision,
        "guide, Dice by seed": dice["guide"],
        "fast, Dice by seed": dice["fast"],
        "fast - guide, mean": round(float(np.mean(dice["fast"]) - np.mean(dice["guide"])), 4),
    }
