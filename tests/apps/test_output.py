"""What a training prints where there is no terminal, as in a job of a cluster."""

import re

import pytest

from tests.apps.test_fast_dev_run import SMALL


@pytest.mark.slow
def test_the_log_of_a_run_is_short_and_plain_and_quiet_is_shorter(start, phantoms, store, tmp_path, monkeypatch):
    monkeypatch.setenv("MEDSPEED_CHECKPOINT_SECONDS", "30")
    run, data = tmp_path / "run", ["--data", phantoms, "--store", store, "--device", "cpu"]
    whole = start("apps/spleen/train.py", *data, "--run", run, "--epochs", "45", "--engine", "none", *SMALL["spleen"])
    log, _ = whole.communicate()
    lines = log.splitlines()
    assert whole.returncode == 0, log
    assert len(lines) <= 60
    assert "\r" not in log
    assert "\x1b" not in log
    epochs = [line for line in lines if re.fullmatch(r"epoch \d+/45: loss .* \d\d:\d\d of training left", line)]
    assert 20 <= len(epochs) <= 40
    assert any(" dice " in line for line in epochs)
    assert (run / "run.log").read_text(encoding="utf-8").count("default for this CPU") > 3  # each in its line
    assert sum("default" in line for line in lines) == 1

    quiet = start("tests/without_exports.py", "apps/spleen/train.py", "--resume", run, "--device", "cpu", "--quiet")
    log, _ = quiet.communicate()
    assert quiet.returncode == 0, log
    assert {line.split(":")[0] for line in log.splitlines()} == {
        "SYNTHETIC DATA", "  medspeed data fetch-msd spleen --to data && medspeed train spleen --data "
        "data/Task09_Spleen", "Dice on the native grid", "summary", "report",
    }  # fmt: skip
