"""The clock of a run: each stage is timed apart, and the stages with the rest add up to the total."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, Protocol

import psutil
import torch

from common.observe.spans import span

HostTime = Literal["waited", "saved", "logged"]
_HOST: dict[HostTime, str] = {"waited": "wait for batch", "saved": "save", "logged": "log"}  # and their spans


class Clock:
    """Seconds per stage since the process started.

    Source: the rules of the project's README, "What the clock covers".
    """

    def __init__(self) -> None:
        """Start counting; what the process did until now is the stage `start`."""
        self._stages: dict[str, float] = {}
        self._earlier = 0.0
        self._started = psutil.Process().create_time()
        self.add("start", time.time() - self._started)

    def carry_on(self, earlier: dict[str, float]) -> None:
        """Add what an earlier process spent on the same run."""
        for name, seconds in earlier.items():
            if name == "total":
                self._earlier += seconds
            else:
                self.add(name, seconds)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a block as one stage; what it left running on a CUDA device is waited for."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            synchronise()
            self.add(name, time.perf_counter() - begin)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to a stage."""
        self._stages[name] = self._stages.get(name, 0.0) + seconds

    def stages(self) -> dict[str, float]:
        """Return the seconds of each stage but `start`."""
        return {name: round(value, 4) for name, value in self._stages.items() if name != "start"}

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage and, under `total`, all since the process started."""
        total = self._earlier + time.time() - self._started
        return {**{name: round(value, 3) for name, value in self._stages.items()}, "total": round(total, 3)}


class Stages(Protocol):
    """What times the stages of some work: a `Clock`, or a case of a `Timeline`."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Time a block as one stage."""
        ...


class _Untimed:
    def stage(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()


UNTIMED = _Untimed()
"""Times nothing."""


class StepTimer:
    """Where the time of an epoch's steps goes; nothing is waited for to know it.

    Args:
        device: what computes; on a CUDA device events are left in its stream and read later.
    """

    def __init__(self, device: torch.device) -> None:
        """Start at nothing."""
        self._cuda = device.type == "cuda"
        self._host: dict[HostTime, float] = dict.fromkeys(_HOST, 0.0)
        self._computed, self._steps = 0.0, 0
        self._typical: list[float] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def host(self, name: HostTime) -> Iterator[None]:
        """Time a block by the host's clock: a batch is "waited" for, a checkpoint "saved", progress "logged"."""
        began = time.perf_counter()
        with span(_HOST[name]):
            yield
        self._host[name] += time.perf_counter() - began

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Time a block, by the device's clock, in which a step is computed."""
        self._steps += 1
        if self._cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            yield
            end.record()
            self._events.append((begin, end))
            return
        began = time.perf_counter()
        yield
        self._computed += time.perf_counter() - began

    def read(self) -> dict[str, float]:
        """Return the seconds since the last call, by name, with "computed"; the device must have finished the steps."""
        computed = self._computed + sum(begin.elapsed_time(end) for begin, end in self._events) / 1000
        read = {str(name): round(value, 4) for name, value in self._host.items()} | {"computed": round(computed, 4)}
        if self._steps:
            self._typical.append(computed / self._steps)
        self._host = dict.fromkeys(_HOST, 0.0)
        self._computed, self._steps = 0.0, 0
        self._events.clear()
        return read

    def typical(self) -> float | None:
        """Return the seconds that a step computes, the median of the epochs; None before the first is read."""
        return statistics.median(self._typical[1:] or self._typical) if self._typical else None


def repeated(run: Callable[[], object], rounds: int) -> list[float]:
    """Return the seconds of each round of `run`; one more, which sets up, comes first and does not count."""
    seconds = []
    for _ in range(rounds + 1):
        synchronise()
        began = time.perf_counter()
        run()
        synchronise()
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def synchronise() -> None:
    """Wait for the CUDA device, where there is one: a clock read before that would be too early."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
