import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from data_scripts.partial import DownloadError, Part, Version, check_space, digests_of, load_record

URL = "http://127.0.0.1/a"
VERSION = Version(URL, 10, '"tag"', None)


def arrived(target: Path, content: bytes, version: Version | None = VERSION) -> None:
    with Part(target, URL) as part:
        part.start_over(version)
        part.append(content)


def test_bytes_are_counted_and_continued(tmp_path):
    target = tmp_path / "new" / "a"
    arrived(target, b"0123")
    with Part(target, URL) as part:
        assert (part.size, part.whole, part.version) == (4, False, VERSION)
        part.append(b"456789")
        assert part.whole
        assert part.digests.md5.hexdigest() == hashlib.md5(b"0123456789").hexdigest()
        assert part.digests.sha256.hexdigest() == hashlib.sha256(b"0123456789").hexdigest()
    assert part.path.read_bytes() == b"0123456789"
    assert sorted(path.name for path in target.parent.iterdir()) == ["a.part", "a.part.json"]


def test_starting_over_in_the_middle_appends_from_the_front(tmp_path):
    with Part(tmp_path / "a", URL) as part:
        part.start_over(VERSION)
        part.append(b"wrong")
        part.start_over(VERSION)
        part.append(b"right one!")
        assert part.whole
    assert part.path.read_bytes() == b"right one!"
    assert part.digests.sha256.digest() == hashlib.sha256(b"right one!").digest()


def test_writes_that_take_only_some_bytes_are_repeated(tmp_path, monkeypatch):
    with Part(tmp_path / "a", URL) as part:
        part.start_over(VERSION)
        with (tmp_path / "a.part").open("ab", buffering=0) as stream:
            monkeypatch.setattr(part._stream, "write", lambda rest: stream.write(rest[:3]), raising=False)
            part.append(b"0123456789")
    assert part.path.read_bytes() == b"0123456789"


@pytest.mark.parametrize(
    "sidecar",
    [
        None,
        "",
        "[1]",
        "{}",
        '{"url": "http://127.0.0.1/a"}',
        json.dumps({"url": URL, "total": "10", "etag": None, "last_modified": None}),
        json.dumps({"url": URL + "b", "total": 10, "etag": None, "last_modified": None}),
        json.dumps({"url": URL, "total": 3, "etag": None, "last_modified": None}),  # shorter than what has arrived
    ],
)
def test_bytes_of_unknown_origin_are_dropped(tmp_path, sidecar):
    target = tmp_path / "a"
    arrived(target, b"0123")
    if sidecar is None:
        (tmp_path / "a.part.json").unlink()
    else:
        (tmp_path / "a.part.json").write_text(sidecar)
    with Part(target, URL) as part:
        assert (part.size, part.whole, part.version) == (0, False, None)
    assert part.path.stat().st_size == 0
    assert not part.sidecar.exists()


def test_killed_while_starting_over_never_pairs_old_bytes_with_the_new_version(tmp_path, monkeypatch):
    target = tmp_path / "a"
    arrived(target, b"old!")

    def killed(path: Path, content: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("data_scripts.partial.write_json", killed)
    with Part(target, URL) as part, pytest.raises(KeyboardInterrupt):
        part.start_over(Version(URL, 10, '"new"', None))
    monkeypatch.undo()
    with Part(target, URL) as part:
        assert (part.size, part.version) == (0, None)


def test_disk_errors_name_the_file_and_the_remedy(tmp_path, monkeypatch):
    def full(path: Path, content: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("data_scripts.partial.write_json", full)
    with (
        Part(tmp_path / "a", URL) as part,
        pytest.raises(DownloadError, match=r"a\.part: cannot write \(No space left on device\).*free some space"),
    ):
        part.start_over(VERSION)


@pytest.mark.parametrize(
    ("etag", "date", "validator"),
    [
        ('"s"', "date", '"s"'),
        ('W/"w"', "date", "date"),
        ('W/"w"', None, None),
        (None, "date", "date"),
        (None, None, None),
    ],
)
def test_only_what_promises_equal_bytes_validates(etag, date, validator):
    assert Version(URL, 1, etag, date).validator == validator


def test_digests_of_a_file(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    digests = digests_of(tmp_path / "a")
    assert (digests.size, digests.md5.hexdigest()) == (3, "900150983cd24fb0d6963f7d28e17f72")  # RFC 1321


def test_damaged_records_are_none(tmp_path):
    path = tmp_path / "a.json"
    assert load_record(Version, path) is None
    path.write_bytes(b"\xff\xfe")
    assert load_record(Version, path) is None


def test_free_space_is_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(9 * 10**9, 0, 2 * 10**9))
    check_space(tmp_path, 2 * 10**9)
    with pytest.raises(DownloadError, match=r"3\.00 GB of disk space are needed, 2\.00 GB are free: free some"):
        check_space(tmp_path, 3 * 10**9)
