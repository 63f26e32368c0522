"""`--until`: a target that ends a run when three validations in a row have reached it."""

import json
import os
import re
import signal

import pytest

from medspeed.common.training.config import TrainingConfig
from medspeed.common.training.fit import Log
from tests.common.training.fit_worker import train


def epochs_of(folder):
    return len((folder / "metrics.jsonl").read_text().splitlines())


def wish(folder, metric, **more):
    return {"run": str(folder), "steps": 2, "epochs": len(metric), "metric": metric, "until": "dice=0.6", **more}


@pytest.mark.parametrize(
    ("metric", "epochs", "held"),
    [
        ([0.6, 0.7, 0.6, 0.9, 0.9], 3, True),
        ([0.9, 0.1, 0.9, 0.9, 0.59, 0.9, 0.8, 0.7, 0.9], 8, True),  # a lucky peak is none
        ([0.5, 0.6, 0.6], 3, False),
        ([0.5, 0.6, 0.6, 0.6], 4, True),
    ],
)
def test_a_run_ends_when_three_validations_in_a_row_have_reached_the_target(metric, epochs, held, tmp_path):
    fitted = train(wish(tmp_path, metric))
    assert (epochs_of(tmp_path), fitted.held) == (epochs, held)
    assert fitted.steps == 2 * epochs
    assert (fitted.best, fitted.last) == (max(metric[:epochs]), metric[epochs - 1])
    assert fitted.seconds > 0


def test_without_a_target_nothing_ends_early(tmp_path):
    fitted = train(wish(tmp_path, [0.9] * 5, until=None))
    assert (epochs_of(tmp_path), fitted.held) == (5, None)


def test_a_resumed_run_remembers_the_validations_before(tmp_path):
    train(wish(tmp_path, [0.7, 0.8]))
    fitted = train(wish(tmp_path, [0.9, 0.1, 0.1], resume=True, epochs=5))
    assert (epochs_of(tmp_path), fitted.held) == (3, True)


def test_a_run_that_has_reached_it_does_nothing_when_resumed(tmp_path):
    first = train(wish(tmp_path, [0.7, 0.8, 0.9, 0.9]))
    fitted = train(wish(tmp_path, [], resume=True, epochs=4, began_before=1000.0))
    assert (epochs_of(tmp_path), fitted.held, fitted.steps, fitted.limit) == (3, True, 6, None)
    assert first.seconds <= fitted.seconds < first.seconds + 500, "the time to target is that of the training"
    assert fitted.best == 0.9


@pytest.mark.parametrize("damage", ["gone", "truncated"])
def test_damaged_best_weights_are_told_before_more_is_trained(damage, tmp_path):
    train(wish(tmp_path, [0.7, 0.8]))
    best, lines = tmp_path / "best.safetensors", (tmp_path / "metrics.jsonl").read_text()
    whole = best.read_bytes()
    best.unlink()
    if damage == "truncated":
        best.write_bytes(whole[:-9])
    with pytest.raises((ValueError, FileNotFoundError), match=r"best\.safetensors: "):
        train(wish(tmp_path, [0.1, 0.1], resume=True, epochs=4))
    assert (tmp_path / "metrics.jsonl").read_text() == lines


def test_a_signal_that_comes_while_the_log_is_drawn_counts(tmp_path, monkeypatch):
    close = Log.close

    def meanwhile(log):
        os.kill(os.getpid(), signal.SIGTERM)
        close(log)

    monkeypatch.setattr(Log, "close", meanwhile)
    with pytest.raises(SystemExit) as stopped:
        train(wish(tmp_path, [0.7, 0.8], until=None))
    assert stopped.value.code == 143
    monkeypatch.undo()
    assert train(wish(tmp_path, [], resume=True, epochs=2, until=None)).steps == 4


@pytest.mark.parametrize(
    "text", ["0.9", "dice", "dice=", "auc=0.9", "dice=1.01", "dice=0", "dice=-0.5", "dice=nan", "dice=9", "dice=."]
)
def test_what_is_no_target_is_refused(text):
    with pytest.raises(ValueError, match=r"until .*: must be dice=VALUE with a value above 0 and at most 1"):
        TrainingConfig(until=text)


@pytest.mark.parametrize(
    ("text", "value"), [("dice=0.90", 0.9), ("Dice=.5", 0.5), ("dice=1", 1.0), (" dice = 0.9", 0.9), (None, None)]
)
def test_what_is_one(text, value):
    assert TrainingConfig(until=text).target() == value


def test_each_epoch_tells_what_it_waited_and_computed(tmp_path):
    train(wish(tmp_path, [0.1, 0.1], step_seconds=0.05))
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert 2 * 0.05 <= record["waited"] <= record["seconds"]
        assert 0 < record["computed"] <= record["seconds"] - record["waited"] + 0.01


def test_a_profiled_run_tells_what_its_steps_were_spent_on(tmp_path):
    train(wish(tmp_path, [0.1] * 6, profile="torch", until=None))
    told = (tmp_path / "profile" / "operations.txt").read_text()
    found = {name: float(ms) for name, ms in re.findall(r"^  (\w+) +([\d.]+) ms in", told, re.MULTILINE)}
    assert min(found["forward"], found["backward"]) > 0


def test_a_watched_run_leaves_its_rows_and_its_picture(tmp_path):
    train(wish(tmp_path, [0.1], monitor=0.05, until=None, step_seconds=0.1))
    assert len((tmp_path / "monitor.csv").read_text().splitlines()) >= 2
    assert (tmp_path / "monitor.png").is_file()


def test_each_so_many_epochs_are_validated_and_the_last(tmp_path):
    train({"run": str(tmp_path), "steps": 1, "epochs": 5, "validate_every": 2})
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["epoch"] for record in records if "dice" in record] == [2, 4, 5]
