"""A loopback HTTP server that serves one file with ranges and ETags, and misbehaves on request; downloads from it."""

import hashlib
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from medspeed.data_scripts import fetch
from medspeed.data_scripts.fetch import DownloadError, download

CONTENT = bytes(i * i % 251 for i in range(50_000))
OTHER = bytes(i * i % 241 for i in range(60_000))
MD5 = hashlib.md5(CONTENT).hexdigest()

Fault = Callable[["Handler"], None]


class FaultyServer(ThreadingHTTPServer):
    """Serves `content` at every address; each request takes the next of `faults`, or is answered properly."""

    daemon_threads = True

    def __init__(self, content: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = content
        self.etag: str | None = '"first"'
        self.last_modified: str | None = "Mon, 06 Aug 2018 10:00:00 GMT"
        self.faults: list[Fault] = []
        self.ranges: list[str | None] = []  # the Range header of every request
        self.served: list[int] = []  # the body bytes written for every request
        self.release = threading.Event()  # ends `hang`

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients that go away are part of the tests."""


class Handler(BaseHTTPRequestHandler):
    server: FaultyServer

    def do_GET(self) -> None:
        self.server.ranges.append(self.headers["Range"])
        self.server.served.append(0)
        self.number = len(self.server.served) - 1
        fault = self.server.faults.pop(0) if self.server.faults else answer
        fault(self)

    def log_message(self, *_: Any) -> None:
        pass

    def asked_from(self) -> int | None:
        """Return where the wanted bytes begin; None for all of them: no range, or If-Range names another version."""
        match = re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "")
        fits = self.headers["If-Range"] in (None, self.server.etag, self.server.last_modified)
        return int(match[1]) if match and fits else None

    def start(self, status: int, length: int | None, **headers: str | None) -> None:
        self.send_response(status)
        headers |= {"Content_Length": None if length is None else str(length)}
        headers = {"ETag": self.server.etag, "Last_Modified": self.server.last_modified} | headers
        for name, value in headers.items():
            if value is not None:
                self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def body(self, content: bytes) -> None:
        self.wfile.write(content)
        self.wfile.flush()
        self.server.served[self.number] += len(content)


def answer(handler: Handler, most: int | None = None) -> None:
    """Answer properly; with `most`, only so many bytes of the body."""
    content, start = handler.server.content, handler.asked_from()
    if start is None:
        handler.start(200, len(content))
    else:
        handler.start(206, len(content) - start, Content_Range=f"bytes {start}-{len(content) - 1}/{len(content)}")
    handler.body(content[start or 0 :][:most])


def cut(after: int) -> Fault:
    """Close the connection after some bytes of the body."""
    return lambda handler: answer(handler, after)


def reset(after: int) -> Fault:
    """Like `cut`, but the client sees `Connection reset by peer`."""

    def fault(handler: Handler) -> None:
        answer(handler, after)
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.connection.close()

    return fault


def hang(after: int) -> Fault:
    """Stop after some bytes of the body, with the connection open, until the server's `release` is set."""

    def fault(handler: Handler) -> None:
        answer(handler, after)
        handler.server.release.wait(20)

    return fault


def whole(handler: Handler, most: int | None = None) -> None:
    """Ignore the range: answer 200 with all bytes."""
    handler.start(200, len(handler.server.content))
    handler.body(handler.server.content[:most])


def lie(content_range: str | None, body: bytes, **headers: str) -> Fault:
    """Answer 206 with this Content-Range and body, whatever was asked."""

    def fault(handler: Handler) -> None:
        handler.start(206, len(body), Content_Range=content_range, **headers)
        handler.body(body)

    return fault


def status(code: int, **headers: str) -> Fault:
    """Answer with an HTTP status and headers (underscores become dashes) and a small page."""

    def fault(handler: Handler) -> None:
        handler.start(code, 4, **headers)
        handler.body(b"page")

    return fault


@contextmanager
def running(content: bytes) -> Iterator[FaultyServer]:
    """Run a server on a free loopback port."""
    with FaultyServer(content) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.release.set()
            server.shutdown()
            thread.join()


def download_from(server: FaultyServer, target: Path, **options: float) -> dict[str, Any]:
    """Download CONTENT, with its digest checked."""
    return download(server.url + "/a.tar", target, MD5, **options)


def interrupted(server: FaultyServer, target: Path, after: int) -> None:
    """Leave the first `after` bytes of the server's file, as a process does whose server goes away."""
    server.faults.insert(0, cut(after))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetch, "ATTEMPTS", 1)
        with pytest.raises(DownloadError, match="gave up after 1 attempts"):
            download_from(server, target)
    assert target.with_name(target.name + ".part").stat().st_size == after
    server.ranges.clear()
    server.served.clear()
