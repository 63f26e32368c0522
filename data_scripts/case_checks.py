"""Is a case fit for training: readable, finite, the label on the image's grid, its values among the names?"""

import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import nibabel as nib
import numpy as np

from common.data.cases import SUFFIXES
from common.data.volumes import Volume, check_same_grid, read_volume
from common.files import sha256_of
from data_scripts.raw_sets import RawCase, RawSet
from data_scripts.set_folder import on_all_cores

Item = TypeVar("Item")
Result = TypeVar("Result")

_MOST_AT_ONCE = 8  # a case of 512 x 512 x 1000 takes about three gigabytes while it is read

# A mask stored as float with a scale comes back some 1e-7 off; one that was resampled with interpolation far more.
MOST_OFF = 1e-3
_MOST_VALUES = 65_536  # of a label map, between the lowest and the highest
_AIR_BELOW = -200  # HU; air is -1000, and every CT of a body shows some

EMPTY = "the label is empty"
ROUNDED = "label values a little off whole numbers are rounded"
NO_AIR = f"no value below {_AIR_BELOW}: a CT in HU holds air, about -1000; is it rescaled, or no CT?"


@dataclass(frozen=True)
class Rules:
    """What a set's files must fit.

    Attributes:
        modality: the name of each channel.
        labels: the name of each label number.
        values: numbers in the files that stand for another number.
        rounds: label values a little off whole numbers will be rounded; where nothing is written they are an error.
    """

    modality: tuple[str, ...]
    labels: tuple[str, ...]
    values: Mapping[int, int]
    rounds: bool


@dataclass(frozen=True)
class Facts:
    """What a scan looks like.

    Attributes:
        shape: voxels along R, A, S.
        spacing: mm along R, A, S.
        orientation: where the file's axes point, such as "LPS".
        least: the lowest value of all channels.
        most: the highest.
        volumes: millilitres of each label number; empty without a label.
    """

    shape: tuple[int, ...]
    spacing: tuple[float, ...]
    orientation: str
    least: float
    most: float
    volumes: tuple[float, ...]


@dataclass(frozen=True)
class Finding:
    """What was found of a case.

    Attributes:
        case: as it lies.
        problems: why it cannot be used; empty where it can.
        notes: what is worth a look.
        facts: None where the image could not be read.
        relabelled: the label's values are not those of the file.
    """

    case: RawCase
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    facts: Facts | None
    relabelled: bool


def examine_all(raw: RawSet, rules: Rules, progress: bool = True) -> list[Finding]:
    """Examine every case of a set, the labelled ones first, under a progress bar."""
    return on_each((*raw.cases, *raw.test_cases), lambda case: examine(case, rules), "checking", progress)


def on_each(
    items: Sequence[Item], work: Callable[[Item], Result], description: str, progress: bool = True
) -> list[Result]:
    """Return `[work(item) for item in items]`, several at a time under a progress bar; the first error is raised."""
    done: dict[int, Result] = {}

    def one(index: int) -> None:
        done[index] = work(items[index])

    on_all_cores(one, range(len(items)), _MOST_AT_ONCE, description, "case", progress)
    return [done[index] for index in range(len(items))]


def examine(case: RawCase, rules: Rules) -> Finding:
    """Read a case and look for everything that is wrong with it, not just the first."""
    problems: list[str] = []
    notes: list[str] = []
    image = _attempt(problems, lambda: read_image(case, len(rules.modality)))
    path = case.label
    label = _attempt(problems, lambda: read_any(path)) if path else None
    if image and label:
        _attempt(problems, lambda: check_same_grid(image, label))
    numbers = _attempt(problems, lambda: read_numbers(label, rules)) if label else None
    if numbers is not None and label is not None:
        notes += [EMPTY] if not numbers.any() else []
        notes += [ROUNDED] if label.voxels.dtype.kind == "f" and (label.voxels % 1).any() else []
    relabelled = numbers is not None and label is not None and not np.array_equal(numbers, label.voxels)
    facts = _facts(image, numbers, len(rules.labels)) if image else None
    if facts and facts.least == facts.most:
        problems.append(f"{case.images[0]}: every voxel is {facts.least:g}: there is nothing to see")
    elif facts and _is_ct(rules.modality) and facts.least >= _AIR_BELOW:
        notes.append(NO_AIR)
    return Finding(case, tuple(problems), tuple(notes), facts, relabelled)


def read_any(path: Path, channels: int = 1) -> Volume:
    """Read a NIfTI file as `common.data.volumes.read_volume` does, its suffix in whatever case."""
    with _in_lower_case(path) as readable:
        try:
            return read_volume(readable, channels)
        except ValueError as error:
            raise ValueError(str(error).replace(str(readable), str(path))) from error


def read_image(case: RawCase, channels: int) -> Volume:
    """Read a case's image; files of one channel each are stacked to [X, Y, Z, C].

    Raises:
        FileNotFoundError, ValueError: a file cannot be read, or channels lie on different grids.
    """
    if len(case.images) == 1:
        return read_any(case.images[0], channels)
    parts = [read_any(path) for path in case.images]
    for number, part in enumerate(parts[1:], 1):
        try:
            check_same_grid(parts[0], part)
        except ValueError as error:
            raise ValueError(f"channel {number:04d} is not aligned with channel 0000: {error}") from error
    return Volume(np.stack([part.voxels for part in parts], axis=3), parts[0].affine, case.images[0])


def read_numbers(label: Volume, rules: Rules) -> np.ndarray:
    """Return a label map [X, Y, Z] uint8 with the numbers of `rules.labels`.

    Raises:
        ValueError: a value is no whole number, or has no name.
    """
    whole = np.rint(label.voxels) if label.voxels.dtype.kind == "f" else label.voxels
    off = float(np.abs(label.voxels - whole).max()) if whole is not label.voxels else 0.0
    if off > (MOST_OFF if rules.rounds else 0):
        raise ValueError(
            f"{label.path}: label values up to {off:.2g} off whole numbers, expected 0, 1, ...; "
            + (
                "was it resampled with interpolation? resample it with nearest neighbours"
                if off > MOST_OFF
                else "convert it"
            )
        )
    low, high = int(whole.min()), int(whole.max())
    if high - low >= _MOST_VALUES:
        raise ValueError(f"{label.path}: values from {low} to {high}: expected a label map, is it an image?")
    found = [int(number) + low for number in np.flatnonzero(_count(whole, low, high))]
    meant = {number: rules.values.get(number, number) for number in found}
    unnamed = [number for number, target in meant.items() if not 0 <= target < len(rules.labels)]
    if unnamed:
        named = ", ".join(f"{number} {name}" for number, name in enumerate(rules.labels))
        example = f"--values {unnamed[0]}=1" if unnamed[0] >= 0 else f"--values={unnamed[0]}=0"
        raise ValueError(
            f"{label.path}: found the values {_some(unnamed)}; named are {named}; name these too, or map them when "
            f"converting: {example}"
        )
    table = np.array([meant.get(number, 0) for number in range(low, high + 1)], np.uint8)
    return table[whole.astype(np.int32) - low]


def find_twins(cases: Sequence[RawCase]) -> list[tuple[str, ...]]:
    """Return the names of cases whose images are the same files, byte for byte: they would train and validate."""
    groups: dict[tuple[int, ...], list[RawCase]] = defaultdict(list)
    for case in cases:
        groups[tuple(path.stat().st_size for path in case.images)].append(case)
    twins: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for group in groups.values():
        for case in group if len(group) > 1 else ():
            twins[tuple(sha256_of(path) for path in case.images)].append(case.name)
    return [tuple(names) for names in twins.values() if len(names) > 1]


def _facts(image: Volume, numbers: np.ndarray | None, labels: int) -> Facts:
    axes = nib.orientations.io_orientation(image.affine)[:, 0].argsort()
    spacing = np.linalg.norm(image.affine[:3, :3], axis=0)
    millilitres = abs(float(np.linalg.det(image.affine[:3, :3]))) / 1000
    counts = [] if numbers is None else _count(numbers, 0, labels - 1).tolist()
    return Facts(
        shape=tuple(image.voxels.shape[axis] for axis in axes),
        spacing=tuple(float(spacing[axis]) for axis in axes),
        orientation="".join(nib.aff2axcodes(image.affine)),
        least=float(image.voxels.min()),
        most=float(image.voxels.max()),
        volumes=tuple(count * millilitres for count in counts),
    )


def _count(numbers: np.ndarray, low: int, high: int) -> np.ndarray:
    """Return how many voxels have each whole number from low to high."""
    counts = np.zeros(high - low + 1, np.int64)
    for index in range(numbers.shape[2]):  # slice by slice: bincount makes eight bytes of each voxel
        counts += np.bincount(numbers[..., index].astype(np.int64).ravel() - low, minlength=len(counts))
    return counts


def _attempt(problems: list[str], work: Callable[[], Result]) -> Result | None:
    """Return what `work` does; None where it says that a file is bad, which is kept."""
    try:
        return work()
    except (ValueError, OSError) as error:
        problems.append(str(error))
        return None


@contextmanager
def _in_lower_case(path: Path) -> Iterator[Path]:
    """Yield a name of the file that the reader takes: a link beside nothing else where the suffix is in capitals."""
    if path.name.endswith(SUFFIXES):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder) / path.name.lower()
        os.symlink(path.resolve(), link)  # noqa: PTH211
        yield link


def _is_ct(modality: Sequence[str]) -> bool:
    return all(name.strip().upper() == "CT" for name in modality)


def _some(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:5])) + (f" and {len(numbers) - 5} more" if numbers[5:] else "")
