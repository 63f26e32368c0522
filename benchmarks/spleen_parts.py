"""The parts of `compare.py spleen`: each runs the guide and fast in turn and returns its figures by name."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import CacheDataset
from monai.transforms import Compose
from torch import nn

from apps.spleen.config import GUIDE, SpleenConfig
from apps.spleen.model import SpleenModel
from apps.spleen.train import main as train
from benchmarks import file_to_file
from benchmarks.apart import Sides
from benchmarks.in_turn import in_turn, median, ratio
from benchmarks.masks import least_dice, mean_dice, voxels_that_differ
from benchmarks.peers import spleen_guide
from common.data.batches import Batch, fixed_batches
from common.data.cache import fill_cache
from common.data.cases import Case
from common.data.preparation import Preparation
from common.data.store import prepared_cases
from common.inference.predictors import Precision
from common.training.checkpoints import load_weights, save_weights
from common.training.fit import train_step
from common.training.losses import LOSSES
from common.training.optimizers import build_optimizer
from common.training.schedules import lr_factor
from models.prelu import use_fast_prelu

Figures = dict[str, Any]

_PREPARATION = Preparation(spleen_guide.SPACING, "window", spleen_guide.WINDOW)
_CHANNELS, _RESIDUAL_UNITS = (16, 32, 64, 128, 256), 2
_CLASSES = 2
_SPLEEN = (1,)  # its label
_WARM_STEPS = 240  # so that the masks that inference compares are those of a network that has learned something


def preparation(cases: Sequence[Case], rounds: int, device: torch.device, folder: Path) -> Figures:
    """Time MONAI's CacheDataset fill against the prepared store, from nothing and from what is there."""
    items = [{"image": str(case.image), "label": str(case.label)} for case in cases]
    fixed = Compose(spleen_guide.fixed_transforms(("image", "label")))
    store = folder / "store"

    def guide() -> None:
        CacheDataset(items, fixed, num_workers=torch.get_num_threads(), progress=False)

    def delete() -> None:
        shutil.rmtree(store, ignore_errors=True)

    def start() -> None:
        prepared_cases(cases, _PREPARATION, _CLASSES, store, progress=False)

    seconds = in_turn({"guide": guide, "deleting": delete, "cold": start, "warm": start}, rounds, warm_up=False)
    return {
        **{f"{name}, s per case": median([each / len(cases) for each in seconds[name]]) for name in seconds},
        "guide / fast cold": ratio(seconds["guide"], seconds["cold"]),
        "guide / fast warm, digests checked": ratio(seconds["guide"], seconds["warm"]),
    }


def step(cases: Sequence[Case], rounds: int, device: torch.device, folder: Path) -> Figures:
    """Time the training step of the guide's network on the same four crops of 96^3."""
    batch = next(_batches(cases, device, folder))
    half = torch.bfloat16 if device.type == "cpu" else torch.float16
    sides = {
        "guide fp32": _guide_step(batch, None),
        f"guide {'bf16' if device.type == 'cpu' else 'fp16'}": _guide_step(batch, half),
        "fast fp32": _fast_step(batch, "fp32"),
        "fast bf16": _fast_step(batch, "bf16"),
    }
    seconds = in_turn(sides, 2 * rounds + 1)
    guide_half = next(name for name in sides if name.startswith("guide") and name != "guide fp32")
    usual = "guide fp32" if device.type == "cpu" else guide_half  # the guide's autocast is for CUDA only
    return {
        **{f"{name}, s": median(seconds[name]) for name in seconds},
        "guide / fast": ratio(seconds[usual], seconds["fast bf16"]),
        "guide / fast, both fp32": ratio(seconds["guide fp32"], seconds["fast fp32"]),
        "guide / fast, both half": ratio(seconds[guide_half], seconds["fast bf16"]),
    }


def inference(cases: Sequence[Case], rounds: int, device: torch.device, folder: Path) -> Figures:
    """Time segmentation from file to file: the MONAI way against ours, and compare the masks."""
    some = cases[: max(1, len(cases) // 2)]
    weights = folder / "trained.safetensors"
    save_weights(weights, _trained(cases, device, folder).state_dict(), {})
    model = SpleenModel(
        ("background", "spleen"), _PREPARATION, _CHANNELS, _RESIDUAL_UNITS, spleen_guide.VALIDATION_ROI, 1, "fp32"
    )
    files = [case.image for case in some]
    scans = file_to_file.lay_out("spleen", model, weights, files, folder, device)
    figures = file_to_file.compare(scans, rounds, guide_inference, files, weights, folder / "guide", device)
    pairs = {
        name: [(folder / "guide" / file, folder / name / file) for file in scans.names] for name in file_to_file.SIDES
    }
    return {
        **figures,
        "voxels that differ, fp32, windows of one size": voxels_that_differ(
            pairs["fast fp32, windows of one size"], _SPLEEN
        ),
        **{f"least Dice of the masks, {name}": least_dice(each, [_SPLEEN]) for name, each in pairs.items()},
        **{
            f"Dice of {name} to the labels": mean_dice(
                [(folder / name / case.image.name, case.label) for case in some if case.label is not None], [_SPLEEN]
            )
            for name in ("guide", *pairs)
        },
    }


def guide_inference(files: Sequence[Path], weights: Path, output: Path, device: torch.device) -> Sides:
    """Return the MONAI way from files to label map files."""
    network = spleen_guide.make_network().to(device)
    network.load_state_dict(load_weights(weights))
    return {"guide": lambda: spleen_guide.segment_files(files, network, output, device)}


def quality(cases: Sequence[Case], rounds: int, device: torch.device, folder: Path) -> Figures:
    """Train the guide and fast on the small phantoms over `rounds` seeds, network, crops, batch and epochs equal."""
    same = SpleenConfig(
        device=str(device),
        channels=(8, 16, 32, 64),
        residual_units=1,
        crop_size=(64, 64, 48),
        window_size=(96, 96, 64),
        window_batch=1,
        batch_size=4,
        epochs=20,
        validate_every=5,
        precision="bf16",
        engine="none",
    )
    network = ("precision", "channels", "residual_units", "crop_size", "window_size", "window_batch")
    keep = ("device", *network, "batch_size", "epochs", "validate_every", "engine")
    guide = replace(GUIDE, **{name: getattr(same, name) for name in keep})
    dice: dict[str, list[float]] = {"guide": [], "fast": []}
    for seed in range(rounds):
        for name, config in (("guide", guide), ("fast", same)):
            summary = train(replace(config, seed=seed, run=folder / f"{name}-{seed}"))
            assert summary is not None
            dice[name].append(round(summary.quality.value, 4))
    return {
        "guide, Dice by seed": dice["guide"],
        "fast, Dice by seed": dice["fast"],
        "fast - guide, mean": round(float(np.mean(dice["fast"]) - np.mean(dice["guide"])), 4),
    }


def _batches(cases: Sequence[Case], device: torch.device, folder: Path) -> Iterator[Batch]:
    """Yield batches of four crops without end."""
    prepared = prepared_cases(cases, _PREPARATION, _CLASSES, folder / "store", progress=False)
    batches = fixed_batches(fill_cache(prepared, spleen_guide.CROP, device), spleen_guide.CROP, 4, 4, (), 0.0)
    return (batch for epoch in count() for batch in batches.epoch(epoch))


def _guide_step(batch: Batch, amp_dtype: torch.dtype | None) -> Any:  # noqa: ANN401 - a function without arguments
    device = batch.image.device
    network = spleen_guide.make_network().to(device)
    loss, optimizer = spleen_guide.make_loss(), spleen_guide.make_optimizer(network)
    scaler = torch.amp.GradScaler(device.type, enabled=amp_dtype is torch.float16)
    label = batch.label.float()
    return lambda: spleen_guide.training_step(network, batch.image, label, loss, optimizer, scaler, amp_dtype)


def _fast_step(batch: Batch, precision: Precision) -> Any:  # noqa: ANN401 - a function without arguments
    network = use_fast_prelu(_channels_last(spleen_guide.make_network().to(batch.image.device)))
    optimizer = build_optimizer("novograd", network.parameters(), 2e-3)
    scaler = torch.amp.GradScaler(batch.image.device.type, enabled=False)
    return lambda: train_step(network, batch, LOSSES["dice_ce"], optimizer, scaler, precision, 2e-3)


def _trained(cases: Sequence[Case], device: torch.device, folder: Path) -> nn.Module:
    torch.manual_seed(0)
    network = use_fast_prelu(_channels_last(spleen_guide.make_network().to(device)))
    optimizer = build_optimizer("novograd", network.parameters(), 0.0)
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    for step, batch in enumerate(islice(_batches(cases, device, folder), _WARM_STEPS)):
        rate = 0.01 * lr_factor("linear", step, _WARM_STEPS)
        train_step(network, batch, LOSSES["dice_ce"], optimizer, scaler, "bf16", rate)
    plain = spleen_guide.make_network().to(device)
    plain.load_state_dict({name: value.contiguous() for name, value in network.state_dict().items()})
    return plain.eval()


def _channels_last(network: nn.Module) -> nn.Module:
    copied = spleen_guide.make_network().to(next(network.parameters()).device)
    copied.load_state_dict(network.state_dict())
    return copied.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload, no-any-return]
