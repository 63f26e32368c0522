"""The guides as plain MONAI scripts that import nothing of ours, and what all of them do: flags, a step, a training."""

import argparse
import copy
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import monai.transforms as mt
import psutil
import torch
from monai.data import CacheDataset, DataLoader, Dataset, ThreadDataLoader, decollate_batch
from monai.inferers import sliding_window_inference
from monai.metrics import DiceMetric
from monai.optimizers import Novograd
from monai.utils import set_determinism
from torch import nn

Given = argparse.Namespace
Item = dict[str, Any]
Transform = Callable[..., Any]
Chain = Sequence[Transform]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of logits and labels

_HELD = 3  # validations in a row that must reach a target
AXES = (("L", "R"), ("P", "A"), ("I", "S"))  # of the patient, from and to


def parse(description: str | None, own: Mapping[str, Any], words: Sequence[str] | None) -> Given:
    """Parse a script's flags, its own with their defaults (or types) and those that all have, and seed everything.

    The learning rate falls over --epochs; the training ends after --most, or once three validations in a row, one each
    --every epochs, reach --until. The folder --to gets the weights and what the run took.
    """
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--network", type=json.loads, default={}, help="other arguments of the network, as JSON")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--data", type=Path, required=True)
    flags = {"most": int, "until": math.inf, "seed": 0, "to": Path, "device": device, **own}
    for name, value in flags.items():
        kind, default = (value, None) if isinstance(value, type) else (type(value), value)
        several = {"type": type(value[0]), "nargs": len(value)} if isinstance(value, tuple) else {"type": kind}
        parser.add_argument(f"--{name}", default=default, **several)
    given = parser.parse_args(words)
    given.most = given.most or given.epochs
    set_determinism(given.seed)
    torch.backends.cudnn.deterministic = False  # which nobody asked for
    return given


def half_of(device: str) -> torch.dtype | None:
    """Return what the guides' autocast computes in, which is for CUDA only."""
    return torch.float16 if torch.device(device).type == "cuda" else None


def make_step(
    network: nn.Module, rate: float, loss: Loss, amp_dtype: torch.dtype | None
) -> tuple[Callable[[torch.Tensor, torch.Tensor], float], torch.optim.Optimizer]:
    """Return what does a step of images and labels as the guides do, with their read of the loss; and its optimizer."""
    optimizer = Novograd(network.parameters(), rate)
    scaler = torch.amp.GradScaler(enabled=amp_dtype == torch.float16)

    def step(image: torch.Tensor, label: torch.Tensor) -> float:
        optimizer.zero_grad()
        with torch.autocast(image.device.type, dtype=amp_dtype, enabled=amp_dtype is not None):
            value = loss(network(image), label)
        scaler.scale(value).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        return float(value.item())

    return step, optimizer


def train(guide: ModuleType, given: Given) -> None:
    """Train as a guide does, validated every so many epochs, to the last of them or until the target has held.

    The clock runs from the start of the process; what that did until now is the stage "start". The weights are those of
    the best validation.
    """
    began = last = psutil.Process().create_time()
    stages, curve, best, steps = dict[str, float](), list[tuple[int, float, float]](), dict[str, Any](), 0
    at = list[dict[str, Any]]()  # what each validation had taken

    def lap(stage: str) -> None:
        nonlocal last
        before, last = last, time.time()
        stages[stage] = stages.get(stage, 0.0) + last - before

    lap("start")
    loader, validate = guide.training_loader(given), guide.make_validation(given)
    lap("cache")
    network = guide.make_network(**given.network).to(given.device)
    step, optimizer = make_step(network, given.rate, guide.make_loss(), half_of(given.device))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=given.epochs)
    for epoch in range(1, given.most + 1):
        network.train()
        for item in loader:
            step(item["image"].to(given.device), item["label"].to(given.device))
            steps += 1
        if guide.FALLS and epoch <= given.epochs:
            schedule.step()
        lap("train")
        if epoch % given.every == 0 or epoch == given.most:
            value = validate(network.eval())
            lap("validate")
            print(f"epoch {epoch}: {guide.METRIC} {value:.4f}")
            if value >= max((each for *_, each in curve), default=-math.inf):
                best = copy.deepcopy(network.state_dict())
            curve.append((epoch, round(last - began, 3), value))
            at.append({"seconds": curve[-1][1], "steps": steps, "stages": dict(stages)})
            held = len(curve) >= _HELD and min(each for *_, each in curve[-_HELD:]) >= given.until
            if held:
                break
    if given.to:
        given.to.mkdir(parents=True, exist_ok=True)
        torch.save(best, given.to / "best.pt")
        (given.to / "run.json").write_text(json.dumps({"held": held, **at[-1], "curve": curve, "at": at}))


def read_pairs(given: Given, held: int) -> tuple[list[Item], list[Item]]:
    """Return the cases of a folder in MSD layout that train, and those that validate: the last ones, or a file's."""
    listed = json.loads((given.data / "dataset.json").read_text())["training"]
    pairs = sorted(({key: str(given.data / path) for key, path in pair.items()} for pair in listed), key=str)
    if given.split is None:
        return pairs[:-held], pairs[-held:]
    parts = json.loads(given.split.read_text())
    named = {Path(each["image"]).name.split(".nii")[0]: each for each in pairs}
    return [named[name] for name in parts["training"]], [named[name] for name in parts["validation"]]


def cached(items: Sequence[Item], chain: Chain, workers: int, batch: int = 1, shuffle: bool = False) -> DataLoader:
    """Fill a CacheDataset with so many workers, and return the loader of its batches."""
    dataset = CacheDataset(items, mt.Compose(chain), num_workers=workers, copy_cache=False, progress=False)
    return ThreadDataLoader(dataset, num_workers=0, batch_size=batch, shuffle=shuffle)


def predict(network: nn.Module, image: torch.Tensor, given: Given, at_once: int) -> torch.Tensor:
    """Return the logits of volumes, by so many sliding windows at once."""
    dtype = half_of(given.device)
    with torch.no_grad(), torch.autocast(image.device.type, dtype=dtype, enabled=dtype is not None):
        return sliding_window_inference(image, given.roi, at_once, network, overlap=given.overlap)  # type: ignore[no-any-return]


def mean_dice(network: nn.Module, loader: Any, given: Given, to_masks: Transform, to_truth: Transform) -> float:  # noqa: ANN401
    """Return the mean Dice on the working grid, of all channels that masks of logits and labels have."""
    metric = DiceMetric(reduction="mean_batch")
    for item in loader:
        logits = predict(network, item["image"].to(given.device), given, 4)
        truth = decollate_batch(item["label"].to(given.device))
        metric([to_masks(each) for each in decollate_batch(logits)], [to_truth(each) for each in truth])
    return float(metric.aggregate().mean())


def segment(
    files: Sequence[Path], network: nn.Module, to: Path, given: Given, fixed: Chain, discrete: Chain, at_once: int
) -> None:
    """Segment scans file to file: transforms, windows, Invertd, what makes a label map of "pred", SaveImaged."""
    chain, saving = mt.Compose(fixed), {"output_dtype": "uint8", "separate_folder": False, "print_log": False}
    back = mt.Invertd("pred", transform=chain, orig_keys="image", nearest_interp=False, to_tensor=True)
    finish = mt.Compose([back, *discrete, mt.SaveImaged("pred", output_dir=to, output_postfix="", **saving)])
    for item in DataLoader(Dataset([{"image": str(file)} for file in files], chain), batch_size=1, num_workers=0):
        item["pred"] = predict(network.eval(), item["image"].to(given.device), given, at_once)
        for case in decollate_batch(item):
            finish(case)
