"""Fair timing: sides in processes of their own run in turn, and what they took becomes rows of guide and fast."""

import csv
import io
import multiprocessing
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from importlib import import_module
from itertools import accumulate, islice
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tqdm import tqdm

from medspeed.apps import end_with_parent, open_training
from medspeed.apps.pathology.patches.tables import Tables
from medspeed.benchmarks import GUIDES
from medspeed.common.clock import StepTimer, synchronise
from medspeed.common.files import read_json_lines
from medspeed.common.inference.scan_files import peak_memory
from medspeed.common.run import Run
from medspeed.common.training.fit import Setup, fit
from medspeed.common.training.setup import start_run

Figures = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
WHOLE, COMPUTED = "s per step", "computed, s per step"  # with the wait for its batch; by the device's clock, without
_STEPS, _RATE = 10, 0.01  # of the guide, whose batch stays the same


def guide_of(app: str) -> ModuleType:
    """Return the guide of an app: a script of `benchmarks/peers`, whose MONAI (300 MiB) no process of ours loads."""
    return import_module(f"medspeed.benchmarks.peers.{app}_guide")


def make_data(app: str, size: str, folder: Path, *more: object) -> Path:
    """Make the "small" or "large" data of an app with a guide, with more flags if given; return their folder."""
    program, *words = shlex.split(GUIDES[app][size])
    call(f"data_scripts/{program}", *words, *more, "--to", folder)
    return folder


@contextmanager
def opened(config: Any) -> Iterator[tuple[Any, Setup, Run]]:  # noqa: ANN401 - an app's configuration
    """Yield a silent training that has not begun, decided, and its run; without a folder, it has one for the block."""
    with tempfile.TemporaryDirectory(prefix="part-") as folder, redirect_stdout(io.StringIO()):
        config = replace(config, run=config.run or Path(folder) / "run")
        with start_run(config) as run:
            yield *open_training(config, run), run


def save_batch(config: Any, to: Path) -> None:  # noqa: ANN401 - an app's configuration
    """Save a batch of ours for `guide_steps`, image [B, C, *sides] float32 and label; call it `in_a_process`."""
    with opened(config) as (_, setup, _):
        batch = next(iter(setup.batches.epoch(0)))
        torch.save((batch.image.float().contiguous(), batch.label), to)


def guide_steps(app: str, batch: Path, network: Mapping[str, Any], precision: str) -> Figures:
    """Return what the guide's step takes in a precision, on the same batch again and again, by the clock of ours.

    `network` are arguments of the guide's network; the channels of the image (the side of a patch) it takes from the
    batch, a file of `save_batch`.
    """
    guide, (image, label) = guide_of(app), torch.load(batch, weights_only=True)
    own = {"in_channels": image.shape[1]} if image.ndim == 5 else {"patch": image.shape[-1]}
    made, timer = guide.make_network(**{**own, **network}).to(image.device), StepTimer(image.device)
    step, _ = guide.peers.make_step(made, _RATE, guide.make_loss(), DTYPES.get(precision))
    same, seconds = (image, guide.target(label)), list[float]()
    for _ in range(_STEPS + 1):  # the first sets up
        with timer.computing():
            step(*same)
        synchronise()
        seconds.append(timer.read()["computed"])
    return {COMPUTED: median(seconds[1:]), "batch": list(image.shape)}


def trained(config: Any) -> Figures:  # noqa: ANN401 - an app's configuration
    """Train, and return what it took and what came of it; the first epoch, which may fill caches, is apart."""
    with opened(config) as (decided, setup, run):
        fitted, per_epoch = fit(setup, decided, run), setup.batches.steps_per_epoch
        epochs, stages = read_json_lines(run.directory / "metrics.jsonl"), run.clock.seconds()
    later, metric, filled = epochs[1:] or epochs, config.METRIC, stages.get("prepare", 0.0) + stages.get("cache", 0.0)
    ends = accumulate((each["seconds"] for each in epochs), initial=filled + stages.get("compile", 0.0))
    pairs = zip(islice(ends, 1, None), epochs, strict=True)
    curve = [[round(end, 3), each[metric.lower()]] for end, each in pairs if metric.lower() in each]
    waited = sum(each["waited"] for each in later) / sum(each["seconds"] for each in later)
    return {
        "first epoch, s": epochs[0]["seconds"],
        WHOLE: round(statistics.median(each["seconds"] for each in later) / per_epoch, 5),
        COMPUTED: round(statistics.median(each["computed"] for each in later) / per_epoch, 5),
        "samples per s": statistics.median(each["samples_per_second"] for each in later),
        "waited, percent": round(100 * waited, 1),
        "s per validation": round(stages.get("validate", 0.0) / max(1, len(curve)), 4),
        "prepare and cache, s": round(filled, 3),
        "compile, s": stages.get("compile", 0.0),
        "peak memory, MiB": round(peak_memory() / 2**20),
        metric: fitted.last, "steps": fitted.steps, "precision": setup.precision,
        "limit": fitted.limit,
        "losses": epochs[-1]["losses"],
        "stages, s": stages,
        "curve": curve,
    }  # fmt: skip


def write_lists(tables: Tables, folder: Path, labels: int = 1) -> list[str]:
    """Write the guide's lists of patches, or of as many labels each as a region has; return its flags for them."""
    flags = []
    for part in ("training", "validation"):
        table, path = tables.parts[part], folder / f"{part}-{labels}.csv"
        rows = zip(table.file, table.corner + table.size // 2, table.label, strict=True)
        found = [[table.files[place].resolve(), *corner, *[label] * labels] for place, corner, label in rows]
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(found[: len(table) // labels * labels : labels])
        flags += [f"--{part}", str(path)]
    return flags


def in_a_process(measured: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401 - what it returns
    """Return what a function measures in a process of its own; a copy of this one would have its memory, and threads.

    What our runs tell the C library about freed memory holds for a whole process: it would help or hinder the guide.
    """
    spawned, told = multiprocessing.get_context("spawn"), (signal.SIGKILL, os.getpid())  # a pool survives SIGTERM
    with ProcessPoolExecutor(1, spawned, end_with_parent, told) as process:
        return process.submit(measured, *arguments).result()


def attempt(measured: Callable[[], Figures | str]) -> Figures | str:
    """Return what is measured, or why it failed: what else is measured must not be lost for it."""
    try:
        return measured()
    except (RuntimeError, ValueError, OSError, LookupError, ArithmeticError) as error:
        return f"failed: {type(error).__name__}: {error}"


def in_turn(sides: Mapping[str, Callable[[], Figures]], rounds: int) -> dict[str, list[Figures]]:
    """Return what each side tells in each round; they run one after the other, each in a new process."""
    found: dict[str, list[Figures]] = {name: [] for name in sides}
    for name, side in tqdm([*sides.items()] * rounds, unit="side", leave=False):
        found[name].append(in_a_process(side))
    return found


def median(seconds: Sequence[float]) -> float:
    """Return the median to a tenth of a millisecond."""
    return round(statistics.median(seconds), 4)


def row(what: str, unit: str, guide: Sequence[float], fast: Sequence[float]) -> Figures:
    """Return one comparison as a record keeps it, with how many times better fast is: the median over the rounds.

    The values are one of each round (or seed), the guide's none where it did not run; the unit is "s" or "MiB", of
    which less is better and the median counts, or "" for a score, whose mean does.
    """
    centre = median if unit else lambda values: round(statistics.fmean(values), 5)
    both = {"guide": centre(guide) if guide else None, "fast": centre(fast)}
    better = round(statistics.median(a / b for a, b in zip(guide, fast, strict=True)), 2) if guide and unit else None
    return {"what": what, **both, "unit": unit, "ratio": better, "values": {"guide": [*guide], "fast": [*fast]}}


def show(row: Figures) -> str:
    """Return a row as a line of a Markdown table; of a score the last cell is the difference."""
    shape = {"s": "{:.3g} s", "/s": "{:.0f}/s", "MiB": "{:.0f} MiB", "": "{:.3f}"}[row["unit"]]
    cells = ["", shape.format(row["fast"]), ""]
    if row["guide"] is not None:
        better = f"{row['ratio']:.1f}x" if row["unit"] else f"{row['fast'] - row['guide']:+.3f}"
        cells = [shape.format(row["guide"]), cells[1], better]
    return f"| {row['what']} | {' | '.join(cells)} |"


def table(record: Figures) -> str:
    """Return the Markdown table of a record: what was measured on both sides."""
    about = record["environment"]
    where = f"{about['cores']} CPU cores" if about["device"] == "cpu" else about["device"]
    rows = [show(each) for each in record["rows"] if each["guide"] is not None]
    return "\n".join([f"| on {where} | guide | fast | ratio |", "|---|---|---|---|", *rows])


def call(*words: object) -> None:
    """Run a script of this repository; a ChildProcessError has what a failed one said."""
    command = [sys.executable, *map(str, words)]
    told: dict[str, Any] = {"capture_output": True, "text": True, "preexec_fn": end_with_parent}
    done = subprocess.run(command, cwd=ROOT, check=False, **told)
    if done.returncode:
        raise ChildProcessError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
