"""A profile of a few training steps: what each stage takes of the wall clock, and which operations take the most."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity, profile, schedule

from common.files import atomic_path, write_json, write_text
from common.observe.spans import span, spans_to
from common.observe.timing import synchronise

# The spans of a training step, in its order.
STAGES = ("wait for batch", "forward", "loss", "backward", "optimizer")
# What the device still had to compute when the host was done with the recorded steps; on CUDA only.
WAIT_FOR_DEVICE = "wait for device"
REST = "none of these"
_ROWS = 25
# How torch.profiler names the ranges of all steps.
_STEP_RANGES = "ProfilerStep*"

Range = tuple[float, float]


@dataclass(frozen=True)
class StepShares:
    """Where the time of the recorded steps went; the content of `shares.json`.

    Args:
        steps: number of whole steps recorded.
        seconds: their wall clock.
        shares: by span, in [0, 1]: `STAGES`, on CUDA `WAIT_FOR_DEVICE`, and `REST`. A span within another counts in
            both. On CUDA these are times of the host, which launches what the device computes later.
    """

    steps: int
    seconds: float
    shares: dict[str, float]


class StepProfiler:
    """Records a few steps of a training with torch.profiler; to be used as a context around the training loop.

    Meanwhile spans are ranges of the profiler. When it closes, also by an exception, the folder holds `trace.json`
    (for Perfetto or chrome://tracing), `shares.json` (`StepShares`) and `operations.txt` (the same in words, and the
    operations with the most self time). Only what runs in this thread, and on the device, is recorded.

    Args:
        folder: to write into.
        device: of the training.
        skip: steps before the first recorded one; the profiler itself warms up in the last of them.
        steps: to record.

    Raises:
        ValueError: there is no step to warm up in or none to record.
        OSError: the folder cannot be written or the disk is full.
    """

    def __init__(self, folder: Path, device: torch.device, skip: int = 2, steps: int = 6) -> None:
        if skip < 1:
            raise ValueError(f"skip {skip}: must be at least 1, the step in which the profiler warms up")
        if steps < 1:
            raise ValueError(f"steps {steps}: must be at least 1")
        self.shares: StepShares | None = None  # after the end, where a step was recorded
        self._folder, self._skip, self._steps = folder, skip, steps
        self._on_cuda = device.type == "cuda"
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_cuda else [])],
            schedule=schedule(wait=skip - 1, warmup=1, active=steps, repeat=1),
        )
        self._done = 0
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(spans_to("profiler"))
            stack.enter_context(self._profile)
            self._open = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._open.close()
        recorded = min(self._done - self._skip, self._steps)
        if recorded < 1:
            self._write_why_nothing(error)
            return
        self.shares = self._measure(recorded)
        with atomic_path(self._folder / "trace.json") as part:
            self._profile.export_chrome_trace(str(part))
        write_json(self._folder / "shares.json", asdict(self.shares))
        write_text(self._folder / "operations.txt", self._in_words(self.shares) + "\n" + self._table())

    def step(self) -> None:
        """Note that a training step is done; after the last recorded one this does nothing."""
        if self._done == self._skip + self._steps:
            return
        self._done += 1
        if self._done == self._skip:
            synchronise()  # what earlier steps left running is not part of the recorded ones
        elif self._done == self._skip + self._steps and self._on_cuda:
            with span(WAIT_FOR_DEVICE):
                synchronise()
        self._profile.step()

    def _measure(self, recorded: int) -> StepShares:
        """Return the shares over the whole steps; one that an exception cut short is in the trace alone."""
        ranges: dict[str, list[Range]] = {}
        for event in self._profile.events():  # type: ignore[no-untyped-call]
            # A range also shows on the device, there from its first kernel to its last.
            if event.is_user_annotation and event.device_type.name == "CPU":
                ranges.setdefault(event.name, []).append((event.time_range.start, event.time_range.end))
        whole = sorted(ranges[_STEP_RANGES])[:recorded]
        window = whole[0][0], whole[-1][1]
        names = (*STAGES, WAIT_FOR_DEVICE) if self._on_cuda else STAGES
        seconds = (window[1] - window[0]) / 1e6
        return StepShares(recorded, seconds, shares({name: ranges.get(name, []) for name in names}, window))

    def _in_words(self, found: StepShares) -> str:
        lines = [
            f"{found.steps} steps after the first {self._skip}: {found.seconds:.4g} s of wall clock, "
            f"{1000 * found.seconds / found.steps:.4g} ms a step. Of this lay in the span",
            *(f"  {name:<16}{100 * share:6.1f} %" for name, share in found.shares.items()),
            "A span within another counts in both.",
        ]
        if self._on_cuda:
            lines.append(
                "These are times of the host, which launches what the device computes later; "
                f"{WAIT_FOR_DEVICE}: what was left to compute after the last step."
            )
        return "\n".join(lines) + "\n"

    def _table(self) -> str:
        # Spans are no operations; on a device they would even come first, with the time of all that runs in them.
        averages: Any = self._profile.key_averages()
        operations: Any = EventList(  # type: ignore[no-untyped-call]
            [average for average in averages if not average.is_user_annotation],
            use_device="cuda" if self._on_cuda else None,
        )
        key = "self_device_time_total" if self._on_cuda else "self_cpu_time_total"
        table: str = operations.table(sort_by=key, row_limit=_ROWS)
        return f"The operations with the most self time on the {'device' if self._on_cuda else 'CPU'}:\n{table}"

    def _write_why_nothing(self, error: BaseException | None) -> None:
        for name in ("trace.json", "shares.json"):  # of an earlier time
            (self._folder / name).unlink(missing_ok=True)
        cause = "" if error is None else f" by {type(error).__name__}: {error}"
        why = f"No step was recorded: training ended after {self._done} steps, and the first {self._skip} are skipped"
        write_text(self._folder / "operations.txt", why + (f" (it ended{cause})" if cause else "") + ".\n")


def shares(ranges: Mapping[str, Sequence[Range]], window: Range) -> dict[str, float]:
    """Return how much of a window lies in the ranges of each name, and under `REST` how much in none of them.

    Ranges of one name that overlap count once; what is outside the window does not count.

    Args:
        ranges: start and end by name, in any order, in the unit of the window.
        window: start and end; not empty.

    Returns:
        By name, in [0, 1].
    """
    length = window[1] - window[0]
    assert length > 0, window
    found = {name: _covered(of_name, window) / length for name, of_name in ranges.items()}
    everything = [part for of_name in ranges.values() for part in of_name]
    return {**found, REST: 1 - _covered(everything, window) / length}


def _covered(ranges: Sequence[Range], window: Range) -> float:
    """Return the length of the union of ranges within a window."""
    total, reached = 0.0, window[0]
    for start, end in sorted(ranges):
        start, end = max(start, reached), min(end, window[1])
        if end > start:
            total, reached = total + end - start, end
    return total
