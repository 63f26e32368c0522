"""Where a training run stands, its best weights, and its checkpoints."""

import io
import math
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from medspeed.common.files import flush_to_disk, names_folder, point_link, printable
from medspeed.common.inference.model import UNREADABLE, first_line, load_weights, save_weights
from medspeed.common.run import Run
from medspeed.common.training.config import VALIDATIONS_HELD
from medspeed.common.training.optimizers import Novograd

_KEPT = ("epoch", "step", "best", "best_epoch", "last", "recent")  # attributes that a checkpoint holds as they are
_STATE = "state of the training"  # beside the weights in a checkpoint: what torch.save makes of it, uint8


class TrainingState:
    """Epoch, step, losses and best validation of a run, with the network and the optimizer they belong to."""

    def __init__(self, run: Run, network: nn.Module, optimizer: Optimizer, scaler: GradScaler, per_epoch: int) -> None:
        self.epoch, self.step = 0, 0  # done; of the present epoch all steps when only its validation is missing
        self.best, self.best_epoch, self.last = -math.inf, 0, math.nan  # metrics of the validations
        self.recent: list[float] = []  # of the last `VALIDATIONS_HELD` at most
        self._run, self._folder = run, run.directory / "checkpoints"
        self._on_cuda = run.device.type == "cuda"
        self._network, self.optimizer, self._scaler = network, optimizer, scaler
        self.losses = torch.zeros(per_epoch, device=run.device)  # of the present epoch; `Steps` writes them
        self._cases: dict[int, tuple[str, ...]] = {}
        self.saved = time.monotonic()  # when this process was here, or last saved
        self._writing: Future[None] | None = None

    @property
    def steps_done(self) -> int:
        """Steps done in all epochs."""
        return self.epoch * len(self.losses) + self.step

    def tensors(self) -> list[Tensor]:
        """Return all that a step changes, but its loss: weights, buffers, the optimizer's state and the loss scale."""
        self._scaler.scale(self.losses.new_zeros(()))  # makes those of the scale, where it is used
        scaling = [each for each in vars(self._scaler).values() if isinstance(each, Tensor)]
        packed = self.optimizer.packed if isinstance(self.optimizer, Novograd) else []
        return [*self._network.parameters(), *self._network.buffers(), *packed, *scaling]

    def note_step(self, step: int, cases: tuple[str, ...]) -> None:
        """Count a step whose loss stands in its place, and keep the names of its cases."""
        self._cases[step], self.step = cases, step + 1

    def note_validation(self, value: float, epoch: int) -> bool:
        """Keep the metric of a validation, which is no NaN; return whether it is the best so far."""
        self.last, self.recent = value, [*self.recent, value][-VALIDATIONS_HELD:]
        if value < self.best:  # of equal ones the last has learned most
            return False
        self.best, self.best_epoch = value, epoch
        return True

    def holds(self, target: float | None) -> bool:
        """Return whether the last validations have all reached a target; without one, none has."""
        return target is not None and len(self.recent) == VALIDATIONS_HELD and min(self.recent) >= target

    def checked(self) -> list[float]:
        """Read the losses of this epoch's steps; a FloatingPointError says if one or a weight is not finite."""
        weights = [each for each in self._network.state_dict().values() if each.numel() and each.is_floating_point()]
        sound = torch.stack(torch._foreach_norm(weights, math.inf)).isfinite().all()  # NaN where one is
        *losses, finite = torch.cat([self.losses[: self.step], sound[None]]).tolist()
        step = next((step for step, loss in enumerate(losses) if not math.isfinite(loss)), None)
        before = f"the last checkpoint in {self._folder}, if there is one, is from before"
        if step is not None:
            number = self.epoch * len(self.losses) + step + 1
            cases = printable(", ".join(sorted(set(self._cases.get(step, ("unknown",))))))
            cases += " or another rank's" if self._run.ranks.world > 1 else ""
            said = f"loss {losses[step]} at step {number} (epoch {self.epoch + 1}), cases {cases}; {before} this step; "
            raise FloatingPointError(f"{said}check these cases, or start anew with a lower rate or fp32")
        if not finite:
            said = f"non-finite weights after step {self.steps_done} (epoch {self.epoch + 1}), but finite losses: "
            raise FloatingPointError(f"{said}a gradient was not finite; {before}; start anew with a lower rate or fp32")
        return losses

    def keep_best(self, note: dict[str, str]) -> None:
        """Copy the weights, and write them in a thread; a checkpoint that knows of the validation waits for them."""
        self.close()
        path = self._run.directory / "best.safetensors"
        copies = {name: value.detach().to("cpu", copy=True) for name, value in self._network.state_dict().items()}
        pool = ThreadPoolExecutor(1, "best weights")
        self._writing = pool.submit(save_weights, path, copies, note)
        pool.shutdown(wait=False)  # the thread ends with the file

    def close(self) -> None:
        """Wait until the best weights are in their file; raise the OSError of a full disk."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def save(self, together: bool = False) -> None:
        """Write a checkpoint, after a look at the losses; only the leader does, and the others need not be told.

        Where all ranks do this `together`, the running statistics become their mean, as for a validation.
        """
        if together:
            self._run.ranks.average_buffers(self._network)
        if self._run.ranks.leader:
            self._run.ranks.at_step(0)  # it may take long
            content = self._content()
            self.close()
            save_checkpoint(self._folder, (self.epoch, self.step), self._network.state_dict(), content)
        self.saved = time.monotonic()

    def _content(self) -> dict[str, Any]:
        """Return what a checkpoint holds besides the weights."""
        optimizer = self.optimizer.state_dict()
        for group in optimizer["param_groups"]:
            group["lr"] = float(group["lr"])  # a view of all steps' rates would be saved with them
        return {name: getattr(self, name) for name in _KEPT} | {
            "losses": self.checked(),
            "per_epoch": len(self.losses),
            "optimizer": optimizer,
            "scaler": self._scaler.state_dict(),
            "random": torch.get_rng_state(),
            "seconds": self._run.clock.seconds(),
            "random_on_device": torch.cuda.get_rng_state(self._run.device) if self._on_cuda else None,
        }

    def restore(self) -> None:
        """Take over the newest checkpoint, where there is one; the leader reads it and hands it to the others.

        A ValueError says that it has other steps per epoch, is of another network or another program, or that the best
        weights are damaged; a FileNotFoundError that these are gone.
        """
        found = self._run.ranks.once(lambda: load_checkpoint(self._folder))
        try:
            if found is not None:
                self._take_over(*found)
        except (*UNREADABLE, OverflowError) as error:
            remedy = "remove the link and the file it points to, to resume from the checkpoint before it"
            said = f"does not fit this run ({first_line(error)}); start a new run, or {remedy}"
            raise ValueError(f"{self._folder / 'last'}: {said}") from error
        if self.best > -math.inf:  # damage is told now, not behind the last epoch
            self._run.ranks.once(lambda: bool(load_weights(self._run.directory / "best.safetensors")))
        if self._run.resumed:
            where = f"goes on after step {self.steps_done}" if found else "starts anew: it has no checkpoint"
            self._run.say(f"the run {where}", "note" if found else "warning")
        if self._on_cuda:  # each rank draws numbers of its own, for dropout
            seed, offset = torch.cuda.get_rng_state(self._run.device).view(torch.int64).tolist()  # eight bytes each
            own = torch.tensor([seed + self._run.ranks.rank, offset])
            torch.cuda.set_rng_state(own.view(torch.uint8), self._run.device)

    def _take_over(self, weights: dict[str, Tensor], content: Mapping[str, Any]) -> None:
        if differing := sorted(content.keys() ^ self._content().keys()):
            raise ValueError(f"it has other fields than this version: {', '.join(differing)}")
        epoch, step, losses, per_epoch = (content[name] for name in ("epoch", "step", "losses", "per_epoch"))
        if per_epoch != len(self.losses):
            said = f"the checkpoint has {per_epoch} steps per epoch, this run has {len(self.losses)}; "
            raise ValueError(f"{said}the training cases, the batch size or the version have changed: it cannot resume")
        if epoch < 0 or not 0 <= step == len(losses) <= per_epoch:
            raise ValueError(f"epoch {epoch}, step {step} with {len(losses)} losses")
        self._network.load_state_dict(weights)
        self.optimizer.load_state_dict(content["optimizer"])
        self._scaler.load_state_dict(content["scaler"])
        torch.set_rng_state(content["random"])
        if self._on_cuda and content["random_on_device"] is not None:
            torch.cuda.set_rng_state(content["random_on_device"], self._run.device)
        for name in _KEPT:
            setattr(self, name, content[name])
        self.losses[:step] = torch.tensor(losses, device=self.losses.device)
        for name, seconds in content["seconds"].items():
            self._run.clock.add(name, seconds)


def save_checkpoint(folder: Path, position: tuple[int, int], weights: dict[str, Tensor], state: dict[str, Any]) -> Path:
    """Write `folder/epoch-E-step-N.safetensors`, point `folder/last` at it, then remove all but the one before.

    The file appears by one rename after all bytes have reached the disk, so a process killed at any moment leaves the
    earlier checkpoint or the new one, each whole. The position is the epoch, and the steps done in it; the state has
    tensors and plain containers only. The OSError of a full or read-only disk names the folder.
    """
    final = folder / "epoch-{:06d}-step-{:06d}.safetensors".format(*position)
    stream = io.BytesIO()
    torch.save(state, stream)
    with names_folder(folder):
        if not final.exists():  # a resumed run stands where its checkpoint already is
            save_weights(final, weights | {_STATE: torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)}, {})
        point_link(folder / "last", final.name)
        flush_to_disk(folder)
    kept = [final, *[each for each in _complete(folder) if each < final][-1:]]  # the one before, until this is proven
    for other in set(_complete(folder)) - set(kept):
        other.unlink()
    return final


def load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Return weights and state of the newest whole checkpoint below `folder`, or None; remove what is half-written.

    A ValueError names one whose bytes have changed, or that asks to run code.
    """
    for left in folder.glob(".part-*"):
        left.unlink()
    if (folder / "last").is_dir():
        raise ValueError(f"{folder}: a checkpoint of an earlier version; resume with that version, or start a new run")
    complete = _complete(folder)
    if not complete:
        return None
    try:
        weights = load_weights(complete[-1])
        state = io.BytesIO(weights.pop(_STATE).numpy().tobytes())
        return weights, torch.load(state, map_location="cpu", weights_only=True)
    except (*UNREADABLE, OSError) as error:
        remedy = f"resume from {complete[-2].name}" if len(complete) > 1 else "start over"
        said = f"cannot be loaded safely ({first_line(error)}); remove it to {remedy}"
        raise ValueError(f"{complete[-1]}: {said}") from error


def _complete(folder: Path) -> list[Path]:
    return sorted(folder.glob("epoch-??????-step-??????.safetensors"))
