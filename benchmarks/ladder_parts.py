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
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import (
    CacheDataset,
    DataLoader,
    Dataset,
    LMDBDataset,
    PatchWSIDataset,
    PersistentDataset,
    SmartCacheDataset,
    ThreadBuffer,
    ThreadDataLoader,
)
from monai.networks.nets import BasicUNet, DynUNet, MedNeXt, SegResNet, UNet
from torch import nn
from torch.utils.checkpoint import checkpoint

from apps.opening import open_training
from benchmarks.harness import in_turn, median
from common.files import read_json_lines
from common.run import Run, peak_memory
from common.training.config import TrainingConfig
from common.training.fit import Setup, fit, train_step
from common.training.optimizers import build_optimizer
from common.training.setup import start_run

Figures = dict[str, Any]

_EPOCHS = 3  # of a dataset or loader; the first apart
_STEP_ELSEWHERE = 0.05  # s that a step takes on another device, slept: what a loader can hide
_ROUNDS = 3
_BY_PATCH = "MONAI reads slides by PatchWSIDataset, patch by patch, and caches none"
LOGGED = "the app's, its loss read in every step"


def in_a_process(measured: Callable[..., Figures], *arguments: object) -> Figures:
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
    """Train for so many epochs, and return what it took and what came of it.

    Args:
        config: of the rung.
        epochs: each is timed; the first, which may compile and fill caches, apart.
        every: epochs between validations.
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
    found: Figures = {}
    for name in _DATASETS:
        if name == "LMDBDataset" and importlib.util.find_spec("lmdb") is None:
            found[name] = "needs the package lmdb: pip install lmdb"
            continue
        measured = in_a_process(_monai_epochs, name, baseline)
        found[name] = measured or _BY_PATCH
    return found | {"ours": in_a_process(_our_epochs, fast)}


def _our_epochs(config: TrainingConfig) -> Figures:
    with tempfile.TemporaryDirectory(prefix="dataset-") as folder, _opened(config, Path(folder)) as (_, setup, run):
        return _drain(setup.batches.epoch, time.perf_counter() - _filled(run), Path(folder))


def _monai_epochs(name: str, config: TrainingConfig) -> Figures:
    """Return the figures of one of MONAI's datasets; none where it cannot hold what the app reads."""
    with tempfile.TemporaryDirectory(prefix="dataset-") as folder, _opened(config) as (_, setup, _):
        plain: Any = setup.batches
        began, by_patch = time.perf_counter(), isinstance(plain.dataset, PatchWSIDataset)
        if by_patch and name != "Dataset":
            return {}
        dataset = plain.dataset
        if not by_patch:
            dataset = _DATASETS[name](dataset.data, dataset.transform, Path(folder))
        loader = DataLoader(dataset, batch_size=plain.loader.batch_size, shuffle=True, num_workers=0)
        getattr(dataset, "start", lambda: None)()
        try:
            return _drain(lambda number: iter(loader), began, Path(folder))
        finally:
            getattr(dataset, "shutdown", lambda: None)()


_DATASETS: Mapping[str, Callable[[Any, Any, Path], Any]] = {
    "Dataset": lambda data, chain, folder: Dataset(data, chain),
    "CacheDataset": lambda data, chain, folder: CacheDataset(data, chain, num_workers=2, progress=False),
    "PersistentDataset": lambda data, chain, folder: PersistentDataset(data, chain, cache_dir=folder),
    "LMDBDataset": lambda data, chain, folder: LMDBDataset(data, chain, cache_dir=folder, progress=False),
    "SmartCacheDataset": lambda data, chain, folder: SmartCacheDataset(
        data, chain, replace_rate=0.25, cache_num=max(2, len(data) // 2), progress=False, shuffle=False
    ),
}


def _drain(epoch: Callable[[int], Iterator[Any]], began: float, folder: Path) -> Figures:
    """Return the seconds of the epochs, the first since `began`; the bytes of the folder; the peak of memory."""
    seconds = []
    for number in range(_EPOCHS):
        for _ in epoch(number):
            pass
        now = time.perf_counter()
        seconds.append(now - began)
        began = now
    disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {
        "first epoch, filling included, s": round(seconds[0], 3),
        "later epochs, s": round(min(seconds[1:]), 3),
        "disk, MiB": round(disk / 2**20, 1),
        "peak memory, MiB": round(peak_memory() / 2**20),
    }


def loaders(cached: TrainingConfig, fast: TrainingConfig) -> Figures:
    """Return the seconds of an epoch by each loader over cached cases, while a step of 50 ms runs elsewhere."""
    with _opened(cached) as (_, setup, _), _opened(fast) as (_, ours, _):
        plain: Any = setup.batches
        dataset, given = plain.dataset, {"batch_size": plain.loader.batch_size, "shuffle": True}
        if isinstance(dataset, PatchWSIDataset):
            return {"all": f"{_BY_PATCH}; benchmarks/compare.py compares its loaders"}
        kept = DataLoader(dataset, num_workers=2, persistent_workers=True, **given)
        sides: dict[str, Callable[[], Any]] = {
            "DataLoader": lambda: DataLoader(dataset, num_workers=0, **given),
            "DataLoader, 2 workers": lambda: DataLoader(dataset, num_workers=2, **given),
            "ThreadDataLoader": lambda: ThreadDataLoader(dataset, num_workers=0, **given),
            "DataLoader in a ThreadBuffer": lambda: ThreadBuffer(DataLoader(dataset, num_workers=0, **given), 1),
            "ours": lambda: ours.batches.epoch(0),
            "DataLoader, 2 persistent workers": lambda: kept,
        }
        seconds, _ = in_turn({name: _stepping(make) for name, make in sides.items()}, _ROUNDS)
    steps = -(-len(dataset) // given["batch_size"])
    return {name: {"s per step": round(median(seconds[name]) / steps, 4)} for name in sides}


def _stepping(make: Callable[[], Any]) -> Callable[[], None]:
    def epoch() -> None:
        for _ in make():
            time.sleep(_STEP_ELSEWHERE)

    return epoch


def steps(fast: TrainingConfig) -> Figures:
    """Return the seconds of a training step of several networks, with the app's batch, loss, and precision."""
    with _opened(fast) as (_, setup, _):
        batch = next(iter(setup.batches.epoch(0)))
        if batch.image.ndim == 4:
            return {"other networks": "these are of volumes; an app of patches has one, the ResNet-18 of the guide"}
        inputs, outputs = batch.image.shape[1], setup.network(batch.image[:1]).shape[1]
        given = {"spatial_dims": 3, "in_channels": inputs, "out_channels": outputs}
        networks: dict[str, Callable[[], nn.Module]] = {
            "the app's": lambda: setup.network,
            "the app's, checkpointed as a whole": lambda: _Checkpointed(setup.network),
            "unet": lambda: UNet(**given, channels=(8, 16, 32), strides=(2, 2), num_res_units=2),
            "basic_unet": lambda: BasicUNet(**given, features=(8, 8, 16, 32, 64, 8)),
            "segresnet": lambda: SegResNet(**given, init_filters=8, blocks_down=(1, 2, 2), blocks_up=(1, 1)),
            "mednext": lambda: MedNeXt(**given, init_filters=8, encoder_expansion_ratio=2, bottleneck_expansion_ratio=2,
                                       decoder_expansion_ratio=2, blocks_down=(1, 1, 1, 1), blocks_bottleneck=1,
                                       blocks_up=(1, 1, 1, 1)),
            "dynunet": lambda: _Dyn(given, deep=False),
            "dynunet, deep supervision": lambda: _Dyn(given, deep=True),
        }  # fmt: skip
        if batch.image.device.type == "cuda":  # reduce-overhead replays CUDA graphs
            for mode in ("default", "reduce-overhead", "max-autotune"):
                networks[f"the app's, compiled in mode {mode}"] = partial(_compiled, setup.network, mode)
        sides: dict[str, Callable[[], object]] = {}
        parameters = {}
        for name, make in networks.items():
            network = make().to(batch.image.device).train()
            parameters[name] = sum(each.numel() for each in network.parameters())
            optimizer = build_optimizer("novograd", network.parameters(), 0.0)
            scaler = torch.amp.GradScaler(batch.image.device.type, enabled=setup.precision == "fp16")
            sides[name] = _one_step(network, batch, setup.loss_function, optimizer, scaler, setup.precision)
        plain = sides["the app's"]
        sides[LOGGED] = lambda: float(plain())  # type: ignore[arg-type]
        parameters[LOGGED] = parameters["the app's"]
        seconds, _ = in_turn(sides, _ROUNDS)
    return {name: {"s per step": median(seconds[name]), "parameters": parameters[name]} for name in sides}


def _compiled(network: nn.Module, mode: str) -> Any:  # noqa: ANN401 - torch.compile's
    return torch.compile(copy.deepcopy(network), mode=mode)


def _one_step(network: nn.Module, batch: Any, loss: Any, *rest: Any) -> Callable[[], object]:  # noqa: ANN401
    optimizer, scaler, precision = rest
    if isinstance(network, _Dyn) and network.deep:
        plain = loss

        def loss(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            heads = [plain(head, label) for head in logits.unbind(1)]
            return torch.stack(heads).mean()

    return lambda: train_step(network, batch, loss, optimizer, scaler, precision, 0.0)


class _Checkpointed(nn.Module):
    """A network that keeps no activations and computes all of them again for the gradients: the highest price."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: torch.Tensor) -> Any:  # noqa: ANN401
        """Return the network's output."""
        return checkpoint(self.network, image, use_reentrant=False)


class _Dyn(nn.Module):
    """MONAI's DynUNet; with deep supervision two levels are judged."""

    def __init__(self, given: dict[str, Any], deep: bool) -> None:
        super().__init__()
        self.deep = deep
        kernels, strides = [3, 3, 3, 3], [1, 2, 2, 2]
        self.network = DynUNet(
            **given,
            kernel_size=kernels,
            strides=strides,
            upsample_kernel_size=strides[1:],
            filters=[8, 16, 32, 64],
            deep_supervision=deep,
            deep_supr_num=1,
        )

    def forward(self, image: torch.Tensor) -> Any:  # noqa: ANN401
        """Return logits, with deep supervision [B, levels, C, X, Y, Z]."""
        return self.network(image)
