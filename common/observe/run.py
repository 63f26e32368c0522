"""The folder of a run: made before anything long starts, and complete without the program that made it."""

import json
import logging
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import psutil
import torch
from tqdm import tqdm

from common.files import write_json, write_text
from common.observe.timing import Clock

_PACKAGES = ("torch", "monai", "numpy", "nibabel", "onnx", "onnxruntime", "tensorrt", "tensorrt-rtx", "isal")


@dataclass(frozen=True)
class Run:
    """One run: where it writes, what it runs on, and its clock.

    Args:
        directory: folder that holds all the run writes.
        device: where the network computes.
        clock: seconds per stage.
        resumed: whether the folder existed before as an unfinished run.
    """

    directory: Path
    device: torch.device
    clock: Clock
    resumed: bool

    def say(self, line: str) -> None:
        """Print a line without breaking a progress bar, and keep it in `run.log`."""
        tqdm.write(line)
        with (self.directory / "run.log").open("a", encoding="utf-8") as log:
            log.write(line + "\n")


def start_run(root: Path, directory: Path | None, resume: Path | None, device: str, config: str, seed: int) -> Run:
    """Make the folder of a run, or open the one to resume; seed what draws random numbers; note the environment.

    Args:
        root: folder below which an unnamed run gets a folder named by the time, with a link `latest`.
        directory: folder for a new run; it must be empty or not exist.
        resume: folder of an earlier run to go on with.
        device: "auto", "cpu", "cuda" or "cuda:N".
        config: the configuration as YAML, kept as `config.yaml`.
        seed: for torch's initial weights and whatever a library draws by itself.

    Raises:
        FileExistsError: the folder for a new run holds something.
        FileNotFoundError: the run to resume does not exist.
        ValueError: the device is not there.
    """
    chosen = choose_device(device)
    if resume is not None:
        if not (resume / "config.yaml").is_file():
            raise FileNotFoundError(f"{resume}: no run to resume (config.yaml is missing)")
        directory = resume
    elif directory is None:
        directory = _folder_by_time(root)
    elif directory.exists() and any(directory.iterdir()):
        raise FileExistsError(f"{directory}: the run folder is not empty; choose another, or --resume {directory}")
    directory.mkdir(parents=True, exist_ok=True)
    if resume is None:
        write_text(directory / "config.yaml", config)
    write_json(directory / "environment.json", environment(chosen))
    torch.manual_seed(seed)
    signal.signal(signal.SIGTERM, _exit_by_signal)
    _log_warnings_as_lines()
    return Run(directory, chosen, Clock(), resumed=resume is not None)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the program with status 1 and one line for an error that its message explains.

    With MEDSPEED_TRACEBACK set in the environment the traceback is shown instead.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (ValueError, OSError, FloatingPointError, torch.OutOfMemoryError) as error:
        if os.environ.get("MEDSPEED_TRACEBACK"):
            raise
        tqdm.write(f"error: {error}\n(MEDSPEED_TRACEBACK=1 shows where it was raised)", file=sys.stderr)
        raise SystemExit(1) from None


def choose_device(name: str) -> torch.device:
    """Return the torch device of a name, where "auto" is the first CUDA device if there is one.

    Raises:
        ValueError: the name is no device, or the device is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind not in {"cpu", "cuda"} or (number and not number.isdigit()):
        raise ValueError(f"device {name}: must be auto, cpu, cuda or cuda:N")
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


def seeded(seed: int, *stream: int) -> np.random.Generator:
    """Return a numpy generator that depends on the seed and the numbers of the stream alone."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *stream])))


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


class _TqdmHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)
