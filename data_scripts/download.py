"""Download a large file over HTTP: resumed where it stopped, checked, and under its name only when whole and right."""

import dataclasses
import datetime
import fcntl
import random
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from common.files import flush_to_disk, write_json
from data_scripts.partial import Digests, DownloadError, Part, digests_of, load_record
from data_scripts.transfer import Bar, TransientError, check_url, fetch_rest

_FRUITFUL = 1 << 20  # new bytes after which the count of failed attempts begins anew
_LONGEST_WAIT = 60.0  # seconds between two attempts
_LONGEST_RETRY_AFTER = 300.0  # seconds granted to a server that names a time


@dataclass(frozen=True)
class Remote:
    """A file to download, with the digests its bytes must have (hexadecimal; None where none is published)."""

    url: str
    md5: str | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class Receipt:
    """What was downloaded: address, size in bytes, digests in hexadecimal, date in UTC (ISO 8601)."""

    url: str
    size: int
    md5: str
    sha256: str
    date: str


@dataclass(frozen=True)
class Patience:
    """How long to try: seconds to wait for bytes, fruitless attempts in a row, and how the waiting is done."""

    timeout: float = 60.0
    attempts: int = 8
    sleep: Callable[[float], None] = time.sleep


def download(
    remote: Remote, target: Path, *, room: float = 1.0, patience: Patience | None = None, progress: bool = True
) -> Receipt:
    """Bring `remote` to `target` and return its receipt, which is also written beside it (`receipt_path`).

    What an earlier, interrupted call left is continued if the server still has the same version. A `target` that is
    there is not downloaded again: it is read whole and its digests are checked. Hold `locked` where two processes may
    want the same target.

    Args:
        remote: the address and the digests.
        target: the file's final path; it appears only when whole and right.
        room: disk space that must be free before the first byte, in sizes of the file (2.0: it is unpacked as well).
        patience: how long to try.
        progress: show a progress bar with rate and time left where standard error is a terminal.

    Raises:
        ValueError: the address is not a whole http or https one.
        DownloadError: a refusal of the server, a wrong digest, a full disk, or no progress in many attempts.
        OSError: the folder of `target` cannot be written.
    """
    check_url(remote.url)
    if target.exists():
        receipt = _receipt(remote, digests_of(target))
        if complaint := _complaint(remote, receipt):
            raise DownloadError(f"{target} is there, but its {complaint}: move it away and run again")
        write_json(receipt_path(target), dataclasses.asdict(receipt))
        return receipt
    bar = tqdm(desc=target.name, unit="B", unit_scale=True, unit_divisor=1024, disable=None if progress else True)
    with bar, Part(target, remote.url) as part:
        _fetch(part, remote.url, room, patience or Patience(), bar)
    return _finish(part, remote, target)


def answer(program: str, fetch: Callable[[], Path], app: str) -> int:
    """Run a download for the command line; return the exit status: 0, 1 for an error, 130 where the user interrupts.

    Args:
        program: its name, before what is said of an error.
        fetch: downloads, and returns the folder of the data.
        app: the one that trains on them.
    """
    try:
        folder = fetch()
    except (DownloadError, ValueError, OSError) as error:
        print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{program}: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    print(f"next: python apps/{app}/train.py --data {shlex.quote(str(folder))}")
    return 0


def receipt_path(target: Path) -> Path:
    """Return where the receipt of a downloaded file lies; it stays when the file itself is deleted."""
    return target.with_name(target.name + ".receipt.json")


def read_receipt(target: Path) -> Receipt | None:
    """Return the receipt of a downloaded file, or None where there is none or it is damaged."""
    return load_record(Receipt, receipt_path(target))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, which stays; a second process says so and waits. A killed process holds no lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process works on the same data (lock {path}); waiting for it", file=sys.stderr, flush=True)
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _fetch(part: Part, url: str, room: float, patience: Patience, bar: Bar) -> None:
    """Make attempts until `part` is whole."""
    failures, mark = 0, part.size
    while not part.whole:
        try:
            fetch_rest(part, url, room, patience.timeout, bar)
        except TransientError as error:
            # The mark never goes back, so that a server that makes us start over again and again is given up.
            fruitful = part.size >= mark + _FRUITFUL
            mark, failures = (part.size, 1) if fruitful else (mark, failures + 1)
            if failures >= patience.attempts:
                raise DownloadError(
                    f"{url}: gave up after {failures} attempts without progress, the last one: {error}; "
                    f"{part.size} bytes are kept in {part.path}: run again later to go on from there"
                ) from error
            wait = _wait(failures, error.wait)
            tqdm.write(f"{error}; trying again in {wait:.1f} s", file=sys.stderr)
            patience.sleep(wait)


def _wait(failures: int, asked: float) -> float:
    """Return seconds to wait: doubling with each failure, spread so that clients do not return in step."""
    backoff = min(2.0 ** (failures - 1), _LONGEST_WAIT) * random.uniform(0.5, 1.0)
    return max(backoff, min(asked, _LONGEST_RETRY_AFTER))


def _receipt(remote: Remote, digests: Digests) -> Receipt:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Receipt(remote.url, digests.size, digests.md5.hexdigest(), digests.sha256.hexdigest(), now)


def _complaint(remote: Remote, receipt: Receipt) -> str | None:
    for name, expected, found in (("MD5", remote.md5, receipt.md5), ("SHA-256", remote.sha256, receipt.sha256)):
        if expected is not None and expected.lower() != found:
            return f"{name} is {found}, expected {expected}"
    return None


def _finish(part: Part, remote: Remote, target: Path) -> Receipt:
    """Give the whole file its name if its digests fit, else set it aside."""
    receipt = _receipt(remote, part.digests)
    if complaint := _complaint(remote, receipt):
        aside = part.path.replace(target.with_name(target.name + ".refused"))
        part.sidecar.unlink()
        raise DownloadError(f"{remote.url}: the {complaint}; it is set aside as {aside}: delete it and run again")
    flush_to_disk(part.path)
    write_json(receipt_path(target), dataclasses.asdict(receipt))
    part.path.replace(target)
    flush_to_disk(target.parent)
    part.sidecar.unlink()  # last: a process killed before this line finds all it needs to finish
    return receipt
