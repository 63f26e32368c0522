"""Download large files over HTTP: resumable, checksum-verified, and renamed to the final name only when complete.

The bytes of a file that is still arriving lie beside it (`NAME.part`). They are continued only where a digest is
published: it tells whether the two parts were of one file, whatever the server did in between.
"""

import argparse
import errno
import hashlib
import http.client
import math
import random
import re
import shutil
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm

from medspeed.common.console import hides_bar, say
from medspeed.common.files import flush_to_disk, read_object, write_json

CHUNK = 1 << 20  # bytes read at once
TIMEOUT = 60.0  # seconds to wait for a connection and for each piece
ATTEMPTS = 8  # failures in a row, none of which brought a new byte, before giving up
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


class DownloadError(ValueError):
    """What trying again does not mend; the message says what does."""


class _TransientError(Exception):
    """What may pass."""


def download(url: str, target: Path, md5: str | None = None, room: float = 1.0) -> dict[str, Any]:
    """Bring a file to `target` and return its receipt, which is also written beside it (`read_receipt`).

    The file appears only when whole and right; one that is there is not downloaded again, but its digest is checked.
    Without an MD5 (hexadecimal) what an earlier, interrupted call left counts nothing. `room`: disk space that must be
    free before the first byte, in sizes of the file (2.0: it is unpacked as well).

    Returns:
        "url", "size" in bytes, "md5", "date" in UTC (ISO 8601).

    Raises:
        DownloadError: a refusal of the server, a wrong digest, a full disk, or no progress in many attempts.
        OSError: the folder of `target` cannot be written.
    """
    part = _beside(target, ".part")
    path = target if target.exists() else part
    target.parent.mkdir(parents=True, exist_ok=True)
    if path == part and not (md5 and part.exists() and _md5_of(part) == md5):  # killed between the bytes and the name
        _patiently(lambda: _fetch_rest(url, part, md5 is not None, room), lambda: _size(part))
    found = _md5_of(path)
    if md5 not in (None, found):
        path = path if path == target else part.replace(_beside(target, ".refused"))
        raise DownloadError(f"{url}: {path} has MD5 {found}, expected {md5}: move it away and run again")
    if path == target and (receipt := read_receipt(target)).get("md5") == found:
        return receipt  # of the address it came from
    date = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    receipt = {"url": url, "size": _size(path), "md5": found, "date": date}
    flush_to_disk(path)
    write_json(_beside(target, ".receipt.json"), receipt)
    path.replace(target)
    flush_to_disk(target.parent)
    return receipt


def read_receipt(target: Path) -> dict[str, Any]:
    """Return the receipt of a downloaded file, kept when the file itself is deleted; empty where none can be read."""
    try:
        return read_object(_beside(target, ".receipt.json"))
    except (OSError, ValueError):
        return {}


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
        figures = f"{needed / 1e9:.2f} GB of disk space needed, {free / 1e9:.2f} GB free"
        raise DownloadError(f"{folder}: {figures}: free some space or choose another folder")


def http_address(text: str) -> str:
    """Return a whole, percent-encoded http or https address without its last slash, or say what one is."""
    with suppress(ValueError):  # a port or an IPv6 address that is none
        if re.fullmatch(r"https?://[!-~]+", text) and urlsplit(text).hostname and urlsplit(text).port != 0:
            return text.rstrip("/")
    raise argparse.ArgumentTypeError(f"{text!r}: expected an address such as https://host/folder")


def _patiently(work: Callable[[], int], arrived: Callable[[], int]) -> int:
    """Return what `work` does, called again after what may pass; bytes that `arrived` start the counting anew."""
    failures, mark = 0, arrived()
    while True:
        try:
            return work()
        except _TransientError as error:
            # The mark never goes back, so that a server that makes us start over again and again is given up.
            failures, mark = 1 if arrived() > mark else failures + 1, max(mark, arrived())
            if failures >= ATTEMPTS:
                remedy = f"{'the partial download is kept: ' * bool(arrived())}run again later"
                raise DownloadError(f"gave up after {failures} attempts without progress: {error}; {remedy}") from error
            # Doubling with each failure, spread so that clients do not return in step.
            wait = 2.0 ** (failures - 1) * random.uniform(0.5, 1.0)
            say(f"{' '.join(str(error).split())}; trying again in {wait:.1f} s", "warning", sys.stderr)
            time.sleep(wait)


def _fetch_rest(url: str, part: Path, resumes: bool, room: float) -> int:
    """Ask once for the bytes that `part` lacks, and append them; return its size."""
    have = _size(part) if resumes else 0
    with _answer(url, {"Range": f"bytes={have}-"} if have else {}) as response:
        rest = re.fullmatch(rf"bytes {have}-\d+/(\d+)", response.headers.get("Content-Range", ""))
        if response.status == 206 and not rest:
            part.unlink(missing_ok=True)
            raise _TransientError(f"{url}: asked for the bytes from {have}, the server sent others; starting over")
        size = int(rest[1]) if rest else _stated_size(response, url)
        if size < have:  # such as a page that asks for a password
            raise DownloadError(f"{url}: {size} bytes, {have} are in {part}: check the address, or delete that file")
        have, whole = have if rest else 0, size
        check_space(part.parent, math.ceil(room * whole) - have)
        units: dict[str, Any] = {"total": whole, "initial": have, "unit": "B", "unit_scale": True, "unit_divisor": 1024}
        with tqdm(desc=part.stem, disable=hides_bar(), **units) as bar, part.open("ab" if have else "wb") as stream:
            while chunk := response.read1(CHUNK):
                stream.write(chunk)
                stream.flush()  # a killed process loses nothing
                bar.update(len(chunk))
    if _size(part) < whole:
        raise _TransientError(f"{url}: the connection ended after {_size(part)} of {whole} bytes")
    return whole


@contextmanager
def _answer(url: str, headers: Mapping[str, str], method: str = "GET") -> Iterator[http.client.HTTPResponse]:
    """Yield the answer to a request; whatever goes wrong until its end comes out as what it means for us."""
    plain = {"User-Agent": "medspeed", "Accept-Encoding": "identity"}
    request = urllib.request.Request(url, headers={**plain, **headers}, method=method)
    try:
        with urllib.request.build_opener(_Redirects).open(request, timeout=TIMEOUT) as response:
            yield response
    except urllib.error.HTTPError as error:
        error.close()
        said = f"{url}: status {error.code} ({error.reason})"
        if error.code in (408, 429) or error.code >= 500:
            raise _TransientError(said) from error
        remedy = "delete the .part file and run again" if error.code == 416 else "check the address, or use another"
        raise DownloadError(f"{said}: {remedy}") from error
    except (http.client.HTTPException, OSError) as error:
        reason = getattr(error, "reason", error)
        said = f"{url}: {str(reason) or type(reason).__name__}"
        local = isinstance(error, OSError) and (error.filename or error.errno in _OF_THE_DISK)
        if local or isinstance(reason, ssl.SSLCertVerificationError):
            raise DownloadError(f"{said}; the partial download is kept: fix the cause and run again") from error
        raise _TransientError(said) from error


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to the web alone, and from https only to https; urllib's own would go on over FTP too."""

    def redirect_request(self, req: urllib.request.Request, *answer: Any) -> urllib.request.Request | None:  # noqa: ANN401
        stream, code, _, headers, url = answer
        if urlsplit(url).scheme not in ({"https"} if req.type == "https" else {"http", "https"}):
            raise urllib.error.HTTPError(req.full_url, code, f"redirect to {url} is not allowed", headers, stream)
        return super().redirect_request(req, *answer)


def _stated_size(response: http.client.HTTPResponse, url: str) -> int:
    length, encoding = response.headers.get("Content-Length", ""), response.headers.get("Content-Encoding", "identity")
    if response.status != 200 or not length.isdecimal() or encoding != "identity":
        stated = f"status {response.status}, Content-Length {length!r}, Content-Encoding {encoding!r}"
        raise DownloadError(f"{url}: {stated}: expected a plain file and its size; use another address")
    return int(length)


def _md5_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)
