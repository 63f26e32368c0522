"""The best weights: copied at once, written meanwhile, never torn, lost or older than the checkpoint knows of."""

import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from medspeed.common import files
from medspeed.common.inference.model import load_weights, save_weights
from medspeed.common.ranks import Ranks
from medspeed.common.training import fit, state
from tests.common.training.fit_worker import train
from tests.common.training.test_fit import state_of
from tests.support import last_weights, note_of

METRIC = [0.5, 0.7, 0.6]


@pytest.fixture
def writing(monkeypatch):
    """Let nothing be written until the event is set."""
    may_write = threading.Event()

    def wait_and_save(*arguments):
        assert may_write.wait(60)
        save_weights(*arguments)

    monkeypatch.setattr(state, "save_weights", wait_and_save)
    return may_write


def kept_in(folder):
    return load_weights(folder / "best.safetensors")["weight"]


def fill(kept, value):
    nn.init.constant_(kept._network.weight, value)


def test_steps_go_on_while_the_weights_of_before_are_written(tmp_path, writing):
    kept = state_of(tmp_path, 1)
    fill(kept, 1.0)
    kept.keep_best({"epoch": "1"})
    fill(kept, 7.0)  # the next step
    assert not (tmp_path / "best.safetensors").exists()
    writing.set()
    kept.close()
    assert torch.equal(kept_in(tmp_path), torch.ones(2, 2))


def test_the_last_kept_are_those_in_the_file(tmp_path):
    kept = state_of(tmp_path, 1)
    for number in range(1, 6):
        fill(kept, number)
        kept.keep_best({"epoch": str(number)})
    kept.close()
    assert note_of(tmp_path / "best.safetensors")["epoch"] == "5"
    assert float(kept_in(tmp_path)[0, 0]) == 5.0


def test_a_full_disk_is_said_once_by_whoever_waits(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state, "save_weights", full)
    kept = state_of(tmp_path, 1)
    kept.keep_best({})
    with pytest.raises(OSError, match="No space left"):
        kept.close()
    kept.close()


def test_a_checkpoint_waits_for_the_best_weights_that_it_knows_of(tmp_path, monkeypatch):
    order = []

    def late(path, *others):
        time.sleep(0.2 * (path.name == "best.safetensors"))
        save_weights(path, *others)
        order.append(path.name)

    monkeypatch.setattr(state, "save_weights", late)
    kept = state_of(tmp_path, 1)
    kept.keep_best({})
    kept.save()
    assert order[0] == "best.safetensors"


def test_ranks_validate_with_the_mean_of_their_statistics(tmp_path, monkeypatch):
    averaged = []
    monkeypatch.setattr(Ranks, "average_buffers", lambda _, network: averaged.append(network))
    train({"run": str(tmp_path / "run"), "epochs": 2, "steps": 1})
    assert len(averaged) == 2


def test_a_failure_to_write_ends_the_run(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state, "save_weights", full)
    with pytest.raises(OSError, match="No space left"):
        train({"run": str(tmp_path / "run"), "epochs": 1, "steps": 1})
    assert not (tmp_path / "run" / "checkpoints" / "last").exists()


def test_killed_at_any_moment_a_run_goes_on_to_the_same_best_weights(tmp_path, monkeypatch):
    """What is on the disk before each flush is what a kill leaves there; a run goes on from each of these folders."""
    monkeypatch.setattr(fit.Log, "_draw", lambda self: None)
    wish = {"epochs": len(METRIC), "steps": 2}
    whole, lock, found = tmp_path / "whole", threading.Lock(), list[Path]()

    def snapshot(path):
        with lock:
            found.append(tmp_path / f"killed-{len(found)}")
            shutil.copytree(whole, found[-1], symlinks=True)
        flush(path)

    flush = files.flush_to_disk
    with monkeypatch.context() as patch:
        for module in (files, state):
            patch.setattr(module, "flush_to_disk", snapshot)
        train({"run": str(whole), "metric": METRIC, **wish})
    due = (whole / "best.safetensors").read_bytes()
    assert note_of(whole / "best.safetensors")["epoch"] == "2"
    torn, behind = 0, 0
    for folder in found:
        last, written = folder / "checkpoints" / "last", folder / "best.safetensors"
        torn += any(folder.glob(".part-*best.safetensors"))
        epochs, known = 0, 0
        if last.is_symlink():
            _, content = state.load_checkpoint(last.parent) or ({}, {})
            epochs, known = content["epoch"], content["best_epoch"]
        newest = int(note_of(written)["epoch"]) if written.exists() else 0
        assert newest >= known, folder
        behind += newest > known
        if not (folder / "config.yaml").exists():
            continue  # the run had not begun
        train({"run": str(folder), "metric": METRIC[epochs:], "resume": True, **wish})
        assert written.read_bytes() == due, folder
        ends = [last_weights(run) for run in (whole, folder)]
        assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    assert torn, "no kill in the midst of writing"
    assert behind, "no kill between the weights and their checkpoint"


def test_a_checkpoint_within_an_epoch_holds_the_time_of_its_steps(tmp_path):
    """Else a run that is stopped there would lose it."""
    wish = {"run": str(tmp_path), "epochs": 1, "steps": 8, "step_seconds": 0.05, "checkpoint_seconds": 0}
    with pytest.raises(ValueError, match="case_7"):
        train({**wish, "at": 6, "who": 0, "what": "fail"})
    kept = state.load_checkpoint(tmp_path / "checkpoints")
    assert kept is not None
    assert (kept[1]["epoch"], kept[1]["step"]) == (0, 6)
    before = kept[1]["seconds"]
    assert 6 * 0.05 <= before["train"] <= before["total"]
    train({**wish, "resume": True})
    kept = state.load_checkpoint(tmp_path / "checkpoints")
    assert kept is not None
    assert kept[1]["seconds"]["train"] >= before["train"] + 2 * 0.05
