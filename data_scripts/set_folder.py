"""A folder that a set of files is made in: claimed before, whole once its list of contents is there.

The list (a JSON file) is written last, so that a folder that has one is whole. Until then `unfinished.json` holds the
parameters: a second run with the same ones goes on where the first one stopped, others are refused.
"""

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tqdm import tqdm

from common.files import write_json

Parameters = dict[str, str | int | None]
MARKER = "unfinished.json"


def claim(folder: Path, whole: str, parameters: Parameters) -> None:
    """Mark a folder as the place of the set with these parameters.

    Args:
        folder: new, empty, or holding this very set, whole or unfinished.
        whole: name of the JSON file that a whole set has, with the parameters under "phantom".
        parameters: all that decides the set's bytes.

    Raises:
        ValueError: the folder is a file, or holds something else.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: name a folder to write the set to")
    held = _held(folder, whole)
    if held == parameters:
        return
    if held is not None:
        changed = ", ".join(f"{k} {held.get(k)!r} instead of {v!r}" for k, v in parameters.items() if held.get(k) != v)
        raise ValueError(f"{folder} holds another set ({changed}): name another folder, or delete that one")
    # hidden files are no content: a killed run may leave the part it was writing, a desktop its own notes
    others = sorted(p.name for p in folder.iterdir() if not p.name.startswith(".")) if folder.exists() else []
    if others:
        raise ValueError(f"{folder} holds other files ({others[0]}): name a new or empty folder")
    write_json(folder / MARKER, parameters)


def on_all_cores(
    make: Callable[[int], None], indices: Sequence[int], most: int, description: str, unit: str, progress: bool
) -> None:
    """Call `make` for each index on all cores, `most` at a time; the first failure stops the rest and is raised."""
    with ThreadPoolExecutor(max(1, min(os.cpu_count() or 1, len(indices), most))) as pool:
        jobs = [pool.submit(make, index) for index in indices]
        try:
            for job in tqdm(as_completed(jobs), description, len(jobs), unit=unit, disable=not progress):
                job.result()
        finally:
            for job in jobs:
                job.cancel()


def _held(folder: Path, whole: str) -> Parameters | None:
    """Return the parameters of the set in a folder; None where there is none of ours."""
    if (folder / whole).exists():
        listed = _read(folder / whole)
        held = listed.get("phantom") if listed else None
        return held if isinstance(held, dict) else None
    return _read(folder / MARKER)


def _read(path: Path) -> Parameters | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None
