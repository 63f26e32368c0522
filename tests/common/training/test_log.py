from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medspeed.common.clock import Clock
from medspeed.common.files import read_json_lines
from medspeed.common.run import Run
from medspeed.common.training.config import TrainingConfig
from medspeed.common.training.fit import Log


@pytest.fixture
def lines_of(tmp_path, capsys, monkeypatch):
    """Return the lines that the epochs of a training print, validated every so many epochs."""
    monkeypatch.setenv("MEDSPEED_MONITOR_SECONDS", "0")
    monkeypatch.setattr(Log, "_draw", lambda log: None)

    def lines(epochs, first=0, every=10**6):
        state: Any = SimpleNamespace(epoch=first, steps_done=first)
        run = Run(tmp_path, torch.device("cpu"), Clock(), resumed=False)
        log = Log(run, TrainingConfig(epochs=epochs, learning_rate=0.01), [0.01] * epochs, state)
        for epoch in range(first + 1, epochs + 1):
            record = {"epoch": epoch, "step": epoch, "losses": [0.25, 0.75]}
            log.epoch(record | ({"dice": 0.875} if epoch % every == 0 else {}), 2.0)
        log.close()
        found = capsys.readouterr()
        assert found.err == ""  # no bar
        return found.out.splitlines()

    return lines


def test_without_a_terminal_each_epoch_is_a_line(lines_of):
    found = lines_of(25, every=5)
    assert len(found) == 25
    assert found[3].startswith("epoch 4/25: loss 0.5000, 2.0 s, ")
    assert found[4].startswith("epoch 5/25: loss 0.5000, dice 0.8750, 2.0 s, ")
    assert found[24].endswith(", 00:00 of training left")


def test_of_many_epochs_some_and_the_validated_ones_are_lines(lines_of):
    found, validated = lines_of(1000, every=125), range(125, 1001, 125)
    assert len(found) <= 40
    assert [line.split(":")[0] for line in found if "dice" in line] == [f"epoch {n}/1000" for n in validated]


def test_a_run_folder_that_was_taken_away_is_not_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("MEDSPEED_MONITOR_SECONDS", "0")  # its thread writes first whenever it comes to run
    run = Run(tmp_path / "run", torch.device("cpu"), Clock(), resumed=False)
    run.directory.mkdir()
    state: Any = SimpleNamespace(epoch=0, steps_done=0)
    log = Log(run, TrainingConfig(epochs=2, learning_rate=0.01), [0.01] * 2, state)
    log.epoch({"epoch": 1, "step": 1, "losses": [0.5]}, 2.0)
    run.directory.rename(tmp_path / "gone")
    log.close()
    assert not run.directory.exists()


def test_a_resumed_run_counts_its_own_epochs(lines_of):
    assert [line.split(":")[0] for line in lines_of(4, first=2)] == ["epoch 3/4", "epoch 4/4"]


def test_a_first_line_that_a_crash_cut_short_is_dropped(lines_of, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1, "lo')
    lines_of(2)
    assert [record["epoch"] for record in read_json_lines(tmp_path / "metrics.jsonl")] == [1, 2]
