"""Post-processing of label maps: removal of unwanted connected components, chosen on validation cases."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from medspeed.common.data.geometry import box_above
from medspeed.common.inference.labels import LabelScheme, Region, case_dice

BOUND = 0.002
"""Least gain of Dice for which anything is chosen: the mean over the cases without the one that gains most."""
FEWEST_CASES = 4
"""Validation cases below which nothing is chosen."""
ROUNDING = 1e-6
"""Share of a voxel's volume that affines may lack, as they are stored."""
_SMALLEST_ML = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_CONNECTIVITY = 26  # voxels that share a corner belong together


@dataclass(frozen=True)
class Cleaning:
    """Removal of connected components (26 neighbors) of some structures.

    Args:
        structures: their names; a component is made of all of them together.
        largest: keep only the largest component; of equally large ones the one whose first slice, then row, then
            column comes first.
        smallest_ml: remove components smaller than this volume in ml.
    """

    structures: tuple[str, ...]
    largest: bool = False
    smallest_ml: float = 0.0

    def __post_init__(self) -> None:
        """Raise a ValueError for a volume that is none."""
        if not 0 <= self.smallest_ml < math.inf:
            raise ValueError(f"smallest_ml {self.smallest_ml}: must be a volume in ml; 0 keeps all")

    def numbers(self, labelling: LabelScheme) -> list[int]:
        """Return the label numbers of its structures."""
        named = (region for region in labelling.regions if region.name in self.structures)
        return sorted({number for region in named for number in region.members})

    def kept(self, sizes: np.ndarray, voxel_ml: float) -> np.ndarray:
        """Return which components stay, bool [N + 1], by their voxels [N + 1]; number 0, outside, has none."""
        kept = sizes >= math.ceil(self.smallest_ml / voxel_ml * (1 - ROUNDING))
        if self.largest:
            kept &= np.arange(len(sizes)) == sizes.argmax()
        kept[0] = True
        return kept

    def __str__(self) -> str:
        """Return the words for logs."""
        kept = "only the largest component" if self.largest else f"components of at least {self.smallest_ml:g} ml"
        return f"{', '.join(self.structures)}: {kept}"


@dataclass(frozen=True)
class Postprocessing:
    """What is done to the label maps of a model.

    Args:
        cleaning: steps, one after the other.
    """

    cleaning: tuple[Cleaning, ...] = ()


class CaseParts(NamedTuple):
    """The connected components of a validation case, from which the Dice after a `Cleaning` follows.

    Attributes:
        counts: of the whole label map, [R, 2] (see `dice_counts`).
        voxel_ml: volume of a voxel.
        tables: for each of `cleaned_together` voxels of each component and, for each of its regions, how many of them
            are true and how many are in the region, int64 [N + 1, 1 + 2 regions].
    """

    counts: torch.Tensor
    voxel_ml: float
    tables: list[np.ndarray]


def cleaned_together(labelling: LabelScheme) -> list[tuple[Region, ...]]:
    """Return the regions in groups whose components are those of all of them together.

    Exclusive labels are cleaned one by one, overlapping regions, such as those of a tumor, as one: otherwise an inner
    region could lose a component that the outer one keeps.
    """
    return [(region,) for region in labelling.regions] if labelling.exclusive else [labelling.regions]


def clean_by_hand(labelling: LabelScheme, largest: bool, smallest_ml: float) -> tuple[Cleaning, ...]:
    """Return one cleaning of all structures; none where it would keep everything."""
    groups = cleaned_together(labelling) if largest or smallest_ml else []
    return tuple(Cleaning(tuple(region.name for region in some), largest, smallest_ml) for some in groups)


def clean_labels(
    labels: np.ndarray, labelling: LabelScheme, voxel_ml: float, cleaning: Sequence[Cleaning]
) -> np.ndarray:
    """Return a label map [X, Y, Z] uint8 in which unwanted components are background; the given one is not modified."""
    cleaned = labels.copy(order="K") if cleaning else labels
    inside = cleaned[foreground(labels)]
    for step in cleaning:
        parts = connected_components(np.isin(inside, step.numbers(labelling)))
        inside[~step.kept(_sizes(parts), voxel_ml)[parts]] = 0
    return cleaned


def connected_components(mask: np.ndarray) -> np.ndarray:
    """Return the number, from 1, of the component that each voxel of a mask [X, Y, Z] lies in, 0 outside.

    They are numbered by their first voxel, in the order of slices, rows and columns.
    """
    import cc3d  # here: most trainings measure nothing

    # With a border of background: without one cc3d fails on some small or thin masks.
    bordered = np.pad(np.ascontiguousarray(mask.T), 1)
    return np.asarray(cc3d.connected_components(bordered, connectivity=_CONNECTIVITY)[1:-1, 1:-1, 1:-1].T)


def case_parts(
    labels: np.ndarray, truth: np.ndarray, labelling: LabelScheme, voxel_ml: float, counts: torch.Tensor
) -> CaseParts:
    """Return the components of a label map [X, Y, Z] with these `counts`, and how they agree with the truth."""
    box = foreground(labels)
    labels, truth, tables = labels[box], truth[box], []
    for group in cleaned_together(labelling):
        parts = connected_components(np.isin(labels, [number for region in group for number in region.members]))
        sizes = _sizes(parts)
        columns = [sizes]
        for region in group:
            found = np.isin(labels, region.members)
            both = found & np.isin(truth, region.members)
            columns += [np.bincount(parts[mask], minlength=len(sizes)) for mask in (both, found)]
        tables.append(np.stack(columns, axis=1))
    return CaseParts(counts, voxel_ml, tables)


def choose_cleaning(cases: Sequence[CaseParts], labelling: LabelScheme) -> tuple[tuple[Cleaning, ...], list[float]]:
    """Return the cleaning that gains most Dice on validation cases, and the Dice of each case after it.

    For each of `cleaned_together` that is the largest component, a smallest volume, or nothing where no gain exceeds
    `BOUND`.
    """
    counts, start = [case.counts for case in cases], 0
    chosen: list[Cleaning] = []
    for number, group in enumerate(cleaned_together(labelling)):
        rows, before = slice(start, start := start + len(group)), [case_dice(each) for each in counts]
        nothing = Cleaning(tuple(region.name for region in group))
        wishes = [*(replace(nothing, smallest_ml=volume) for volume in _SMALLEST_ML), replace(nothing, largest=True)]
        tried = [
            [_after(case, each, number, rows, wish) for case, each in zip(cases, counts, strict=True)]
            for wish in wishes
        ]
        gains = [robust_gain(before, [case_dice(each) for each in some]) for some in tried]
        best = max(range(len(wishes)), key=gains.__getitem__)
        if gains[best] > BOUND:
            chosen.append(wishes[best])
            counts = tried[best]
    return tuple(chosen), [case_dice(each) for each in counts]


def robust_gain(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the mean gain over two or more cases without the one that gains most: one case must not decide."""
    gains = sorted(new - old for old, new in zip(before, after, strict=True))[:-1]
    return sum(gains) / len(gains)


def _after(case: CaseParts, counts: torch.Tensor, number: int, rows: slice, wish: Cleaning) -> torch.Tensor:
    """Return the counts [R, 2] of a case after a cleaning of one group, which are the `rows`."""
    table = case.tables[number]
    lost = table[~wish.kept(table[:, 0], case.voxel_ml), 1:].sum(axis=0).reshape(-1, 2)
    counts = counts.clone()
    counts[rows] -= torch.from_numpy(lost)
    return counts


def _sizes(parts: np.ndarray) -> np.ndarray:
    return np.bincount(parts[parts > 0], minlength=1)


def foreground(labels: np.ndarray) -> tuple[slice, ...]:
    """Return the box of all structures in a label map [X, Y, Z]; an empty one where there are none."""
    box = box_above(torch.from_numpy(labels.T)[None], 0)  # [z, y, x], as the voxels lie in memory
    return tuple(slice(first, stop) for first, stop in reversed(box)) if box else (slice(0),) * 3
