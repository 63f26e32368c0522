"""What the programs that download, convert and draw data share. They start at once: none loads torch or MONAI."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from medspeed.common.console import hides_bar, say
from medspeed.common.files import flush_to_disk, hold, read_object, release, write_json

Item = TypeVar("Item")

MARKER = "unfinished.json"


def run_program(name: str, work: Callable[[], str | int], status: int = 2) -> int:
    """Do a program's work, which returns its last line or exit status; return the status: `status` for an error."""
    try:
        done = work()
    except (ValueError, OSError) as error:
        print(f"{name}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return status
    except KeyboardInterrupt:
        print(f"{name}: interrupted; run the same command again", file=sys.stderr)
        return 130
    if isinstance(done, int):
        return done
    say(done, "result")
    return 0


def on_each(items: Sequence[Item], work: Callable[[Item], None], title: str, most: int) -> None:
    """Do some work for each item, on all cores but `most` at a time, under a progress bar; an error stops the rest."""
    workers, hidden = min(os.cpu_count() or 1, most), hides_bar(not items)
    with ThreadPoolExecutor(workers) as pool:  # tqdm's own would load notebook's bars
        list(tqdm(pool.map(work, items), title, len(items), unit="case", disable=hidden))


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield the place to make a folder in, which appears when the block ends, or not at all after an error.

    The place has the folder's name, in a hidden folder beside it; what a killed run has left there is removed.
    """
    scratch = folder.with_name(f".{folder.name}.unfinished")
    scratch.mkdir(parents=True, exist_ok=True)
    hold(scratch / ".lock")
    try:
        shutil.rmtree(place := scratch / folder.name, ignore_errors=True)
        yield place
        for path in (place, *place.rglob("*")):
            flush_to_disk(path)
        place.rename(folder)
        flush_to_disk(folder.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        release(scratch / ".lock")


def fill(
    whole: Path,
    parameters: dict[str, Any],
    items: Sequence[Sequence[Path]],
    make: Callable[[int], None],
    listing: Callable[[], dict[str, Any]],
    most: int,
) -> Path:
    """Make the items of a set whose files are missing, `most` at a time, then its list; return the folder.

    The list, `whole`, is written last, so that a folder that has it is whole. Until then `unfinished.json` holds the
    parameters: a second run with the same ones goes on where the first one stopped, others are refused. They are all
    that decides the set's bytes, a "seed" too, and are kept in the list under "phantom". `make` writes the files of the
    item of an index, the same each time, from several threads; `listing` returns the rest of the list.
    """
    if parameters["seed"] < 0:
        raise ValueError(f"--seed {parameters['seed']}: must be 0 or more")
    _claim(whole, parameters)
    todo = [item for item, files in enumerate(items) if not all(path.exists() for path in files)]
    on_each(todo, make, f"drawing phantoms ({parameters['kind']})", most)
    if todo or not whole.exists():
        write_json(whole, {**listing(), "synthetic": True, "phantom": parameters})
    if (marker := whole.with_name(MARKER)).exists():  # not where the folder may only be read
        marker.unlink()
    return whole.parent


def _claim(whole: Path, parameters: dict[str, Any]) -> None:
    """Mark a folder as the place of the set with these parameters; ValueError where it holds something else."""
    folder, marker = whole.parent, whole.with_name(MARKER)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: pass a folder for the dataset")
    held: Any = None
    with suppress(FileNotFoundError, ValueError):  # what is no JSON object is another file
        held = read_object(whole).get("phantom") if whole.exists() else read_object(marker)
    if held == parameters:
        return
    if isinstance(held, dict) and held:
        changed = ", ".join(f"{k} {held.get(k)!r} instead of {v!r}" for k, v in parameters.items() if held.get(k) != v)
        raise ValueError(f"{folder} contains another dataset ({changed}): choose another folder, or delete it")
    # hidden files are no content: a killed run may leave the part it was writing, a desktop its own notes
    others = sorted(p.name for p in folder.glob("[!.]*"))
    if others:
        raise ValueError(f"{folder} contains other files ({others[0]}): choose a new or empty folder")
    write_json(marker, parameters)
