"""The only training loop, and what the user sees of it."""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function
from tqdm import tqdm

from medspeed.common.clock import StepTimer, profiled_steps, synchronise
from medspeed.common.config import flat
from medspeed.common.console import hides_bar
from medspeed.common.data.batches import Batch, Batches
from medspeed.common.files import point_link, read_json_lines, write_text
from medspeed.common.inference import Precision
from medspeed.common.inference.model import load_weights
from medspeed.common.inference.predictors import autocast
from medspeed.common.observe.monitor import monitored
from medspeed.common.observe.roofline import distance_to_limit
from medspeed.common.run import Run
from medspeed.common.training.config import TrainingConfig, decided
from medspeed.common.training.losses import Loss
from medspeed.common.training.setup import GracefulStop, dtype_of, learning_rates
from medspeed.common.training.state import TrainingState
from medspeed.common.training.steps import Steps, choose_steps

_CHECKPOINT_SECONDS = 30.0  # at least between two checkpoints; a variable sets it for tests and benchmarks
_DRAW_SECONDS = 30.0
_LOG_LINES = 30  # about; each epoch has a line where there are no more epochs


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
    judges_init: bool = True  # whether the weights of --init may be the best: they were not trained on what validates


def fit(setup: Setup, config: TrainingConfig, run: Run) -> Fitted:
    """Train, validate, keep the best and the last weights; a resumed run goes on where its checkpoint stands.

    The configuration is decided (see `keep_plan`). Nothing in a step waits for the device: the losses of an epoch stay
    there, are read at its end, and are checked before every checkpoint. Several ranks run this together, each on its
    own part of every batch: the gradients are averaged, the leader alone writes, all stop at the same step, and the
    metric that counts is the leader's. The last epoch is always validated.

    Raises:
        FloatingPointError: a loss is not finite; names step and cases; the last checkpoint is from before.
        SystemExit: SIGTERM (143), SIGINT (130), SIGHUP (129) or SIGUSR1 (138) came; the step was finished and saved.
    """
    batches, network, optimizer, precision = setup.batches, setup.network, setup.optimizer, setup.precision
    epochs, validate_every = decided(config.epochs), decided(config.validate_every)
    parts, ranks, target, metric = config.parallel.accumulate, run.ranks, config.target(), config.METRIC.lower()
    save_every = float(os.environ.get("MEDSPEED_CHECKPOINT_SECONDS", _CHECKPOINT_SECONDS))
    per_epoch = 1 if config.fast_dev_run else batches.steps_per_epoch
    rates = learning_rates(config, epochs * per_epoch)
    scaler = torch.amp.GradScaler(run.device.type, enabled=precision == "fp16")
    state, timer = TrainingState(run, network, optimizer, scaler, per_epoch), StepTimer(run.device)
    so_far = run.clock.seconds()["total"]
    state.restore()
    total_seconds = run.clock.seconds()["total"] - so_far  # of earlier processes, which may have trained it
    parallel = ranks.parallel(network.train())
    given = setup.loss_function, optimizer, scaler, precision
    steps = Steps(lambda batch, rate: train_step(parallel, batch, *given, rate, parts), rates, state)
    choose_steps(steps, batches, config, run)
    marked: Any = torch.autograd.profiler.emit_nvtx(config.profile == "nvtx")  # type: ignore[no-untyped-call]
    with closing(state), closing(GracefulStop(ranks, state.save)) as stop, marked, ExitStack() as shown:
        log = shown.enter_context(closing(Log(run, config, rates, state))) if ranks.leader else None
        if setup.judges_init and config.init is not None and not state.steps_done:
            run.say(f"{metric} of the weights of --init: {_validated(setup, config, state, stop, run):.4f}")
        for epoch in takewhile(lambda _: not state.holds(target), range(state.epoch, epochs)):
            began, first_step = time.perf_counter(), state.step
            clocked = began  # until when the run's clock has the training
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
                stop.after_step()
                if stop.requested or time.monotonic() - state.saved >= save_every:
                    if batches.resumes_within_epoch or state.step == per_epoch:
                        with timer.host("saved"):
                            synchronise()
                            clocked, before = time.perf_counter(), clocked
                            run.clock.add("train", clocked - before)  # a stopped run goes on with it
                            state.save(together=bool(stop.requested))
                    stop.exit_if_requested()
                ranks.at_step(epoch * per_epoch + step + 2)  # the next batch is awaited
            record: dict[str, Any] = {"epoch": epoch + 1, "step": (epoch + 1) * per_epoch, "losses": state.checked()}
            record |= timer.read()
            ranks.at_step(0)  # validating, saving and the first batch take their time
            seconds = time.perf_counter() - began
            run.clock.add("train", began + seconds - clocked)
            if (epoch + 1) % validate_every == 0 or epoch + 1 == epochs:
                record[metric] = _validated(setup, config, state, stop, run)
                total_seconds = run.clock.seconds()["total"]  # here, since it is when a target was reached
                stop.agree()
            if log:
                with timer.host("logged"):
                    log.epoch(record, seconds)
            state.epoch, state.step = epoch + 1, 0
            if stop.requested or not batches.resumes_within_epoch or epoch + 1 == epochs or state.holds(target):
                with timer.host("saved"):
                    state.save(together=bool(stop.requested))
                stop.exit_if_requested()
        ranks.once(shown.close)
        stop.agree()  # a signal may have come while the log was drawn
        stop.exit_if_requested()
    best = ranks.once(lambda: load_weights(run.directory / "best.safetensors"))
    held = None if target is None else state.holds(target)
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
) -> torch.Tensor:
    """Do one step; return the loss, a scalar that stays on the device: the mean over `accumulate` micro-batches.

    With fp16 the loss is scaled, and a step with non-finite gradients is skipped: for all optimizers but `Novograd` the
    host waits to know. Ranks exchange gradients once, in the last micro-batch. Only `Novograd` gets a tensor as rate.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    assert len(batch.image) % accumulate == 0, f"{len(batch.image)} crops in {accumulate} micro-batches"
    losses = []
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
                torch.autograd.backward(scaler.scale(loss))
        losses.append(loss.detach())
    with record_function("optimizer"):
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return losses[0] if accumulate == 1 else torch.stack(losses).sum()


def _validated(setup: Setup, config: TrainingConfig, state: TrainingState, stop: GracefulStop, run: Run) -> float:
    """Validate after an epoch, or before the first, keep weights that are the best so far, and return the metric."""
    ranks = run.ranks
    ranks.average_buffers(setup.network)
    if ranks.world > 1:  # nothing stops their validation, and torchrun may not wait
        state.save()
    with run.clock.stage("validate"), record_function("validate"):
        value = ranks.from_leader(setup.validate(setup.network, stop.check))
        value = max(0.0, value) if config.fast_dev_run else value  # a few cases may well hold nothing to find: NaN
    epoch = state.epoch + bool(state.step)
    if state.note_validation(value, epoch) and ranks.leader:
        state.keep_best({config.METRIC.lower(): str(value), "epoch": str(epoch)})
    return value


class Log:
    """What is seen of a training: the bar, `metrics.jsonl`, trackers, curves, the machine's load."""

    def __init__(self, run: Run, config: TrainingConfig, rates: Sequence[float], state: TrainingState) -> None:
        self._run, self._rates, self._metric = run, rates, config.METRIC
        self._path, self._watching = run.directory / "metrics.jsonl", ExitStack()
        if config.run is None and not config.fast_dev_run and not state.steps_done:
            point_link(run.directory.with_name("latest"), run.directory.name)  # a run that got no further leaves it
        if self._path.is_file():  # epochs that are done again are dropped, and a line cut short
            kept = [record for record in read_json_lines(self._path) if record["epoch"] <= state.epoch]
            write_text(self._path, "".join(json.dumps(record) + "\n" for record in kept))
        plain = {name: v if isinstance(v, int | float | str | None) else str(v) for name, v in flat(config).items()}
        run.trackers.begin(plain, state.steps_done)
        self._bar = tqdm(total=len(rates), initial=state.steps_done, unit="step", desc="train", disable=hides_bar())
        self._epochs, self._first = decided(config.epochs), state.epoch
        self._shown, self._samples = dict[str, str](), 0
        self._drawn = self._began = time.monotonic()
        if seconds := float(os.environ.get("MEDSPEED_MONITOR_SECONDS", 1)):  # tests and benchmarks do without
            self._watching.enter_context(monitored(run.directory, run.device, seconds))
        profiled = profiled_steps(run.directory / "profile", run.device) if config.profile == "torch" else nullcontext()
        self._profiler = self._watching.enter_context(profiled)

    def close(self) -> None:
        """Close the bar and the files, and draw the curves a last time."""
        self._watching.close()
        self._bar.close()
        if self._path.parent.is_dir():  # else somebody took the run away
            self._draw()

    def step(self, samples: int) -> None:
        """Count one step of so many crops."""
        self._samples += samples
        self._bar.update()
        if self._profiler:
            self._profiler()

    def epoch(self, record: dict[str, Any], seconds: float) -> None:
        """Write one epoch's record; `losses` of its steps, and the metric where it was validated."""
        rate, loss, self._samples = self._samples / seconds, sum(record["losses"]) / len(record["losses"]), 0
        record |= {"loss": loss, "seconds": round(seconds, 4), "samples_per_second": round(rate, 2)}
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record, allow_nan=False) + "\n")
        shown = [name for name in ("loss", self._metric.lower()) if name in record]
        values = {name: record[name] for name in (*shown, "samples_per_second")}
        self._run.trackers.scalars(values | {"learning_rate": self._rates[record["step"] - 1]}, record["step"])
        self._shown |= {name: f"{record[name]:.4f}" for name in shown}
        self._bar.set_postfix({**self._shown, "samples/s": f"{rate:.1f}"}, refresh=False)
        if (epoch := record["epoch"]) % -(-self._epochs // _LOG_LINES) == 0 or len(shown) > 1:
            left = (time.monotonic() - self._began) / (epoch - self._first) * (self._epochs - epoch)
            figures = ", ".join(f"{name} {self._shown[name]}" for name in shown)
            figures += f", {seconds:.1f} s, {tqdm.format_interval(left)} of training left"
            line = f"epoch {epoch}/{self._epochs}: {figures}"
            self._run.say(line, "note" if self._bar.disable or not sys.stdout.isatty() else "detail")
        if time.monotonic() - self._drawn > _DRAW_SECONDS:
            self._draw()

    def _draw(self) -> None:
        from medspeed.common.observe.plots import draw_progress

        draw_progress(self._run.directory / "progress.png", read_json_lines(self._path), self._metric)
        self._drawn = time.monotonic()
