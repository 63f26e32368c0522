"""One resumable job over the items of a folder: read, compute and write overlap, and each finished item has a record.

The record is written before the item's first output, so that outputs can be told from foreign files, and, whole, after
the last one. It vouches for the outputs of its own weights, options and input files, and for no others.
"""

import errno
import fcntl
import json
import os
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from tqdm import tqdm

from medspeed.common.console import hides_bar, say, wants_traceback
from medspeed.common.data.threads import thread_pool
from medspeed.common.files import locked, names_folder, part_ending, plural, printable, read_object, write_json
from medspeed.common.inference.predictors import let_go
from medspeed.common.ranks import torchrun_place, wait_for_all

Record = dict[str, Any]
Source = TypeVar("Source")
Read = TypeVar("Read")
Computed = TypeVar("Computed")

BAD_INPUT = (ValueError, OSError)
_VERSION = 9  # raise when outputs or records change for the same input, weights and options


@dataclass(frozen=True)
class Prediction:
    """Result of one scan or slide: the files written, and the record of measurements or detections and of seconds."""

    files: tuple[Path, ...]
    record: Record

    @property
    def volumes_ml(self) -> dict[str, float]:
        """Volume of each structure in ml; empty for a slide."""
        return {each["structure"]: each["volume_ml"] for each in self.record.get("measures", ())}


@dataclass(frozen=True)
class Predictions:
    """Results of the scans or slides of this process by name, earlier ones included, and the errors of the others."""

    done: dict[str, Prediction]
    failed: dict[str, str]

    @property
    def status(self) -> int:
        """Exit status of a command: 1 if a scan failed, otherwise 0."""
        return 1 if self.failed else 0


@dataclass(frozen=True)
class Item(Generic[Source]):
    """One input of a job, and where what comes out of it lies."""

    name: str  # in lines and tables
    source: Source  # what it is read from: a path, a series
    files: tuple[Path, ...]  # those of the input; when one of them changes, the item is done anew
    outputs: tuple[Path, ...]  # the files that a finished item has, besides its record
    record: Path
    optional: tuple[Path, ...] = ()  # outputs that runs with other options may have left

    @property
    def leavings(self) -> tuple[Path, ...]:
        """All that any run may have left of it."""
        return (*self.outputs, *self.optional, self.record)

    def stamp(self) -> list[int]:
        """Return count, bytes and times of change of its files, in ns; a ValueError says that one is gone."""
        try:
            found = [file.stat() for file in self.files]
        except OSError as error:  # its message would hold the path, and with it perhaps the patient's name
            raise ValueError(f"{self.name}: a file cannot be read ({error.strerror}): copy it again") from None
        changed = sum(each.st_mtime_ns + each.st_ctime_ns for each in found)  # copying tools set the first back
        return [len(found), sum(each.st_size for each in found), changed]


@dataclass(frozen=True)
class FolderJob(Generic[Source, Read, Computed]):
    """What is done with the items of a folder; it can be killed at any moment and started again."""

    kind: str  # "scan" or "slide", for the lines
    folder: Path  # of the outputs
    items: Sequence[Item[Source]]  # those of all processes; under torchrun each process takes its share
    identity: Record  # all but the item that decides what comes out, as JSON: weights, model, options
    read: Callable[[Item[Source]], Read]  # what is computed on; in one of the threads
    compute: Callable[[Item[Source], Read], Computed]  # what is written; in the calling thread, in the items' order
    write: Callable[[Item[Source], Computed], Record]  # writes the outputs, gives the record's content; in a thread
    line: Callable[[Record], str]  # about a record; a warning where that has something "uncertain"
    # told, at the end, the records of all finished items by name, one process after the other
    tables: Callable[[dict[str, Record]], None] | None = None
    table_files: Sequence[Path] = ()  # what `tables` writes
    threads: int = 1  # those that read, and as many that write
    need: Callable[[Item[Source]], int] = lambda item: 0  # bytes from when an item is read until it is written
    room: int = 0  # bytes that the items in memory may take together; one may be there in any case

    @property
    def in_flight(self) -> int:
        """The most items in memory at once: those read, those written, and one computed."""
        return 2 * self.threads + 1

    def share(self) -> Sequence[Item[Source]]:
        """Return the items of this process."""
        rank, ranks, _ = torchrun_place()
        return self.items[rank::ranks]

    def unfinished(self) -> list[Item[Source]]:
        """Return the items of this process that are to be done, and say how many are kept.

        An OSError says that the folder cannot be written, or that a table is there that no run into it wrote.
        """
        share, lock = self.share(), self.folder / ".lock"
        with names_folder(self.folder), locked(lock):  # a folder that cannot be written is told now
            ours, tables = lock.read_text(encoding="utf-8").split(), {path.name: path for path in self.table_files}
            _refuse(path for name, path in tables.items() if name not in ours and path.exists())
            with lock.open("a", encoding="utf-8") as stream:  # a process that is killed here leaves what stood there
                stream.writelines(f" {name}" for name in tables.keys() - ours)
            left = [item for item in share if self.finished(item) is None]
        if kept := len(share) - len(left):
            say(f"{plural(kept, self.kind)} already finished with the same weights and options: kept")
        return left

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Hold the folder with others of the same identity; a BlockingIOError says that another one holds it."""
        job, own = self.folder / ".job", json.dumps(self.identity, sort_keys=True)
        with job.open("a+") as stream:
            with names_folder(self.folder), locked(self.folder / ".lock"):
                try:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if job.read_text(encoding="utf-8") != own:
                        said = "in use by another process, with another model or options: wait, or choose another"
                        raise BlockingIOError(f"{self.folder}: {said} --output") from None
                except OSError:
                    pass  # a file system without locks
                else:
                    job.write_text(own, encoding="utf-8")
                    _remove_parts({*self.table_files}.union(*(item.leavings for item in self.items)))
                with suppress(OSError):
                    fcntl.flock(stream, fcntl.LOCK_SH)
            yield

    def run(self, items: Sequence[Item[Source]]) -> Predictions:
        """Do the items anew, then the tables; wait for the other processes, and return what became of this one's items.

        An OSError names an output that is there without a record, or the folder that another job is writing into.
        """
        with self._held():
            _clear(items)
            for table in self.table_files if items else ():  # its figures are of outputs that are gone
                table.unlink(missing_ok=True)
            try:
                failed = self.work(items)
                done = {one: self.finished(one) for one in self.share() if one.name not in failed}
                for name in [one.name for one, record in done.items() if record is None]:
                    failed[name] = printable(f"{name}: its files changed or its outputs vanished meanwhile: run again")
                    say(f"failed: {failed[name]}", "warning")
            finally:
                if self.tables is not None:
                    with locked(self.folder / ".lock"):
                        self.tables({item.name: record for item in self.items if (record := self.finished(item))})
        if names := printable(", ".join(failed)):
            say(f"{len(failed)} of {plural(len(self.share()), self.kind)} failed: {names}", "warning")
        wait_for_all()
        return Predictions({one.name: Prediction(one.outputs, found) for one, found in done.items() if found}, failed)

    def work(self, items: Sequence[Item[Source]]) -> dict[str, str]:
        """Do the items, computed in order; return why some could not be done, by name.

        An error costs its item alone. Only an OSError of writing is raised, but not that of a name that is too long.
        """
        failed: dict[str, str] = {}
        left = deque((item, self.need(item)) for item in items)
        coming: deque[tuple[Item[Source], Future[tuple[Record, Read]], int]] = deque()
        writing: dict[Future[None], int] = {}
        bar = tqdm(total=len(items), unit=self.kind, disable=hides_bar(len(items) < 2))
        with bar, thread_pool(self.threads, "read") as readers, thread_pool(self.threads, "write") as writers:
            while left or coming or writing:
                held = [*(need for *_, need in coming), *writing.values()]
                if left and (not held or (len(held) < self.in_flight and sum(held) + left[0][1] <= self.room)):
                    item, need = left.popleft()
                    coming.append((item, readers.submit(self._read, item), need))
                elif coming and coming[0][1].done():
                    item, read, need = coming.popleft()
                    writing[writers.submit(self._write, item, self._compute(item, read), failed)] = need
                    del read  # the thread has all now
                else:
                    busy: list[Future[Any]] = [*writing, *(read for _, read, _ in [*coming][:1])]
                    wait(busy, return_when=FIRST_COMPLETED)
                    del busy  # and all that it holds
                for done in [future for future in writing if future.done()]:
                    del writing[done]
                    done.result()
                    bar.update()
        return {item.name: failed[item.name] for item in items if item.name in failed}

    def finished(self, item: Item[Source]) -> Record | None:
        """Return the record of an item that is finished as it is now, with all its outputs; else None."""
        with suppress(*BAD_INPUT):  # there is none, or it is damaged
            record = read_object(item.record)
            if record.get("mark") == self._mark(item) and all(path.is_file() for path in item.outputs):
                return record
        return None

    def _mark(self, item: Item[Source]) -> Record:
        """Return all that decides what comes out for an item as it is now, as JSON gives it back."""
        return dict(json.loads(json.dumps({**self.identity, "version": _VERSION, "input": item.stamp()})))

    def _read(self, item: Item[Source]) -> tuple[Record, Read]:
        return self._mark(item), self.read(item)  # in this order: what changes from now on shows

    def _compute(self, item: Item[Source], coming: Future[tuple[Record, Read]]) -> tuple[Record, Computed] | Exception:
        read = None
        try:
            mark, read = coming.result()
            return mark, self.compute(item, read)
        except Exception as error:
            del read, coming  # the frame stays with the error
            let_go(error)
            return error

    def _write(self, item: Item[Source], computed: tuple[Record, Computed] | Exception, failed: dict[str, str]) -> None:
        record: Record = {"name": item.name, "outputs": [path.name for path in item.outputs]}
        try:
            if isinstance(computed, Exception):
                raise computed
            if self.finished(item) is None:  # else another process has done the same by now
                write_json(item.record, {**record, "begun": True})
            record |= {**self.write(item, computed[1]), "mark": computed[0]}
            write_json(item.record, record)
        except Exception as error:
            if error is not computed and isinstance(error, OSError) and error.errno != errno.ENAMETOOLONG:
                raise
            failed[item.name] = _why(item.name, error)
            say(f"failed: {failed[item.name]}", "warning")
        else:
            say(f"{printable(item.name)}: {self.line(record)}", "warning" if record.get("uncertain") else "note")


def _why(name: str, error: Exception) -> str:
    if wants_traceback():
        traceback.print_exception(error)
    if not (said := str(error)) or not isinstance(error, (*BAD_INPUT, torch.OutOfMemoryError)):
        said = f"{type(error).__name__}: {said}".split("\n")[0]
    return printable(said if name in said else f"{name}: {said}")


def _made(item: Item[Any]) -> list[Path]:
    """Return what an item's record tells of, and itself at the end; all leavings where it is damaged."""
    try:
        names = read_object(item.record).get("outputs")
    except OSError:
        return []
    except ValueError:
        names = None
    told = [*names, item.record.name] if isinstance(names, list) else [path.name for path in item.leavings]
    return [path for path in item.leavings if path.name in told]


def _clear(items: Sequence[Item[Source]]) -> None:
    """Remove what earlier runs left of items that are done anew: no old output may pass for a new one."""
    made = dict.fromkeys(path for item in items for path in _made(item))
    _refuse(path for item in items for path in item.outputs if path not in made and os.path.lexists(path))
    for path in made:
        path.unlink(missing_ok=True)  # the record last: until then it says whose the others are


def _remove_parts(leavings: Iterable[Path]) -> None:
    own = {path.with_name(part_ending(path.name)) for path in leavings}
    for part in [part for folder in {path.parent for path in own} for part in folder.glob(".part-*")]:
        if part.with_name(part.name.split("-", 2)[-1]) in own:  # .part-RANDOM-NAME, of a process that was killed
            part.unlink(missing_ok=True)


def _refuse(foreign: Iterable[Path]) -> None:
    if path := next(iter(foreign), None):
        raise FileExistsError(f"{path}: already exists, not written by a run into this folder: choose another --output")
