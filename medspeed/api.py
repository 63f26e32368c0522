"""Training, prediction and evaluation as Python functions, for notebooks, scripts and services.

    from medspeed import predict, train

    summary = train("spleen", data="data/Task09_Spleen", epochs=20, crop_size=(64, 64, 48), run="runs/mine")
    found = predict("runs/mine", "scans", "masks", quiet=True)
    print(summary["quality"]["value"], {name: each.volumes_ml for name, each in found.done.items()})

Keyword arguments are the commands' flags, with the same defaults and bounds; those of a group, such as
`--windows.size`, are a mapping: `windows={"size": (96, 96, 64)}`. A mistake raises a `ValueError` or an `OSError`;
nothing ends the process. In the main thread, Ctrl-C lets a training finish its step and save before it raises
`KeyboardInterrupt`; in another thread no signal is handled. Signal handlers and the settings of `logging` and
`warnings` are restored afterwards; the state of torch's random numbers is not.
"""

import importlib
import logging
import signal
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_type_hints

from medspeed.common.config import config_from_values
from medspeed.common.console import set_verbosity
from medspeed.common.files import read_object
from medspeed.common.inference.demo import model_folder

if TYPE_CHECKING:  # they load torch
    from medspeed.common.inference.predictions import Predictions
    from medspeed.common.training.evaluate import RunSummary

App = Literal["brats", "pathology", "spleen"]


def train(app: App, *, quiet: bool = False, **flags: Any) -> "RunSummary":  # noqa: ANN401 - of each flag its own
    """Train a network as `medspeed train APP` does: data, training, evaluation, exports and the report.

    Args:
        app: spleen (CT and other single-channel volumes), brats (multi-channel MRI) or pathology (slides).
        quiet: print nothing; `run.log` in the run's folder has all lines.
        flags: those of `medspeed train APP --help`. With `resume`, all others are those of the interrupted run.

    Returns:
        What `summary.json` of the run holds: "run" is its folder, "quality" the figure it is judged by ("value",
        "per_case", "per_region"), "seconds" the time of each stage, "onnx" and "engine" what was exported. Under
        torchrun the first process alone has it, the others an empty one.

    Raises:
        ValueError: a flag does not exist, a value is of the wrong type or out of its bounds, or the data do not fit.
        OSError: a file is missing or cannot be written, or another process trains in the run's folder.
        FloatingPointError: a loss is not finite.
        KeyboardInterrupt: Ctrl-C was pressed; the run is saved, and `resume` continues it.
    """
    recipes = importlib.import_module(f"medspeed.apps.{_known(app)}.config").RECIPES
    kind = type(recipes["fast"])
    config = config_from_values(kind, recipes, flags, kind.RESUMABLE)
    with _as_function(quiet):
        return importlib.import_module(f"medspeed.apps.{app}.train").main(config) or {}


def predict(
    model: str | Path,
    inputs: str | Path,
    output: str | Path,
    *,
    quiet: bool = False,
    **flags: Any,  # noqa: ANN401 - of each flag its own
) -> "Predictions":
    """Segment scans, or scan slides, as `medspeed infer APP` does; the app is the one that trained the model.

    What an earlier call with the same weights and options has finished is kept.

    Args:
        model: folder of a training run, or "demo" for small weights that have seen phantoms alone.
        inputs: a file, or a folder of NIfTI files, DICOM series or slides.
        output: folder for label maps, pictures and `measurements.csv`.
        quiet: print nothing.
        flags: those of `medspeed infer APP --help`, such as `device`, `overlays`, `largest_component`.

    Returns:
        For each scan its files and measurements, and why others were set aside: one that cannot be read is no error.

    Raises:
        ValueError: a flag does not exist, a value is of the wrong type or out of its bounds, or the model does not fit.
        OSError: there is no model or no scan, or the folder cannot be written.
    """
    folder = model_folder(Path(model))
    record = folder / "model.json"
    if not record.is_file():
        raise FileNotFoundError(f"{record}: no such file; model takes the folder of a training run")
    module = importlib.import_module(f"medspeed.apps.{_known(read_object(record).get('app'))}.infer")
    given = {"model": folder, "input": inputs, "output": output, **flags}
    config = config_from_values(get_type_hints(module.main)["config"], {}, given)
    with _as_function(quiet):
        found: Predictions = module.main(config)
    return found


def _known(app: object) -> str:
    if app not in get_args(App):
        raise ValueError(f"app {app!r}: must be one of {', '.join(get_args(App))}")
    return str(app)


@contextmanager
def _as_function(quiet: bool) -> Iterator[None]:
    """Let a program's work be a function's: silent if asked, its settings put back, its end an exception."""
    with ExitStack() as after, warnings.catch_warnings():
        for library in map(logging.getLogger, ("pydicom", "highdicom")):  # they are kept from naming patients
            after.callback(library.setLevel, library.level)
        if quiet:
            after.callback(set_verbosity, set_verbosity("silent"))
        try:
            yield
        except SystemExit as end:
            if isinstance(end.code, int) and end.code > 128:  # the run was saved: the signal may act as usual now
                signal.raise_signal(end.code - 128)
            raise RuntimeError(f"ended with status {end.code}: by a signal, or as another process failed") from end
