import threading
import time

import pytest

from common.inference.stream import IN_FLIGHT, streamed


def test_items_come_in_order_with_what_was_written():
    found = list(streamed(range(5), lambda n: n * 10, lambda n, got: got + n, lambda n, made: f"{n}:{made}"))
    assert found == [(n, f"{n}:{11 * n}") for n in range(5)]
    assert list(streamed([], len, max, max)) == []


def test_reading_computing_and_writing_overlap():
    """Each waits for the others: one after the other it would never end."""
    both = threading.Barrier(3, timeout=20)

    def meet(number, wanted):
        if number == wanted:
            both.wait()

    # While item 2 is read, item 1 is computed and item 0 written.
    found = streamed(
        range(3),
        lambda n: meet(n, 2),
        lambda n, _: meet(n, 1),
        lambda n, _: meet(n, 0),
    )
    assert [item for item, _ in found] == [0, 1, 2]


@pytest.mark.parametrize("slow", ["read", "compute", "write"])
def test_no_more_than_three_are_held_whichever_is_slow(slow):
    alive, most = set(), []

    def work(stage, number):
        if stage == "read":
            alive.add(number)
        most.append(len(alive))
        time.sleep(0.02 if stage == slow else 0)
        if stage == "write":
            alive.discard(number)

    list(streamed(range(8), lambda n: work("read", n), lambda n, _: work("compute", n), lambda n, _: work("write", n)))
    assert max(most) <= IN_FLIGHT


def fails(number, error):
    if number == 1:
        raise error
    return number


@pytest.mark.parametrize("stage", range(3))
def test_a_bad_input_costs_its_item_alone(stage):
    def at(place):
        return lambda number, *_: fails(number, ValueError("bad")) if place == stage else number

    found = dict(streamed(range(3), at(0), at(1), at(2)))
    assert (found[0], found[2]) == (0, 2)
    assert isinstance(found[1], ValueError)


def test_a_file_that_is_gone_is_a_bad_input_and_a_full_disk_is_not():
    gone = dict(streamed(range(3), lambda n: fails(n, FileNotFoundError()), max, max))
    assert isinstance(gone[1], FileNotFoundError)
    with pytest.raises(OSError, match="full"):
        list(streamed(range(3), lambda n: n, lambda n, got: got, lambda n, got: fails(n, OSError("full"))))
