"""The only training loop."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from common.data.batches import Batch, Batches
from common.files import write_text
from common.inference.predictors import Precision
from common.observe.curves import draw_progress
from common.observe.run import Run, append_json_line, read_json_lines
from common.training.checkpoints import load_weights, save_weights
from common.training.distributed import SINGLE, Ranks
from common.training.precision import autocast
from common.training.schedules import ScheduleName, lr_factor
from common.training.signals import GracefulStop, StopRequested
from common.training.state import TrainingState

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# From the network, and a function to call between cases (it raises when the run is to stop), to the metric.
Validate = Callable[[nn.Module, Callable[[], None]], float]


@dataclass(frozen=True)
class Fitted:
    """What training leaves.

    Args:
        weights: of the validation with the highest metric.
        best: that metric; for segmentation the Dice on the working grid.
        best_epoch: epochs done then.
        last: metric of the last validation.
        steps: steps done in all.
    """

    weights: dict[str, torch.Tensor]
    best: float
    best_epoch: int
    last: float
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
    ranks: Ranks = SINGLE,
    accumulate: int = 1,
    metric: str = "Dice",
) -> Fitted:
    """Train, validate, keep the best and the last weights; a resumed run goes on where its checkpoint stands.

    Nothing in a step waits for the device: the losses of an epoch stay there, are read at its end, and are checked
    before every checkpoint. Several ranks run this together, each on its own part of every batch: the gradients are
    averaged, the leader alone writes, all stop at the same step, and the metric that counts is the leader's.

    Args:
        network: on the run's device, in the state to start from.
        batches: this rank's part of each batch.
        run: where to write, and the device.
        loss_function: from logits and labels to a scalar that is the same on all ranks (see `Ranks.sum`).
        optimizer: of the network's parameters.
        learning_rate: the highest, before the schedule's factor.
        schedule: how the learning rate goes down.
        epochs: in all.
        precision: of the forward pass.
        validate: see `Validate`; every rank calls it, so it may share the cases out (`Ranks.shard`, `Ranks.gather`).
        validate_every: epochs between validations; the last epoch always has one.
        checkpoint_seconds: between checkpoints.
        ranks: the processes that train together.
        accumulate: micro-batches per step, each a part of the batch, whose gradients are averaged. A loss over the
            batch as a whole, such as batch Dice, then is the mean of the micro-batches' losses, which is another loss.
        metric: name of what `validate` returns; the higher the better.

    Raises:
        ValueError: a batch does not divide into the micro-batches.
        FloatingPointError: a loss is not finite; names step and cases; the last checkpoint is from before.
        SystemExit: SIGTERM (143) or SIGINT (130) came; the step was finished and saved.
    """
    per_epoch, total = batches.steps_per_epoch, epochs * batches.steps_per_epoch
    scaler = torch.amp.GradScaler(run.device.type, enabled=precision == "fp16")
    state = TrainingState(run.directory, network, optimizer, scaler, per_epoch, run.device, ranks)
    ranks.saves_in(run.directory)
    if run.resumed:
        state.restore(run.clock)
    parallel = ranks.parallel(network)
    log = _FileLog(run, metric, total, state.steps_done, state.epoch) if ranks.leader else _Log()
    with GracefulStop(ranks) as stop, ranks.phase("step"), log:
        for epoch in range(state.epoch, epochs):
            began, first_step = time.perf_counter(), state.step
            parallel.train()
            ranks.at_step(state.steps_done + 1)
            for step, batch in enumerate(_loaded(batches.epoch(epoch, first_step), ranks), first_step):
                ranks.at_step(epoch * per_epoch + step + 1)  # the batch is there
                rate = learning_rate * lr_factor(schedule, epoch * per_epoch + step, total)
                loss = train_step(parallel, batch, loss_function, optimizer, scaler, precision, rate, accumulate)
                state.note_step(step, loss, batch.cases)
                log.step(len(batch.cases) * ranks.world)
                stop.after_step()
                if stop.requested or state.seconds_since_save() >= checkpoint_seconds:
                    if batches.resumes_within_epoch or state.step == per_epoch:
                        state.save(run.clock)
                    stop.exit_if_requested()
                ranks.at_step(epoch * per_epoch + step + 2)  # the next batch is awaited
            record: dict[str, Any] = {"epoch": epoch + 1, "step": (epoch + 1) * per_epoch, "losses": state.checked()}
            seconds = time.perf_counter() - began
            run.clock.add("train", seconds)
            if (epoch + 1) % validate_every == 0 or epoch + 1 == epochs:
                state.save_if_shared(run.clock)
                try:
                    with run.clock.stage("validate"), ranks.phase("validating"):
                        ranks.average_buffers(network)
                        value = ranks.from_leader(validate(network, stop.check))
                except StopRequested:
                    state.save(run.clock)
                    stop.exit_if_requested()
                record[metric.lower()] = value
                if state.note_validation(value, epoch + 1) and ranks.leader:
                    note = {metric.lower(): str(value), "epoch": str(epoch + 1)}
                    save_weights(run.directory / "best.safetensors", network.state_dict(), note)
                stop.agree()
            log.epoch(record, seconds)
            state.epoch, state.step = epoch + 1, 0
            if stop.requested or not batches.resumes_within_epoch or epoch + 1 == epochs:
                state.save(run.clock)
                stop.exit_if_requested()
    best = ranks.once(lambda: load_weights(run.directory / "best.safetensors"))
    return Fitted(best, state.best, state.best_epoch, state.last, total)


def _loaded(batches: Iterator[Batch], ranks: Ranks) -> Iterator[Batch]:
    """Yield an epoch's batches; before the first, cases may have to be loaded: no rank is called hung for that."""
    with ranks.phase("loading"):
        first = next(batches, None)
    if first is not None:
        yield first
        yield from batches


def train_step(
    network: nn.Module,
    batch: Batch,
    loss_function: Loss,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    precision: Precision,
    learning_rate: float,
    accumulate: int = 1,
) -> torch.Tensor:
    """Do one step; return the loss, a scalar that stays on the device: the mean over the micro-batches.

    With fp16 the loss is scaled, and a step with non-finite gradients is skipped, inside the optimizer. The ranks
    exchange their gradients once, in the last micro-batch.

    Raises:
        ValueError: the batch does not divide into `accumulate` micro-batches.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    losses = []
    for number, (image, label) in enumerate(_micro_batches(batch, accumulate), 1):
        last = number == accumulate
        with nullcontext() if last or not isinstance(network, DistributedDataParallel) else network.no_sync():
            with autocast(precision, image.device):
                loss = loss_function(network(image), label) / accumulate
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return losses[0] if accumulate == 1 else torch.stack(losses).sum()


def _micro_batches(batch: Batch, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    size = len(batch.image)
    if size % count:
        raise ValueError(
            f"accumulate {count}: must divide the {size} crops of a batch on each rank; change one of them"
        )
    return zip(batch.image.chunk(count), batch.label.chunk(count), strict=True)


class _Log:
    """What `fit` reports to, as it is on all ranks but the leader: silent."""

    def __enter__(self) -> None:
        """Nothing to do: what there is to open is open."""

    def __exit__(self, *_: object) -> None:
        """Close what is open."""

    def step(self, samples: int) -> None:
        """Count one step of so many crops."""

    def epoch(self, record: dict[str, Any], seconds: float) -> None:
        """Note one epoch's record; `losses` of its steps, and the metric where it was validated."""


class _FileLog(_Log):
    """What the user sees while training: the bar, `metrics.jsonl`, TensorBoard and `progress.png`."""

    def __init__(self, run: Run, metric: str, total: int, done: int, epochs: int) -> None:
        self._metric = metric
        self._path, self._picture = run.directory / "metrics.jsonl", run.directory / "progress.png"
        self._keep_until(epochs)
        self._writer = SummaryWriter(str(run.directory / "tensorboard"), purge_step=done)
        self._bar = tqdm(total=total, initial=done, unit="step", desc="train")
        self._shown: dict[str, str] = {}
        self._samples, self._drawn = 0, time.monotonic()

    def __exit__(self, *_: object) -> None:
        """Close the bar and the files, and draw the curves a last time."""
        self._bar.close()
        self._writer.close()
        draw_progress(self._picture, read_json_lines(self._path), self._metric)

    def step(self, samples: int) -> None:
        """Count one step of so many crops."""
        self._samples += samples
        self._bar.update()

    def epoch(self, record: dict[str, Any], seconds: float) -> None:
        """Write one epoch's record; `losses` of its steps, and the metric where it was validated."""
        losses = record["losses"]
        rate = self._samples / seconds
        self._samples = 0
        record |= {
            "loss": sum(losses) / len(losses),
            "seconds": round(seconds, 4),
            "samples_per_second": round(rate, 2),
        }
        append_json_line(self._path, record)
        for name in ("loss", self._metric.lower(), "samples_per_second"):
            if name in record:
                self._writer.add_scalar(name, record[name], record["step"])
        self._shown |= {name: f"{record[name]:.4f}" for name in ("loss", self._metric.lower()) if name in record}
        self._bar.set_postfix({**self._shown, "samples/s": f"{rate:.1f}"}, refresh=False)
        if time.monotonic() - self._drawn > _DRAW_SECONDS:
            draw_progress(self._picture, read_json_lines(self._path), self._metric)
            self._drawn = time.monotonic()

    def _keep_until(self, epochs: int) -> None:
        """Drop the records of what a resumed run does again."""
        if not self._path.is_file():
            return
        kept = [record for record in read_json_lines(self._path) if record["epoch"] <= epochs]
        write_text(self._path, "".join(json.dumps(record) + "\n" for record in kept))


_DRAW_SECONDS = 30.0
