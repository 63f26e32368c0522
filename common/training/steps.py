"""The steps of a run: launched by the host operator by operator, or each as one CUDA graph that was captured before.

A graph repeats the same operators on the same memory: batch and learning rate are copied there before each step.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from medspeed.common.data.batches import Batch, Batches, Draft
from medspeed.common.data.crops import pinned
from medspeed.common.inference.model import first_line
from medspeed.common.kernels import trust
from medspeed.common.run import Run
from medspeed.common.training.config import TrainingConfig
from medspeed.common.training.optimizers import Novograd
from medspeed.common.training.state import TrainingState

Compute = Callable[[Batch, float | Tensor], Tensor]  # a step, from a batch and a learning rate to the loss, a scalar
CAPTURED = "captured step"  # the name that `trust.trusts` knows it by
_TRIAL_RATES = (1.0, 0.5, 0.25)  # times the first rate, in trial steps: a rate frozen into the graph would show
_TOLERANCE = 0.02  # of each loss and of how far each tensor moved: some kernels add in another order each time


class Steps:
    """Does the steps of a run in turn, from where its state stands, each at its rate; their losses go to the state."""

    def __init__(self, compute: Compute, rates: Sequence[float], state: TrainingState) -> None:
        self._compute, self.state, self._done, device = compute, state, state.steps_done, state.losses.device
        on_device = isinstance(state.optimizer, Novograd)  # the others take a number of the host's
        self._rates: Sequence[float] | Tensor = torch.tensor(rates, device=device) if on_device else rates
        self.shape: tuple[int, ...] = ()  # of the images, in the largest batch
        self.release()

    def __call__(self, batch: Batch) -> None:
        """Do the next step; the host waits for nothing."""
        rate, place = self._rates[self._done], self._done % len(self.state.losses)
        if self._replay is not None and self._sample is not None and _kind(batch) == _kind(self._sample):
            for slot, part in zip(self._slots, _parts(batch, rate), strict=True):
                slot.copy_(part, non_blocking=True)
            self._replay()
            loss = self._loss
        else:
            loss = self._step(batch, rate)
        self.state.losses[place].copy_(loss)
        self._done += 1

    def release(self) -> None:
        """Do the run's steps eagerly, as in the beginning; give the memory of a captured one back."""
        self._replay: Callable[[], object] | None = None
        self._sample: Batch | None = None
        self._slots: list[Tensor] = []  # what differs between steps, the rate first, where a captured one reads it

    def hold(self, sample: Batch) -> None:
        """Keep a sample batch for trial steps and the capture; a draft is made anew in each step, in the graph too."""
        self._sample, self._loss = sample, torch.zeros_like(self.state.losses[0])
        parts = _parts(sample, self._rates[0])
        self._slots = [torch.empty_like(part, device=self._loss.device).copy_(part) for part in parts]

    def capture(self) -> Callable[[], object]:
        """Return a step on the sample, captured once for the run's steps; after a RuntimeError these stay eager."""
        if self._replay is None:
            with self._undone():
                self._replay = trust.record(self._on_sample)
        return self._replay

    def tried(self) -> list[Tensor]:
        """Do some trial steps on the sample, as a graph if `trusts` says so; return what graph and eager must share.

        That is the losses, and the norm of the change of each tensor (weights, optimizer state), as scalars.
        """
        step, found = self.capture() if trust.trusts(CAPTURED) else self._on_sample, []
        with self._undone() as changed:
            for part in _TRIAL_RATES:
                self._slots[0].fill_(self._rates[0] * part)
                step()
                found.append(self._loss.clone())
            return [*found, *torch._foreach_norm([now - was for now, was in changed if now.is_floating_point()])]

    def _step(self, batch: Batch, rate: float | Tensor) -> Tensor:
        self.shape = max(self.shape, batch.image.shape)
        return self._compute(batch, rate).detach()

    def _on_sample(self) -> None:
        assert self._sample is not None
        rate, *parts = self._slots
        image, label = self._sample.make(*parts) if isinstance(self._sample, Draft) else parts
        self._loss.copy_(self._step(Batch(image, label, self._sample.cases), rate))

    @contextmanager
    def _undone(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Let steps be tried; yield what they change beside what it was, and put that back in the end."""
        changed = [tensor.detach() for tensor in self.state.tensors()]
        kept, device = [tensor.clone() for tensor in changed], self.state.losses.device
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
                yield list(zip(changed, kept, strict=True))
        finally:
            self.state.optimizer.zero_grad(set_to_none=True)
            torch._foreach_copy_(changed, kept)


def why_eager(batches: Batches, state: TrainingState, config: TrainingConfig, run: Run) -> str | None:
    """Return why no graph is to be captured; None where one is."""
    if config.graph == "off":
        return "--graph off"
    if run.device.type != "cuda":
        return f"no CUDA graphs on a {run.device.type}"
    if run.ranks.world > 1:  # losses and gradients, within the step: a captured exchange that hangs has no way back
        return "several ranks exchange gradients"
    if not isinstance(state.optimizer, Novograd):
        return f"the optimizer {config.optimizer} reads its learning rate on the host"
    return None if batches.made_on_device else "batches are not made on the device"


def choose_steps(steps: Steps, batches: Batches, config: TrainingConfig, run: Run) -> None:
    """Capture the steps where `--graph` and the run allow it, and a trial shows equal losses and updates, faster."""
    reason = why_eager(batches, steps.state, config, run)
    with run.clock.stage("compile"):
        if reason is None:
            with closing(batches.epoch(steps.state.epoch)) as made:
                sample = next(made)
            reason = _tried(steps, sample, config, run)
    run.say(f"steps: eager ({reason})" if reason else "steps: one CUDA graph per step", "detail")


def _tried(steps: Steps, sample: Batch, config: TrainingConfig, run: Run) -> str | None:
    """Capture the steps where a trial, or an earlier one of the same code, says so; return why not."""
    steps.hold(sample)
    code = crc32(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))))
    size = sum(each.numel() for each in steps.state.tensors())  # which two networks hardly ever share
    batch = f"{type(sample).__name__} of {list(sample.image.shape)} {sample.image.dtype}, {size} numbers"
    about = f"{config.APP}, {batch}, {config.precision}, by {config.parallel.accumulate}, code {code:08x}"
    try:
        trial = trust.Trial(CAPTURED, steps.tried, _TOLERANCE, about, launched=steps.tried)
        if trust.choose([trial], "auto", config.store, run.say):
            steps.capture()
            return None
        reason = "see the trial above"
    except RuntimeError as error:
        reason = f"capture failed: {first_line(error)}"
    steps.release()
    return reason


def _parts(batch: Batch, rate: Any) -> list[Tensor]:  # noqa: ANN401
    """Return what differs between steps; of drafts on the host, where the copy need not be waited for."""
    if isinstance(batch, Draft):
        return [rate, *(pinned(table, batch.device) for table in batch.tables)]
    return [rate, batch.image, batch.label]


def _kind(batch: Batch) -> tuple[object, ...]:
    """Return what batches that a captured step can take have in common."""
    parts = batch.tables if isinstance(batch, Draft) else (batch.image, batch.label)
    return [(each.shape, each.dtype) for each in parts], getattr(batch, "key", None)
