"""Where a training run stands, and how that is saved and found again."""

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.observe.timing import Clock
from common.training.checkpoints import load_checkpoint, save_checkpoint
from common.training.distributed import SINGLE, Ranks

VALIDATIONS_HELD = 3
"""Validations in a row that must reach a target: one may be luck."""


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
        directory: Path,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        per_epoch: int,
        device: torch.device,
        ranks: Ranks = SINGLE,
    ) -> None:
        """Start at the first step of the first epoch."""
        self._ranks = ranks
        self.epoch, self.step = 0, 0
        self.best, self.best_epoch, self.last = -math.inf, 0, math.nan
        self.recent: list[float] = []
        self._folder = directory / "checkpoints"
        self._network, self._optimizer, self._scaler = network, optimizer, scaler
        self._losses = torch.zeros(per_epoch, device=device)
        self._cases: dict[int, tuple[str, ...]] = {}
        self._saved = time.monotonic()

    @property
    def steps_done(self) -> int:
        """Steps done in all epochs."""
        return self.epoch * len(self._losses) + self.step

    def note_step(self, step: int, loss: torch.Tensor, cases: tuple[str, ...]) -> None:
        """Keep the loss of a step on the device, and the names of its cases."""
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

    def save(self, clock: Clock) -> None:
        """Write a checkpoint, after a look at the losses; only the leader does, and the others need not be told."""
        self._saved = time.monotonic()
        if not self._ranks.leader:
            return
        with self._ranks.phase("saving"):
            self._write(clock)
        self._saved = time.monotonic()

    def _write(self, clock: Clock) -> None:
        state = {
            "epoch": self.epoch,
            "step": self.step,
            "per_epoch": len(self._losses),
            "losses": self.checked(),
            "best": self.best,
            "best_epoch": self.best_epoch,
            "last": self.last,
            "recent": self.recent,
            "optimizer": self._optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
            "random": torch.get_rng_state(),
            "seconds": clock.seconds(),
        }
        save_checkpoint(self._folder, (self.epoch, self.step), self._network.state_dict(), state)

    def save_if_shared(self, clock: Clock) -> None:
        """Write a checkpoint where several ranks train: nothing stops their validation, and torchrun may not wait."""
        if self._ranks.world > 1:
            self.save(clock)

    def restore(self, clock: Clock) -> None:
        """Take over the newest checkpoint, where there is one; the leader reads it and hands it to the others.

        Raises:
            ValueError: the checkpoint belongs to another number of steps per epoch: other cases or another batch size.
        """
        found = self._ranks.once(lambda: load_checkpoint(self._folder))
        if found is None:
            return
        state: dict[str, Any] = found.state
        if state["per_epoch"] != len(self._losses):
            raise ValueError(
                f"{self._folder}: the checkpoint has {state['per_epoch']} steps per epoch, this run has "
                f"{len(self._losses)}; the training cases or the batch size have changed, so it cannot go on exactly"
            )
        self._network.load_state_dict(found.weights)
        self._optimizer.load_state_dict(state["optimizer"])
        self._scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["random"])
        self.epoch, self.step = state["epoch"], state["step"]
        self.best, self.best_epoch, self.last = state["best"], state["best_epoch"], state["last"]
        self.recent = state.get("recent", [])  # a run of an earlier version kept none
        self._losses[: self.step] = torch.tensor(state["losses"], device=self._losses.device)
        clock.carry_on(state["seconds"])
