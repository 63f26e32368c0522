"""A profile of a few steps of a real, tiny training: what is recorded, its shares by hand, and every way to end."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from common.observe.profiler import REST, STAGES, StepProfiler, shares
from common.observe.spans import span

CPU = torch.device("cpu")
REST_SECONDS = 0.03
TICK = 1e-3  # between the two clocks


class Training:
    """A network of one convolution; `step` has the spans of `fit`, and sleeps in one of them where told to.

    `clock` holds the seconds of each span of each step by another clock, started before the span and read after it: an
    upper bound however busy the machine is. The sleep is the lower bound.
    """

    def __init__(self, slow: str = "") -> None:
        self.slow = slow
        self.network = nn.Conv2d(1, 2, 3)
        self.optimizer = torch.optim.SGD(self.network.parameters(), 0.01)
        self.clock: dict[str, list[float]] = {name: [] for name in STAGES}

    def step(self, channels: int = 1) -> None:
        with self.timed("wait for batch"), span("wait for batch"):
            self.rest("wait for batch")
            image = torch.ones(1, channels, 16, 16)
        with self.timed("forward"), span("forward"):
            self.rest("forward")
            logits = self.network(image)
        with self.timed("loss"), span("loss"):
            self.rest("loss")
            loss = logits.square().mean()
        with self.timed("backward"), span("backward"):
            self.rest("backward")
            loss.backward()
        with self.timed("optimizer"), span("optimizer"):
            self.rest("optimizer")
            self.optimizer.step()
        self.rest("elsewhere")

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.clock[name].append(time.perf_counter() - begin)

    def rest(self, place: str) -> None:
        if self.slow == place:
            time.sleep(REST_SECONDS)


def train(folder: Path, count: int, training: Training, *, skip: int, steps: int) -> StepProfiler:
    with StepProfiler(folder, CPU, skip, steps) as profiler:
        for _ in range(count):
            training.step()
            profiler.step()
    return profiler


def trace_names(folder: Path) -> list[str]:
    content: dict[str, Any] = json.loads((folder / "trace.json").read_text())
    return [event["name"] for event in content["traceEvents"] if "name" in event]


def test_the_trace_holds_spans_and_operations_of_the_window_alone(tmp_path):
    with StepProfiler(tmp_path / "new", CPU, skip=2, steps=3) as profiler:
        training = Training()
        for number in range(9):
            with span(f"number {number}"):
                training.step()
            profiler.step()
    names = trace_names(tmp_path / "new")
    for stage in STAGES:
        assert names.count(stage) == 3
    assert names.count("aten::convolution") == 3
    assert [n for n in range(9) if f"number {n}" in names] == [2, 3, 4]
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"trace.json", "shares.json", "operations.txt"}


@pytest.mark.parametrize("slow", [*STAGES, "elsewhere"])
def test_a_slow_stage_has_the_time_and_no_other(tmp_path, slow):
    training = Training(slow)
    found = train(tmp_path, 3, training, skip=1, steps=2).shares
    assert found is not None
    assert found.shares[REST if slow == "elsewhere" else slow] * found.seconds > 2 * REST_SECONDS - TICK
    for stage in STAGES:
        assert found.shares[stage] * found.seconds < sum(training.clock[stage][1:]) + TICK
    assert sum(found.shares.values()) == pytest.approx(1)
    assert found.steps == 2
    assert json.loads((tmp_path / "shares.json").read_text()) == {
        "steps": 2,
        "seconds": found.seconds,
        "shares": found.shares,
    }


def test_the_words_say_the_shares_and_the_operations(tmp_path):
    found = train(tmp_path, 4, Training("loss"), skip=1, steps=3).shares
    assert found is not None
    words, _, table = (tmp_path / "operations.txt").read_text().partition("The operations with the most self time on ")
    assert words.startswith("3 steps after the first 1: ")
    assert f"  loss            {100 * found.shares['loss']:6.1f} %\n" in words
    assert table.startswith("the CPU:\n")
    rows = [line.split()[0] for line in table.splitlines() if line.endswith(" 3  ")]  # once in each step, no span
    assert "aten::convolution" in rows
    assert not {*STAGES, "ProfilerStep*"} & set(rows)
    assert sum("%" in line for line in table.splitlines()) <= 1 + 25


def test_what_another_thread_does_is_not_in_the_shares(tmp_path):
    def elsewhere() -> None:
        with span("loss"):
            time.sleep(0.05)

    training = Training()
    with StepProfiler(tmp_path, CPU, skip=1, steps=1) as profiler:
        training.step()
        profiler.step()
        thread = threading.Thread(target=elsewhere)
        with span("forward"):
            thread.start()
            thread.join(30)
        training.step()
        profiler.step()
    found = profiler.shares
    assert found is not None
    assert found.shares["forward"] * found.seconds > 0.05
    assert found.shares["loss"] * found.seconds < training.clock["loss"][1] + TICK


def test_an_exception_leaves_the_files_of_the_steps_before_it(tmp_path):
    training, profiler = Training("forward"), StepProfiler(tmp_path, CPU, skip=1, steps=9)

    def train_until_it_fails() -> None:
        with profiler:
            for number in range(9):
                training.step(channels=1 if number < 3 else 5)
                profiler.step()

    with pytest.raises(RuntimeError, match="channels"):
        train_until_it_fails()
    assert profiler.shares is not None
    assert profiler.shares.steps == 2
    forward = profiler.shares.shares["forward"] * profiler.shares.seconds
    assert 2 * REST_SECONDS - TICK < forward < sum(training.clock["forward"][1:3]) + TICK  # and not of the fourth step
    assert trace_names(tmp_path).count("forward") == 3
    assert (tmp_path / "operations.txt").read_text().startswith("2 steps after the first 1: ")
    assert span("a") is span("b")  # off again


@pytest.mark.parametrize(("done", "skip"), [(0, 1), (0, 3), (1, 3), (2, 2), (2, 3)])
def test_a_training_too_short_to_record_says_so(tmp_path, done, skip):
    train(tmp_path, 3, Training(), skip=1, steps=1)  # its files would be taken for those of the short one
    assert train(tmp_path, done, Training(), skip=skip, steps=2).shares is None
    assert [path.name for path in tmp_path.iterdir()] == ["operations.txt"]
    why = f"No step was recorded: training ended after {done} steps, and the first {skip} are skipped.\n"
    assert (tmp_path / "operations.txt").read_text() == why


def test_an_exception_before_the_window_is_told(tmp_path):
    with pytest.raises(KeyError), StepProfiler(tmp_path, CPU):
        raise KeyError("case 7")
    assert "(it ended by KeyError: 'case 7')" in (tmp_path / "operations.txt").read_text()


def test_after_the_window_a_step_does_nothing(tmp_path, monkeypatch):
    with StepProfiler(tmp_path, CPU, skip=1, steps=1) as profiler:
        for _ in range(2):
            profiler.step()
        monkeypatch.delattr(profiler, "_profile")
        profiler.step()
        monkeypatch.undo()
    assert profiler.shares is not None
    assert profiler.shares.shares[REST] == 1


@pytest.mark.parametrize(("skip", "steps"), [(0, 1), (1, 0)])
def test_windows_that_cannot_be_are_refused(tmp_path, skip, steps):
    with pytest.raises(ValueError, match=r"(skip|steps) 0: must be at least 1"):
        StepProfiler(tmp_path, CPU, skip, steps)


def test_shares_by_hand():
    ranges = {
        "a": [(0.0, 2.0), (1.0, 3.0), (1.5, 1.6)],  # overlap: [0, 3]
        "b": [(2.0, 4.0), (9.0, 99.0)],  # within a from 2 to 3; cut at the window's end: [2, 4], [9, 10]
        "c": [],
        "before": [(-5.0, -1.0)],
    }
    assert shares(ranges, (0.0, 10.0)) == pytest.approx({"a": 0.3, "b": 0.3, "c": 0, "before": 0, REST: 0.5})
    assert shares(ranges, (3.0, 4.0)) == pytest.approx({"a": 0, "b": 1, "c": 0, "before": 0, REST: 0})


@pytest.mark.gpu
def test_on_a_gpu_the_waiting_and_the_kernels_show(tmp_path):
    device = torch.device("cuda")
    matrix = torch.ones(4096, 4096, device=device)
    with StepProfiler(tmp_path, device, skip=1, steps=2) as profiler:
        for _ in range(3):
            with span("forward"):
                for _ in range(20):
                    matrix = matrix @ matrix * 1e-4
            profiler.step()
    assert profiler.shares is not None
    assert profiler.shares.shares["wait for device"] > 0.3
    text = (tmp_path / "operations.txt").read_text()
    assert "on the device:" in text
    assert "aten::mm" in text
