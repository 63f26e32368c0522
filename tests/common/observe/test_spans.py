"""Named ranges: what each mode makes of them, how they nest, and that threads and errors do no harm."""

import threading
import timeit

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from common.observe.spans import Mode, span, spans_to


@pytest.fixture
def nvtx(monkeypatch) -> list[str]:
    """Stand-ins for the two functions of NVTX, which a CPU build of torch lacks; what they did is listed."""
    calls: list[str] = []
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
    with spans_to("nvtx"):
        nvtx.clear()  # what the check did
        with pytest.raises(KeyError), span("outer {name}"), span("inner"):
            raise KeyError
    assert nvtx == ["outer {name}", "inner", "pop", "pop"]
    with span("after"):
        pass
    assert len(nvtx) == 4


def test_the_earlier_mode_comes_back_also_after_an_error(nvtx):
    with spans_to("nvtx"):
        with pytest.raises(AssertionError, match="off"), spans_to("nothing"):
            assert span("a") is not span("b"), "off"
        assert span("a") is not span("b")
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


@pytest.mark.parametrize("mode", ["nothing", "nvtx", "profiler"])
def test_threads_use_spans_at_once(mode: Mode, nvtx):
    together = threading.Barrier(4, timeout=30)
    done: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            with span(f"{number}"), span("inner"):
                together.wait()
        done.append(number)

    with spans_to(mode):
        nvtx.clear()
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert sorted(done) == [0, 1, 2, 3]
    if mode == "nvtx":
        assert nvtx.count("pop") == nvtx.count("inner") + sum(nvtx.count(str(n)) for n in range(4)) == 160
