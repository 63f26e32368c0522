"""A run that is killed, or told to stop, at any moment goes on to the very same weights."""

import json
import multiprocessing
import multiprocessing.forkserver
import os
import random
import signal
import time

import pytest
import torch

from medspeed.apps import parse_flags
from tests.common.rank_programs import PRELOADED
from tests.support import last_weights

TRAIN = ["tests/without_exports.py", "apps/spleen/train.py"]  # what a kill could change is not in the exports
RUN = [
    "--split", "0.25", "--spacing", "[6,6,6]", "--channels", "[4,8]",
    "--crop_size", "[16,16,16]", "--windows.size", "[32,32,32]", "--batch_size", "1", "--epochs", "60",
    "--validate_every", "10", "--engine", "none", "--device", "cpu",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Also in the runs that are started: those that are forked may be of a server that tests of ranks have started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def uninterrupted(start, phantoms, store, tmp_path_factory):
    """Folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    with start(*TRAIN, *RUN, "--data", phantoms, "--store", store, "--run", folder) as program:
        text = program.stdout.read()
    assert program.returncode == 0, text
    return folder


@pytest.fixture(scope="module")
def fork():
    """Begin the app's `main` as a fork of a server that has loaded it: it takes no seconds to start, and dies alike."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    multiprocessing.forkserver.ensure_running()

    def begin(*words):
        process = context.Process(target=train, args=([*map(str, words)], dict(os.environ)), daemon=True)
        process.start()
        return process

    return begin


def train(words, environment):
    from medspeed.apps.spleen.train import main

    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    main(parse_flags("spleen", words))


def final_weights(folder):
    return last_weights(folder)


def assert_same_end(folder, other):
    one, two = final_weights(folder), final_weights(other)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    losses = [[json.loads(line)["losses"] for line in (run / "metrics.jsonl").read_text().splitlines()]
              for run in (folder, other)]  # fmt: skip
    assert losses[0] == losses[1]
    dice = [json.loads((run / "summary.json").read_text())["quality"]["value"] for run in (folder, other)]
    assert dice[0] == dice[1]


def saved(folder):
    return {path.name for path in (folder / "checkpoints").glob("epoch-*")}


def kill_and_resume(kills, fork, start, phantoms, store, folder, seed):
    """Start the run, kill it, resume it, kill it, ...; each does a new step, none reaches the end."""
    chance, given = random.Random(seed), [*RUN, "--data", phantoms, "--store", store]
    where = ["--run", folder]
    for _ in range(kills):
        before, process = saved(folder), fork(*given, *where)
        while process.is_alive() and saved(folder) <= before:
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.03))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL  # it was not at its end
        where = ["--resume", folder]
    with start(*TRAIN, *given, *where) as program:
        text = program.stdout.read()
    assert program.returncode == 0, text
    assert "starts anew" not in (folder / "run.log").read_text()  # which would end alike


@pytest.mark.slow
def test_twenty_kills_change_nothing(uninterrupted, fork, start, phantoms, store, tmp_path):
    kill_and_resume(20, fork, start, phantoms, store, tmp_path / "run", seed=2)
    assert_same_end(uninterrupted, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_finishes_the_step_saves_and_says_so_by_its_status(
    number, status, uninterrupted, start, phantoms, store, tmp_path, monkeypatch
):
    folder = tmp_path / "run"
    where = ["--data", phantoms, "--store", store]
    # With checkpoints an hour apart, the one that the signal asks for is the only one.
    monkeypatch.setenv("MEDSPEED_CHECKPOINT_SECONDS", "3600")
    with start("apps/spleen/train.py", *RUN, *where, "--run", folder) as program:
        assert program.stdout is not None
        while program.poll() is None and not (folder / "metrics.jsonl").is_file():
            time.sleep(0.002)
        program.send_signal(number)
        text = program.stdout.read()
    assert program.returncode == status, text
    assert len(list((folder / "checkpoints").glob("epoch-*"))) == 1
    with start(*TRAIN, "--resume", folder) as program:  # it remembers where its data and store lie
        text = program.stdout.read()
    assert program.returncode == 0, text
    assert_same_end(uninterrupted, folder)
