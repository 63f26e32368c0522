import gzip
import hashlib
import importlib.util
import io
import json
import os
import re
import resource
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_scripts import fetch_msd
from data_scripts.fetch import DownloadError, locked, read_receipt
from data_scripts.fetch_msd import ARCHIVES, BASE_URL, MsdArchive, fetch, main, missing_files, unpack
from tests import faulty_server as http
from tests.faulty_server import FaultyServer

SCRIPT = Path(fetch_msd.__file__)
LISTING = {
    "name": "Spleen",
    "training": [{"image": "./imagesTr/spleen_2.nii.gz", "label": "./labelsTr/spleen_2.nii.gz"}],
    "test": ["./imagesTs/spleen_1.nii.gz"],
}
FILES = ["imagesTr/spleen_2.nii.gz", "labelsTr/spleen_2.nii.gz", "imagesTs/spleen_1.nii.gz"]


def packed(names: list[str] = FILES, listing: dict[str, Any] = LISTING, top: str = "Task09_Spleen") -> bytes:
    contents = {"dataset.json": json.dumps(listing).encode(), "._dataset.json": b"mac"} | dict.fromkeys(
        names, b"voxels"
    )
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"{top}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


TAR = packed()


def archive_of(content: bytes) -> MsdArchive:
    return MsdArchive("Task09_Spleen", hashlib.md5(content).hexdigest(), "spleen", 0.1)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def call(server: FaultyServer, to: Path, **options: Any) -> Path:
    return fetch(**{"archive": archive_of(server.content), "to": to, "base_url": server.url, **options})


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with http.running(TAR) as running:
        yield running


def test_pins_and_address_are_monais():
    package = importlib.util.find_spec("monai")
    assert package is not None
    assert package.submodule_search_locations is not None
    source = Path(package.submodule_search_locations[0], "apps", "datasets.py").read_text()
    digests = dict(re.findall(r'"(Task\d\d_\w+)": "([0-9a-f]{32})"', source))
    for archive in ARCHIVES.values():
        assert archive.digest == digests[archive.task]
        assert f'"{BASE_URL}/{archive.task}.tar"' in source


def test_whole_way(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(ARCHIVES, "spleen", archive_of(TAR))
    to = tmp_path / "my data"
    assert main(["spleen", "--to", str(to), "--base-url", server.url + "/"]) == 0
    assert names(to) == [".Task09_Spleen.lock", "Task09_Spleen", "Task09_Spleen.tar.receipt.json"]
    assert names(to / "Task09_Spleen") == ["dataset.json", "imagesTr", "imagesTs", "labelsTr"]
    assert (to / "Task09_Spleen" / FILES[0]).read_bytes() == b"voxels"
    receipt = read_receipt(to / "Task09_Spleen.tar")
    assert receipt["url"] == server.url + "/Task09_Spleen.tar"
    assert receipt["sha256"] == hashlib.sha256(TAR).hexdigest()
    out = capsys.readouterr().out
    assert out.endswith(f"next: python apps/spleen/train.py --data '{to}/Task09_Spleen'\n")
    assert receipt["sha256"] in out


@pytest.mark.parametrize("algorithm", ["md5", "sha256"])
def test_second_call_returns_at_once(server, tmp_path, capsys, algorithm):
    archive = MsdArchive("Task09_Spleen", hashlib.new(algorithm, TAR).hexdigest(), "spleen", 0.1)
    call(server, tmp_path, archive=archive, keep_archive=True)
    assert call(server, tmp_path, archive=archive) == tmp_path / "Task09_Spleen"
    assert len(server.ranges) == 1
    assert "already there" in capsys.readouterr().out
    assert (tmp_path / "Task09_Spleen.tar").read_bytes() == TAR


def test_archive_brought_by_hand_needs_no_network(server, tmp_path, capsys):
    (tmp_path / "Task09_Spleen.tar").write_bytes(TAR)
    folder = call(server, tmp_path)
    assert missing_files(folder) == []
    assert server.ranges == []
    assert "already there, its digest is checked" in capsys.readouterr().out


def test_cut_download_is_continued_by_the_next_call(server, tmp_path, waits):
    server.faults = [http.cut(3_000), *[http.status(503)] * 3]
    with pytest.raises(DownloadError, match=r"gave up .*what has arrived is kept"):
        call(server, tmp_path)
    call(server, tmp_path)
    assert server.ranges[-1] == "bytes=3000-"
    assert server.served[-1] == len(TAR) - 3_000


@pytest.mark.parametrize("digest", ["0" * 32, "0" * 64])
def test_wrong_digest_is_never_unpacked(server, tmp_path, digest):
    with pytest.raises(DownloadError, match=f"expected {digest}"):
        call(server, tmp_path, archive=MsdArchive("Task09_Spleen", digest, "spleen", 0.1))
    assert names(tmp_path) == [".Task09_Spleen.lock", "Task09_Spleen.tar.refused"]


def test_evil_archive_leaves_the_archive_only(tmp_path):
    with (
        http.running(packed([*FILES, "../../evil"])) as server,
        pytest.raises(ValueError, match=r"'.*\.\./evil'"),
    ):
        call(server, tmp_path / "in")
    assert names(tmp_path) == ["in"]
    assert names(tmp_path / "in") == [".Task09_Spleen.lock", "Task09_Spleen.tar", "Task09_Spleen.tar.receipt.json"]


def test_archive_that_lacks_listed_files(tmp_path):
    with (
        http.running(packed(FILES[:1])) as server,
        pytest.raises(ValueError, match=r"names \./labelsTr/spleen_2\.nii\.gz, which it lacks \(2 in all\)"),
    ):
        call(server, tmp_path)
    assert not (tmp_path / "Task09_Spleen").exists()


def test_folders_of_another_origin_are_left_alone(server, tmp_path):
    folder = call(server, tmp_path)
    with pytest.raises(FileExistsError, match=r"is not what http.*its receipt says MD5"):
        call(server, tmp_path, archive=MsdArchive("Task09_Spleen", "0" * 32, "spleen", 0.1))
    (folder / FILES[1]).unlink()
    with pytest.raises(FileExistsError, match=r"1 files are missing .*labelsTr/spleen_2\.nii\.gz.*move it away"):
        call(server, tmp_path)
    (tmp_path / "Task09_Spleen.tar.receipt.json").unlink()
    with pytest.raises(FileExistsError, match=r"its receipt says MD5 None"):
        call(server, tmp_path)
    assert (folder / FILES[0]).exists()
    assert len(server.ranges) == 1


def test_room_for_archive_and_files_is_asked_for(server, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**6, 0, 2 * len(TAR) - 1))
    with pytest.raises(DownloadError, match="disk space are needed"):
        call(server, tmp_path)
    assert not (tmp_path / "Task09_Spleen.tar").exists()


def test_room_is_asked_for_again_before_unpacking(server, tmp_path, monkeypatch):
    (tmp_path / "Task09_Spleen.tar").write_bytes(TAR)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**6, 0, len(TAR) - 1))
    with pytest.raises(DownloadError, match="disk space are needed"):
        call(server, tmp_path)
    assert not (tmp_path / "Task09_Spleen").exists()


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "[" * 100_000,
        "[]",
        "{}",
        '{"training": 3}',
        '{"training": [{"image": "a"}]}',
        '{"training": []}',
        '{"training": "ab"}',
    ],
)
def test_listings_that_are_none(tmp_path, content):
    if content is not None:
        (tmp_path / "dataset.json").write_text(content)
    with pytest.raises(ValueError, match=r"dataset\.json"):
        missing_files(tmp_path)


@pytest.mark.real_data
def test_listing_of_real_cases(real_data):
    assert missing_files(real_data / "ct_spleen_real") == []
    missing = missing_files(
        real_data / "msd_spleen_labels"
    )  # labels only: 41 training and 20 test images are not there
    assert len(missing) == 61
    assert all("/images" in name for name in missing)


def test_errors_are_one_line_and_status_1(server, tmp_path):
    """The script itself, with the real pins, against bytes that are not MSD's."""
    command = [sys.executable, SCRIPT, "spleen", "--to", tmp_path, "--base-url", server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    found = hashlib.md5(TAR).hexdigest()
    assert re.fullmatch(rf"fetch_msd: .*\.refused is another file: MD5 {found}, .*expected 410d4a30.*\n", done.stderr)
    server.faults = [http.status(404)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert re.fullmatch(r"fetch_msd: http.*/Task09_Spleen\.tar: status 404 .*check the address\n", done.stderr)


def test_errors_with_line_breaks_are_one_line(tmp_path, capsys):
    (tmp_path / "a\nb" / "Task09_Spleen").mkdir(parents=True)
    assert main(["spleen", "--to", str(tmp_path / "a\nb")]) == 1
    err = capsys.readouterr().err
    assert "1 files are missing ['dataset.json']" in err
    assert err.count("\n") == 1


def test_two_processes_download_once(tmp_path, server):
    """The second waits for the lock; then the first has brought the data, and it returns at once."""
    code = "import sys; from pathlib import Path; from data_scripts.fetch_msd import *\n"
    code += "fetch(MsdArchive('Task09_Spleen', sys.argv[1], 'spleen', 0.1), Path(sys.argv[2]), base_url=sys.argv[3])"
    command = [sys.executable, "-c", code, hashlib.md5(TAR).hexdigest(), tmp_path, server.url]
    with locked(tmp_path / ".Task09_Spleen.lock"):
        both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
        for process in both:
            assert process.stderr is not None
            assert b"waiting" in process.stderr.readline()
    outputs = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum(b"already there" in output for output in outputs) == 1
    assert len(server.ranges) == 1


def test_interruption_is_status_130(server, tmp_path, monkeypatch, capsys):
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch_msd, "download", interrupt)
    assert main(["brats", "--to", str(tmp_path), "--base-url", server.url]) == 130
    assert "the same command goes on" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["spleen"],
        ["liver", "--to", "x"],
        ["spleen", "--to", "x", "--keep"],
        ["spleen", "--to", "x", "--base-url", "file:///data"],
        ["spleen", "--to", "x", "--base-url", "mirror"],
    ],
)
def test_usage_errors_are_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "error:" in capsys.readouterr().err


# --- archives that bite ---

Entry = tuple[str, bytes | None, dict[str, Any]]  # name, content (None: a folder), other fields of its header


def file(name: str, content: bytes = b"voxels", **fields: Any) -> Entry:
    return name, content, fields


def folder(name: str, **fields: Any) -> Entry:
    return name, None, {"type": tarfile.DIRTYPE} | fields


def tar_of(*entries: Entry, form: int = tarfile.PAX_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as tar:
        for name, content, fields in entries:
            member = tarfile.TarInfo(name)
            member.size = len(content or b"")
            for field, value in fields.items():
                setattr(member, field, value)
            tar.addfile(member, io.BytesIO(content or b""))
    return stream.getvalue()


SHORT = json.dumps({"training": [{"image": "a.nii.gz", "label": "a.nii.gz"}]}).encode()
GOOD = (folder("Organ"), file("Organ/dataset.json", SHORT), file("Organ/a.nii.gz", bytes(range(256)) * 9))


def extract(root: Path, content: bytes) -> Path:
    """Unpack to `root`/in/Organ; whatever happens, nothing else may come to be below `root`."""
    inside = root / "in"
    inside.mkdir(exist_ok=True)
    (inside / "a.tar").write_bytes(content)
    before = set(root.rglob("*"))
    try:
        unpack(inside / "a.tar", inside / "Organ")
    finally:
        new = set(root.rglob("*")) - before
        assert all(path.is_relative_to(inside / "Organ") for path in new), f"left behind: {new}"
    return inside / "Organ"


def refused(root: Path, content: bytes, match: str) -> None:
    with pytest.raises((ValueError, OSError), match=match) as failure:
        extract(root, content)
    assert str(root / "in") in str(failure.value)
    assert "\n" not in str(failure.value)
    assert not (root / "in" / "Organ").exists()


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_files_and_folders_come_out(tmp_path, form):
    long_name = "Organ/" + "sub/" * 20 + "a" * 90 + ".nii.gz"
    out = extract(tmp_path, tar_of(*GOOD, file(long_name), folder("Organ/empty"), form=form))
    assert (out / "dataset.json").read_bytes() == SHORT
    assert (out / "a.nii.gz").read_bytes() == bytes(range(256)) * 9
    assert (out.parent / long_name).read_bytes() == b"voxels"
    assert (out / "empty").is_dir()


def test_leading_dot_and_mac_files(tmp_path):
    more = (folder("."), file("./._Organ"), file("./Organ/._a"), file("./Organ/a"), file("Organ/._d/a"))
    out = extract(tmp_path, tar_of(*more, file("._Organ/a"), *GOOD))
    assert names(out) == ["a", "a.nii.gz", "dataset.json"]


def test_modes_owners_and_times_are_not_taken_over(tmp_path):
    mask = os.umask(0o022)
    try:
        out = extract(
            tmp_path, tar_of(*GOOD[1:], folder("Organ", mode=0o7777), file("Organ/a", mode=0o6700, uid=12345))
        )
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
        (file("/Organ/evil"), r"'/Organ/evil': expected a plain file or a folder below Organ"),
        (file("../evil"), "expected a plain file"),
        (file("Organ/../../evil"), "expected a plain file"),
        (folder("Organ/.."), "expected a plain file"),
        (file("Organ/..\\..\\evil"), "expected a plain file"),
        (file("C:/evil"), "expected a plain file"),
        (file("Organ/x", pax_headers={"path": "Organ/a\0b"}), r"'Organ/a\\x00b': expected"),
        (file("Organ/a\nb"), "expected a plain file"),
        (file("Organ/\x1b[31mb"), "expected a plain file"),
        (file("Organ/\udcff"), "expected a plain file"),
        (file("evil"), "expected a plain file"),
        (file("."), "expected a plain file"),
        (file("Organ/link", b"", type=tarfile.SYMTYPE, **LINK), "expected a plain file"),
        (file("Organ/link", b"", type=tarfile.LNKTYPE, linkname="Organ/a.nii.gz"), "expected a plain file"),
        (file("Organ/dev", b"", type=tarfile.CHRTYPE, devmajor=1, devminor=3), "expected a plain file"),
        (file("Organ/pipe", b"", type=tarfile.FIFOTYPE), "expected a plain file"),
        (file("Organ/./dataset.json"), "comes twice"),
        (file("Organ//DATASET.json"), "comes twice"),
        (file("Organ/dataset.json/evil"), "exists|Not a directory"),
        (file("Organ"), "comes twice"),
        (file("Organ/CAFE\u0301"), "comes twice"),
    ],
)
def test_evil_members_are_refused(tmp_path, entry, match):
    refused(tmp_path, tar_of(*GOOD, file("Organ/caf\u00e9"), entry, file("Organ/link/after")), match)


def test_too_many_members(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch_msd, "_MOST_MEMBERS", 2)
    refused(tmp_path, tar_of(*GOOD), r"'Organ/a.nii.gz': more members or bytes than")


def header(size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    member = tarfile.TarInfo("Organ/bomb")
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("size", [-512, 1 << 20, 1 << 50, 1 << 70])
def test_member_that_lies_about_its_size(tmp_path, size):
    refused(tmp_path, tar_of(*GOOD)[: 512 * 9] + header(size) + bytes(1024), "more members or bytes than|not unpacked")


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_SPARSE])
@pytest.mark.parametrize("size", [-(1 << 60), 0, 1 << 50, 1 << 70])
def test_extensions_that_lie_about_their_size(tmp_path, kind, size):
    refused(tmp_path, tar_of(*GOOD)[: 512 * 9] + header(size, kind) + bytes(1024), "not unpacked")


@pytest.mark.parametrize(
    "pax",
    [
        {"size": "-512"},
        {"GNU.sparse.map": "a,b"},
        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9", "GNU.sparse.name": "../evil"},
    ],
)
def test_pax_fields_that_lie(tmp_path, pax):
    refused(tmp_path, tar_of(*GOOD, file("Organ/x", b"1\n0\n1\n".ljust(512, b"\0"), pax_headers=pax)), "not unpacked")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: b"",
        lambda content: gzip.compress(content),
        lambda content: b"<html>not found</html>" * 100,
        lambda content: content[:2200],  # within a file
        lambda content: content[:1536] + b"x" + content[1537:],  # a header in the middle
        lambda content: content[:1636],  # within a header
    ],
)
def test_damaged_archives_are_refused(tmp_path, spoil: Callable[[bytes], bytes]):
    refused(tmp_path, spoil(tar_of(*GOOD, form=tarfile.USTAR_FORMAT)), "not unpacked")


def test_what_a_killed_process_left_is_removed(tmp_path):
    scratch = tmp_path / "in" / ".Organ.unpacking"
    (scratch / "Organ").mkdir(parents=True)
    (scratch / "Organ" / "half").touch()
    assert names(extract(tmp_path, tar_of(*GOOD))) == ["a.nii.gz", "dataset.json"]
    assert not scratch.exists()


def test_full_disk_leaves_nothing(tmp_path):
    (tmp_path / "a.tar").write_bytes(tar_of(*GOOD, file("Organ/big", bytes(2 << 20))))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError, match=r"File too large"):
            unpack(tmp_path / "a.tar", tmp_path / "Organ")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["a.tar"]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_damaged_bytes_never_escape(data):
    content = bytearray(
        tar_of(*GOOD, file("Organ/" + "n" * 99 + "/" + "n" * 60), form=data.draw(st.sampled_from([0, 1, 2])))
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
        except (ValueError, OSError):
            assert not Path(root, "in", "Organ").exists()
