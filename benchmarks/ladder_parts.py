"""What the ladder measures in an app: a rung, and kinds of datasets, of loaders, of networks and of steps.

Each part opens the app as the climb does, so that cases, crops and batches are the same.
"""

import copy
import importlib.util
import io
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import monai.data as md
import monai.networks.nets as nets
import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from medspeed.apps.opening import open_training
from medspeed.benchmarks.harness import fast_step, in_turn, median
from medspeed.common.config import replaced
from medspeed.common.files import read_json_lines
from medspeed.common.host_memory import peak_memory
from medspeed.common.run import Run
from medspeed.common.training.config import TrainingConfig
from medspeed.common.training.fit import Setup, fit
from medspeed.common.training.networks import choose_sizes, network_arguments
from medspeed.common.training.setup import start_run
from medspeed.common.training.volume_config import SegmentationConfig
from medspeed.models import find_network, networks

Figures = dict[str, Any]

_DATASETS = ("Dataset", "CacheDataset", "PersistentDataset", "LMDBDataset", "SmartCacheDataset")  # MONAI's
_EPOCHS = 3  # of a dataset or loader; the first apart
_STEP_ELSEWHERE = 0.05  # s that a step takes on another device, slept: what a loader can hide
_ROUNDS = 3


def in_a_process(measured: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401 - what it returns
    """Return what a function measures in a process of its own, whose peak of memory is its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(measured, *arguments).result()


@contextmanager
def _opened(config: TrainingConfig, store: Path | None = None) -> Iterator[tuple[TrainingConfig, Setup, Run]]:
    """Yield a training that has not begun, decided, and its run, whose clock knows what its data took."""
    with tempfile.TemporaryDirectory(prefix="part-") as folder, redirect_stdout(io.StringIO()):
        config = replace(config, run=Path(folder) / "run", store=store or config.store)
        with start_run(config) as run:
            yield *open_training(config, run), run


def _filled(run: Run) -> float:
    """Return the seconds that preparing and caching took."""
    seconds = run.clock.seconds()
    return seconds.get("prepare", 0.0) + seconds.get("cache", 0.0)


def climb_rung(config: TrainingConfig, epochs: int, every: int) -> Figures:
    """Train for so many epochs, validated `every` so many, and return what it took and what came of it.

    The first epoch, which may compile and fill caches, is timed apart.
    """
    with _opened(config) as (decided, setup, run):
        fitted = fit(setup, replace(decided, epochs=epochs, validate_every=every), run)
        per_epoch = setup.batches.steps_per_epoch
        records, seconds, filled = read_json_lines(run.directory / "metrics.jsonl"), run.clock.seconds(), _filled(run)
    later, compiling, metric = records[1:] or records, seconds.get("compile", 0.0), config.METRIC.lower()
    ends = (filled + compiling + np.cumsum([record["seconds"] for record in records])).round(3).tolist()
    curve = [[end, record[metric]] for end, record in zip(ends, records, strict=True) if metric in record]
    whole = sum(record["seconds"] for record in later)
    return {
        "first epoch, s": records[0]["seconds"],
        "s per step": round(statistics.median(record["seconds"] for record in later) / per_epoch, 5),
        "samples per s": statistics.median(record["samples_per_second"] for record in later),
        "waited, percent": round(100 * sum(record["waited"] for record in later) / whole, 1),
        "s per validation": round(seconds.get("validate", 0.0) / max(1, len(curve)), 4),
        "prepare and cache, s": round(filled, 3),
        "compile, s": compiling,
        "peak memory, MiB": round(peak_memory() / 2**20),
        config.METRIC: fitted.last,
        "steps": fitted.steps,
        "precision": setup.precision,
        "curve": curve,
    }


def datasets(baseline: TrainingConfig, fast: TrainingConfig) -> Figures:
    """Return, for each kind of dataset, the seconds of its first and later epochs, its disk and its memory."""
    found: Figures = {name: in_a_process(_monai_epochs, name, baseline) for name in _DATASETS}
    return found | {"ours": in_a_process(_our_epochs, fast)}


def _our_epochs(config: TrainingConfig) -> Figures:
    with tempfile.TemporaryDirectory(prefix="dataset-") as folder, _opened(config, Path(folder)) as (_, setup, run):
        return _drain(setup.batches.epoch, time.perf_counter() - _filled(run), Path(folder))


def _monai_epochs(name: str, config: TrainingConfig) -> Figures | str:
    """Return the figures of one of MONAI's datasets, or why there are none."""
    if name == "LMDBDataset" and importlib.util.find_spec("lmdb") is None:
        return "needs the package lmdb: pip install lmdb"
    with tempfile.TemporaryDirectory(prefix="dataset-") as folder, _opened(config) as (_, setup, _):
        plain: Any = setup.batches
        dataset, began = plain.loader.dataset, time.perf_counter()
        if isinstance(dataset, md.PatchWSIDataset) and name != "Dataset":
            return "MONAI reads slides by PatchWSIDataset, patch by patch, and caches none"
        cases = len(dataset)
        options: dict[str, dict[str, Any]] = {
            "CacheDataset": {"num_workers": 2, "progress": False},
            "PersistentDataset": {"cache_dir": folder},
            "LMDBDataset": {"cache_dir": folder, "progress": False},
            "SmartCacheDataset": {
                "replace_rate": 0.25, "cache_num": max(2, cases // 2), "progress": False, "shuffle": False,
            },
        }  # fmt: skip
        if name in options:
            dataset = getattr(md, name)(dataset.data, dataset.transform, **options[name])
        loader = md.DataLoader(dataset, batch_size=plain.loader.batch_size, shuffle=True, num_workers=0)
        getattr(dataset, "start", lambda: None)()
        try:
            return _drain(lambda number: iter(loader), began, Path(folder))
        finally:
            getattr(dataset, "shutdown", lambda: None)()


def _drain(epoch: Callable[[int], Iterator[Any]], began: float, folder: Path) -> Figures:
    """Return the seconds of the epochs, the first since `began`; the bytes of the folder; the peak of memory."""
    ends = [began]
    for number in range(_EPOCHS):
        for _ in epoch(number):
            pass
        ends.append(time.perf_counter())
    first, *later = np.diff(ends).tolist()
    disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {
        "first epoch, filling included, s": round(first, 3),
        "later epochs, s": round(min(later), 3),
        "disk, MiB": round(disk / 2**20, 1),
        "peak memory, MiB": round(peak_memory() / 2**20),
    }


def loaders(cached: TrainingConfig, fast: TrainingConfig) -> Figures:
    """Return the seconds of an epoch by each loader over cached cases, while a step of 50 ms runs elsewhere."""
    with _opened(cached) as (_, setup, _), _opened(fast) as (_, ours, _):
        plain: Any = setup.batches
        dataset, given = plain.loader.dataset, {"batch_size": plain.loader.batch_size, "shuffle": True}
        if isinstance(dataset, md.PatchWSIDataset):
            return {"all": "these load volumes; benchmarks/compare.py compares the loaders of patches"}
        kept = md.DataLoader(dataset, num_workers=2, persistent_workers=True, **given)
        made: dict[str, Callable[[], Any]] = {
            "DataLoader": lambda: md.DataLoader(dataset, num_workers=0, **given),
            "DataLoader, 2 workers": lambda: md.DataLoader(dataset, num_workers=2, **given),
            "ThreadDataLoader": lambda: md.ThreadDataLoader(dataset, num_workers=0, **given),
            "DataLoader in a ThreadBuffer": lambda: md.ThreadBuffer(md.DataLoader(dataset, num_workers=0, **given), 1),
            "ours": lambda: ours.batches.epoch(0),
            "DataLoader, 2 persistent workers": lambda: kept,
        }

        def epoch(name: str) -> None:
            for _ in made[name]():
                time.sleep(_STEP_ELSEWHERE)

        seconds, _ = in_turn({name: partial(epoch, name) for name in made}, _ROUNDS)
    steps = -(-len(dataset) // given["batch_size"])
    return {name: {"s per step": round(median(seconds[name]) / steps, 4)} for name in made}


def steps(fast: TrainingConfig) -> Figures:
    """Return the seconds of a training step of several networks, with the app's batch, loss, and precision."""
    with _opened(fast) as (_, setup, _):
        batch = next(iter(setup.batches.epoch(0)))
        if batch.image.ndim == 4:
            return {"other networks": "these are of volumes; an app of patches has one, the ResNet-18 of the guide"}
        sides: dict[str, Callable[[], object]] = {}
        parameters = {}
        for name, network in _networks(setup.network, batch.image).items():
            network = network.to(batch.image.device).train()
            parameters[name] = sum(each.numel() for each in network.parameters())
            loss = partial(_over_heads, setup.loss_function) if "supervision" in name else setup.loss_function
            sides[name] = partial(fast_step(network, loss, setup.precision, batch.image.device), batch, 0.0)
        logged = "the app's, its loss read in every step"
        sides[logged] = lambda: float(sides["the app's"]())  # type: ignore[arg-type]
        parameters[logged] = parameters["the app's"]
        seconds, _ = in_turn(sides, _ROUNDS)
    return {name: {"s per step": median(seconds[name]), "parameters": parameters[name]} for name in sides}


def _networks(own: nn.Module, image: torch.Tensor) -> dict[str, nn.Module]:
    """Return networks by name that all take the app's images [B, C, X, Y, Z] and give as many channels as its own."""
    channels, config = (image.shape[1], own(image[:1]).shape[1]), SegmentationConfig()

    def small(name: str) -> Any:  # noqa: ANN401
        build = find_network(name)
        return build(*channels, **network_arguments(replaced(config, choose_sizes(config, build, "cpu")), build))

    whole: Any = nn.Sequential(own)  # keeps no activations and computes all of them again: the highest price
    whole.forward = partial(checkpoint, own, use_reentrant=False)
    sides: dict[str, nn.Module] = {
        "the app's": own,
        "the app's, checkpointed as a whole": whole,
        **{name: small(name) for name in networks()},
    }
    supervised = {name: value for name, value in small("dynunet").monai.items() if name != "_target_"}
    sides["dynunet, deep supervision"] = nets.DynUNet(**supervised, deep_supervision=True)
    if image.device.type == "cuda":  # reduce-overhead replays CUDA graphs
        for mode in ("default", "reduce-overhead", "max-autotune"):
            compiled: Any = torch.compile(copy.deepcopy(own), mode=mode)
            sides[f"the app's, compiled in mode {mode}"] = compiled
    return sides


def _over_heads(loss: Callable[..., torch.Tensor], logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of logits [B, levels, C, X, Y, Z] of deep supervision."""
    return torch.stack([loss(head, label) for head in logits.unbind(1)]).mean()
