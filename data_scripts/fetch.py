"""Download large files over HTTP: resumed where they stopped, checked, and under their name only when whole and right.

Beside a file that is still arriving lie its bytes (`NAME.part`) and which version they are of (`NAME.part.json`).
"""

import datetime
import errno
import fcntl
import hashlib
import http.client
import math
import os
import random
import re
import shlex
import shutil
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Never, TypeVar
from urllib.parse import urlsplit
from urllib.request import Request

from tqdm import tqdm

from common.files import flush_to_disk, read_object, write_json

CHUNK = 1 << 20  # bytes read at once
TIMEOUT = 60.0  # seconds to wait for a connection and for each piece
ATTEMPTS = 8  # failures in a row, none of which brought a new byte, before giving up
LONGEST_WAIT = 300.0  # seconds granted to a server that names a time
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
_REMEDIES = {404: "there is no such file; check the address", 416: "it has changed; delete the .part file, run again"}

Result = TypeVar("Result")


class DownloadError(Exception):
    """What trying again does not mend; the message is one line with the remedy."""


class _TransientError(Exception):
    """What may pass; `wait` is the time in seconds that the server asked for."""

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = wait


class _Arrived:
    """The bytes of a file so far: how many, and their digests."""

    def __init__(self, path: Path) -> None:
        self.start_over()
        with path.open("rb" if path.exists() else "w+b") as stream:
            while chunk := stream.read(CHUNK):
                self.add(chunk)

    def start_over(self) -> None:
        self.size, self.md5, self.sha256 = 0, hashlib.md5(usedforsecurity=False), hashlib.sha256()

    def add(self, chunk: bytes) -> None:
        self.md5.update(chunk)
        self.sha256.update(chunk)
        self.size += len(chunk)


def download(url: str, target: Path, digest: str | None = None, room: float = 1.0) -> dict[str, Any]:
    """Bring a file to `target` and return its receipt, which is also written beside it (`read_receipt`).

    What an earlier, interrupted call left is continued if the server still has the same version. A `target` that is
    there is not downloaded again, but its digest is checked. Hold `locked` where two processes may want the same one.

    Args:
        url: an address that `http_address` took.
        target: the file's final path; it appears only when whole and right.
        digest: hexadecimal, MD5 (32 digits) or SHA-256 (64); None where none is published.
        room: disk space that must be free before the first byte, in sizes of the file (2.0: it is unpacked as well).

    Returns:
        "url", "size" in bytes, "md5" and "sha256" in hexadecimal, "date" in UTC (ISO 8601).

    Raises:
        DownloadError: a refusal of the server, a wrong digest, a full disk, or no progress in many attempts.
        OSError: the folder of `target` cannot be written.
    """
    part, version = _beside(target, ".part"), _beside(target, ".part.json")
    path = target if target.exists() else part
    target.parent.mkdir(parents=True, exist_ok=True)
    arrived = _Arrived(path)
    if path == part:
        with tqdm(desc=target.name, unit="B", unit_scale=True, unit_divisor=1024, disable=None) as bar:
            _patiently(partial(_fetch_rest, url, part, version, arrived, room, bar), lambda: arrived.size)
    md5, sha256 = arrived.md5.hexdigest(), arrived.sha256.hexdigest()
    if digest not in (None, md5, sha256):
        path = path if path == target else part.replace(_beside(target, ".refused"))
        version.unlink(missing_ok=True)
        found = f"MD5 {md5}, SHA-256 {sha256}, expected {digest}"
        raise DownloadError(f"{url}: {path} is another file: {found}: move it away and run again")
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    receipt = {"url": url, "size": arrived.size, "md5": md5, "sha256": sha256, "date": date}
    flush_to_disk(path)
    write_json(_beside(target, ".receipt.json"), receipt)
    path.replace(target)
    flush_to_disk(target.parent)
    version.unlink(missing_ok=True)  # last: a process killed before this line finds all it needs to finish
    return receipt


def read_receipt(target: Path) -> dict[str, Any]:
    """Return the receipt of a downloaded file, kept when the file itself is deleted; empty where none can be read."""
    return _read(_beside(target, ".receipt.json"))


def size_of(url: str) -> int:
    """Return the size of a remote file in bytes; DownloadError where the server does not state it."""

    def ask() -> int:
        with _answer(url, {}, "HEAD") as response:
            return _stated_size(response, url)

    return _patiently(ask, lambda: 0)


def check_space(folder: Path, needed: int) -> None:
    """Raise DownloadError, naming both figures, where the disk of `folder` has fewer than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        figures = f"{needed / 1e9:.2f} GB of disk space are needed, {free / 1e9:.2f} GB are free"
        raise DownloadError(f"{folder}: {figures}: free some or choose another folder")


def http_address(text: str) -> str:
    """Return a whole, percent-encoded http or https address without its last slash; ValueError where it is none."""
    if not re.fullmatch(r"https?://[!-~]+", text) or not urlsplit(text).hostname or urlsplit(text).port == 0:
        raise ValueError(f"{text!r}: an address such as https://host/folder is needed")
    return text.rstrip("/")


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


def run_command(program: str, fetch: Callable[[], Path], app: str) -> int:
    """Call `fetch`, which returns the folder that `app` trains on; say what went wrong in a line behind `program`.

    Returns the exit status: 0, 1 for an error, 130 where the user interrupts.
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


def _patiently(work: Callable[[], Result], arrived: Callable[[], int]) -> Result:
    """Return what `work` returns, called again after what may pass; `arrived` tells the bytes that show progress."""
    failures, mark = 0, 0
    while True:
        try:
            return work()
        except _TransientError as error:
            # The mark never goes back, so that a server that makes us start over again and again is given up.
            failures, mark = 1 if arrived() > mark else failures + 1, max(mark, arrived())
            if failures >= ATTEMPTS:
                remedy = "what has arrived is kept: run again later to go on from there"
                raise DownloadError(f"gave up after {failures} attempts without progress: {error}; {remedy}") from error
            # Doubling with each failure, spread so that clients do not return in step.
            wait = max(2.0 ** (failures - 1) * random.uniform(0.5, 1.0), min(error.wait, LONGEST_WAIT))
            tqdm.write(f"{error}; trying again in {wait:.1f} s", file=sys.stderr)
            time.sleep(wait)


def _fetch_rest(url: str, part: Path, version: Path, arrived: _Arrived, room: float, bar: "tqdm[Never]") -> None:
    """Ask once for the bytes that `part` lacks of the version that the file `version` names, and append them."""
    known = _read(version)
    if known.get("url") != url or not isinstance(known.get("size"), int) or arrived.size > known["size"]:
        known = {}
        version.unlink(missing_ok=True)
        arrived.start_over()
    if known and arrived.size == known["size"]:
        return
    resumes = arrived.size and known["validator"]
    headers = {"Range": f"bytes={arrived.size}-", "If-Range": known["validator"]} if resumes else {}
    with _answer(url, headers) as response, part.open("ab", buffering=0) as stream:
        if response.status == 206 and (complaint := _other_rest(response, known, arrived.size)):
            version.unlink(missing_ok=True)
            raise _TransientError(f"{url}: {complaint}; starting over")
        if response.status != 206:
            known = {"url": url, "size": _stated_size(response, url), "validator": _validator(response)}
            arrived.start_over()
        check_space(part.parent, math.ceil(room * known["size"]) - arrived.size)
        if not arrived.size:  # in this order, since bytes without a version are never continued
            version.unlink(missing_ok=True)
            stream.truncate(0)
            write_json(version, known)
        bar.reset(total=known["size"])
        bar.n = bar.initial = arrived.size
        bar.refresh()
        while arrived.size < known["size"] and (chunk := response.read1(min(known["size"] - arrived.size, CHUNK))):
            if stream.write(chunk) < len(chunk):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            arrived.add(chunk)
            bar.update(len(chunk))
    if arrived.size < known["size"]:
        raise _TransientError(f"{url}: the connection ended after {arrived.size} of {known['size']} bytes")


@contextmanager
def _answer(url: str, headers: Mapping[str, str], method: str = "GET") -> Iterator[http.client.HTTPResponse]:
    """Yield the answer to a request; whatever goes wrong until its end comes out as what it means for us."""
    plain = {"User-Agent": "medspeed", "Accept-Encoding": "identity"}
    request = Request(url, headers={**plain, **headers}, method=method)
    try:
        with _OPENER.open(request, timeout=TIMEOUT) as response:
            yield response
    except urllib.error.HTTPError as error:
        error.close()
        said = " ".join(f"{url}: status {error.code} ({error.reason})".split())
        if error.code in (408, 429) or error.code >= 500:
            asked = re.fullmatch(r"\d{1,9}", error.headers.get("Retry-After", ""))
            raise _TransientError(said, float(asked[0]) if asked else 0.0) from error
        raise DownloadError(f"{said}: {_REMEDIES.get(error.code, 'use another address')}") from error
    except (http.client.HTTPException, OSError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        said = f"{url}: {str(reason) or type(reason).__name__}"
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise DownloadError(f"{said}: its certificate is not valid; use another address") from error
        if isinstance(error, OSError) and (error.filename or error.errno in _OF_THE_DISK):
            remedy = "what has arrived is kept: free some space or mend the cause, and run again"
            raise DownloadError(f"{said}: cannot write; {remedy}") from error
        raise _TransientError(said) from error


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows to http and https only, and never from https back to http."""

    def redirect_request(self, req: Request, *args: Any, **kwargs: Any) -> Request | None:  # noqa: ANN401 - urllib's
        request = super().redirect_request(req, *args, **kwargs)
        if request and request.type not in (("https",) if req.type == "https" else ("http", "https")):
            raise DownloadError(f"{req.full_url}: redirection to {request.full_url} is not allowed")
        return request


_OPENER = urllib.request.build_opener(_Redirects)


def _stated_size(response: http.client.HTTPResponse, url: str) -> int:
    length, encoding = response.headers.get("Content-Length", ""), response.headers.get("Content-Encoding", "identity")
    if response.status != 200 or not re.fullmatch(r"\d{1,18}", length) or encoding != "identity":
        stated = f"status {response.status}, Content-Length {length!r}, Content-Encoding {encoding!r}"
        raise DownloadError(f"{url}: {stated}: expected a plain file and its size; use another address")
    return int(length)


def _validator(response: http.client.HTTPResponse) -> str:
    """Return what `If-Range` may name, or "": a strong ETag (a weak one promises no equal bytes), else the date."""
    etag = response.headers.get("ETag", "")
    value = etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified", "")
    return value if value.isascii() and value.isprintable() else ""  # a folded or foreign one cannot be sent back


def _other_rest(response: http.client.HTTPResponse, known: Mapping[str, Any], have: int) -> str | None:
    """Return what a 206 answer is instead of all the rest of the version at hand; None where it is that."""
    stated, size = response.headers.get("Content-Range", ""), known.get("size", 0)
    same = _validator(response) in ("", known.get("validator"))
    if have and same and stated == f"bytes {have}-{size - 1}/{size}":
        return None
    return f"asked for the bytes from {have}, answered with {stated!r} of this or another version"


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}
