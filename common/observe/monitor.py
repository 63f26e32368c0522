"""What the machine does while a run trains: a row per second in `monitor.csv`, and the picture of it."""

import csv
import importlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import psutil
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from common.files import write_text
from common.observe.figures import save_png

_log = logging.getLogger(__name__)

Row = Mapping[str, float | str]
ReadGpu = Callable[[], Row]

# Columns of `monitor.csv`; a value that the device does not have is left empty.
SECONDS = "seconds"  # since the run began, without the time between a stop and a resume
PROCESS_CPU = "process_cpu_percent"  # this process and its children; 100 is one core
HOST_CPU = "host_cpu_percent"  # all processes; 100 is all cores
PROCESS_MEMORY = "process_memory_gib"  # resident, with children; what they share counts in each
READ, WRITTEN = "read_mb_per_s", "written_mb_per_s"  # 10^6 bytes that reached the disk, with children
HOST_COLUMNS = (SECONDS, PROCESS_CPU, HOST_CPU, PROCESS_MEMORY, READ, WRITTEN)
GPU_USE, GPU_MEMORY, GPU_POWER = "gpu_percent", "gpu_memory_gib", "gpu_power_w"
GPU_ENERGY, GPU_HELD_BACK = "gpu_energy_j", "gpu_held_back"  # since the run began; what keeps the clocks low, in words
GPU_COLUMNS = (GPU_USE, GPU_MEMORY, GPU_POWER, GPU_ENERGY, GPU_HELD_BACK)

# Bits of nvmlClocksEventReasons (nvml.h); an idle GPU, bit 1, is not held back.
_REASONS = {
    0x2: "clocks set by the user",
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "heat",
    0x40: "heat (hardware)",
    0x80: "power brake",
    0x100: "display clocks",
}
_SHORTEST, _JOIN_SECONDS, _MOST_POINTS = 0.1, 10.0, 500  # CPU times come in hundredths of a second: none shorter


class Monitor:
    """Samples the machine in a thread while a run trains; to be used as a context around it.

    Each sample is a row of `monitor.csv` in the folder, written at once; a resumed run goes on with the file. At the
    end `monitor.png` is drawn. An error in any of this is logged and ends the sampling, and the training goes on.

    Args:
        folder: of the run.
        device: of the training; where it is CUDA there are `GPU_COLUMNS`, if NVML can be had.
        every: seconds between samples.
        read_gpu: returns the `GPU_COLUMNS`, the energy since any fixed time; by default NVML's for a CUDA device.
    """

    def __init__(self, folder: Path, device: torch.device, every: float = 1.0, read_gpu: ReadGpu | None = None) -> None:
        self._path, self._picture = folder / "monitor.csv", folder / "monitor.png"
        self._device, self._every, self._read_gpu = device, every, read_gpu
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._guarded, args=(self._run, "sampling ends"), name="monitor", daemon=True
        )

    def __enter__(self) -> Self:
        if self._read_gpu is None and self._device.type == "cuda":
            self._read_gpu = _nvml_reader(self._device)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(_JOIN_SECONDS)
        if self._thread.is_alive():
            _log.warning(f"{self._path}: the last sample takes more than {_JOIN_SECONDS:g} s and is not waited for")
        if self._path.is_file():
            self._guarded(lambda: draw_monitor(self._path, self._picture), "no picture")

    def _guarded(self, work: Callable[[], None], loss: str) -> None:
        try:
            work()
        except (OSError, ValueError, RuntimeError, psutil.Error) as error:
            _log.warning(f"{self._path}: {loss}: {type(error).__name__}: {error}")

    def _run(self) -> None:
        columns, last = _continue(self._path, HOST_COLUMNS + (GPU_COLUMNS if self._read_gpu else ()))
        before = {name: float(last.get(name) or 0) for name in (SECONDS, GPU_ENERGY)}
        began = time.perf_counter()
        before_energy = self._read_gpu().get(GPU_ENERGY, 0.0) if self._read_gpu else 0.0
        host, stopped = _Host(), False
        while not stopped:
            stopped = self._stop.wait(self._every)
            if stopped and time.perf_counter() - host.read_at < _SHORTEST:
                return
            row = {**host.read(), **(self._read_gpu() if self._read_gpu else {})}
            row[SECONDS] = before[SECONDS] + host.read_at - began
            if GPU_ENERGY in row:
                row[GPU_ENERGY] = before[GPU_ENERGY] + float(row[GPU_ENERGY]) - float(before_energy)
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(_line(row, columns))


class _Host:
    """Reads what this process with its children took since the last reading, and how busy all cores were."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        psutil.cpu_percent()  # each thread's first value is none
        self.read_at, self._totals = time.perf_counter(), self._sum()

    def read(self) -> Row:
        """Return the `HOST_COLUMNS` but the time."""
        began, before = self.read_at, self._totals
        self.read_at, self._totals = time.perf_counter(), self._sum()
        # Not below 0: a child that nobody waited for takes its share of the totals along.
        cpu, read, written = np.maximum(self._totals[:3] - before[:3], 0) / (self.read_at - began)
        return {
            PROCESS_CPU: 100 * float(cpu),
            HOST_CPU: psutil.cpu_percent(),
            PROCESS_MEMORY: float(self._totals[3]) / 2**30,
            READ: float(read) / 1e6,
            WRITTEN: float(written) / 1e6,
        }

    def _sum(self) -> NDArray[np.float64]:
        """Return CPU seconds, bytes read and written since the start, and bytes resident now, over the processes.

        Ended children are in their parent's numbers once it has waited for them, and listed until then. So parents are
        read first, and all again where a child ended meanwhile: else it would be missing now and new the next time.
        """
        for _ in range(5):
            total = np.zeros(4)
            with suppress(psutil.NoSuchProcess):
                for process in (self._process, *self._process.children(recursive=True)):
                    with suppress(psutil.AccessDenied), process.oneshot():
                        cpu, disk = process.cpu_times()[:4], process.io_counters()  # the last two: of ended children
                        total += (sum(cpu), disk.read_bytes, disk.write_bytes, process.memory_info().rss)
                break
        return total


class NvmlReader:
    """Reads one GPU by NVML, NVIDIA's management library.

    Args:
        nvml: the module `pynvml` of the package nvidia-ml-py.
        uuid: of the GPU, or of the slice of one (MIG), as torch writes it: without "GPU-" or "MIG-".

    Raises:
        OSError: NVML does not work here, or does not know the GPU.
    """

    def __init__(self, nvml: Any, uuid: str) -> None:  # noqa: ANN401 - a module without types
        self._nvml = nvml
        self._joules, self._read_at = 0.0, time.perf_counter()
        try:
            nvml.nvmlInit()
            try:
                self._handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            except nvml.NVMLError:
                self._handle = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
        except nvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error

    def read(self) -> Row:
        """Return the `GPU_COLUMNS` that the device has; the energy is since the driver was loaded, or this object made.

        Raises:
            OSError: the GPU cannot be reached any more.
        """
        nvml = self._nvml
        power = self._value(nvml.nvmlDeviceGetPowerUsage)  # mW
        before, self._read_at = self._read_at, time.perf_counter()
        self._joules += (power or 0) / 1e3 * (self._read_at - before)
        use, memory = self._value(nvml.nvmlDeviceGetUtilizationRates), self._value(nvml.nvmlDeviceGetMemoryInfo)
        millijoules = self._value(nvml.nvmlDeviceGetTotalEnergyConsumption)  # since the driver was loaded
        bits = self._value(nvml.nvmlDeviceGetCurrentClocksEventReasons)
        row = {
            GPU_USE: None if use is None else float(use.gpu),
            GPU_MEMORY: None if memory is None else memory.used / 2**30,
            GPU_POWER: None if power is None else power / 1e3,
            GPU_ENERGY: millijoules / 1e3 if millijoules is not None else self._joules if power is not None else None,
            GPU_HELD_BACK: " + ".join(word for bit, word in _REASONS.items() if bit & (bits or 0)),
        }
        return {name: value for name, value in row.items() if value is not None}

    def _value(self, function: Callable[[Any], Any]) -> Any:  # noqa: ANN401
        """Return what NVML says, or None where this GPU, slice or driver does not know it."""
        try:
            return function(self._handle)
        except (self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_FunctionNotFound):
            return None
        except self._nvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error


def _nvml_reader(device: torch.device) -> ReadGpu | None:
    """Return the reader of a CUDA device, or None, with a line in the log, where NVML is missing."""
    try:
        # By its UUID: CUDA_VISIBLE_DEVICES changes torch's numbers, but not NVML's.
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        return NvmlReader(importlib.import_module("pynvml"), uuid).read
    except (ModuleNotFoundError, OSError) as error:
        _log.warning(f"monitor.csv has no GPU columns: {error} (they need nvidia-ml-py and the GPU's driver)")
    return None


def draw_monitor(csv_path: Path, png_path: Path) -> None:
    """Draw a `monitor.csv` as a PNG: a panel for each quantity, with its mean; long runs are drawn by means of rows.

    Raises:
        OSError: the table cannot be read or the picture not be written.
        ValueError: the table holds what is no number.
    """
    rows = _read_rows(csv_path)
    names = (*HOST_COLUMNS, *GPU_COLUMNS[:-1])
    values = {name: np.array([float(row.get(name) or "nan") for row in rows]) for name in names}
    shown = {name for name in names if name in HOST_COLUMNS or np.isfinite(values[name]).any()}
    panels = {title: columns for title, columns in _PANELS.items() if columns[0] in shown}
    figure = Figure(figsize=(8, 1.3 * len(panels) + 0.3), dpi=120, layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True)
    length = max(values[SECONDS], default=0.0)
    unit, seconds = ("s", 1) if length <= 300 else ("min", 60) if length <= 3 * 3600 else ("h", 3600)
    for axis, (title, columns) in zip(axes, panels.items(), strict=True):
        _draw_lines(axis, _thinned(values[SECONDS]) / seconds, [_thinned(values[name]) for name in columns])
        means = ", ".join(f"mean {_mean(values[name]):.4g}{_SUFFIX.get(name, '')}" for name in columns)
        notes = _energy_and_limits(rows, values[GPU_ENERGY]) if GPU_POWER in columns else ""
        axis.set_title(f"{title}: {means if rows else 'no rows'}{notes}", loc="left", fontsize=9)
    axes[-1].set_xlabel(f"time ({unit})", fontsize=9)
    axes[-1].set_xlim(0, 1.01 * length / seconds or 1)
    save_png(png_path, figure)


_PANELS = {
    "CPU of this run (%, 100 is one core)": (PROCESS_CPU,),
    "CPU of the host (% of all cores)": (HOST_CPU,),
    "memory of this run (GiB)": (PROCESS_MEMORY,),
    "disk (MB/s)": (READ, WRITTEN),
    "GPU utilisation (%)": (GPU_USE,),
    "GPU memory (GiB)": (GPU_MEMORY,),
    "GPU power (W)": (GPU_POWER,),
}
_SUFFIX = {READ: " read (blue)", WRITTEN: " written (orange)"}


def _draw_lines(axes: Axes, times: NDArray[np.float64], lines: Sequence[NDArray[np.float64]]) -> None:
    for values, colour in zip(lines, ("#0072B2", "#D55E00"), strict=False):
        marker = "o" if len(times) <= 10 else ""  # a line of one point cannot be seen
        axes.plot(times, values, color=colour, linewidth=1, marker=marker, markersize=3)
    axes.set_ylim(0, 1.1 * max((value for values in lines for value in values if value > 0), default=1.0))
    axes.grid(color="0.9")
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _energy_and_limits(rows: Sequence[Mapping[str, str]], joules: NDArray[np.float64]) -> str:
    """Return in words the energy in all, and where clocks were held back, how often and mostly by what."""
    reasons = [row[GPU_HELD_BACK] for row in rows if row.get(GPU_HELD_BACK)]
    why = max(set(reasons), key=reasons.count, default="")
    held = f"; held back in {100 * len(reasons) / len(rows):.0f} % of the rows: {why}" if reasons else ""
    return f"; {max(joules[np.isfinite(joules)], default=0.0) / 1e3:.4g} kJ in all{held}"


def _mean(values: NDArray[np.float64]) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else float("nan")


def _thinned(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array([_mean(stretch) for stretch in np.array_split(values, min(len(values), _MOST_POINTS) or 1)])


def _read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of the table; a last line that a crash cut short is left out."""
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return list(csv.DictReader(whole.splitlines(), restval=""))


def _continue(path: Path, columns: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Make the table, or drop a torn last line and add what columns it lacks; return its columns and last row."""
    rows = _read_rows(path) if path.is_file() else []
    names = [*columns, *(name for name in (rows[0] if rows else ()) if name not in columns)]
    write_text(path, ",".join(names) + "\n" + "".join(_line(row, names) for row in rows))
    return names, rows[-1] if rows else {}


def _line(row: Row, columns: Sequence[str]) -> str:
    cells = (row.get(name, "") for name in columns)
    return ",".join(cell if isinstance(cell, str) else f"{cell:.3f}" for cell in cells) + "\n"
