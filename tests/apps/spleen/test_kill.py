"""A run that is killed, or told to stop, at any moment goes on to the very same weights."""

import json
import random
import signal
import time

import pytest
import torch

from tests.support import last_weights

RUN = [
    "--split", "0.25", "--spacing", "[6,6,6]", "--channels", "[4,8]",
    "--crop_size", "[16,16,16]", "--windows.size", "[32,32,32]", "--batch_size", "1", "--epochs", "6",
    "--validate_every", "2", "--engine", "none", "--device", "cpu",
]  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(start, phantoms, store, tmp_path_factory):
    """Folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    with start("apps/spleen/train.py", *RUN, "--data", phantoms, "--store", store, "--run", folder) as program:
        text = program.stdout.read()
    assert program.returncode == 0, text
    return folder


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


def kill_and_resume(kills, start, phantoms, store, folder, seed):
    """Start the run, kill it, resume it, kill it, ...; every process does at least one new step."""
    chance = random.Random(seed)
    where = ["--run", folder]
    for _ in range(kills):
        with start("apps/spleen/train.py", *RUN, "--data", phantoms, "--store", store, *where) as program:
            assert program.stdout is not None
            before = sorted(path.name for path in (folder / "checkpoints").glob("epoch-*"))
            while program.poll() is None:
                now = sorted(path.name for path in (folder / "checkpoints").glob("epoch-*"))
                if now and now != before:
                    break
                time.sleep(0.002)
            time.sleep(chance.uniform(0, 0.15))
            program.kill()
        where = ["--resume", folder]
    with start("apps/spleen/train.py", *RUN, "--data", phantoms, "--store", store, *where) as program:
        text = program.stdout.read()
    assert program.returncode == 0, text


@pytest.mark.slow
def test_three_kills_change_nothing(uninterrupted, start, phantoms, store, tmp_path):
    kill_and_resume(3, start, phantoms, store, tmp_path / "run", seed=1)
    assert_same_end(uninterrupted, tmp_path / "run")


@pytest.mark.slow
def test_twenty_kills_change_nothing(uninterrupted, start, phantoms, store, tmp_path):
    kill_and_resume(20, start, phantoms, store, tmp_path / "run", seed=2)
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
    with start("apps/spleen/train.py", "--resume", folder) as program:  # it remembers where its data and store lie
        text = program.stdout.read()
    assert program.returncode == 0, text
    assert_same_end(uninterrupted, folder)
