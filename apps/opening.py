"""Each app, opened up to the moment before it trains: for programs that look at a training from outside."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from apps.brats import train as brats
from apps.brats.config import BratsConfig, parse_brats_config
from apps.pathology import train as pathology
from apps.pathology.config import PathologyConfig, parse_pathology_config
from apps.spleen import train as spleen
from apps.spleen.config import SpleenConfig, parse_spleen_config
from common.data.cases import read_dataset, split_cases
from common.data.slide_pool import SlidePool
from common.files import write_json
from common.inference.predictors import Precision
from common.observe.run import Run
from common.training.config import SegmentationConfig, TrainingConfig
from common.training.distributed import SINGLE
from common.training.fit import Setup
from common.training.precision import choose_precision


@dataclass(frozen=True)
class Opened:
    """A training that has not begun.

    Args:
        setup: what is trained, and how.
        auto: the precision that "auto" stands for here.
    """

    setup: Setup
    auto: Precision


@contextmanager
def open_spleen(config: SpleenConfig, run: Run) -> Iterator[Opened]:
    """Read, plan and set up a training of the spleen app; batches may be drawn within the block."""
    _, split, plan = spleen.read_and_plan(config, run, SINGLE)
    auto = _auto(run, plan.crop_size, len(plan.model.channels))
    yield Opened(spleen.set_up(split, plan, config, run, SINGLE), auto)


@contextmanager
def open_brats(config: BratsConfig, run: Run) -> Iterator[Opened]:
    """Read, plan and set up a training of the brats app; batches may be drawn within the block."""
    _, split, plan = brats.read_and_plan(config, run, SINGLE)
    auto = _auto(run, plan.crop_size, len(plan.model.blocks_down))
    yield Opened(brats.set_up(split, plan, config, run, SINGLE), auto)


def _auto(run: Run, crop: Sequence[int], levels: int) -> Precision:
    return choose_precision("auto", run.device, [side // 2 ** (levels - 1) for side in crop])


@contextmanager
def open_pathology(config: PathologyConfig, run: Run) -> Iterator[Opened]:
    """Read, plan and set up a training of the pathology app; batches may be drawn within the block."""
    with closing(SlidePool(reader=config.reader)) as pool:
        tables, plan, validation = pathology.read_and_plan(config, run, SINGLE, pool)
        setup = pathology.set_up(tables, validation, plan, config, run, SINGLE, pool)
        yield Opened(setup, choose_precision("auto", run.device))


@dataclass(frozen=True)
class App:
    """How an app is configured and opened.

    Args:
        parse: from the words of a command line to its configuration.
        open: from a configuration and a run to what is trained.
    """

    parse: Callable[[Sequence[str]], Any]
    open: Callable[..., Any]


APPS = {
    "spleen": App(parse_spleen_config, open_spleen),
    "brats": App(parse_brats_config, open_brats),
    "pathology": App(parse_pathology_config, open_pathology),
}


def cut_short(
    config: TrainingConfig, folder: Path, training: int, validation: int
) -> tuple[TrainingConfig, float, float]:
    """Return a configuration of a few of the cases; of patches all stay.

    Args:
        config: a segmentation's with `data` is cut; others are small already.
        folder: gets the file of the split.
        training: cases to train on, at most.
        validation: cases to validate on, at most.

    Returns:
        The configuration, and how many times as many cases there are to train on and to validate on.
    """
    if not isinstance(config, SegmentationConfig) or config.data is None:
        return config, 1.0, 1.0
    whole = split_cases(read_dataset(config.data, gaps=True), config.split)
    some = replace(whole, training=whole.training[:training], validation=whole.validation[:validation])
    write_json(folder / "split.json", some.to_json())
    fewer: dict[str, Any] = {"split": str(folder / "split.json")}
    if getattr(config, "cache_cases", None) is not None:
        fewer["cache_cases"] = None
    ratios = len(whole.training) / len(some.training), len(whole.validation) / len(some.validation)
    return replace(config, **fewer), *ratios
