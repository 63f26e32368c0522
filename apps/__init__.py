"""The applications: each goes from raw scans to an engine."""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

APPS = tuple(sorted(path.parent.name for path in Path(__file__).parent.glob("*/train.py")))  # names, as their folders


def parse_flags(app: str, flags: Sequence[str]) -> Any:  # noqa: ANN401 - the app's configuration
    """Return the configuration that flags of an app's `train.py` give."""
    return import_module(f"medspeed.apps.{app}.config").parse(flags)


def open_training(config: Any, run: Any) -> tuple[Any, Any]:  # noqa: ANN401 - an app's configuration, a `Run`
    """Read, decide and set up a training: the configuration with every field decided, and the `Setup` for `fit`."""
    app = import_module(f"medspeed.apps.{config.APP}.train")
    data = app.read_data(config, run)
    chosen, model = app.resolve(config, data, run)
    return chosen, app.setup(chosen, data, model, run)


def end_with_parent(number: int = signal.SIGTERM, parent: int | None = None) -> None:
    """On Linux, let this process get a signal when its parent ends; `parent` is whose child it was when it started."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # 1: PR_SET_PDEATHSIG
        if parent not in (None, os.getppid()):  # it has ended by now
            os.kill(os.getpid(), number)
