"""A profile of a few training steps: what each stage takes of the wall clock, and which operations take the most."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity, profile, schedule

from medspeed.common.clock import span, spans_to, synchronise
from medspeed.common.files import atomic_path, write_text

# The spans of a training step, in its order; in the last the device computes what is left, on CUDA only.
STAGES = ("wait for batch", "forward", "loss", "backward", "optimizer", "wait for device")
SKIPPED, RECORDED = 2, 6  # steps; the profiler itself warms up in the last of the first


@contextmanager
def profiled_steps(folder: Path, device: torch.device) -> Iterator[Callable[[], None]]:
    """Record six steps of a training, after two, with torch.profiler; yield what is to be called after each step.

    Meanwhile spans are ranges of the profiler. At the end, also by an exception, the folder holds `trace.json` (for
    Perfetto or chrome://tracing) and `operations.txt`: what share of the steps lay in each span, and the operations
    with the most self time. On CUDA shares are times of the host, which launches what the device computes later.

    Raises:
        OSError: the folder cannot be written or the disk is full.
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
        if on_cuda and recording.step_num + 1 in (SKIPPED, SKIPPED + RECORDED):
            with span("wait for device"):  # what earlier steps left running is not part of the recorded ones
                synchronise()
        if recording.step_num < SKIPPED + RECORDED:
            recording.step()

    with spans_to("profiler"), recording:
        yield step


def _write(folder: Path, on_cuda: bool, recording: profile) -> None:
    if recording.step_num <= SKIPPED:
        return
    with atomic_path(folder / "trace.json") as part:
        recording.export_chrome_trace(str(part))
    # A span also shows on the device, from its first kernel to its last.
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in recording.events()  # type: ignore[no-untyped-call]
        if event.is_user_annotation and event.device_type.name == "CPU"
    ]
    steps = sorted((start, end) for name, start, end in spans if name.startswith("ProfilerStep"))
    steps = steps[: recording.step_num - SKIPPED]  # without one that an exception cut short
    begin, finish = steps[0][0], steps[-1][1]
    shares = dict.fromkeys(STAGES if on_cuda else STAGES[:-1], 0.0)
    for name, start, end in spans:  # those of a step follow one another
        if name in shares and begin <= start and end <= finish:
            shares[name] += (end - start) / (finish - begin)
    shares["other"] = max(0.0, 1 - sum(shares.values()))
    lines = [
        f"{len(steps)} steps, not counting the first {SKIPPED}: {(finish - begin) / 1e6:.4g} s wall time, "
        f"{(finish - begin) / 1e3 / len(steps):.4g} ms each.",
        "Time on the host by activity:",
        *(f"  {name:<16}{100 * share:6.1f} %" for name, share in shares.items()),
        "",
        f"The operations with the most self time on the {'device' if on_cuda else 'CPU'}:",
    ]
    # Spans are no operations; on a device they would even come first, with the time of all that runs in them.
    averages: Any = recording.key_averages()
    operations: Any = EventList(  # type: ignore[no-untyped-call]
        [each for each in averages if not each.is_user_annotation], use_device="cuda" if on_cuda else None
    )
    table = operations.table(sort_by=f"self_{'device' if on_cuda else 'cpu'}_time_total", row_limit=25)
    write_text(folder / "operations.txt", "\n".join([*lines, table]))
