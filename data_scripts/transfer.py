"""One HTTP request for the bytes of a file that are missing, and what its answer means."""

import email.utils
import http.client
import math
import re
import ssl
import sys
import time
import urllib.error
import urllib.request
from typing import IO, Never, TypeAlias
from urllib.parse import urlsplit

from tqdm import tqdm

from data_scripts.partial import CHUNK, DownloadError, Part, Version, check_space

Bar: TypeAlias = "tqdm[Never]"
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
_REMEDIES = {
    401: "it needs a login; use another address",
    403: "it is not public, or a proxy forbids it; use another address",
    404: "there is no such file; check the address",
    410: "the file was taken away; use another address",
}


class TransientError(Exception):
    """What may pass; `wait` is the time in seconds that the server asked for."""

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = wait


def check_url(url: str) -> None:
    """Raise ValueError where `url` is not a whole http or https address."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url}: an address that begins with http:// or https:// and a host is needed")
    if not (url.isascii() and url.isprintable()) or " " in url:
        raise ValueError(f"{url!r}: other than plain characters in an address must be percent-encoded")
    _ = parts.port  # raises ValueError where it is not a number up to 65535


def fetch_rest(part: Part, url: str, room: float, timeout: float, bar: Bar) -> None:
    """Ask for the bytes that `part` lacks and append them.

    Args:
        part: what has arrived; it starts over where the server has another version or cannot resume.
        url: the address.
        room: disk space that must be free before the first byte, in sizes of the whole file.
        timeout: seconds to wait for a connection and for each piece.
        bar: shows the bytes as they come.

    Raises:
        TransientError: bytes are missing still, and trying again may help.
        DownloadError: it may not: a refusal, a full disk, an answer that cannot be used.
    """
    try:
        with _OPENER.open(_request(part, url), timeout=timeout) as response:
            left = _accept(response, part, url)
            assert part.version is not None
            check_space(part.path.parent, math.ceil(room * part.version.total) - part.size)
            bar.reset(total=part.version.total)
            bar.n = bar.initial = part.size
            bar.refresh()
            while left and (chunk := response.read1(min(left, CHUNK))):
                part.append(chunk)
                left -= len(chunk)
                bar.update(len(chunk))
    except urllib.error.HTTPError as error:
        with error:
            raise _judged(error, part, url) from error
    except (http.client.HTTPException, OSError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise DownloadError(f"{url}: the server's certificate is not valid ({reason.verify_message})") from error
        raise TransientError(f"{url}: {str(reason) or type(reason).__name__}") from error
    if not part.whole:
        raise TransientError(f"{url}: the connection ended after {part.size} of {part.version.total} bytes")


def _request(part: Part, url: str) -> urllib.request.Request:
    headers = {"User-Agent": "medspeed", "Accept-Encoding": "identity"}
    if part.size and part.version is not None and part.version.validator:
        headers |= {"Range": f"bytes={part.size}-", "If-Range": part.version.validator}
    return urllib.request.Request(url, headers=headers)


def _accept(response: http.client.HTTPResponse, part: Part, url: str) -> int:
    """Return how many bytes of the answer belong at the end of `part`, which starts over if they are not its rest."""
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise DownloadError(f"{url}: the server sends it recompressed, against our request: use another address")
    if response.status == http.HTTPStatus.PARTIAL_CONTENT:
        return _length_of_rest(response, part, url)
    length = response.headers.get("Content-Length", "")
    if response.status != http.HTTPStatus.OK or not re.fullmatch(r"\d{1,18}", length):
        raise DownloadError(f"{url}: status {response.status} without a size: this server cannot be used")
    if part.size:
        tqdm.write(f"{url}: the server has another version or cannot resume; starting over", file=sys.stderr)
    part.start_over(Version(url, int(length), _plain(response, "ETag"), _plain(response, "Last-Modified")))
    return int(length)


def _plain(response: http.client.HTTPResponse, name: str) -> str | None:
    """Return a header if it can be sent back as it came: a folded or foreign one cannot."""
    value = response.headers.get(name, "")
    return value if value and value.isascii() and value.isprintable() else None


def _length_of_rest(response: http.client.HTTPResponse, part: Part, url: str) -> int:
    """Check that a 206 answer is a piece of the version at hand that begins where `part` ends."""
    stated = response.headers.get("Content-Range", "")
    match, known = _CONTENT_RANGE.fullmatch(stated), part.version
    if match and known:
        start, end, total = (int(group) for group in match.groups())
        same_etag = _plain(response, "ETag") in (None, known.etag)
        same_date = _plain(response, "Last-Modified") in (None, known.last_modified)
        if same_etag and same_date and total == known.total and start == part.size and start <= end < total:
            return end - start + 1
    asked = f"asked for the bytes from {part.size}"
    part.start_over(None)
    raise TransientError(f"{url}: {asked}, answered with {stated!r} of this or another version; starting over")


def _judged(error: urllib.error.HTTPError, part: Part, url: str) -> Exception:
    """Return what an HTTP status other than success means for us."""
    said = " ".join(f"{url}: status {error.code} ({error.reason})".split())
    if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and part.size:
        part.start_over(None)
        return TransientError(f"{said}; starting over")
    if error.code in (408, 429) or error.code >= 500:
        return TransientError(said, _seconds(error.headers.get("Retry-After", "")))
    return DownloadError(f"{said}: {_REMEDIES.get(error.code, 'use another address')}")


def _seconds(retry_after: str) -> float:
    """Return the seconds that a Retry-After header names, as a number or as a date; 0 where it names none."""
    if re.fullmatch(r"\d{1,9}", retry_after):
        return float(retry_after)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except ValueError:
        return 0.0


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows to http and https only, and never from https back to http."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        allowed = ("https",) if req.type == "https" else ("http", "https")
        if urlsplit(newurl).scheme not in allowed:
            raise urllib.error.HTTPError(newurl, code, f"redirection to {newurl} is not allowed", headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _http_opener() -> urllib.request.OpenerDirector:
    # Not build_opener: that one also opens file:, ftp: and data: addresses.
    opener = urllib.request.OpenerDirector()
    opener.add_handler(urllib.request.ProxyHandler())
    opener.add_handler(urllib.request.HTTPHandler())
    opener.add_handler(urllib.request.HTTPSHandler())
    opener.add_handler(_Redirects())
    opener.add_handler(urllib.request.HTTPErrorProcessor())
    opener.add_handler(urllib.request.HTTPDefaultErrorHandler())
    opener.add_handler(urllib.request.UnknownHandler())
    return opener


_OPENER = _http_opener()
