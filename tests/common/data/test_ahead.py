import threading
import time
import traceback

import pytest
import torch

from common.data.ahead import one_ahead

CPU = torch.device("cpu")


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("one ahead")]


def test_all_items_come_in_order_from_another_thread():
    def items():
        for number in range(5):
            yield number, threading.get_ident()

    made = list(one_ahead(items(), CPU))
    assert [number for number, _ in made] == [0, 1, 2, 3, 4]
    assert threading.get_ident() not in {thread for _, thread in made}
    assert threads() == []


def test_exactly_one_item_is_made_ahead():
    made: list[int] = []

    def items():
        for number in range(5):
            made.append(number)
            yield number

    ahead = one_ahead(items(), CPU)
    assert next(ahead) == 0
    time.sleep(0.05)
    assert made == [0, 1]
    assert list(ahead) == [1, 2, 3, 4]


def test_an_error_is_raised_in_its_place_with_its_own_traceback():
    def failing():
        raise ValueError("case17: damaged")

    def items():
        yield 0
        failing()

    ahead = one_ahead(items(), CPU)
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

    ahead = one_ahead(items(), CPU)
    assert [next(ahead), next(ahead)] == [0, 0]
    assert threads() != []
    ahead.close()  # type: ignore[attr-defined]
    assert closed == [True]
    assert threads() == []
