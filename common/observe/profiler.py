"""A profile of a few training steps: what each stage takes of the wall clock, and which operations take the most."""

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity, profile, schedule

from medspeed.common.clock import span, spans_to, synchronise
from medspeed.common.files import atomic_path, write_json, write_text

# The spans of a training step, in its order.
STAGES = ("wait for batch", "forward", "loss", "backward", "optimizer")
WAIT_FOR_DEVICE = "wait for device"  # what it still had to compute after the recorded steps; on CUDA only
REST = "other"
SKIPPED, RECORDED = 2, 6  # steps; the profiler itself warms up in the last of the first


class StepProfiler:
    """Records six steps of a training, after two, with torch.profiler; a context around the training loop.

    Meanwhile spans are ranges of the profiler. When it closes, also by an exception, the folder holds `trace.json`
    (for Perfetto or chrome://tracing), `shares.json` (steps, their seconds, and what share of them lay in each span)
    and `operations.txt` (the same in words, and the operations with the most self time). On CUDA shares are times of
    the host, which launches what the device computes later.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder, self._on_cuda = folder, device.type == "cuda"
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_cuda else [])],
            schedule=schedule(wait=SKIPPED - 1, warmup=1, active=RECORDED, repeat=1),
        )
        self._done, self._open = 0, ExitStack()

    def __enter__(self) -> Self:
        self._open.enter_context(spans_to("profiler"))
        self._open.enter_context(self._profile)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._open.close()
        recorded = min(self._done - SKIPPED, RECORDED)
        if recorded < 1:
            for name in ("trace.json", "shares.json"):  # of an earlier time
                (self._folder / name).unlink(missing_ok=True)
            why = f"No step was recorded: training ended after {self._done} steps, and the first {SKIPPED} are skipped"
            ended = "" if error is None else f" (it ended with {type(error).__name__}: {error})"
            write_text(self._folder / "operations.txt", f"{why}{ended}.\n")
            return
        seconds, shares = self._measure(recorded)
        with atomic_path(self._folder / "trace.json") as part:
            self._profile.export_chrome_trace(str(part))
        write_json(self._folder / "shares.json", {"steps": recorded, "seconds": seconds, "shares": shares})
        each = 1e3 * seconds / recorded
        lines = [
            f"{recorded} steps, not counting the first {SKIPPED}: {seconds:.4g} s wall time, {each:.4g} ms each.",
            "Time on the host by activity:",
            *(f"  {name:<16}{100 * share:6.1f} %" for name, share in shares.items()),
        ]
        write_text(self._folder / "operations.txt", "\n".join([*lines, "", self._table()]))

    def step(self) -> None:
        """Note that a training step is done; after the last recorded one this does nothing."""
        if self._done == SKIPPED + RECORDED:
            return
        self._done += 1
        if self._done == SKIPPED:
            synchronise()  # what earlier steps left running is not part of the recorded ones
        elif self._done == SKIPPED + RECORDED and self._on_cuda:
            with span(WAIT_FOR_DEVICE):
                synchronise()
        self._profile.step()

    def _measure(self, recorded: int) -> tuple[float, dict[str, float]]:
        """Return seconds and shares of the whole steps; one that an exception cut short is in the trace alone."""
        # A range also shows on the device, there from its first kernel to its last.
        ranges = [
            (event.name, event.time_range.start, event.time_range.end)
            for event in self._profile.events()  # type: ignore[no-untyped-call]
            if event.is_user_annotation and event.device_type.name == "CPU"
        ]
        steps = sorted((start, end) for name, start, end in ranges if name.startswith("ProfilerStep"))[:recorded]
        begin, finish = steps[0][0], steps[-1][1]
        shares = dict.fromkeys((*STAGES, WAIT_FOR_DEVICE) if self._on_cuda else STAGES, 0.0)
        for name, start, end in ranges:  # those of a step follow one another
            if name in shares and begin <= start and end <= finish:
                shares[name] += (end - start) / (finish - begin)
        shares[REST] = max(0.0, 1 - sum(shares.values()))
        return (finish - begin) / 1e6, shares

    def _table(self) -> str:
        # Spans are no operations; on a device they would even come first, with the time of all that runs in them.
        averages: Any = self._profile.key_averages()
        operations: Any = EventList(  # type: ignore[no-untyped-call]
            [average for average in averages if not average.is_user_annotation],
            use_device="cuda" if self._on_cuda else None,
        )
        key = "self_device_time_total" if self._on_cuda else "self_cpu_time_total"
        table: str = operations.table(sort_by=key, row_limit=25)
        return f"The operations with the most self time on the {'device' if self._on_cuda else 'CPU'}:\n{table}"
