"""Where a run's curves, settings and files go besides its folder: TensorBoard, MLflow, Weights & Biases, Trackio."""

import io
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from medspeed.common.files import printable, read_object, write_json

_RETRY_SECONDS = 60.0  # doubled after each failure, so that a server that does not answer takes little time


class _Tracker(NamedTuple):
    """A run in one tracker: its id, and what takes figures after a step, files, and whether the run failed."""

    id: str
    scalars: Callable[[Mapping[str, float], int], Any]
    files: Callable[[Sequence[Path]], Any]
    close: Callable[[bool], Any]


def _tensorboard(run: "Trackers", known: str) -> _Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.step + 1)

    def scalars(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return _Tracker("", scalars, lambda files: None, lambda failed: writer.close())


def _mlflow(run: "Trackers", known: str) -> _Tracker:
    for name, value in (("MAX_RETRIES", "1"), ("TIMEOUT", "10")):  # MLflow's own are minutes of waiting
        os.environ.setdefault(f"MLFLOW_HTTP_REQUEST_{name}", value)
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    client, number, last = MlflowClient(), known, 0
    if number:
        client.update_run(number, status="RUNNING")
        last = max((point.step for point in client.get_metric_history(number, "loss")), default=0)
    else:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", run.project)
        found = client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else client.create_experiment(name)
        number = client.create_run(experiment, run_name=run.folder.name).info.run_id
        client.log_batch(number, params=[Param(name, str(value)[:500]) for name, value in run.settings.items()])

    def scalars(values: Mapping[str, float], step: int) -> None:
        if step > last or "loss" not in values:  # a resumed run may do an epoch again
            now = int(time.time() * 1000)
            client.log_batch(number, [Metric(name, value, now, step) for name, value in values.items()])

    def files(paths: Sequence[Path]) -> None:
        for path in paths:
            client.log_artifact(number, str(path))

    return _Tracker(number, scalars, files, lambda failed: client.set_terminated(number, "FAILED" if failed else None))


def _like_wandb(name: str, run: "Trackers", known: str) -> _Tracker:
    """Return a run in Weights & Biases, or in Trackio, whose interface is the same but for some options."""
    package: Any = import_module(name)
    options: dict[str, Any] = {"project": run.project, "embed": False, "auto_log_gpu": False}
    title = re.sub(r"[^\w.-]", "-", run.folder.name, flags=re.ASCII)[:64]
    number = known or f"{title}-{uuid4().hex[:8]}"  # Trackio goes on by name, wandb by id
    if name == "wandb":
        quiet = package.Settings(console="off", silent=True, init_timeout=30, login_timeout=30)
        options = {"project": os.environ.get("WANDB_PROJECT", run.project), "id": number, "settings": quiet}
        folder = os.environ.get("WANDB_DIR", run.folder)
        options |= {"dir": folder, "reinit": "create_new"}  # beside a run of the user's own
    with redirect_stdout(io.StringIO()):
        begun = package.init(name=number, config=run.settings, resume="allow", **options)

    def files(paths: Sequence[Path]) -> None:
        artifact = package.Artifact(f"run-{number}", type="model")
        for path in paths:
            artifact.add_file(str(path))
        begun.log_artifact(artifact)

    def close(failed: bool) -> None:
        with redirect_stdout(io.StringIO()):
            begun.finish(*([int(failed)] if name == "wandb" else []))

    return _Tracker(number, lambda values, step: begun.log(dict(values), step=step), files, close)


TRACKERS = {"tensorboard": _tensorboard, "mlflow": _mlflow}
TRACKERS |= {name: partial(_like_wandb, name) for name in ("wandb", "trackio")}


class Trackers:
    """The trackers of a run, each of which may fail without harm; only the leader begins, so only it sends.

    The runs of an app are a project "medspeed-APP" (in MLflow an experiment). In the folder of the run, `trackers.json`
    has the ids under which a resumed run goes on. What fails waits, and goes with what comes a minute or more later.
    """

    def __init__(
        self, names: Sequence[str] = (), app: str = "", folder: Path = Path(), say: Callable[..., None] = print
    ) -> None:
        self.names, self.project, self.folder, self.say = dict.fromkeys(names), f"medspeed-{app}", folder, say
        self.settings, self.step = dict[str, Any](), 0
        self._waiting, self._opened = dict[str, list[Callable[[_Tracker], Any]]](), dict[str, _Tracker]()
        self._retry = dict[str, tuple[float, float]]()  # of those that failed: when to try again, and the wait after it

    def begin(self, settings: dict[str, Any], step: int) -> None:
        """Begin, or go on, with the settings of a run of which so many steps are done."""
        self.settings, self.step = settings, step
        self._waiting = {name: [] for name in self.names}
        for name in self.names:
            if name != "tensorboard":  # which loads slowly, and can do nothing before the first figures
                self._send(name, lambda tracker: None)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Log figures after so many steps."""
        for name in self._waiting:
            self._send(name, lambda tracker: tracker.scalars(values, step))

    def files(self, paths: Sequence[Path]) -> None:
        """Keep those files of the run that exist."""
        for name in self._waiting:
            self._send(name, lambda tracker: tracker.files([path for path in paths if path.is_file()]))

    def close(self, failed: bool) -> None:
        """End what was begun; a run that failed, or was stopped, can go on."""
        for name in self._waiting:
            self._send(name, lambda tracker: tracker.close(failed), last=True)
        self._waiting, self._opened, self._retry = {}, {}, {}

    def _send(self, name: str, call: Callable[[_Tracker], Any], last: bool = False) -> None:
        """Send a call to a tracker after those that wait; the last one waits no more."""
        waiting, (due, wait) = self._waiting[name], self._retry.get(name, (0.0, _RETRY_SECONDS))
        waiting.append(call)
        if time.monotonic() < due and not last:
            return
        try:
            tracker = self._opened.get(name) or self._open(name)
            while waiting:
                waiting[0](tracker)
                del waiting[0]
        except Exception as error:  # whatever it is, it must not cost a training
            if name not in self._retry:
                told = printable(f"{type(error).__name__}: {error}".splitlines()[0])[:300]
                self.say(f"{name}: {told}; the training goes on, and tries {name} again later", "warning")
            self._retry[name] = time.monotonic() + wait, 2 * wait
        if last and waiting:
            self.say(f"{name}: part of this run did not arrive; metrics.jsonl and summary.json have all", "warning")
            with suppress(Exception):  # what was begun ends, whatever went wrong before
                call(self._opened[name])

    def _open(self, name: str) -> _Tracker:
        path = self.folder / "trackers.json"
        ids = read_object(path) if path.exists() else {}
        tracker = self._opened[name] = TRACKERS[name](self, str(ids.get(name, "")))
        if tracker.id:
            write_json(path, ids | {name: tracker.id})
            self.say(f"{name}: run {tracker.id}")
        return tracker


def check_installed(names: Sequence[str]) -> None:
    """Raise a ValueError that says how to install the first tracker whose package is missing."""
    for name in names:
        if find_spec(name) is None:
            raise ValueError(f"--log {name}: the package {name} is not installed; run: pip install {name}")
