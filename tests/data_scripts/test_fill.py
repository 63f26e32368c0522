"""Folders of sets: claimed, gone on with, whole, and what holds something else."""

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from medspeed.data_scripts import MARKER, fill

PARAMETERS: dict[str, Any] = {"kind": "blocks", "seed": 0}
NAMES = ["a", "b", "c", "d"]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def write(folder: Path, fail_at: int | None = None, parameters: dict[str, Any] = PARAMETERS) -> Path:
    files = [(folder / "x" / name, folder / "y" / name) for name in NAMES]

    def make(index: int) -> None:
        if index == fail_at:
            raise OSError("no space left on device")
        for path in files[index]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(path.name)

    def listing() -> dict[str, Any]:
        assert all(path.exists() for pair in files for path in pair)
        return {"names": NAMES}

    return fill(folder / "list.json", parameters, files, make, listing, 2)


def test_a_set_has_its_items_its_list_and_nothing_else(tmp_path: Path) -> None:
    folder = write(tmp_path / "set")
    assert json.loads((folder / "list.json").read_text()) == {"names": NAMES, "synthetic": True, "phantom": PARAMETERS}
    assert sorted(contents(folder)) == ["list.json", *(f"{kind}/{name}" for kind in "xy" for name in NAMES)]


def test_a_whole_set_is_left_alone_and_a_missing_file_made_again(tmp_path: Path) -> None:
    before = contents(write(tmp_path))
    (tmp_path / MARKER).write_text(json.dumps(PARAMETERS))  # killed before the last step
    assert contents(write(tmp_path, fail_at=0)) == before
    (tmp_path / "y" / "c").unlink()
    assert contents(write(tmp_path, fail_at=0)) == before


def test_an_interrupted_run_has_no_list_and_is_finished_by_the_next(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no space left"):
        write(tmp_path / "set", fail_at=3)
    assert not (tmp_path / "set" / "list.json").exists()
    left = contents(tmp_path / "set")
    with pytest.raises(ValueError, match=r"contains another dataset \(seed 0 instead of 1\): choose another folder"):
        write(tmp_path / "set", parameters={**PARAMETERS, "seed": 1})
    assert contents(tmp_path / "set") == left
    assert contents(write(tmp_path / "set")) == contents(write(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("name", "text"),
    [("notes.txt", "mine"), ("list.json", '{"name": 1}'), ("list.json", "{torn"), ("list.json", "[1]"), (MARKER, "3")],
)
def test_a_folder_with_other_things_is_refused_and_untouched(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"contains other files \\({name}\\): choose a new or empty folder"):
        write(tmp_path)
    assert contents(tmp_path) == {name: text.encode()}


def test_hidden_files_are_no_content(tmp_path: Path) -> None:
    (tmp_path / ".part-of-a-killed-run").touch()
    assert (write(tmp_path) / "list.json").is_file()


def test_another_set_is_refused_naming_what_differs(tmp_path: Path) -> None:
    before = contents(write(tmp_path))
    with pytest.raises(ValueError, match=r"\(seed 0 instead of 9, size None instead of 'msd'\)"):
        write(tmp_path, parameters={"kind": "blocks", "seed": 9, "size": "msd"})
    assert contents(tmp_path) == before


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "set").write_text("mine")
    with pytest.raises(ValueError, match="is a file: pass a folder"):
        write(tmp_path / "set")


def test_progress_is_shown_on_a_terminal_while_something_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    write(tmp_path / "a")
    assert "4/4" in capsys.readouterr().err
    write(tmp_path / "a")
    assert capsys.readouterr().err == ""


def numbered(folder: Path, items: int, make: Callable[[int], None], most: int) -> None:
    fill(folder / "list.json", PARAMETERS, [(folder / str(n),) for n in range(items)], make, dict, most)


def test_each_index_is_made_once_and_no_more_than_allowed_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    lock, now, most, made = threading.Lock(), [0], [0], []

    def make(index: int) -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        threading.Event().wait(0.01)
        with lock:
            now[0] -= 1
            made.append(index)

    numbered(tmp_path, 12, make, 3)
    assert sorted(made) == list(range(12))
    assert most[0] == 3


def test_the_first_failure_is_raised_and_the_rest_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    made = []

    def make(index: int) -> None:
        if index == 2:
            raise OSError("disk full")
        made.append(index)

    with pytest.raises(OSError, match="disk full"):
        numbered(tmp_path, 1000, make, 1)
    assert len(made) < 1000
