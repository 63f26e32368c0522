import logging
import threading

import numpy as np
import pytest
import torch

from medspeed.common.errors import explained, log_warnings_as_lines
from medspeed.common.files import printable


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
    assert "lower --batch_size" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore"), "lower --batch_size"),
        (MemoryError(), "lower --batch_size"),
        (RuntimeError("could not create a primitive"), "lower --batch_size"),
        (RuntimeError("can't start new thread"), "lower --batch_size"),
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


def test_an_unknown_error_has_no_line():
    assert explained(RuntimeError("shape mismatch")) is None
    assert explained(KeyError("name")) is None


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
    assert capsys.readouterr().err == "error in a thread: [Errno 28] No space left on device: 'events'\n"
