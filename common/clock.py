"""Time: the stages of a run or a case, the parts of a step, profiles of a few steps."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil
import torch
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from medspeed.common.files import atomic_path, write_text

T = TypeVar("T")
HostTime = Literal["waited", "saved", "logged"]
_HOST: dict[HostTime, str] = {"waited": "wait for batch", "saved": "save", "logged": "log"}  # and their spans
SKIPPED, RECORDED = 2, 6  # steps; the profiler itself warms up in the last of the first


class Stages:
    """Seconds that stages took, by name."""

    def __init__(self) -> None:
        self._stages: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, waits: bool = True) -> Iterator[None]:
        """Time a block as a stage, also one that fails; `waits` for what it left running on a CUDA device."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            if waits:
                synchronise()
            self.add(name, time.perf_counter() - begin)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to a stage."""
        self._stages[name] = self._stages.get(name, 0.0) + seconds

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage so far."""
        return {name: round(value, 4) for name, value in self._stages.items()}


class Clock(Stages):
    """The stages since the process began (`whole`), or since now; the system's clock does not move them."""

    def __init__(self, whole: bool = True) -> None:
        before = time.time() - psutil.Process().create_time() if whole else 0.0
        self._began = time.perf_counter() - before
        self._stages = {"start": before}

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage and, under `total`, all since it began."""
        total = self._stages.get("total", 0.0) + time.perf_counter() - self._began  # an earlier process's is added
        return super().seconds() | {"total": round(total, 4)}


class StepTimer:
    """Where the time of an epoch's steps goes; on CUDA, events in the stream tell it later: nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._cuda, self._typical = device.type == "cuda", list[float]()
        self._marks: list[tuple[Any, Any]] = []  # of each step, before and behind it
        self._host = Stages()

    @contextmanager
    def host(self, name: HostTime) -> Iterator[None]:
        """Time a block by the host's clock: a batch is "waited" for, a checkpoint "saved", progress "logged"."""
        with record_function(_HOST[name]), self._host.stage(name, waits=False):
            yield

    def waited(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield batches, and time the wait for each."""
        while True:
            with self.host("waited"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Time a block, by the device's clock, in which a step is computed."""
        begin = self._mark()
        yield
        self._marks.append((begin, self._mark()))

    def _mark(self) -> Any:  # noqa: ANN401 - seconds, or an event
        if not self._cuda:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def read(self) -> dict[str, float]:
        """Return the seconds since the last call, by name, with "computed"; the device must have finished the steps."""
        computed = sum(begin.elapsed_time(end) / 1000 if self._cuda else end - begin for begin, end in self._marks)
        read = dict.fromkeys(_HOST, 0.0) | self._host.seconds() | {"computed": round(computed, 4)}
        if self._marks:
            self._typical.append(computed / len(self._marks))
        self._marks, self._host = [], Stages()
        return read

    def typical(self) -> float | None:
        """Return the seconds that a step computes, the median of epochs but the first of several; None before one."""
        return statistics.median(self._typical[1:] or self._typical) if self._typical else None


def repeated(run: Callable[[], object], rounds: int) -> list[float]:
    """Return the seconds of each round of `run`; one more, which sets up, comes first and does not count."""
    return [seconds_of(run) for _ in range(rounds + 1)][1:]


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds of some work, that of a CUDA device included."""
    synchronise()
    began = time.perf_counter()
    work()
    synchronise()
    return time.perf_counter() - began


def synchronise() -> None:
    """Wait for the CUDA device, where there is one: a clock read before that would be too early."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def check_nvtx() -> None:
    """Raise a ValueError if torch cannot mark ranges for Nsight Systems here."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        built = f"torch {torch.__version__} is built without NVTX"
        found = built if torch.version.cuda is None else "torch finds no NVIDIA GPU"
        raise ValueError(f"profile nvtx: {found}; use --profile torch, or a torch built for CUDA and a GPU")


@contextmanager
def profiled_steps(folder: Path, device: torch.device) -> Iterator[Callable[[], None]]:
    """Record six steps of a training, after two, with torch.profiler; yield what is to be called after each step.

    At the end, also by an exception, the folder holds `trace.json` (for Perfetto or chrome://tracing) and
    `operations.txt`: how long the steps and their spans took on the host, which on CUDA launches what the device
    computes later, and the operations with the most self time.
    """
    on_cuda = device.type == "cuda"
    (folder / "trace.json").unlink(missing_ok=True)  # of an earlier time
    none = f"No step was recorded: the first {SKIPPED} are skipped, and the training ended before another was done.\n"
    write_text(folder / "operations.txt", none)
    recording = profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])],
        schedule=schedule(wait=SKIPPED - 1, warmup=1, active=RECORDED, repeat=1),
        on_trace_ready=partial(_write, folder, on_cuda),
    )

    def step() -> None:
        if recording.step_num + 1 == SKIPPED:
            synchronise()  # what earlier steps left running is not part of the recorded ones
        if recording.step_num < SKIPPED + RECORDED:
            recording.step()

    with recording:
        yield step


def _write(folder: Path, on_cuda: bool, recording: profile) -> None:
    if recording.step_num <= SKIPPED:
        return
    with atomic_path(folder / "trace.json") as part:
        recording.export_chrome_trace(str(part))
    averages: Any = recording.key_averages()
    # Spans are no operations: on a device they would even come first, with the time of all that runs in them.
    spans = [each for each in averages if each.is_user_annotation and each.device_type.name == "CPU"]
    operations: Any = EventList(  # type: ignore[no-untyped-call]
        [each for each in averages if not each.is_user_annotation], use_device="cuda" if on_cuda else None
    )
    lines = [
        f"Time on the host by activity, in the steps after the first {SKIPPED}:",
        *(f"  {each.key:<16}{each.cpu_time_total / 1e3:10.2f} ms in {each.count}" for each in spans),
        f"The operations with the most self time on the {'device' if on_cuda else 'CPU'}:",
        operations.table(sort_by=f"self_{'device' if on_cuda else 'cpu'}_time_total", row_limit=25),
    ]
    write_text(folder / "operations.txt", "\n".join(lines))
