"""The guides as plain MONAI scripts that import nothing of ours, and what all of them do: a step, the flags, an end."""

import argparse
import copy
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import monai
import psutil
import torch
from torch import nn

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of logits and labels
Step = Callable[[torch.Tensor, torch.Tensor], float]  # of images and labels; returns the loss
Item = dict[str, Any]

_HELD = 3  # validations in a row that must reach a target


def make_step(network: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, amp_dtype: torch.dtype | None) -> Step:
    """Return what does a step as the guides do, with their read of the loss."""
    scaler = torch.amp.GradScaler(enabled=amp_dtype == torch.float16)

    def step(image: torch.Tensor, label: torch.Tensor) -> float:
        optimizer.zero_grad()
        with torch.autocast(image.device.type, dtype=amp_dtype, enabled=amp_dtype is not None):
            value = loss(network(image), label)
        scaler.scale(value).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        return float(value.item())

    return step


def parse(
    parser: argparse.ArgumentParser, epochs: int, every: int, **sizes: tuple[float, float, float]
) -> argparse.Namespace:
    """Parse the flags of a script, with its sizes and those that all scripts have, and seed everything."""
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=type(size[0]), nargs=3, default=size, help="mm, or voxels")
    parser.add_argument("--data", type=Path, required=True, help="dataset folder")
    parser.add_argument("--epochs", type=int, default=epochs, help="over which the learning rate falls, where it does")
    parser.add_argument("--most", type=int, help="epochs at most, those after --epochs with the last learning rate")
    parser.add_argument("--every", type=int, default=every, help="epochs between two validations")
    parser.add_argument("--until", type=float, default=math.inf, help="end once three validations in a row reach it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--network", type=json.loads, default={}, help="other arguments of the network, as JSON")
    parser.add_argument("--to", type=Path, help="folder for best.pt, the weights, and run.json, what the run took")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    given.most = given.most or given.epochs
    monai.utils.set_determinism(given.seed)
    torch.backends.cudnn.deterministic = False  # which nobody asked for
    return given


def read_pairs(data: Path, split: Path | None, held: int) -> tuple[list[Item], list[Item]]:
    """Return the cases of a folder in MSD layout that train, and those that validate: the last ones, or a file's."""
    listed = json.loads((data / "dataset.json").read_text())["training"]
    pairs = sorted(({key: str(data / path) for key, path in pair.items()} for pair in listed), key=str)
    if split is None:
        return pairs[:-held], pairs[-held:]
    parts, named = json.loads(split.read_text()), {Path(each["image"]).name.split(".")[0]: each for each in pairs}
    return [named[name] for name in parts["training"]], [named[name] for name in parts["validation"]]


class Watch:
    """The clock of a script, from the start of its process: stages, validations, and whether they end the training."""

    def __init__(self, given: argparse.Namespace) -> None:
        """Start; what the process did until now is the stage "start"."""
        self._given, self._began = given, psutil.Process().create_time()
        self._last, self._seconds = self._began, dict[str, float]()
        self._curve: list[tuple[int, float, float]] = []
        self._best, self.steps = dict[str, Any](), 0
        self.lap("start")

    def lap(self, stage: str) -> None:
        """Count the seconds since the last call to a stage."""
        before, self._last = self._last, time.time()
        self._seconds[stage] = self._seconds.get(stage, 0.0) + self._last - before

    def ends(self, network: nn.Module, epoch: int, value: float) -> bool:
        """Note a validation and keep the best weights; return whether the target has held. The last one is written."""
        self.lap("validate")
        if value >= max((each for *_, each in self._curve), default=-math.inf):
            self._best = copy.deepcopy(network.state_dict())
        self._curve.append((epoch, round(self._last - self._began, 3), value))
        recent = [each for *_, each in self._curve[-_HELD:]]
        held = len(recent) == _HELD and min(recent) >= self._given.until
        if self._given.to and (held or epoch == self._given.most):
            self._given.to.mkdir(parents=True, exist_ok=True)
            torch.save(self._best, self._given.to / "best.pt")
            found = {"held": held, "seconds": self._curve[-1][1], "steps": self.steps, "stages": self._seconds}
            sizes = {name: value for name, value in vars(self._given).items() if name in ("network", "spacing", "roi")}
            (self._given.to / "run.json").write_text(json.dumps({**found, **sizes, "curve": self._curve}))
        return held
