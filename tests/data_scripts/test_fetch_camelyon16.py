import hashlib
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from medspeed.apps.pathology.slides.camelyon import read_slide_set
from medspeed.data_scripts import fetch_camelyon16
from medspeed.data_scripts.fetch import DownloadError
from medspeed.data_scripts.fetch_camelyon16 import CHECKSUMS, choose, fetch, main, read_checksums
from tests import faulty_server as http
from tests.faulty_server import FaultyServer

CONTENT = {
    "images/normal_001.tif": b"n" * 3_000,
    "images/tumor_001.tif": b"t" * 5_000,
    "images/test_001.tif": b"e" * 4_000,
    "annotations/tumor_001.xml": b"<ASAP_Annotations/>",
    "evaluation/reference.csv": b"test_001,Normal,None,None\n",
}
OF_TUMOUR = ["annotations/tumor_001.xml", "images/tumor_001.tif"]


def listing(content: dict[str, bytes] = CONTENT) -> str:
    lines = [f"{hashlib.md5(body).hexdigest()}  {path}" for path, body in content.items()]
    others = (f"{'0' * 32} {path}" for path in (" README.md", " masks/tumor_001_mask.tif", "*../images/evil.tif"))
    return "\n".join([*lines, *others]) + "\n"


class Bucket(http.Handler):
    """Serves a file for each path, and states sizes."""

    files: dict[str, bytes]
    asked: list[str]

    def do_GET(self) -> None:  # noqa: N802 - http.server's name
        path = self.path.lstrip("/")
        self.asked.append(path)
        if path not in self.files:
            self.server.faults.insert(0, http.status(404))
        self.server.content, self.server.etag = self.files.get(path, b""), f'"{path}"'
        super().do_GET()

    def do_HEAD(self) -> None:  # noqa: N802 - http.server's name
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.files[self.path.lstrip("/")])))
        self.end_headers()


@contextmanager
def bucket(files: dict[str, bytes]) -> Iterator[tuple[FaultyServer, list[str]]]:
    asked: list[str] = []
    with http.running(b"") as server:
        server.RequestHandlerClass = type("Serving", (Bucket,), {"files": files, "asked": asked})
        yield server, asked


@pytest.fixture
def served() -> Iterator[tuple[FaultyServer, list[str]]]:
    with bucket({**CONTENT, CHECKSUMS: listing().encode()}) as running:
        yield running


def call(server: FaultyServer, to: Path, *slides: str) -> Path:
    return fetch(slides, to, server.url)


def test_whole_way(served, tmp_path, capsys):
    server, asked = served
    assert main(["--slides", "all", "--to", str(tmp_path / "my set"), "--base-url", server.url + "/"]) == 0
    for path, body in CONTENT.items():
        assert (tmp_path / "my set" / path).read_bytes() == body
    assert asked[0] == CHECKSUMS
    assert not {"README.md", "masks/tumor_001_mask.tif"} & {*asked}
    out = capsys.readouterr().out
    assert f"5 files, {sum(map(len, CONTENT.values())) / 1e9:.2f} GB" in out
    assert out.index("GB already downloaded") < out.index("images/normal_001.tif")
    assert out.endswith(f"next: medspeed train pathology --data '{tmp_path}/my set'\n")
    found = read_slide_set(tmp_path / "my set")
    assert [(entry.name, entry.tumour) for entry in found.training] == [("normal_001", False), ("tumor_001", True)]
    assert [(entry.name, entry.tumour) for entry in found.testing] == [("test_001", False)]


def rubbish(handler: Bucket) -> None:
    handler.wfile.write(b"\0\1 rubbish\r\n\r\n")


def many_headers(handler: Bucket) -> None:
    handler.send_response(200)
    for number in range(300):
        handler.send_header(f"X{number}", "y")
    handler.end_headers()


def redirect_to_ftp(handler: Bucket) -> None:
    handler.send_response(302)
    handler.send_header("Location", "ftp://127.0.0.1:1/x")
    handler.end_headers()


@pytest.mark.parametrize(
    ("answer", "said"),
    [(rubbish, "rubbish"), (many_headers, "100 headers"), (redirect_to_ftp, "redirect to ftp://.* is not allowed")],
)
def test_a_size_that_is_not_told_as_it_should_is_one_line(served, tmp_path, capsys, monkeypatch, answer, said):
    server, asked = served
    monkeypatch.setattr(Bucket, "do_HEAD", answer)
    monkeypatch.setattr("time.sleep", lambda _: None)
    assert main(["--slides", "normal_001", "--to", str(tmp_path), "--base-url", server.url]) == 1
    assert asked == [CHECKSUMS]
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.match(f"fetch_camelyon16: error: .*{said}", last)


def test_second_call_fetches_what_is_missing(served, tmp_path, capsys):
    server, asked = served
    call(server, tmp_path, "tumor_001", "tumor_001")
    assert asked == [CHECKSUMS, *OF_TUMOUR]
    asked.clear()
    call(server, tmp_path, "tumor_001", "test_001")
    assert asked == ["evaluation/reference.csv", "images/test_001.tif"]
    assert "2 of 4 files already downloaded" in capsys.readouterr().out
    (tmp_path / "images" / "tumor_001.tif").unlink()
    asked.clear()
    call(server, tmp_path, "tumor_001")
    assert asked == ["images/tumor_001.tif"]


def test_cut_download_is_continued_by_the_next_call(served, tmp_path, waits):
    server, _ = served
    server.faults = [http.answer, http.answer, http.cut(2_000), *[http.status(503)] * 3]
    with pytest.raises(DownloadError, match=r"tumor_001\.tif.* the partial download is kept"):
        call(server, tmp_path, "tumor_001")
    server.ranges.clear()
    call(server, tmp_path, "tumor_001")
    assert server.ranges == ["bytes=2000-"]
    assert (tmp_path / "images" / "tumor_001.tif").read_bytes() == CONTENT["images/tumor_001.tif"]


def test_wrong_checksum_is_refused(tmp_path):
    files = {**CONTENT, CHECKSUMS: listing().encode(), "images/tumor_001.tif": b"other"}
    with (
        bucket(files) as (server, _),
        pytest.raises(DownloadError, match=r"images/tumor_001\.tif\.refused has MD5"),
    ):
        call(server, tmp_path, "tumor_001")
    assert not (tmp_path / "images" / "tumor_001.tif").exists()


def test_unknown_slides_are_refused_with_names_like_them(served, tmp_path, capsys):
    server, asked = served
    assert main(["--slides", "tumour_001", "--to", str(tmp_path), "--base-url", server.url]) == 1
    assert "slide 'tumour_001': no such slide (did you mean tumor_001?)" in capsys.readouterr().err
    assert asked == [CHECKSUMS]


def test_room_is_asked_for_before_the_first_slide(served, tmp_path, monkeypatch):
    server, asked = served
    needed = sum(len(CONTENT[path]) for path in OF_TUMOUR)
    call(server, tmp_path / "other", "normal_001")
    asked.clear()
    (tmp_path / "set").mkdir()
    shutil.copy(tmp_path / "other" / CHECKSUMS, tmp_path / "set")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**9, 0, needed - 1))
    with pytest.raises(DownloadError, match="disk space needed"):
        call(server, tmp_path / "set", "tumor_001")
    assert asked == []
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**9, 0, needed))
    call(server, tmp_path / "set", "tumor_001")


def test_sizes_that_cannot_be_learnt(tmp_path, waits, monkeypatch):
    monkeypatch.setattr(Bucket, "do_HEAD", lambda handler: handler.send_error(503))
    with (
        bucket({**CONTENT, CHECKSUMS: listing().encode()}) as (server, _),
        pytest.raises(DownloadError, match=r"gave up after 4 attempts .* status 503"),
    ):
        call(server, tmp_path, "tumor_001")
    assert len(waits) in (3, 6, 9)  # the first file to fail ends those that have not begun


def test_only_plain_paths_of_checksums_count(tmp_path):
    (tmp_path / CHECKSUMS).write_text(listing().replace("  images/tumor", "  ./CAMELYON16/images/tumor"))
    assert set(read_checksums(tmp_path / CHECKSUMS)) == set(CONTENT)


@pytest.mark.parametrize("text", [b"", b"<html>", b"\xff\xfe", b"0" * 32 + b"  README.md"])
def test_lists_that_are_none(tmp_path, text):
    (tmp_path / CHECKSUMS).write_bytes(text)
    with pytest.raises(ValueError, match=r"checksums\.md5"):
        read_checksums(tmp_path / CHECKSUMS)


def test_sample_is_chosen_by_name():
    digests = {f"images/{name}.tif": "0" * 32 for name in (*fetch_camelyon16.SAMPLE, "tumor_002")}
    assert list(choose(digests, ["sample"])) == [f"images/{name}.tif" for name in fetch_camelyon16.SAMPLE]


@pytest.mark.parametrize("arguments", [[], ["--slides", "all"], ["--slides", "--to", "x"], ["--to", "x"]])
def test_usage_errors_are_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "; --help lists every flag" in capsys.readouterr().err
