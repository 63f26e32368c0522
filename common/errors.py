"""What a program says that ends, or warns: one line that a user understands, safe for any terminal."""

import logging
import re
import sys
import threading
import warnings

from tqdm import tqdm

from medspeed.common.files import printable

# Errors of torch, numpy and Python that a user can do something about.
_REMEDIES = {
    r"MemoryError|an't allocate memory|Unable to allocate|out of memory|[Ss]torage size calculation overflowed|"
    r"could not create a primitive$|can't start new thread":  # oneDNN's word for it, and Python's
        "there is not so much memory: lower --batch_size, --crop_size or --windows.size, or take a smaller network",
    r"shared memory|/torch_\d+":
        "/dev/shm is too small for batches on their way: enlarge it (docker run --shm-size 2g), or lower --workers",
    r"DataLoader worker":
        "a process that loads cases was killed, as a rule for want of memory: lower --workers, or end other programs",
}  # fmt: skip


def explained(error: Exception) -> str | None:
    """Return the line for an error that it explains, or None for one that only a traceback does."""
    if isinstance(error, (RuntimeError, MemoryError)):
        text = f"{type(error).__name__}: {error}"
        remedy = next((remedy for sign, remedy in _REMEDIES.items() if re.search(sign, text)), None)
        return remedy and printable(f"{text.splitlines()[0]}; {remedy}", "\n")
    return printable(str(error), "\n") if isinstance(error, (ValueError, OSError, FloatingPointError)) else None


def log_warnings_as_lines() -> None:
    """Let warnings, and what ends a thread, be lines that break no progress bar."""
    threading.excepthook = _explain_thread
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[_TqdmHandler()], force=True)
    # MONAI's LoadImage tries a DICOM reader for GPUs wherever pydicom is installed, and warns; it is not used here.
    logging.getLogger("monai.data.nvimgcodec_pydicom_plugin").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "NvImgCodecPydicomReader", UserWarning)


class _TqdmHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


def _explain_thread(ended: threading.ExceptHookArgs) -> None:
    """Say in a line what ended a thread, such as TensorBoard's on a full disk, where that explains it."""
    line = explained(ended.exc_value) if isinstance(ended.exc_value, Exception) else None
    if line is None:
        threading.__excepthook__(ended)
    else:
        tqdm.write(f"error in a thread: {line}", file=sys.stderr)
