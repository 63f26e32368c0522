import hashlib
import importlib.util
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data_scripts import fetch_msd
from data_scripts.archives import UnsafeArchiveError
from data_scripts.download import Patience, locked, read_receipt
from data_scripts.fetch_msd import ARCHIVES, BASE_URL, MsdArchive, fetch, main, missing_files
from data_scripts.partial import DownloadError
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


def archive_of(content: bytes, sha256: str | None = None) -> MsdArchive:
    return MsdArchive("Task09_Spleen", hashlib.md5(content).hexdigest(), "spleen", 0.1, sha256)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def call(server: FaultyServer, to: Path, **options: Any) -> Path:
    options = {"archive": archive_of(server.content), "base_url": server.url, "patience": quick(), **options}
    return fetch(to=to, **options)


def quick() -> Patience:
    return Patience(timeout=5, attempts=3, sleep=lambda _: None)


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
        assert archive.md5 == digests[archive.task]
        assert f'"{BASE_URL}/{archive.task}.tar"' in source


def test_whole_way(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(ARCHIVES, "spleen", archive_of(TAR))
    to = tmp_path / "my data"
    assert main(["spleen", "--to", str(to), "--base-url", server.url + "/"]) == 0
    assert names(to) == [".Task09_Spleen.lock", "Task09_Spleen", "Task09_Spleen.tar.receipt.json"]
    assert names(to / "Task09_Spleen") == ["dataset.json", "imagesTr", "imagesTs", "labelsTr"]
    assert (to / "Task09_Spleen" / FILES[0]).read_bytes() == b"voxels"
    receipt = read_receipt(to / "Task09_Spleen.tar")
    assert receipt is not None
    assert receipt.url == server.url + "/Task09_Spleen.tar"
    assert receipt.sha256 == hashlib.sha256(TAR).hexdigest()
    out = capsys.readouterr().out
    assert out.endswith(f"next: python apps/spleen/train.py --data '{to}/Task09_Spleen'\n")
    assert receipt.sha256 in out


def test_second_call_returns_at_once(server, tmp_path, capsys):
    call(server, tmp_path)
    assert call(server, tmp_path) == tmp_path / "Task09_Spleen"
    assert len(server.ranges) == 1
    assert "already there" in capsys.readouterr().out


def test_archive_is_kept_on_demand(server, tmp_path):
    call(server, tmp_path, keep_archive=True)
    assert (tmp_path / "Task09_Spleen.tar").read_bytes() == TAR


def test_archive_brought_by_hand_needs_no_network(server, tmp_path, capsys):
    (tmp_path / "Task09_Spleen.tar").write_bytes(TAR)
    folder = call(server, tmp_path)
    assert missing_files(folder) == []
    assert server.ranges == []
    assert "already there, its digest is checked" in capsys.readouterr().out


def test_cut_download_is_continued_by_the_next_call(server, tmp_path):
    server.faults = [http.cut(3_000), http.status(503), http.status(503)]
    with pytest.raises(DownloadError, match=r"gave up .* 3000 bytes are kept in .*Task09_Spleen\.tar\.part"):
        call(server, tmp_path)
    call(server, tmp_path)
    assert server.ranges[-1] == "bytes=3000-"
    assert server.served[-1] == len(TAR) - 3_000


@pytest.mark.parametrize("spoilt", ["md5", "sha256"])
def test_wrong_digest_is_never_unpacked(server, tmp_path, spoilt):
    archive = MsdArchive("Task09_Spleen", "0" * 32, "spleen", 0.1) if spoilt == "md5" else archive_of(TAR, "0" * 64)
    with pytest.raises(DownloadError, match=f"expected {'0' * 32}"):
        call(server, tmp_path, archive=archive)
    assert names(tmp_path) == [".Task09_Spleen.lock", "Task09_Spleen.tar.refused"]


def test_evil_archive_leaves_the_archive_only(tmp_path):
    with (
        http.running(packed([*FILES, "../../evil"])) as server,
        pytest.raises(UnsafeArchiveError, match=r"'.*\.\./evil'"),
    ):
        call(server, tmp_path / "in")
    assert names(tmp_path) == ["in"]
    assert names(tmp_path / "in") == [".Task09_Spleen.lock", "Task09_Spleen.tar", "Task09_Spleen.tar.receipt.json"]


def test_archive_that_lacks_listed_files(tmp_path):
    with (
        http.running(packed(FILES[:1])) as server,
        pytest.raises(ValueError, match=r"names \./labelsTr/spleen_2\.nii\.gz, which the archive lacks \(2 in all\)"),
    ):
        call(server, tmp_path)


def test_pinned_sha256_that_fits(server, tmp_path):
    assert call(server, tmp_path, archive=archive_of(TAR, hashlib.sha256(TAR).hexdigest())).is_dir()


def test_folders_of_another_origin_are_left_alone(server, tmp_path):
    folder = call(server, tmp_path)
    (folder / FILES[1]).unlink()
    with pytest.raises(
        FileExistsError, match=r"\./labelsTr/spleen_2\.nii\.gz is missing \(1 in all\): move the folder"
    ):
        call(server, tmp_path)
    with pytest.raises(FileExistsError, match="from another archive: MD5"):
        call(server, tmp_path, archive=MsdArchive("Task09_Spleen", "0" * 32, "spleen", 0.1))
    with pytest.raises(FileExistsError, match="from another archive: MD5"):
        call(server, tmp_path, archive=archive_of(TAR, "0" * 64))
    (tmp_path / "Task09_Spleen.tar.receipt.json").unlink()
    with pytest.raises(FileExistsError, match=r"no receipt .*Task09_Spleen\.tar\.receipt\.json"):
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
    assert re.fullmatch(rf"fetch_msd: .*MD5 is {found}, expected 410d4a30.*\.refused: .*\n", done.stderr)
    server.faults = [http.status(404)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert re.fullmatch(r"fetch_msd: http.*/Task09_Spleen\.tar: status 404 .*check the address\n", done.stderr)


def test_errors_with_line_breaks_are_one_line(tmp_path, capsys):
    (tmp_path / "a\nb" / "Task09_Spleen").mkdir(parents=True)
    assert main(["spleen", "--to", str(tmp_path / "a\nb")]) == 1
    err = capsys.readouterr().err
    assert "no receipt" in err
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
