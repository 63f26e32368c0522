"""The ground floor of every program: its processes, the folder, environment and errors of a run."""

import io
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import metadata
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, though not listed

from medspeed.common.clock import Clock
from medspeed.common.console import Kind, explained, log_warnings_as_lines, say, wants_traceback
from medspeed.common.files import hold, names_folder, printable, read_object, release, write_json, write_text
from medspeed.common.ranks import SILENT_SECONDS, SINGLE, Ranks, Watch, choose_device, torchrun_place
from medspeed.common.trackers import Trackers

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # a scheduler's, and a terminal's that is closed
# The watch judges whether a rank is dead; these limits only have to be longer than any honest work.
_STEP_LIMIT = timedelta(minutes=30)  # gradients, sums: the ranks differ by a checkpoint at most
_CONTROL_LIMIT = timedelta(hours=24)  # waiting for what one rank does alone: preparing cases, exporting
# What gloo says when another rank is gone; it has no error of its own for that.
_LOST = ("Connection closed", "Connection reset", "Connection refused", "Broken pipe", "Timed out", "timeout")
_PACKAGES = ("torch", "monai", "numpy", "nibabel", "onnx", "onnxruntime", "tensorrt", "tensorrt-rtx", "isal")


@dataclass(frozen=True)
class Run:
    """One run: where it writes, what it runs on, and its clock."""

    directory: Path  # holds all the run writes; that of other ranks than the leader need not exist
    device: torch.device  # where the network computes
    clock: Clock
    resumed: bool  # whether the folder existed before as an unfinished run
    ranks: Ranks = SINGLE  # the processes that train together
    trackers: Trackers = field(default_factory=Trackers)  # where curves and files go besides

    @property
    def planned(self) -> bool:
        """Whether it goes on with the plan of its first start; a FileNotFoundError says that this is gone."""
        plan = self.directory / "plan.json"
        if self.resumed and not plan.is_file() and any((self.directory / "checkpoints").glob("epoch-*")):
            raise FileNotFoundError(f"{plan}: missing beside checkpoints; restore it, or start a new run with --init")
        return self.resumed and plan.is_file()

    def say(self, line: str, kind: Kind = "note") -> None:
        """Keep a line in `run.log`, and print it as `--quiet` and `--verbose` allow; only the leader does."""
        if not self.ranks.leader:
            return
        line = printable(line, "\n")
        with names_folder(self.directory), (self.directory / "run.log").open("a", encoding="utf-8") as log:
            log.write(line + "\n")
        say(line, kind)


@contextmanager
def join_ranks(device: str) -> Iterator[Ranks]:
    """Join the processes that torchrun started, for as long as the block runs; without torchrun there is one.

    On CUDA, rank n of a host computes on the device cuda:n and talks over NCCL; on the CPU all is gloo.

    Raises:
        ValueError: the device is not there, or a numbered one was asked for.
        ConnectionError: another rank was lost.
    """
    rank, world, local_rank = torchrun_place()
    if local_rank is None:
        yield SINGLE
        return
    chosen = choose_device(device)
    watch = None
    try:
        backend, own = ("cpu:gloo,cuda:nccl", chosen) if chosen.type == "cuda" else ("gloo", None)
        dist.init_process_group(backend, timeout=_STEP_LIMIT, device_id=own)
        control = dist.new_group(backend="gloo", timeout=_CONTROL_LIMIT)
        host, port, limit = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2 * SILENT_SECONDS
        store = TCPStore(host, port, world, False, timedelta(seconds=limit), False)  # a client's own connection
        watch = Watch(PrefixStore("medspeed-watch", store), rank, world)
        ranks = Ranks(rank, world, control, watch)
        yield ranks
        ranks.leave()
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or any(sign in str(error) for sign in _LOST)):
            raise
        reason = re.sub(r"^\[[^]]*\.cc:\d+\] ", "", str(error).split("\n")[0])  # without gloo's place in its source
        hint = watch.hint() if watch is not None else "the ranks had not connected yet"
        raise ConnectionError(f"lost the other ranks ({reason}); {hint}") from error
    finally:
        if watch is not None:
            watch.stop()
    dist.destroy_process_group()


def open_run(
    root: Path, directory: Path | None, resume: Path | None, device: str, config: str, seed: int, ranks: Ranks = SINGLE
) -> Run:
    """Make the folder of a run, or open the one to resume; seed torch and note the environment.

    A new run has an empty folder: `directory`, or one below `root` that is named by the time. It keeps `config` as
    `config.yaml`. The leader makes the folder and tells the other ranks its name.

    Raises:
        FileExistsError: the folder for a new run holds something.
        FileNotFoundError: the run to resume does not exist.
        BlockingIOError: another process trains in it.
        ValueError: the device is not there.
    """
    chosen = choose_device(device)

    def make() -> Path:
        folder = _run_folder(root, directory, resume)
        hold(folder / ".lock")
        with ExitStack() as failed:
            failed.callback(release, folder / ".lock")
            for part in folder.glob(".part-????????-*"):  # of a process that was killed
                part.unlink(missing_ok=True)
            if resume is None:
                failed.callback((folder / "config.yaml").unlink, missing_ok=True)
                write_text(folder / "config.yaml", config)
            path, now = folder / "environment.json", environment(chosen)
            began = read_object(path, "remove it") if resume is not None and path.is_file() else now
            if any(began.get(name) != now[name] for name in ("git", "versions")):
                say(f"{path}: the run last had another version (git {began.get('git')}): steps may differ", "warning")
            write_json(path, now)
            failed.pop_all()
        return folder

    folder = ranks.once(make)
    if ranks.watch is not None:
        ranks.watch.hint = lambda: how_to_go_on(folder)
    torch.manual_seed(seed)
    return Run(folder, chosen, Clock(is_our_program()), resume is not None, ranks)


def how_to_go_on(folder: Path) -> str:
    """Return where the last checkpoint and the best weights of a run are, and the command that goes on."""
    last, best = folder / "checkpoints" / "last", folder / "best.safetensors"
    found = f"the last checkpoint is {last} -> {last.readlink()}; " if last.is_symlink() else ""
    found += f"the best weights are {best}; " if best.is_file() else ""
    if not is_our_program():
        return f"{found}resume with medspeed.train(APP, resume={str(folder)!r})"
    program = sys.argv[0].split() if sys.argv[0].startswith("medspeed ") else ["python", sys.argv[0]]
    by = f"by torchrun with {n} processes:" if (n := os.environ.get("WORLD_SIZE", "1")) != "1" else "with"
    return f"{found}resume {by} {shlex.join([*program, '--resume', str(folder)])}"


def is_our_program() -> bool:
    """Return whether this process is a training by its command line, not somebody's own program that calls one."""
    program, apps = Path(sys.argv[0]).resolve(), Path(__file__).resolve().parents[1] / "apps"
    return sys.argv[0].startswith("medspeed train ") or (program.name, program.parent.parent) == ("train.py", apps)


def take_signals(numbers: Sequence[int], handler: Callable[[int, FrameType | None], None]) -> ExitStack:
    """Handle signals, but for ignored ones, as SIGHUP is under nohup; closing what is returned gives them back."""
    taken = ExitStack()
    if threading.current_thread() is threading.main_thread():  # Python allows it in no other, such as a server's
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                taken.callback(signal.signal, number, signal.signal(number, handler) or signal.SIG_DFL)
    return taken


def exit_by_signal(number: int, frame: FrameType | None) -> None:
    """End the program as an error does, with the status that tells the signal: 143 for SIGTERM."""
    sys.exit(128 + number)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the program with status 1 and one line for an error that its message explains; a warning is a line too.

    Among several ranks the line says which one it is. With `--verbose` the traceback is shown instead.
    """
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    who = f"rank {os.environ.get('RANK', '?')} of {os.environ['WORLD_SIZE']}: " if several else ""
    if isinstance(sys.stdout, io.TextIOWrapper):  # what its encoding lacks must not end a run that is done
        with suppress(OSError):  # it is closed, or a pipe that nobody reads: printing will say so, if it matters
            sys.stdout.reconfigure(errors="backslashreplace")
    log_warnings_as_lines()
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        line = explained(error)
        if line is None and several:  # the traceback that follows may be lost among those of the others
            say(f"{who}{type(error).__name__}: {error}", "error")
        if line is None or wants_traceback():
            raise
        say(f"{who}error: {line}{' ' if several else chr(10)}(--verbose shows the traceback)", "error")
        raise SystemExit(1) from None


def environment(device: torch.device) -> dict[str, Any]:
    """Return what a number of this run depends on: hardware, versions, command, and the git revision of the code.

    It has "+changes" where files differ from it, and is None outside a repository.
    """
    info, here, quiet, revision = Path("/proc/cpuinfo"), Path(__file__).parent, subprocess.DEVNULL, None
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+changes"]
    model = re.search(r"model name\s*: (.*)", info.read_text()) if info.is_file() else None
    with suppress(OSError, subprocess.SubprocessError):  # the second: of a package within somebody else's repository
        asked: dict[str, Any] = {"cwd": here, "stderr": quiet, "text": True, "timeout": 10}
        subprocess.check_output(["git", "ls-files", "--error-unmatch", Path(__file__).name], **asked)
        revision = subprocess.check_output(command, **asked).strip()
    return {
        "command": sys.argv,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": model[1].strip() if model else platform.processor(),
        "cores": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,  # type: ignore[no-untyped-call]
        "versions": {each: one.version for each in _PACKAGES for one in islice(metadata.distributions(name=each), 1)},
        "git": revision,
    }


def _run_folder(root: Path, directory: Path | None, resume: Path | None) -> Path:
    if resume is not None:
        if not (resume / "config.yaml").is_file():
            raise FileNotFoundError(f"{resume}: no run to resume (config.yaml is missing)")
        if (resume / "fold-0").is_dir():
            raise FileNotFoundError(f"{resume}: no run but a folder of folds; repeat the command `medspeed folds`")
        return resume
    if directory is None:
        stamp = root / time.strftime("%Y%m%d-%H%M%S")
        directory = next(each for n in range(1000) if not (each := Path(f"{stamp}-{n}" if n else stamp)).exists())
    if str(directory).encode(errors="ignore").decode() != str(directory):
        raise ValueError(f"{directory}: the name or the locale is not UTF-8: choose another --run, or set PYTHONUTF8=1")
    if directory.exists() and any(each.name != ".lock" for each in directory.iterdir()):  # of a start that was killed
        resumed = f", or --resume {directory}" if (directory / "config.yaml").is_file() else ""
        raise FileExistsError(f"{directory}: the run folder is not empty; choose another{resumed}")
    directory.mkdir(parents=True, exist_ok=True)
    return directory
