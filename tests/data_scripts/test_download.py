import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data_scripts.download as module
from common.files import sha256_of
from data_scripts.download import Patience, Receipt, Remote, download, locked, read_receipt, receipt_path
from data_scripts.partial import DownloadError
from tests import faulty_server as http
from tests.faulty_server import CONTENT, MD5, OTHER, download_from, interrupted


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_whole_file_with_receipt(server, target, patience, waits):
    receipt = download_from(server, target, patience)
    assert target.read_bytes() == CONTENT
    assert names(target.parent) == ["a.tar", "a.tar.receipt.json"]
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    assert receipt == Receipt(server.url + "/a.tar", len(CONTENT), MD5, sha256, receipt.date)
    assert read_receipt(target) == receipt
    assert json.loads(receipt_path(target).read_text())["sha256"] == sha256_of(target)
    assert receipt.date.endswith("+00:00")
    assert waits == []


def test_cut_connections_are_resumed_where_they_ended(server, target, patience, waits):
    server.faults = [http.cut(100), http.reset(0), http.cut(1000)]
    download_from(server, target, patience)
    assert target.read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=100-", "bytes=100-", "bytes=1100-"]
    assert len(waits) == 3


def test_next_process_asks_only_for_the_rest(server, target, patience):
    interrupted(server, target, 12_345)
    download_from(server, target, patience)
    assert target.read_bytes() == CONTENT
    assert server.ranges == ["bytes=12345-"]
    assert server.served == [len(CONTENT) - 12_345]


def test_killed_process_is_continued(server, target, patience):
    server.faults = [http.hang(30_000)]
    code = "import sys; from pathlib import Path; from data_scripts.download import *; "
    code += "download(Remote(sys.argv[1]), Path(sys.argv[2]))"
    part = target.with_name("a.tar.part")
    with subprocess.Popen([sys.executable, "-c", code, server.url + "/a.tar", target]) as process:
        deadline = time.monotonic() + 20
        while not (part.exists() and part.stat().st_size == 30_000):
            assert time.monotonic() < deadline, "the process never got the bytes"
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    server.release.set()
    assert not target.exists()
    download_from(server, target, patience)
    assert target.read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=30000-"]
    assert server.served[1] == len(CONTENT) - 30_000


def test_whole_part_needs_no_request(server, target, patience):
    server.faults = [http.cut(100)]
    with pytest.raises(DownloadError):
        download_from(server, target, Patience(attempts=1))
    target.with_name("a.tar.part").write_bytes(CONTENT)  # killed between the last byte and the renaming
    download_from(server, target, patience)
    assert target.read_bytes() == CONTENT
    assert len(server.ranges) == 1


def test_slow_server_times_out_and_is_resumed(server, target, waits):
    server.faults = [http.hang(500)]
    download_from(server, target, Patience(timeout=0.2, sleep=waits.append))
    assert target.read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=500-"]


def test_server_without_ranges_starts_over(server, target, patience):
    interrupted(server, target, 20_000)
    server.faults = [lambda handler: http.whole(handler, 5_000), http.whole]
    download_from(server, target, patience)
    assert target.read_bytes() == CONTENT
    assert server.ranges == ["bytes=20000-", "bytes=5000-"]


def test_server_without_ranges_that_always_cuts_is_given_up(server, target, patience, waits, monkeypatch):
    monkeypatch.setattr(module, "_FRUITFUL", 5_000)  # bytes that come again and again are no progress
    server.faults = [lambda handler: http.whole(handler, 40_000)] * 20
    with pytest.raises(DownloadError, match=r"gave up after 4 attempts.*after 40000 of 50000 bytes.*run again later"):
        download_from(server, target, patience)
    assert len(server.ranges) == 4
    assert len(waits) == 3
    assert not target.exists()


def test_attempts_that_bring_much_are_not_counted(server, target, waits, monkeypatch):
    monkeypatch.setattr(module, "_FRUITFUL", 5_000)
    server.faults = [http.cut(5_000)] * 9
    download_from(server, target, Patience(attempts=2, sleep=waits.append))
    assert target.read_bytes() == CONTENT
    assert len(server.ranges) == 10
    assert max(waits) <= 1.0, "the waiting begins anew as well"


def test_part_of_another_address_is_dropped(server, target, patience):
    interrupted(server, target, 20_000)
    download(Remote(server.url + "/elsewhere.tar", MD5), target, patience=patience, progress=False)
    assert target.read_bytes() == CONTENT
    assert server.ranges == [None]


@pytest.mark.parametrize("pins", [{"md5": "0" * 32}, {"sha256": "1" * 64}])
def test_wrong_digest_is_set_aside(server, target, patience, pins):
    found = hashlib.md5(CONTENT) if "md5" in pins else hashlib.sha256(CONTENT)
    with pytest.raises(DownloadError, match=f"is {found.hexdigest()}, expected {next(iter(pins.values()))}; .*refused"):
        download(Remote(server.url, **pins), target, patience=patience, progress=False)
    assert names(target.parent) == ["a.tar.refused"]


def test_bytes_spoilt_on_the_way_never_get_the_name(server, target, patience):
    interrupted(server, target, 20_000)
    with target.with_name("a.tar.part").open("r+b") as stream:
        stream.write(b"spoilt")
    with pytest.raises(DownloadError, match=f"expected {MD5}"):
        download_from(server, target, patience)
    assert not target.exists()
    download_from(server, target, patience)
    assert target.read_bytes() == CONTENT


def test_upper_case_pin_fits(server, target, patience):
    download(Remote(server.url, MD5.upper()), target, patience=patience, progress=False)
    assert target.exists()


def test_file_in_place_is_checked_not_downloaded(server, target, patience):
    target.parent.mkdir()
    target.write_bytes(CONTENT)
    assert download_from(server, target, patience).md5 == MD5
    assert server.ranges == []
    assert read_receipt(target) is not None
    target.write_bytes(OTHER)
    with pytest.raises(DownloadError, match=r"a\.tar is there, but its MD5 is .*move it away"):
        download_from(server, target, patience)
    assert target.read_bytes() == OTHER


def test_disk_space_is_checked_before_the_first_byte(server, target, patience, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**6, 0, 99_999))
    with pytest.raises(DownloadError, match=r"data: 0.00 GB of disk space are needed, 0.00 GB are free"):
        download_from(server, target, patience, room=2.0)
    assert target.with_name("a.tar.part").stat().st_size == 0
    download_from(server, target, patience, room=1.9)
    assert target.exists()


def test_disk_space_already_taken_by_the_part_is_not_asked_again(server, target, patience, monkeypatch):
    interrupted(server, target, 20_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**6, 0, 30_000))
    download_from(server, target, patience)
    assert target.exists()


def test_full_disk_keeps_the_part(target, patience, waits):
    big = bytes(3 << 20)
    with http.running(big) as server:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, hard))
        try:
            with pytest.raises(DownloadError, match=r"a\.tar\.part: cannot write \(File too large\); .*run again"):
                download(Remote(server.url), target, patience=patience, progress=False)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert waits == [], "a full disk is not the network's fault"
        assert target.with_name("a.tar.part").stat().st_size == 2 << 20
        download(Remote(server.url), target, patience=patience, progress=False)
        assert server.ranges == [None, f"bytes={2 << 20}-"]
    assert target.read_bytes() == big


def test_progress_bar_begins_where_the_part_ends(server, target, patience, monkeypatch, capsys):
    interrupted(server, target, 20_000)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    download(Remote(server.url + "/a.tar", MD5), target, patience=patience)
    shown = capsys.readouterr().err
    assert "a.tar:  40%" in shown
    assert "19.5k/48.8k" in shown
    assert "a.tar: 100%" in shown


def test_second_process_waits_for_the_lock(tmp_path):
    lock, released = tmp_path / "new" / ".lock", tmp_path / "released"
    code = "import sys; from pathlib import Path; from data_scripts.download import locked\n"
    code += "with locked(Path(sys.argv[1])): print(Path(sys.argv[2]).exists())"
    command = [sys.executable, "-c", code, lock, released]
    with locked(lock):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stderr is not None
        assert b"another process works on the same data" in process.stderr.readline()
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
        released.touch()
    out, _ = process.communicate(timeout=20)
    assert out == b"True\n"


FAULTS = st.one_of(
    st.integers(0, 3_000).map(http.cut),
    st.integers(0, 3_000).map(http.reset),
    st.integers(0, 3_000).map(lambda n: lambda handler: http.whole(handler, n)),
    st.tuples(st.integers(0, 2_999), st.integers(0, 2_999)).map(
        lambda ends: http.lie(f"bytes {ends[0]}-{ends[1]}/3000", OTHER[: max(ends[1] - ends[0] + 1, 0)], ETag='"other"')
    ),
    st.sampled_from([http.status(500), http.status(429), http.status(416, Content_Range="bytes */3000")]),
)


@pytest.fixture(scope="module")
def small_server():
    with http.running(CONTENT[:3_000]) as running:
        yield running


@settings(deadline=None, max_examples=40)
@given(faults=st.lists(FAULTS, max_size=8), per_process=st.integers(1, 4))
def test_whatever_the_faults_the_file_is_right(small_server, faults, per_process):
    small_server.faults = list(faults)
    patience = Patience(attempts=per_process, sleep=lambda _: None)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "a")
        for _ in range(len(faults) + 1):
            # Without a pin: the right bytes must come from the protocol alone.
            with suppress(DownloadError):
                download(Remote(small_server.url), target, patience=patience, progress=False)
                break
            assert not target.exists()
        assert target.read_bytes() == CONTENT[:3_000]
