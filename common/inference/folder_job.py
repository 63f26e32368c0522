"""One resumable job over the items of a folder: read, compute and write overlap, and each finished item has a record.

The record of an item is written twice: before its first output, so that outputs can be told from foreign files, and,
whole, after its last one. It vouches for the outputs of its own weights, options and input files, and for no others.
"""

import errno
import json
import os
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from tqdm import tqdm

from common.files import locked, part_ending, printable, read_object, write_json
from common.ranks import torchrun_place
from common.run import wait_for_all

Source = TypeVar("Source")
Read = TypeVar("Read")
Computed = TypeVar("Computed")
Record = dict[str, Any]

BAD_INPUT = (ValueError, OSError)
IN_FLIGHT = 3  # items in memory at once: one read, one computed, one written
_VERSION = 2  # raise when outputs or records change for the same input, weights and options


@dataclass(frozen=True)
class Item(Generic[Source]):
    """One input of a job, and where what comes out of it lies.

    Args:
        name: what it is called in lines and tables.
        source: what it is read from: a path, a series.
        files: the input's files; when one of them changes, the item is done anew.
        outputs: the files that a finished item has.
        record: its record, which is no output.
        optional: outputs that runs with other options may have left.
    """

    name: str
    source: Source
    files: tuple[Path, ...]
    outputs: tuple[Path, ...]
    record: Path
    optional: tuple[Path, ...] = ()

    @property
    def leavings(self) -> tuple[Path, ...]:
        """All that any run may have left of it."""
        return (*self.outputs, *self.optional, self.record)

    def stamp(self) -> list[int]:
        """Return numbers that change when its files do: their count, bytes, and the latest change in ns.

        Raises:
            ValueError: a file is gone.
        """
        try:
            found = [file.stat() for file in self.files]
        except OSError as error:  # its message would hold the path, and with it perhaps the patient's name
            raise ValueError(f"{self.name}: a file of it cannot be read ({error.strerror}): copy it again") from None
        return [len(found), sum(each.st_size for each in found), max(each.st_mtime_ns for each in found)]


@dataclass(frozen=True)
class FolderJob(Generic[Source, Read, Computed]):
    """What is done with the items of a folder; it can be killed at any moment and started again.

    Args:
        kind: what an item is called in lines, "scan" or "slide".
        folder: where the outputs go.
        items: those of all processes; under torchrun each process takes its share.
        identity: all but the item that decides what comes out: weights, model, options. JSON must take it.
        read: from an item to what is computed on; in a thread of its own.
        compute: from that to what is written; in the calling thread.
        write: writes the outputs and returns what the record is to hold; in a thread of its own.
        line: from a record to the line that is printed about it.
        tables: told, at the end, the records of all finished items by name, those of other processes among them; no
            processes are in it at once, and the last one finds all.
        table_files: what `tables` writes.
    """

    kind: str
    folder: Path
    items: Sequence[Item[Source]]
    identity: Record
    read: Callable[[Item[Source]], Read]
    compute: Callable[[Item[Source], Read], Computed]
    write: Callable[[Item[Source], Computed], Record]
    line: Callable[[Record], str]
    tables: Callable[[dict[str, Record]], None] | None = None
    table_files: Sequence[Path] = ()

    def share(self) -> Sequence[Item[Source]]:
        """Return the items of this process."""
        rank, ranks, _ = torchrun_place()
        return self.items[rank::ranks]

    def unfinished(self) -> list[Item[Source]]:
        """Return the items of this process that are to be done, and say how many are kept.

        Raises:
            FileExistsError: a table is there that no run into this folder wrote.
            OSError: the output folder cannot be written.
        """
        share, lock = self.share(), self.folder / ".lock"
        with locked(lock):  # a folder that cannot be written is told now
            ours = set(lock.read_text(encoding="utf-8").split())
            for path in self.table_files:
                if path.name not in ours and path.exists():
                    raise _foreign(path)
            lock.write_text(" ".join(ours | {path.name for path in self.table_files}), encoding="utf-8")
            left = [item for item in share if self.finished(item) is None]
        if kept := len(share) - len(left):
            tqdm.write(f"{kept} {self.kind}s kept: they were finished with the same weights and options")
        return left

    def run(self, items: Sequence[Item[Source]]) -> int:
        """Do the items anew, then the tables; wait for the other processes.

        Returns:
            The exit status: 1 where an item could not be done (the others are done all the same), else 0.

        Raises:
            FileExistsError: an output is there that no record tells of: it is not this program's.
        """
        _clear(items)
        try:
            failed = self.work(items)
        finally:
            if self.tables is not None:
                with locked(self.folder / ".lock"):
                    self.tables({item.name: record for item in self.items if (record := self.finished(item))})
        if failed:
            names = printable(", ".join(failed))
            tqdm.write(f"{len(failed)} of {len(self.share())} {self.kind}s were set aside: {names}")
        wait_for_all()
        return 1 if failed else 0

    def work(self, items: Sequence[Item[Source]]) -> list[str]:
        """Do the items in order, three in flight; return the names of those that could not be done.

        No more than one item waits between the threads, so that memory is bounded whichever of them is slow. An
        error costs its item alone. Only an OSError of writing is raised, as of a full disk (but not a name that is too
        long); what was written until then is whole.
        """
        failed: list[str] = []
        writing: list[Future[None]] = []
        bar = tqdm(total=len(items), unit=self.kind, disable=len(items) < 2)
        with bar, ThreadPoolExecutor(1, "read") as reader, ThreadPoolExecutor(1, "write") as writer:
            coming = [reader.submit(self._read, item) for item in items[:1]]
            for number, item in enumerate(items):
                coming += [reader.submit(self._read, following) for following in items[number + 1 : number + 2]]
                computed = self._compute(item, coming.pop(0))
                behind, writing = writing, [writer.submit(self._write, item, computed, failed)]
                del computed  # the thread has it now
                for done in behind:
                    done.result()
                bar.update()
            for done in writing:
                done.result()
        return failed

    def finished(self, item: Item[Source]) -> Record | None:
        """Return the record of an item that is finished as it is now, with all its outputs; else None."""
        try:
            record = json.loads(item.record.read_text(encoding="utf-8"))
            fits = isinstance(record, dict) and record.get("mark") == self._mark(item)
        except BAD_INPUT:  # there is none, or it is damaged
            return None
        return record if fits and all(path.is_file() for path in item.outputs) else None

    def _mark(self, item: Item[Source]) -> Record:
        """Return all that decides what comes out for an item as it is now, as JSON gives it back."""
        mark: Record = json.loads(json.dumps({**self.identity, "version": _VERSION, "input": item.stamp()}))
        return mark

    def _read(self, item: Item[Source]) -> tuple[Record, Read]:
        return self._mark(item), self.read(item)  # in this order: what changes from now on shows

    def _compute(self, item: Item[Source], coming: Future[tuple[Record, Read]]) -> tuple[Record, Computed] | Exception:
        try:
            mark, read = coming.result()
            return mark, self.compute(item, read)
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
            return error

    def _write(self, item: Item[Source], computed: tuple[Record, Computed] | Exception, failed: list[str]) -> None:
        record = computed if isinstance(computed, Exception) else self._written(item, *computed)
        if isinstance(record, Exception):
            failed.append(item.name)
            tqdm.write(f"set aside: {_why(item.name, record)}")
        else:
            tqdm.write(f"{printable(item.name)}: {self.line(record)}")

    def _written(self, item: Item[Source], mark: Record, computed: Computed) -> Record | Exception:
        begun = {"name": item.name, "outputs": [path.name for path in item.outputs]}
        try:
            write_json(item.record, {**begun, "begun": True})
            record = {**begun, **self.write(item, computed), "mark": mark}
            write_json(item.record, record)
        except Exception as error:
            if isinstance(error, OSError) and error.errno != errno.ENAMETOOLONG:
                raise
            return error
        return record


def _why(name: str, error: Exception) -> str:
    if os.environ.get("MEDSPEED_TRACEBACK"):
        traceback.print_exception(error)
    said = str(error)
    if not said or not isinstance(error, (*BAD_INPUT, torch.OutOfMemoryError)):
        said = f"{type(error).__name__}: {said}".split("\n")[0]
    return printable(said if name in said else f"{name}: {said}")


def _made(item: Item[Any]) -> set[str]:
    """Return the names of the outputs that an item's record tells of, begun or finished; all where it is damaged."""
    try:
        names = read_object(item.record).get("outputs")
    except OSError:
        return set()
    except ValueError:
        names = None
    return set(map(str, names)) if isinstance(names, list) else {path.name for path in item.leavings}


def _clear(items: Sequence[Item[Source]]) -> None:
    """Remove what earlier runs left of items that are done anew: no old output may pass for a new one."""
    made = [_made(item) for item in items]
    for item, ours in zip(items, made, strict=True):
        for path in item.outputs:
            if path.name not in ours and os.path.lexists(path):
                raise _foreign(path)
    own = {path.with_name(part_ending(path.name)) for item in items for path in item.leavings}
    for part in [part for folder in {path.parent for path in own} for part in folder.glob(".part-*")]:
        if part.with_name(part.name.split("-", 2)[-1]) in own:  # .part-RANDOM-NAME, of a process that was killed
            part.unlink(missing_ok=True)
    for item, ours in zip(items, made, strict=True):
        for path in item.leavings:  # the record last: until then it says whose the others are
            if path.name in ours or (ours and path == item.record):
                path.unlink(missing_ok=True)


def _foreign(path: Path) -> FileExistsError:
    return FileExistsError(f"{path}: is there, and was not written by a run into this folder: choose another --output")
