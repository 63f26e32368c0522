import os
import signal
import sys
import threading
import time
import traceback

import pytest
import torch

from medspeed.common.data.threads import map_in_threads, prefetch

CPU = torch.device("cpu")


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_results_come_in_the_order_of_the_items():
    def slow_first(item: int) -> int:
        time.sleep(0.05 if item == 0 else 0)
        return item * item

    assert map_in_threads(slow_first, range(5), workers=3) == [0, 1, 4, 9, 16]
    assert map_in_threads(slow_first, [], "squares") == []


def test_as_many_threads_as_asked_or_as_cores():
    def thread_name(_: int) -> str:
        time.sleep(0.02)
        return threading.current_thread().name

    assert len(set(map_in_threads(thread_name, range(6), workers=3))) == 3
    cores = len(os.sched_getaffinity(0))
    assert len(set(map_in_threads(thread_name, range(4 * cores)))) == cores


def test_torch_is_single_threaded_in_the_threads_only():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        counts = map_in_threads(lambda _: torch.get_num_threads(), range(3), workers=2)
        assert counts == [1, 1, 1]
        assert torch.get_num_threads() == 2
        started_later: list[int] = []
        thread = threading.Thread(target=lambda: started_later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert started_later == [2]
    finally:
        torch.set_num_threads(before)


def test_the_first_error_cancels_the_rest():
    begun = []

    def fail_at_two(item: int) -> None:
        begun.append(item)
        time.sleep(0.02)
        if item == 2:
            raise ValueError("item 2")

    with pytest.raises(ValueError, match="item 2"):
        map_in_threads(fail_at_two, range(50), workers=1)
    assert begun[:3] == [0, 1, 2]
    assert len(begun) <= 4


def test_ctrl_c_cancels_the_rest():
    begun = []

    def interrupted_at_two(item: int) -> None:
        begun.append(item)
        if item == 2:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)

    with pytest.raises(KeyboardInterrupt):
        map_in_threads(interrupted_at_two, range(100), workers=2)
    assert len(begun) < 10


def test_a_bar_on_a_terminal_or_else_a_line_tells_what_is_done(capsys, monkeypatch):
    map_in_threads(str, range(4), "preparing cases")
    assert capsys.readouterr() == ("preparing cases: 4\n", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    map_in_threads(str, range(4), "preparing cases")
    found = capsys.readouterr()
    assert found.out == ""
    assert "preparing cases: 100%" in found.err


def test_all_items_come_in_order_from_another_thread():
    def items():
        for number in range(5):
            yield number, threading.get_ident()

    made = list(prefetch(items(), CPU))
    assert [number for number, _ in made] == [0, 1, 2, 3, 4]
    assert threading.get_ident() not in {thread for _, thread in made}
    assert threads() == []


def test_exactly_one_item_is_made_ahead():
    made: list[int] = []
    second = threading.Event()

    def items():
        for number in range(5):
            made.append(number)
            if number == 1:
                second.set()
            yield number

    ahead = prefetch(items(), CPU)
    assert next(ahead) == 0
    assert second.wait(10)
    time.sleep(0.05)  # in which a third would come
    assert made == [0, 1]
    assert list(ahead) == [1, 2, 3, 4]


def test_an_error_is_raised_in_its_place_with_its_own_traceback():
    def failing():
        raise ValueError("case17: damaged")

    def items():
        yield 0
        failing()

    ahead = prefetch(items(), CPU)
    assert next(ahead) == 0
    with pytest.raises(ValueError, match="case17: damaged") as error:
        next(ahead)
    assert "failing" in [frame.name for frame in traceback.extract_tb(error.value.__traceback__)]
    assert threads() == []


def test_leaving_early_ends_the_thread_and_closes_the_items():
    closed: list[bool] = []

    def items():
        try:
            while True:
                time.sleep(0.01)
                yield 0
        finally:
            closed.append(True)

    ahead = prefetch(items(), CPU)
    assert [next(ahead), next(ahead)] == [0, 0]
    assert threads() != []
    ahead.close()
    assert closed == [True]
    assert threads() == []
