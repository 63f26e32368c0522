"""A profile of a few training steps: what each of their stages takes, and which operations take the most."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity, profile, schedule

from medspeed.common.files import atomic_path, write_text

SKIPPED, RECORDED = 2, 6  # steps; the profiler itself warms up in the last of the first


def nvtx_ranges() -> AbstractContextManager[None]:
    """Return a block in which spans and operators are ranges that Nsight Systems shows.

    Raises:
        ValueError: this torch has no NVTX.
    """
    if torch.version.cuda is None:
        built = f"torch {torch.__version__} is built without NVTX"
        raise ValueError(f"profile nvtx: {built}; use --profile torch, or a torch built for CUDA")
    ranges: AbstractContextManager[None] = torch.autograd.profiler.emit_nvtx()  # type: ignore[no-untyped-call]
    return ranges


@contextmanager
def profiled_steps(folder: Path, device: torch.device) -> Iterator[Callable[[], None]]:
    """Record six steps of a training, after two, with torch.profiler; yield what is to be called after each step.

    At the end, also by an exception, the folder holds `trace.json` (for
    Perfetto or chrome://tracing) and `operations.txt`: how long the steps and their spans took on the host, which on
    CUDA launches what the device computes later, and the operations with the most self time.
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

    with recording:
        yield recording.step


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
