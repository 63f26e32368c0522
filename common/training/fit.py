"""The only training loop."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward
from torch.nn.parallel import DistributedDataParallel

from medspeed.common.clock import StepTimer, span, spans_to
from medspeed.common.data.batches import Batch, Batches
from medspeed.common.inference import Precision
from medspeed.common.inference.model import load_weights
from medspeed.common.observe.roofline import distance_to_limit
from medspeed.common.run import Run
from medspeed.common.training.config import TrainingConfig, decided
from medspeed.common.training.log import Log
from medspeed.common.training.setup import autocast, learning_rates, nan_as_zero, one_step
from medspeed.common.training.state import TrainingState
from medspeed.common.training.steps import Steps, choose_steps
from medspeed.common.training.stopping import GracefulStop

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# From the network, and a function to call between cases (it raises when the run is to stop), to the metric.
Validate = Callable[[nn.Module, Callable[[], None]], float]

_CHECKPOINT_SECONDS = 30.0  # at least between two checkpoints; a variable sets it for tests and benchmarks


@dataclass(frozen=True)
class Fitted:
    """What training leaves.

    Args:
        weights: of the validation with the highest metric.
        best: that metric; for segmentation the Dice on the working grid.
        best_epoch: epochs done then.
        last: metric of the last validation.
        steps: steps done in all.
        held: whether the target that was asked for was reached and held; None where none was.
        seconds: since the run's start, when the training ended.
        limit: how far its steps are from what the device can do (see `distance_to_limit`); None where none was done.
    """

    weights: dict[str, torch.Tensor]
    best: float
    best_epoch: int
    last: float
    steps: int
    held: bool | None
    seconds: float
    limit: dict[str, Any] | None


@dataclass(frozen=True)
class Setup:
    """What is trained, and how.

    Args:
        network: on the run's device, in the state to start from.
        batches: this rank's part of each batch.
        loss_function: from logits and labels to a scalar that is the same on all ranks (see `Ranks.sum`).
        optimizer: of the network's parameters.
        precision: of the forward pass.
        validate: see `Validate`; every rank calls it, so it may share the cases out (`Ranks.shard`, `Ranks.gather`).
            The higher what it returns the better; the configuration's METRIC names it.
    """

    network: nn.Module
    batches: Batches
    loss_function: Loss
    optimizer: torch.optim.Optimizer
    precision: Precision
    validate: Validate


def fit(setup: Setup, config: TrainingConfig, run: Run) -> Fitted:
    """Train, validate, keep the best and the last weights; a resumed run goes on where its checkpoint stands.

    Nothing in a step waits for the device: the losses of an epoch stay there, are read at its end, and are checked
    before every checkpoint. Several ranks run this together, each on its own part of every batch: the gradients are
    averaged, the leader alone writes, all stop at the same step, and the metric that counts is the leader's.

    Args:
        setup: what is trained, and how.
        config: decided (see `keep_plan`): epochs, and those between two validations (the last epoch always has one);
            learning rate and its schedule; `accumulate`, micro-batches per step, each a
            part of the batch, whose gradients are averaged (a loss over the batch as a whole, such as batch Dice, then
            is the mean of the micro-batches' losses, which is another loss); `until`, a target that ends the training
            when it has held; what is recorded.
        run: where to write, the device, and the processes that train together.

    Raises:
        ValueError: a batch does not divide into the micro-batches.
        FloatingPointError: a loss is not finite; names step and cases; the last checkpoint is from before.
        SystemExit: SIGTERM (143), SIGINT (130), SIGHUP (129) or SIGUSR1 (138) came; the step was finished and saved.
    """
    batches = one_step(setup.batches) if config.fast_dev_run else setup.batches
    network, optimizer, precision = setup.network, setup.optimizer, setup.precision
    epochs, validate_every = decided(config.epochs), decided(config.validate_every)
    parts, ranks, target, metric = config.parallel.accumulate, run.ranks, config.target(), config.METRIC.lower()
    save_every = float(os.environ.get("MEDSPEED_CHECKPOINT_SECONDS", _CHECKPOINT_SECONDS))
    per_epoch, total = batches.steps_per_epoch, epochs * batches.steps_per_epoch
    scaler = torch.amp.GradScaler(run.device.type, enabled=precision == "fp16")
    state, timer = TrainingState(run, network, optimizer, scaler, per_epoch), StepTimer(run.device)
    state.restore()
    parallel = ranks.parallel(network.train())
    given, one = (setup.loss_function, optimizer, scaler, precision), torch.ones((), device=run.device)
    steps = Steps(
        lambda batch, rate: train_step(parallel, batch, *given, rate, parts, one), learning_rates(config, total), state
    )
    choose_steps(steps, batches, state.epoch, config, run)
    log = Log(run, config, total, state) if ranks.leader else None
    marked = spans_to("nvtx") if config.profile == "nvtx" else nullcontext()
    shown = closing(log) if log else nullcontext()
    with closing(state.best_weights), GracefulStop(ranks, state.save) as stop, marked, shown:
        for epoch in range(state.epoch, epochs):
            if state.holds(target):
                break
            began, first_step = time.perf_counter(), state.step
            parallel.train()
            for step, batch in enumerate(timer.waited(batches.epoch(epoch, first_step)), first_step):
                ranks.at_step(epoch * per_epoch + step + 1)  # the batch is there
                with timer.computing():
                    steps(batch)
                state.note_step(step, batch.cases)
                if log:
                    with timer.host("logged"):
                        log.step(len(batch.cases) * ranks.world)
                stop.after_step()
                if stop.requested or state.seconds_since_save() >= save_every:
                    if batches.resumes_within_epoch or state.step == per_epoch:
                        with timer.host("saved"):
                            state.save()
                    stop.exit_if_requested()
                ranks.at_step(epoch * per_epoch + step + 2)  # the next batch is awaited
            record: dict[str, Any] = {"epoch": epoch + 1, "step": (epoch + 1) * per_epoch, "losses": state.checked()}
            record |= timer.read()
            ranks.at_step(0)  # validating, saving and the first batch take their time
            seconds = time.perf_counter() - began
            run.clock.add("train", seconds)
            if (epoch + 1) % validate_every == 0 or epoch + 1 == epochs:
                record[metric] = _validated(setup, config, state, stop, run)
                stop.agree()
            if log:
                with timer.host("logged"):
                    log.epoch(record, seconds)
            state.epoch, state.step = epoch + 1, 0
            if stop.requested or not batches.resumes_within_epoch or epoch + 1 == epochs or state.holds(target):
                with timer.host("saved"):
                    state.save()
                stop.exit_if_requested()
    best = ranks.once(lambda: load_weights(run.directory / "best.safetensors"))
    held, total_seconds = None if target is None else state.holds(target), run.clock.seconds()["total"]
    limit = distance_to_limit(network, steps.shape, timer.typical(), precision, run) if ranks.leader else None
    return Fitted(best, state.best, state.best_epoch, state.last, state.steps_done, held, total_seconds, limit)


def _validated(setup: Setup, config: TrainingConfig, state: TrainingState, stop: GracefulStop, run: Run) -> float:
    """Validate after an epoch, keep the weights if they are the best so far, and return the metric."""
    ranks = run.ranks
    if ranks.world > 1:  # nothing stops their validation, and torchrun may not wait
        state.save()
    with run.clock.stage("validate"), span("validate"):
        ranks.average_buffers(setup.network)
        validate = nan_as_zero(setup.validate) if config.fast_dev_run else setup.validate
        value = ranks.from_leader(validate(setup.network, stop.check))
    epoch = state.epoch + 1
    if state.note_validation(value, epoch) and ranks.leader:
        note = {config.METRIC.lower(): str(value), "epoch": str(epoch)}
        state.best_weights.keep(setup.network.state_dict(), note)
    return value


def train_step(
    network: nn.Module,
    batch: Batch,
    loss_function: Loss,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    precision: Precision,
    learning_rate: float | torch.Tensor,
    accumulate: int = 1,
    one: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do one step; return the loss, a scalar that stays on the device: the mean over the micro-batches.

    With fp16 the loss is scaled, and a step with non-finite gradients is skipped, inside the optimizer. The ranks
    exchange their gradients once, in the last micro-batch. Our Novograd reads a learning rate on the device there; a
    scalar `one` there saves a kernel.

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
                with span("forward"):
                    logits = network(image)
                with span("loss"):
                    loss = loss_function(logits, label)
                    loss = loss if accumulate == 1 else loss / accumulate  # no kernel that divides by one
            with span("backward"):
                scaled = scaler.scale(loss)
                # As `backward` ends, which with a gradient of ours would load all that symbolic shapes need.
                given = (torch.ones_like(scaled) if one is None else one,), False, False, ()
                _engine_run_backward((scaled,), *given, allow_unreachable=True, accumulate_grad=True)
        losses.append(loss.detach())
    with span("optimizer"):
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return losses[0] if accumulate == 1 else torch.stack(losses).sum()


def _micro_batches(batch: Batch, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    size = len(batch.image)
    if size % count:
        raise ValueError(f"accumulate {count}: must divide the {size} crops of a batch on each rank; change either")
    return zip(batch.image.chunk(count), batch.label.chunk(count), strict=True)
