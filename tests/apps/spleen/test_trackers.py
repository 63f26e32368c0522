import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from medspeed.apps.spleen.config import SpleenConfig
from medspeed.apps.spleen.train import main
from medspeed.common.training import fit
from medspeed.common.training.volume_config import Crops, Windows

TINY: dict[str, Any] = {
    "split": "0.25", "spacing": (6.0, 6.0, 6.0), "channels": (4, 8), "crop_size": (16, 16, 16), "batch_size": 4,
    "windows": Windows(size=(32, 32, 32)), "epochs": 2, "precision": "fp32", "engine": "none", "device": "cpu",
    "learning_rate": 0.01, "crops": Crops(per_case=4),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # what packages that are not ours warn of is not ours to end a test
@pytest.mark.slow
def test_mlflow_on_sqlite_shows_curves_settings_and_files_of_a_run(phantoms, store, tmp_path, monkeypatch):
    """Stopped after its first epoch and resumed, it is one run there."""
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow: pip install mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    config = SpleenConfig(data=phantoms, store=store, run=tmp_path / "run", log=("mlflow",), validate_every=1, **TINY)
    stop_in_epoch(2, monkeypatch)
    with pytest.raises(SystemExit):
        main(config)
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("medspeed-spleen")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FAILED"
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    summary = main(replace(config, run=None, resume=tmp_path / "run"))
    assert summary is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.status, found.info.run_name) == ("FINISHED", "run")
    assert found.data.params["batch_size"] == "4"
    assert found.data.params["windows.size"] == "(32, 32, 32)"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for name in ("loss", "dice"):
        curve = [(point.step, point.value) for point in client.get_metric_history(found.info.run_id, name)]
        assert curve == [(line["step"], line[name]) for line in lines]
    speeds = client.get_metric_history(found.info.run_id, "samples_per_second")
    assert [point.step for point in speeds] == [3, 6]
    rates = [point.value for point in client.get_metric_history(found.info.run_id, "learning_rate")]
    assert rates == pytest.approx([0.01 * 4 / 6, 0.01 * 1 / 6])  # linear over six steps: at the third and the last
    assert found.data.metrics["quality"] == summary["quality"]["value"]
    files = {file.path for file in client.list_artifacts(found.info.run_id)}
    assert files >= {"summary.json", "report.html", "best.safetensors", "model.json", "config.yaml", "plan.json"}
    local = client.download_artifacts(found.info.run_id, "summary.json", str(tmp_path))
    assert json.loads(Path(local).read_text()) == json.loads((tmp_path / "run" / "summary.json").read_text())


def stop_in_epoch(epoch, monkeypatch):
    """Let a training end as by SIGTERM in the first step of an epoch, of three steps each."""
    done, step = [0], fit.train_step

    def stopped(*arguments):
        done[0] += 1
        if done[0] == 3 * (epoch - 1) + 1:
            raise SystemExit(143)
        return step(*arguments)

    monkeypatch.setattr(fit, "train_step", stopped)
