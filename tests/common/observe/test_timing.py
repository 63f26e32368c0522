import time

import pytest
import torch

from common.observe.timing import Clock, StepTimer

CPU = torch.device("cpu")


def test_a_timer_tells_waiting_from_computing_and_starts_anew_when_read():
    timer = StepTimer(CPU)
    assert timer.typical() is None
    for _ in range(2):
        with timer.host("waited"):
            time.sleep(0.02)
        with timer.computing():
            time.sleep(0.04)
    with timer.host("saved"):
        time.sleep(0.01)
    read = timer.read()
    assert list(read) == ["waited", "saved", "logged", "computed"]
    assert 0.04 <= read["waited"] < 0.5
    assert 0.08 <= read["computed"] < 0.5
    assert 0.01 <= read["saved"] < 0.5
    assert read["logged"] == 0
    assert set(timer.read().values()) == {0.0}
    assert timer.typical() == pytest.approx(read["computed"] / 2, abs=1e-4)


def test_the_typical_step_is_the_median_of_the_epochs_after_the_first(monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    timer = StepTimer(CPU)
    for seconds in (9.0, 1.0, 5.0, 2.0):  # the first compiles and fills caches
        for _ in range(3):
            with timer.computing():
                now += seconds
        timer.read()
    assert timer.typical() == 2.0


def test_a_clock_carries_on_what_an_earlier_process_spent():
    clock = Clock()
    with clock.stage("train"):
        time.sleep(0.01)
    clock.carry_on({"train": 5.0, "validate": 1.0, "total": 60.0})
    seconds = clock.seconds()
    assert seconds["train"] >= 5.01
    assert seconds["validate"] == 1.0
    assert seconds["total"] >= 60.0
