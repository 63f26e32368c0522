"""Prepared cases on disk, made once: safetensors files with a checksum, and with a key of all that decided them."""

import hashlib
import json
import logging
import math
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch
from isal import isal_zlib
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from medspeed.common.data.dataset import Case
from medspeed.common.data.geometry import WorkingGrid
from medspeed.common.data.preparation import PREPARATION_VERSION, Preparation, PreparedCase, case_grid, prepare_case
from medspeed.common.data.volumes import read_header
from medspeed.common.files import atomic_path, from_json, locked


class UnusableEntryError(ValueError):
    """An entry that is damaged, or was made from other sources or with other parameters; the message says which."""


def prepared_case(case: Case, preparation: Preparation, allowed: Collection[int], folder: Path) -> PreparedCase:
    """Return a case prepared: memory-mapped from the folder if it is there and sound, else made and kept there.

    A stale or damaged entry is made anew, which is logged. Processes may share the folder: each entry is made by one of
    them and replaced whole. It is NAME.safetensors, so that each dataset and preparation had better have a folder.

    Raises:
        OSError: the folder cannot be written, or is full; the entries already there are kept.
        FileNotFoundError, ValueError: as `prepare_case`, which gets the `allowed` label numbers.
    """
    assert case.label is not None
    decisive = {
        "image": file_state(case.image),
        "label": file_state(case.label),
        "classes": sorted(allowed),
        "version": PREPARATION_VERSION,
        **asdict(preparation),
    }
    path, key = folder / f"{case.name}.safetensors", json.dumps(decisive, sort_keys=True)
    with suppress(FileNotFoundError, UnusableEntryError):
        return read_entry(path, case.name, key)
    with locked(folder / "locks" / f"{case.name}.lock"):
        try:
            return read_entry(path, case.name, key)  # made by another process while this one waited
        except FileNotFoundError:
            pass
        except UnusableEntryError as reason:
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

    Nothing is copied: the tensors are pages of the file, read when touched; writing to them never reaches the file.

    Raises:
        FileNotFoundError: there is no such entry.
        UnusableEntryError: it is damaged, or its key is another one.
    """
    try:
        with safe_open(path, framework="pt") as stored:
            about = json.loads((stored.metadata() or {}).get("about", "{}"))
            tensors = {part: stored.get_tensor(part) for part in stored.keys()}  # noqa: SIM118 - it is no dict
    except (SafetensorError, ValueError) as error:
        raise UnusableEntryError(f"damaged: {error}") from error
    found, grid = about.get("key", ""), about.get("grid", "")
    if check and _checksum(found, grid, tensors) != about.get("crc32"):
        raise UnusableEntryError("damaged: CRC-32 mismatch, or written by another version")
    if found != key:
        before, now = json.loads(found), json.loads(key)
        changed = [f"{part} {before.get(part)} is now {now[part]}" for part in now if before.get(part) != now[part]]
        raise UnusableEntryError(f"stale: {', '.join(changed)}")
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
