"""What bounds a training: measured times of its batches and steps, and the verdict that they give, in words."""

import copy
import os
import statistics
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from monai.transforms import RandomizableTrait

from medspeed.common.clock import repeated, seconds_of, synchronise
from medspeed.common.data.batches import Batch, Batches
from medspeed.common.inference import Precision
from medspeed.common.training.fit import Setup, train_step

Bound = str  # "nothing", or a key of `doctor.explanations`

_WORTH, _GAIN = 0.15, 1.15  # a share below which no fix is worth the reader's time; the gain from which one is
_THREADS = 1.1  # one thread in less than so many times the time of all: they gain nothing
_HIDDEN = 1.4  # twice the batch in less than so many times the time: bound by what does not grow with it
_OWN_BOUND: dict[str, Bound] = {"saved": "checkpointing", "logged": "logging", "validated": "validation"}
_ROUNDS = 5
_CASES = 3  # whose transforms are timed one by one
_BATCHES = 8


@dataclass(frozen=True)
class Measured:
    """A training's times, in seconds."""

    # of the whole training, by a short one: "waited" for batches, "computed", "saved", "logged", "validated"
    times: Mapping[str, float]
    # of making a batch alone: reading files, decoding, what is the same in every epoch, what is not; if it applies
    batch: Mapping[Bound, float]
    step: float  # computing one step
    workers: int | None  # that make batches side by side; None where their number is not the user's to choose
    cores: int  # that they could use
    doubled: float | None = None  # the step with twice the batch, where that could be measured
    other: float | None = None  # the step in the precision of "auto", where that is another
    single: float | None = None  # the step by one thread, where there are several and they compute it


@dataclass(frozen=True)
class Verdict:
    """What bounds a training."""

    bound: Bound
    share: float  # of the training's time that it takes
    gain: float  # how many times as fast the training would be without it, at best
    text: str
    shares: dict[str, float]  # of the training's time, by name


def diagnose(measured: Measured, explanations: Mapping[Bound, str]) -> Verdict:
    """Name what bounds a training, and explain it.

    What takes the largest share besides computing is named if it takes 15 percent or more; waiting for batches is
    traced to what makes them. Else computing itself is looked at: whether it is mostly what each step costs whatever
    its batch, whether another precision was faster, and whether one thread is as fast as all.
    """
    total, step = sum(measured.times.values()), measured.step
    shares = {name: seconds / total for name, seconds in measured.times.items()}
    share, largest = shares["computed"], max(shares.keys() - {"computed"}, key=shares.__getitem__)
    if shares[largest] >= _WORTH:
        bound = _behind_waiting(measured) if largest == "waited" else _OWN_BOUND[largest]
        share = saved = shares[largest]
    elif measured.single is not None and step >= _GAIN * measured.single:  # as little does waiting grow with the batch
        bound, saved = "threads", share * (1 - measured.single / measured.cores / step)
    elif measured.doubled is not None and measured.doubled < _HIDDEN * step:
        bound, saved = "kernel launch", share * (1 - measured.doubled / 2 / step)
    elif measured.other is not None and step >= _GAIN * measured.other:
        bound, saved = "compute", share * (1 - measured.other / step)
    elif measured.single is not None and measured.single < _THREADS * step:
        bound, saved = "threads", share * (1 - measured.single / measured.cores / step)
    else:
        return Verdict("nothing", share, 1.0, f"healthy: the device computes {share:.0%} of the time", shares)
    gain = 1 / (1 - saved)
    text = f"{bound}: {explanations[bound]} ({share:.0%} of the time; up to {gain:.1f}x faster)"
    return Verdict(bound, share, gain, text, shares)


def _behind_waiting(measured: Measured) -> Bound:
    """Return what makes the batches late: too few workers if enough of them would keep up, else its largest part."""
    needed = sum(measured.batch.values()) / measured.step
    if measured.workers is not None and measured.workers < needed <= measured.cores:
        return "workers"
    return max(measured.batch, key=lambda name: measured.batch[name])


def batch_parts(batches: Batches, cache: str) -> tuple[dict[Bound, float], int | None]:
    """Return the seconds of each part of making a batch, by one thread, and how many workers make batches.

    MONAI's datasets are taken apart transform by transform; ours, and MONAI's of regions of slides, are drawn as a
    whole, and `cache` says what that is. Workers are None where their number is not the user's to choose.
    """
    loader = batches.loader
    if loader is None:
        kinds: dict[str, Bound] = {"disk": "disk", "none": "preparation", "smart": "preparation"}
        with closing(batches.epoch(0)) as drawn:
            seconds = seconds_of(lambda: sum(1 for _ in islice(drawn, _BATCHES)))
        return {kinds.get(cache, "augmentation"): seconds / min(_BATCHES, batches.steps_per_epoch)}, None
    dataset, cases, cached = loader.dataset, loader.batch_size, hasattr(loader.dataset, "cache_num")
    workers = None if cached else max(1, loader.num_workers)
    if isinstance(dataset.data[0]["image"], tuple):  # the region of a slide, not a file
        return {"decode": cases * statistics.median(repeated(lambda: dataset[0], _ROUNDS))}, workers
    items = [dataset.data[number] for number in range(min(_CASES, len(dataset.data)))]
    per_case = [_parts_of(item, dataset.transform.transforms) for item in items]
    names: tuple[Bound, ...] = ("augmentation",) if cached else ("disk", "decode", "preparation", "augmentation")
    return {name: cases * statistics.median(part.get(name, 0.0) for part in per_case) for name in names}, workers


def step_times(setup: Setup, auto: Precision, parts: int) -> tuple[float, float | None, float | None, float | None]:
    """Return the seconds of a step: as is, of twice the batch (None: no memory), in another precision, by one thread.

    Each is done in so many micro-batches, its `parts`.
    """
    with closing(setup.batches.epoch(0)) as batches:
        batch = next(batches)
    now, doubled = _step(setup, batch, setup.precision, parts), None
    with suppress(torch.OutOfMemoryError):
        twice = Batch(batch.image.repeat_interleave(2, 0), batch.label.repeat_interleave(2, 0), batch.cases * 2)
        doubled = _step(setup, twice, setup.precision, parts)
    other = None if setup.precision == auto else _step(setup, batch, auto, parts)
    single, threads = None, torch.get_num_threads()
    if batch.image.device.type == "cpu" and threads > 1:
        torch.set_num_threads(1)
        single = _step(setup, batch, setup.precision, parts)
        torch.set_num_threads(threads)
    return now, doubled, other, single


def _step(setup: Setup, batch: Batch, precision: Precision, parts: int) -> float:
    network = copy.deepcopy(setup.network).train()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)  # whichever it is, it is the same on all sides
    scaler = torch.amp.GradScaler(batch.image.device.type, enabled=precision == "fp16")
    given = network, batch, setup.loss_function, optimizer, scaler, precision, 0.0, parts
    return statistics.median(repeated(lambda: train_step(*given), _ROUNDS))


def _parts_of(item: Mapping[str, Any], transforms: Any) -> dict[str, float]:  # noqa: ANN401 - MONAI's
    """Return the seconds of each part of a case: from the first random transform on all is augmentation."""
    files = [Path(value) for value in item.values() if isinstance(value, str) and Path(value).is_file()]
    for path in files:  # the system forgets them, where it does so when asked
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    cold, warm = (seconds_of(lambda: sum(len(path.read_bytes()) for path in files)) for _ in range(2))
    found = {"disk": cold, "decode": -warm}
    data: Any = dict(item)
    random = False
    for number, transform in enumerate(transforms):
        began = time.perf_counter()
        data = [transform(each) for each in data] if isinstance(data, list) else transform(data)
        synchronise()
        random = random or isinstance(transform, RandomizableTrait)
        name = "augmentation" if random else "preparation" if number else "decode"
        found[name] = found.get(name, 0.0) + time.perf_counter() - began
    return found
