"""What the channels of a network's logits stand for: classes that exclude each other, or regions that overlap."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Region:
    """A structure that quality is measured on, made of one label or of several.

    Args:
        name: what it is called, "spleen" or "WT".
        members: label numbers that make it up.
        paints: label number that a voxel of this region gets, unless it also lies in a region of fewer members.
    """

    name: str
    members: tuple[int, ...]
    paints: int

    def mask(self, labels: torch.Tensor) -> torch.Tensor:
        """Return where a label map lies in the region, bool, of the same shape and on the same device."""
        found = labels == self.members[0]
        for number in self.members[1:]:
            found |= labels == number
        return found


@dataclass(frozen=True)
class Labelling:
    """From logits to label maps.

    Args:
        labels: name of each label number, background first; "" for a number that is not used.
        regions: the structures; where `exclusive`, one for each label but the background.
        exclusive: the logits are [1 + regions, ...], background first, and the highest wins (softmax); else they are
            [regions, ...], and each region lies where its own is above 0 (sigmoid).
    """

    labels: tuple[str, ...]
    regions: tuple[Region, ...]
    exclusive: bool

    @property
    def channels(self) -> int:
        """Channels of the network's output."""
        return len(self.regions) + self.exclusive

    @property
    def numbers(self) -> int | tuple[int, ...]:
        """Label numbers that a file may hold: how many where they leave none out, else which."""
        named = tuple(number for number, name in enumerate(self.labels) if name)
        return len(named) if len(named) == len(self.labels) else named

    def labels_of(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the label of each voxel.

        Args:
            logits: [K, X, Y, Z]; K == 1 of two exclusive classes is their difference foreground - background.

        Returns:
            uint8 [X, Y, Z] on the same device; where logits are equal, the lower label.
        """
        if not self.exclusive:
            return painted([logits[number] for number in self.order()], [self.regions[n] for n in self.order()])
        return ((logits[0] > 0) if len(logits) == 1 else logits.argmax(dim=0)).to(torch.uint8)

    def order(self) -> list[int]:
        """Return the numbers of the regions as they are painted: those of many members first."""
        return sorted(range(len(self.regions)), key=lambda number: -len(self.regions[number].members))

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Labelling":
        """Return what `asdict` made, as JSON gives it back."""
        regions = (Region(each["name"], tuple(each["members"]), each["paints"]) for each in content["regions"])
        return cls(tuple(content["labels"]), tuple(regions), content["exclusive"])


def one_region_per_label(labels: Sequence[str]) -> Labelling:
    """Return the labelling of classes that exclude each other."""
    regions = (Region(name, (number,), number) for number, name in enumerate(labels) if number)
    return Labelling(tuple(labels), tuple(regions), exclusive=True)


def painted(logits: Iterable[torch.Tensor], regions: Sequence[Region]) -> torch.Tensor:
    """Return the labels that regions paint where their logits are above 0, each over those before it.

    Regions of equally many members are rivals: of them the highest logit wins.

    Args:
        logits: of each region, [X, Y, Z], in the order of `regions`.
        regions: those of many members first.

    Returns:
        uint8 [X, Y, Z] on the same device.
    """
    labels, best, members = torch.empty(0), torch.empty(0), 0
    for logit, region in zip(logits, regions, strict=True):
        if not members:
            labels = torch.zeros(logit.shape, dtype=torch.uint8, device=logit.device)
        if len(region.members) != members:
            best, members = torch.zeros_like(logit), len(region.members)
        labels.masked_fill_(logit > best, region.paints)
        best = torch.maximum(best, logit)
    return labels
