"""Sides run in processes of their own, in turn; what they took becomes rows, and rows become a table."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch

from medspeed.benchmarks import sides
from medspeed.benchmarks.compare import quickest, step_rows
from medspeed.benchmarks.harness import call, in_a_process, in_turn, row, show
from medspeed.benchmarks.sides import Task


def test_a_side_runs_in_a_process_that_ends():
    assert in_a_process(os.getpid) != os.getpid()
    with pytest.raises(ZeroDivisionError):
        in_a_process(divmod, 1, 0)


def options(monkeypatch, bf16=True, both=True, device="cpu"):
    monkeypatch.setattr(sides, "computes_bf16", lambda device: bf16)
    monkeypatch.setattr(sides, "choose_precision", lambda wish, device: "bf16" if bf16 else "fp32")
    return Task("brats", Path(), torch.device(device), 2, 8, both, Path())


@pytest.mark.usefixtures("in_this_process")
def test_sides_run_in_turn_and_tell_each_time():
    order: list[str] = []

    def side(name):
        order.append(name)
        return {name: len(order)}

    found = in_turn({name: partial(side, name) for name in ("guide", "a", "b")}, 2)
    assert order == ["guide", "a", "b"] * 2
    assert found["b"] == [{"b": 3}, {"b": 6}]


@pytest.mark.parametrize(
    ("unit", "guide", "fast", "line"),
    [
        ("s", [6.0, 2.0, 4.0], [2.0, 1.0, 1.0], "| it | 4 s | 1 s | 3.0x |"),  # ratios 3, 2, 4: not that of medians
        ("MiB", [3000.0], [1500.0], "| it | 3000 MiB | 1500 MiB | 2.0x |"),
        ("", [0.5, 0.7], [0.7, 0.75], "| it | 0.600 | 0.725 | +0.125 |"),
        ("s", [], [0.25], "| it |  | 0.25 s |  |"),
    ],
)
def test_a_row_has_both_sides_and_how_many_times_better_fast_is(unit, guide, fast, line):
    made = row("it", unit, guide, fast)
    assert show(made) == line
    assert made["values"] == {"guide": guide, "fast": fast}


@pytest.mark.parametrize(
    ("bf16", "device", "labels"),
    [
        (True, "cpu", ["guide fp32, fast bf16", "both fp32", "both bf16"]),
        (False, "cpu", ["both fp32"]),
        (True, "cuda", ["guide fp16, fast bf16", "both fp32"]),
    ],
)
def test_what_the_rows_of_a_step_compare_follows_from_the_device(monkeypatch, bf16, device, labels):
    given = options(monkeypatch, bf16, device=device)
    names = [
        "fast with its batch",
        "guide with its batch",
        "guide fp32",
        *(f"fast {each}" for each in given.precisions),
    ]
    names += [f"guide {given.half}"] * (given.half is not None)
    rows = step_rows("1 x 96", {name: [3.0] if "guide" in name else [1.5] for name in names}, given)
    alone = [f"training step alone, 1 x 96, {each}, by the device's clock" for each in labels]
    assert [each["what"] for each in rows] == [*alone, "training step, 1 x 96, with the making of the batch"]
    assert {each["ratio"] for each in rows} == {2.0}


def test_the_quickest_way_of_the_guide_counts():
    seconds = {"guide (guide: a)": [3.0, 1.0, 2.0], "guide (guide: b)": [1.0, 1.9, 1.9], "fast": [1.0, 1.0, 1.0]}
    assert quickest(seconds) == ("guide (guide: b)", [1.0, 1.9, 1.9])
    assert quickest({"fast": [1.0]}) == ("guide", [])


def test_ours_alone_has_a_row_for_each_precision(monkeypatch):
    seconds = {"fast fp32": [2.0], "fast bf16": [1.0], "fast with its batch": [3.0]}
    rows = step_rows("1 x 96", seconds, options(monkeypatch, both=False))
    alone = [f"training step alone, 1 x 96, {label}, by the device's clock" for label in ("fast fp32", "fast bf16")]
    assert [each["what"] for each in rows] == [*alone, "training step, 1 x 96, with the making of the batch"]


def test_what_the_processor_only_emulates_is_not_measured(monkeypatch):
    given = options(monkeypatch, bf16=False)
    assert given.half is None
    assert given.precisions == ["fp32"]


def test_a_script_that_fails_says_why():
    with pytest.raises(ChildProcessError, match=r"ended with status 3:\nno data 7"):
        call("-c", "import sys; print('no data', sys.argv[1], file=sys.stderr); sys.exit(3)", 7)
