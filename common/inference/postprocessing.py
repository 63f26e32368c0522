"""Post-processing of label maps: thresholds, and removal of connected components; its choice on validation cases."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from medspeed.common.data.geometry import box_above
from medspeed.common.inference.labels import LabelScheme, Region, case_dice, dice_counts

BOUND = 0.002  # of Dice: what gains less, as the mean over the cases without the one that gains most, is not chosen
FEWEST_CASES = 4  # that validate; of fewer nothing is chosen
ROUNDING = 1e-6  # of a voxel's volume: as affines are stored
_SMALLEST_ML = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_THRESHOLDS, _MOST_TRIED = (0.3, 0.7), 4  # of so many structures


@dataclass(frozen=True)
class Postprocessing:
    """A step of post-processing."""

    structures: tuple[str, ...]  # names; a connected component (26 neighbors) is made of all of them together
    largest: bool = False  # keep only the largest component; of equally large ones the first by slice, row and column
    smallest_ml: float = 0.0  # remove smaller components
    threshold: float = 0.5  # probability that their voxels must exceed (of exclusive labels against the background)

    def __post_init__(self) -> None:
        if not 0 <= self.smallest_ml < math.inf:
            raise ValueError(f"smallest_ml {self.smallest_ml}: must be a volume in ml; 0 keeps all")
        if not 0 < self.threshold < 1:
            raise ValueError(f"threshold {self.threshold}: must be a probability, above 0 and below 1")

    def numbers(self, labelling: LabelScheme) -> list[int]:
        """Return the label numbers of its structures."""
        return sorted({number for name in self.structures for number in labelling.structures[name]})

    def kept(self, sizes: np.ndarray, voxel_ml: float) -> np.ndarray:
        """Return which components stay, bool [N + 1], by their voxels [N + 1]; number 0, outside, has none."""
        kept = sizes >= self.smallest_ml / voxel_ml * (1 - ROUNDING)
        if self.largest:
            kept &= np.arange(len(sizes)) == sizes.argmax()
        kept[0] = True
        return kept

    def __str__(self) -> str:
        words = [f"threshold {self.threshold:g}"] if self.threshold != 0.5 else []
        words += ["only the largest component"] if self.largest else []
        words += [f"components of at least {self.smallest_ml:g} ml"] if self.smallest_ml else []
        return f"{', '.join(self.structures)}: {', '.join(words)}"


Steps = tuple[Postprocessing, ...]


class CaseParts(NamedTuple):
    """What the Dice of a validation case after any cleaning follows from."""

    counts: torch.Tensor  # of the whole label map, [R, 2] (see `dice_counts`)
    voxel_ml: float
    # for each of `cleaned_together`, int64 [N + 1, 1 + 2 regions]: voxels of each component, and of each region those
    tables: list[np.ndarray]  # that are true and those that there are


def cleaned_together(labelling: LabelScheme) -> list[tuple[Region, ...]]:
    """Return the regions in groups whose components are those of all of them together.

    Overlapping regions, such as those of a tumor, are one: an inner one must not lose what the outer one keeps.
    """
    numbers = [number for region in labelling.regions for number in region.members]
    return [(region,) for region in labelling.regions] if len(numbers) == len({*numbers}) else [labelling.regions]


def logit_bars(labelling: LabelScheme, steps: Steps) -> list[float]:
    """Return what is subtracted from each channel of logits so that the thresholds of the steps are 0."""
    bars = [0.0] * labelling.channels
    for number, region in enumerate(labelling.regions):
        bars[region.members[0] if labelling.exclusive else number] = sum(
            math.log(step.threshold / (1 - step.threshold)) for step in steps if region.name in step.structures
        )
    return bars


def over_bars(logits: torch.Tensor, labelling: LabelScheme, steps: Steps) -> torch.Tensor:
    """Return logits [K, ...] less their `logit_bars`; K == 1 is the difference of two classes."""
    bars = logit_bars(labelling, steps)[-len(logits) :]
    if not any(bars):
        return logits
    logits = logits.clone()
    for each, bar in zip(logits, bars, strict=True):
        each -= bar  # a scalar: a tensor of them would make the host wait for a GPU
    return logits


def connected_components(mask: np.ndarray) -> np.ndarray:
    """Return the number of the component (26 neighbors) of each voxel of [X, Y, Z], by first voxel; 0 outside."""
    import cc3d  # here: most trainings measure nothing

    # With a border of background: without one cc3d fails on some small or thin masks.
    bordered = np.pad(np.ascontiguousarray(mask.T), 1)
    return np.asarray(cc3d.connected_components(bordered, connectivity=26)[1:-1, 1:-1, 1:-1].T)


def case_parts(labels: np.ndarray, truth: np.ndarray, labelling: LabelScheme, voxel_ml: float) -> CaseParts:
    """Return the counts and components of a label map against the truth, both [X, Y, Z] uint8."""
    box, tables = foreground(np.maximum(labels, truth)), []
    labels, truth = (np.asfortranarray(each[box]) for each in (labels, truth))
    counts = dice_counts(torch.from_numpy(labels), torch.from_numpy(truth), labelling.regions)
    for group in cleaned_together(labelling):
        parts = connected_components(np.isin(labels, [number for region in group for number in region.members]))
        columns = [np.bincount(parts[parts > 0], minlength=1)]
        for region in group:
            found = np.isin(labels, region.members)
            both = found & np.isin(truth, region.members)
            columns += [np.bincount(parts[mask], minlength=len(columns[0])) for mask in (both, found)]
        tables.append(np.stack(columns, axis=1))
    return CaseParts(counts, voxel_ml, tables)


def thresholds(labelling: LabelScheme) -> list[Steps]:
    """Return the thresholds that `choose` tries, each of one structure; none of many structures: each takes seconds."""
    regions = labelling.regions if len(labelling.regions) <= _MOST_TRIED else ()
    return [(Postprocessing((each.name,), threshold=value),) for each in regions for value in _THRESHOLDS]


def choose(cases: Sequence[Mapping[Steps, CaseParts]], labelling: LabelScheme) -> tuple[Steps, list[float]]:
    """Return what gains most Dice on validation cases, and the Dice of each case after it.

    That is the threshold of one structure, and then for each of `cleaned_together` the largest component or a smallest
    volume; each only where it gains more than `BOUND`. Each case has its parts under () and each of `thresholds`.
    """
    before = [case_dice(case[()].counts) for case in cases]
    gains = {each: robust_gain(before, [case_dice(case[each].counts) for case in cases]) for each in cases[0]}
    best = max(gains, key=gains.__getitem__)
    chosen = best if gains[best] > BOUND else ()
    parts, start = [case[chosen] for case in cases], 0
    for number, group in enumerate(cleaned_together(labelling)):
        before = [case_dice(case.counts) for case in parts]
        rows = slice(start, start := start + len(group))
        nothing = Postprocessing(tuple(region.name for region in group))
        wishes = [*(replace(nothing, smallest_ml=volume) for volume in _SMALLEST_ML), replace(nothing, largest=True)]
        tried = {wish: [_after(case, number, rows, wish) for case in parts] for wish in wishes}
        gain = {wish: robust_gain(before, [case_dice(case.counts) for case in some]) for wish, some in tried.items()}
        wish = max(wishes, key=gain.__getitem__)
        if gain[wish] > BOUND:
            chosen, parts = (*chosen, wish), tried[wish]
    return chosen, [case_dice(case.counts) for case in parts]


def robust_gain(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the mean gain over two or more cases without the one that gains most: one case must not decide."""
    gains = sorted(new - old for old, new in zip(before, after, strict=True))[:-1]
    return sum(gains) / len(gains)


def _after(case: CaseParts, number: int, rows: slice, wish: Postprocessing) -> CaseParts:
    """Return a case after a cleaning of one group, whose counts are the `rows`."""
    table, counts = case.tables[number], case.counts.clone()
    counts[rows] -= torch.from_numpy(table[~wish.kept(table[:, 0], case.voxel_ml), 1:].sum(axis=0).reshape(-1, 2))
    return case._replace(counts=counts)


def foreground(labels: np.ndarray) -> tuple[slice, ...]:
    """Return the box of all structures in a label map [X, Y, Z]; an empty one where there are none."""
    box = box_above(torch.from_numpy(labels.T)[None], 0)  # [z, y, x], as the voxels lie in memory
    return tuple(slice(first, stop) for first, stop in reversed(box)) if box else (slice(0),) * 3
