import time

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from medspeed.common.clock import Clock, Stages, StepTimer

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
    for name, earlier in {"train": 5.0, "validate": 1.0, "total": 60.0}.items():
        clock.add(name, earlier)
    seconds = clock.seconds()
    assert seconds["train"] >= 5.01
    assert seconds["validate"] == 1.0
    assert seconds["total"] >= 60.0


def test_a_step_of_the_systems_clock_moves_no_total(monkeypatch):
    clock = Clock()
    before = clock.seconds()["total"]
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + 3600)
    assert before <= clock.seconds()["total"] < before + 60


def test_the_total_counts_from_the_start_of_the_process():
    clock = Clock()
    seconds = clock.seconds()
    assert seconds["total"] >= seconds["start"] > 0


def test_a_run_of_somebodys_own_program_counts_from_its_own_start():
    seconds = Clock(whole=False).seconds()
    assert seconds["start"] == 0
    assert seconds["total"] < 1 < Clock().seconds()["total"]


def profiled() -> dict[str, int]:
    """Return how often each of the spans `a` and `b` of a small program stands in a profile."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("a"):
        with record_function("a"):  # with nothing else in the outer one, the profiler's list would make one of the two
            torch.ones(3).sum()
        with record_function("b"):
            torch.ones(3).sum()
    return {event.key: event.count for event in profiler.key_averages() if event.key in {"a", "b"}}


def test_nested_spans_are_ranges_of_the_profiler():
    assert profiled() == {"a": 2, "b": 1}


def test_stages_are_added_up_also_those_that_fail():
    stages = Stages()
    stages.add("decode", 5.0)
    with pytest.raises(KeyError), stages.stage("decode", waits=False):
        raise KeyError
    with stages.stage("write"):
        pass
    assert stages.seconds() == {"decode": pytest.approx(5.0, abs=1.0), "write": pytest.approx(0.0, abs=1.0)}
