import io
import logging
import threading
from typing import get_args

import numpy as np
import pytest
import torch
from tqdm import tqdm

from medspeed.common import console
from medspeed.common.console import (
    Kind,
    explained,
    hides_bar,
    log_warnings_as_lines,
    say,
    set_verbosity,
    wants_traceback,
)
from medspeed.common.files import printable
from medspeed.common.flags import Parser


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def as_verbose_as_before(monkeypatch):
    monkeypatch.setattr(console, "_verbosity", "normal")
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.mark.parametrize(
    ("verbosity", "shown"),
    [
        ("quiet", "warning error result"),
        ("normal", "note warning error result"),
        ("verbose", "detail note warning error result"),
    ],
)
def test_each_verbosity_shows_its_kinds_of_lines(verbosity, shown, capsys):
    set_verbosity(verbosity)
    for kind in ("detail", "note", "warning", "error", "result"):
        say(kind, kind)
    found = capsys.readouterr()
    assert (found.out + found.err).split() == [word for word in shown.split() if word != "error"] + ["error"]
    assert found.err == "error\n"
    assert (hides_bar(), hides_bar(True)) == (True if verbosity == "quiet" else None, True)
    assert wants_traceback() == (verbosity == "verbose")


def test_what_is_silent_prints_nothing_and_tells_what_was_before(capsys):
    assert set_verbosity("silent") == "normal"
    for kind in get_args(Kind):
        say(kind, kind)
    assert capsys.readouterr() == ("", "")
    assert hides_bar() is True
    assert set_verbosity("normal") == "silent"


@pytest.mark.parametrize(
    ("words", "verbosity"),
    [
        (["--data", "x", "--quiet"], "quiet"),
        (["--verbose", "a"], "verbose"),
        (["--quiet", "--verbose", "a"], "verbose"),
        (["--data", "quiet"], "normal"),
    ],
)
def test_a_command_line_says_how_much_is_printed(words, verbosity):
    parser = Parser()
    parser.add_argument("--data")
    parser.add_argument("rest", nargs="*")
    assert vars(parser.parse_args(words)).keys() == {"data", "rest"}
    assert console._verbosity == verbosity
    assert "--quiet" in parser.format_help()


def test_warnings_and_errors_have_colours_on_a_terminal_alone(monkeypatch):
    for stream, no_color, expected in (
        (Terminal(), "", "\x1b[33mcareful\x1b[0m\ndone\n"),
        (Terminal(), "1", "careful\ndone\n"),
        (io.StringIO(), "", "careful\ndone\n"),
    ):
        monkeypatch.setenv("NO_COLOR", no_color)
        say("careful", "warning", stream)
        say("done", "result", stream)
        assert stream.getvalue() == expected


def test_a_terminal_that_was_closed_does_not_end_a_program(monkeypatch):
    def closed(*_, **__):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(tqdm, "write", closed)
    say("hello")


def test_what_is_printed_is_there_at_once():
    written = io.BytesIO()
    buffered = io.TextIOWrapper(io.BufferedWriter(written), "utf-8")
    say("epoch 1", stream=buffered)
    assert written.getvalue() == b"epoch 1\n"


def too_much_for_torch():
    torch.empty(1 << 50)


def too_large_to_count():
    torch.empty(1 << 40, 1 << 40)


def too_much_for_numpy():
    np.ones(1 << 50)


@pytest.mark.parametrize("take", [too_much_for_torch, too_large_to_count, too_much_for_numpy])
def test_too_much_memory_is_one_line_with_advice(take):
    with pytest.raises((RuntimeError, MemoryError)) as found:
        take()
    line = explained(found.value)
    assert line is not None
    assert "lower the size of batches" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore"), "lower the size of batches"),
        (MemoryError(), "lower the size of batches"),
        (RuntimeError("could not create a primitive"), "lower the size of batches"),
        (RuntimeError("can't start new thread"), "lower the size of batches"),
        (RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed. "), "lower --workers"),
        (RuntimeError("DataLoader worker (pid(s) 12) exited unexpectedly"), "lower --workers"),
        (RuntimeError("unable to allocate shared memory(shm) for file </torch_7_1_0>: No space left"), "/dev/shm"),
    ],
)
def test_known_errors_of_libraries_come_with_advice(error, advice):
    line = explained(error)
    assert line is not None
    assert advice in line
    assert "\n" not in line


def test_an_error_of_the_system_names_its_files_first_and_no_number():
    assert explained(FileNotFoundError(2, "No such file or directory", "a/plan.json")) == (
        "a/plan.json: No such file or directory"
    )
    assert explained(OSError(18, "Invalid cross-device link", "a", None, "b")) == "a -> b: Invalid cross-device link"
    assert explained(TimeoutError(110, "Connection timed out")) == "Connection timed out"
    assert explained(FileExistsError("run: the folder is not empty")) == "run: the folder is not empty"


def test_an_unknown_error_has_no_line():
    assert explained(RuntimeError("shape mismatch")) is None
    assert explained(KeyError("name")) is None
    assert explained(RuntimeError("Caught RuntimeError in DataLoader worker process 0.\nno reader")) is None


def test_a_name_cannot_steer_a_terminal_nor_forge_a_line():
    assert printable("fäll 脾 \x1b[2J\udcff\r\nx", "\n") == "fäll 脾 \\x1b[2J\\udcff\\r\nx"
    assert printable("a\ncase_9: Dice 0.99") == "a\\ncase_9: Dice 0.99"
    assert explained(ValueError("\x1b[2J")) == "\\x1b[2J"


def test_what_ends_a_thread_is_a_line(capsys, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(logging.root, "handlers", [])
    log_warnings_as_lines()

    def write():
        raise OSError(28, "No space left on device", "events")

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert capsys.readouterr().err == "error in a thread: events: No space left on device\n"
