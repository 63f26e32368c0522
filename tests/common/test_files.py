import json
import os
import re
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from medspeed.common import files
from medspeed.common.files import atomic_path, from_json, hold, read_as, read_object, sha256_of, write_json, write_text


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(ZeroDivisionError), atomic_path(path) as part:
        part.write_text("ne" * (1 // 0))
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["a" * 255, "\u00e4" * 124 + ".nii.gz", os.fsdecode(b"\xe9.nii.gz")])
def test_a_name_as_long_as_any_is_written(name, tmp_path):
    with atomic_path(tmp_path / name) as part:
        assert part.suffixes == Path(name).suffixes
        part.write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_the_temporary_name_keeps_the_suffixes(tmp_path):
    with atomic_path(tmp_path / "scan.nii.gz") as part:
        assert part.name.endswith("scan.nii.gz")
        assert part.parent == tmp_path
        part.write_bytes(b"x")


def test_the_mode_follows_the_umask(tmp_path):
    write_text(tmp_path / "a", "x")
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o666 & ~mask


def test_json_refuses_what_json_has_not(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "a.json", {"dice": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_sha256_of_abc(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    # FIPS 180-2, appendix B.1
    assert sha256_of(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_full_disk_keeps_the_old_file(tmp_path):
    program = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from medspeed.common.files import write_text\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "write_text(Path(sys.argv[1]), 'x' * 2000)\n"
    )
    path = tmp_path / "a.txt"
    write_text(path, "old")
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False)
    assert "File too large" in done.stderr
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_disk_without_a_block_left_is_named_where_a_folder_is_locked(tmp_path, monkeypatch):
    def full(descriptor: int, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match=re.escape(f"No space left on device: '{tmp_path}'")):
        hold(tmp_path / ".lock")


def test_a_new_name_is_flushed_with_its_folder(tmp_path, monkeypatch):
    flushed = list[Path]()
    monkeypatch.setattr("medspeed.common.files.flush_to_disk", flushed.append)
    write_text(tmp_path / "a.txt", "new")
    assert [path.name for path in flushed[1:]] == [tmp_path.name]


def test_a_file_system_without_locks_is_taken_as_it_is_and_left_as_it_was(tmp_path, monkeypatch):
    def without(descriptor: int, command: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.lockf", without)
    opened = len([*Path("/proc/self/fd").iterdir()])
    hold(tmp_path / ".lock")
    assert len([*Path("/proc/self/fd").iterdir()]) == opened


def test_a_disk_that_tells_only_when_it_is_flushed_is_named_too(tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=re.escape(f"No space left on device: '{tmp_path}'")):
        write_text(tmp_path / "a.txt", "new")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{torn", r"a\.json: expected JSON text \(.*\); copy it again"),
        (b"\xff\xfe", "expected JSON text"),
        (b"[" * 100_000, r"expected JSON text \(maximum recursion depth"),
        (b"[1]", r"a\.json: expected a JSON object, found a list; copy it again"),
    ],
)
def test_a_file_that_holds_no_object_is_named_with_the_remedy(tmp_path, content, message):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_object(path, "copy it again")
    path.write_text('{"a": 1}')
    assert read_object(path) == {"a": 1}


@dataclass(frozen=True)
class Inner:
    names: tuple[str, ...]


@dataclass(frozen=True)
class Outer:
    folder: Path
    spacing: tuple[float, float, float] | None
    parts: tuple[Inner, ...]
    named: dict[str, Any]
    inner: Inner | None = None


def test_a_dataclass_comes_back_from_json():
    outer = Outer(Path("/a"), (1.0, 2.0, 3.0), (Inner(("x", "y")), Inner(())), {"channels": [4, 8]}, Inner(("z",)))
    assert from_json(Outer, json.loads(json.dumps(asdict(outer), default=str))) == outer
    assert from_json(Outer, {"folder": "/a", "spacing": None, "parts": [], "named": {}}).inner is None


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"names": [], "colour": 1}, "unknown field colour"),
        ({}, "missing required field `names`"),
        ({"names": ["a", 1]}, r"Expected `str`, got `int` - at `names\[1\]`"),
        ({"names": "ab"}, "Expected `array`, got `str` - at `names`"),
        ({"names": None}, "Expected `array`, got `null` - at `names`"),
    ],
)
def test_what_does_not_fit_is_named(content, problem, tmp_path):
    with pytest.raises(ValueError, match=problem):
        from_json(Inner, content)
    path = tmp_path / "a.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: .*{problem}.*; copy it again"):
        read_as(path, Inner, "copy it again")


def test_writing_from_many_threads_leaves_the_umask(tmp_path):
    before = os.umask(0o027)
    os.umask(before)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: write_text(tmp_path / str(number), "", flush=False), range(400)))
    after = os.umask(before)
    assert after == before
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o666 & ~before}


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe.json")
    for path in (tmp_path, tmp_path / "pipe.json"):
        with pytest.raises(
            ValueError, match=f"{path}: expected a regular file .*found a folder, pipe or device; copy it"
        ):
            read_object(path, "copy it again")
    monkeypatch.setattr(files, "_MAX_JSON", 4)
    write_text(tmp_path / "a.json", '{"a": 1}')
    with pytest.raises(ValueError, match=r"a\.json: expected a regular file of at most 4 bytes, found 8 bytes"):
        read_object(tmp_path / "a.json")
    with pytest.raises(FileNotFoundError):
        read_object(tmp_path / "gone.json")


def test_json_may_begin_with_the_mark_that_windows_writes(tmp_path):
    (tmp_path / "a.json").write_text('{"name": 1}', encoding="utf-8-sig")
    assert read_object(tmp_path / "a.json") == {"name": 1}
