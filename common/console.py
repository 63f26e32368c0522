"""What a program prints: as much as `--quiet` and `--verbose` ask for, in lines that any user and terminal can take."""

import logging
import os
import re
import sys
import threading
import warnings
from contextlib import suppress
from functools import cache
from typing import Literal, TextIO, get_args

from tqdm import tqdm

from medspeed.common.files import printable

Kind = Literal["detail", "note", "warning", "error", "result"]
Verbosity = Literal["silent", "quiet", "normal", "verbose"]

_HIDDEN: dict[Verbosity, tuple[Kind, ...]] = {
    "silent": get_args(Kind), "quiet": ("detail", "note"), "normal": ("detail",), "verbose": ()
}  # fmt: skip
_COLOURS: dict[Kind, str] = {"warning": "\x1b[33m", "error": "\x1b[31m"}
_verbosity: Verbosity = "normal"  # of the process

# Errors of torch, numpy and Python that a user can do something about.
_REMEDIES = {
    r"MemoryError|an't allocate memory|Unable to allocate|out of memory|[Ss]torage size calculation overflowed|"
    r"could not create a primitive$|can't start new thread":  # oneDNN's word for it, and Python's
        "out of memory: lower the size of batches, crops, patches or windows, or use a smaller network",
    r"shared memory|/torch_\d+":
        "/dev/shm is too small for the batches in flight: enlarge it (docker run --shm-size 2g), or lower --workers",
    r"DataLoader worker \(pid":
        "a data-loading process was killed, usually for lack of memory: lower --workers, or stop other programs",
}  # fmt: skip


def set_verbosity(verbosity: Verbosity) -> Verbosity:
    """Choose what this process prints, and return what was chosen before; "silent" is nothing at all."""
    global _verbosity
    before, _verbosity = _verbosity, verbosity
    return before


def wants_traceback() -> bool:
    """Return whether errors come with their tracebacks: with `--verbose`."""
    return _verbosity == "verbose"


def hides_bar(hidden: bool = False) -> bool | None:
    """Return tqdm's `disable`: None shows the bar on a terminal alone; True where it is hidden, or output is quiet."""
    return True if hidden or _verbosity in ("silent", "quiet") else None


def say(line: str, kind: Kind = "note", stream: TextIO | None = None) -> None:
    """Print a line at once, without breaking a progress bar: an error to stderr, by default all else to stdout."""
    if kind in _HIDDEN[_verbosity]:
        return
    stream = stream or (sys.stderr if kind == "error" else sys.stdout)
    colour = _COLOURS.get(kind) if stream.isatty() and not os.environ.get("NO_COLOR") else None
    with suppress(OSError):  # a terminal that was closed
        tqdm.write(f"{colour}{line}\x1b[0m" if colour else line, file=stream)
        stream.flush()


say_once = cache(say)  # each line once in a process


def explained(error: Exception) -> str | None:
    """Return the line for an error that it explains, or None for one that only a traceback does."""
    if isinstance(error, (RuntimeError, MemoryError)):
        text = f"{type(error).__name__}: {error}"
        remedy = next((remedy for sign, remedy in _REMEDIES.items() if re.search(sign, text)), None)
        return remedy and printable(f"{text.splitlines()[0]}; {remedy}", "\n")
    if isinstance(error, OSError) and error.strerror:  # else Python shows its number, and the file last
        files = " -> ".join(str(file) for file in (error.filename, error.filename2) if file is not None)
        return printable(f"{files}: {error.strerror}" if files else error.strerror)
    return printable(str(error), "\n") if isinstance(error, (ValueError, OSError, FloatingPointError)) else None


def log_warnings_as_lines() -> None:
    """Let warnings, and errors that end a thread, be lines that break no progress bar."""
    threading.excepthook = _explain_thread
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[_LineHandler()], force=True)
    # MONAI's LoadImage tries a DICOM reader for GPUs wherever pydicom is installed, and warns; it is not used here.
    logging.getLogger("monai.data.nvimgcodec_pydicom_plugin").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "NvImgCodecPydicomReader", UserWarning)


class _LineHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record), "warning", sys.stderr)


def _explain_thread(ended: threading.ExceptHookArgs) -> None:
    """Print the error that ended a thread, such as TensorBoard's on a full disk, in one line where it is understood."""
    line = explained(ended.exc_value) if isinstance(ended.exc_value, Exception) else None
    if line is None:
        threading.__excepthook__(ended)
    else:
        say(f"error in a thread: {line}", "error")
