"""Checkpoints that are whole or absent: weights as safetensors, the rest of the training state beside them."""

import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from common.files import atomic_path, flush_to_disk

_WEIGHTS, _STATE = "weights.safetensors", "state.pt"
_PREFIX = "epoch-"

# What torch.load raises for a file that is no state, or one that asks to run code.
_UNREADABLE = (
    pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, IndexError, AttributeError, TypeError,
)  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on as if it had not stopped.

    Args:
        weights: state dict of the network.
        state: step, optimizer, loss scale, record so far: tensors and plain containers only.
    """

    weights: dict[str, torch.Tensor]
    state: dict[str, Any]


def save_checkpoint(
    folder: Path, position: tuple[int, int], weights: dict[str, torch.Tensor], state: dict[str, Any]
) -> Path:
    """Write a checkpoint as `folder/epoch-E-step-N`, point `folder/last` at it, then remove the older ones.

    `position` is the epoch and the steps done in it. The folder appears by one rename after all bytes have reached
    the disk, so a process killed at any moment leaves the earlier checkpoint or the new one, each whole.

    Raises:
        OSError: the disk is full or read-only; the earlier checkpoint is then still there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / "{}{:06d}-step-{:06d}".format(_PREFIX, *position)
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=folder))
    try:
        save_file(_contiguous(weights), part / _WEIGHTS)
        torch.save(state, part / _STATE)
        for path in (part / _WEIGHTS, part / _STATE, part):
            flush_to_disk(path)
        if not final.exists():  # a resumed run stands where its checkpoint already is
            part.rename(final)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    _point_last_at(folder, final.name)
    for older in _complete(folder):
        if older != final:
            shutil.rmtree(older)
    return final


def load_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the newest whole checkpoint below `folder`, or None where there is none.

    What a killed process left half-written is removed. Nothing stored is executed: the weights are safetensors, and
    the state is read with `weights_only=True`.

    Raises:
        ValueError: a checkpoint cannot be read, for instance a pickle that asks to run code.
    """
    for left in folder.glob(".part-*"):
        # A link that was about to become `last` is a folder too, when asked.
        left.unlink() if left.is_symlink() or not left.is_dir() else shutil.rmtree(left)
    complete = _complete(folder)
    if not complete:
        return None
    newest = complete[-1]
    try:
        state = torch.load(newest / _STATE, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        raise ValueError(
            f"{newest / _STATE}: not a training state that can be loaded safely ({_first_line(error)}); "
            f"remove {newest} to start over"
        ) from error
    return Checkpoint(load_weights(newest / _WEIGHTS), state)


def save_weights(path: Path, weights: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write a state dict as one safetensors file, atomically."""
    with atomic_path(path) as part:
        save_file(_contiguous(weights), part, metadata)


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """Read a state dict from our safetensors, or from a `.pt` / `.pth` state dict such as a MONAI bundle's.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or holds something else than tensors.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such weights file")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path}: not a whole safetensors file ({_first_line(error)})") from error
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        raise ValueError(
            f"{path}: not a state dict that can be loaded safely ({_first_line(error)}); "
            "give a .safetensors, or a .pt that holds tensors only"
        ) from error
    content = content.get("model", content) if isinstance(content, dict) else content
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise ValueError(f"{path}: expected a state dict of tensors, found {type(content).__name__}")
    return {name.removeprefix("module."): value for name, value in content.items()}


def read_metadata(path: Path) -> dict[str, str]:
    """Return the text that `save_weights` stored with the weights."""
    with safe_open(path, "pt") as stream:
        return dict(stream.metadata() or {})


def initialise(network: nn.Module, path: Path, rename: Callable[[str], str] = lambda name: name) -> None:
    """Load weights to fine-tune from; names, once `rename` has changed them, and shapes must be the network's.

    Raises:
        ValueError: names the first entries that are missing, left over, or of another shape.
    """
    weights, own = {rename(name): value for name, value in load_weights(path).items()}, network.state_dict()
    missing, extra = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    shapes = [
        f"{name} {tuple(weights[name].shape)} instead of {tuple(own[name].shape)}"
        for name in sorted(own.keys() & weights.keys())
        if own[name].shape != weights[name].shape
    ]
    if missing or extra or shapes:
        raise ValueError(
            f"{path}: does not fit this network; missing {missing[:3]}, left over {extra[:3]}, "
            f"other shapes {shapes[:3]}; set --channels and --residual_units to the weights' own"
        )
    network.load_state_dict(weights)


def _contiguous(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors as safetensors wants them: on the CPU, dense in row-major order, none sharing memory."""
    return {name: value.detach().cpu().contiguous().clone() for name, value in weights.items()}


def _complete(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if path.is_dir())


def _point_last_at(folder: Path, name: str) -> None:
    part = folder / f".part-{os.getpid()}"
    part.unlink(missing_ok=True)
    part.symlink_to(name)
    part.replace(folder / "last")
    flush_to_disk(folder)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
