"""What the channels of logits stand for: classes that exclude each other, or regions that overlap; and their Dice."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch


@dataclass(frozen=True)
class Region:
    """A structure that quality is measured on, such as "WT", made of the labels of some numbers.

    A voxel in it gets the label `value`, unless it also lies in a region of fewer members.
    """

    name: str
    members: tuple[int, ...]
    value: int

    def mask(self, labels: torch.Tensor) -> torch.Tensor:
        """Return where a label map lies in the region, bool, of the same shape and on the same device."""
        found = labels == self.members[0]
        for number in self.members[1:]:
            found |= labels == number
        return found


@dataclass(frozen=True)
class LabelScheme:
    """Meaning of logits: of exclusive labels [labels, ...], unused numbers included, the highest wins (softmax).

    Else they are [regions, ...], and each region lies where its own is above 0 (sigmoid).
    """

    labels: tuple[str, ...]  # name of each label number, background first; "" for a number that is not used
    regions: tuple[Region, ...]  # the structures; if `exclusive`, one for each label that is used, but the background
    exclusive: bool

    def __post_init__(self) -> None:
        numbers, names = range(min(len(self.labels), 256)), [region.name for region in self.regions]
        known = all(region.members and {*region.members, region.value} <= {*numbers} for region in self.regions)
        if not known or len(set(names)) < len(names):
            raise ValueError(f"regions {names}: each needs its own name and numbers of the {len(numbers)} labels")

    @property
    def channels(self) -> int:
        """Channels of the network's output."""
        return len(self.labels if self.exclusive else self.regions)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Label numbers that a file may hold."""
        return tuple(number for number, name in enumerate(self.labels) if name)

    @property
    def structures(self) -> dict[str, tuple[int, ...]]:
        """Label numbers of each region, by its name."""
        return {region.name: region.members for region in self.regions}

    def labels_of(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the label of each voxel, uint8 [X, Y, Z] on the same device; of (nearly) equal logits the lower.

        The logits are [K, X, Y, Z]; K == 1 of two exclusive classes is their difference foreground - background.
        """
        if not self.exclusive:
            return painted(self.regions, logits.__getitem__)
        if len(logits) < 3:
            return (logits[-1] > (logits[0] if len(logits) == 2 else 0)).to(torch.uint8)
        return painted(self.regions, lambda number: logits[self.regions[number].value] - logits[0])  # no argmax: slow


def one_region_per_label(labels: Sequence[str]) -> LabelScheme:
    """Return the scheme of classes that exclude each other."""
    regions = (Region(name, (number,), number) for number, name in enumerate(labels) if number and name)
    return LabelScheme(tuple(labels), tuple(regions), exclusive=True)


def painting_order(regions: Sequence[Region]) -> list[list[int]]:
    """Return the numbers of the regions in groups of equally many members, as they are painted: of many first."""
    order = sorted(range(len(regions)), key=lambda number: -len(regions[number].members))
    return [[*group] for _, group in groupby(order, key=lambda number: len(regions[number].members))]


def painted(regions: Sequence[Region], logits_of: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Return the labels, uint8 [X, Y, Z], that regions paint where their logits are above 0, each over those before it.

    Regions of equally many members are rivals: of them the highest logit wins, of equal ones the first. `logits_of`
    gives the logits [X, Y, Z] of a region by its number; it is asked once for each, in `painting_order`.
    """
    labels = torch.empty(0)
    for rivals in painting_order(regions):
        best: torch.Tensor | float = 0.0
        for number in rivals:
            logits = logits_of(number)
            if not len(labels):
                labels = torch.zeros(logits.shape, dtype=torch.uint8, device=logits.device)
            labels.masked_fill_(logits > best, regions[number].value)
            if number != rivals[-1]:
                best = logits.clamp(min=best)
    return labels


def dice_counts(prediction: torch.Tensor, truth: torch.Tensor, regions: Sequence[Region]) -> torch.Tensor:
    """Count the voxels that the Dice of R regions is made of, int64 [R, 2]; the host does not wait for the device.

    That is the voxels in both masks, and those of the one plus those of the other; labels are integers of one shape.
    """
    assert prediction.shape == truth.shape, (prediction.shape, truth.shape)
    # Made before the masks: small tensors between them would keep the memory of each from being used again.
    counts = torch.empty((len(regions), 2), dtype=torch.int64, device=prediction.device)
    for row, region in zip(counts, regions, strict=True):
        a, b = region.mask(prediction), region.mask(truth)
        row[0], row[1] = torch.count_nonzero(a & b), torch.count_nonzero(a) + torch.count_nonzero(b)
    return counts


def dice_of_counts(counts: torch.Tensor) -> torch.Tensor:
    """Return Dice = 2 |A and B| / (|A| + |B|) of counts [..., 2] as float64 [...], NaN where both masks are empty.

    As `monai.metrics.DiceMetric`, but 0 for a region that the truth has not: left out, false findings would be hidden.
    """
    return 2 * counts[..., 0].double() / counts[..., 1].double()


def mean_dice(counts: Sequence[torch.Tensor]) -> float:
    """Return the mean over cases of the mean over regions, of counts [R, 2] of each; waits for the device, once.

    Regions and cases without a Dice are left out; it is NaN where nothing is left.
    """
    return float(dice_of_counts(torch.stack(tuple(counts))).nanmean(dim=1).nanmean()) if counts else math.nan


def case_dice(counts: torch.Tensor) -> float:
    """Return a case's mean Dice over its regions, from [R, 2]; 1 where nothing is there, and nothing was found."""
    mean = float(dice_of_counts(counts).nanmean())
    return 1.0 if math.isnan(mean) else mean


def learned_nothing(name: object, quality: object) -> bool:
    """Return whether a quality of this name is luck: an AUC below 0.55, a Dice below 0.01."""
    return isinstance(quality, (int, float)) and quality < (0.55 if "AUC" in str(name) else 0.01)
