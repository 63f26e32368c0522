"""SIGTERM and SIGINT as a wish to stop: the step is finished and saved; a second signal stops at once."""

import signal
from types import FrameType, TracebackType
from typing import Self

import torch
import torch.distributed as dist

from common.ranks import SINGLE, Ranks


class StopRequested(Exception):  # noqa: N818 - it is a wish, not an error
    """Raised by `GracefulStop.check` once a signal has come."""


class GracefulStop:
    """A context in which the first SIGTERM or SIGINT is noted, and the second acts as usual.

    With several ranks the signal reaches each at another step, or only one of them. They then agree: what one was told
    counts for all at the step after, and further signals change nothing, so that the leader can save in peace
    (torchrun kills what has not ended 30 seconds later).

    Args:
        ranks: the processes that must stop at the same step.
    """

    def __init__(self, ranks: Ranks = SINGLE) -> None:
        self._ranks = ranks
        self._number = 0  # the signal that came to this process
        self._agreed = 0  # the signal that counts for all
        self._asked: tuple[torch.Tensor, dist.Work] | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        """Take over the two signals."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the signals back."""
        self._restore()

    @property
    def requested(self) -> bool:
        """Whether a signal has come; with several ranks, whether all know of it."""
        return bool(self._number if self._ranks.world == 1 else self._agreed)

    def after_step(self) -> None:
        """Take over what the ranks knew a step ago, and tell them what this one knows now; called at every step.

        The answer travels while the next step runs, on the CPU, so neither host nor device waits for it.
        """
        if self._ranks.world == 1:
            return
        self._hear()
        known = torch.tensor(self._number, dtype=torch.int32)
        work = dist.all_reduce(known, dist.ReduceOp.MAX, group=self._ranks.control, async_op=True)
        assert work is not None
        self._asked = known, work

    def agree(self) -> None:
        """Take over what the ranks know now; waits for them."""
        self.after_step()
        self._hear()

    def exit_if_requested(self) -> None:
        """End the program, if a signal has come, with the status that says which: 143 for SIGTERM, 130 for SIGINT.

        With several ranks they leave together: the first to go might have the others killed while they save.
        """
        if self.requested:
            self._ranks.barrier()
            raise SystemExit(128 + (self._agreed or self._number))

    def check(self) -> None:
        """Raise `StopRequested` if a signal has come; for long work that may be cut short by a rank that is alone."""
        if self.requested and self._ranks.world == 1:
            raise StopRequested

    def _hear(self) -> None:
        if self._asked is not None:
            known, work = self._asked
            work.wait()
            self._agreed, self._asked = max(self._agreed, int(known)), None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._number = self._number or number
        if self._ranks.world == 1:
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
