import threading
import time
import timeit
from typing import Literal

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from medspeed.common.clock import Clock, StepTimer, span, spans_to

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


@pytest.fixture
def nvtx(monkeypatch) -> list[str]:
    """Stand-ins for the two functions of NVTX, which a CPU build of torch lacks; what they did is listed."""
    calls: list[str] = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    return calls


def profiled() -> dict[str, int]:
    """Return how often each of the spans `a` and `b` of a small program stands in a profile."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler, span("a"):
        with span("a"):  # with nothing else in the outer one, the profiler's list would make one of the two
            torch.ones(3).sum()
        with span("b"):
            torch.ones(3).sum()
    return {event.key: event.count for event in profiler.key_averages() if event.key in {"a", "b"}}


def test_by_default_a_span_is_nothing():
    assert span("a") is span("b")
    assert profiled() == {}


def test_a_span_that_is_off_costs_less_than_a_microsecond():
    def once() -> None:
        with span("a"):
            pass

    def bare() -> None:
        pass

    cost, floor = (min(timeit.repeat(function, number=2000, repeat=20)) / 2000 for function in (once, bare))
    assert cost - floor < 1e-6


def test_in_the_profilers_mode_nested_spans_are_its_ranges():
    with spans_to("profiler"):
        assert profiled() == {"a": 2, "b": 1}
    assert profiled() == {}


def test_nvtx_ranges_open_and_close_in_order_also_after_an_error(nvtx):
    with spans_to("nvtx"), pytest.raises(KeyError), span("outer"), span("inner"):
        raise KeyError
    assert nvtx == ["outer", "inner", "pop", "pop"]
    with span("after"):
        pass
    assert len(nvtx) == 4


def test_the_earlier_mode_comes_back_also_after_an_error(nvtx):
    with spans_to("nvtx"):
        with pytest.raises(KeyError), spans_to("profiler"):
            raise KeyError
        with span("a"):
            pass
    assert nvtx == ["a", "pop"]
    assert span("a") is span("b")


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has NVTX")
def test_without_nvtx_the_mode_is_refused_at_once_and_nothing_changes():
    with (
        pytest.raises(ValueError, match=r"spans nvtx: torch .* built without NVTX; use the profiler"),
        spans_to("nvtx"),
    ):
        pass
    assert span("a") is span("b")


@pytest.mark.gpu
def test_nvtx_ranges_on_a_gpu():
    with spans_to("nvtx"), span("a"), span("b"):
        torch.ones(3, device="cuda").sum()


@pytest.mark.parametrize("mode", ["nvtx", "profiler"])
def test_threads_use_spans_at_once(mode: Literal["nvtx", "profiler"], nvtx):
    together = threading.Barrier(4, timeout=30)
    done: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            with span(f"{number}"), span("inner"):
                together.wait()
        done.append(number)

    with spans_to(mode):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert sorted(done) == [0, 1, 2, 3]
    if mode == "nvtx":
        assert nvtx.count("pop") == nvtx.count("inner") + sum(nvtx.count(str(n)) for n in range(4)) == 160
