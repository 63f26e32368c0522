"""Where the prepared cases lie while a network trains: GPU memory, host memory or disk, planned before they are read.

Sizes are upper bounds from the scans' headers (`store.prepared_bytes`), since the foreground crop is not known yet.
"""

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from common.run import free_memory

CacheMode = Literal["auto", "gpu", "ram", "disk", "smart", "none"]
Tier = Literal["gpu", "ram", "disk", "none"]

# Share of the free memory that the cache may take; the network, its gradients and activations need the rest.
_SHARE = 0.5
_PLACES: dict[Tier, str] = {"gpu": "GPU memory", "ram": "host memory", "disk": "the memory-mapped prepared store"}
_MEMORIES: tuple[Tier, ...] = ("gpu", "ram")  # the faster one first


@dataclass(frozen=True)
class CachePlan:
    """Where each case lies.

    Args:
        tiers: of each case, in order; for "smart", of the cases that are held at a time.
        held: cases held at a time.
        replaced: cases that a smart cache replaces after each epoch; else 0.
        lines: the plan in words, to be printed and kept.
    """

    tiers: tuple[Tier, ...]
    held: int
    replaced: int
    lines: tuple[str, ...]


def measure_budgets(device: torch.device, folder: Path, processes: int = 1) -> dict[Tier, int]:
    """Return the bytes that the cache may take: half of the free memory, and the disk's free space.

    Args:
        device: of the batches; without a GPU there is no tier "gpu".
        folder: of the prepared store, which need not exist yet; entries already there count as free.
        processes: on this machine, that share its host memory.
    """
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    entries = sum(entry.stat().st_size for entry in folder.glob("[!.]*.safetensors"))
    budgets: dict[Tier, int] = {
        "ram": int(_SHARE * free_memory()) // processes,
        "disk": shutil.disk_usage(existing).free + entries,
    }
    if device.type == "cuda":
        budgets["gpu"] = int(_SHARE * torch.cuda.mem_get_info(device)[0])
    return budgets


def plan_cache(
    sizes: Mapping[str, int],
    mode: CacheMode,
    budgets: Mapping[Tier, int],
    smart_cases: int | None = None,
    replace_share: float = 0.25,
) -> CachePlan:
    """Decide where each case lies.

    Args:
        sizes: bytes of each case by its name, or an upper bound.
        mode: "gpu", "ram", "disk" put all cases there; "auto" fills GPU memory first, then host memory, and leaves the
            rest on disk; "smart" holds some cases at a time in the fastest memory; "none" keeps nothing, so that each
            case is prepared from its raw file whenever it is used.
        budgets: bytes that the cache may take in each tier (see `measure_budgets`).
        smart_cases: for "smart", cases held at a time; by default as many as fit.
        replace_share: for "smart", share of the held cases that is replaced after each epoch; they are loaded ahead
            and need room, too.

    Raises:
        ValueError: the cases do not fit where they were asked for, or there is no such place.
    """
    total = f"cache {mode}: {len(sizes)} cases take up to {_amount(sum(sizes.values()))}"
    if mode == "none":
        line = f"{total} and none is kept: each is prepared from its raw file whenever it is used"
        nowhere: Tier = "none"
        return CachePlan((nowhere,) * len(sizes), 0, 0, (line,))
    if sum(sizes.values()) > budgets["disk"]:
        raise ValueError(
            f"{total} on disk, in the prepared store, and {_amount(budgets['disk'])} are free there: make room, choose "
            "another folder, or --cache none"
        )
    if mode == "smart":
        return _smart(sizes, budgets, smart_cases, replace_share, total)
    return _fixed(sizes, mode, budgets, total)


def smart_indices(count: int, held: int, replaced: int, epoch: int) -> np.ndarray:
    """Return the indices [held] of the cases that a smart cache holds in one epoch, counted from 0.

    After each epoch the first `replaced` cases make way, and the next ones in the order of the dataset follow. Which
    cases an epoch holds depends on its number alone, so that runs resume.

    Source: monai.data.SmartCacheDataset.

    Raises:
        ValueError: more cases are to be held than there are.
    """
    if not 1 <= held <= count:
        raise ValueError(f"smart cache of {held} cases: between 1 and the {count} cases that there are")
    return (epoch * replaced + np.arange(held)) % count


def smart_replaced(count: int, held: int, replace_share: float) -> int:
    """Return how many of the held cases a smart cache replaces after each epoch, as MONAI's does.

    Raises:
        ValueError: the share is not above 0 and at most 1.
    """
    if not 0 < replace_share <= 1:
        raise ValueError(f"replace_share {replace_share}: above 0 and at most 1")
    return min(math.ceil(held * replace_share), count - held)


def _fixed(
    sizes: Mapping[str, int], mode: Literal["auto", "gpu", "ram", "disk"], budgets: Mapping[Tier, int], total: str
) -> CachePlan:
    """Fill the memories that the mode allows, the faster one first, and leave the rest on disk."""
    if mode == "gpu" and "gpu" not in budgets:
        raise ValueError(
            "cache gpu: the batches lie on the CPU, so that there is no GPU memory: use --cache auto or ram"
        )
    taken: dict[Tier, int] = {tier: 0 for tier in _MEMORIES if tier in budgets and mode in ("auto", tier)}
    tiers: list[Tier] = []
    for size in sizes.values():
        tier: Tier = next((place for place, used in taken.items() if used + size <= budgets[place]), "disk")
        taken[tier] = taken.get(tier, 0) + size
        tiers.append(tier)
    if mode in _MEMORIES and "disk" in tiers:
        raise ValueError(
            f"{total} and {_amount(budgets[mode])} of {_PLACES[mode]} are free for the cache: use --cache auto, which "
            "mixes GPU, host memory and disk, or --cache smart, which holds some cases at a time"
        )
    lines = [total]
    for place in (place for place in taken if place in tiers):
        room = f" (of {_amount(budgets[place])} free for it)" if place in _MEMORIES else ""
        lines.append(f"  {tiers.count(place)} cases, {_amount(taken[place])} in {_PLACES[place]}{room}")
    if mode == "auto" and "disk" in tiers:
        first = list(sizes)[tiers.index("disk")] + (", ..." if tiers.count("disk") > 1 else "")
        lines.append(
            f"  what lies on disk ({first}) is read from there at each use: if the steps wait for it, take --cache "
            "smart, or more memory"
        )
    return CachePlan(tuple(tiers), len(sizes), 0, tuple(lines))


def _smart(
    sizes: Mapping[str, int], budgets: Mapping[Tier, int], asked: int | None, replace_share: float, total: str
) -> CachePlan:
    count = len(sizes)
    if asked is not None and not 1 <= asked <= count:
        raise ValueError(f"smart_cases {asked}: between 1 and the {count} cases that there are")
    largest = sorted(sizes.values(), reverse=True)  # whichever cases are held, they take no more than the largest ones

    def needed(held: int) -> int:
        return sum(largest[: held + smart_replaced(count, held, replace_share)])

    rooms = {tier: budgets[tier] for tier in _MEMORIES if tier in budgets}
    for tier, room in rooms.items():
        held = next((held for held in ([asked] if asked else range(count, 0, -1)) if needed(held) <= room), None)
        if held:
            replaced = smart_replaced(count, held, replace_share)
            line = (
                f"{total}; {held} at a time in {_PLACES[tier]}, {replaced} replaced after each epoch, up to "
                f"{_amount(needed(held))} with those (of {_amount(room)} free for it); the others wait in "
                f"{_PLACES['disk']}"
            )
            return CachePlan((tier,) * count, held, replaced, (line,))
    free = " and ".join(f"{_amount(room)} of {_PLACES[tier]}" for tier, room in rooms.items())
    raise ValueError(
        f"cache smart: {asked or 1} of {count} cases and those loaded ahead need up to {_amount(needed(asked or 1))}, "
        f"and {free} are free for the cache: hold fewer at a time, or use --cache disk"
    )


def _amount(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
