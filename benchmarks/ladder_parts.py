"""What the ladder shows beside whole trainings: kinds of datasets, of loaders, of networks and of steps.

Each part opens the app as the climb does, so that cases, crops and batches are the same.
"""

import copy
import importlib.util
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from monai.data import (
    CacheDataset,
    DataLoader,
    Dataset,
    LMDBDataset,
    PersistentDataset,
    SmartCacheDataset,
    ThreadBuffer,
    ThreadDataLoader,
)
from monai.networks.nets import BasicUNet, DynUNet, MedNeXt, SegResNet, UNet
from torch import nn
from torch.utils.checkpoint import checkpoint

from apps.opening import APPS, Opened
from benchmarks.in_turn import in_turn, median
from common.observe.host_memory import peak_memory
from common.training.config import TrainingConfig
from common.training.distributed import SINGLE
from common.training.fit import train_step
from common.training.optimizers import build_optimizer
from common.training.start import begin

Figures = dict[str, Any]

_EPOCHS = 3  # of a dataset or loader; the first apart
_STEP_ELSEWHERE = 0.05  # s that a step takes on another device, slept: what a loader can hide
_ROUNDS = 3
LOGGED = "the app's, its loss read in every step"


@contextmanager
def _opened(app: str, config: TrainingConfig) -> Iterator[tuple[Opened, float]]:
    """Yield a training that has not begun, and the seconds that its data took."""
    with tempfile.TemporaryDirectory(prefix="part-") as folder:
        run = begin(replace(config, run=Path(folder) / "run"), Path(folder), SINGLE)
        with APPS[app].open(config, run) as opened:
            seconds = run.clock.seconds()
            yield opened, seconds.get("prepare", 0.0) + seconds.get("cache", 0.0)


def datasets(app: str, baseline: TrainingConfig, fast: TrainingConfig) -> dict[str, Figures | str]:
    """Return, for each kind of dataset, the seconds of its first and later epochs, its disk and its memory.

    Each runs in a process of its own, whose peak of memory is told.
    """
    found: dict[str, Figures | str] = {}
    for name in (*_DATASETS, "ours"):
        if name == "LMDBDataset" and importlib.util.find_spec("lmdb") is None:
            found[name] = "needs the package lmdb: pip install lmdb"
            continue
        if app == "pathology" and name not in ("Dataset", "ours"):
            found[name] = "MONAI reads slides by PatchWSIDataset, patch by patch"
            continue
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context) as process:
            config = fast if name == "ours" else baseline
            found[name] = process.submit(_dataset_epochs, app, name, config).result()
    return found


def _dataset_epochs(app: str, name: str, config: TrainingConfig) -> Figures:
    with tempfile.TemporaryDirectory(prefix="dataset-") as folder:
        if name == "ours":
            config = replace(config, store=Path(folder))
        with _opened(app, config) as (opened, filled):
            if name == "ours":
                epochs = _drain(lambda number: opened.setup.batches.epoch(number), time.perf_counter() - filled)
            else:
                plain: Any = opened.setup.batches
                data, chain, cases = plain.dataset.data, plain.dataset.transform, plain._loader.batch_size
                began = time.perf_counter()
                dataset = plain.dataset if app == "pathology" else _DATASETS[name](data, chain, Path(folder))
                loader = DataLoader(dataset, batch_size=cases, shuffle=True, num_workers=0)
                start = getattr(dataset, "start", lambda: None)
                start()
                epochs = _drain(lambda number: iter(loader), began)
                getattr(dataset, "shutdown", lambda: None)()
        disk = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    first, *later = epochs
    return {
        "first epoch, filling included, s": round(first, 3),
        "later epochs, s": round(min(later), 3),
        "disk, MiB": round(disk / 2**20, 1),
        "peak memory, MiB": round(peak_memory() / 2**20),
    }


_DATASETS: Mapping[str, Callable[[Any, Any, Path], Any]] = {
    "Dataset": lambda data, chain, folder: Dataset(data, chain),
    "CacheDataset": lambda data, chain, folder: CacheDataset(data, chain, num_workers=2, progress=False),
    "PersistentDataset": lambda data, chain, folder: PersistentDataset(data, chain, cache_dir=folder),
    "LMDBDataset": lambda data, chain, folder: LMDBDataset(data, chain, cache_dir=folder, progress=False),
    "SmartCacheDataset": lambda data, chain, folder: SmartCacheDataset(
        data, chain, replace_rate=0.25, cache_num=max(2, len(data) // 2), progress=False, shuffle=False
    ),
}


def _drain(epoch: Callable[[int], Iterator[Any]], began: float) -> list[float]:
    """Return the seconds of each epoch; the first counts from `began`."""
    seconds = []
    for number in range(_EPOCHS):
        for _ in epoch(number):
            pass
        now = time.perf_counter()
        seconds.append(now - began)
        began = now
    return seconds


def loaders(app: str, cached: TrainingConfig, fast: TrainingConfig) -> dict[str, Figures | str]:
    """Return the seconds of an epoch by each loader over cached cases, while a step of 50 ms runs elsewhere."""
    if app == "pathology":
        return {"all": "MONAI has no cache of patches of slides; benchmarks/compare.py pathology compares its loaders"}
    found: dict[str, Figures | str] = {}
    with _opened(app, cached) as (opened, _), _opened(app, fast) as (ours, _):
        dataset: Any = opened.setup.batches.dataset  # type: ignore[attr-defined]
        cases = opened.setup.batches._loader.batch_size  # type: ignore[attr-defined]
        given = {"batch_size": cases, "shuffle": True}
        sides: dict[str, Callable[[], Any]] = {
            "DataLoader": lambda: DataLoader(dataset, num_workers=0, **given),
            "DataLoader, 2 workers": lambda: DataLoader(dataset, num_workers=2, **given),
            "ThreadDataLoader": lambda: ThreadDataLoader(dataset, num_workers=0, **given),
            "DataLoader in a ThreadBuffer": lambda: ThreadBuffer(DataLoader(dataset, num_workers=0, **given), 1),
            "ours": lambda: ours.setup.batches.epoch(0),
        }
        kept = DataLoader(dataset, num_workers=2, persistent_workers=True, **given)
        sides["DataLoader, 2 persistent workers"] = lambda: kept
        seconds = in_turn({name: _stepping(make) for name, make in sides.items()}, _ROUNDS)
        steps = -(-len(dataset) // cases)
        for name in sides:
            found[name] = {"s per step": round(median(seconds[name]) / steps, 4)}
    return found


def _stepping(make: Callable[[], Any]) -> Callable[[], None]:
    def epoch() -> None:
        for _ in make():
            time.sleep(_STEP_ELSEWHERE)

    return epoch


def steps(app: str, fast: TrainingConfig) -> dict[str, Figures | str]:
    """Return the seconds of a training step of several networks, with the app's batch, loss, and precision."""
    if app == "pathology":
        return {"other networks": "the app has one, the ResNet-18 of the guide"}
    with _opened(app, fast) as (opened, _):
        setup = opened.setup
        batch = next(iter(setup.batches.epoch(0)))
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
        seconds = in_turn(sides, _ROUNDS)
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
