"""Any app's training, opened up to the moment before it begins: for programs that look at one from outside."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from medspeed.common.run import Run
from medspeed.common.training.fit import Setup


def parse_flags(app: str, flags: Sequence[str]) -> Any:  # noqa: ANN401 - the app's configuration
    """Return the configuration that flags of an app's `train.py` give."""
    return import_module(f"medspeed.apps.{app}.config").parse(flags)


def open_training(config: Any, run: Run) -> tuple[Any, Setup]:  # noqa: ANN401 - an app's configuration
    """Read, decide and set up a training: the configuration with every field decided, and what is trained."""
    app = import_module(f"medspeed.apps.{config.APP}.train")
    data = app.read_data(config, run)
    chosen, model = app.resolve(config, data, run)
    return chosen, app.setup(chosen, data, model, run)
