import threading
from pathlib import Path

import pytest

from common.files import write_json
from data_scripts.set_folder import MARKER, Parameters, claim, on_all_cores

PARAMETERS: Parameters = {"kind": "blocks", "seed": 0}


def test_a_claimed_folder_says_with_what_and_may_be_claimed_again(tmp_path: Path) -> None:
    claim(tmp_path / "set", "list.json", PARAMETERS)
    assert (tmp_path / "set" / MARKER).is_file()
    claim(tmp_path / "set", "list.json", dict(PARAMETERS))
    with pytest.raises(ValueError, match=r"holds another set \(seed 0 instead of 1\)"):
        claim(tmp_path / "set", "list.json", {**PARAMETERS, "seed": 1})


def test_a_whole_set_is_known_by_its_list(tmp_path: Path) -> None:
    write_json(tmp_path / "list.json", {"phantom": PARAMETERS})
    claim(tmp_path, "list.json", PARAMETERS)
    assert not (tmp_path / MARKER).exists()


@pytest.mark.parametrize("content", ["{}", "no json", "[1]"])
def test_a_list_of_somebody_else_is_other_content(tmp_path: Path, content: str) -> None:
    (tmp_path / "list.json").write_text(content)
    with pytest.raises(ValueError, match=r"holds other files \(list\.json\)"):
        claim(tmp_path, "list.json", PARAMETERS)


def test_hidden_files_are_no_content(tmp_path: Path) -> None:
    (tmp_path / ".part-of-a-killed-run").touch()
    claim(tmp_path, "list.json", PARAMETERS)
    assert (tmp_path / MARKER).is_file()


def test_each_index_is_made_once_and_no_more_than_allowed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
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

    on_all_cores(make, range(12), 3, "making", "thing", progress=False)
    assert sorted(made) == list(range(12))
    assert most[0] == 3


def test_the_first_failure_is_raised_and_the_rest_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    made = []

    def make(index: int) -> None:
        if index == 2:
            raise OSError("disk full")
        made.append(index)

    with pytest.raises(OSError, match="disk full"):
        on_all_cores(make, range(1000), 1, "making", "thing", progress=False)
    assert len(made) < 1000
