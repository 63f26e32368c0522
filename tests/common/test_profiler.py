"""A profile of a few steps of a real, tiny training: what is recorded, its shares by hand, and every way to end."""

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from medspeed.apps.spleen.config import SpleenConfig
from medspeed.apps.spleen.train import main
from medspeed.common import clock
from medspeed.common.clock import RECORDED, SKIPPED, check_nvtx, profiled_steps

CPU = torch.device("cpu")
SPANS = ("wait for batch", "forward", "loss", "backward", "optimizer")
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
        self.clock: dict[str, list[float]] = {name: [] for name in SPANS}

    def step(self, channels: int = 1) -> None:
        with self.timed("wait for batch"), record_function("wait for batch"):
            self.rest("wait for batch")
            image = torch.ones(1, channels, 16, 16)
        with self.timed("forward"), record_function("forward"):
            self.rest("forward")
            logits = self.network(image)
        with self.timed("loss"), record_function("loss"):
            self.rest("loss")
            loss = logits.square().mean()
        with self.timed("backward"), record_function("backward"):
            self.rest("backward")
            loss.backward()
        with self.timed("optimizer"), record_function("optimizer"):
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


def train(folder: Path, count: int, training: Training) -> dict[str, tuple[float, int]]:
    """Profile so many steps; return what was found."""
    with profiled_steps(folder, CPU) as step:
        for _ in range(count):
            training.step()
            step()
    return found_in(folder)


def found_in(folder: Path) -> dict[str, tuple[float, int]]:
    """Return the seconds and the number of each span of the profile."""
    text = (folder / "operations.txt").read_text()
    assert text.startswith("Time on the host by activity, in the steps after the first 2:\n")
    lines = re.findall(r"^  (\S.*?) +([\d.]+) ms in (\d+)$", text, re.MULTILINE)
    return {name: (float(milliseconds) / 1000, int(times)) for name, milliseconds, times in lines}


def trace_names(folder: Path) -> list[str]:
    content: dict[str, Any] = json.loads((folder / "trace.json").read_text())
    return [event["name"] for event in content["traceEvents"] if "name" in event]


def test_the_trace_holds_spans_and_operations_of_the_window_alone(tmp_path):
    with profiled_steps(tmp_path / "new", CPU) as step:
        training = Training()
        for number in range(12):
            with record_function(f"number {number}"):
                training.step()
            step()
    names = trace_names(tmp_path / "new")
    for stage in SPANS:
        assert names.count(stage) == RECORDED
    assert names.count("aten::convolution") == RECORDED
    assert [n for n in range(12) if f"number {n}" in names] == [*range(SKIPPED, SKIPPED + RECORDED)]
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"trace.json", "operations.txt"}


@pytest.mark.parametrize("slow", SPANS)
def test_a_slow_stage_has_the_time_and_no_other(tmp_path, slow):
    training = Training(slow)
    found = train(tmp_path, SKIPPED + 2, training)
    assert found[slow][0] > 2 * REST_SECONDS - TICK
    for stage in SPANS:
        seconds, times = found[stage]
        assert times == 2
        assert seconds < sum(training.clock[stage][SKIPPED:]) + TICK
    assert found["ProfilerStep*"][0] > sum(found[stage][0] for stage in SPANS) - TICK


def test_the_operations_are_in_a_table_without_the_spans(tmp_path):
    train(tmp_path, SKIPPED + 3, Training("loss"))
    _, _, table = (tmp_path / "operations.txt").read_text().partition("The operations with the most self time on ")
    assert table.startswith("the CPU:\n")
    rows = [line.split()[0] for line in table.splitlines() if line.endswith(" 3  ")]  # once in each step, no span
    assert "aten::convolution" in rows
    assert not {*SPANS, "ProfilerStep*"} & set(rows)
    assert sum("%" in line for line in table.splitlines()) <= 1 + 25


def test_what_another_thread_does_is_not_in_the_profile(tmp_path):
    def elsewhere() -> None:
        with record_function("loss"):
            time.sleep(0.05)

    training = Training()
    with profiled_steps(tmp_path, CPU) as step:
        for _ in range(SKIPPED):
            training.step()
            step()
        thread = threading.Thread(target=elsewhere)
        with record_function("forward"):
            thread.start()
            thread.join(30)
        training.step()
        step()
    found = found_in(tmp_path)
    assert found["forward"][0] > 0.05
    assert found["loss"][0] < training.clock["loss"][SKIPPED] + TICK


def test_an_exception_leaves_the_files_of_the_steps_until_then(tmp_path):
    training = Training("forward")

    def train_until_it_fails() -> None:
        with profiled_steps(tmp_path, CPU) as step:
            for number in range(9):
                training.step(channels=1 if number < SKIPPED + 2 else 5)
                step()

    with pytest.raises(RuntimeError, match="channels"):
        train_until_it_fails()
    assert found_in(tmp_path)["forward"][1] == 3
    assert trace_names(tmp_path).count("forward") == 3


@pytest.mark.parametrize("done", [0, 1, 2])
def test_a_training_too_short_to_record_says_so(tmp_path, done):
    train(tmp_path, SKIPPED + 1, Training())  # its files would be taken for those of the short one
    with profiled_steps(tmp_path, CPU) as step:
        for _ in range(done):
            step()
    assert [path.name for path in tmp_path.iterdir()] == ["operations.txt"]
    why = "No step was recorded: the first 2 are skipped, and the training ended before another was done.\n"
    assert (tmp_path / "operations.txt").read_text() == why


def test_after_the_window_nothing_is_recorded(tmp_path):
    with profiled_steps(tmp_path, CPU) as step:
        for _ in range(SKIPPED + RECORDED + 2):
            step()
    assert found_in(tmp_path)["ProfilerStep*"][1] == RECORDED


def test_the_device_is_awaited_once_before_the_window_and_nothing_is_counted_after_it(tmp_path, monkeypatch):
    calls: list[Any] = []

    class Recording(profile):
        def __init__(self, **options: Any) -> None:
            calls.append(options["activities"])
            super().__init__(**options)

        def step(self) -> None:
            calls.append("step")
            super().step()

    monkeypatch.setattr(clock, "profile", Recording)
    monkeypatch.setattr(clock, "synchronise", lambda: calls.append("wait"))
    train(tmp_path, SKIPPED + RECORDED + 5, Training())
    steps = ["step"] * (SKIPPED + RECORDED)
    assert calls == [[ProfilerActivity.CPU], *steps[: SKIPPED - 1], "wait", *steps[SKIPPED - 1 :]]


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has NVTX")
def test_without_nvtx_its_ranges_are_refused():
    with pytest.raises(ValueError, match=r"profile nvtx: torch .* is built without NVTX; use --profile torch"):
        check_nvtx()


def test_without_a_gpu_its_ranges_are_refused_before_the_run_has_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="profile nvtx: torch finds no NVIDIA GPU; use --profile torch, "):
        main(SpleenConfig(run=tmp_path / "run", profile="nvtx"))
    assert not (tmp_path / "run").exists()


@pytest.mark.gpu
def test_nvtx_ranges_on_a_gpu():
    check_nvtx()
    with torch.autograd.profiler.emit_nvtx(), record_function("a"), record_function("b"):
        torch.ones(3, device="cuda").sum()


@pytest.mark.gpu
def test_on_a_gpu_the_kernels_show(tmp_path):
    device = torch.device("cuda")
    matrix = torch.ones(4096, 4096, device=device)
    with profiled_steps(tmp_path, device) as step:
        for _ in range(SKIPPED + RECORDED):
            with record_function("forward"):
                for _ in range(20):
                    matrix = matrix @ matrix * 1e-4
            step()
    text = (tmp_path / "operations.txt").read_text()
    assert "on the device:" in text
    assert "aten::mm" in text
