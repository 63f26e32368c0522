import io
import os
import resource
import stat
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_scripts.archives import UnsafeArchiveError, extract_tar

Entry = tuple[str, bytes | None, dict[str, Any]]  # name, content (None: a folder), other fields of its header


def file(name: str, content: bytes = b"voxels", **fields: Any) -> Entry:
    return name, content, fields


def folder(name: str, **fields: Any) -> Entry:
    return name, None, {"type": tarfile.DIRTYPE} | fields


def packed(*entries: Entry, form: int = tarfile.PAX_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as tar:
        for name, content, fields in entries:
            member = tarfile.TarInfo(name)
            member.size = len(content or b"")
            for field, value in fields.items():
                setattr(member, field, value)
            tar.addfile(member, io.BytesIO(content or b""))
    return stream.getvalue()


GOOD = (folder("Organ"), file("Organ/dataset.json", b"{}"), file("Organ/imagesTr/a.nii.gz", bytes(range(256)) * 9))


def extract(root: Path, content: bytes, **limits: int) -> Path:
    """Unpack to `root`/in/Organ; whatever happens, nothing else may come to be below `root`."""
    inside = root / "in"
    inside.mkdir(exist_ok=True)
    (inside / "a.tar").write_bytes(content)
    before = set(root.rglob("*"))
    try:
        extract_tar(inside / "a.tar", inside / "Organ", progress=False, **limits)
    finally:
        new = set(root.rglob("*")) - before
        assert all(path.is_relative_to(inside / "Organ") for path in new), f"left behind: {new}"
    return inside / "Organ"


def refused(root: Path, content: bytes, match: str, **limits: int) -> None:
    with pytest.raises(UnsafeArchiveError, match=match) as failure:
        extract(root, content, **limits)
    assert str(root / "in" / "a.tar") in str(failure.value)
    assert "\n" not in str(failure.value)
    assert not (root / "in" / "Organ").exists()


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_files_and_folders_come_out(tmp_path, form):
    long_name = "Organ/" + "sub/" * 20 + "a" * 90 + ".nii.gz"
    out = extract(tmp_path, packed(*GOOD, file(long_name), folder("Organ/empty"), form=form))
    assert (out / "dataset.json").read_bytes() == b"{}"
    assert (out / "imagesTr" / "a.nii.gz").read_bytes() == bytes(range(256)) * 9
    assert (out.parent / long_name).read_bytes() == b"voxels"
    assert (out / "empty").is_dir()


def test_leading_dot_and_mac_files(tmp_path):
    content = packed(
        folder("."),
        file("./._Organ"),
        folder("./Organ"),
        file("./Organ/._a"),
        file("./Organ/a"),
        file("Organ/._d/a"),
        file("._Organ/a"),
    )
    out = extract(tmp_path, content)
    assert [path.name for path in out.rglob("*")] == ["a"]


def test_modes_owners_and_times_are_not_taken_over(tmp_path):
    mask = os.umask(0o022)
    try:
        out = extract(tmp_path, packed(folder("Organ", mode=0o7777), file("Organ/a", mode=0o6777, uid=12345, mtime=1)))
    finally:
        os.umask(mask)
    assert stat.S_IMODE((out / "a").stat().st_mode) == 0o644
    assert stat.S_IMODE(out.stat().st_mode) == 0o755
    assert (out / "a").stat().st_uid == os.getuid()
    assert (out / "a").stat().st_mtime > 1_000_000


LINK = {"linkname": "../../outside"}


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        (file("/Organ/evil"), r"'/Organ/evil': its name is absolute"),
        (file("//Organ/evil"), "its name is absolute"),
        (file("../evil"), r"'\.\./evil': its name leads out"),
        (file("Organ/../../evil"), "leads out"),
        (file("Organ/.."), "leads out"),
        (folder("Organ/.."), "leads out"),
        (file("Organ/..\\..\\evil"), "Windows"),
        (file("C:/evil"), "Windows"),
        (file("c:evil"), "Windows"),
        (file("Organ/x", pax_headers={"path": "Organ/a\0b"}), r"'Organ/a\\x00b': its name holds control characters"),
        (file("Organ/a\nb"), "control characters"),
        (file("Organ/\x1b[31mb"), "control characters"),
        (file("Organ/\udcff"), "not UTF-8"),
        (file("Other/evil"), "outside the folder Organ"),
        (file("evil"), "outside the folder"),
        (file("."), "outside the folder"),
        (file("Organ/link", b"", type=tarfile.SYMTYPE, **LINK), "a symbolic link"),
        (file("Organ/._link", b"", type=tarfile.SYMTYPE, **LINK), "a symbolic link"),
        (file("Organ/link", b"", type=tarfile.LNKTYPE, **LINK), "a hard link"),
        (file("Organ/dev", b"", type=tarfile.CHRTYPE, devmajor=1, devminor=3), "a device"),
        (file("Organ/dev", b"", type=tarfile.BLKTYPE, devmajor=8), "a device"),
        (file("Organ/pipe", b"", type=tarfile.FIFOTYPE), "a pipe"),
        (file("Organ/odd", type=tarfile.CONTTYPE), "neither a file nor a folder"),
        (file("Organ/odd", type=b"Z"), "neither a file nor a folder"),
        (file("Organ/dataset.json"), r"'Organ/dataset.json': its name comes twice"),
        (file("Organ/./dataset.json"), "comes twice"),
        (file("Organ//DATASET.json"), "comes twice"),
        (folder("Organ"), "comes twice"),
        (folder("Organ/dataset.json"), "comes twice"),
        (file("Organ/dataset.json/evil"), "a file and a folder at once"),
        (file("Organ/imagesTr"), "a file and a folder at once"),
    ],
)
def test_evil_members_are_refused(tmp_path, entry, match):
    refused(tmp_path, packed(*GOOD, entry, file("Organ/after")), match)


def test_same_letters_in_two_unicode_forms_come_twice(tmp_path):
    refused(tmp_path, packed(*GOOD, file("Organ/\u00e9"), file("Organ/e\u0301")), "comes twice")


def test_link_then_file_through_it(tmp_path):
    content = packed(folder("Organ"), file("Organ/x", b"", type=tarfile.SYMTYPE, linkname=".."), file("Organ/x/evil"))
    refused(tmp_path, content, "a symbolic link")


def test_too_many_members(tmp_path):
    refused(tmp_path, packed(*GOOD), r"'Organ/imagesTr/a.nii.gz': the archive has more than 2 members", max_members=2)
    assert extract(tmp_path, packed(*GOOD), max_members=3).is_dir()


def test_too_many_bytes(tmp_path):
    refused(tmp_path, packed(*GOOD), "claim more than 2305 bytes", max_bytes=2305)
    assert extract(tmp_path, packed(*GOOD), max_bytes=2306).is_dir()


def header(size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    member = tarfile.TarInfo("Organ/bomb")
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("size", [1 << 20, 1 << 50, 1 << 70])
def test_member_that_claims_more_than_the_archive_has(tmp_path, size):
    refused(tmp_path, packed(*GOOD)[: 512 * 9] + header(size) + bytes(1024), "'Organ/bomb': the members claim more")


def test_negative_size(tmp_path):
    refused(tmp_path, header(-512) + bytes(1024), "negative|not a whole")


def test_sparse_members_are_refused(tmp_path):
    refused(tmp_path, header(0, tarfile.GNUTYPE_SPARSE) + bytes(1024), "a sparse file|not a whole")
    pax = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "Organ/s",
        "GNU.sparse.realsize": "1",
    }
    sparse = file("Organ/s", b"1\n0\n1\n".ljust(512, b"\0") + b"x", pax_headers=pax)
    refused(tmp_path, packed(*GOOD, sparse), "neither a file")


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_SPARSE])
@pytest.mark.parametrize("size", [-(1 << 60), -512, 1 << 50, 1 << 70])
def test_extensions_that_lie_about_their_size(tmp_path, kind, size):
    refused(tmp_path, packed(*GOOD)[: 512 * 9] + header(size, kind) + bytes(1024), "not a whole|damaged|sparse|claim")


@pytest.mark.parametrize(
    "pax",
    [
        {"size": "-512"},
        {"GNU.sparse.map": "a,b"},
        {"GNU.sparse.size": "x", "GNU.sparse.map": "0,1"},
        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"},
    ],
)
def test_pax_fields_that_lie(tmp_path, pax):
    refused(tmp_path, packed(*GOOD, file("Organ/x", pax_headers=pax)), "not a whole|negative|neither a file")


def test_compressed_archives_are_refused(tmp_path):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        tar.addfile(tarfile.TarInfo("Organ/a"))
    refused(tmp_path, stream.getvalue(), "not a whole, plain tar archive")


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda content: b"", "not a whole, plain tar"),
        (lambda content: b"<html>not found</html>" * 100, "not a whole, plain tar"),
        (lambda content: content[:3200], "not a whole, plain tar|claim more"),  # within a file
        (lambda content: content[:1536] + b"x" + content[1537:], "damaged after byte 1536"),  # a header in the middle
        (lambda content: content[:1636], "not a whole, plain tar|damaged"),  # within a header
    ],
)
def test_damaged_archives_are_refused(tmp_path, spoil: Callable[[bytes], bytes], match):
    refused(tmp_path, spoil(packed(folder("Organ"), file("Organ/a"), *GOOD[1:], form=tarfile.USTAR_FORMAT)), match)


def test_endless_extended_headers_are_refused(tmp_path):
    extended = tarfile.TarInfo("x")
    extended.type = tarfile.XHDTYPE
    refused(tmp_path, extended.tobuf(tarfile.USTAR_FORMAT) * 3000 + bytes(1024), "not a whole, plain tar")


def test_archive_without_the_folder(tmp_path):
    refused(tmp_path, packed(folder(".")), "does not hold a folder Organ")
    refused(tmp_path, packed(file("Organ")), "does not hold a folder Organ")


def test_folder_in_place_is_left_alone(tmp_path):
    out = extract(tmp_path, packed(*GOOD))
    (out / "mine").touch()
    with pytest.raises(FileExistsError, match=r"Organ is there: move it away"):
        extract_tar(tmp_path / "in" / "a.tar", out, progress=False)
    assert (out / "mine").exists()


def test_what_a_killed_process_left_is_removed(tmp_path):
    scratch = tmp_path / "in" / ".Organ.unpacking"
    (scratch / "Organ").mkdir(parents=True)
    (scratch / "Organ" / "half").touch()
    out = extract(tmp_path, packed(*GOOD))
    assert not (out / "half").exists()
    assert not scratch.exists()


def test_full_disk_leaves_nothing(tmp_path):
    content = packed(*GOOD, file("Organ/big", bytes(2 << 20)))
    (tmp_path / "a.tar").write_bytes(content)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError, match=r"File too large; nothing of the archive is unpacked: '.*Organ/big'"):
            extract_tar(tmp_path / "a.tar", tmp_path / "Organ", progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_damaged_bytes_never_escape(data):
    content = bytearray(
        packed(*GOOD, file("Organ/" + "n" * 99 + "/" + "n" * 60), form=data.draw(st.sampled_from([0, 1, 2])))
    )
    for _ in range(data.draw(st.integers(1, 6))):
        block = data.draw(st.integers(0, len(content) // 512 - 1)) * 512
        content[block + data.draw(st.integers(0, 511))] = data.draw(st.integers(0, 255))
        if data.draw(st.booleans()):  # mend the checksum of the header, if it is one, so that the damage is looked at
            content[block + 148 : block + 156] = b" " * 8
            content[block + 148 : block + 156] = b"%06o\0 " % sum(content[block : block + 512])
    with tempfile.TemporaryDirectory() as root:
        try:
            extract(Path(root), bytes(content))
        except UnsafeArchiveError:
            assert not Path(root, "in", "Organ").exists()
