"""SIGTERM and SIGINT as a wish to stop: the step is finished and saved; a second signal stops at once."""

import signal
from types import FrameType, TracebackType
from typing import Self


class StopRequested(Exception):  # noqa: N818 - it is a wish, not an error
    """Raised by `GracefulStop.check` once a signal has come."""


class GracefulStop:
    """A context in which the first SIGTERM or SIGINT is noted, and the second acts as usual."""

    def __init__(self) -> None:
        self._number: int | None = None
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
        """Whether a signal has come."""
        return self._number is not None

    def exit_if_requested(self) -> None:
        """End the program, if a signal has come, with the status that says which: 143 for SIGTERM, 130 for SIGINT."""
        if self._number is not None:
            raise SystemExit(128 + self._number)

    def check(self) -> None:
        """Raise `StopRequested` if a signal has come; for long work that may be cut short."""
        if self.requested:
            raise StopRequested

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
