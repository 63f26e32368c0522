"""The capture of a graph while other threads use the device: by a stand-in on the CPU, and in earnest on a GPU."""

import inspect
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from medspeed.common.kernels.trust import record

GRAPH = inspect.signature(torch.cuda.graph)


class Driver:
    """Stands for CUDA's driver: what allocates breaks a capture of this thread, and of others, as its mode has it.

    Source: `cudaStreamCaptureMode` in NVIDIA's reference of the runtime.
    """

    def __init__(self):
        self.mode, self.thread, self.replays, self.warm = None, None, 0, []
        self.usual = self.current = SimpleNamespace(wait_stream=lambda _: None)

    @contextmanager
    def stream(self, entered):
        before, self.current = self.current, entered
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, *given, **words):
        told = GRAPH.bind(*given, **words)
        told.apply_defaults()
        self.mode, self.thread = told.arguments["capture_error_mode"], threading.get_ident()
        before, self.current = self.current, told.arguments["stream"]
        assert self.current is not None  # torch's own is of the device that captured first
        yield
        self.mode, self.current = None, before  # not after an error, as torch's

    def allocate(self):
        mine = threading.get_ident() == self.thread
        if self.mode == "global" or (self.mode == "thread_local" and mine):
            raise RuntimeError("operation not permitted when stream is capturing")

    def replay(self):
        self.replays += 1


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(torch.cuda, "graph", made.graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=made.replay))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(wait_stream=lambda _: None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: made.current)
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    return made


def elsewhere(work):
    """Do some work in another thread; return what it raised."""
    raised = []

    def run():
        try:
            work()
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised


def test_other_threads_may_load_cases_meanwhile(driver):
    raised, captured = [], []

    def body():
        captured.append(driver.mode)
        raised.extend(elsewhere(driver.allocate))

    replay = record(body)
    assert not raised
    assert captured == [None, None, None, "thread_local"]  # warmed up, then captured
    assert (driver.replays, replay(), driver.replays) == (0, None, 1)


def test_what_this_thread_must_not_do_is_refused_and_the_stream_stays(driver):
    with pytest.raises(RuntimeError, match="capturing"):
        record(driver.allocate)
    assert driver.current is driver.usual


@pytest.mark.gpu
def test_on_a_gpu_other_threads_pin_and_allocate_meanwhile():
    values, size = torch.zeros(8, device="cuda"), iter(range(1 << 20, 1 << 24, 1 << 20))  # each time what is not cached

    def allocate():
        torch.empty(next(size), pin_memory=True)
        torch.empty(64 * next(size), device="cuda")

    def body():
        values.add_(1)
        assert not elsewhere(allocate)

    replay = record(body)
    replay()
    assert values.tolist() == [4.0] * 8  # three to warm up; what is captured does not run
