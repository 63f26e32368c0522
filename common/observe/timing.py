"""The clock of a run: each stage is timed apart, and the stages with the rest add up to the total."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch


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


def synchronise() -> None:
    """Wait for the CUDA device, where there is one: a clock read before that would be too early."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
