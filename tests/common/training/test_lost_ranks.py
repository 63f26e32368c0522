"""What happens when a rank fails, is killed, stopped, hung or told to stop: all end within a minute and can go on."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from medspeed.common import ranks as places
from tests.support import last_weights

FIT = "tests.common.training.fit_worker"
LIMIT = 60.0  # seconds in which all must be over
SLOWED = {"epochs": 2, "steps": 20, "step_seconds": 0.05}


def final_weights(run):
    return last_weights(run)


def losses(run):
    return [json.loads(line)["losses"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def flat(run):
    return [loss for epoch in losses(run) for loss in epoch]


def wait_until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def reached(run, step):
    path = run / "step"
    return lambda: path.is_file() and int(path.read_text() or 0) >= step


def end_of_all(programs):
    """Return the exit statuses and outputs of all ranks; none may take longer than the limit."""
    began = time.monotonic()
    ends = [program.wait(LIMIT) for program in programs]
    assert time.monotonic() - began < LIMIT
    return zip(*ends, strict=True)


def resume(start_ranks, run, wish):
    statuses, texts = end_of_all(start_ranks(2, FIT, json.dumps({**wish, "run": str(run), "resume": True})))
    assert statuses == (0, 0), texts


def assert_same_end(run, other):
    one, two = final_weights(run), final_weights(other)
    assert all(torch.equal(one[name], two[name]) for name in two)
    assert losses(run) == losses(other)


@pytest.fixture(scope="module")
def uninterrupted(start_ranks, tmp_path_factory):
    """Folder of a run of two ranks that nothing disturbed."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    statuses, texts = end_of_all(start_ranks(2, FIT, json.dumps({**SLOWED, "step_seconds": 0, "run": str(run)})))
    assert statuses == (0, 0), texts
    assert "running with 2 ranks" in texts[0]
    assert texts[1] == ""  # the leader alone speaks
    return run


def test_one_process_has_the_same_losses(uninterrupted, start_ranks, tmp_path):
    statuses, texts = end_of_all(start_ranks(1, FIT, json.dumps({**SLOWED, "run": str(tmp_path / "run")})))
    assert statuses == (0,), texts
    assert flat(tmp_path / "run") == pytest.approx(flat(uninterrupted), abs=1e-4)


def test_an_error_of_one_rank_is_seen_and_the_other_says_that_it_lost_it(start_ranks, tmp_path):
    run = tmp_path / "run"
    wish = {"run": str(run), "at": 12, "who": 1, "what": "fail", "checkpoint_seconds": 0.0}
    statuses, texts = end_of_all(start_ranks(2, FIT, json.dumps(wish)))
    assert statuses == (1, 1)
    assert texts[1].startswith("rank 1 of 2: error: case_7: a scan that cannot be read")
    last = (run / "checkpoints" / "last").readlink()
    lost = next(line for line in texts[0].split("\n") if line.startswith("rank 0 of 2: error: lost the other ranks"))
    assert f"last -> {last}; " in lost
    assert f"resume={str(run)!r}" in lost
    assert "Traceback" not in texts[0] + texts[1]
    assert Path(run / "checkpoints" / "last").resolve().stem == "epoch-000001-step-000002"


def test_a_rank_that_is_killed_ends_all_and_the_run_goes_on_exactly(uninterrupted, start_ranks, tmp_path):
    run = tmp_path / "run"
    wish = json.dumps({**SLOWED, "run": str(run), "checkpoint_seconds": 0.0})
    programs = start_ranks(2, FIT, wish)
    wait_until(reached(run, 25))
    os.kill(programs[1].pid, signal.SIGKILL)
    statuses, texts = end_of_all(programs)
    assert statuses == (1, -signal.SIGKILL)
    assert "rank 0 of 2: error: lost the other ranks" in texts[0]
    resume(start_ranks, run, {**SLOWED, "step_seconds": 0})
    assert_same_end(run, uninterrupted)


@pytest.mark.parametrize("told", [[0], [1], [1, 0, 1, 0]])
def test_a_signal_to_any_rank_stops_all_at_the_same_step(told, uninterrupted, start_ranks, tmp_path):
    run = tmp_path / "run"
    programs = start_ranks(2, FIT, json.dumps({**SLOWED, "run": str(run)}))
    wait_until(reached(run, 7))
    for rank in told:
        os.kill(programs[rank].pid, signal.SIGTERM)
        time.sleep(0.03)
    statuses, texts = end_of_all(programs)
    assert statuses == (143, 143), texts
    assert len(list((run / "checkpoints").glob("epoch-*"))) == 1
    resume(start_ranks, run, {**SLOWED, "step_seconds": 0})
    assert_same_end(run, uninterrupted)


@pytest.mark.slow
def test_sigterm_to_torchrun_saves_and_the_run_goes_on_exactly(uninterrupted, torchrun, start_ranks, tmp_path):
    run = tmp_path / "run"
    wish = json.dumps({**SLOWED, "step_seconds": 0.2, "run": str(run)})
    with torchrun(["--standalone", "--nproc-per-node", "2"], wish) as program:
        wait_until(reached(run, 3))
        began = time.monotonic()
        program.send_signal(signal.SIGTERM)
        text = program.stdout.read()
    assert program.returncode != 0, text
    assert time.monotonic() - began < LIMIT
    assert len(list((run / "checkpoints").glob("epoch-*"))) == 1
    resume(start_ranks, run, {**SLOWED, "step_seconds": 0})
    assert_same_end(run, uninterrupted)


def test_a_stopped_rank_is_named_and_ends_the_others(start_ranks, tmp_path):
    """torchrun then kills it, after 30 seconds, which leaves as much of a minute."""
    assert places.SILENT_SECONDS + places.BEAT_SECONDS < 30
    run = tmp_path / "run"
    wish = {"run": str(run), "steps": 1000, "step_seconds": 0.1, "checkpoint_seconds": 0, "hurry": 4}
    programs = start_ranks(2, FIT, json.dumps(wish))
    wait_until(reached(run, 5))
    os.kill(programs[1].pid, signal.SIGSTOP)
    try:
        status, text = programs[0].wait(LIMIT)
    finally:
        programs[1].process.kill()
    assert status == 1
    line = next(line for line in text.split("\n") if "has not responded" in line)
    assert line.startswith("rank 0 of 2: rank 1 (host ")
    assert line.endswith(f"resume={str(run)!r})")


def test_a_hung_main_thread_is_named_and_ends_all(start_ranks, tmp_path):
    assert places.HUNG_SECONDS + places.SILENT_SECONDS < LIMIT
    run = tmp_path / "run"
    wish = {"run": str(run), "steps": 20, "at": 12, "who": 1, "what": "hang", "checkpoint_seconds": 0.0, "hurry": 4}
    programs = start_ranks(2, FIT, json.dumps(wish))
    wait_until(reached(run, 12))
    statuses, texts = end_of_all(programs)
    assert statuses == (1, 1)
    assert "hangs: it has been in step 13 for 1" in texts[0]
    assert "rank 1 of 2: " in texts[1]
