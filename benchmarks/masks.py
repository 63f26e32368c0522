"""How far the label maps that two ways of inference wrote agree."""

from collections.abc import Sequence
from pathlib import Path

import nibabel
import numpy as np


def read_mask(path: Path, members: Sequence[int]) -> np.ndarray:
    """Return where a label map has one of these labels, bool [X, Y, Z]."""
    found: np.ndarray = np.isin(np.asarray(nibabel.load(path).dataobj), members)
    return found


def dice(one: np.ndarray, other: np.ndarray) -> float:
    """Return the Dice of two masks; 1 where both are empty."""
    voxels = int(one.sum()) + int(other.sum())
    return 2 * int((one & other).sum()) / voxels if voxels else 1.0


def least_dice(pairs: Sequence[tuple[Path, Path]], regions: Sequence[Sequence[int]]) -> float:
    """Return the lowest Dice over pairs of label maps and regions, to five decimals."""
    return round(min(dice(*(read_mask(path, each) for path in pair)) for pair in pairs for each in regions), 5)


def mean_dice(pairs: Sequence[tuple[Path, Path]], regions: Sequence[Sequence[int]]) -> float:
    """Return the mean Dice over pairs of label maps and regions, to four decimals."""
    found = [dice(*(read_mask(path, each) for path in pair)) for pair in pairs for each in regions]
    return round(float(np.mean(found)), 4)


def voxels_that_differ(pairs: Sequence[tuple[Path, Path]], members: Sequence[int]) -> int:
    """Return in how many voxels the masks of these labels differ, summed over pairs of label maps."""
    return sum(int(np.not_equal(*(read_mask(path, members) for path in pair)).sum()) for pair in pairs)
