"""What Inductor writes for an H200: each network is a graph forward and one backward, of no more kernels and bytes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from medspeed.benchmarks.fake_cuda import shim
from medspeed.benchmarks.fake_cuda.costs import TABLE
from medspeed.common.files import read_object
from tests.gpu_shape.guards import MORE

BUDGET = TABLE.with_name("inductor.json")  # write it anew from what the failing test shows, if that is meant
Graphs = list[dict[str, int]]


def exceeded(found: Graphs, budget: Graphs) -> list[str]:
    """Return in words what is more than in the budget; two graphs, forward and backward, must be there."""
    if len(found) != len(budget):
        return [f"{len(found)} graphs"]
    pairs = zip(("forward", "backward"), found, budget, strict=True)
    return [
        f"{name}: {count} {kind}, and the budget is {most[kind]}"
        for name, graph, most in pairs
        for kind, count in graph.items()
        if count > MORE * most[kind]
    ]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return the graphs of each app."""
    pytest.importorskip("triton", reason="no Triton: pip install triton")
    if reason := shim.why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("compiled")
    command = [sys.executable, "-m", "tests.gpu_shape.compiled_worker", str(folder), *read_object(BUDGET)]
    given = {"cwd": Path(__file__).parents[2], "env": {**os.environ, "OMP_NUM_THREADS": "1"}, "capture_output": True}
    done = subprocess.run(command, text=True, check=False, **given)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr[-3000:]
    return read_object(folder / "found.json")


@pytest.mark.slow
@pytest.mark.parametrize("app", read_object(BUDGET))
def test_inductor_writes_no_more_than_its_budget(found, app):
    assert not exceeded(found[app], read_object(BUDGET)[app]), found[app]


@pytest.mark.parametrize("kind", ["kernels", "written", "bytes"])
def test_more_than_the_budget_is_found(kind):
    budget = read_object(BUDGET)["spleen"]
    forward, backward = budget
    assert not exceeded(budget, budget)
    assert exceeded([forward, {**backward, kind: backward[kind] * 1.06}], budget)
    assert exceeded([forward], budget) == ["1 graphs"]
