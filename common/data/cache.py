"""The case cache: prepared cases on the device, in host memory, mapped from the store, or loaded at every use."""

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from medspeed.common.data.crops import CachedCase, Tier, place_cases, upload
from medspeed.common.data.geometry import Shape
from medspeed.common.data.preparation import PreparedCase
from medspeed.common.data.threads import map_in_threads
from medspeed.common.files import plural
from medspeed.common.host_memory import free_memory

CacheMode = Literal["auto", "gpu", "ram", "disk", "smart", "none"]

_SHARE = 0.5  # of the free memory; the network, its gradients and activations need the rest
_MEMORIES: tuple[Tier, ...] = ("gpu", "ram")  # the faster one first
_PLACES: dict[Tier, str] = {"gpu": "GPU memory", "ram": "host memory", "disk": "the memory-mapped prepared store"}


@dataclass(frozen=True)
class CachePlan:
    """Where each case lies."""

    tiers: tuple[Tier, ...]  # of each case, in order; for "smart", of the cases that are held at a time
    held: int  # cases held at a time
    replaced: int  # cases that a smart cache replaces after each epoch; else 0
    lines: tuple[str, ...]  # the plan in words, to be printed and kept
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
    _here: dict[int, CachedCase] = field(default_factory=dict)
    _coming: dict[int, Future[CachedCase]] = field(default_factory=dict)
    _pool: ThreadPoolExecutor | None = None

    @contextmanager
    def epoch(self, number: int) -> Iterator[np.ndarray]:
        """Have the cases of one epoch while it lasts, and load ahead for the next; yield their numbers, int64 [n]."""
        numbers = self.cases_of(number)
        if self.ahead is not None:
            self._bring(numbers.tolist())
            following = self.cases_of(number + 1).tolist() if number + 1 < self.epochs else []
            if new := [each for each in following if each not in self._here][: self.ahead]:
                self._pool = ThreadPoolExecutor(1, "cases ahead")  # its thread ends when all are loaded
                self._coming = {each: self._pool.submit(self.load, each) for each in new}
                self._pool.shutdown(wait=False)
        try:
            yield numbers
        except BaseException:  # the epoch is left early, for whatever reason: no thread stays behind
            self._cancel()
            raise

    def case(self, number: int) -> CachedCase:
        """Return a case of the present epoch."""
        return self.load(number) if self.ahead is None else self._here[number]

    def _bring(self, wanted: list[int]) -> None:
        """Have the wanted cases here and no other."""
        for number in self._here.keys() - set(wanted):
            del self._here[number]
        try:
            self._here |= {number: self._coming[number].result() for number in wanted if number in self._coming}
        finally:
            self._cancel()
        missing = [number for number in wanted if number not in self._here]
        loaded = map_in_threads(self.load, missing, "loading cases", progress=False)
        self._here |= zip(missing, loaded, strict=True)

    def _cancel(self) -> None:
        """Cancel what has not begun, wait for what has, and end the thread."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._coming, self._pool = {}, None


def fill_cache(
    cases: Sequence[PreparedCase],
    tiers: Sequence[Tier],
    crop_size: Shape,
    device: torch.device,
    numbers: np.ndarray | None = None,
) -> CaseCache:
    """Put prepared, labelled cases in their tiers, as `plan_cache` says; every epoch trains on all of them.

    Their numbers in the dataset, int64, are the key of their random draws; by default 0, 1, 2, ...
    """
    known = np.arange(len(cases)) if numbers is None else numbers
    placed: dict[int, CachedCase] = {}
    for tier in set(tiers):
        some = [place for place, each in enumerate(tiers) if each == tier]
        there = place_cases([cases[place] for place in some], tier, crop_size, device)
        placed |= zip(known[some].tolist(), there, strict=True)
    return CaseCache(lambda epoch: known, crop_size, device, set(tiers) != {"gpu"}, placed.__getitem__)


def hold_cases(cases: Sequence[PreparedCase], room: int, device: torch.device) -> list[PreparedCase]:
    """Return labelled cases that are used whole again and again; the first of them, `room` bytes, lie on the device."""
    held = []
    for case in cases:
        assert case.label is not None
        room -= case.image.nbytes + case.label.nbytes
        if room >= 0:
            image, label = (upload(each.numpy(), device) for each in (case.image, case.label))
            case = replace(case, image=image, label=label)
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
    sizes: Mapping[str, int], mode: CacheMode, budgets: Mapping[Tier, int], smart_cases: int | None, share: float
) -> CachePlan:
    """Decide where each case lies, before any is read, from its bytes, or an upper bound, by its name.

    Mode "gpu", "ram" or "disk" puts all cases there; "auto" fills GPU memory first, then host memory, and leaves the
    rest on disk; "smart" holds `smart_cases` (None: as many as fit) at a time in the fastest memory, and replaces a
    share of them after each epoch, which is loaded ahead and needs room, too; "none" keeps nothing, so that each case
    is prepared from its raw file whenever it is used. For the budgets see `measure_budgets`.

    Raises:
        ValueError: the cases do not fit where they were asked for, or there is no such place.
    """
    total = f"cache {mode}: {plural(len(sizes), 'case')}, up to {_amount(sum(sizes.values()))}"
    if mode == "none":
        line = f"{total}; none is cached: each is prepared from its raw file every time it is used"
        return CachePlan(tuple("none" for _ in sizes), 0, 0, (line,), budgets.get("gpu", 0))
    if sum(sizes.values()) > budgets["disk"]:
        said = f"{total} in the prepared store on disk, where only {_amount(budgets['disk'])} is free"
        raise ValueError(f"{said}: free some space, choose another --store, or use --cache none")
    if mode == "smart":
        return _smart(sizes, budgets, smart_cases, share, total)
    if mode == "gpu" and "gpu" not in budgets:
        raise ValueError("cache gpu: this run computes on the CPU and has no GPU memory: use --cache auto or ram")
    taken: dict[Tier, int] = {tier: 0 for tier in _MEMORIES if tier in budgets and mode in ("auto", tier)}
    tiers: list[Tier] = []
    for size in sizes.values():
        tier: Tier = next((place for place, used in taken.items() if used + size <= budgets[place]), "disk")
        taken[tier] = taken.get(tier, 0) + size
        tiers.append(tier)
    if mode in _MEMORIES and "disk" in tiers:
        raise ValueError(
            f"{total}, but only {_amount(budgets[mode])} of {_PLACES[mode]} is free for the cache: use --cache auto, "
            "which mixes GPU, host memory and disk, or --cache smart, which holds some of the cases at a time"
        )
    lines = [total]
    for place in (place for place in taken if place in tiers):
        room = f" ({_amount(budgets[place])} free)" if place in _MEMORIES else ""
        lines.append(f"  {plural(tiers.count(place), 'case')}, {_amount(taken[place])} in {_PLACES[place]}{room}")
    if mode == "auto" and "disk" in tiers:
        first = list(sizes)[tiers.index("disk")] + (", ..." if tiers.count("disk") > 1 else "")
        lines.append(f"  cases on disk ({first}) are read at every use: if that is slow, use --cache smart")
    return CachePlan(tuple(tiers), len(sizes), 0, tuple(lines), budgets.get("gpu", 0) - taken.get("gpu", 0))


def _smart(
    sizes: Mapping[str, int], budgets: Mapping[Tier, int], asked: int | None, share: float, total: str
) -> CachePlan:
    """Hold as many cases as asked, or as fit, in the faster memory that has room for them."""
    count = len(sizes)
    if asked is not None and asked > count:
        raise ValueError(f"cache smart:{asked}: must be between 1 and the number of cases ({count})")
    largest = sorted(sizes.values(), reverse=True)  # whichever cases are held, they take no more than the largest ones
    rooms = {tier: budgets[tier] for tier in _MEMORIES if tier in budgets}
    for tier, room in rooms.items():
        for held in [asked] if asked else range(count, 0, -1):
            replaced = min(math.ceil(held * share), count - held)  # as MONAI's
            needed = sum(largest[: held + replaced])
            if needed <= room:
                line = (
                    f"{total}; {held} at a time in {_PLACES[tier]} and {replaced} replaced after each epoch, in all up "
                    f"to {_amount(needed)} ({_amount(room)} free); the others stay in {_PLACES['disk']}"
                )
                left = budgets.get("gpu", 0) - (needed if tier == "gpu" else 0)
                return CachePlan((tier,) * count, held, replaced, (line,), left)
    free = " and ".join(f"{_amount(room)} of {_PLACES[tier]}" for tier, room in rooms.items())
    raise ValueError(
        f"cache smart: {held} of {count} cases and those loaded ahead need up to {_amount(needed)}, but only {free} "
        "is free for the cache: hold fewer at a time, or use --cache disk"
    )


def smart_indices(count: int, held: int, replaced: int, epoch: int) -> np.ndarray:
    """Return the indices [held] of the cases that a smart cache holds in one epoch, counted from 0.

    After each epoch the first `replaced` cases make way, and the next ones in the order of the dataset follow.

    Source: monai.data.SmartCacheDataset.
    """
    return (epoch * replaced + np.arange(held)) % count


def _amount(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
