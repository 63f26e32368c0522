"""The folder of a run: made before anything long starts, and complete without the program that made it."""

import json
import logging
import os
import platform
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar

import psutil
import torch
from tqdm import tqdm

from common.files import write_json, write_text
from common.observe.timing import Clock

T = TypeVar("T")

_PACKAGES = ("torch", "monai", "numpy", "nibabel", "onnx", "onnxruntime", "tensorrt", "tensorrt-rtx", "isal")


class RunRanks(Protocol):
    """What a run needs to know of the processes that train together: `common.training.distributed.Ranks` is one."""

    @property
    def world(self) -> int:
        """Number of processes."""
        ...

    @property
    def local_rank(self) -> int:
        """Number of this process among those of its host."""
        ...

    @property
    def leader(self) -> bool:
        """Whether this process is the one that writes and speaks."""
        ...

    def once(self, make: Callable[[], T]) -> T:
        """Return what `make` returns on the leader; where it fails, every process ends."""
        ...


@dataclass(frozen=True)
class Run:
    """One run: where it writes, what it runs on, and its clock.

    Args:
        directory: folder that holds all the run writes.
        device: where the network computes.
        clock: seconds per stage.
        resumed: whether the folder existed before as an unfinished run.
        leader: whether this process is the one, of those that train together, that writes and speaks; the folder of
            the others has the same name, and on another host it need not exist.
    """

    directory: Path
    device: torch.device
    clock: Clock
    resumed: bool
    leader: bool = True

    def say(self, line: str) -> None:
        """Print a line without breaking a progress bar, and keep it in `run.log`; only the leader does."""
        if not self.leader:
            return
        tqdm.write(line)
        with (self.directory / "run.log").open("a", encoding="utf-8") as log:
            log.write(line + "\n")


def start_run(
    root: Path,
    directory: Path | None,
    resume: Path | None,
    device: str,
    config: str,
    seed: int,
    ranks: RunRanks | None = None,
) -> Run:
    """Make the folder of a run, or open the one to resume; seed what draws random numbers; note the environment.

    Args:
        root: folder below which an unnamed run gets a folder named by the time, with a link `latest`.
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
    several = ranks is not None and ranks.world > 1
    chosen = choose_device(device, ranks.local_rank if ranks is not None and several else None)

    def make() -> Path:
        folder = _run_folder(root, directory, resume)
        if resume is None:
            write_text(folder / "config.yaml", config)
        write_json(folder / "environment.json", environment(chosen))
        return folder

    folder = ranks.once(make) if ranks is not None else make()
    torch.manual_seed(seed)
    signal.signal(signal.SIGTERM, _exit_by_signal)
    _log_warnings_as_lines()
    return Run(folder, chosen, Clock(), resume is not None, ranks is None or ranks.leader)


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


def torchrun_place() -> tuple[int, int, int | None]:
    """Return this process's number, how many there are, and its number on its host, as torchrun says; 0, 1, None alone.

    For work that is only shared out; who must talk to the others joins them (`common.training.distributed`).
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return (int(os.environ["RANK"]), world, int(os.environ["LOCAL_RANK"])) if world > 1 else (0, 1, None)


def wait_for_all() -> None:
    """Under torchrun wait until every process has come here, for a day at most; else do nothing.

    torchrun ends all processes when one of them ends with an error: none may do so while others are still at work.
    """
    if torchrun_place()[1] > 1:
        torch.distributed.init_process_group("gloo", timeout=timedelta(days=1))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def choose_device(name: str, local_rank: int | None = None) -> torch.device:
    """Return the torch device of a name, where "auto" is the first CUDA device if there is one.

    Args:
        name: "auto", "cpu", "cuda" or "cuda:N".
        local_rank: number of this process among several on its host; it gets the CUDA device of that number.

    Raises:
        ValueError: the name is no device, or the device is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind not in {"cpu", "cuda"} or (number and not number.isdigit()):
        raise ValueError(f"device {name}: must be auto, cpu, cuda or cuda:N")
    if kind == "cuda" and local_rank is not None:
        if number:
            raise ValueError(f"device {name}: several ranks take one GPU each, by their number; use --device cuda")
        name, number = f"cuda:{local_rank}", str(local_rank)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and int(number or 0) >= count:
        raise ValueError(f"device {name}: {count} CUDA devices found; use --device cpu, or check the driver")
    if kind == "cuda":
        torch.cuda.set_device(int(number or 0))  # what asks for "the" GPU, as a synchronisation does, means this one
    return torch.device(name)


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


def append_json_line(path: Path, record: dict[str, Any]) -> None:
    """Append one record to a JSON-lines file."""
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(record, allow_nan=False) + "\n")


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSON-lines file; a last line that a crash cut short is left out."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def _run_folder(root: Path, directory: Path | None, resume: Path | None) -> Path:
    if resume is not None:
        if not (resume / "config.yaml").is_file():
            raise FileNotFoundError(f"{resume}: no run to resume (config.yaml is missing)")
        return resume
    if directory is None:
        return _folder_by_time(root)
    if directory.exists() and any(directory.iterdir()):
        raise FileExistsError(f"{directory}: the run folder is not empty; choose another, or --resume {directory}")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _folder_by_time(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    directory = next(folder for n in range(1000) if not (folder := root / (stamp + (f"-{n}" if n else ""))).exists())
    directory.mkdir()
    link = root / "latest"
    part = root / f".latest-{directory.name}"
    part.symlink_to(directory.name)
    part.replace(link)
    return directory


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.is_file()
        else []
    )
    return names[0] if names else platform.processor()


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
