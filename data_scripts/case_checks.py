"""Is a case fit for training: readable, finite, the label on the image's grid, its values among the names?"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import nibabel as nib
import numpy as np

from common.data.volumes import Volume, check_same_grid, read_volume
from common.files import sha256_of
from data_scripts.raw_sets import RawCase, RawSet

Result = TypeVar("Result")

# A mask stored as float with a scale comes back some 1e-7 off; one that was resampled with interpolation far more.
MOST_OFF = 1e-3
_MOST_VALUES = 65_536  # of a label map, between the lowest and the highest
_AIR_BELOW = -200  # HU; air is -1000, and every CT of a body shows some


@dataclass
class Finding:
    """What was found of a case; what lies behind `relabelled` is not set where the image could not be read.

    Attributes:
        case: as it lies.
        problems: why it cannot be used; empty where it can.
        notes: what is worth a look.
        relabelled: the label's values are not those of the file.
        shape: voxels along R, A, S.
        spacing: mm along R, A, S.
        orientation: where the file's axes point, such as "LPS".
        least: the lowest value of all channels.
        most: the highest.
        volumes: millilitres of each label number; empty without a label.
    """

    case: RawCase
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    relabelled: bool = False
    shape: tuple[int, ...] = ()
    spacing: tuple[float, ...] = ()
    orientation: str = ""
    least: float = 0
    most: float = 0
    volumes: tuple[float, ...] = ()


def examine(case: RawCase, raw: RawSet) -> Finding:
    """Read a case and look for everything that is wrong with it, not just the first."""
    found, path = Finding(case), case.label
    image = _attempt(found, lambda: read_image(case, len(raw.modality)))
    label = _attempt(found, lambda: read_volume(path)) if path else None
    numbers = _attempt(found, lambda: read_numbers(label, raw)) if label else None
    if label and numbers is not None:
        if not numbers.any():
            found.notes.append("the label is empty")
        if label.voxels.dtype.kind == "f" and (label.voxels % 1).any():
            found.notes.append("label values a little off whole numbers are rounded")
        found.relabelled = not np.array_equal(numbers, label.voxels)
    if image and label:
        _attempt(found, lambda: check_same_grid(image, label))
    if image:
        _describe(found, image, numbers, raw)
    return found


def _describe(found: Finding, image: Volume, numbers: np.ndarray | None, raw: RawSet) -> None:
    """Set what a scan looks like, and look at its intensities."""
    axes = nib.orientations.io_orientation(image.affine)[:, 0].argsort()
    spacing = np.linalg.norm(image.affine[:3, :3], axis=0)
    found.shape = tuple(image.voxels.shape[axis] for axis in axes)
    found.spacing = tuple(float(spacing[axis]) for axis in axes)
    found.orientation = "".join(nib.aff2axcodes(image.affine))
    found.least, found.most = float(image.voxels.min()), float(image.voxels.max())
    if numbers is not None:
        millilitres = abs(float(np.linalg.det(image.affine[:3, :3]))) / 1000
        found.volumes = tuple((_count(numbers, 0, len(raw.labels) - 1) * millilitres).tolist())
    if found.least == found.most:
        found.problems.append(f"{found.case.images[0]}: every voxel is {found.least:g}: there is nothing to see")
    elif all(name.strip().upper() == "CT" for name in raw.modality) and found.least >= _AIR_BELOW:
        air = "a CT in HU holds air, about -1000; is it rescaled, or no CT?"
        found.notes.append(f"no value below {_AIR_BELOW}: {air}")


def read_image(case: RawCase, channels: int) -> Volume:
    """Read a case's image; files of one channel each are stacked to [X, Y, Z, C].

    Raises:
        FileNotFoundError, ValueError: a file cannot be read, or channels lie on different grids.
    """
    if len(case.images) == 1:
        return read_volume(case.images[0], channels)
    parts = [read_volume(path) for path in case.images]
    for number, part in enumerate(parts[1:], 1):
        try:
            check_same_grid(parts[0], part)
        except ValueError as error:
            raise ValueError(f"channel {number:04d} is not aligned with channel 0000: {error}") from error
    return Volume(np.stack([part.voxels for part in parts], axis=3), parts[0].affine, case.images[0])


def read_numbers(label: Volume, raw: RawSet) -> np.ndarray:
    """Return a label map [X, Y, Z] uint8 with the numbers of `raw.labels`.

    Raises:
        ValueError: a value is no whole number, or has no name.
    """
    whole = np.rint(label.voxels) if label.voxels.dtype.kind == "f" else label.voxels
    off = float(np.abs(label.voxels - whole).max()) if whole is not label.voxels else 0.0
    if off > (MOST_OFF if raw.rounds else 0):
        interpolated = "was it resampled with interpolation? resample it with nearest neighbours"
        remedy = interpolated if off > MOST_OFF else "convert it"
        raise ValueError(f"{label.path}: label values up to {off:.2g} off whole numbers, expected 0, 1, ...; {remedy}")
    low, high = int(whole.min()), int(whole.max())
    if high - low >= _MOST_VALUES:
        raise ValueError(f"{label.path}: values from {low} to {high}: expected a label map, is it an image?")
    found = [int(number) + low for number in np.flatnonzero(_count(whole, low, high))]
    meant = {number: raw.values.get(number, number) for number in found}
    named = {number: f"{number} {name}" for number, name in enumerate(raw.labels) if name}
    unnamed = [number for number, target in meant.items() if target not in named]
    if unnamed:
        few = ", ".join(map(str, unnamed[:5])) + (f" and {len(unnamed) - 5} more" if unnamed[5:] else "")
        example = f"--values {unnamed[0]}=1" if unnamed[0] >= 0 else f"--values={unnamed[0]}=0"
        remedy = f"name these too, or map them when converting: {example}"
        raise ValueError(f"{label.path}: found the values {few}; named are {', '.join(named.values())}; {remedy}")
    table = np.array([meant.get(number, 0) for number in range(low, high + 1)], np.uint8)
    return table[whole.astype(np.int32) - low]


def find_twins(cases: Sequence[RawCase]) -> list[tuple[str, ...]]:
    """Return the names of cases whose images are the same files, byte for byte: they would train and validate."""
    by_size: dict[tuple[int, ...], list[RawCase]] = defaultdict(list)
    for case in cases:
        by_size[tuple(path.stat().st_size for path in case.images)].append(case)
    twins: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for group in by_size.values():
        for case in group if len(group) > 1 else ():
            twins[tuple(sha256_of(path) for path in case.images)].append(case.name)
    return [tuple(names) for names in twins.values() if len(names) > 1]


def _count(numbers: np.ndarray, low: int, high: int) -> np.ndarray:
    """Return how many voxels have each whole number from low to high."""
    counts = np.zeros(high - low + 1, np.int64)
    for index in range(numbers.shape[2]):  # slice by slice: bincount makes eight bytes of each voxel
        counts += np.bincount(numbers[..., index].astype(np.int64).ravel() - low, minlength=len(counts))
    return counts


def _attempt(found: Finding, work: Callable[[], Result]) -> Result | None:
    """Return what `work` does; None where it says that a file is bad, which is kept."""
    try:
        return work()
    except (ValueError, OSError) as error:
        found.problems.append(str(error))
        return None
