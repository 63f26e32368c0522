"""Training, prediction and evaluation as Python functions, for notebooks, scripts and services.

    from medspeed import evaluate, predict, train

    summary = train("spleen", data="data/Task09_Spleen", epochs=20, crop_size=(64, 64, 48), run="runs/mine")
    masks = predict("runs/mine", "scans", "masks", quiet=True)
    print(summary["quality"]["value"], {name: each.volumes_ml for name, each in masks.done.items()})
    print(evaluate("masks", "references").summary)

Keyword arguments are the commands' flags, with the same defaults and bounds; those of a group, such as
`--windows.size`, are a mapping: `windows={"size": (96, 96, 64)}`. With `quiet=True` only trackers print; of calls
that overlap in threads, one that is quiet silences all. A mistake raises a `ValueError` (no such flag, a value of the
wrong type or out of its bounds, data that do not fit) or an `OSError` (a file is missing, in use or cannot be
written); nothing ends the process. In the main thread, Ctrl-C lets a training finish its step and save before it raises
`KeyboardInterrupt`; in another thread no signal is handled. Signal handlers and the settings of `logging` and
`warnings` are restored afterwards; torch's random state and, with MLflow, its MLFLOW_HTTP_REQUEST_* are not.
"""

import importlib
import logging
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_type_hints, overload

from medspeed.common.config import config_from_values
from medspeed.common.console import set_verbosity
from medspeed.common.files import read_object
from medspeed.common.inference.options import model_folders

if TYPE_CHECKING:  # they load torch
    from medspeed.apps.pathology.evaluate import SlideScores
    from medspeed.common.inference.folder_job import Predictions
    from medspeed.common.inference.scores import Evaluation
    from medspeed.common.training.evaluate import RunSummary

App = Literal["brats", "pathology", "spleen"]
Runs = str | Path | Sequence[str | Path]
"""One folder, or several."""
_LOCK, _SAVED = threading.Lock(), ExitStack()
_running = 0  # calls


def train(app: App, *, quiet: bool = False, **flags: Any) -> "RunSummary":
    """Train a network as `medspeed train APP` does: data, training, evaluation, exports and the report.

    Args:
        app: spleen (CT and other single-channel volumes), brats (multi-channel MRI) or pathology (slides).
        quiet: print nothing; `run.log` in the run folder has all lines.
        flags: those of `medspeed train APP --help`. With `resume`, all others are taken from the interrupted run.

    Returns:
        The content of the run's `summary.json`: "run" is its folder, "quality" the evaluation ("value", "per_case",
        "per_region"), "seconds" the time of each stage, "onnx" and "engine" the exports. Under torchrun only the first
        process has it; the others return an empty one.

    Raises:
        FloatingPointError: a loss is not finite.
        KeyboardInterrupt: Ctrl-C was pressed; the run is saved, and `resume` continues it.
    """
    return _call("train", app, flags, quiet) or {}


def predict(model: Runs, inputs: str | Path, output: str | Path, *, quiet: bool = False, **flags: Any) -> "Predictions":
    """Segment scans, or scan slides, as `medspeed infer APP` does; the app is the one that trained the model.

    What an earlier call with the same weights and options has finished is kept.

    Args:
        model: folder of a training run, or "demo" for small weights that have seen CT phantoms alone. Of volumes,
            several, or a folder of folds: the mean of their logits.
        inputs: a file, or a folder of NIfTI files, DICOM series, slides or patches.
        output: folder for label maps, pictures and `measurements.csv`.
        quiet: print nothing.
        flags: those of `medspeed infer APP --help`, such as `device`, `overlays`, `largest_component`.

    Returns:
        Files and measurements of each scan, and the errors of failed scans, which are not raised.
    """
    runs = _folders(model)
    given = {"model": runs if len(runs) > 1 else runs[0], "input": inputs, "output": output}
    return _call("infer", _app(runs[0]), _together(given, flags), quiet)  # type: ignore[no-any-return]


@overload
def evaluate(
    predictions: str | Path, references: str | Path, *, app: Literal["pathology"], quiet: bool = ..., **flags: Any
) -> "SlideScores": ...
@overload
def evaluate(
    predictions: Runs, references: str | Path, *, app: Literal["brats", "spleen"] = ..., quiet: bool = ..., **flags: Any
) -> "Evaluation": ...
def evaluate(
    predictions: Runs, references: str | Path, *, app: App = "spleen", quiet: bool = False, **flags: Any
) -> "Evaluation | SlideScores":
    """Compare label maps, or scanned slides, with references, as `medspeed evaluate APP` does; write the tables.

    Args:
        predictions: folder that `predict` wrote, or of other label maps; or, of volumes, a run that segments first, or
            several (give `output` then).
        references: folder of label maps of the same names; the dataset, for a run and for slides.
        app: pathology for slides; brats for the overlapping regions of a dataset's labels.
        quiet: print nothing.
        flags: those of `medspeed evaluate APP --help`, such as `tolerance`.

    Returns:
        The metrics of each case, and their means; of slides FROC and AUC.
    """
    (folder, *others), names = _folders(predictions), ("predictions", "references")
    if (folder / "model.json").is_file():
        app, names = _app(folder), ("model", "data")
    if app == "pathology":
        names = ("scans", "data")
    given = {names[0]: [folder, *others] if others else folder, names[1]: references}
    return _call("evaluate", app, _together(given, flags), quiet)  # type: ignore[no-any-return]


def _together(given: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    if twice := sorted(given.keys() & flags.keys()):
        raise ValueError(f"{twice[0]}: given twice")
    return given | flags


def _folders(given: Runs) -> tuple[Path, ...]:
    return model_folders([Path(each) for each in ([given] if isinstance(given, str | Path) else given)])


def _app(model: Path) -> Any:
    record = model / "model.json"
    if not record.is_file():
        raise FileNotFoundError(f"{record}: no such file; model takes the folder of a training run")
    return read_object(record).get("app")


def _call(verb: str, app: App, given: dict[str, Any], quiet: bool) -> Any:
    """Return what a program returns: silent if asked, its settings put back, its end an exception."""
    if app not in get_args(App):
        raise ValueError(f"app {app!r}: must be one of {', '.join(get_args(App))}")
    main = importlib.import_module(f"medspeed.apps.{app}.{verb}").main
    recipes = importlib.import_module(f"medspeed.apps.{app}.config").RECIPES if verb == "train" else {}
    config = config_from_values(get_type_hints(main)["config"], recipes, given)
    with _settings_restored():
        if quiet:
            set_verbosity("silent")
            logging.getLogger("medspeed").setLevel(logging.CRITICAL)
            warnings.simplefilter("ignore")
        try:
            return main(config)
        except SystemExit as end:
            if isinstance(end.code, int) and end.code > 128:  # the run was saved: the signal may act as usual now
                signal.raise_signal(end.code - 128)
            raise RuntimeError(f"ended with status {end.code}: by a signal, or as another process failed") from end


@contextmanager
def _settings_restored() -> Iterator[None]:
    """Restore what a call changes of the process; of calls that overlap in threads, the last does."""
    global _running
    import torch  # here: by now the command has loaded it

    with _LOCK:
        _running += 1
        if _running == 1:
            _SAVED.enter_context(warnings.catch_warnings())
            for logger in map(logging.getLogger, ("medspeed", "pydicom", "highdicom")):  # which may not name patients
                _SAVED.callback(logger.setLevel, logger.level)
            _SAVED.callback(set_verbosity, set_verbosity("normal"))
            _SAVED.callback(torch.set_num_threads, torch.get_num_threads())  # which new threads inherit
    try:
        yield
    finally:
        with _LOCK:
            _running -= 1
            if not _running:
                _SAVED.close()
