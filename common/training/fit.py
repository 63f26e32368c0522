"""The only training loop."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from itertools import islice
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import _engine_run_backward
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from medspeed.common.clock import StepTimer
from medspeed.common.data.batches import Batch, Batches
from medspeed.common.inference import Precision
from medspeed.common.inference.model import load_weights
from medspeed.common.observe.profiler import nvtx_ranges
from medspeed.common.observe.roofline import distance_to_limit
from medspeed.common.ranks import Ranks
from medspeed.common.run import STOP_SIGNALS, Run, take_signals
from medspeed.common.training.config import TrainingConfig, decided
from medspeed.common.training.log import Log
from medspeed.common.training.losses import Loss
from medspeed.common.training.setup import autocast, dtype_of, learning_rates
from medspeed.common.training.state import TrainingState
from medspeed.common.training.steps import Steps, choose_steps

_CHECKPOINT_SECONDS = 30.0  # at least between two checkpoints; a variable sets it for tests and benchmarks


@dataclass(frozen=True)
class Fitted:
    """What training leaves."""

    weights: dict[str, torch.Tensor]  # of the best validation
    best: float  # its metric; for segmentation the Dice on the working grid
    best_epoch: int  # epochs done then
    last: float  # metric of the last validation
    steps: int  # done in all
    held: bool | None  # whether the target was reached and held; None where there was none
    seconds: float  # from the run's start to the end of the training
    limit: dict[str, Any] | None  # what `distance_to_limit` says of its steps


@dataclass(frozen=True)
class Setup:
    """What is trained, and how."""

    network: nn.Module  # on the run's device, in the state to start from
    batches: Batches  # this rank's part of each batch
    loss_function: Loss  # from logits and labels to a scalar that is the same on all ranks (see `Ranks.sum`)
    optimizer: torch.optim.Optimizer  # of the network's parameters
    precision: Precision  # of the forward pass
    # From the network, and a function to call between cases (it raises when the run is to stop), to the configuration's
    # METRIC, the higher the better. Every rank calls it, so it may share the cases out.
    validate: Callable[[nn.Module, Callable[[], None]], float]


def fit(setup: Setup, config: TrainingConfig, run: Run) -> Fitted:
    """Train, validate, keep the best and the last weights; a resumed run goes on where its checkpoint stands.

    The configuration is decided (see `keep_plan`). Nothing in a step waits for the device: the losses of an epoch stay
    there, are read at its end, and are checked before every checkpoint. Several ranks run this together, each on its
    own part of every batch: the gradients are averaged, the leader alone writes, all stop at the same step, and the
    metric that counts is the leader's. The last epoch is always validated.

    Raises:
        ValueError: a batch does not divide into the micro-batches.
        FloatingPointError: a loss is not finite; names step and cases; the last checkpoint is from before.
        SystemExit: SIGTERM (143), SIGINT (130), SIGHUP (129) or SIGUSR1 (138) came; the step was finished and saved.
    """
    batches, network, optimizer, precision = setup.batches, setup.network, setup.optimizer, setup.precision
    epochs, validate_every = decided(config.epochs), decided(config.validate_every)
    parts, ranks, target, metric = config.parallel.accumulate, run.ranks, config.target(), config.METRIC.lower()
    save_every = float(os.environ.get("MEDSPEED_CHECKPOINT_SECONDS", _CHECKPOINT_SECONDS))
    per_epoch = 1 if config.fast_dev_run else batches.steps_per_epoch
    total = epochs * per_epoch
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
    marked = nvtx_ranges() if config.profile == "nvtx" else nullcontext()
    shown = closing(log) if log else nullcontext()
    with closing(state), closing(GracefulStop(ranks, state.save)) as stop, marked, shown:
        for epoch in range(state.epoch, epochs):
            if state.holds(target):
                break
            began, first_step = time.perf_counter(), state.step
            parallel.train()
            left = per_epoch - first_step if config.fast_dev_run else None
            for step, batch in enumerate(timer.waited(islice(batches.epoch(epoch, first_step), left)), first_step):
                ranks.at_step(epoch * per_epoch + step + 1)  # the batch is there
                with timer.computing():
                    steps(batch)
                state.note_step(step, batch.cases)
                if log:
                    with timer.host("logged"):
                        log.step(len(batch.cases) * ranks.world)
                stop.agree()
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
    limit = distance_to_limit(network, steps.shape, timer.typical(), dtype_of(precision), run) if ranks.leader else None
    return Fitted(best, state.best, state.best_epoch, state.last, state.steps_done, held, total_seconds, limit)


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
    """Do one step; return the loss, a scalar that stays on the device: the mean over `accumulate` micro-batches.

    With fp16 the loss is scaled, and a step with non-finite gradients is skipped, inside the optimizer. The ranks
    exchange their gradients once, in the last micro-batch. Our Novograd reads a learning rate on the device there; a
    scalar `one` there saves a kernel.

    Raises:
        ValueError: the batch does not divide into micro-batches.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    losses = []
    if len(batch.image) % accumulate:
        crops = f"the {len(batch.image)} crops of a batch on each rank"
        raise ValueError(f"accumulate {accumulate}: must divide {crops}; change either")
    pairs = zip(batch.image.chunk(accumulate), batch.label.chunk(accumulate), strict=True)
    for number, (image, label) in enumerate(pairs, 1):
        last = number == accumulate
        with nullcontext() if last or not isinstance(network, DistributedDataParallel) else network.no_sync():
            with autocast(precision, image.device):
                with record_function("forward"):
                    logits = network(image)
                with record_function("loss"):
                    loss = loss_function(logits, label)
                    loss = loss if accumulate == 1 else loss / accumulate  # no kernel that divides by one
            with record_function("backward"):
                scaled = scaler.scale(loss)
                # As `backward` ends, which with a gradient of ours would load all that symbolic shapes need.
                given = (torch.ones_like(scaled) if one is None else one,), False, False, ()
                _engine_run_backward((scaled,), *given, allow_unreachable=True, accumulate_grad=True)
        losses.append(loss.detach())
    with record_function("optimizer"):
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return losses[0] if accumulate == 1 else torch.stack(losses).sum()


class GracefulStop:
    """Until it is closed, the first stop signal is a wish to stop after the step, and the second acts as usual.

    With several ranks the signal reaches each at another step, or only one of them. They agree after each step: what
    one was told counts for all, and further signals change nothing, so that the leader can save in peace (torchrun
    kills what has not ended 30 seconds later). `save` is done before a validation is broken off.
    """

    def __init__(self, ranks: Ranks, save: Callable[[], None]) -> None:
        self._ranks, self._save = ranks, save
        self._number, self._agreed = 0, 0  # the signal that came to this process, and the one that counts for all
        self._taken = ExitStack()  # a signal may come before the next line has ended
        self._taken = take_signals((*STOP_SIGNALS, signal.SIGINT), self._note)

    def close(self) -> None:
        """Give the signals back."""
        self._taken.close()

    @property
    def requested(self) -> bool:
        """Whether a signal has come; with several ranks, whether all know of it."""
        return bool(self._number if self._ranks.world == 1 else self._agreed)

    def agree(self) -> None:
        """Hear what the ranks know now: their hosts wait for each other, and for no device."""
        if self._ranks.world > 1:
            known = torch.tensor(self._number, dtype=torch.int32)
            dist.all_reduce(known, dist.ReduceOp.MAX, group=self._ranks.control)
            self._agreed = int(known)

    def exit_if_requested(self) -> None:
        """End the program, if a signal has come, with the status that says which: 143 for SIGTERM."""
        if self.requested:
            self._ranks.leave()
            raise SystemExit(128 + (self._agreed or self._number))

    def check(self) -> None:
        """Save and end the program, if a signal has come, in the midst of work: a rank that is alone may."""
        if self.requested and self._ranks.world == 1:
            self._save()
            self.exit_if_requested()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._number = self._number or number
        if self._ranks.world == 1:
            self.close()


def _validated(setup: Setup, config: TrainingConfig, state: TrainingState, stop: GracefulStop, run: Run) -> float:
    """Validate after an epoch, keep the weights if they are the best so far, and return the metric."""
    ranks = run.ranks
    if ranks.world > 1:  # nothing stops their validation, and torchrun may not wait
        state.save()
    with run.clock.stage("validate"), record_function("validate"):
        ranks.average_buffers(setup.network)
        value = ranks.from_leader(setup.validate(setup.network, stop.check))
        value = max(0.0, value) if config.fast_dev_run else value  # a few cases may well hold nothing to find: NaN
    epoch = state.epoch + 1
    if state.note_validation(value, epoch) and ranks.leader:
        state.keep_best({config.METRIC.lower(): str(value), "epoch": str(epoch)})
    return value
