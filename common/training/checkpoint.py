"""Checkpoints of a training: folders that are whole or absent, and whose bytes are known."""

import io
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from medspeed.common.files import flush_to_disk, names_folder, sha256_of
from medspeed.common.inference.model import UNREADABLE, first_line, load_weights, save_weights

_WEIGHTS, _STATE, _DIGEST = "weights.safetensors", "state.pt", "state.pt.sha256"
_PREFIX = "epoch-"


def save_checkpoint(
    folder: Path, position: tuple[int, int], weights: dict[str, torch.Tensor], state: dict[str, Any]
) -> Path:
    """Write a checkpoint as `folder/epoch-E-step-N`, point `folder/last` at it, then remove all but the one before.

    The folder appears by one rename after all bytes have reached the disk, so a process killed at any moment leaves the
    earlier checkpoint or the new one, each whole.

    Args:
        folder: of the run's checkpoints.
        position: the epoch, and the steps done in it.
        weights: state dict of the network.
        state: all else, in tensors and plain containers only.

    Raises:
        OSError: the disk is full or read-only; names the folder; the earlier checkpoint is then still there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / "{}{:06d}-step-{:06d}".format(_PREFIX, *position)
    stream = io.BytesIO()  # torch.save into a file says nothing of a full disk
    torch.save(state, stream)
    with names_folder(folder):
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=folder))
        try:
            save_weights(part / _WEIGHTS, weights, {})
            (part / _STATE).write_bytes(stream.getvalue())
            (part / _DIGEST).write_text(sha256_of(part / _STATE))
            for path in (part / _STATE, part / _DIGEST, part):
                flush_to_disk(path)
            if not final.exists():  # a resumed run stands where its checkpoint already is
                part.rename(final)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        link = folder / ".part-last"
        link.unlink(missing_ok=True)
        link.symlink_to(final.name)
        link.replace(folder / "last")
        flush_to_disk(folder)
    kept = [final, *[each for each in _complete(folder) if each < final][-1:]]  # the one before, until this is proven
    for other in set(_complete(folder)) - set(kept):
        shutil.rmtree(other)
    return final


def load_checkpoint(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
    """Return weights and state of the newest whole checkpoint below `folder`, or None; remove what is half-written.

    Raises:
        ValueError: it cannot be read, for instance a pickle that asks to run code, or its bytes have changed.
    """
    for left in folder.glob(".part-*"):
        # A link that was about to become `last` is a folder too, when asked.
        left.unlink() if left.is_symlink() or not left.is_dir() else shutil.rmtree(left)
    complete = _complete(folder)
    if not complete:
        return None
    newest = complete[-1]
    try:
        if (newest / _DIGEST).is_file() and (newest / _DIGEST).read_text() != sha256_of(newest / _STATE):
            raise ValueError(f"{_STATE} has changed since it was written")
        state = torch.load(newest / _STATE, map_location="cpu", weights_only=True)
        return load_weights(newest / _WEIGHTS), state
    except (*UNREADABLE, OSError) as error:
        remedy = f"resume from {complete[-2].name}" if len(complete) > 1 else "start over"
        raise ValueError(f"{newest}: cannot be loaded safely ({first_line(error)}); remove it to {remedy}") from error


def _complete(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if path.is_dir())
