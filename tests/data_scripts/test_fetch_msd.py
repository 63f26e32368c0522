import gzip
import hashlib
import importlib.util
import io
import json
import re
import resource
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from medspeed.common.data.dataset import read_dataset
from medspeed.common.files import locked
from medspeed.data_scripts import fetch_msd
from medspeed.data_scripts.fetch import DownloadError, read_receipt
from medspeed.data_scripts.fetch_msd import ARCHIVES, BASE_URL, fetch, main, unpack
from tests import faulty_server as http
from tests.faulty_server import FaultyServer

SCRIPT = Path(fetch_msd.__file__)
LISTING = {
    "name": "Spleen",
    "modality": {"0": "CT"},
    "labels": {"0": "background", "1": "spleen"},
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


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def call(server: FaultyServer, to: Path, **options: Any) -> Path:
    md5 = hashlib.md5(server.content).hexdigest()
    return fetch(**{"task": "Task09_Spleen", "md5": md5, "to": to, "base_url": server.url, **options})


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
    for task, md5 in ARCHIVES.values():
        assert md5 == digests[task]
        assert f'"{BASE_URL}/{task}.tar"' in source


def test_whole_way(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(ARCHIVES, "spleen", ("Task09_Spleen", hashlib.md5(TAR).hexdigest()))
    to = tmp_path / "my data"
    assert main(["spleen", "--to", str(to), "--base-url", server.url + "/"]) == 0
    assert names(to) == [".Task09_Spleen.lock", "Task09_Spleen", "Task09_Spleen.tar.receipt.json"]
    assert names(to / "Task09_Spleen") == ["dataset.json", "imagesTr", "imagesTs", "labelsTr"]
    assert (to / "Task09_Spleen" / FILES[0]).read_bytes() == b"voxels"
    receipt = read_receipt(to / "Task09_Spleen.tar")
    assert receipt["url"] == server.url + "/Task09_Spleen.tar"
    out = capsys.readouterr().out
    assert out.endswith(f"next: medspeed train spleen --data '{to}/Task09_Spleen'\n")
    assert receipt["md5"] in out


def test_second_call_returns_at_once(server, tmp_path, capsys):
    call(server, tmp_path, keep_archive=True)
    assert call(server, tmp_path) == tmp_path / "Task09_Spleen"
    assert len(server.ranges) == 1
    assert "already downloaded" in capsys.readouterr().out
    assert (tmp_path / "Task09_Spleen.tar").read_bytes() == TAR


def test_archive_brought_by_hand_needs_no_network(server, tmp_path, capsys):
    (tmp_path / "Task09_Spleen.tar").write_bytes(TAR)
    folder = call(server, tmp_path)
    assert len(read_dataset(folder).cases) == 1
    assert server.ranges == []
    assert "already downloaded, verifying its checksum" in capsys.readouterr().out


def test_cut_download_is_continued_by_the_next_call(server, tmp_path, waits):
    server.faults = [http.cut(3_000), *[http.status(503)] * 3]
    with pytest.raises(DownloadError, match=r"gave up .*the partial download is kept"):
        call(server, tmp_path)
    call(server, tmp_path)
    assert server.ranges[-1] == "bytes=3000-"
    assert server.served[-1] == len(TAR) - 3_000


def test_wrong_digest_is_never_unpacked(server, tmp_path):
    with pytest.raises(DownloadError, match=f"expected {'0' * 32}"):
        call(server, tmp_path, md5="0" * 32)
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
        pytest.raises(ValueError, match=r"not unpacked: .*labelsTr/spleen_2\.nii\.gz"),
    ):
        call(server, tmp_path)
    assert not (tmp_path / "Task09_Spleen").exists()


def test_folders_of_another_origin_are_left_alone(server, tmp_path):
    folder = call(server, tmp_path)
    with pytest.raises(FileExistsError, match=r"differs from http.*its receipt has MD5"):
        call(server, tmp_path, md5="0" * 32)
    (folder / FILES[1]).unlink()
    with pytest.raises(FileExistsError, match=r"labelsTr/spleen_2\.nii\.gz.*move it away"):
        call(server, tmp_path)
    (tmp_path / "Task09_Spleen.tar.receipt.json").unlink()
    with pytest.raises(FileExistsError, match=r"its receipt has MD5 None"):
        call(server, tmp_path)
    assert (folder / FILES[0]).exists()
    assert len(server.ranges) == 1


def test_room_for_archive_and_files_is_asked_for(server, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**6, 0, 2 * len(TAR) - 1))
    with pytest.raises(DownloadError, match="disk space needed"):
        call(server, tmp_path)
    assert not (tmp_path / "Task09_Spleen.tar").exists()


def test_room_is_asked_for_again_before_unpacking(server, tmp_path, monkeypatch):
    (tmp_path / "Task09_Spleen.tar").write_bytes(TAR)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**6, 0, len(TAR) - 1))
    with pytest.raises(DownloadError, match="disk space needed"):
        call(server, tmp_path)
    assert not (tmp_path / "Task09_Spleen").exists()


def test_errors_are_one_line_and_status_1(server, tmp_path):
    """The script itself, with the real pins, against bytes that are not MSD's."""
    command = [sys.executable, SCRIPT, "spleen", "--to", tmp_path, "--base-url", server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    found = hashlib.md5(TAR).hexdigest()
    assert re.fullmatch(rf"fetch_msd: error: .*\.refused has MD5 {found}, expected 410d4a30.*\n", done.stderr)
    server.faults = [http.status(404)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert re.fullmatch(r"fetch_msd: error: http.*/Task09_Spleen\.tar: status 404 .*check the address.*\n", done.stderr)


def test_errors_with_line_breaks_are_one_line(tmp_path, capsys):
    (tmp_path / "a\nb" / "Task09_Spleen").mkdir(parents=True)
    assert main(["spleen", "--to", str(tmp_path / "a\nb")]) == 1
    err = capsys.readouterr().err
    assert "its receipt has MD5 None" in err
    assert err.count("\n") == 1


def test_two_processes_download_once(tmp_path, server):
    """The second waits for the lock; then the first has brought the data, and it returns at once."""
    code = "import sys; from pathlib import Path; from medspeed.data_scripts.fetch_msd import fetch; "
    code += "print('here', flush=True); fetch('Task09_Spleen', sys.argv[1], Path(sys.argv[2]), base_url=sys.argv[3])"
    command = [sys.executable, "-c", code, hashlib.md5(TAR).hexdigest(), tmp_path, server.url]
    with locked(tmp_path / ".Task09_Spleen.lock"):
        both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
        for process in both:
            assert process.stdout is not None
            assert b"here" in process.stdout.readline()
        assert server.ranges == []
    outputs = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum(b"already downloaded" in output for output in outputs) == 1
    assert len(server.ranges) == 1


def test_interruption_is_status_130(server, tmp_path, monkeypatch, capsys):
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch_msd, "download", interrupt)
    assert main(["brats", "--to", str(tmp_path), "--base-url", server.url]) == 130
    assert "run the same command again" in capsys.readouterr().err


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
    assert "; --help lists every flag" in capsys.readouterr().err


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


SHORT = json.dumps(LISTING | {"training": [{"image": "a.nii.gz", "label": "a.nii.gz"}]}).encode()
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


LINK = {"linkname": "../../outside"}


@pytest.mark.parametrize(
    "entry",
    [
        file("../evil"),
        file("Organ/../../evil"),
        file("Organ/link", b"", type=tarfile.SYMTYPE, **LINK),
        file("Organ/dev", b"", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
        file("Organ/dataset.json/evil"),
        file("Organ/" + 3000 * "d/" + "evil"),
    ],
)
def test_evil_members_are_refused(tmp_path, entry):
    with pytest.raises((ValueError, OSError)):
        extract(tmp_path, tar_of(*GOOD, entry))
    assert not (tmp_path / "in" / "Organ").exists()


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
    scratch = tmp_path / "in" / ".Organ.unfinished"
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
