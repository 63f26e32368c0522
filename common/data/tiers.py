"""Where the prepared cases lie while a network trains: GPU memory, host memory or disk, planned before they are read.

Sizes are upper bounds from the scans' headers (`store.prepared_bytes`), since the foreground crop is not known yet.
"""

import math
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from common.data.smart import smart_replaced
from common.observe.host_memory import free_memory

CacheMode = Literal["auto", "gpu", "ram", "disk", "smart", "none"]
Tier = Literal["gpu", "ram", "disk", "none"]

# Share of the free memory that the cache may take; the network, its gradients and activations need the rest.
_SHARE = 0.5
_PLACES: dict[Tier, str] = {"gpu": "GPU memory", "ram": "host memory", "disk": "the memory-mapped prepared store"}


@dataclass(frozen=True)
class Budgets:
    """Bytes that the cache may take.

    Args:
        gpu: in GPU memory; None where the batches lie on the CPU.
        ram: in host memory.
        disk: in the folder of the prepared store.
    """

    gpu: int | None
    ram: int
    disk: int


@dataclass(frozen=True)
class CachePlan:
    """Where each case lies.

    Args:
        mode: what was asked for.
        tiers: of each case, in order; for "smart", of the cases that are held at a time.
        held: cases held at a time.
        replaced: cases that a smart cache replaces after each epoch; else 0.
        lines: the plan in words, to be printed and kept.
    """

    mode: CacheMode
    tiers: tuple[Tier, ...]
    held: int
    replaced: int
    lines: tuple[str, ...]


def case_bytes(shape: Sequence[int], channels: int) -> int:
    """Return the bytes of a prepared case: image [C, X, Y, Z] float16 and label [X, Y, Z] uint8.

    Args:
        shape: X, Y, Z in voxels.
        channels: C.
    """
    return math.prod(shape) * (2 * channels + 1)


def measure_budgets(device: torch.device, folder: Path, processes: int = 1) -> Budgets:
    """Return what the cache may take: half of the free memory, and the disk's free space.

    Args:
        device: of the batches.
        folder: of the prepared store, which need not exist yet; entries already there count as free.
        processes: on this machine, that share its host memory.
    """
    gpu = int(_SHARE * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else None
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    entries = sum(entry.stat().st_size for entry in folder.glob("*.safetensors"))
    disk = shutil.disk_usage(existing).free + entries
    return Budgets(gpu, int(_SHARE * free_memory()) // processes, disk)


def plan_cache(
    names: Sequence[str],
    sizes: Sequence[int],
    mode: CacheMode,
    budgets: Budgets,
    smart_cases: int | None = None,
    replace_rate: float = 0.25,
) -> CachePlan:
    """Decide where each case lies.

    Args:
        names: of the cases.
        sizes: bytes of each, or an upper bound.
        mode: "gpu", "ram", "disk" put all cases there; "auto" fills GPU memory first, then host memory, and leaves the
            rest on disk; "smart" holds some cases at a time in the fastest memory; "none" keeps nothing, so that each
            case is prepared from its raw file whenever it is used.
        budgets: bytes that the cache may take.
        smart_cases: for "smart", cases held at a time; by default as many as fit.
        replace_rate: for "smart", share of the held cases that is replaced after each epoch; they are loaded ahead
            and need room, too.

    Raises:
        ValueError: the cases do not fit where they were asked for, or there is no such place.
    """
    if len(names) != len(sizes) or not names:
        raise ValueError(f"{len(names)} cases with {len(sizes)} sizes: give one size for each case, and at least one")
    total = f"{len(names)} cases take up to {_amount(sum(sizes))}"
    if mode == "none":
        line = f"cache none: {total} and none is kept: each is prepared from its raw file whenever it is used"
        nowhere: list[Tier] = ["none"] * len(names)
        return CachePlan(mode, tuple(nowhere), 0, 0, (line,))
    if sum(sizes) > budgets.disk:
        raise ValueError(
            f"cache {mode}: {total} on disk, in the prepared store, and {_amount(budgets.disk)} are free there: make "
            "room, choose another folder, or --cache none"
        )
    if mode == "smart":
        return _smart(sizes, budgets, smart_cases, replace_rate, total)
    if mode == "auto":
        return _auto(names, sizes, budgets, total)
    return _all_in(mode, sizes, budgets, total)


def _all_in(mode: Literal["gpu", "ram", "disk"], sizes: Sequence[int], budgets: Budgets, total: str) -> CachePlan:
    budget = {"gpu": budgets.gpu, "ram": budgets.ram, "disk": budgets.disk}[mode]
    if budget is None:
        raise ValueError(
            "cache gpu: the batches lie on the CPU, so that there is no GPU memory: use --cache auto or ram"
        )
    if sum(sizes) > budget:
        raise ValueError(
            f"cache {mode}: {total} and {_amount(budget)} of {_PLACES[mode]} are free for the cache: use --cache auto, "
            "which mixes GPU, host memory and disk, or --cache smart, which holds some cases at a time"
        )
    line = f"cache {mode}: {total}, all in {_PLACES[mode]} ({_amount(budget)} free for it)"
    tier: Tier = mode
    return CachePlan(mode, (tier,) * len(sizes), len(sizes), 0, (line,))


def _auto(names: Sequence[str], sizes: Sequence[int], budgets: Budgets, total: str) -> CachePlan:
    rooms: dict[Tier, int] = {"ram": budgets.ram} if budgets.gpu is None else {"gpu": budgets.gpu, "ram": budgets.ram}
    left = dict(rooms)
    tiers: list[Tier] = []
    for size in sizes:
        tier: Tier = next((place for place, room in left.items() if size <= room), "disk")
        if tier != "disk":
            left[tier] -= size
        tiers.append(tier)
    counts = Counter(tiers)
    held = {tier: sum(size for size, each in zip(sizes, tiers, strict=True) if each == tier) for tier in counts}
    lines = [f"cache auto: {total}"]
    for place in (*rooms, "disk"):
        if place in counts:
            room = f" (of {_amount(rooms[place])} free for it)" if place in rooms else ""
            lines.append(f"  {counts[place]} cases, {_amount(held[place])} in {_PLACES[place]}{room}")
    if counts["disk"]:
        first = names[tiers.index("disk")]
        lines.append(
            f"  what lies on disk ({first}{', ...' if counts['disk'] > 1 else ''}) is read from there at each use: if "
            "the steps wait for it, take --cache smart, or more memory"
        )
    return CachePlan("auto", tuple(tiers), len(sizes), 0, tuple(lines))


def _smart(sizes: Sequence[int], budgets: Budgets, asked: int | None, replace_rate: float, total: str) -> CachePlan:
    count = len(sizes)
    if asked is not None and not 1 <= asked <= count:
        raise ValueError(f"smart_cases {asked}: between 1 and the {count} cases that there are")
    largest = sorted(sizes, reverse=True)  # whichever cases are held, they take no more than the largest ones

    def needed(held: int) -> int:
        return sum(largest[: held + smart_replaced(count, held, replace_rate)])

    rooms: list[tuple[Tier, int]] = [("ram", budgets.ram)]
    if budgets.gpu is not None:
        rooms.insert(0, ("gpu", budgets.gpu))
    for tier, room in rooms:
        fitting = [held for held in ([asked] if asked else range(count, 0, -1)) if needed(held) <= room]
        if fitting:
            held, replaced = fitting[0], smart_replaced(count, fitting[0], replace_rate)
            line = (
                f"cache smart: {total}; {held} at a time in {_PLACES[tier]}, {replaced} replaced after each epoch, up "
                f"to {_amount(needed(held))} with those (of {_amount(room)} free for it); the others wait in "
                f"{_PLACES['disk']}"
            )
            return CachePlan("smart", (tier,) * count, held, replaced, (line,))
    free = " and ".join(f"{_amount(room)} of {_PLACES[tier]}" for tier, room in rooms)
    raise ValueError(
        f"cache smart: {asked or 1} of {count} cases and those loaded ahead need up to "
        f"{_amount(needed(asked or 1))}, and {free} are free for the cache: hold fewer at a time, or use --cache disk"
    )


def _amount(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
