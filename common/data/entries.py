"""One prepared case as a file: safetensors with a checksum over all that matters, memory-mapped when read back."""

import json
from pathlib import Path

import torch
from isal import isal_zlib
from safetensors import SafetensorError, safe_open

from common.data.geometry import WorkingGrid
from common.data.preparation import PreparedCase
from common.files import atomic_path

_ALIGNMENT = 64
_DTYPES = {"image": (torch.float16, "F16"), "label": (torch.uint8, "U8")}


class UnusableEntryError(ValueError):
    """An entry that is damaged, or was made from other sources or with other parameters; the message says which."""


def write_entry(path: Path, case: PreparedCase, key: str) -> None:
    """Write a prepared case atomically.

    Args:
        path: the entry, NAME.safetensors.
        case: image [C, X, Y, Z] float16 and label [X, Y, Z] uint8 or None, on any device.
        key: a JSON object of all that decided the voxels; `read_entry` wants the same.

    Raises:
        OSError: the folder cannot be written or the disk is full; an older entry is then as it was.
    """
    tensors = {"image": case.image.cpu()}
    if case.label is not None:
        tensors["label"] = case.label.cpu()
    grid = json.dumps(case.grid.to_json())
    # Not safetensors.torch.save_file: it takes several times as long and raises its own error for a full disk.
    header: dict[str, object] = {
        "__metadata__": {"key": key, "grid": grid, "crc32": _checksum(key, grid, tensors)},
    }
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[name][1], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with atomic_path(path, flush=False) as part, part.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            stream.write(tensor.numpy().data)


def read_entry(path: Path, name: str, key: str, check: bool = True) -> PreparedCase:
    """Map a prepared case into memory and check it against its checksum.

    Nothing is copied: the tensors are pages of the file, read when touched; writing to them never reaches the file.

    Args:
        path: the entry.
        name: of the case.
        key: what `write_entry` was given.
        check: read every byte; False for an entry that this process has just written.

    Raises:
        FileNotFoundError: there is no such entry.
        UnusableEntryError: it is damaged, or its key is another one.
    """
    try:
        with safe_open(path, framework="pt") as stored:
            metadata = stored.metadata() or {}
            tensors = {part: stored.get_tensor(part) for part in stored.keys()}  # noqa: SIM118 - it is no dict
    except SafetensorError as error:
        raise UnusableEntryError(f"damaged: {error}") from error
    found, grid = metadata.get("key", ""), metadata.get("grid", "")
    if check and _checksum(found, grid, tensors) != metadata.get("crc32"):
        raise UnusableEntryError("damaged: its CRC-32 is not the one written with it")
    if found != key:
        raise UnusableEntryError(f"stale: {_what_changed(json.loads(found), json.loads(key))}")
    return PreparedCase(name, tensors["image"], tensors.get("label"), WorkingGrid.from_json(json.loads(grid)))


def _checksum(key: str, grid: str, tensors: dict[str, torch.Tensor]) -> str:
    """Return the CRC-32 of all that matters, which a disk's errors cannot keep; nobody is to be kept out by it."""
    layout = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()]
    value = isal_zlib.crc32(json.dumps([key, grid, layout]).encode())
    for tensor in tensors.values():
        value = isal_zlib.crc32(tensor.numpy().reshape(-1).view("u1").data, value)
    return f"{value:08x}"


def _what_changed(before: dict[str, object], now: dict[str, object]) -> str:
    return ", ".join(f"{name} {before.get(name)} is now {now[name]}" for name in now if before.get(name) != now[name])
