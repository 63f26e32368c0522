"""Fair timing: sides in processes of their own run in turn, and what they took becomes rows of guide and fast."""

import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from medspeed.benchmarks.peers import make_step
from medspeed.common.clock import synchronise
from medspeed.common.data.batches import Batch, Batches
from medspeed.common.files import write_json
from medspeed.common.host_memory import keep_freed_memory
from medspeed.common.inference import Precision
from medspeed.common.inference.model import save_weights
from medspeed.common.inference.predictors import computes_bf16
from medspeed.common.training.fit import train_step
from medspeed.common.training.losses import Loss
from medspeed.common.training.optimizers import build_optimizer
from medspeed.common.training.setup import SCHEDULES, choose_precision

Sides = Mapping[str, Callable[[], object]]
Maker = Callable[..., Sides]
Values = dict[str, list[float]]
Row = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]

RATE = 0.01  # of our steps

_sides: dict[str, Callable[[], object]] = {}  # of a side's own process


def guide_of(app: str) -> ModuleType:
    """Return what the benchmarks know of an app: a module of `benchmarks/guides`."""
    return import_module(f"medspeed.benchmarks.guides.{app}")


@dataclass(frozen=True)
class Options:
    """How a comparison is measured.

    Args:
        app: whose recipes are compared.
        device: of both sides.
        rounds: times each side runs.
        folder: for what the sides make.
        both: whether the guide runs too, and not fast alone.
    """

    app: str
    device: torch.device
    rounds: int
    folder: Path
    both: bool

    @property
    def own(self) -> ModuleType:
        """What is true of this guide alone."""
        return guide_of(self.app)

    @property
    def weights(self) -> Path:
        """File of the weights that both sides of the inference have."""
        return self.folder / "trained.safetensors"

    @property
    def half(self) -> str | None:
        """The guide's half precision; None where the processor would only emulate it."""
        return "fp16" if self.device.type == "cuda" else "bf16" if computes_bf16(self.device) else None

    @property
    def guide_precisions(self) -> list[str]:
        """The precisions in which the guide's step is measured."""
        return list(dict.fromkeys(["fp32", self.half or "fp32"]))

    @property
    def usual(self) -> str:
        """The precision that the guide runs in, whose autocast is for CUDA only."""
        return "fp16" if self.device.type == "cuda" else "fp32"

    @property
    def chosen(self) -> Precision:
        """The precision that fast chooses here."""
        return choose_precision("auto", self.device)

    @property
    def precisions(self) -> list[Precision]:
        """The precisions in which fast is measured: those that the device computes."""
        bf16: list[Precision] = ["bf16"] if computes_bf16(self.device) else []
        return list(dict.fromkeys(["fp32", *bf16, self.chosen]))

    def guide_step(self, network: nn.Module, precision: str) -> Any:  # noqa: ANN401 - a function
        """Return a step of the guide's network: of images and what its loss takes, it returns the loss."""
        network, peer = network.to(self.device), self.own.peer
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
        return make_step(network, peer.make_optimizer(network), peer.make_loss(), dtype)


def fast_step(network: nn.Module, loss: Loss, precision: Precision, device: torch.device) -> Callable[..., object]:
    """Return our step: of a batch, and a learning rate where it is another than 0.01."""
    optimizer = build_optimizer("novograd", network.parameters(), RATE)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    return lambda batch, rate=RATE: train_step(network, batch, loss, optimizer, scaler, precision, rate)


def endless(batches: Batches) -> Generator[Batch, None, None]:
    """Yield the batches of one epoch after the other."""
    return (batch for epoch in count() for batch in batches.epoch(epoch))


def save_start(
    options: Options, network: nn.Module, step: Callable[..., object], batches: Callable[[], Batches], steps: int
) -> None:
    """Keep the weights that both sides of the inference begin with, of a network that has learned something.

    Fast alone has nothing to compare its answers with: its network stays as it begins.
    """
    if options.both:
        with closing(endless(batches())) as drawn:
            for number in tqdm(range(steps), desc="training before inference", leave=False):
                step(next(drawn), RATE * SCHEDULES["cosine"](number / steps))
    save_weights(options.weights, network.state_dict(), {})


def timed(
    options: Options,
    guide: Maker,
    fast: Sequence[Maker],
    *arguments: object,
    rounds: int | None = None,
    warm_up: bool = True,
) -> tuple[Values, dict[str, Any]]:
    """Run the guide's sides and ours in turn, each maker's in a process of its own.

    The makers are functions of modules and return sides by name; their arguments, and what sides return, must pickle.
    On a CPU ours keep freed memory, as our runs do, and the guide's do not. See `in_turn` for the rest.
    """
    sides: dict[str, Callable[[], object]] = {}
    with ExitStack() as stack:
        for make in [guide] * options.both:
            sides |= stack.enter_context(apart(make, *arguments, keep_freed=False))
        for make in fast:
            sides |= stack.enter_context(apart(make, *arguments, keep_freed=options.device.type == "cpu"))
        return in_turn(sides, rounds or options.rounds, warm_up)


@contextmanager
def apart(make: Maker, *arguments: object, keep_freed: bool) -> Iterator[Sides]:
    """Make sides in a new process that ends with the block; yield functions that run them there and wait.

    What our runs tell the C library about freed memory holds for a whole process and cannot be taken back: it would
    help or hinder the guide.
    """
    context = multiprocessing.get_context("spawn")  # a copy of this process would have its memory, and its threads
    with ProcessPoolExecutor(1, context) as process:
        names = process.submit(_start, make, arguments, keep_freed).result()
        yield {name: lambda name=name: process.submit(_run, name).result() for name in names}  # type: ignore[misc]


def _start(make: Maker, arguments: tuple[object, ...], keep_freed: bool) -> list[str]:
    if keep_freed:
        keep_freed_memory()
    _sides.update(make(*arguments))
    return list(_sides)


def _run(name: str) -> object:
    result = _sides[name]()
    synchronise()
    return result


def in_turn(sides: Sides, rounds: int, warm_up: bool = True) -> tuple[Values, dict[str, Any]]:
    """Return the seconds of each side in each round, and what each returned last.

    With `warm_up` one more round comes first and is not counted.
    """
    seconds: Values = {name: [] for name in sides}
    left: dict[str, Any] = {}
    with tqdm(total=len(sides) * (rounds + warm_up), unit="side", leave=False) as bar:
        for number in range(rounds + warm_up):
            for name, side in sides.items():
                bar.set_description(name)
                synchronise()
                began = time.perf_counter()
                left[name] = side()
                synchronise()
                if number >= warm_up:
                    seconds[name].append(time.perf_counter() - began)
                bar.update()
    return seconds, left


def ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Return the median over the rounds of slow / fast, to two decimals."""
    return round(statistics.median(a / b for a, b in zip(slow, fast, strict=True)), 2)


def median(seconds: Sequence[float]) -> float:
    """Return the median to a tenth of a millisecond."""
    return round(statistics.median(seconds), 4)


def row(what: str, unit: str, guide: Sequence[float], fast: Sequence[float]) -> Row:
    """Return one comparison as a record keeps it.

    Args:
        what: is compared.
        unit: "s" or "MiB", of which less is better, "/s", of which more is; or "" for a score, whose mean counts.
        guide: its values, one of each round (or seed); none where it did not run.
        fast: ours.

    Returns:
        Both sides' medians (means), the median over the rounds of how many times better fast is, and the values.
    """
    centre = median if unit else lambda values: round(statistics.fmean(values), 5)
    worse, better = (fast, guide) if unit == "/s" else (guide, fast)
    return {
        "what": what,
        "guide": centre(guide) if guide else None,
        "fast": centre(fast),
        "unit": unit,
        "ratio": ratio(worse, better) if guide and unit else None,
        "values": {"guide": list(guide), "fast": list(fast)},
    }


def show(row: Row) -> str:
    """Return a row as a line of a Markdown table; of a score the last cell is the difference."""
    shape = {"s": "{:.3g} s", "/s": "{:.0f}/s", "MiB": "{:.0f} MiB", "": "{:.3f}"}[row["unit"]]
    guide = "" if row["guide"] is None else shape.format(row["guide"])
    better = ""
    if guide:
        better = f"{row['ratio']:.1f}x" if row["unit"] else f"{row['fast'] - row['guide']:+.3f}"
    return f"| {row['what']} | {guide} | {shape.format(row['fast'])} | {better} |"


def step_rows(what: str, seconds: Values, options: Options) -> list[Row]:
    """Return the rows of a training step: each pair of precisions that was measured, and with the making of the batch.

    The seconds are of the sides "guide PRECISION", "fast PRECISION", "guide with its batch" and "fast with its batch".
    """
    pairs = [(options.usual, options.chosen), ("fp32", "fp32"), (options.half, "bf16")]
    if not options.both:
        pairs = [(None, precision) for precision in options.precisions]
    rows = []
    for guide, fast in dict.fromkeys(pairs):
        if f"fast {fast}" in seconds:
            sides = f"both {fast}" if guide == fast else f"guide {guide}, fast {fast}"
            name = f"training step, {what}, {sides if options.both else f'fast {fast}'}"
            rows.append(row(name, "s", seconds.get(f"guide {guide}", []), seconds[f"fast {fast}"]))
    batches = [seconds.get(f"{side} with its batch", []) for side in ("guide", "fast")]
    return [*rows, row(f"training step, {what}, with the making of the batch", "s", *batches)]


def call(*words: object, **environ: str) -> None:
    """Run a script of this repository, with such variables of the environment, and wait for its end.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environ}, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr[-2000:]}")


def tell(record: dict[str, Any], output: Path | None) -> None:
    """Print the figures of a record, and write all of it as JSON where there is an output."""
    for name, value in record.items():
        if name != "environment":
            print(f"{name}: {value}", flush=True)
    if output is not None:
        write_json(output, record)
