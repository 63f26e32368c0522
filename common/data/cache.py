"""Prepared cases kept: on disk in the store, made once; and near the device, or mapped from the store, by the cache."""

import hashlib
import json
import logging
import math
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from glob import escape
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from isal import isal_zlib
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from medspeed.common.data.crops import CachedCase, Tier, place_case, place_together, upload
from medspeed.common.data.dataset import Case
from medspeed.common.data.geometry import Shape, WorkingGrid
from medspeed.common.data.preparation import PREPARATION_VERSION, Preparation, PreparedCase, case_grid, prepare_case
from medspeed.common.data.threads import map_in_threads
from medspeed.common.data.volumes import read_header
from medspeed.common.files import atomic_path, from_json, locked, part_ending, plural
from medspeed.common.host_memory import free_memory

CacheMode = Literal["auto", "gpu", "ram", "disk", "smart", "none"]

_SHARE = 0.5  # of the free memory; the network, its gradients and activations need the rest
_MEMORIES: dict[Tier, str] = {"gpu": "GPU memory", "ram": "host memory"}  # the faster one first


@dataclass(frozen=True)
class CachePlan:
    """Where the cases lie."""

    tier: Tier
    held: int  # cases held at a time
    replaced: int  # cases that a smart cache replaces after each epoch; else 0
    words: str  # to be printed
    free: int  # bytes of the GPU's budget, with several partitions of one of them, that the cases leave


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
    _pool: ThreadPoolExecutor = field(default_factory=ThreadPoolExecutor)  # of what is loaded ahead

    @contextmanager
    def epoch(self, number: int) -> Iterator[np.ndarray]:
        """Have the cases of one epoch while it lasts, and load ahead for the next; yield their numbers, int64 [n].

        The next epoch waits for what is loaded ahead; what failed fails again. No thread outlives an epoch left early.
        """
        numbers = self.cases_of(number)
        if self.ahead is not None:
            self._pool.shutdown()
            self._held = {each: self._held[each] for each in numbers.tolist() if each in self._held}
            self._hold([each for each in numbers.tolist() if each not in self._held])
            following = self.cases_of(number + 1).tolist() if number + 1 < self.epochs else []
            self._pool = ThreadPoolExecutor(1, "cases ahead")
            for each in [each for each in following if each not in self._held][: self.ahead]:
                self._pool.submit(self._hold, [each])
            self._pool.shutdown(wait=False)  # its thread ends with the last of them
        try:
            yield numbers
        except BaseException:
            self._pool.shutdown(cancel_futures=True)
            raise

    def case(self, number: int) -> CachedCase:
        """Return a case of the present epoch."""
        return self.load(number) if self.ahead is None else self._held[number]

    def _hold(self, numbers: list[int]) -> None:
        self._held |= zip(numbers, map_in_threads(self.load, numbers), strict=True)


def fill_cache(
    cases: Sequence[PreparedCase], tier: Tier, crop_size: Shape, device: torch.device, numbers: np.ndarray | None = None
) -> CaseCache:
    """Put labelled cases in a tier, for all epochs; their numbers, int64, by default 0, 1, 2, ..., key random draws."""
    known = np.arange(len(cases)) if numbers is None else numbers
    if tier == "gpu":
        placed = place_together(cases, crop_size, device)
    else:
        each = partial(place_case, tier=tier, crop_size=crop_size, device=device)
        placed = map_in_threads(each, cases)
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
    loaded ahead and needs room, too; "none" has no cache: each case is prepared from its raw file when it is needed.
    Cases that do not fit where they were asked for, or a place that there is not, are a ValueError.
    """
    count, gpu = len(sizes), budgets.get("gpu", 0)
    total = f"cache {mode}: {plural(count, 'case')}, up to {_amount(sum(sizes))}"
    if mode == "none":
        said = f"{total}; none is cached: each is prepared from its raw file when needed, the last few stay in memory"
        return CachePlan("disk", 0, 0, said, gpu)
    if sum(sizes) > budgets["disk"]:
        said = f"{total} in the prepared store on disk, where only {_amount(budgets['disk'])} is free"
        raise ValueError(f"{said}: free some space, choose another --store, or use --cache none")
    if mode == "gpu" and "gpu" not in budgets:
        raise ValueError("cache gpu: this run computes on the CPU and has no GPU memory: use --cache auto or ram")
    if asked is not None and asked > count:
        raise ValueError(f"cache smart:{asked}: must be between 1 and the number of cases of a partition ({count})")
    largest = sorted(sizes, reverse=True)  # whichever cases are held, they take no more than the largest ones
    rooms = {tier: budgets[tier] for tier in _MEMORIES if tier in budgets and mode in ("auto", "smart", tier)}
    for tier, room in rooms.items():
        for held in range(count, 0, -1) if mode == "smart" and asked is None else [asked or count]:
            replaced = min(math.ceil(held * share), count - held)  # as MONAI's
            needed = sum(largest[: held + replaced])
            if needed <= room:
                said = f" in {_MEMORIES[tier]} ({_amount(room)} free for it)"
                if mode == "smart":
                    said = f"{said}, {held} at a time and {replaced} replaced after each epoch: up to {_amount(needed)}"
                return CachePlan(tier, held, replaced, total + said, gpu - (needed if tier == "gpu" else 0))
    if mode in ("auto", "disk"):
        slow = ", read at every use: if that is slow, use --cache smart" if mode == "auto" else ""
        return CachePlan("disk", count, 0, f"{total} in the memory-mapped prepared store{slow}", gpu)
    free = " and ".join(f"{_amount(room)} of {_MEMORIES[tier]}" for tier, room in rooms.items())
    some = f", {held} at a time with those loaded ahead up to {_amount(needed)}" if mode == "smart" else ""
    remedy = "use --cache auto or disk, or hold fewer cases at a time, with --cache smart:CASES"
    raise ValueError(f"{total}{some}, but only {free} is free for the cache: {remedy}")


def smart_indices(count: int, held: int, replaced: int, epoch: int) -> np.ndarray:
    """Return the indices [held] of the cases that a smart cache holds in one epoch, counted from 0.

    After each the first `replaced` make way, and the next in order follow. Source: monai.data.SmartCacheDataset.
    """
    return (epoch * replaced + np.arange(held)) % count


def _amount(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def prepared_case(case: Case, preparation: Preparation, allowed: Collection[int], folder: Path) -> PreparedCase:
    """Return a case prepared: memory-mapped from the folder if it is there and sound, else made and kept there.

    A stale or damaged entry is made anew, which is logged. Processes may share the folder: each entry is made by one of
    them and replaced whole. It is NAME.safetensors, so that each dataset and preparation had better have a folder. An
    OSError says that this cannot be written, or is full; the entries already there are kept.
    """
    assert case.label is not None
    sources = {"image": file_state(case.image), "label": file_state(case.label)}
    decisive = {**sources, "classes": sorted(allowed), "version": PREPARATION_VERSION, **asdict(preparation)}
    path, key = folder / f"{case.name}.safetensors", json.dumps(decisive, sort_keys=True)
    with suppress(FileNotFoundError, ValueError):
        return read_entry(path, case.name, key)
    with locked(folder / "locks" / f"{case.name}.lock") as alone:
        for part in folder.glob(f".part-????????-{escape(part_ending(path.name))}") if alone else ():  # of a killed one
            part.unlink()
        try:
            return read_entry(path, case.name, key)  # made by another process while this one waited
        except FileNotFoundError:
            pass
        except ValueError as reason:
            logging.getLogger(__name__).warning("%s: preparing it again: %s", path, reason)
        prepared = prepare_case(case, preparation, allowed)
        try:
            write_entry(path, prepared, key)
        except (OSError, SafetensorError) as error:
            raise OSError(f"{path}: cannot be written: {error}; free some space or choose another folder") from error
        # Read back, not passed on: mapped pages are the disk's, so that a set larger than memory can be prepared.
        return read_entry(path, case.name, key, check=False)


def prepared_bytes(case: Case, preparation: Preparation) -> int:
    """Return the most bytes that a case can take once prepared: its working grid, from the header, uncropped."""
    header = read_header(case.image)
    voxels = math.prod(case_grid(case.image, header.shape[:3], header.affine, preparation.spacing).shape)
    return voxels * (2 * preparation.channels + 1)  # float16 and uint8


def store_folder(root: Path, dataset: Path, preparation: Preparation | None = None) -> Path:
    """Return the folder below `root` for what is kept of one dataset folder, and of one preparation if given."""
    key = json.dumps([str(dataset.resolve()), preparation and asdict(preparation)])
    return root / f"{dataset.resolve().name}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"


def write_entry(path: Path, case: PreparedCase, key: str) -> None:
    """Write a prepared, labelled case atomically, with a key: a JSON object of all that decided the voxels."""
    assert case.label is not None
    tensors, grid = {"image": case.image, "label": case.label}, json.dumps(asdict(case.grid))
    with atomic_path(path, flush=False) as part:
        about = {"key": key, "grid": grid, "crc32": _checksum(key, grid, tensors)}
        mode = part.stat().st_mode  # as the umask says; safetensors puts a file for its owner alone in its place
        save_file(tensors, part, {"about": json.dumps(about)})  # it writes several texts in any order
        part.chmod(mode)


def read_entry(path: Path, name: str, key: str, check: bool = True) -> PreparedCase:
    """Map a prepared case into memory, and check it against its checksum unless this process has just written it.

    Nothing is copied: the tensors are pages of the file, read when touched; writing to them never reaches the file. A
    ValueError says how it is damaged, or what of its key has changed.
    """
    try:
        with safe_open(path, framework="pt") as stored:
            about = json.loads((stored.metadata() or {}).get("about", "{}"))
            tensors = {part: stored.get_tensor(part) for part in stored.keys()}  # noqa: SIM118 - it is no dict
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"damaged: {error}") from error
    found, grid = about.get("key", ""), about.get("grid", "")
    if check and _checksum(found, grid, tensors) != about.get("crc32"):
        raise ValueError("damaged: CRC-32 mismatch, or written by another version")
    if found != key:
        before, now = json.loads(found), json.loads(key)
        changed = [f"{part} {before.get(part)} is now {now[part]}" for part in now if before.get(part) != now[part]]
        raise ValueError(f"stale: {', '.join(changed)}")
    return PreparedCase(name, tensors["image"], tensors["label"], from_json(WorkingGrid, json.loads(grid)))


def file_state(file: Path) -> tuple[int, int, int]:
    """Return size and times (ns) of a file, which change with its content."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns  # copying tools set the former time back


def _checksum(key: str, grid: str, tensors: dict[str, torch.Tensor]) -> str:
    """Return the CRC-32 of all that matters: against a disk's errors, not against people."""
    layout = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()]
    value = isal_zlib.crc32(json.dumps([key, grid, layout]).encode())
    for tensor in tensors.values():
        value = isal_zlib.crc32(tensor.numpy().reshape(-1).view("u1").data, value)
    return f"{value:08x}"
