"""Files that are never torn: written beside their place, flushed to the disk, then renamed into it."""

import csv
import fcntl
import hashlib
import json
import logging
import os
import socket
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_MAX_JSON = 2**28  # bytes
_HELD: dict[Path, int] = {}  # descriptors of locked files


@contextmanager
def names_folder(folder: Path) -> Iterator[None]:
    """Name the folder in an `OSError` of a block that names no file: writing to a full disk says only that it is."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(folder)
        raise


@contextmanager
def atomic_path(path: Path, flush: bool = True) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; on success it is renamed to `path`, on error removed.

    A reader sees the old file or the whole new one, never a part, also when the process is killed at any moment.
    The temporary name keeps the suffixes of `path`, since libraries choose the format by them. Without `flush` nobody
    waits for the disk: for what is checked when it is read and can be made again. An OSError names the folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".part-{token_hex(4)}-{part_ending(path.name)}")
    part.touch(exist_ok=False)
    try:
        with names_folder(path.parent):
            yield part
            if flush:  # on NFS the first to hear of a full disk
                flush_to_disk(part)
            part.replace(path)
            if flush:
                flush_to_disk(path.parent)
    finally:
        part.unlink(missing_ok=True)


def part_ending(name: str) -> str:
    """Return what the temporary name of a file ends with: its own name, without the beginning of a very long one."""
    return os.fsdecode(os.fsencode(name)[15 - 255 :])  # bytes: 255 at most, 15 of them for what stands before it


def printable(text: str, but: str = "") -> str:
    """Return a text that stays one line wherever it is shown: what is not printable is escaped, `but` some."""
    return "".join(one if one.isprintable() or one in but else one.encode("unicode_escape").decode() for one in text)


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: "1 case", "2 cases"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def flush_to_disk(path: Path) -> None:
    """Force what was written to a file, or the names in a folder, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def point_link(link: Path, target: str) -> None:
    """Let a link lead to a file or folder beside it, whatever it led to before, and whatever a crash has left."""
    with atomic_path(link, flush=False) as part:
        part.unlink()
        part.symlink_to(target)


def write_text(path: Path, text: str, flush: bool = True) -> None:
    """Write a UTF-8 text file atomically; for `flush` see `atomic_path`."""
    with atomic_path(path, flush) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any, flush: bool = True) -> None:  # noqa: ANN401 - whatever json takes
    """Write an indented JSON file atomically; not-a-number and infinity are refused, since JSON has none."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n", flush)


def read_object(path: Path, remedy: str = "fix it") -> dict[str, Any]:
    """Return the object that a JSON file holds.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no regular file, larger than 256 MiB or no JSON object; `remedy` says what to do about it.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_JSON:  # a named pipe would wait for ever
        found = f"{status.st_size} bytes" if stat.S_ISREG(status.st_mode) else "a folder, pipe or device"
        raise ValueError(f"{path}: expected a regular file of at most {_MAX_JSON} bytes, found {found}; {remedy}")
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # broken or too deep JSON, or bytes that are no UTF-8
        raise ValueError(f"{path}: expected JSON text ({error}); {remedy}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, found a {type(content).__name__}; {remedy}")
    return content


def read_as(path: Path, kind: type[T], remedy: str = "fix it") -> T:
    """Return the dataclass or `TypedDict` that a JSON file holds; it refuses what `read_object` and `from_json` do."""
    content = read_object(path, remedy)
    try:
        json.dumps(content, ensure_ascii=False).encode()  # half a surrogate pair could not be written anywhere
        return from_json(kind, content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; {remedy}") from error


def from_json(kind: type[T], content: Mapping[str, Any]) -> T:
    """Return the dataclass whose `asdict` went through JSON; a ValueError names a missing, unknown or wrong field."""
    if is_dataclass(kind) and (unknown := content.keys() - {field.name for field in fields(kind)}):
        raise ValueError(f"unknown field {', '.join(sorted(unknown))}")
    try:
        return msgspec.convert(content, kind, dec_hook=lambda kind, value: Path(value) if kind is Path else value)
    except msgspec.ValidationError as error:
        raise ValueError(str(error).replace("`$.", "`")) from error


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSON-lines file, if there is one, but for a last line that a crash cut short; a ValueError names it."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
        return [json.loads(line) for line in lines[:-1] if line]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected lines of JSON ({error}); restore or remove it") from error


def read_rows(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the place of each line of a CSV file in UTF-8 that is not empty ("FILE, line N"), and its cells."""
    with path.open(newline="", encoding="utf-8-sig") as stream:
        reader = csv.reader(stream)
        try:
            yield from ((f"{path}, line {reader.line_num}", row) for row in reader if any(map(str.strip, row)))
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path}, line {reader.line_num}: expected CSV text in UTF-8 ({error})") from error


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Let one thread of one process at a time through; `path` is a file that stands for what is locked, and is made.

    Yields whether that is so: some file systems have no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        alone = False
        with suppress(OSError):
            fcntl.flock(stream, fcntl.LOCK_EX)
            alone = True
        yield alone


def hold(path: Path) -> None:
    """Lock a file for this process (not those it forks) till it is released or ends; a BlockingIOError says who has."""
    path = path.resolve()
    if path in _HELD:  # the system would let this process in again
        raise BlockingIOError(f"{path.parent}: in use by this process already; wait until that is done")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # stays open: to close it is to unlock it
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 1000).decode(errors="backslashreplace") or "another process"
        os.close(descriptor)
        raise BlockingIOError(f"{path.parent}: in use by {holder}; wait for it to finish, or stop it") from None
    except OSError:  # a file system without locks
        os.close(descriptor)
        return
    with names_folder(path.parent):
        os.truncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
    _HELD[path] = descriptor


def release(path: Path) -> None:
    """Unlock a file, where this process holds it."""
    if (descriptor := _HELD.pop(path.resolve(), None)) is not None:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file as 64 hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


DIGESTS = "digests.json"  # of a run, of its ONNX models; weights hold their own, an engine has its manifest


def record_digests(folder: Path, files: Iterable[Path]) -> None:
    """Keep the SHA-256 of files of a folder in its `digests.json`; those of others stay."""
    record = folder / DIGESTS
    known = read_object(record) if record.is_file() else {}
    write_json(record, known | {file.relative_to(folder).as_posix(): sha256_of(file) for file in files})


def files_below(folder: Path) -> Iterator[Path]:
    """Yield all files of a folder, then those behind links to folders, none of which is entered twice."""
    os.scandir(folder).close()  # raises OSError where the folder may not be listed, which `os.walk` takes for empty
    said, entered, waiting = "skipped the files of a folder that cannot be listed (%s)", set(), [folder]
    warn = logging.getLogger(__name__).warning
    for top in waiting:  # which grows
        for place, below, names in os.walk(top, onerror=lambda error: warn(said, error.strerror)):
            if (real := os.path.realpath(place)) in entered:
                below.clear()
                continue
            entered.add(real)
            below.sort(key=lambda name: (name.startswith("."), name))
            waiting += [link for name in below if (link := Path(place, name)).is_symlink()]
            yield from (Path(place) / name for name in names)
