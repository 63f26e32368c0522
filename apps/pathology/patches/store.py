"""Patches decoded once: one uint8 array in a file, checked and memory-mapped on every later start."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from isal import isal_zlib
from PIL import Image
from tqdm import tqdm

from apps.pathology.patches.table import PatchTable
from apps.pathology.slides.reader import SlidePool
from common.data.crops import upload
from common.data.threads import map_in_threads
from common.files import atomic_path, write_json

Tier = Literal["gpu", "ram", "disk"]

_VERSION = 1
_AT_ONCE = 256  # patches in memory while a store is written
_CHECKED_AT_ONCE = 2**24  # bytes
IMAGES = {".png", ".jpg", ".jpeg", ".bmp"}


@dataclass(frozen=True, eq=False)
class Patches:
    """The patches of a table, decoded.

    Args:
        table: all of them.
        pixels: [M, 3, S, S] uint8, red, green, blue: pages of a file, read when touched, host memory, or the device.
        rows: [M] int64, ascending, whose pixels these are; those of the whole table by default.
    """

    table: PatchTable
    pixels: np.ndarray | torch.Tensor
    rows: np.ndarray | None = None

    def take(self, rows: np.ndarray, device: torch.device) -> torch.Tensor:
        """Return the pixels of some rows of the table on the device, [B, 3, S, S] uint8; the host does not wait."""
        places = rows if self.rows is None else np.searchsorted(self.rows, rows)
        if isinstance(self.pixels, torch.Tensor):
            return self.pixels.index_select(0, upload(places, self.pixels.device))
        return upload(self.pixels[places], device)

    def near(self, rows: np.ndarray, tier: Tier, device: torch.device) -> "Patches":
        """Return the patches of some rows as they are cut from: on the device, in host memory, or these pages."""
        if tier == "disk":
            return self
        pixels = torch.from_numpy(np.asarray(self.pixels)[rows])  # a copy in host memory
        return Patches(self.table, pixels.to(device) if tier == "gpu" else pixels.numpy(), rows)


def stored_patches(table: PatchTable, folder: Path, pool: SlidePool, workers: int | None, progress: bool) -> Patches:
    """Return the patches of a table from the folder where they lie there and are sound, else decoded now and kept.

    Args:
        table: which patches.
        folder: is made where it is missing; holds NAME.npy and NAME.json for each table.
        pool: reads the slides.
        workers: reading threads.
        progress: show a bar.

    Raises:
        OSError: the folder cannot be written, or has no room.
        ValueError: a file is damaged, or an image is not a square of the table's size.
    """
    path = folder / f"patches-{table.digest()[:16]}.npy"
    note = path.with_suffix(".json")
    if not _is_sound(path, note, table, progress):
        folder.mkdir(parents=True, exist_ok=True)
        _check_space(folder, table)
        crc = _write(path, table, pool, workers, progress)
        write_json(note, {"version": _VERSION, "table": table.digest(), "crc32": crc})
    return Patches(table, np.load(path, mmap_mode="r"))


def _is_sound(path: Path, note: Path, table: PatchTable, progress: bool) -> bool:
    """Return whether the file is what was written for this table, every byte of it."""
    if not (path.is_file() and note.is_file()):
        return False
    try:
        kept = json.loads(note.read_text(encoding="utf-8"))
        pixels = np.load(path, mmap_mode="r")
    except ValueError:
        return False
    if (kept.get("version"), kept.get("table")) != (_VERSION, table.digest()) or pixels.shape != _shape(table):
        return False
    return bool(kept.get("crc32") == _crc32(pixels, progress))


def _crc32(pixels: np.ndarray, progress: bool) -> int:
    crc, flat = 0, pixels.reshape(-1)
    blocks = range(0, flat.size, _CHECKED_AT_ONCE)
    for start in tqdm(blocks, "checking patches", unit="block", disable=not progress or len(blocks) < 64):
        crc = isal_zlib.crc32(flat[start : start + _CHECKED_AT_ONCE].data, crc)
    return crc


def _shape(table: PatchTable) -> tuple[int, int, int, int]:
    return len(table), 3, table.size, table.size


def _check_space(folder: Path, table: PatchTable) -> None:
    needed, free = int(np.prod(_shape(table), dtype=np.int64)), shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            f"{folder}: {len(table)} patches of {table.size} pixels need {needed / 2**30:.1f} GiB and "
            f"{free / 2**30:.1f} GiB are free; make room, choose another --store, or fewer --patches_per_slide"
        )


def _write(path: Path, table: PatchTable, pool: SlidePool, workers: int | None, progress: bool) -> int:
    """Decode all patches into one file; return its CRC-32. Patches of one slide are read together, in file order."""
    with atomic_path(path) as part:
        pixels = np.lib.format.open_memmap(part, mode="w+", dtype=np.uint8, shape=_shape(table))
        with tqdm(total=len(table), desc="decoding patches", unit="patch", disable=not progress) as bar:
            for rows in _reads(table):
                pixels[rows] = _read(table, rows, pool, workers)
                bar.update(len(rows))
        pixels.flush()
        return _crc32(pixels, progress=False)


def _reads(table: PatchTable) -> Iterator[np.ndarray]:
    """Yield the rows to read at a time: of one slide, or of several images."""
    order = np.argsort(table.file, kind="stable")
    is_image = np.array([file.suffix.lower() in IMAGES for file in table.files])[table.file[order]]
    ends = np.flatnonzero((np.diff(table.file[order]) != 0) & ~(is_image[1:] & is_image[:-1])) + 1
    for rows in np.split(order, ends):
        yield from np.split(rows, range(_AT_ONCE, len(rows), _AT_ONCE))


def _read(table: PatchTable, rows: np.ndarray, pool: SlidePool, workers: int | None) -> np.ndarray:
    """Return patches, of one slide or of images, as [M, 3, S, S] uint8."""
    files = [table.files[file] for file in table.file[rows]]
    if files[0].suffix.lower() in IMAGES:
        read = map_in_threads(lambda file: _read_image(file, table.size), files, "images", workers, progress=False)
        return np.stack(read).transpose(0, 3, 1, 2)
    with pool.use(files[0]) as slide:
        corners = table.corner[rows].astype(np.int64)
        return slide.read_many(corners, (table.size, table.size), workers=workers).transpose(0, 3, 1, 2)


def _read_image(file: Path, size: int) -> np.ndarray:
    try:
        with Image.open(file) as image:
            pixels = np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError) as error:
        raise ValueError(f"{file}: cannot be read as an image ({error}); copy it again") from error
    if pixels.shape != (size, size, 3):
        raise ValueError(
            f"{file}: {pixels.shape[1]} x {pixels.shape[0]} pixels; the first patch of the set has {size} x {size}, "
            "and all must be alike"
        )
    return pixels
