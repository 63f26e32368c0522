"""How a training stops when it is told to: after the step, all ranks at the same one."""

import signal
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Self

import torch
import torch.distributed as dist

from medspeed.common.ranks import Ranks
from medspeed.common.run import STOP_SIGNALS, take_signals


class GracefulStop:
    """A context in which the first signal is a wish to stop after the step, and the second acts as usual.

    The signals are `STOP_SIGNALS` and SIGINT; outside of the main thread there are none.

    With several ranks the signal reaches each at another step, or only one of them. They then agree: what one was told
    counts for all at the step after, and further signals change nothing, so that the leader can save in peace
    (torchrun kills what has not ended 30 seconds later).

    Args:
        ranks: the processes that must stop at the same step.
        save: what is done before a validation is broken off.
    """

    def __init__(self, ranks: Ranks, save: Callable[[], None]) -> None:
        self._ranks, self._save = ranks, save
        self._number, self._agreed = 0, 0  # the signal that came to this process, and the one that counts for all
        self._asked: tuple[torch.Tensor, dist.Work | None] | None = None
        self._taken = ExitStack()

    def __enter__(self) -> Self:
        """Take over the signals that are not ignored, as SIGHUP is under nohup."""
        self._taken = take_signals((*STOP_SIGNALS, signal.SIGINT), self._note)
        return self

    def __exit__(self, *_: object) -> None:
        """Give the signals back."""
        self._taken.close()

    @property
    def requested(self) -> bool:
        """Whether a signal has come; with several ranks, whether all know of it."""
        return bool(self._number if self._ranks.world == 1 else self._agreed)

    def after_step(self) -> None:
        """Take over what the ranks knew a step ago, and tell them what this one knows now; called at every step.

        The answer travels while the next step runs, on the CPU, so neither host nor device waits for it.
        """
        if self._ranks.world > 1:
            self._hear()
            known = torch.tensor(self._number, dtype=torch.int32)
            self._asked = known, dist.all_reduce(known, dist.ReduceOp.MAX, group=self._ranks.control, async_op=True)

    def agree(self) -> None:
        """Take over what the ranks know now; waits for them."""
        self.after_step()
        self._hear()

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

    def _hear(self) -> None:
        if self._asked is not None:
            known, work = self._asked
            assert work is not None
            work.wait()
            self._agreed, self._asked = max(self._agreed, int(known)), None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._number = self._number or number
        if self._ranks.world == 1:
            self.__exit__()
