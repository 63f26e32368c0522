import hashlib
import os
import resource
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from argparse import ArgumentTypeError
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medspeed.data_scripts import fetch
from medspeed.data_scripts.fetch import DownloadError, download, http_address, read_receipt
from tests import faulty_server as faulty
from tests.faulty_server import CONTENT, MD5, OTHER, download_from, interrupted


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**10, 0, size))


@pytest.mark.parametrize("digest", [MD5, None])
def test_whole_file_with_receipt(server, target, waits, digest):
    assert read_receipt(target) == {}
    receipt = download(server.url + "/a.tar", target, digest)
    assert target.read_bytes() == CONTENT
    assert names(target.parent) == ["a.tar", "a.tar.receipt.json"]
    expected = {"url": server.url + "/a.tar", "size": len(CONTENT), "md5": MD5}
    assert receipt == expected | {"date": receipt["date"]}
    assert read_receipt(target) == receipt
    assert receipt["date"].endswith("+00:00")
    assert waits == []


# --- going on where it stopped ---


def test_cut_connections_are_resumed_where_they_ended(server, target, waits):
    server.faults = [faulty.cut(100), faulty.reset(0), faulty.cut(1000)]
    download_from(server, target)
    assert target.read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=100-", "bytes=100-", "bytes=1100-"]
    assert len(waits) == 3


def test_killed_process_is_continued(server, target):
    server.faults = [faulty.hang(30_000)]
    code = "import sys; from pathlib import Path; from medspeed.data_scripts.fetch import download; "
    code += "download(sys.argv[1], Path(sys.argv[2]))"
    part = target.with_name("a.tar.part")
    with subprocess.Popen([sys.executable, "-c", code, server.url + "/a.tar", target]) as process:
        deadline = time.monotonic() + 20
        while not (part.exists() and part.stat().st_size == 30_000):
            assert time.monotonic() < deadline, "the process never got the bytes"
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    server.release.set()
    assert not target.exists()
    download_from(server, target)
    assert target.read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=30000-"]
    assert server.served[1] == len(CONTENT) - 30_000


def test_whole_part_needs_no_request(server, target):
    interrupted(server, target, 100)
    target.with_name("a.tar.part").write_bytes(CONTENT)  # killed between the last byte and the renaming
    download_from(server, target)
    assert target.read_bytes() == CONTENT
    assert server.ranges == []


def test_slow_server_times_out_and_is_resumed(server, target, waits, monkeypatch):
    monkeypatch.setattr(fetch, "TIMEOUT", 0.2)
    server.faults = [faulty.hang(500)]
    download_from(server, target)
    assert target.read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=500-"]


def test_bytes_that_come_again_and_again_are_no_progress(server, target, waits):
    server.faults = [lambda handler: faulty.whole(handler, 40_000)] * 20
    with pytest.raises(DownloadError, match=r"gave up after 4 attempts.*after 40000 of 50000 bytes.*run again later"):
        download_from(server, target)
    assert len(server.ranges) == 4
    assert not target.exists()


def test_attempts_that_bring_something_are_not_counted(server, target, waits):
    server.faults = [faulty.cut(5_000)] * 9
    download_from(server, target)
    assert target.read_bytes() == CONTENT
    assert len(server.ranges) == 10
    assert max(waits) <= 1.0, "the waiting begins anew as well"


# --- servers that lie ---


def test_without_a_digest_nothing_is_continued(server, target, waits):
    interrupted(server, target, 20_000)
    server.faults = [faulty.cut(30_000)]
    download(server.url, target)
    assert target.read_bytes() == CONTENT
    assert server.ranges == [None, None]


@pytest.mark.parametrize(
    ("content_range", "body"),
    [
        ("bytes 19999-49999/50000", CONTENT[19_999:]),  # begins elsewhere
        ("bytes 0-49999/50000", CONTENT),
        (None, CONTENT[20_000:]),
    ],
)
def test_other_ranges_are_refused(server, target, waits, content_range, body):
    interrupted(server, target, 20_000)
    server.faults = [faulty.lie(content_range, body)]
    download_from(server, target)
    assert target.read_bytes() == CONTENT
    assert server.ranges == ["bytes=20000-", None]


def test_less_than_the_rest_is_taken_and_the_rest_asked_for(server, target, waits):
    interrupted(server, target, 20_000)
    server.faults = [faulty.lie("bytes 20000-29999/50000", CONTENT[20_000:30_000])]
    download_from(server, target)
    assert target.read_bytes() == CONTENT
    assert server.ranges == ["bytes=20000-", "bytes=30000-"]


def test_the_rest_of_another_file_is_set_aside_and_the_next_call_starts_over(server, target):
    interrupted(server, target, 20_000)
    server.faults = [faulty.lie("bytes 20000-59999/60000", OTHER[20_000:])]
    with pytest.raises(DownloadError, match=r"refused has MD5"):
        download_from(server, target)
    download_from(server, target)
    assert target.read_bytes() == CONTENT


def test_answers_that_make_no_sense_are_asked_again(server, target, waits):
    server.faults = [lambda handler: handler.wfile.write(b"garbage\r\n\r\n") and None]
    download_from(server, target)
    assert target.read_bytes() == CONTENT
    assert len(waits) == 1


def test_answers_that_cannot_be_used(server, target):
    server.faults = [lambda handler: handler.start(200, None)]
    with pytest.raises(DownloadError, match=r"Content-Length ''.*expected a plain file and its size"):
        download_from(server, target)
    server.faults = [lambda handler: handler.start(200, 50, Content_Encoding="gzip")]
    with pytest.raises(DownloadError, match="Content-Encoding 'gzip'"):
        download_from(server, target)


# --- refusals, and what may pass ---


def test_transient_statuses_are_tried_again_with_growing_waits(server, target, waits):
    server.faults = [faulty.status(500), faulty.status(503), faulty.status(408)]
    download_from(server, target)
    assert target.read_bytes() == CONTENT
    for wait, longest in zip(waits, (1, 2, 4), strict=True):
        assert longest / 2 <= wait <= longest


@pytest.mark.parametrize(("code", "remedy"), [(404, "check the address"), (416, "delete the .part"), (403, "another")])
def test_refusals_fail_at_once(server, target, waits, code, remedy):
    server.faults = [faulty.status(code)]
    with pytest.raises(DownloadError, match=f"status {code} .*{remedy}"):
        download_from(server, target)
    assert waits == []
    assert len(server.ranges) == 1


@pytest.mark.parametrize("place", ["file:///etc/hostname", "data:,abc", "gopher://127.0.0.1/", "ftp://127.0.0.1:1/"])
def test_redirect_to_other_schemes_is_refused(server, target, waits, place):
    server.faults = [faulty.status(302, Location=place)]
    with pytest.raises(DownloadError, match=f"(?i)redirect(ion)? to .*{place}.* not allowed"):
        download_from(server, target)
    assert waits == []
    assert len(server.ranges) == 1


def test_a_redirect_may_not_leave_https():
    request = urllib.request.Request("https://host/a.tar")
    follow = fetch._Redirects().redirect_request
    assert follow(request, None, 302, "Found", {}, "https://other/a.tar") is not None
    with pytest.raises(urllib.error.HTTPError, match=r"redirect to .* is not allowed"):
        follow(request, None, 302, "Found", {}, "http://other/a.tar")


def test_redirect_to_http_is_followed_and_resumed(server, target, waits):
    with faulty.running(OTHER) as front:
        elsewhere = faulty.status(307, Location=server.url + "/real.tar")
        front.faults = [elsewhere, elsewhere]
        server.faults = [faulty.cut(20_000)]
        download_from(front, target)
    assert target.read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=20000-"]


def test_invalid_certificate_fails_at_once(server, target, waits, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise urllib.error.URLError(ssl.SSLCertVerificationError("certificate has expired"))

    monkeypatch.setattr(urllib.request.OpenerDirector, "open", refuse)
    with pytest.raises(DownloadError, match=r"certificate has expired.*fix the cause"):
        download_from(server, target)
    assert waits == []


def test_server_that_is_not_there(target, waits):
    with faulty.running(CONTENT) as gone:
        pass
    with pytest.raises(DownloadError, match=r"gave up after 4 attempts .*refused"):
        download_from(gone, target)


# --- digests ---


def test_wrong_digest_is_set_aside(server, target):
    with pytest.raises(DownloadError, match=f"refused has MD5 {MD5}, expected {'0' * 32}"):
        download(server.url, target, "0" * 32)
    assert names(target.parent) == ["a.tar.refused"]


def test_bytes_spoilt_on_the_way_never_get_the_name(server, target):
    interrupted(server, target, 20_000)
    with target.with_name("a.tar.part").open("r+b") as stream:
        stream.write(b"spoilt")
    with pytest.raises(DownloadError, match=f"expected {MD5}"):
        download_from(server, target)
    assert not target.exists()
    download_from(server, target)
    assert target.read_bytes() == CONTENT


def test_file_in_place_is_checked_not_downloaded(server, target):
    target.parent.mkdir()
    target.write_bytes(CONTENT)
    assert download_from(server, target)["md5"] == MD5
    assert server.ranges == []
    assert read_receipt(target)["md5"] == MD5
    again = download("http://nobody.invalid/a.tar", target, MD5)
    assert again["url"].startswith(server.url), "the address that it came from"
    target.write_bytes(OTHER)
    with pytest.raises(DownloadError, match=r"a\.tar has MD5 .*move it away"):
        download_from(server, target)
    assert target.read_bytes() == OTHER


def test_a_page_in_the_place_of_the_file_costs_nothing(server, target):
    interrupted(server, target, 20_000)
    server.faults = [lambda handler: (handler.start(200, 4), handler.body(b"page"))]
    with pytest.raises(DownloadError, match=r"4 bytes, 20000 are in .*a\.tar\.part: check the address"):
        download_from(server, target)
    assert target.with_name("a.tar.part").read_bytes() == CONTENT[:20_000]
    assert download_from(server, target)["md5"] == MD5


# --- the disk ---


def test_disk_space_is_checked_before_the_first_byte(server, target, monkeypatch):
    free(monkeypatch, 99_999)
    with pytest.raises(DownloadError, match=r"data: 0.00 GB of disk space needed, 0.00 GB free"):
        download_from(server, target, room=2.0)
    assert not target.with_name("a.tar.part").exists()
    download_from(server, target, room=1.9)
    assert target.exists()


def test_disk_space_already_taken_by_the_part_is_not_asked_again(server, target, monkeypatch):
    interrupted(server, target, 20_000)
    free(monkeypatch, 30_000)
    download_from(server, target)
    assert target.exists()


def test_full_disk_keeps_the_part(target, waits):
    big = bytes(3 << 20)
    with faulty.running(big) as server:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, hard))
        try:
            with pytest.raises(DownloadError, match=r"File too large.*the partial download is kept: fix the cause"):
                download(server.url, target)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert waits == [], "a full disk is not the network's fault"
        assert target.with_name("a.tar.part").stat().st_size == 2 << 20
        download(server.url, target, hashlib.md5(big).hexdigest())
        assert server.ranges == [None, f"bytes={2 << 20}-"]
    assert target.read_bytes() == big


# --- what the command line shares ---


def test_progress_bar_begins_where_the_part_ends(server, target, monkeypatch, capsys):
    interrupted(server, target, 20_000)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    download_from(server, target)
    shown = capsys.readouterr().err
    assert "a.tar:  40%" in shown
    assert "a.tar: 100%" in shown


@pytest.mark.parametrize(
    "text",
    ["file:///etc/hostname", "ftp://h/a", "a.tar", "http:///a", "http://h:99999/a", "http://h/a b", "http://[::1"],
)
def test_bad_addresses_are_refused(text):
    assert http_address("https://host:80/a%20b/") == "https://host:80/a%20b"
    with pytest.raises(ArgumentTypeError, match="expected an address such as"):
        http_address(text)


# --- all of it together ---

FAULTS = st.one_of(
    st.integers(0, 3_000).map(faulty.cut),
    st.integers(0, 3_000).map(faulty.reset),
    st.integers(0, 3_000).map(lambda n: lambda handler: faulty.whole(handler, n)),
    st.tuples(st.integers(0, 2_999), st.integers(0, 2_999)).map(
        lambda ends: faulty.lie(
            f"bytes {ends[0]}-{ends[1]}/3000", OTHER[: max(ends[1] - ends[0] + 1, 0)], ETag='"other"'
        )
    ),
    st.sampled_from([faulty.status(500), faulty.status(429)]),
)


@pytest.fixture(scope="module")
def small_server():
    with faulty.running(CONTENT[:3_000]) as running:
        yield running


@settings(deadline=None, max_examples=40)
@given(faults=st.lists(FAULTS, max_size=8), per_process=st.integers(1, 4))
def test_whatever_the_faults_the_file_is_right(small_server, faults, per_process):
    small_server.faults = list(faults)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetch, "ATTEMPTS", per_process)
        patch.setattr(time, "sleep", lambda _: None)
        target = Path(folder, "a")
        for _ in range(2 * len(faults) + 2):
            with suppress(DownloadError):
                download(small_server.url, target, hashlib.md5(CONTENT[:3_000]).hexdigest())
                break
            assert not target.exists()
        assert target.read_bytes() == CONTENT[:3_000]
