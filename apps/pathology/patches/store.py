"""Patches decoded once: one uint8 array in a file, checked, memory-mapped, held near the device and augmented on it."""

import math
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tokenize import TokenError
from weakref import WeakKeyDictionary

import numpy as np
import torch
from isal import isal_zlib
from tqdm import tqdm

from medspeed.apps.pathology.config import PathologyConfig
from medspeed.apps.pathology.patches.augment import FUSED, augment, draw_patches, draw_table
from medspeed.apps.pathology.patches.table import PatchTable, decode
from medspeed.common.clock import Clock
from medspeed.common.console import hides_bar
from medspeed.common.data.batches import Batch, Batches, Draft, Take, keyed_batches, keyed_uniforms, partition_cases
from medspeed.common.data.cache import measure_budgets, store_folder
from medspeed.common.data.crops import upload
from medspeed.common.data.threads import map_in_threads, usable_cores
from medspeed.common.files import atomic_path, locked, part_ending, read_object, write_json
from medspeed.common.kernels.trust import trusts
from medspeed.common.run import Run
from medspeed.common.training.config import decided
from medspeed.common.training.setup import batch_trials, dtype_of, trust_kernels

_SENT_AT_ONCE = 2**28  # bytes of patches that threads gather, and that are sent to the device, in one go
_CHECKED_AT_ONCE = 2**24  # bytes
_TOLD = WeakKeyDictionary[Clock, set[str]]()  # of each run, by its clock: which slides are damaged
_ORDER = 2**61  # in the place of a stream number, so that the order and the augmentation never share random numbers


@dataclass(frozen=True, eq=False)
class Patches:
    """The patches of a table, decoded."""

    table: PatchTable
    pixels: np.ndarray | torch.Tensor  # [M, 3, S, S] uint8 RGB: pages of a file, read when touched, or on the device
    rows: np.ndarray | None = None  # of the table, [M] int64, ascending; None of all

    def take(self, rows: np.ndarray, device: torch.device) -> torch.Tensor:
        """Return the pixels of some rows of the table on the device, [B, 3, S, S] uint8; the host does not wait."""
        places = self.places(rows)
        if isinstance(self.pixels, torch.Tensor):
            return self.pixels.index_select(0, upload(places, self.pixels.device))
        return upload(self.pixels[places], device)

    def places(self, rows: np.ndarray) -> np.ndarray:
        """Return where in `pixels` some rows of the table lie."""
        return rows if self.rows is None else np.searchsorted(self.rows, rows)

    def on_device(self, rows: np.ndarray, device: torch.device) -> "Patches":
        """Return the patches of some rows, ascending, with their pixels on the device; the host never holds all.

        Threads fill a buffer, pinned for a GPU, which is then sent.
        """
        shape, pin = self.pixels.shape[1:], device.type == "cuda"
        at_once = max(1, min(len(rows), _SENT_AT_ONCE // math.prod(shape)))
        sent = torch.empty((len(rows), *shape), dtype=torch.uint8, device=device)
        buffer = torch.empty((at_once, *shape), dtype=torch.uint8, pin_memory=pin)
        for first in range(0, len(rows), at_once):
            some = rows[first : first + at_once]
            parts = (np.array_split(each, usable_cores()) for each in (some, buffer.numpy()[: len(some)]))
            # The mode "raise" would write a copy first.
            map_in_threads(lambda part: np.take(self.pixels, part[0], 0, part[1], "clip"), [*zip(*parts, strict=True)])
            sent[first : first + len(some)].copy_(buffer[: len(some)])
        return Patches(self.table, sent, rows)


def decoded(table: PatchTable, config: PathologyConfig, run: Run) -> Patches:
    """Return patches from the store, decoded now where it lacks them or they are damaged; the leader is the first.

    Raises:
        OSError: the store cannot be written, or has no room.
        ValueError: a file is damaged, or an image is not a square of the table's size.
    """
    path = store_folder(config.store / "patches", table.files[0].parent) / f"patches-{table.digest()[:16]}.npy"
    with run.clock.stage("prepare"):
        run.ranks.once(lambda: _keep(path, table, config, run))
        if not run.ranks.leader:
            _keep(path, table, config, run)  # nothing is left to do, but in a store of its own
        return Patches(table, np.load(path, mmap_mode="r"))


def _keep(path: Path, table: PatchTable, config: PathologyConfig, run: Run) -> None:
    """Decode patches into a file, and note its checksum beside it, where these are not there and sound."""
    note, shape, leads = path.with_suffix(".json"), (len(table), 3, table.size, table.size), run.ranks.leader
    # Copying tools set back the other time, in the name; of damaged tiles readers make different pixels.
    changed, damaged = sum(file.stat().st_ctime_ns for file in table.files), list[str]()
    made = {"changed": changed, "reader": "" if table.whole else config.reader}

    def sound() -> bool:
        with suppress(FileNotFoundError, ValueError, EOFError, TokenError):  # two of NumPy's, of a damaged header
            kept, pixels = read_object(note), np.load(path, mmap_mode="r")
            if pixels.shape == shape and kept.items() >= made.items() and kept.get("crc32") == _crc32(pixels, leads):
                damaged[:] = kept["damaged"]
                return True
        return False

    if sound():
        return _tell(damaged, run)
    with locked(path.with_suffix(".lock")) as alone:
        if sound():  # another process has made it
            return _tell(damaged, run)
        for part in path.parent.glob(f".part-????????-{part_ending(path.name)}") if alone else ():  # of a killed one
            part.unlink()
        needed, free = math.prod(shape), shutil.disk_usage(path.parent).free
        if needed > free:
            said = f"need {needed / 2**30:.1f} GiB, {free / 2**30:.1f} is free; free some space, choose another --store"
            raise OSError(f"{path.parent}: {len(table)} patches of {table.size} pixels {said}, or fewer patches")
        with atomic_path(path) as part:
            pixels = np.lib.format.open_memmap(part, mode="w+", dtype=np.uint8, shape=shape)
            with part.open("r+b") as file:  # all its room is taken now: a disk that fills later would kill the process
                os.posix_fallocate(file.fileno(), 0, part.stat().st_size)
            with tqdm(total=len(table), desc="decoding patches", unit="patch", disable=hides_bar(not leads)) as bar:
                for rows, read in decode(table, config.reader, config.workers, lambda line, _: damaged.append(line)):
                    pixels[rows] = read
                    bar.update(len(rows))
            pixels.flush()
            crc = _crc32(pixels, progress=False)
        write_json(note, {"crc32": crc, **made, "damaged": damaged})
        _tell(damaged, run)


def _tell(damaged: Sequence[str], run: Run) -> None:
    """Say what of the slides is damaged, once in a run, which asks for its patches more than once."""
    told = _TOLD.setdefault(run.clock, set())
    for line in damaged:
        if line not in told:
            told.add(line)
            run.say(line, "warning")


def _crc32(pixels: np.ndarray, progress: bool) -> int:
    crc, flat = 0, pixels.reshape(-1)
    blocks = range(0, flat.size, _CHECKED_AT_ONCE)
    for start in tqdm(blocks, "checking patches", unit="block", disable=hides_bar(not progress), delay=2):
        crc = isal_zlib.crc32(flat[start : start + _CHECKED_AT_ONCE].data, crc)
    return crc


def resident_batches(table: PatchTable, config: PathologyConfig, run: Run) -> Batches:
    """Return this rank's batches of a decided configuration, its patches held on the GPU where they fit."""
    partitions = decided(config.parallel.partitions)
    here = range(run.ranks.rank, partitions, run.ranks.world)
    rows = np.sort(np.concatenate([partition_cases(len(table), partitions, number) for number in here]))
    held = hold(decoded(table, config, run), rows, 0, config, run)
    place = "GPU memory" if isinstance(held.pixels, torch.Tensor) else "the store's pages"
    run.say(f"cache: {len(rows)} patches, {len(rows) * 3 * table.size**2 / 2**20:.0f} MiB, in {place}")
    batches = patch_batches(held, here, config, run.device)
    kernels = zlib.crc32(Path(__file__).with_name("augment_triton.py").read_bytes())
    about = f"{config.batch_size} x {table.size}, {config.precision}, {kernels}"
    trust_kernels(batch_trials(FUSED, batches, dtype_of(config.precision), about), config, run)
    return batches


def hold(patches: Patches, rows: np.ndarray, beside: int, config: PathologyConfig, run: Run) -> Patches:
    """Return patches of some rows on the GPU where they fit, and so many more that are held later; else as they are."""
    needed = (len(rows) + beside) * 3 * patches.table.size**2
    fits = needed <= measure_budgets(run.device, config.store).get("gpu", -1)
    with run.clock.stage("cache"):
        return patches.on_device(rows, run.device) if fits else patches


def rank_rows(patches: Patches, run: Run) -> np.ndarray:
    """Return the rows of the table that this rank judges, ascending int64."""
    return np.arange(run.ranks.rank, len(patches.table), run.ranks.world)


def patch_batches(patches: Patches, here: Sequence[int], config: PathologyConfig, device: torch.device) -> Batches:
    """Return batches of a decided configuration, in random order, of the partitions here, whose patches are held.

    They are image [B, 3, S, S] in [-1, 1], float32 unless made by fused kernels, and label [B] float32. A pass over
    all leaves out what fills no batch; each epoch goes on where the last one ended. No full batch is a ValueError.
    """
    count, partitions = len(patches.table), decided(config.parallel.partitions)
    each = decided(config.batch_size) // partitions
    per_pass = count // partitions // each
    if not per_pass:
        said = f"{count} training patches in {partitions} partitions do not fill one batch"
        raise ValueError(f"batch_size {config.batch_size}: {said}; choose a smaller one, or more patches")
    held = patches.pixels if isinstance(patches.pixels, torch.Tensor) else None
    steps = min(per_pass, (config.patches_per_epoch or count) // partitions // each)

    @contextmanager
    def shuffled(rows: np.ndarray, epoch: int) -> Iterator[Take]:
        """Yield what takes and augments patches of some rows in an epoch, in an order of each pass over them."""
        first, length, table = epoch * steps * each, per_pass * each, patches.table
        orders = {}
        for number in range(first // length, (first + steps * each - 1) // length + 1):
            draws = keyed_uniforms(config.seed, number, rows, np.full(len(rows), _ORDER), 1)[:, 0]
            orders[number] = rows[np.argsort(draws, kind="stable")]

        def take(part: slice) -> Batch:
            number, start = divmod(first + part.start, length)
            some = orders[number][start : start + part.stop - part.start]
            draw = draw_patches(config.augmentation, config.seed, number, some, table.size)
            label = table.label[some].astype(np.float32)
            names = tuple(table.files[file].stem for file in table.file[some])
            if held is not None and trusts(FUSED, held):
                from medspeed.apps.pathology.patches.augment_triton import augmented

                form = dtype_of(config.precision), config.channels_last
                make = lambda rows, label: (augmented(held, rows, *form), label)  # noqa: E731
                return Draft(device, [draw_table(draw, patches.places(some)), label], make, id(held), names)
            return Batch(augment(patches.take(some, device), draw), upload(label, device), names)

        yield take

    parts = [partial(shuffled, partition_cases(count, partitions, number)) for number in here]
    return keyed_batches(parts, steps, each, device if held is None else None)
