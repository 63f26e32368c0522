import json
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from medspeed.apps.spleen.config import SpleenConfig, parse
from medspeed.apps.spleen.train import main
from medspeed.common import trackers
from medspeed.common.trackers import TRACKERS, Trackers, check_installed

theirs = pytest.mark.filterwarnings("ignore")  # what packages that are not ours warn of is not ours to end a test


class Flaky:
    """A tracker whose server does not answer while `down`; `got` is what arrived."""

    def __init__(self):
        self.down, self.got = False, []

    def _take(self, *call):
        if self.down:
            raise RuntimeError("no answer\nfrom there")
        self.got.append(call)

    def open(self, run, known):
        self._take("open", known)
        return trackers._Tracker(
            "id-1",
            lambda values, step: self._take(dict(values), step),
            lambda paths: self._take([path.name for path in paths]),
            lambda failed: self._take("failed" if failed else "finished"),
        )


@pytest.fixture
def flaky(monkeypatch):
    server = Flaky()
    monkeypatch.setitem(TRACKERS, "mlflow", server.open)
    return server


@pytest.fixture
def begun(tmp_path, flaky):
    """Return what was said, and trackers of a run that tells them of one setting."""
    said: list[str] = []
    found = Trackers(("mlflow",), "spleen", tmp_path, lambda line, kind="note": said.append(f"{kind}: {line}"))
    return said, found


def test_a_tracker_gets_figures_and_the_files_that_exist_and_the_end(begun, flaky, tmp_path):
    said, found = begun
    found.begin({"epochs": 2}, 0)
    found.scalars({"loss": 0.5}, 10)
    (tmp_path / "summary.json").write_text("{}")
    found.files([tmp_path / "summary.json", tmp_path / "report.html"])
    found.close(failed=False)
    assert flaky.got == [("open", ""), ({"loss": 0.5}, 10), (["summary.json"],), ("finished",)]
    assert said == ["note: mlflow: run id-1"]


def test_a_resumed_run_goes_on_under_its_id_and_a_stopped_one_has_failed(begun, flaky):
    _, found = begun
    for _ in range(2):
        found.begin({}, 0)
        found.close(failed=True)
    assert flaky.got == [("open", ""), ("failed",), ("open", "id-1"), ("failed",)]


def test_one_that_is_given_twice_gets_all_once(flaky, tmp_path):
    found = Trackers(("mlflow", "mlflow"), "spleen", tmp_path, lambda *_: None)
    found.begin({}, 0)
    found.close(failed=False)
    assert flaky.got == [("open", ""), ("finished",)]


def test_a_server_that_fails_costs_one_warning_and_gets_all_when_it_is_back(begun, flaky, monkeypatch):
    said, found = begun
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    flaky.down = True
    found.begin({}, 0)
    found.scalars({"loss": 3.0}, 1)  # within the minute: not tried
    now += 61
    found.scalars({"loss": 2.0}, 2)  # tried, and still down
    flaky.down = False
    now += 61  # the next wait is two minutes
    found.scalars({"loss": 1.0}, 3)
    assert flaky.got == []
    now += 60
    found.scalars({"loss": 0.5}, 4)
    assert flaky.got == [("open", ""), *(({"loss": loss}, step) for step, loss in enumerate((3.0, 2.0, 1.0, 0.5), 1))]
    warnings = [line for line in said if line.startswith("warning")]
    assert warnings == ["warning: mlflow: RuntimeError: no answer; the training goes on, and tries mlflow again later"]


def test_what_never_arrived_is_said_at_the_end(begun, flaky):
    said, found = begun
    flaky.down = True
    found.begin({}, 0)
    found.close(failed=False)
    assert said[-1] == "warning: mlflow: part of this run did not arrive; metrics.jsonl and summary.json have all"


def test_a_call_that_always_fails_does_not_keep_the_run_open(begun, flaky, tmp_path):
    said, found = begun
    found.begin({}, 0)
    flaky.down = True
    found.files([tmp_path / "summary.json"])
    flaky.down, found._opened["mlflow"] = False, found._opened["mlflow"]._replace(files=lambda _: 1 / 0)
    found.close(failed=False)
    assert flaky.got == [("open", ""), ("finished",)]
    assert "part of this run did not arrive" in said[-1]


def test_another_rank_which_never_begins_sends_nothing(begun, flaky):
    _, found = begun
    found.scalars({"loss": 1.0}, 1)
    found.close(failed=False)
    assert flaky.got == []


def test_a_package_that_is_missing_is_refused_at_the_start(monkeypatch, tmp_path):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None if name == "wandb" else object())
    check_installed(("tensorboard", "mlflow"))
    wanted = "--log wandb: the package wandb is not installed; run: pip install wandb"
    with pytest.raises(ValueError, match=wanted):
        main(SpleenConfig(run=tmp_path / "run", log=("tensorboard", "wandb")))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("words", [["mlflow", "wandb"], ["mlflow,wandb"]])
def test_several_may_be_given(words):
    assert parse(["--log", *words]).log == ("mlflow", "wandb")
    assert parse([]).log == ("tensorboard",)


def test_an_unknown_one_is_refused_by_name(capsys):
    with pytest.raises(SystemExit):
        parse(["--log", "neptune"])
    assert "--log neptune: expected some of tensorboard, mlflow, wandb, trackio" in capsys.readouterr().err


def test_tensorboard_drops_the_steps_that_a_resumed_run_does_again(tmp_path, monkeypatch):
    wall = time.time
    for begun, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        monkeypatch.setattr(time, "time", lambda later=begun: wall() + later)  # files are ordered by whole seconds
        found = Trackers(("tensorboard",), "spleen", tmp_path)
        found.begin({}, begun)
        for step in steps:
            found.scalars({"loss": step + 10 * begun}, step)
        found.close(failed=False)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in events] == [(1, 1), (2, 2), (3, 23), (4, 24)]


@theirs
@pytest.mark.slow
def test_a_server_of_mlflow_that_does_not_answer_costs_one_warning(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="needs mlflow: pip install mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and nobody listens
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free.getsockname()[1]}")
        said: list[str] = []
        found = Trackers(("mlflow",), "spleen", tmp_path, lambda line, kind="note": said.append(line))
        found.begin({"epochs": 2}, 0)
        found.scalars({"loss": 0.25}, 2)
        found.close(failed=False)
    assert len(said) == 2  # one warning, and what did not arrive
    assert "the training goes on" in said[0]


@theirs
@pytest.mark.slow
def test_mlflow_leaves_a_users_run_and_experiment_alone_and_cuts_long_settings(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow: pip install mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")  # not for later tests
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "")  # which `set_experiment` sets: undone at the end
    monkeypatch.delenv("MLFLOW_EXPERIMENT_ID")
    said: list[str] = []
    mlflow.set_experiment("mine")
    with mlflow.start_run() as users:
        for first in (0, 1):  # the second goes on with the run of the first
            found = Trackers(("mlflow",), "spleen", tmp_path, lambda line, kind="note": said.append(line))
            found.begin({"long": "x" * 7000}, first)
            found.scalars({"loss": 0.25}, first + 1)
            found.close(failed=not first)
        assert mlflow.active_run().info.run_id == users.info.run_id
    with mlflow.start_run() as later:
        assert later.info.experiment_id == users.info.experiment_id
    number = json.loads((tmp_path / "trackers.json").read_text())["mlflow"]
    assert said == [f"mlflow: run {number}"] * 2  # no warning
    ours = mlflow.get_run(number)
    assert mlflow.get_experiment(ours.info.experiment_id).name == "medspeed-spleen"
    assert (ours.info.status, len(ours.data.params["long"])) == ("FINISHED", 500)


@pytest.mark.parametrize("own", ["", "elsewhere"])
def test_wandb_writes_where_its_variable_says(own, tmp_path, monkeypatch):
    given: dict[str, Any] = {}
    begun = SimpleNamespace(log=lambda *_, **__: None, finish=lambda *_: None)
    package = SimpleNamespace(Settings=lambda **_: None, init=lambda **options: given.update(options) or begun)
    monkeypatch.setattr(trackers, "import_module", lambda name: package)
    monkeypatch.delenv("WANDB_DIR", raising=False)
    if own:
        monkeypatch.setenv("WANDB_DIR", str(tmp_path / own))
    Trackers(("wandb",), "spleen", tmp_path, lambda line, kind="note": None).begin({}, 0)
    assert Path(given["dir"]) == tmp_path / own


@theirs
@pytest.mark.slow
@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_package_like_wandb_keeps_a_run_offline_and_goes_on_with_it(package, tmp_path, monkeypatch):
    pytest.importorskip(package, reason=f"needs {package}: pip install {package}")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in ("CONFIG", "CACHE", "DATA", "ARTIFACT"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "wandb_home"))
    (tmp_path / "model.json").write_text("{}")
    said: list[str] = []
    for first in (0, 2):
        found = Trackers((package,), "spleen", tmp_path, lambda line, kind="note": said.append(line))
        found.begin({"epochs": 2}, first)
        for step in (first + 1, first + 2):
            found.scalars({"loss": 1 / step}, step)
        found.files([tmp_path / "model.json"])
        found.close(failed=False)
    number = json.loads((tmp_path / "trackers.json").read_text())[package]
    assert said == [f"{package}: run {number}"] * 2  # no warning
    curve, settings = READERS[package](tmp_path, number)
    assert curve == [(step, pytest.approx(1 / step)) for step in (1, 2, 3, 4)]
    assert settings == {"epochs": 2}


def read_wandb(folder, number):
    """Return loss by step and the settings that the folders of an offline run hold, one for each process."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its service ends, with all written

    curve, settings, artifacts = [], {}, 0
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        assert path.name == f"run-{number}.wandb"
        content, record = path.read_bytes()[7:], Record()  # LevelDB's log: checksum, length, kind (1: whole), data
        while content:
            size = int.from_bytes(content[4:6], "little")
            assert content[6] == 1
            record.ParseFromString(content[7 : 7 + size])
            content = content[7 + size :]
            if record.HasField("history"):
                row = {
                    ".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item
                }
                curve.append((row["_step"], row["loss"]))
            if record.HasField("run"):
                settings = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            artifacts += record.request.HasField("log_artifact") or record.HasField("artifact")
    assert artifacts == 2
    return curve, {name: value for name, value in settings.items() if not name.startswith("_")}


def read_trackio(folder, number):
    """Return loss by step and the settings that Trackio's database holds."""
    from trackio import SQLiteStorage

    (project,) = SQLiteStorage.get_projects()
    assert project == "medspeed-spleen"
    rows = SQLiteStorage.get_logs(project, number)
    settings = SQLiteStorage.get_run_config(project, number)
    curve = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    return curve, {name: value for name, value in settings.items() if not name.startswith("_")}


READERS = {"wandb": read_wandb, "trackio": read_trackio}
