"""A file that is still arriving: its bytes so far, the remote version they are a part of, and their digests.

Beside the target lie `target.part` (the bytes) and `target.part.json` (the version), until the file is whole.
"""

import dataclasses
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from common.files import write_json

CHUNK = 1 << 20  # bytes read at once
Record = TypeVar("Record")


class DownloadError(Exception):
    """What trying again does not mend; the message is one line with the remedy."""


@dataclass(frozen=True)
class Version:
    """What tells one version of a remote file from another: its address, size in bytes and HTTP validators."""

    url: str
    total: int
    etag: str | None
    last_modified: str | None

    def __post_init__(self) -> None:
        if not isinstance(self.total, int):
            raise TypeError(f"total {self.total!r} is not a number of bytes")

    @property
    def validator(self) -> str | None:
        """Return what `If-Range` may name: a strong ETag, else the date; a weak ETag does not promise equal bytes."""
        return self.etag if self.etag and not self.etag.startswith("W/") else self.last_modified


@dataclass
class Digests:
    """The number of bytes seen and their digests, MD5 and SHA-256 in one pass."""

    size: int = 0
    md5: Any = field(default_factory=lambda: hashlib.md5(usedforsecurity=False))
    sha256: Any = field(default_factory=hashlib.sha256)

    def update(self, chunk: bytes) -> None:
        """Count some more bytes."""
        self.md5.update(chunk)
        self.sha256.update(chunk)
        self.size += len(chunk)


class Part:
    """The bytes that have arrived of `target` from `url`; a context manager that holds the file open.

    What an earlier process left is continued if its sidecar names the same address, else dropped.
    """

    def __init__(self, target: Path, url: str) -> None:
        self.path = target.with_name(target.name + ".part")
        self.sidecar = target.with_name(target.name + ".part.json")
        self.version = load_record(Version, self.sidecar)
        self.digests = digests_of(self.path) if self.path.exists() else Digests()
        if self.version is None or self.version.url != url or self.size > self.version.total:
            self.start_over(None)

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = self.path.open("ab", buffering=0)  # unbuffered: what is counted is in the file
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    @property
    def size(self) -> int:
        """Return the number of bytes that have arrived."""
        return self.digests.size

    @property
    def whole(self) -> bool:
        """Return whether all bytes have arrived (their digests are another question)."""
        return self.version is not None and self.size == self.version.total

    def start_over(self, version: Version | None) -> None:
        """Drop all bytes; those that follow belong to `version`.

        Raises:
            DownloadError: the disk refuses.
        """
        with self._disk_errors():
            self.sidecar.unlink(missing_ok=True)  # first, since bytes without a sidecar are never continued
            if self.path.exists():
                os.truncate(self.path, 0)
            if version is not None:
                write_json(self.sidecar, dataclasses.asdict(version))
        self.version, self.digests = version, Digests()

    def append(self, chunk: bytes) -> None:
        """Write some more bytes.

        Raises:
            DownloadError: the disk refuses, for example because it is full; what is in the file stays.
        """
        with self._disk_errors():
            rest = memoryview(chunk)
            while rest:  # an unbuffered write may take a part of the bytes only
                rest = rest[self._stream.write(rest) :]
        self.digests.update(chunk)

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        # The network raises OSError too; only there does trying again help.
        try:
            yield
        except OSError as error:
            remedy = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "mend the cause"
            raise DownloadError(
                f"{self.path}: cannot write ({error.strerror}); what has arrived is kept: {remedy} and run again"
            ) from error


def check_space(folder: Path, needed: int) -> None:
    """Raise DownloadError, naming both figures, where the disk of `folder` has fewer than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DownloadError(
            f"{folder}: {needed / 1e9:.2f} GB of disk space are needed, {free / 1e9:.2f} GB are free: "
            "free some or choose another folder"
        )


def digests_of(path: Path) -> Digests:
    """Return the size and the digests of a file."""
    digests = Digests()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digests.update(chunk)
    return digests


def load_record(kind: Callable[..., Record], path: Path) -> Record | None:
    """Return the dataclass that a JSON file holds the fields of, or None where the file is missing or damaged."""
    try:
        return kind(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None
