"""Variants planted right, wrong, slow and raising; on the CPU, their seconds made up."""

import json
import subprocess
import sys
import threading
from dataclasses import replace
from unittest import mock

import pytest
import torch

from medspeed.common.kernels import trust
from medspeed.common.kernels.trust import Trial, choose, difference, trusting, trusts
from tests.kernels import run_compiled

VALUES = torch.arange(6.0)


def trial(name="norm", fused=lambda: [VALUES.clone()], about=""):
    return Trial(name, lambda: fused() if trusts(name) else [VALUES], tolerance=1e-3, about=about)


def raising():
    raise RuntimeError("no kernel image\nfor this device")


def seconds_of(times):
    """Return a clock that says so many seconds for each piece of work, and what it was asked for."""
    asked = []

    def seconds(work):
        asked.append(work)
        return times[work]

    return seconds, asked


def chosen(trials, wish, store, speed):
    """Choose with variants `speed` times as fast as their twins; return the names, the lines, and what was timed."""
    times = {each.work: speed for each in trials} | {each.fused: 1.0 for each in trials}
    seconds, asked = seconds_of(times)
    lines: list[str] = []
    with mock.patch.object(trust, "_seconds", seconds):
        return choose(trials, wish, store, lines.append), lines, asked


@pytest.fixture(autouse=True)
def nothing_trusted():
    with trusting():
        yield


@pytest.mark.parametrize(
    ("wish", "speed", "taken", "words"),
    [
        ("auto", 2.0, True, "used: norm (2.00 times as fast)"),
        ("auto", 0.5, False, "(plain torch is as fast): norm (0.50)"),
        ("auto", 1.01, False, "plain torch is as fast"),
        ("fused", 0.5, True, "used: norm (0.50 times as fast)"),
    ],
)
def test_the_right_and_faster_one_is_taken_and_said(wish, speed, taken, words, tmp_path):
    names, lines, _ = chosen([trial()], wish, tmp_path, speed)
    assert names == ({"norm"} if taken else set())
    assert ("norm" in trust._trusted) is taken
    assert len(lines) == 1
    assert words in lines[0]


@pytest.mark.parametrize("wish", ["auto", "fused"])
@pytest.mark.parametrize(
    ("fused", "words"),
    [
        (lambda: [VALUES + 0.1], "off by 0.1, bound 0.005"),
        (lambda: [VALUES * float("nan")], "off by nan"),
        (lambda: [VALUES[:5]], "tensor 0 is torch.float32 [5]"),
        (lambda: [VALUES.half()], "torch.float16"),
        (lambda: [], "0 tensors instead of 1"),
        (raising, "RuntimeError no kernel image for this device"),
    ],
)
def test_what_is_wrong_or_raises_falls_back_in_one_line(wish, fused, words, tmp_path):
    wrong = trial(fused=fused)
    names, lines, asked = chosen([wrong, trial("other")], wish, tmp_path, 2.0)
    assert names == {"other"}
    assert "norm is not used because it failed" in lines[0]
    assert words in lines[0]
    assert all("\n" not in line for line in lines)
    assert not {wrong.work, wrong.fused} & {*asked}  # what is wrong is not timed


def test_torch_tries_nothing_and_trusts_nothing_any_more(tmp_path):
    chosen([trial()], "fused", tmp_path, 2.0)
    names, lines, asked = chosen([trial(fused=raising)], "torch", tmp_path, 2.0)
    assert (names, lines, asked) == (frozenset(), [], [])
    assert "norm" not in trust._trusted


def test_verdicts_are_kept_per_machine_and_trial(tmp_path, monkeypatch):
    chosen([trial()], "auto", tmp_path, 2.0)
    names, lines, asked = chosen([trial(fused=raising)], "auto", tmp_path, 0.1)
    assert (names, asked) == ({"norm"}, [])
    assert "2.00 times" in lines[0]
    assert chosen([trial(about="wrong shape")], "auto", tmp_path, 0.1)[0] == frozenset()
    monkeypatch.setattr(trust, "machine_key", lambda: "another GPU")
    assert chosen([trial(fused=raising)], "auto", tmp_path, 2.0)[0] == frozenset()
    kept = json.loads((tmp_path / "kernels.json").read_text())
    assert sum(": norm" in key for key in kept) == 3
    assert {each.name for each in tmp_path.iterdir()} == {"kernels.json", ".kernels.lock"}


def test_an_error_that_may_pass_is_not_kept(tmp_path):
    """Such as a lack of memory, or of a compiler."""
    assert chosen([trial(fused=raising)], "auto", tmp_path, 2.0)[0] == frozenset()
    assert chosen([trial()], "auto", tmp_path, 2.0)[0] == {"norm"}


def test_an_error_that_ends_every_later_call_is_not_tried_again(tmp_path, monkeypatch):
    """As an illegal access does: CUDA's next calls, too, fail with it."""
    broken: list[bool] = []

    def reads_elsewhere():
        broken.append(True)
        raise RuntimeError("an illegal memory access was encountered")

    def synchronise():
        if broken:
            raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(trust, "synchronise", synchronise)
    tried = replace(trial(fused=reads_elsewhere), launched=lambda: None)  # ahead it is only compiled
    with pytest.raises(RuntimeError, match="illegal"):
        chosen([tried], "auto", tmp_path, 2.0)
    broken.clear()  # the next start
    names, lines, _ = chosen([tried], "auto", tmp_path, 2.0)
    assert (names, broken) == (frozenset(), [])
    assert "the program ended during its trial" in lines[0]


DIES = """
import os, sys
from pathlib import Path
import torch
from medspeed.common.kernels import trust

def work():
    if trust.trusts("norm") and LAUNCHES.pop():
        os._exit(9)
    return [torch.arange(6.0)]

trust._seconds = lambda _: 1.0
trust.choose([trust.Trial("norm", work, 1e-3)], "auto", Path(sys.argv[1]), print)
"""


@pytest.mark.parametrize("ahead", [True, False])
def test_what_killed_the_program_is_not_tried_again(ahead, tmp_path):
    """Or, if that was while kernels were compiled, not compiled ahead again."""
    code = DIES.replace("LAUNCHES", "launches").replace("def work", f"launches = {[True, ahead]}\n\ndef work")
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, capture_output=True, text=True)
    assert killed.returncode == 9, killed.stderr
    calls = []

    def counted():
        calls.append(1)
        return [VALUES]

    names, lines, asked = chosen([trial(fused=counted)], "auto", tmp_path, 2.0)
    if ahead:
        assert (names, calls) == ({"norm"}, [1])  # in its trial alone
    else:
        assert (names, calls, asked) == (frozenset(), [], [])
        assert "the program ended during its trial" in lines[0]


@pytest.mark.parametrize("at", [1, 2])
def test_a_signal_in_a_trial_is_not_its_fault(at, tmp_path):
    calls = []

    def interrupted():
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt
        return [VALUES]

    with pytest.raises(KeyboardInterrupt):
        chosen([trial(fused=interrupted)], "auto", tmp_path, 2.0)
    at = 0
    calls.clear()
    assert chosen([trial(fused=interrupted)], "auto", tmp_path, 2.0)[0] == {"norm"}
    assert calls == [1, 1]  # compiled ahead, and tried


def test_of_programs_that_start_together_one_tries(tmp_path, monkeypatch):
    """The others wait, and take its verdicts; they do not find its mark and think that it has died."""
    entered, go, found = threading.Event(), threading.Event(), {}

    def slow():
        entered.set()
        assert go.wait(60)
        return [VALUES]

    def start(number, fused):
        found[number] = choose([trial(fused=fused)], "fused", tmp_path, print)

    monkeypatch.setattr(trust, "_seconds", lambda _: 1.0)
    first = threading.Thread(target=start, args=(1, slow))
    second = threading.Thread(target=start, args=(2, raising))
    first.start()
    assert entered.wait(60)
    second.start()
    second.join(0.5)
    assert second.is_alive()
    go.set()
    first.join()
    second.join()
    assert found[1] == found[2] == {"norm"}


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"MACHINE: norm ": 3}', '{"MACHINE: norm ": ["x"]}', '{"MACHINE: norm ": {}}']
)
def test_damaged_verdicts_are_made_again(content, tmp_path):
    (tmp_path / "kernels.json").write_text(content.replace("MACHINE", trust.machine_key()))
    assert chosen([trial()], "auto", tmp_path, 2.0)[0] == {"norm"}
    assert chosen([trial(fused=raising)], "auto", tmp_path, 2.0)[0] == {"norm"}


def test_a_store_that_cannot_be_written_costs_nothing_but_trials(tmp_path):
    (tmp_path / "file").write_text("")
    assert chosen([trial()], "auto", tmp_path / "file", 2.0)[0] == {"norm"}


def test_nothing_is_trusted_on_a_cpu(tmp_path):
    chosen([trial()], "fused", tmp_path, 2.0)
    assert not trusts("norm", VALUES)


def test_trusting_ends_with_its_block():
    with trusting("norm"), trusting("other"):
        assert trust._trusted == {"norm", "other"}
    assert trust._trusted == set()


def test_the_machine_is_the_source_too(monkeypatch, tmp_path):
    before = trust.machine_key()
    assert torch.__version__ in before
    (tmp_path / "kernel.py").write_text("changed")
    monkeypatch.setattr(trust, "__file__", str(tmp_path / "trust.py"))
    assert trust.machine_key() != before


def test_the_difference_is_judged_against_the_largest_value():
    small, large = torch.tensor([1e-3, 100.0]), torch.tensor([2e-3, 100.0])
    assert difference([small], [large], 1e-4) == ""
    assert difference([small], [large], 1e-6) != ""
    assert difference([torch.empty(0)], [torch.empty(0)], 0.0) == ""


def test_kernels_are_compiled_at_once_before_their_trials():
    run_compiled("tests/common/kernels/ahead_triton.py")


def test_what_a_graph_captures_is_launched_to_compile_it(tmp_path):
    asked: list[object] = []

    def work():
        asked.append(trusts("step"))
        return [VALUES]

    with mock.patch.object(trust, "_seconds", return_value=1.0):
        choose([Trial("step", work, 0.0, launched=lambda: asked.append("launched"))], "auto", tmp_path, print)
    assert asked == ["launched", True, False]
