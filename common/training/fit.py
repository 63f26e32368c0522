"""The only training loop."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from common.data.batches import Batch, Batches
from common.files import write_text
from common.inference.predictors import Precision
from common.observe.curves import draw_progress
from common.observe.run import Run, append_json_line, read_json_lines
from common.training.checkpoints import load_weights, save_weights
from common.training.precision import autocast
from common.training.schedules import ScheduleName, lr_factor
from common.training.signals import GracefulStop, StopRequested
from common.training.state import TrainingState

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# From the network, and a function to call between cases (it raises when the run is to stop), to the mean Dice.
Validate = Callable[[nn.Module, Callable[[], None]], float]


@dataclass(frozen=True)
class Fitted:
    """What training leaves.

    Args:
        best: weights of the validation with the highest Dice.
        best_dice: that Dice, on the working grid.
        best_epoch: epochs done then.
        last_dice: Dice of the last validation.
        steps: steps done in all.
    """

    best: dict[str, torch.Tensor]
    best_dice: float
    best_epoch: int
    last_dice: float
    steps: int


def fit(
    network: nn.Module,
    batches: Batches,
    *,
    run: Run,
    loss_function: Loss,
    optimizer: torch.optim.Optimizer,
    learning_rate: float,
    schedule: ScheduleName,
    epochs: int,
    precision: Precision,
    validate: Validate,
    validate_every: int,
    checkpoint_seconds: float,
) -> Fitted:
    """Train, validate, keep the best and the last weights; a resumed run goes on where its checkpoint stands.

    Nothing in a step waits for the device: the losses of an epoch stay there, are read at its end, and are checked
    before every checkpoint.

    Raises:
        FloatingPointError: a loss is not finite; names step and cases; the last checkpoint is from before.
        SystemExit: SIGTERM (143) or SIGINT (130) came; the step was finished and saved.
    """
    per_epoch, total = batches.steps_per_epoch, epochs * batches.steps_per_epoch
    scaler = torch.amp.GradScaler(run.device.type, enabled=precision == "fp16")
    state = TrainingState(run.directory, network, optimizer, scaler, per_epoch, run.device)
    if run.resumed:
        state.restore(run.clock)
    log = _Log(run, total, state.steps_done, state.epoch)
    with GracefulStop() as stop, log:
        for epoch in range(state.epoch, epochs):
            began, first_step = time.perf_counter(), state.step
            network.train()
            for step, batch in enumerate(batches.epoch(epoch, first_step), first_step):
                rate = learning_rate * lr_factor(schedule, epoch * per_epoch + step, total)
                loss = train_step(network, batch, loss_function, optimizer, scaler, precision, rate)
                state.note_step(step, loss, batch.cases)
                log.step(len(batch.cases))
                if stop.requested or state.seconds_since_save() >= checkpoint_seconds:
                    if batches.resumes_within_epoch or state.step == per_epoch:
                        state.save(run.clock)
                    stop.exit_if_requested()
            record: dict[str, Any] = {"epoch": epoch + 1, "step": (epoch + 1) * per_epoch, "losses": state.checked()}
            seconds = time.perf_counter() - began
            run.clock.add("train", seconds)
            if (epoch + 1) % validate_every == 0 or epoch + 1 == epochs:
                try:
                    with run.clock.stage("validate"):
                        record["dice"] = validate(network, stop.check)
                except StopRequested:
                    state.save(run.clock)
                    stop.exit_if_requested()
                if state.note_dice(record["dice"], epoch + 1):
                    note = {"dice": str(record["dice"]), "epoch": str(epoch + 1)}
                    save_weights(run.directory / "best.safetensors", network.state_dict(), note)
            log.epoch(record, seconds)
            state.epoch, state.step = epoch + 1, 0
            if stop.requested or not batches.resumes_within_epoch or epoch + 1 == epochs:
                state.save(run.clock)
                stop.exit_if_requested()
    best = load_weights(run.directory / "best.safetensors")
    return Fitted(best, state.best_dice, state.best_epoch, state.last_dice, total)


def train_step(
    network: nn.Module,
    batch: Batch,
    loss_function: Loss,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    precision: Precision,
    learning_rate: float,
) -> torch.Tensor:
    """Do one step; return the loss, a scalar that stays on the device.

    With fp16 the loss is scaled, and a step with non-finite gradients is skipped, inside the optimizer.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    with autocast(precision, batch.image.device):
        loss = loss_function(network(batch.image), batch.label)
    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


class _Log:
    """What the user sees while training: the bar, `metrics.jsonl`, TensorBoard and `progress.png`."""

    def __init__(self, run: Run, total: int, done: int, epochs: int) -> None:
        self._path, self._picture = run.directory / "metrics.jsonl", run.directory / "progress.png"
        self._keep_until(epochs)
        self._writer = SummaryWriter(str(run.directory / "tensorboard"), purge_step=done)
        self._bar = tqdm(total=total, initial=done, unit="step", desc="train")
        self._shown: dict[str, str] = {}
        self._samples, self._drawn = 0, time.monotonic()

    def __enter__(self) -> None:
        """Nothing to do: the bar stands already."""

    def __exit__(self, *_: object) -> None:
        """Close the bar and the files, and draw the curves a last time."""
        self._bar.close()
        self._writer.close()
        draw_progress(self._picture, read_json_lines(self._path))

    def step(self, samples: int) -> None:
        """Count one step of so many crops."""
        self._samples += samples
        self._bar.update()

    def epoch(self, record: dict[str, Any], seconds: float) -> None:
        """Write one epoch's record; `losses` of its steps, and `dice` where it was validated."""
        losses = record["losses"]
        rate = self._samples / seconds
        self._samples = 0
        record |= {
            "loss": sum(losses) / len(losses),
            "seconds": round(seconds, 4),
            "samples_per_second": round(rate, 2),
        }
        append_json_line(self._path, record)
        for name in ("loss", "dice", "samples_per_second"):
            if name in record:
                self._writer.add_scalar(name, record[name], record["step"])
        self._shown |= {name: f"{record[name]:.4f}" for name in ("loss", "dice") if name in record}
        self._bar.set_postfix({**self._shown, "samples/s": f"{rate:.1f}"}, refresh=False)
        if time.monotonic() - self._drawn > _DRAW_SECONDS:
            draw_progress(self._picture, read_json_lines(self._path))
            self._drawn = time.monotonic()

    def _keep_until(self, epochs: int) -> None:
        """Drop the records of what a resumed run does again."""
        if not self._path.is_file():
            return
        kept = [record for record in read_json_lines(self._path) if record["epoch"] <= epochs]
        write_text(self._path, "".join(json.dumps(record) + "\n" for record in kept))


_DRAW_SECONDS = 30.0
