"""Which patches there are: where each lies and what it shows, before any is decoded."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np


@dataclass(frozen=True, eq=False)
class PatchTable:
    """Squares of slides, or image files.

    Attributes:
        files: slides, or images of one patch each.
        file: [N] int32, index into `files`.
        corner: [N, 2] int32, (x, y) of the upper left corner in pixels of level 0; (0, 0) of image files.
        label: [N] uint8, 1 for tumour.
        size: side of a patch in pixels.
    """

    files: tuple[Path, ...]
    file: np.ndarray
    corner: np.ndarray
    label: np.ndarray
    size: int

    def __post_init__(self) -> None:
        """Check shapes and types."""
        assert self.file.dtype == self.corner.dtype == np.int32, (self.file.dtype, self.corner.dtype)
        assert self.label.dtype == np.uint8, self.label.dtype
        assert self.corner.shape == (len(self.file), 2), self.corner.shape
        assert self.label.shape == self.file.shape == (len(self.file),), (self.label.shape, self.file.shape)

    def __len__(self) -> int:
        return len(self.file)

    def take(self, rows: np.ndarray) -> "PatchTable":
        """Return the patches of some rows, [M] integers or [N] bool, in that order; `files` stays as it is."""
        return replace(self, file=self.file[rows], corner=self.corner[rows], label=self.label[rows])

    def digest(self) -> str:
        """Return the SHA-256 of all that decides the pixels and labels, as 64 hexadecimal digits.

        Of a file count its name, its size and when it was changed, so that a set may move to another folder.

        Raises:
            FileNotFoundError: a file is gone.
        """
        found = hashlib.sha256(f"{self.size} {len(self)}\n".encode())
        for path in self.files:
            status = path.stat()
            found.update(f"{path.name}\0{status.st_size} {status.st_mtime_ns}\n".encode())
        for array in (self.file, self.corner, self.label):
            found.update(np.ascontiguousarray(array).data)
        return found.hexdigest()


def hold_out(labels: np.ndarray, names: Sequence[str], fraction: float, seed: int) -> np.ndarray:
    """Return which slides or patches validate, [N] bool: a share of those with tumour, and of those without.

    It depends on the seed and on the names, not on their order. Where there are two or more of a kind, each side gets
    one at least; a single one trains.

    Args:
        labels: [N], 1 for tumour.
        names: of the N, each its own.
        fraction: that validates, above 0 and below 1.
        seed: of the choice.

    Raises:
        ValueError: there are fewer than two of either kind.
    """
    assert 0 < fraction < 1, fraction
    held = np.zeros(len(names), bool)
    keys = [hashlib.sha256(f"{seed}:{name}".encode()).digest() for name in names]
    for label in (0, 1):
        rows = sorted(np.flatnonzero(labels == label).tolist(), key=keys.__getitem__)
        held[rows[: min(max(round(fraction * len(rows)), 1), len(rows) - 1)] if rows else []] = True
    if not held.any():
        raise ValueError(
            f"{len(names)} to train on: to hold one out for validation, two with tumour or two without are needed"
        )
    return held
