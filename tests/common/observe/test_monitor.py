"""The monitor: rows of a real process and of a made-up GPU, every way in which it may end, and the picture."""

import csv
import logging
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from medspeed.common.observe import monitor, plots
from medspeed.common.observe.monitor import COLUMNS, draw_monitor, monitored, used

CPU = torch.device("cpu")
BURN = "import time\nwhile time.process_time() < {seconds}: pass"


@pytest.fixture
def no_picture(monkeypatch):
    """Spare the time of drawing."""
    monkeypatch.setattr(monitor, "draw_monitor", lambda csv_path, png_path: None)


class NVMLError(Exception):
    pass


@pytest.fixture
def gpu(monkeypatch):
    """A made-up GPU, as torch tells of it; what is put into `broken` is raised when its power is read."""
    broken: list[Exception] = []

    def power(device: torch.device) -> int:
        if broken:
            raise broken[0]
        return 250_500

    module = ModuleType("pynvml")
    module.NVMLError, module.__spec__ = NVMLError, ModuleSpec("pynvml", None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**36 - 3 * 2**29, 2**36))
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 93)
    monkeypatch.setattr(torch.cuda, "power_draw", power)
    return broken


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "monitor.csv").open() as stream:
        return list(csv.DictReader(stream))


def column(folder: Path, name: str) -> np.ndarray:
    return np.array([float(row[name]) for row in rows_of(folder)])


def wait_for_rows(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while not (folder / "monitor.csv").is_file() or len(rows_of(folder)) < count:
        assert time.monotonic() < deadline, "no rows"
        time.sleep(0.01)


def monitor_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "monitor"]


def while_monitored(folder: Path, work: Callable[[], object], name: str) -> float:
    """Return what a column says that a piece of work took, per second times seconds.

    Up to the last 0.1 seconds of it are missing, as from any run.
    """
    with monitored(folder, CPU, every=0.2):
        wait_for_rows(folder, 1)
        work()
    return float((np.diff(column(folder, "seconds")) * column(folder, name)[1:]).sum())


def burn(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_the_rows_are_sane_and_there_while_the_run_goes_on(tmp_path):
    with monitored(tmp_path, CPU, every=0.02):
        wait_for_rows(tmp_path, 3)
        memory = column(tmp_path, "process_memory_gib")[-1]
        everyone = (psutil.Process(), *psutil.Process().children(recursive=True))  # of tests before, too
        assert memory == pytest.approx(sum(each.memory_info().rss for each in everyone) / 2**30, rel=0.3)
    assert list(rows_of(tmp_path)[0]) == list(COLUMNS)
    assert (np.diff(column(tmp_path, "seconds")) > 0).all()
    for name in ("process_cpu_percent", "read_mb_per_s", "written_mb_per_s"):
        assert (column(tmp_path, name) >= 0).all()
    assert ((column(tmp_path, "host_cpu_percent") >= 0) & (column(tmp_path, "host_cpu_percent") <= 100)).all()
    assert {path.name for path in tmp_path.iterdir()} == {"monitor.csv", "monitor.png"}


@pytest.mark.usefixtures("no_picture")
def test_the_cpu_time_of_the_process_is_in_the_rows(tmp_path):
    # By the kernel's count for this process, whatever else the machine does.
    idle = while_monitored(tmp_path / "idle", lambda: time.sleep(0.5), "process_cpu_percent") / 100
    busy = while_monitored(tmp_path / "busy", lambda: burn(0.5), "process_cpu_percent") / 100
    assert 0.35 < busy < 0.9
    assert idle < 0.25


@pytest.mark.usefixtures("no_picture")
def test_a_child_counts_once(tmp_path):
    def work() -> None:
        subprocess.run([sys.executable, "-c", BURN.format(seconds=0.6)], check=True)

    assert 0.45 < while_monitored(tmp_path, work, "process_cpu_percent") / 100 < 1.1


def test_a_child_that_ended_since_the_last_sample_counts():
    before = used()[0]
    subprocess.run([sys.executable, "-c", BURN.format(seconds=0.3)], check=True)
    assert used()[0] - before > 0.28


def test_children_that_come_and_go_are_neither_missed_nor_counted_twice():
    def kernels_count() -> float:
        uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(use.ru_utime + use.ru_stime for use in uses)

    def work() -> None:
        for _ in range(12):
            subprocess.run([sys.executable, "-S", "-c", BURN.format(seconds=0.05)], check=True)

    last_count, before, total = used()[0], kernels_count(), 0.0
    thread = threading.Thread(target=work)
    thread.start()
    last = False
    while not last:
        last = not thread.is_alive()
        count = used()[0]
        total += max(0.0, count - last_count)
        last_count = count
    assert total == pytest.approx(kernels_count() - before, abs=0.1)  # hundredths of a second at both ends


class FakeProcess:
    """A process of psutil's with so many CPU seconds and bytes at each reading; None where it is gone by then."""

    def __init__(self, readings: list[int | None], children: list[list["FakeProcess"]] | None = None) -> None:
        self.readings, self.listings = iter(readings), iter(children or [])

    def children(self, recursive: bool) -> list["FakeProcess"]:
        assert recursive
        return next(self.listings)

    def oneshot(self) -> AbstractContextManager[None]:
        value = next(self.readings)
        if value is None:
            raise psutil.NoSuchProcess(7)
        self.value = value
        return nullcontext()

    def cpu_times(self) -> tuple[int, ...]:
        return (self.value, 0, 0, 0, 99)

    def io_counters(self) -> SimpleNamespace:
        return SimpleNamespace(read_bytes=0, write_bytes=self.value * 1_000_000)

    def memory_info(self) -> SimpleNamespace:
        return SimpleNamespace(rss=self.value * 2**30)


def test_a_child_that_ends_during_a_sample_counts_once(monkeypatch):
    # Its 50 seconds go to its parent after that was read: the second sample is begun again.
    child = FakeProcess([50, None])
    process = FakeProcess([10, 11, 61, 62], [[child], [child], [], []])
    monkeypatch.setattr(psutil, "Process", lambda: process)
    first, second, third = used(), used(), used()
    assert [each[0] for each in (first, second, third)] == [60, 61, 62]
    assert (third[2], third[3]) == (62_000_000, 62 * 2**30)


def test_a_child_of_a_child_counts_while_it_runs():
    grandchild = BURN.format(seconds=60)
    program = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {grandchild!r}]).pid); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        burning = psutil.Process(int(child.stdout.readline()))
        began, before = time.process_time(), used()[0] - burning.cpu_times().user
        while burning.cpu_times().user < 0.5:
            time.sleep(0.02)
        seconds = used()[0] - before
        own = time.process_time() - began
        burning.kill()
        child.communicate(b"\n")
    assert seconds - own > 0.4


@pytest.mark.usefixtures("no_picture")
def test_what_is_written_to_the_disk_is_counted(tmp_path):
    def write() -> None:
        with (tmp_path / "file").open("wb") as stream:
            stream.write(bytes(8_000_000))
        time.sleep(0.11)

    before = psutil.Process().io_counters().write_bytes
    megabytes = while_monitored(tmp_path, write, "written_mb_per_s")
    if psutil.Process().io_counters().write_bytes - before < 8_000_000:
        pytest.skip("this file system's writes are not counted")
    assert 7.9 < megabytes < 9


@pytest.mark.usefixtures("no_picture")
def test_a_gpu_has_its_columns(tmp_path, gpu):
    with monitored(tmp_path, torch.device("cuda"), 0.02):
        wait_for_rows(tmp_path, 2)
    assert list(rows_of(tmp_path)[0].values())[-3:] == ["93.000", "1.500", "250.500"]


@pytest.mark.usefixtures("no_picture")
def test_a_slice_of_a_gpu_that_does_not_tell_its_power_is_monitored(tmp_path, gpu):
    gpu.append(NVMLError("Not Supported"))
    with monitored(tmp_path, torch.device("cuda"), 0.02):
        wait_for_rows(tmp_path, 2)
    assert list(rows_of(tmp_path)[0].values())[-3:] == ["93.000", "1.500", ""]


@pytest.mark.usefixtures("no_picture", "gpu")
def test_without_nvml_one_line_says_so_and_the_rest_is_monitored(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with monitored(tmp_path, torch.device("cuda"), every=0.02):
        wait_for_rows(tmp_path, 2)
    assert list(rows_of(tmp_path)[0].values())[-3:] == ["", "1.500", ""]
    assert caplog.messages == ["monitor.csv has no GPU utilisation or power; to record them: pip install nvidia-ml-py"]


@pytest.mark.usefixtures("no_picture")
def test_a_resumed_run_goes_on_where_the_last_row_stands(tmp_path):
    (tmp_path / "monitor.csv").write_text(
        f"{','.join(COLUMNS)}\n"
        "1000.000,1.000,1.000,1.000,1.000,1.000,50.000,1.000,70.000\n"
        "1001.000,1.000,1.000,1.000,1.000,1.000,,,\n"
        "1002.000,1.0"  # cut short by a crash
    )
    with monitored(tmp_path, CPU, 0.02):
        wait_for_rows(tmp_path, 4)
    seconds = column(tmp_path, "seconds")
    assert seconds[:2].tolist() == [1000.0, 1001.0]
    assert 1001.0 < seconds[2] < 1061.0
    assert (np.diff(seconds) > 0).all()
    assert [row["gpu_power_w"] for row in rows_of(tmp_path)[:3]] == ["70.000", "", ""]


@pytest.mark.usefixtures("no_picture")
def test_a_file_without_a_whole_line_is_begun_again(tmp_path):
    (tmp_path / "monitor.csv").write_text("secon")
    with monitored(tmp_path, CPU, every=0.02):
        wait_for_rows(tmp_path, 1)
    assert list(rows_of(tmp_path)[0]) == list(COLUMNS)


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize("error", [OSError("GPU is lost"), RuntimeError("no"), psutil.AccessDenied(7)])
def test_an_error_in_sampling_is_logged_once_and_harms_nothing(tmp_path, caplog, gpu, error):
    caplog.set_level(logging.WARNING)
    with monitored(tmp_path, torch.device("cuda"), 0.02):
        wait_for_rows(tmp_path, 1)
        gpu.append(error)
        for thread in monitor_threads():
            thread.join(60)
        assert not monitor_threads()  # it has ended by itself
    assert caplog.messages == [f"{tmp_path / 'monitor.csv'}: monitoring stopped: {type(error).__name__}: {error}"]


def test_a_picture_that_cannot_be_written_is_logged(tmp_path, caplog):
    (tmp_path / "monitor.png").mkdir()
    with monitored(tmp_path, CPU, every=0.02):
        wait_for_rows(tmp_path, 1)
    assert len(caplog.messages) == 1
    assert "monitoring stopped: IsADirectoryError" in caplog.messages[0]


@pytest.mark.usefixtures("no_picture")
def test_the_thread_ends_with_the_block_also_by_an_error(tmp_path):
    alive: list[int] = []

    def fail() -> None:
        with monitored(tmp_path, CPU, every=600):
            alive.append(len(monitor_threads()))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert alive == [1]
    assert not monitor_threads()


@pytest.mark.usefixtures("no_picture")
def test_a_run_shorter_than_the_interval_has_a_last_row(tmp_path, monkeypatch):
    monkeypatch.setattr("medspeed.common.observe.monitor._SHORTEST", 0.0)  # however late the thread came to begin
    with monitored(tmp_path, CPU, every=600):
        deadline = time.monotonic() + 60
        while not (tmp_path / "monitor.csv").is_file() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)
    assert len(rows_of(tmp_path)) == 1


def write_table(path: Path, count: int, gpu: bool) -> None:
    lines = [f"{number + 1:.3f}{',50.0' * 5}{',50.0' * 3 if gpu else ',' * 3}" for number in range(count)]
    path.write_text("\n".join([",".join(COLUMNS), *lines]) + "\n")


def coloured(path: Path) -> int:
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB")).astype(int)
    return int((np.ptp(pixels, axis=2) > 60).sum())


@pytest.mark.parametrize(("count", "gpu", "panels"), [(1, False, 5), (1, True, 8), (3000, True, 8)])
def test_pictures_of_few_and_many_rows(tmp_path, count, gpu, panels):
    write_table(tmp_path / "a.csv", count, gpu)
    draw_monitor(tmp_path / "a.csv", tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.height == pytest.approx(120 * (1.3 * panels + 0.3), abs=1)
    # A line per panel, or a dot.
    assert coloured(tmp_path / "a.png") >= {1: 10 * panels, 3000: 600 * panels}[count]


def test_without_rows_there_is_no_picture(tmp_path):
    write_table(tmp_path / "a.csv", 0, gpu=False)
    draw_monitor(tmp_path / "a.csv", tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_titles_say_the_means(tmp_path, monkeypatch):
    figures: list[Any] = []
    monkeypatch.setattr(plots, "save_png", lambda path, figure: figures.append(figure))
    write_table(tmp_path / "a.csv", 10, gpu=True)
    lines = (tmp_path / "a.csv").read_text().splitlines()
    lines[1:] = [
        ",".join(("1.234" if at == 3 else cell) for at, cell in enumerate(line.split(","))) for line in lines[1:]
    ]
    lines[1:4] = [line.replace("50.0", "90.0", 1) for line in lines[1:4]]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    draw_monitor(tmp_path / "a.csv", tmp_path / "a.png")
    titles = [axes.get_title(loc="left") for axes in figures[0].axes]
    assert titles[0] == "CPU of this run (%, 100 is one core): mean 62.0"
    assert titles[3:5] == ["disk, read (MB/s): mean 50.0", "disk, written (MB/s): mean 50.0"]
    assert titles[2] == "memory of this run (GiB): mean 1.2"
    assert titles[7] == "GPU power (W): mean 50.0"


@pytest.mark.gpu
def test_a_real_gpu_is_monitored(tmp_path, caplog):
    with monitored(tmp_path, torch.device("cuda"), every=0.1):
        matrix = torch.ones(4096, 4096, device="cuda")
        for _ in range(200):
            matrix = matrix @ matrix * 1e-4
        torch.cuda.synchronize()
        wait_for_rows(tmp_path, 3)
    assert caplog.messages == []
    assert column(tmp_path, "gpu_memory_gib").max() > 0.05
