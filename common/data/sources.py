"""Digests of source files, remembered so that a second start does not read the files again."""

import json
import logging
from pathlib import Path
from typing import Any

from common.files import sha256_of, write_json

_log = logging.getLogger(__name__)


class SourceDigests:
    """The SHA-256 of each file asked for, kept in `sources.json` of a folder beside what identifies the file's state.

    A file whose size, times or inode have changed is read again. Threads may share one object.

    Args:
        folder: where `sources.json` lies or will lie.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "sources.json"
        self._known = read_kept(self._path)
        self._new: dict[str, list[object]] = {}

    def sha256(self, file: Path) -> str:
        """Return the SHA-256 of a file's content as 64 hexadecimal digits, read only if the file is new or changed.

        Raises:
            OSError: the file cannot be read.
        """
        name = str(file.absolute())
        status = file.stat()
        # The time of change comes on top of the time of modification: copying tools set the latter back.
        state = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        match self._known.get(name):
            case [*known, str(digest)] if known == state:
                return digest
        digest = sha256_of(file)
        self._known[name] = self._new[name] = [*state, digest]
        return digest

    def save(self) -> None:
        """Add what was learnt to `sources.json`; if that cannot be written, log that all is to be read again."""
        if not self._new:
            return
        try:
            # Read anew: another process may have added its own since. What two write at once is lost, and read again.
            write_json(self._path, read_kept(self._path) | self._new, flush=False)
        except OSError as error:
            _log.warning("%s: not written, so the next start reads the sources again: %s", self._path, error)
        self._new = {}


def read_kept(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file that can be made again: empty if it is missing or damaged (which is logged)."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        _log.warning("%s: damaged, made again: %s", path, error)
        return {}
    return content if isinstance(content, dict) else {}
