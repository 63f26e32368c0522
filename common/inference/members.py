"""Several networks as one, an ensemble: what its members are, and the mean of their logits."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Member:
    """A network of an ensemble.

    Args:
        run: name of the folder that it was trained in.
        sha256: of the weights file in it.
        network: function in `models` that builds it; stored by name.
        arguments: further arguments of that function, by name.
    """

    run: str
    sha256: str
    network: Callable[..., nn.Module]
    arguments: Mapping[str, Any]


class Ensemble(nn.Module):
    """The mean of the logits of several networks that take the same windows.

    Args:
        members: the networks.
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return the mean logits [B, K, X, Y, Z] float32 of windows [B, C, X, Y, Z]."""
        return mean_of(self.members, image)


def mean_of(members: Iterable[Callable[[torch.Tensor], torch.Tensor]], image: torch.Tensor) -> torch.Tensor:
    """Return the mean of what some networks or predictors make of an image, added up in float32, one at a time."""
    first, *others = members
    total = first(image).float()
    for each in others:
        total = total + each(image).float()
    return total / (1 + len(others))
