"""Whether the other ranks still live: a rank that is killed, stopped, cut off or hung ends all, within a minute.

A collective waits for a silent rank as long as its time limit says, and that limit must allow for honest long work.
So each rank tells the others every two seconds that it lives and where it stands, and judges what it hears from them.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal, Protocol

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, though not listed

# "step": within the training loop; "busy": whatever comes before and after it; "left": gone, and all is well; "ended":
# gone, because it judged that the ranks cannot go on.
Phase = Literal["busy", "loading", "step", "saving", "validating", "left", "ended"]

BEAT_SECONDS = 2.0
SILENT_SECONDS = 15.0  # without a beat; a beat needs no more than a thread that runs and a link
# Before and after the loop, libraries may hold Python's lock, and with it the thread that beats, for a while. Not more:
# torchrun gives the other ranks up to 30 seconds to end, and the whole has to be over in 60.
SILENT_BUSY_SECONDS = 20.0
HUNG_SECONDS = 40.0  # without a move within a step, and at least so many times the longest step before:
HUNG_STEPS = 4
# A watch that was itself not run for so long (a sleeping laptop, a paused machine) has missed beats by its own fault.
MISSED_SECONDS = 5.0


class Store(Protocol):
    """What the watch needs of a store that all ranks see; `torch.distributed.TCPStore` is one."""

    def set(self, key: str, value: str, /) -> None:
        """Keep a value."""
        ...

    def multi_get(self, keys: list[str], /) -> Sequence[bytes]:
        """Return the values of keys; waits for those that are not set yet."""
        ...


@dataclass(frozen=True)
class Place:
    """Where a rank stands.

    Args:
        phase: what it does.
        moves: how often it has called `at_step`; the same number on every rank that stands at the same place.
        step: the training step, counted from 1, for the message.
        host: the machine it runs on.
    """

    phase: Phase = "busy"
    moves: int = 0
    step: int = 0
    host: str = ""

    def text(self) -> str:
        """Return the place as one line."""
        return f"{self.phase} {self.moves} {self.step} {self.host}"

    @staticmethod
    def read(text: str) -> "Place":
        """Return the place that `text` wrote."""
        phase, moves, step, host = text.split(" ", 3)
        return Place(phase, int(moves), int(step), host)  # type: ignore[arg-type]


@dataclass
class _Heard:
    """What was last heard of another rank, and when, on this machine's monotonic clock."""

    beat: str
    place: Place
    at: float  # when the last new beat was seen
    moved: float  # when it was first seen at this place


class Watch:
    """Beats for one rank and judges the others, in two daemon threads.

    Ages are taken on this machine's monotonic clock, so that clocks of different machines need not agree.

    Args:
        store: where beats go; a connection of its own, since the main thread may be blocked within another.
        rank: this process.
        world: number of ranks.
        end: called with one line when the ranks cannot go on together; the default prints it and ends the process.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        end: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run_directory: Path | None = None
        self._store, self._rank, self._world, self._clock = store, rank, world, clock
        self._end = end or end_process
        self._place = Place(host=socket.gethostname())
        self._moved = self._replied = self._ticked = clock()
        self._longest: float | None = None  # seconds of the longest step so far; the first is not judged
        self._others: dict[int, _Heard] = {}
        self._beats = 0
        self._stopped, self._news = threading.Event(), threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._beat_on, self._judge_on)]

    def start(self) -> None:
        """Begin to beat and to judge; every rank must do so within the time a beat may be late."""
        self._replied = self._ticked = self._clock()
        for thread in self._threads:
            thread.start()

    def stop(self, left: bool = True) -> None:
        """End the threads; with `left` the others are told that this rank has left and need not wait for it."""
        self._stopped.set()
        self._news.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=BEAT_SECONDS)
        if left and not any(thread.is_alive() for thread in self._threads):
            self._place = replace(self._place, phase="left")
            with suppress(RuntimeError):  # the store may have gone with the rank that kept it
                self._tell()

    def at_step(self, step: int) -> None:
        """Note a move within the training loop; every rank must make the same calls."""
        now = self._clock()
        if self._place.phase == "step" and self._place.moves > 1:
            self._longest = max(self._longest or 0.0, now - self._moved)
        self._place, self._moved = replace(self._place, phase="step", moves=self._place.moves + 1, step=step), now

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Note what the block does; the phase before comes back at its end."""
        before = self._place.phase
        self._enter(name)
        try:
            yield
        finally:
            self._enter(before)

    def _enter(self, name: Phase) -> None:
        self._place, self._moved = replace(self._place, phase=name), self._clock()
        self._news.set()  # told at once, since the others judge by it

    def beat(self) -> None:
        """Tell the others where this rank stands, and hear where they do."""
        self._tell()
        others = [rank for rank in range(self._world) if rank != self._rank]
        beats = self._store.multi_get([_key(rank) for rank in others])
        now = self._clock()
        for rank, content in zip(others, beats, strict=True):
            beat = content.decode()
            place, heard = Place.read(beat.split(" ", 1)[1]), self._others.get(rank)
            if heard is None:
                self._others[rank] = _Heard(beat, place, now, now)
            elif beat != heard.beat:
                self._others[rank] = _Heard(beat, place, now, heard.moved if place == heard.place else now)
        self._replied = now

    def verdict(self) -> str | None:
        """Return why the ranks cannot go on together, or None."""
        now = self._clock()
        if now - self._ticked > MISSED_SECONDS:
            self._replied = now
            self._others = {rank: replace(heard, at=now, moved=now) for rank, heard in self._others.items()}
        self._ticked = now
        silent = now - self._replied
        if silent > (SILENT_SECONDS if self._place.phase != "busy" else SILENT_BUSY_SECONDS):
            return f"no word from the other ranks for {silent:.0f} s (the link, or the host of rank 0, is gone)"
        for rank, heard in sorted(self._others.items(), key=lambda item: item[1].place.moves):  # the last one first
            reason = self._judge(heard, now)
            if reason:
                return f"rank {rank} (host {heard.place.host}) {reason}"
        return None

    def _judge(self, heard: _Heard, now: float) -> str | None:
        """Return what is wrong with another rank, or None."""
        place, mine = heard.place, self._place
        if place.phase == "left":
            return None
        if place.phase == "ended":
            return "has ended the run; its own line says why"
        silent = self._replied - heard.at  # not `now`: what has not been read yet is no silence of theirs
        if silent > (SILENT_BUSY_SECONDS if place.phase == "busy" else SILENT_SECONDS):
            return f"has given no sign of life for {silent:.0f} s"
        if place.phase != "step" or mine.phase != "step" or place.moves > mine.moves or self._longest is None:
            return None
        stood, limit = min(now - heard.moved, now - self._moved), max(HUNG_SECONDS, HUNG_STEPS * self._longest)
        if stood > limit:
            return f"hangs: it has stood in step {place.step} for {stood:.0f} s, while this rank waits in {mine.step}"
        return None

    def hint(self) -> str:
        """Return how to go on from the last checkpoint."""
        if self.run_directory is None:
            return "there is no checkpoint of this run yet"
        last = self.run_directory / "checkpoints" / "last"
        if not last.is_symlink():
            return f"{last} is not on this host, or no checkpoint was written yet; resume with --resume"
        return f"the last checkpoint is {last} -> {last.readlink()}; resume with --resume {self.run_directory}"

    def _tell(self) -> None:
        self._beats += 1
        self._store.set(_key(self._rank), f"{self._beats} {self._place.text()}")

    def _beat_on(self) -> None:
        while not self._stopped.is_set():
            with suppress(RuntimeError):  # the store is gone; how long that may last, `verdict` says
                self.beat()
            self._news.wait(BEAT_SECONDS)
            self._news.clear()

    def _judge_on(self) -> None:
        while not self._stopped.wait(BEAT_SECONDS / 2):
            reason = self.verdict()
            if reason and not self._stopped.is_set():
                self._place = replace(self._place, phase="ended")
                self._news.set()
                self._stopped.wait(1.25 * BEAT_SECONDS)  # the link permitting, the others hear of it
                self._end(f"rank {self._rank} of {self._world}: {reason}; {self.hint()}")
                return


def store_of(world: int, timeout: timedelta) -> Store:
    """Return a connection of the watch's own to the store that brought the ranks together."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return PrefixStore(
        "medspeed-watch", TCPStore(address, port, world, is_master=False, timeout=timeout, wait_for_workers=False)
    )


def end_process(line: str) -> None:
    """Print a line and end the process at once: its main thread may be blocked for good."""
    os.write(2, f"\n{line}\n".encode())
    os._exit(1)


def _key(rank: int) -> str:
    return f"beat-{rank}"
