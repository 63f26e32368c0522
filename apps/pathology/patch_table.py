"""Which patches there are: where each lies and what it shows, before any is decoded."""

import hashlib
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


def cut_validation(table: PatchTable, fraction: float, seed: int) -> tuple[PatchTable, PatchTable]:
    """Divide patches into those that train and those that validate: a share of those with tumour, and of those without.

    It depends on the seed, the files' names and the patches' places, not on their order. Patches of one slide may come
    on both sides: where their names say which slide they are from, give a split of your own.

    Args:
        table: the patches.
        fraction: that validates, above 0 and below 1.
        seed: of the choice.

    Returns:
        The patches to train on and those to validate on, each in the order of the table.

    Raises:
        ValueError: there are fewer than two patches of either label.
    """
    assert 0 < fraction < 1, fraction
    held = np.zeros(len(table), bool)
    names = [path.name for path in table.files]
    places = zip(table.file.tolist(), table.corner.tolist(), strict=True)
    keys = [hashlib.sha256(f"{seed}:{names[file]}:{corner}".encode()).digest() for file, corner in places]
    for label in (0, 1):
        rows = sorted(np.flatnonzero(table.label == label).tolist(), key=keys.__getitem__)
        if rows:
            held[rows[: min(max(round(fraction * len(rows)), 1), len(rows) - 1)]] = True
    if not held.any():
        raise ValueError(
            f"{len(table)} training patches: to hold one out for validation, two with tumour or two without are needed"
        )
    return table.take(~held), table.take(held)
