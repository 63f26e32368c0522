"""What the machine does while a run trains: a row per second in `monitor.csv`, and the picture of it."""

import importlib.util
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from medspeed.common.files import read_json_lines, write_text

_log = logging.getLogger(__name__)

SECONDS = "seconds"  # since the run began, without the time between a stop and a resume
# The panels of `monitor.png` and their columns of `monitor.csv`, where a value that the device does not have is empty.
PANELS = {
    "CPU of this run (%, 100 is one core)": ("process_cpu_percent",),  # this process and its children
    "CPU of the host (% of all cores)": ("host_cpu_percent",),
    "memory of this run (GiB)": ("process_memory_gib",),  # resident, with children; what they share counts in each
    "disk, read and written (MB/s)": ("read_mb_per_s", "written_mb_per_s"),  # 10^6 bytes that reached it, with children
    "GPU utilisation (%)": ("gpu_percent",),
    "GPU memory (GiB)": ("gpu_memory_gib",),  # of all processes
    "GPU power (W)": ("gpu_power_w",),
}
COLUMNS = (SECONDS, *(name for names in PANELS.values() for name in names))
_SHORTEST, _JOIN_SECONDS = 0.1, 10.0  # CPU times come in hundredths of a second: none shorter


class Monitor:
    """Samples the machine in a thread while a run trains; to be used as a context around it.

    Each sample, `every` so many seconds, is a row of `monitor.csv` in the folder; a resumed run goes on with the file.
    At the end `monitor.png` is drawn. An error in any of this is logged and ends the sampling; the training goes on.
    """

    def __init__(self, folder: Path, device: torch.device, every: float = 1.0) -> None:
        self._path, self._picture = folder / "monitor.csv", folder / "monitor.png"
        self._device, self._every, self._stop = device, every, threading.Event()
        self._zero = time.perf_counter()  # when the column of seconds has 0
        self._thread = threading.Thread(target=self._guarded, args=(self._sample,), name="monitor", daemon=True)

    def __enter__(self) -> Self:
        if self._device.type == "cuda" and importlib.util.find_spec("pynvml") is None:
            _log.warning("monitor.csv has no GPU utilisation or power; to record them: pip install nvidia-ml-py")
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(_JOIN_SECONDS)
        if self._path.is_file():
            self._guarded(lambda: draw_monitor(self._path, self._picture))

    def now(self) -> float:
        """Return what the column of seconds would say now."""
        return round(time.perf_counter() - self._zero, 1)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (OSError, ValueError, RuntimeError, psutil.Error) as error:
            _log.warning(f"{self._path}: monitoring stopped: {type(error).__name__}: {error}")

    def _sample(self) -> None:
        lines = _read_lines(self._path) if self._path.is_file() else []
        write_text(self._path, "".join(f"{line}\n" for line in (",".join(COLUMNS), *lines)))
        earlier = float(lines[-1].partition(",")[0]) if lines else 0.0
        host, stopped = _Host(), False
        self._zero = host.read_at - earlier
        while not stopped:
            stopped = self._stop.wait(self._every)
            if stopped and time.perf_counter() - host.read_at < _SHORTEST:
                return
            row = {**host.read(), **_read_gpu(self._device), SECONDS: host.read_at - self._zero}
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(",".join(f"{row[name]:.3f}" if name in row else "" for name in COLUMNS) + "\n")


class _Host:
    """Reads what this process with its children took since the last reading, and how busy all cores were.

    Ended children are in their parent's numbers once it has waited for them, and listed until then. So parents are
    read first, and all again where a child ended meanwhile: else it would be missing now and new the next time.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        psutil.cpu_percent()  # each thread's first value is none
        self.read_at, self._totals = time.perf_counter(), self._sum()

    def read(self) -> dict[str, float]:
        """Return the columns of CPU, memory and disk."""
        began, before = self.read_at, self._totals
        self.read_at, self._totals = time.perf_counter(), self._sum()
        # Not below 0: a child that nobody waited for takes its share of the totals along.
        cpu, read, written = (np.maximum(self._totals[:3] - before[:3], 0) / (self.read_at - began)).tolist()
        return {
            "process_cpu_percent": 100 * cpu,
            "host_cpu_percent": psutil.cpu_percent(),
            "process_memory_gib": float(self._totals[3]) / 2**30,
            "read_mb_per_s": read / 1e6,
            "written_mb_per_s": written / 1e6,
        }

    def _sum(self) -> NDArray[np.float64]:
        """Return CPU seconds, bytes read and written since the start, and bytes resident now, over the processes."""
        for _ in range(5):
            total = np.zeros(4)
            with suppress(psutil.NoSuchProcess):
                for process in (self._process, *self._process.children(recursive=True)):
                    with suppress(psutil.AccessDenied), process.oneshot():
                        cpu, disk = process.cpu_times()[:4], process.io_counters()  # the last two: of ended children
                        total += (sum(cpu), disk.read_bytes, disk.write_bytes, process.memory_info().rss)
                break
        return total


def _read_gpu(device: torch.device) -> dict[str, float]:
    """Return the columns of a CUDA device, as far as torch and NVIDIA's management library know them."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    found = {"gpu_memory_gib": (total - free) / 2**30}
    if importlib.util.find_spec("pynvml") is not None:
        with suppress(importlib.import_module("pynvml").NVMLError):  # a slice of a GPU (MIG) does not tell
            found["gpu_percent"] = float(torch.cuda.utilization(device))
            found["gpu_power_w"] = torch.cuda.power_draw(device) / 1000
    return found


def draw_monitor(csv_path: Path, png_path: Path) -> None:
    """Draw a `monitor.csv` that has rows as a PNG: a panel for each quantity, with its mean.

    Dotted lines are the ends of validations, the seconds "monitored" in the `metrics.jsonl` beside it.
    """
    lines = _read_lines(csv_path)
    if not lines:
        return
    from matplotlib.figure import Figure  # here, as what draws with it: the start of a run has no need of it

    from medspeed.common.observe.plots import draw_curve, save_png, style

    records = read_json_lines(csv_path.with_name("metrics.jsonl"))
    validated = [record["monitored"] for record in records if "monitored" in record]
    values = dict(zip(COLUMNS, np.genfromtxt(lines, delimiter=",", ndmin=2).T, strict=True))
    panels = [each for each in PANELS.items() if "GPU" not in each[0] or np.isfinite(values[each[1][0]]).any()]
    figure = Figure(figsize=(8, 1.3 * len(panels) + 0.3), dpi=120, layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True)
    for axis, (title, names) in zip(axes, panels, strict=True):
        style(axis)
        for name, colour in zip(names, ("#0072B2", "#D55E00"), strict=False):
            draw_curve(axis, values[SECONDS], values[name], color=colour, label=name.split("_")[0])
        if len(names) > 1:
            axis.legend(frameon=False, fontsize=8)
        means = ", ".join(f"{np.nanmean(values[name]):.1f}" for name in names)
        axis.set_title(f"{title}: mean {means}", loc="left", fontsize=9)
        for second in validated:
            axis.axvline(second, color="0.3", linewidth=1, linestyle=":")
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel("seconds" + ("; dotted: the end of a validation" if validated else ""), fontsize=9)
    save_png(png_path, figure)


def _read_lines(path: Path) -> list[str]:
    """Return the lines below the header; a last one that a crash cut short is left out."""
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return whole.splitlines()[1:]
