"""Training, prediction and evaluation as Python functions, for notebooks, scripts and services.

    from medspeed import predict, train

    summary = train("spleen", data="data/Task09_Spleen", epochs=20, crop_size=(64, 64, 48), run="runs/mine")
    found = predict("runs/mine", "scans", "masks", quiet=True)
    print(summary["quality"]["value"], {name: each.volumes_ml for name, each in found.done.items()})

Keyword arguments are the commands' flags, with the same defaults and bounds; of a group such as `--windows.size` and
`--windows.overlap` they are a mapping: `windows={"size": (96, 96, 64)}`. Mistakes are raised as a `TypeError` (no such
flag), a `ValueError` or an `OSError`; nothing ends the process. In the main thread, Ctrl-C lets a training finish its
step and save before it raises `KeyboardInterrupt`; in another thread no signal is handled. Signal handlers and the
settings of `logging` and `warnings` are restored afterwards; the state of torch's random numbers is not.
"""

import difflib
import importlib
import io
import logging
import signal
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_type_hints

from medspeed.common.config import _check_resumed, config_content, config_from_yaml, flat
from medspeed.common.files import from_json, read_object
from medspeed.common.inference.demo import model_folder

if TYPE_CHECKING:  # they load torch
    from medspeed.common.inference.predictions import Predictions
    from medspeed.common.training.evaluate import RunSummary

App = Literal["brats", "pathology", "spleen"]
Config = TypeVar("Config")


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
        TypeError: there is no such flag.
        ValueError: a value is of the wrong type or out of its bounds, or the data do not fit.
        OSError: a file is missing or cannot be written, or another process trains in the run's folder.
        FloatingPointError: a loss is not finite.
        KeyboardInterrupt: Ctrl-C came; the step was finished, and `resume` goes on after it.
    """
    recipes = importlib.import_module(f"medspeed.apps.{_known(app)}.config").RECIPES
    recipe, resume = flags.get("recipe", next(iter(recipes))), flags.get("resume")
    if recipe not in recipes:
        raise ValueError(f"recipe {recipe!r}: must be one of {', '.join(recipes)}")
    kind = type(recipes[recipe])
    start = recipes[recipe] if resume is None else config_from_yaml(kind, Path(resume).expanduser() / "config.yaml")
    config = _configured(kind, start, flags)
    if resume is not None:
        _check_resumed(flat(config), flat(start), kind.RESUMABLE)
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
        TypeError: there is no such flag.
        ValueError: a value is of the wrong type or out of its bounds, or the model does not fit.
        OSError: there is no model or no scan, or the folder cannot be written.
    """
    folder = model_folder(Path(model))
    record = folder / "model.json"
    if not record.is_file():
        raise FileNotFoundError(f"{record}: no such file; model takes the folder of a training run")
    module = importlib.import_module(f"medspeed.apps.{_known(read_object(record).get('app'))}.infer")
    given = {"model": folder, "input": inputs, "output": output, **flags}
    config = _configured(get_type_hints(module.main)["config"], None, given)
    with _as_function(quiet):
        found: Predictions = module.main(config)
    return found


def _known(app: object) -> str:
    if app not in get_args(App):
        raise ValueError(f"app {app!r}: must be one of {', '.join(get_args(App))}")
    return str(app)


def _configured(kind: type[Config], start: Config | None, given: Mapping[str, Any]) -> Config:
    """Return a configuration of what is given, the rest as in `start` or by its defaults; for errors see `train`."""
    content = {} if start is None else config_content(start)
    known = [field.name for field in fields(kind)] if start is None else list(flat(start))  # type: ignore[arg-type]
    groups = {name: value for name, value in given.items() if isinstance(value, Mapping)}
    single = {f"{name}.{inner}": each for name, group in groups.items() for inner, each in group.items()}
    for name, value in {**{name: each for name, each in given.items() if name not in groups}, **single}.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.5)
            raise TypeError(f"{name}: no such flag{f'; did you mean {near[0]}?' if near else ''}")
        group, _, inner = name.rpartition(".")
        at_home = str(Path(value).expanduser()) if isinstance(value, (str, Path)) and str(value)[:1] == "~" else value
        (content[group] if group else content)[inner] = at_home
    return from_json(kind, content)


@contextmanager
def _as_function(quiet: bool) -> Iterator[None]:
    """Let a program's work be a function's: silent if asked, its settings put back, its end an exception."""
    with ExitStack() as after, warnings.catch_warnings():
        for library in map(logging.getLogger, ("pydicom", "highdicom")):  # they are kept from naming patients
            after.callback(library.setLevel, library.level)
        if quiet:
            after.enter_context(redirect_stdout(io.StringIO()))
            after.enter_context(redirect_stderr(io.StringIO()))
        try:
            yield
        except SystemExit as end:
            if isinstance(end.code, int) and end.code > 128:  # the run was saved: the signal may act as usual now
                signal.raise_signal(end.code - 128)
            raise RuntimeError(f"ended with status {end.code}: by a signal, or as another process failed") from end
