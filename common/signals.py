"""What the signals of a scheduler or a terminal do while a run is at work; afterwards they do what they did before."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # a scheduler's, and a terminal's that is closed


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let `STOP_SIGNALS` end a block as an error does, with what it has to put away; then give them back."""
    before = take_signals(STOP_SIGNALS, _exit)
    try:
        yield
    finally:
        give_back_signals(before)


def take_signals(numbers: Sequence[int], handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Handle signals that are not ignored, as SIGHUP is under nohup; return what did so until now.

    Python allows that in the main thread alone; in another one, such as a server's, none is taken.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    taken = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in taken}


def give_back_signals(before: Mapping[int, Any]) -> None:
    """Let signals be handled as they were before `take_signals`."""
    for number, handler in before.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
