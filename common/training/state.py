"""Where a training run stands: checkpoints that are whole or absent."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from medspeed.common.files import from_json, printable
from medspeed.common.inference.model import UNREADABLE, first_line
from medspeed.common.run import Run
from medspeed.common.training.best import BestWeights
from medspeed.common.training.checkpoint import load_checkpoint, save_checkpoint
from medspeed.common.training.optimizers import Novograd

VALIDATIONS_HELD = 3
"""Validations in a row that must reach a target: one may be luck."""
_KEPT = ("epoch", "step", "best", "best_epoch", "last", "recent")  # attributes that a checkpoint holds as they are


@dataclass(frozen=True)
class _Saved:
    """What a checkpoint holds besides the weights."""

    epoch: int
    step: int
    best: float
    best_epoch: int
    last: float
    recent: list[float]
    per_epoch: int
    losses: list[float]
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    random: torch.Tensor
    seconds: dict[str, float]
    random_on_device: torch.Tensor | None = None


class TrainingState:
    """Epoch, step, losses and best validation of a run, with the network and the optimizer they belong to.

    Attributes:
        epoch: epochs done.
        step: steps done in the present epoch; equal to `per_epoch` when only its validation is missing.
        best: highest validation metric so far, after `best_epoch` epochs.
        last: metric of the last validation.
        recent: the metrics of the last validations, `VALIDATIONS_HELD` at most.
        losses: [steps per epoch] float32 on the device, of the present epoch; what does the steps writes them.
        optimizer: of the network's parameters.
        best_weights: of the best validation; a checkpoint waits until they are written.
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
        self._network, self.optimizer, self._scaler = network, optimizer, scaler
        self.losses = torch.zeros(per_epoch, device=run.device)
        self._cases: dict[int, tuple[str, ...]] = {}
        self._saved = time.monotonic()
        self.best_weights = BestWeights(run.directory / "best.safetensors")

    @property
    def steps_done(self) -> int:
        """Steps done in all epochs."""
        return self.epoch * len(self.losses) + self.step

    def tensors(self) -> list[torch.Tensor]:
        """Return all that a step changes, but its loss: weights, buffers, the optimizer's state and the loss scale."""
        self._scaler.scale(self.losses.new_zeros(()))  # makes those of the scale, where it is used
        scaling = [each for each in vars(self._scaler).values() if isinstance(each, torch.Tensor)]
        packed = self.optimizer.pack() if isinstance(self.optimizer, Novograd) else []
        return [*self._network.parameters(), *self._network.buffers(), *packed, *scaling]

    def note_step(self, step: int, cases: tuple[str, ...]) -> None:
        """Count a step whose loss stands in its place, and keep the names of its cases."""
        if step == 0:
            self._cases.clear()
        self._cases[step] = cases
        self.step = step + 1

    def note_validation(self, value: float, epoch: int) -> bool:
        """Keep the metric of a validation; return whether it is the best so far.

        Raises:
            ValueError: it is not a number: the validation cases hold nothing to find.
        """
        if math.isnan(value):
            raise ValueError("no validation case has any foreground, so there is no metric: choose another --split")
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
        """Return the losses of the steps done in this epoch; this reads them from the device, and looks at the weights.

        Raises:
            FloatingPointError: one is not finite, or a weight is not.
        """
        weights = [each for each in self._network.state_dict().values() if each.numel() and each.is_floating_point()]
        sound = torch.stack(torch._foreach_norm(weights, math.inf)).isfinite().all()  # NaN where one is
        *losses, finite = torch.cat([self.losses[: self.step], sound[None]]).tolist()
        for step, loss in enumerate(losses):
            if not math.isfinite(loss):
                number = self.epoch * len(self.losses) + step + 1
                cases = printable(", ".join(sorted(set(self._cases.get(step, ("unknown",))))))
                raise FloatingPointError(
                    f"loss {loss} at step {number} (epoch {self.epoch + 1}), cases {cases}; the last checkpoint in "
                    f"{self._folder} is from before this step; check these cases, lower the learning rate, or use fp32"
                )
        if not finite:
            raise FloatingPointError(
                f"non-finite weights after step {self.steps_done} (epoch {self.epoch + 1}), but finite losses: "
                f"a gradient was not; the last checkpoint in {self._folder} is from before; lower the learning "
                "rate, or use fp32"
            )
        return losses

    def seconds_since_save(self) -> float:
        """Return the seconds since the last checkpoint of this process."""
        return time.monotonic() - self._saved

    def save(self) -> None:
        """Write a checkpoint, after a look at the losses; only the leader does, and the others need not be told."""
        if self._run.leader:
            self._run.ranks.at_step(0)  # it may take long
            state = _Saved(
                **{name: getattr(self, name) for name in _KEPT},
                per_epoch=len(self.losses),
                losses=self.checked(),
                optimizer=self.optimizer.state_dict(),
                scaler=self._scaler.state_dict(),
                random=torch.get_rng_state(),
                seconds=self._run.clock.seconds(),
                random_on_device=torch.cuda.get_rng_state(self._run.device) if self._on_cuda else None,
            )
            self.best_weights.wait()
            save_checkpoint(self._folder, (self.epoch, self.step), self._network.state_dict(), vars(state))
        self._saved = time.monotonic()

    def restore(self) -> None:
        """Take over the newest checkpoint, where there is one; the leader reads it and hands it to the others.

        Raises:
            ValueError: the checkpoint belongs to another number of steps per epoch: other cases or another batch size;
                or it is of another network, or not one that this program wrote.
        """
        found = self._run.ranks.once(lambda: load_checkpoint(self._folder))
        if found is None:
            if self._on_cuda:
                self._spread(torch.cuda.get_rng_state(self._run.device))
            return
        try:
            self._take_over(*found)
        except (*UNREADABLE, OverflowError) as error:
            raise ValueError(
                f"{self._folder / 'last'}: does not fit this run ({first_line(error)}); start a new run, or remove the "
                "link and the folder it points to, to resume from the checkpoint before it"
            ) from error

    def _take_over(self, weights: dict[str, torch.Tensor], content: Mapping[str, Any]) -> None:
        state, per_epoch = from_json(_Saved, content), len(self.losses)
        if state.per_epoch != per_epoch:
            raise ValueError(
                f"the checkpoint has {state.per_epoch} steps per epoch, this run has {per_epoch}; the training cases "
                "or the batch size have changed, so the run cannot resume exactly"
            )
        if state.epoch < 0 or not 0 <= state.step == len(state.losses) <= per_epoch:
            raise ValueError(f"epoch {state.epoch}, step {state.step} with {len(state.losses)} losses")
        self._network.load_state_dict(weights)
        self.optimizer.load_state_dict(state.optimizer)
        self._scaler.load_state_dict(state.scaler)
        torch.set_rng_state(state.random)
        if self._on_cuda and state.random_on_device is not None:
            self._spread(state.random_on_device)
        for name in _KEPT:
            setattr(self, name, getattr(state, name))
        self.losses[: self.step] = torch.tensor(state.losses, device=self.losses.device)
        for name, seconds in state.seconds.items():
            self._run.clock.add(name, seconds)

    @property
    def _on_cuda(self) -> bool:
        return self._run.device.type == "cuda"

    def _spread(self, leaders: torch.Tensor) -> None:
        """Go on drawing as the leader's CUDA generator, but each rank numbers of its own: for dropout."""
        torch.cuda.set_rng_state(random_of_rank(leaders, self._run.ranks.rank), self._run.device)


def random_of_rank(state: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the state of a rank's CUDA generator from the leader's: eight bytes of seed, then eight of offset."""
    seed, offset = state.view(torch.int64).tolist()
    return torch.tensor([seed + rank, offset]).view(torch.uint8)
