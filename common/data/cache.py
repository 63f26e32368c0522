"""The case cache: prepared cases on the device, in host memory, mapped from the store, or loaded at every use."""

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from medspeed.common.data.crops import CachedCase, Tier, place_case, place_together, upload
from medspeed.common.data.geometry import Shape
from medspeed.common.data.preparation import PreparedCase
from medspeed.common.data.threads import map_in_threads
from medspeed.common.files import plural
from medspeed.common.host_memory import free_memory

CacheMode = Literal["auto", "gpu", "ram", "disk", "smart", "none"]

_SHARE = 0.5  # of the free memory; the network, its gradients and activations need the rest
_MEMORIES: tuple[Tier, ...] = ("gpu", "ram")  # the faster one first
_PLACES: dict[Tier, str] = {"gpu": "GPU memory", "ram": "host memory"}


@dataclass(frozen=True)
class CachePlan:
    """Where the cases lie."""

    tier: Tier
    held: int  # cases held at a time
    replaced: int  # cases that a smart cache replaces after each epoch; else 0
    words: str  # to be printed
    free: int  # bytes of the GPU's budget that the cases leave


@dataclass
class CaseCache:
    """The cases of one partition. A case goes by its number in the dataset.

    Which cases an epoch trains on depends on its number alone, so that runs resume. Where they change from epoch to
    epoch (a smart cache, a reshuffle), only what is new is loaded, and up to `ahead` cases of it in a background thread
    while the epoch before trains; so at most `ahead` cases more than an epoch's own are in memory.
    """

    cases_of: Callable[[int], np.ndarray]  # from an epoch to the numbers of its cases, int64
    crop_size: Shape  # X, Y, Z in voxels
    device: torch.device  # where crops are wanted
    on_host: bool  # whether cutting keeps the CPU busy, so that it is worth doing ahead of time
    load: Callable[[int], CachedCase]  # from a number to the case in its place; called in threads
    ahead: int | None = None  # cases loaded ahead. None holds none, and asks `load` at every use
    epochs: float = math.inf  # of the run; for later ones nothing is loaded ahead
    _held: dict[int, CachedCase] = field(default_factory=dict)

    @contextmanager
    def epoch(self, number: int) -> Iterator[np.ndarray]:
        """Have the cases of one epoch while it lasts, and load ahead for the next; yield their numbers, int64 [n].

        What fails ahead fails again, and is raised, where it is wanted. No thread stays behind, however it is left.
        """
        numbers, new = self.cases_of(number), list[int]()
        if self.ahead is not None:
            self._held = {each: self._held[each] for each in numbers.tolist() if each in self._held}
            self._hold([each for each in numbers.tolist() if each not in self._held])
            following = self.cases_of(number + 1).tolist() if number + 1 < self.epochs else []
            new = [each for each in following if each not in self._held][: self.ahead]
        pool = ThreadPoolExecutor(1, "cases ahead")
        try:
            for each in new:
                pool.submit(self._hold, [each])
            yield numbers
            pool.shutdown()
        finally:
            pool.shutdown(cancel_futures=True)

    def case(self, number: int) -> CachedCase:
        """Return a case of the present epoch."""
        return self.load(number) if self.ahead is None else self._held[number]

    def _hold(self, numbers: list[int]) -> None:
        loaded = map_in_threads(self.load, numbers, "loading cases", progress=False)
        self._held |= zip(numbers, loaded, strict=True)


def fill_cache(
    cases: Sequence[PreparedCase], tier: Tier, crop_size: Shape, device: torch.device, numbers: np.ndarray | None = None
) -> CaseCache:
    """Put prepared, labelled cases in a tier; every epoch trains on all of them.

    Their numbers in the dataset, int64, are the key of their random draws; by default 0, 1, 2, ...
    """
    known = np.arange(len(cases)) if numbers is None else numbers
    if tier == "gpu":
        placed = place_together(cases, crop_size, device)
    else:
        each = partial(place_case, tier=tier, crop_size=crop_size, device=device)
        placed = map_in_threads(each, cases, "placing cases", progress=False)
    by_number = dict(zip(known.tolist(), placed, strict=True))
    return CaseCache(lambda epoch: known, crop_size, device, tier != "gpu", by_number.__getitem__)


def hold_cases(cases: Sequence[PreparedCase], room: int, device: torch.device) -> list[PreparedCase]:
    """Return labelled cases that are used whole again and again; the first of them, `room` bytes, lie on the device."""
    held = []
    for case in cases:
        assert case.label is not None
        room -= case.image.nbytes + case.label.nbytes
        if room >= 0:
            case = replace(case, image=upload(case.image, device), label=upload(case.label, device))
        held.append(case)
    return held


def measure_budgets(device: torch.device, folder: Path, processes: int = 1) -> dict[Tier, int]:
    """Return the bytes that the cache may take: half of the free memory, and the disk's free space.

    The processes on this machine share its host memory; entries that are in the store's folder already count as free.
    """
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    entries = sum(entry.stat().st_size for entry in folder.glob("[!.]*.safetensors"))
    room = int(_SHARE * free_memory()) // processes
    budgets: dict[Tier, int] = {"ram": room, "disk": shutil.disk_usage(existing).free + entries}
    if device.type == "cuda":
        budgets["gpu"] = int(_SHARE * torch.cuda.mem_get_info(device)[0])
    return budgets


def plan_cache(
    sizes: Sequence[int], mode: CacheMode, budgets: Mapping[Tier, int], asked: int | None, share: float
) -> CachePlan:
    """Decide where the cases lie, before any is read, from the bytes that each may take; see `measure_budgets`.

    Mode "gpu", "ram" or "disk" puts all cases there, "auto" in the first of them with room; "smart" holds as many as
    `asked` (None: as fit) at a time in the fastest memory, and replaces a share of them after each epoch, which is
    loaded ahead and needs room, too; "none" keeps nothing: each case is prepared from its raw file at every use.

    Raises:
        ValueError: the cases do not fit where they were asked for, or there is no such place.
    """
    count, gpu = len(sizes), budgets.get("gpu", 0)
    total = f"cache {mode}: {plural(count, 'case')}, up to {_amount(sum(sizes))}"
    if mode == "none":
        said = f"{total}; none is cached: each is prepared from its raw file every time it is used"
        return CachePlan("disk", 0, 0, said, gpu)
    if sum(sizes) > budgets["disk"]:
        said = f"{total} in the prepared store on disk, where only {_amount(budgets['disk'])} is free"
        raise ValueError(f"{said}: free some space, choose another --store, or use --cache none")
    if mode == "gpu" and "gpu" not in budgets:
        raise ValueError("cache gpu: this run computes on the CPU and has no GPU memory: use --cache auto or ram")
    if asked is not None and asked > count:
        raise ValueError(f"cache smart:{asked}: must be between 1 and the number of cases ({count})")
    largest = sorted(sizes, reverse=True)  # whichever cases are held, they take no more than the largest ones
    rooms = {tier: budgets[tier] for tier in _MEMORIES if tier in budgets and mode in ("auto", "smart", tier)}
    for tier, room in rooms.items():
        for held in range(count, 0, -1) if mode == "smart" and asked is None else [asked or count]:
            replaced = min(math.ceil(held * share), count - held)  # as MONAI's
            needed = sum(largest[: held + replaced])
            if needed <= room:
                said = f" in {_PLACES[tier]} ({_amount(room)} free)"
                if mode == "smart":
                    said = f"{said}, {held} at a time and {replaced} replaced after each epoch: up to {_amount(needed)}"
                return CachePlan(tier, held, replaced, total + said, gpu - (needed if tier == "gpu" else 0))
    if mode in ("auto", "disk"):
        slow = ", read at every use: if that is slow, use --cache smart" if mode == "auto" else ""
        return CachePlan("disk", count, 0, f"{total} in the memory-mapped prepared store{slow}", gpu)
    free = " and ".join(f"{_amount(room)} of {_PLACES[tier]}" for tier, room in rooms.items())
    some = f", {held} at a time with those loaded ahead up to {_amount(needed)}" if mode == "smart" else ""
    raise ValueError(
        f"{total}{some}, but only {free} is free for the cache: use --cache auto or disk, or hold fewer cases at a "
        "time, with --cache smart:CASES"
    )


def smart_indices(count: int, held: int, replaced: int, epoch: int) -> np.ndarray:
    """Return the indices [held] of the cases that a smart cache holds in one epoch, counted from 0.

    After each epoch the first `replaced` cases make way, and the next ones in the order of the dataset follow.

    Source: monai.data.SmartCacheDataset.
    """
    return (epoch * replaced + np.arange(held)) % count


def _amount(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
