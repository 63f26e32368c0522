"""What the machine does while a run trains: a row per second in `monitor.csv`, and the picture of it."""

import importlib.util
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from medspeed.common.files import write_text

_log = logging.getLogger(__name__)

SECONDS = "seconds"  # since the run began, without the time between a stop and a resume
# The panels of `monitor.png` and their columns of `monitor.csv`, where a value that the device does not have is empty.
PANELS = {
    "CPU of this run (%, 100 is one core)": "process_cpu_percent",  # this process and its children
    "CPU of the host (% of all cores)": "host_cpu_percent",
    "memory of this run (GiB)": "process_memory_gib",  # resident, with children; what they share counts in each
    "disk, read (MB/s)": "read_mb_per_s",  # 10^6 bytes that came from it, with children
    "disk, written (MB/s)": "written_mb_per_s",
    "GPU utilisation (%)": "gpu_percent",
    "GPU memory (GiB)": "gpu_memory_gib",  # of all processes
    "GPU power (W)": "gpu_power_w",
}
COLUMNS = (SECONDS, *PANELS.values())
_SHORTEST, _JOIN_SECONDS = 0.1, 10.0  # CPU times come in hundredths of a second: none shorter


@contextmanager
def monitored(folder: Path, device: torch.device, every: float = 1.0) -> Iterator[None]:
    """Sample the machine in a thread while a run trains: a row of `monitor.csv` in the folder, `every` so many seconds.

    A resumed run goes on with the file. At the end `monitor.png` is drawn. An error in it is logged, and ends it alone.
    """
    path, stop = folder / "monitor.csv", threading.Event()

    def guarded(work: Callable[..., None], *given: Any) -> None:  # noqa: ANN401 - whatever it takes
        try:
            work(*given)
        except (OSError, ValueError, RuntimeError, psutil.Error) as error:
            _log.warning(f"{path}: monitoring stopped: {type(error).__name__}: {error}")

    if device.type == "cuda" and importlib.util.find_spec("pynvml") is None:
        _log.warning("monitor.csv has no GPU utilisation or power; to record them: pip install nvidia-ml-py")
    thread = threading.Thread(target=guarded, args=(_sample, path, device, every, stop), name="monitor", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_JOIN_SECONDS)
        if path.is_file():
            guarded(draw_monitor, path, path.with_suffix(".png"))


def _sample(path: Path, device: torch.device, every: float, stop: threading.Event) -> None:
    lines = _read_lines(path) if path.is_file() else []
    write_text(path, "".join(f"{line}\n" for line in (",".join(COLUMNS), *lines)))
    psutil.cpu_percent()  # each thread's first value is none
    began, before = time.perf_counter(), used()
    zero = began - (float(lines[-1].partition(",")[0]) if lines else 0.0)
    stopped = False
    while not stopped:
        stopped = stop.wait(every)
        if stopped and time.perf_counter() - began < _SHORTEST:
            return
        now, after = time.perf_counter(), used()
        # Not below 0: a child that nobody waited for takes its share of the totals along.
        cpu, read, written = (np.maximum(after[:3] - before[:3], 0) / (now - began)).tolist()
        values = now - zero, 100 * cpu, psutil.cpu_percent(), after[3] / 2**30, read / 1e6, written / 1e6
        began, before = now, after
        with path.open("a", encoding="utf-8") as stream:
            cells = (*values, *_read_gpu(device))
            stream.write(",".join("" if value is None else f"{value:.3f}" for value in cells) + "\n")


def used() -> NDArray[np.float64]:
    """Return CPU seconds, bytes read and written since the start, and bytes resident now, of this process and children.

    Ended children are in their parent's numbers once it has waited for them, and listed until then. So parents are
    read first, and all again where a child ended meanwhile: else it would be missing now and new the next time.
    """
    own = psutil.Process()
    for _ in range(5):
        total = np.zeros(4)
        with suppress(psutil.NoSuchProcess):
            for process in (own, *own.children(recursive=True)):
                with suppress(psutil.AccessDenied), process.oneshot():
                    cpu, disk = process.cpu_times()[:4], process.io_counters()  # the last two: of ended children
                    total += (sum(cpu), disk.read_bytes, disk.write_bytes, process.memory_info().rss)
            break
    return total


def _read_gpu(device: torch.device) -> tuple[float | None, float | None, float | None]:
    """Return utilisation, memory and power of a CUDA device, as far as torch and NVIDIA's library know them."""
    if device.type != "cuda":
        return None, None, None
    free, total = torch.cuda.mem_get_info(device)
    percent = watts = None
    if importlib.util.find_spec("pynvml") is not None:
        with suppress(importlib.import_module("pynvml").NVMLError):  # a slice of a GPU (MIG) does not tell
            percent = float(torch.cuda.utilization(device))
            watts = torch.cuda.power_draw(device) / 1000
    return percent, (total - free) / 2**30, watts


def draw_monitor(csv_path: Path, png_path: Path) -> None:
    """Draw a `monitor.csv` that has rows as a PNG: a panel for each quantity, with its mean."""
    lines = _read_lines(csv_path)
    if not lines:
        return
    from matplotlib.figure import Figure  # here, as what draws with it: the start of a run has no need of it

    from medspeed.common.observe.plots import draw_curve, save_png, style

    values = dict(zip(COLUMNS, np.genfromtxt(lines, delimiter=",", ndmin=2).T, strict=True))
    panels = [(title, values[name]) for title, name in PANELS.items() if np.isfinite(values[name]).any()]
    figure = Figure(figsize=(8, 1.3 * len(panels) + 0.3), dpi=120, layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True)
    for axis, (title, column) in zip(axes, panels, strict=True):
        style(axis)
        draw_curve(axis, values[SECONDS], column, color="#0072B2")
        axis.set_title(f"{title}: mean {np.nanmean(column):.1f}", loc="left", fontsize=9)
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel("seconds", fontsize=9)
    save_png(png_path, figure)


def _read_lines(path: Path) -> list[str]:
    """Return the lines below the header; a last one that a crash cut short is left out."""
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return whole.splitlines()[1:]
