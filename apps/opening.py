"""Any app's training, opened up to the moment before it begins: for programs that look at one from outside."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from apps.pathology.patches.sources import decoded
from apps.pathology.patches.tables import find_tables
from apps.pathology.slides.reader import SlidePool
from common.run import Run
from common.training.config import SegmentationConfig
from common.training.fit import Setup

APPS = tuple(sorted(path.parent.name for path in Path(__file__).parent.glob("*/train.py")))
"""Names of the apps: their folders."""


def parse_flags(app: str, flags: Sequence[str]) -> Any:  # noqa: ANN401 - the app's configuration
    """Return the configuration that flags of an app's `train.py` give."""
    return import_module(f"apps.{app}.config").parse(flags)


@contextmanager
def open_training(config: Any, run: Run) -> Iterator[tuple[Any, Setup]]:  # noqa: ANN401 - an app's configuration
    """Read, decide and set up a training; batches may be drawn within the block.

    Yields:
        The configuration with every field decided, and what is trained.
    """
    app = import_module(f"apps.{config.APP}.train")
    if isinstance(config, SegmentationConfig):
        data = app.read_data(config, run)
        chosen, model = app.resolve(config, data, run)
        yield chosen, app.setup(chosen, data, model, run)
        return
    with closing(SlidePool(config.reader)) as pool:  # of patches
        tables = find_tables(config, run, pool)
        chosen, model = app.resolve(config, tables, run)
        validation = decoded(tables.validation, chosen, run, pool)
        yield chosen, app.setup(chosen, tables, validation, model, run, pool)
