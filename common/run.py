"""The ground floor of every program: the folder of a run, its environment and errors, and the memory of the host."""

import ctypes
import logging
import os
import platform
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import psutil
import torch
from tqdm import tqdm

from common.clock import Clock
from common.files import write_json, write_text
from common.ranks import SINGLE, Ranks, choose_device

T = TypeVar("T")

# mallopt's parameters (malloc.h of the GNU C library).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_NEVER_TRIM = 2**31 - 1
_GROW_BY = 2**28
_MMAP_MAX_DEFAULT, _TRIM_DEFAULT, _PAD_DEFAULT = 65536, 128 * 1024, 128 * 1024

_PACKAGES = ("torch", "monai", "numpy", "nibabel", "onnx", "onnxruntime", "tensorrt", "tensorrt-rtx", "isal")


@dataclass(frozen=True)
class Run:
    """One run: where it writes, what it runs on, and its clock.

    Args:
        directory: folder that holds all the run writes.
        device: where the network computes.
        clock: seconds per stage.
        resumed: whether the folder existed before as an unfinished run.
        ranks: the processes that train together. The leader alone writes and speaks; the folder of the others has the
            same name, and on another host it need not exist.
    """

    directory: Path
    device: torch.device
    clock: Clock
    resumed: bool
    ranks: Ranks = SINGLE

    @property
    def leader(self) -> bool:
        """Whether this process is the one that writes and speaks."""
        return self.ranks.leader

    def say(self, line: str) -> None:
        """Print a line without breaking a progress bar, and keep it in `run.log`; only the leader does."""
        if not self.leader:
            return
        tqdm.write(line)
        with (self.directory / "run.log").open("a", encoding="utf-8") as log:
            log.write(line + "\n")


def open_run(
    root: Path,
    directory: Path | None,
    resume: Path | None,
    device: str,
    config: str,
    seed: int,
    ranks: Ranks = SINGLE,
) -> Run:
    """Make the folder of a run, or open the one to resume; seed what draws random numbers; note the environment.

    Args:
        root: folder below which an unnamed run gets a folder named by the time; `point_latest` is for when it is sound.
        directory: folder for a new run; it must be empty or not exist.
        resume: folder of an earlier run to go on with.
        device: "auto", "cpu", "cuda" or "cuda:N".
        config: the configuration as YAML, kept as `config.yaml`.
        seed: for torch's initial weights and whatever a library draws by itself.
        ranks: the processes that train together; the leader makes the folder and tells the others its name.

    Raises:
        FileExistsError: the folder for a new run holds something.
        FileNotFoundError: the run to resume does not exist.
        ValueError: the device is not there.
        SystemExit: one of these came to the leader, and this process is another.
    """
    chosen = choose_device(device, ranks.local_rank if ranks.world > 1 else None)

    def make() -> Path:
        folder = _run_folder(root, directory, resume)
        if resume is None:
            write_text(folder / "config.yaml", config)
        write_json(folder / "environment.json", environment(chosen))
        return folder

    folder = ranks.once(make)
    torch.manual_seed(seed)
    signal.signal(signal.SIGTERM, _exit_by_signal)
    _log_warnings_as_lines()
    return Run(folder, chosen, Clock(), resume is not None, ranks)


def point_latest(folder: Path) -> None:
    """Let the link `latest` beside a run's folder lead to it."""
    part = folder.parent / f".latest-{folder.name}"
    part.symlink_to(folder.name)
    part.replace(folder.parent / "latest")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the program with status 1 and one line for an error that its message explains.

    Among several ranks the line says which one it is. With MEDSPEED_TRACEBACK set in the environment the traceback is
    shown instead.
    """
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    who = f"rank {os.environ.get('RANK', '?')} of {os.environ['WORLD_SIZE']}: " if several else ""
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (ValueError, OSError, FloatingPointError, torch.OutOfMemoryError) as error:
        if os.environ.get("MEDSPEED_TRACEBACK"):
            raise
        hint = "(MEDSPEED_TRACEBACK=1 shows where it was raised)"
        tqdm.write(f"{who}error: {error}{' ' if several else chr(10)}{hint}", file=sys.stderr)
        raise SystemExit(1) from None
    except Exception as error:
        if several:  # the traceback that follows may be lost among those of the others
            tqdm.write(f"{who}{type(error).__name__}: {error}", file=sys.stderr)
        raise


def environment(device: torch.device) -> dict[str, Any]:
    """Return what a number of this run depends on: hardware, versions, command, git revision."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "command": sys.argv,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,  # type: ignore[no-untyped-call]
        "versions": versions,
        "git": git_revision(),
    }


def git_revision() -> str | None:
    """Return the commit of the code, with "+changes" where files differ from it, or None outside a repository."""
    here = Path(__file__).parent
    commands = (["git", "rev-parse", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"])
    try:
        revision, changes = (
            subprocess.run(command, cwd=here, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
            for command in commands
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return revision + ("+changes" if changes else "")


def keep_freed_memory(keep: bool = True) -> bool:
    """Let the C library keep freed memory instead of giving it back; return whether it could.

    By default each large tensor is mapped anew from the operating system, which fills it with zeros page by page when
    it is first touched: a fifth to a third of a SegResNet's training step on two CPU cores. With this, a process never
    shrinks below its peak. Only the GNU C library knows it; elsewhere nothing happens.

    Args:
        keep: False goes back to the library's defaults.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    values = {
        _M_MMAP_MAX: 0 if keep else _MMAP_MAX_DEFAULT,
        _M_TRIM_THRESHOLD: _NEVER_TRIM if keep else _TRIM_DEFAULT,
        _M_TOP_PAD: _GROW_BY if keep else _PAD_DEFAULT,
    }
    return all(mallopt(name, value) == 1 for name, value in values.items())


def peak_memory() -> int:
    """Return the most memory that this process has had at once, bytes (its resident set).

    Linux hands getrusage's figure on to children, which would begin with the peak of the process that started them.
    """
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.is_file() else ():  # a sandbox may leave VmHWM out
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def free_memory() -> int:
    """Return the bytes that this process may still take: of the machine, and of a container around it."""
    return min([psutil.virtual_memory().available, *cgroup_free()])


def cgroup_free(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Return the bytes that each memory limit on this process, or on a container around it, leaves; v2 and v1.

    Cached file pages count as used there, but give way when memory is needed.
    """
    if not membership.is_file():
        return []
    free = []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names, page_cache = root, ("memory.max", "memory.current"), "inactive_file"
        elif "memory" in controllers.split(","):
            top, page_cache = root / "memory", "total_inactive_file"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = top / path.lstrip("/")
        for group in (folder, *folder.parents):
            free += _left_in(group, names, page_cache)
            if group == top:
                break
    return free


def _run_folder(root: Path, directory: Path | None, resume: Path | None) -> Path:
    if resume is not None:
        if not (resume / "config.yaml").is_file():
            raise FileNotFoundError(f"{resume}: no run to resume (config.yaml is missing)")
        return resume
    if directory is None:
        stamp = root / time.strftime("%Y%m%d-%H%M%S")
        directory = next(each for n in range(1000) if not (each := Path(f"{stamp}-{n}" if n else stamp)).exists())
    if directory.exists() and any(directory.iterdir()):
        raise FileExistsError(f"{directory}: the run folder is not empty; choose another, or --resume {directory}")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def _exit_by_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _log_warnings_as_lines() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[_TqdmHandler()], force=True)
    # MONAI's LoadImage tries a DICOM reader for GPUs wherever pydicom is installed, and warns; it is not used here.
    logging.getLogger("monai.data.nvimgcodec_pydicom_plugin").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "NvImgCodecPydicomReader", UserWarning)


class _TqdmHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


def _left_in(group: Path, names: tuple[str, str], page_cache: str) -> list[int]:
    limit, used = (group / name for name in names)
    if not (limit.is_file() and used.is_file()):
        return []
    most = limit.read_text().strip()
    if most == "max":
        return []
    statistics = group / "memory.stat"
    lines = statistics.read_text().splitlines() if statistics.is_file() else []
    cached = next((int(line.split()[1]) for line in lines if line.split()[0] == page_cache), 0)
    return [max(0, int(most) - int(used.read_text()) + cached)]
