"""The steps of a run: launched by the host operator by operator, or each as one CUDA graph that was captured before.

Which step it is, its learning rate and its loss lie on the device, so that a graph, which repeats the same operators on
the same memory, does another step each time.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from medspeed.common.data.batches import Batch, Batches, Draft
from medspeed.common.data.crops import pinned
from medspeed.common.inference.model import first_line
from medspeed.common.kernels import trust
from medspeed.common.kernels.trust import record
from medspeed.common.run import Run
from medspeed.common.training.config import TrainingConfig
from medspeed.common.training.optimizers import Novograd
from medspeed.common.training.state import TrainingState

Compute = Callable[[Batch, float | Tensor], Tensor]  # a step, from a batch and a learning rate to the loss, a scalar
_TRIAL_RATES = (1.0, 0.5, 0.25)  # of the first rate, in the steps that are tried: one that stood still would show
_TOLERANCE = 0.02  # of each loss and of how far each tensor moved: some kernels add in another order each time


class Steps:
    """Does the steps of a run in turn, from where its state stands, each at its rate.

    Each writes its loss into the state's and counts itself, on the device.
    """

    def __init__(self, compute: Compute, rates: Sequence[float], state: TrainingState) -> None:
        self._compute, self._rates, self.state, self._done = compute, rates, state, state.steps_done
        self._losses, device = state.losses, state.losses.device
        tried = [rates[0] * part for part in _TRIAL_RATES]
        numbers = torch.arange(len(rates) + len(tried)).repeat(2, 1).T.remainder(len(state.losses)).contiguous()
        numbers.view(torch.float32)[:, 0] = torch.tensor([*rates, *tried])
        self._table = numbers.to(device)  # of each step: the bits of its rate, and the place of its loss
        self._number = torch.tensor([self._done], device=device)  # of the next step, from 0
        self._reads_rate = isinstance(state.optimizer, Novograd)  # the others take a number of the host's
        self._sample: Batch | None = None
        self._slots: list[Tensor] = []  # what differs between batches, where a captured step reads it
        self.shape: Sequence[int] = ()  # of the images
        self._replay: Callable[[], object] | None = None

    def __call__(self, batch: Batch) -> None:
        """Do the next step; the host waits for nothing."""
        if self._replay is not None and self._sample is not None and _kind(batch) == _kind(self._sample):
            for slot, part in zip(self._slots, _parts(batch), strict=True):
                slot.copy_(part, non_blocking=True)
            self._replay()
        else:
            self._step(batch)
        self._done += 1

    def hold(self, sample: Batch) -> None:
        """Take a batch as all will be, to try steps with: a draft is made in each step, also captured."""
        self._sample, device = sample, self._losses.device
        self._slots = [torch.empty_like(part, device=device).copy_(part) for part in _parts(sample)]

    def eager(self) -> list[Tensor]:
        """Try a few eager steps on the sample; return what shows whether others do the same (see `choose_steps`)."""
        return self._outcome(self._on_sample)

    def captured(self) -> list[Tensor]:
        """Likewise try steps that repeat one, which is captured before; from here on the run's are of this kind.

        Raises:
            RuntimeError: whatever a driver, a library or the memory refuses; the run's steps stay eager.
        """
        if self._replay is None:
            with self._undone():
                self._replay = record(self._on_sample)
        return self._outcome(self._replay)

    def release(self) -> None:
        """Do the run's steps eagerly, and give the memory of the captured one back."""
        self._replay, self._sample, self._slots = None, None, []

    def _step(self, batch: Batch) -> None:
        self.shape = batch.image.shape
        row = self._table.index_select(0, self._number)
        on_device = row.view(torch.float32)[0, 0]
        loss = self._compute(batch, on_device if self._reads_rate else self._rates[self._done]).detach()
        self._losses.index_copy_(0, row[0, 1:], loss.reshape(1).to(self._losses.dtype))
        self._number.add_(1)

    def _on_sample(self) -> None:
        sample = self._sample
        assert sample is not None
        image, label = sample.make(*self._slots) if isinstance(sample, Draft) else self._slots
        self._step(Batch(image, label, sample.cases))

    def _changed(self) -> list[Tensor]:
        return [tensor.detach() for tensor in (*self.state.tensors(), self._losses, self._number)]

    @contextmanager
    def _undone(self) -> Iterator[list[Tensor]]:
        """Let steps be tried, at the rates for it; yield what they change as it was, and put it back in the end."""
        changed, device = self._changed(), self._losses.device
        kept = [tensor.clone() for tensor in changed]
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
                self._number.fill_(len(self._rates))
                yield kept
        finally:
            self.state.optimizer.zero_grad(set_to_none=True)
            torch._foreach_copy_(changed, kept)

    def _outcome(self, step: Callable[[], object]) -> list[Tensor]:
        """Return the losses of a few steps, and how far each tensor that they change has moved, as scalars."""
        found = []
        with self._undone() as kept:
            for _ in _TRIAL_RATES:
                place = self._number.remainder(len(self._losses))
                step()
                found.append(self._losses.index_select(0, place))
            pairs = zip(self._changed(), kept, strict=True)
            return [*found, *torch._foreach_norm([now - was for now, was in pairs if now.is_floating_point()])]


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


def choose_steps(steps: Steps, batches: Batches, epoch: int, config: TrainingConfig, run: Run) -> None:
    """Capture the steps where `--graph` and the run allow it, and a trial shows losses and moves right, and faster."""
    reason = why_eager(batches, steps.state, config, run)
    with run.clock.stage("compile"):
        if reason is None:
            with closing(batches.epoch(epoch)) as made:
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
    trial = trust.Trial("captured step", steps.captured, steps.eager, _TOLERANCE, about)
    try:
        if trust.choose([trial], "auto", config.store, run.say):
            steps.captured()
            return None
        reason = "see the trial above"
    except RuntimeError as error:
        reason = f"capture failed: {first_line(error)}"
    steps.release()
    return reason


def _parts(batch: Batch) -> list[Tensor]:
    """Return what differs between batches of a kind; of drafts on the host, where the copy need not be waited for."""
    if isinstance(batch, Draft):
        return [pinned(table, batch.device) for table in batch.tables]
    return [batch.image, batch.label]


def _kind(batch: Batch) -> tuple[object, ...]:
    """Return what batches that a captured step can take have in common."""
    if isinstance(batch, Draft):
        return [table.shape for table in batch.tables], batch.key
    return [(each.shape, each.dtype) for each in (batch.image, batch.label)], None
