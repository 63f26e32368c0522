import hashlib
import logging
import os
from pathlib import Path

import pytest

from common.data import sources
from common.data.sources import SourceDigests, read_kept


@pytest.fixture
def hashed(monkeypatch) -> list[Path]:
    """Return the list of files whose content has been read so far."""
    files: list[Path] = []

    def spy(path: Path) -> str:
        files.append(path)
        return hashlib.sha256(path.read_bytes()).hexdigest()

    monkeypatch.setattr(sources, "sha256_of", spy)
    return files


def digest_anew(folder: Path, file: Path) -> str:
    digests = SourceDigests(folder)
    digest = digests.sha256(file)
    digests.save()
    return digest


def test_an_unchanged_file_is_read_once(tmp_path, hashed):
    file = tmp_path / "scan"
    file.write_bytes(b"voxels")
    expected = hashlib.sha256(b"voxels").hexdigest()
    assert digest_anew(tmp_path / "store", file) == expected
    assert digest_anew(tmp_path / "store", file) == expected
    assert hashed == [file]


def test_changed_content_of_equal_size_and_time_is_seen(tmp_path, hashed):
    file = tmp_path / "scan"
    file.write_bytes(b"voxels")
    first = digest_anew(tmp_path / "store", file)
    status = file.stat()
    file.write_bytes(b"VOXELS")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert digest_anew(tmp_path / "store", file) != first
    assert len(hashed) == 2


def test_a_replaced_file_is_read_again(tmp_path, hashed):
    file, other = tmp_path / "scan", tmp_path / "other"
    for path in (file, other):
        path.write_bytes(b"voxels")
        os.utime(path, ns=(0, 0))
    first = digest_anew(tmp_path / "store", file)
    other.replace(file)
    assert digest_anew(tmp_path / "store", file) == first
    assert len(hashed) == 2


def test_two_that_save_keep_both(tmp_path, hashed):
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(b"a")
    b.write_bytes(b"b")
    one, two = SourceDigests(tmp_path), SourceDigests(tmp_path)
    one.sha256(a)
    two.sha256(b)
    one.save()
    two.save()
    digests = SourceDigests(tmp_path)
    digests.sha256(a)
    digests.sha256(b)
    assert hashed == [a, b]


@pytest.mark.parametrize("content", ["{", "[]", '{"FILE": "ab"}', '{"FILE": [1, 2]}'])
def test_a_damaged_list_is_made_again(tmp_path, hashed, content):
    file = tmp_path / "scan"
    file.write_bytes(b"voxels")
    (tmp_path / "sources.json").write_text(content.replace("FILE", str(file)))
    assert digest_anew(tmp_path, file) == hashlib.sha256(b"voxels").hexdigest()
    digest_anew(tmp_path, file)
    assert len(hashed) == 1


def test_damage_is_logged(tmp_path, caplog):
    (tmp_path / "kept.json").write_text("{")
    assert read_kept(tmp_path / "kept.json") == {}
    assert "kept.json: damaged" in caplog.text
    assert read_kept(tmp_path / "nowhere.json") == {}


def test_a_list_that_cannot_be_written_is_logged(tmp_path, caplog):
    file = tmp_path / "scan"
    file.write_bytes(b"voxels")
    with caplog.at_level(logging.WARNING):
        digest_anew(file / "store", file)
    assert "sources.json: not written" in caplog.text
