"""What feeds a training: MONAI's datasets and loaders, and our batches, on the cases and crops of the climb."""

import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import monai.data as md
import numpy as np

from medspeed.benchmarks.harness import Figures, opened
from medspeed.common.host_memory import peak_memory
from medspeed.common.training.config import TrainingConfig

# MONAI's datasets, with what they are told, and its loaders over a CacheDataset.
DATASETS: dict[str, dict[str, Any]] = {
    "Dataset": {},
    "CacheDataset": {"num_workers": 2, "progress": False},
    "PersistentDataset": {"cache_dir": None},
    "LMDBDataset": {"cache_dir": None, "progress": False},
    "SmartCacheDataset": {"replace_rate": 0.25, "cache_num": None, "progress": False, "shuffle": False},
}
LOADERS: dict[str, Callable[..., Iterable[Any]]] = {
    "DataLoader": md.DataLoader,
    "DataLoader, 2 workers": partial(md.DataLoader, num_workers=2),
    "DataLoader, 2 persistent workers": partial(md.DataLoader, num_workers=2, persistent_workers=True),
    "ThreadDataLoader": partial(md.ThreadDataLoader, num_workers=0),
    "DataLoader in a ThreadBuffer": lambda dataset, **how: md.ThreadBuffer(md.DataLoader(dataset, **how), 1),
}
FEEDS = (*((name, "DataLoader") for name in DATASETS), *(("CacheDataset", name) for name in list(LOADERS)[1:]))
_EPOCHS = 3  # of a feed; the first apart
_STEP_ELSEWHERE = 0.05  # s that a step takes on another device, slept: what a loader can hide


def feed(config: TrainingConfig, dataset: str = "", loader: str = "") -> Figures | str:
    """Return the seconds of the first and later epochs of batches beside steps elsewhere, their disk and their memory.

    Args:
        config: of a recipe that MONAI's datasets feed; or of ours, without the names.
        dataset: one of `DATASETS`.
        loader: one of `LOADERS`.
    """
    if dataset == "LMDBDataset" and importlib.util.find_spec("lmdb") is None:
        return "needs the package lmdb: pip install lmdb"
    with tempfile.TemporaryDirectory(prefix="feed-") as folder:
        ends = [time.perf_counter()]
        with opened(config if dataset else replace(config, store=Path(folder))) as (_, setup, _):
            source: Any = setup.batches
        if dataset:
            ends, given = [time.perf_counter()], source.loader.dataset
            if isinstance(given, md.PatchWSIDataset):
                return "these are of volumes: MONAI reads slides by PatchWSIDataset, and caches none"
            special = {"cache_dir": folder, "cache_num": max(2, len(given) // 2)}
            how = {name: special.get(name, value) for name, value in DATASETS[dataset].items()}
            made = getattr(md, dataset)(given.data, given.transform, **how)
            batches = LOADERS[loader](made, batch_size=source.loader.batch_size, shuffle=True)
            getattr(made, "start", lambda: None)()
        for number in range(_EPOCHS):
            for _ in batches if dataset else source.epoch(number):
                time.sleep(_STEP_ELSEWHERE)
            ends.append(time.perf_counter())
        disk = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    first, *later = np.diff(ends).tolist()
    return {
        "first epoch, filling included, s": round(first, 3),
        f"later, s per step beside one of {_STEP_ELSEWHERE} s": round(min(later) / source.steps_per_epoch, 4),
        "disk, MiB": round(disk / 2**20, 1),
        "peak memory, MiB": round(peak_memory() / 2**20),
    }
