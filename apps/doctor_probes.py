"""What the doctor measures of a training: what making a batch takes, and a step with this setting or that."""

import copy
import os
import statistics
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from monai.data import PatchWSIDataset
from monai.transforms import RandomizableTrait

from medspeed.apps.doctor_verdict import Bound
from medspeed.common.clock import repeated, seconds_of, synchronise
from medspeed.common.data.batches import Batch, Batches
from medspeed.common.inference import Precision
from medspeed.common.training.fit import Setup, train_step

_ROUNDS = 5
_CASES = 3  # whose transforms are timed one by one
_BATCHES = 8


def batch_parts(batches: Batches, cache: str) -> tuple[dict[Bound, float], int | None]:
    """Return the seconds of each part of making a batch, by one thread, and how many workers make batches.

    MONAI's datasets are taken apart transform by transform; ours, and MONAI's of regions of slides, are drawn as a
    whole, and `cache` says what that is. Workers are None where their number is not the user's to choose.
    """
    loader = getattr(batches, "loader", None)  # MONAI's
    if loader is None:
        kinds: dict[str, Bound] = {"disk": "disk", "none": "preparation", "smart": "preparation"}
        with closing(batches.epoch(0)) as drawn:
            seconds = seconds_of(lambda: sum(1 for _ in islice(drawn, _BATCHES)))
        return {kinds.get(cache, "augmentation"): seconds / min(_BATCHES, batches.steps_per_epoch)}, None
    dataset, cases, cached = loader.dataset, loader.batch_size, hasattr(loader.dataset, "cache_num")
    workers = None if cached else max(1, loader.num_workers)
    if isinstance(dataset, PatchWSIDataset):  # it reads regions, not files
        return {"decode": cases * statistics.median(repeated(lambda: dataset[0], _ROUNDS))}, workers
    items = [dataset.data[number] for number in range(min(_CASES, len(dataset.data)))]
    per_case = [_parts_of(item, dataset.transform.transforms) for item in items]
    names: tuple[Bound, ...] = ("augmentation",) if cached else ("disk", "decode", "preparation", "augmentation")
    return {name: cases * statistics.median(part.get(name, 0.0) for part in per_case) for name in names}, workers


def step_times(setup: Setup, auto: Precision) -> tuple[float, float | None, dict[str, float]]:
    """Return the seconds of a step, of one with twice the batch (None where memory ends), and with other settings."""
    with closing(setup.batches.epoch(0)) as batches:
        batch = next(batches)
    now, doubled = _step(setup, batch, setup.precision), None
    with suppress(torch.OutOfMemoryError):
        twice = Batch(batch.image.repeat_interleave(2, 0), batch.label.repeat_interleave(2, 0), batch.cases * 2)
        doubled = _step(setup, twice, setup.precision)
    others = {f"--precision {auto}": _step(setup, batch, auto)} if setup.precision != auto else {}
    inner = torch.channels_last_3d if batch.image.dim() == 5 else torch.channels_last
    weight = next(each for each in setup.network.parameters() if each.dim() == batch.image.dim() and each.shape[1] > 1)
    is_inner = weight.is_contiguous(memory_format=inner) and not weight.is_contiguous()
    other = torch.contiguous_format if is_inner else inner
    others["--no-channels-last" if is_inner else "--channels-last"] = _step(setup, batch, setup.precision, other)
    return now, doubled, others


def _step(setup: Setup, batch: Batch, precision: Precision, layout: torch.memory_format | None = None) -> float:
    network = copy.deepcopy(setup.network).train()
    if layout is not None:
        network = network.to(memory_format=layout)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)  # whichever it is, it is the same on all sides
    scaler = torch.amp.GradScaler(batch.image.device.type, enabled=precision == "fp16")
    given = network, batch, setup.loss_function, optimizer, scaler, precision, 0.0
    return statistics.median(repeated(lambda: train_step(*given), _ROUNDS))


def _parts_of(item: Mapping[str, Any], transforms: Any) -> dict[str, float]:  # noqa: ANN401 - MONAI's
    """Return the seconds of each part of a case: from the first random transform on all is augmentation."""
    files = [Path(value) for value in item.values() if isinstance(value, str) and Path(value).is_file()]
    for path in files:  # the system forgets them, where it does so when asked
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
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
