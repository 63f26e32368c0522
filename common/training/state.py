"""Where a training run stands: checkpoints that are whole or absent, and what the user sees of it."""

import json
import math
import os
import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from common.files import flush_to_disk, read_json_lines, write_text
from common.inference.model import UNREADABLE, contiguous, first_line, load_weights
from common.observe.monitor import Monitor
from common.observe.plots import draw_progress
from common.observe.profiler import StepProfiler
from common.run import Run
from common.training.config import TrainingConfig

VALIDATIONS_HELD = 3
"""Validations in a row that must reach a target: one may be luck."""
_WEIGHTS, _STATE = "weights.safetensors", "state.pt"
_PREFIX = "epoch-"
_DRAW_SECONDS = 30.0
_KEPT = ("epoch", "step", "best", "best_epoch", "last", "recent")  # attributes that a checkpoint holds as they are


class TrainingState:
    """Epoch, step, losses and best validation of a run, with the network and the optimizer they belong to.

    Attributes:
        epoch: epochs done.
        step: steps done in the present epoch; equal to `per_epoch` when only its validation is missing.
        best: highest validation metric so far, after `best_epoch` epochs.
        last: metric of the last validation.
        recent: the metrics of the last validations, `VALIDATIONS_HELD` at most.
    """

    def __init__(
        self,
        run: Run,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        per_epoch: int,
    ) -> None:
        """Start at the first step of the first epoch."""
        self.epoch, self.step = 0, 0
        self.best, self.best_epoch, self.last = -math.inf, 0, math.nan
        self.recent: list[float] = []
        self._run, self._folder = run, run.directory / "checkpoints"
        self._network, self._optimizer, self._scaler = network, optimizer, scaler
        self._losses = torch.zeros(per_epoch, device=run.device)
        self._cases: dict[int, tuple[str, ...]] = {}
        self._saved = time.monotonic()

    @property
    def steps_done(self) -> int:
        """Steps done in all epochs."""
        return self.epoch * len(self._losses) + self.step

    def note_step(self, step: int, loss: torch.Tensor, cases: tuple[str, ...]) -> None:
        """Keep the loss of a step, a scalar, on the device, and the names of its cases."""
        if step == 0:
            self._cases.clear()
        self._losses[step] = loss
        self._cases[step] = cases
        self.step = step + 1

    def note_validation(self, value: float, epoch: int) -> bool:
        """Keep the metric of a validation; return whether it is the best so far.

        Raises:
            ValueError: it is not a number: the validation cases hold nothing to find.
        """
        if math.isnan(value):
            raise ValueError("no validation case holds any foreground, so there is no metric: choose another --split")
        self.last = value
        self.recent = [*self.recent, value][-VALIDATIONS_HELD:]
        if value <= self.best:
            return False
        self.best, self.best_epoch = value, epoch
        return True

    def holds(self, target: float | None) -> bool:
        """Return whether the last validations have all reached a target; without one, none has."""
        return target is not None and len(self.recent) == VALIDATIONS_HELD and min(self.recent) >= target

    def checked(self) -> list[float]:
        """Return the losses of the steps done in this epoch; this reads them from the device.

        Raises:
            FloatingPointError: one is not finite.
        """
        losses: list[float] = self._losses[: self.step].tolist()
        for step, loss in enumerate(losses):
            if not math.isfinite(loss):
                number = self.epoch * len(self._losses) + step + 1
                cases = ", ".join(sorted(set(self._cases.get(step, ("unknown",)))))
                raise FloatingPointError(
                    f"loss {loss} at step {number} (epoch {self.epoch + 1}), cases {cases}; the last checkpoint in "
                    f"{self._folder} is from before; look at these cases, lower the learning rate, or take fp32"
                )
        return losses

    def seconds_since_save(self) -> float:
        """Return the seconds since the last checkpoint of this process."""
        return time.monotonic() - self._saved

    def save(self) -> None:
        """Write a checkpoint, after a look at the losses; only the leader does, and the others need not be told."""
        if self._run.leader:
            self._run.ranks.at_step(0)  # it may take long
            state = {name: getattr(self, name) for name in _KEPT} | {
                "per_epoch": len(self._losses),
                "losses": self.checked(),
                "optimizer": self._optimizer.state_dict(),
                "scaler": self._scaler.state_dict(),
                "random": torch.get_rng_state(),
                "seconds": self._run.clock.seconds(),
            }
            save_checkpoint(self._folder, (self.epoch, self.step), self._network.state_dict(), state)
        self._saved = time.monotonic()

    def restore(self) -> None:
        """Take over the newest checkpoint, where there is one; the leader reads it and hands it to the others.

        Raises:
            ValueError: the checkpoint belongs to another number of steps per epoch: other cases or another batch size.
        """
        found = self._run.ranks.once(lambda: load_checkpoint(self._folder))
        if found is None:
            return
        weights, state = found
        if state["per_epoch"] != len(self._losses):
            raise ValueError(
                f"{self._folder}: the checkpoint has {state['per_epoch']} steps per epoch, this run has "
                f"{len(self._losses)}; the training cases or the batch size have changed, so it cannot go on exactly"
            )
        self._network.load_state_dict(weights)
        self._optimizer.load_state_dict(state["optimizer"])
        self._scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["random"])
        for name in _KEPT:
            setattr(self, name, state[name])
        self._losses[: self.step] = torch.tensor(state["losses"], device=self._losses.device)
        self._run.clock.carry_on(state["seconds"])


def save_checkpoint(
    folder: Path, position: tuple[int, int], weights: dict[str, torch.Tensor], state: dict[str, Any]
) -> Path:
    """Write a checkpoint as `folder/epoch-E-step-N`, point `folder/last` at it, then remove the older ones.

    The folder appears by one rename after all bytes have reached the disk, so a process killed at any moment leaves the
    earlier checkpoint or the new one, each whole.

    Args:
        folder: of the run's checkpoints.
        position: the epoch, and the steps done in it.
        weights: state dict of the network, kept as safetensors.
        state: step, optimizer, loss scale, record so far: tensors and plain containers only.

    Raises:
        OSError: the disk is full or read-only; the earlier checkpoint is then still there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / "{}{:06d}-step-{:06d}".format(_PREFIX, *position)
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=folder))
    try:
        save_file(contiguous(weights), part / _WEIGHTS)
        torch.save(state, part / _STATE)
        for path in (part / _WEIGHTS, part / _STATE, part):
            flush_to_disk(path)
        if not final.exists():  # a resumed run stands where its checkpoint already is
            part.rename(final)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    link = folder / ".part-last"
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    link.replace(folder / "last")
    flush_to_disk(folder)
    for older in _complete(folder):
        if older != final:
            shutil.rmtree(older)
    return final


def load_checkpoint(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
    """Return weights and state of the newest whole checkpoint below `folder`, or None where there is none.

    What a killed process left half-written is removed. Nothing stored is executed: the weights are safetensors, and
    the state is read with `weights_only=True`.

    Raises:
        ValueError: a checkpoint cannot be read, for instance a pickle that asks to run code.
    """
    for left in folder.glob(".part-*"):
        # A link that was about to become `last` is a folder too, when asked.
        left.unlink() if left.is_symlink() or not left.is_dir() else shutil.rmtree(left)
    complete = _complete(folder)
    if not complete:
        return None
    newest = complete[-1]
    try:
        state = torch.load(newest / _STATE, map_location="cpu", weights_only=True)
    except UNREADABLE as error:
        raise ValueError(
            f"{newest / _STATE}: not a training state that can be loaded safely ({first_line(error)}); "
            f"remove {newest} to start over"
        ) from error
    return load_weights(newest / _WEIGHTS), state


def _complete(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if path.is_dir())


class Log:
    """What the user sees while training: the bar, `metrics.jsonl`, TensorBoard, `progress.png` and the machine's load.

    Args:
        run: whose folder gets them.
        config: names the metric, and what is recorded.
        total: steps of the whole training.
        state: where the run stands; the records of epochs that it does again are dropped.
    """

    def __init__(self, run: Run, config: TrainingConfig, total: int, state: TrainingState) -> None:
        self._metric, folder = config.METRIC, run.directory
        self._path, self._picture = folder / "metrics.jsonl", folder / "progress.png"
        if records := read_json_lines(self._path):
            kept = [record for record in records if record["epoch"] <= state.epoch]
            write_text(self._path, "".join(json.dumps(record) + "\n" for record in kept))
        self._writer = SummaryWriter(str(run.directory / "tensorboard"), purge_step=state.steps_done)
        self._bar = tqdm(total=total, initial=state.steps_done, unit="step", desc="train")
        self._shown: dict[str, str] = {}
        self._samples = 0
        self._drawn = time.monotonic()
        self._watching, self._profiler = ExitStack(), None
        if seconds := float(os.environ.get("MEDSPEED_MONITOR_SECONDS", "1")):  # tests and benchmarks do without
            self._watching.enter_context(Monitor(run.directory, run.device, seconds))
        if config.profile == "torch":
            self._profiler = self._watching.enter_context(StepProfiler(run.directory / "profile", run.device))

    def close(self) -> None:
        """Close the bar and the files, and draw the curves a last time."""
        self._watching.close()
        self._bar.close()
        self._writer.close()
        self._draw()

    def step(self, samples: int) -> None:
        """Count one step of so many crops."""
        self._samples += samples
        self._bar.update()
        if self._profiler is not None:
            self._profiler.step()

    def epoch(self, record: dict[str, Any], seconds: float) -> None:
        """Write one epoch's record; `losses` of its steps, and the metric where it was validated."""
        rate, losses, self._samples = self._samples / seconds, record["losses"], 0
        mean = sum(losses) / len(losses)
        record |= {"loss": mean, "seconds": round(seconds, 4), "samples_per_second": round(rate, 2)}
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record, allow_nan=False) + "\n")
        shown = [name for name in ("loss", self._metric.lower()) if name in record]
        for name in (*shown, "samples_per_second"):
            self._writer.add_scalar(name, record[name], record["step"])
        self._shown |= {name: f"{record[name]:.4f}" for name in shown}
        self._bar.set_postfix({**self._shown, "samples/s": f"{rate:.1f}"}, refresh=False)
        if time.monotonic() - self._drawn > _DRAW_SECONDS:
            self._draw()

    def _draw(self) -> None:
        draw_progress(self._picture, read_json_lines(self._path), self._metric)
        self._drawn = time.monotonic()
