"""Synthetic data where there are no others: drawn by a program of `data_scripts`, in a process of its own."""

import subprocess
import sys
from pathlib import Path

from medspeed.common.console import hides_bar


def make_synthetic(folder: Path, script: str, *flags: str) -> Path:
    """Return the folder of a synthetic set; it is made where it is not whole yet.

    Args:
        folder: where the set goes. A whole one is left as it is, an unfinished one is finished.
        script: module of `data_scripts`, such as "make_phantoms".
        flags: of that program, but for `--to`.

    Raises:
        OSError: the program failed; it has said why on stderr.
    """
    if any((folder / name).is_file() for name in ("dataset.json", "slides.json")):  # written last
        return folder
    command = [sys.executable, "-P", "-m", f"medspeed.data_scripts.{script}", *flags, "--to", str(folder)]
    command += ["--quiet"] if hides_bar() else []
    status = subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode
    if status:
        raise OSError(f"{folder}: {' '.join(command[3:])} failed with status {status}; see its message above")
    return folder
