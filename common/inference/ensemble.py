"""Several trained networks as one, whose logits are the mean of theirs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import nn

from medspeed.common.inference.model import VolumeModel, initialise


class Ensemble(nn.Module):
    """Several networks that take the same windows."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return the mean of their logits, [B, K, X, Y, Z] float32, of windows [B, C, X, Y, Z]."""
        total: torch.Tensor = reduce(torch.add, (each(image).float() for each in self.members))
        return total / len(self.members)


@dataclass(frozen=True)
class Member:
    """A network of an ensemble, the name of the run it is from, and the SHA-256 of its weights."""

    run: str
    sha256: str
    network: Callable[..., nn.Module]
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class RunModel(VolumeModel):
    """The model of one run, or of an ensemble: what its networks share, the first of which is `network`."""

    members: tuple[Member, ...] = ()  # none of a single network

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parts()  # whose arguments are checked

    def parts(self) -> list[VolumeModel]:
        """Return the models of its networks, each by itself."""
        alone = (replace(self, network=each.network, arguments=each.arguments, members=()) for each in self.members)
        return [*alone] or [self]

    def build(self, weights: Path | None = None) -> nn.Module:
        """Return the network, or the `Ensemble` of all, with weights of a file; see `VolumeModel.build`."""
        if not self.members:
            return super().build(weights)
        network = Ensemble([part.build() for part in self.parts()])
        if weights is not None:
            initialise(network, weights, made_of=self.arguments)
        return network


def members_of(model: VolumeModel) -> tuple[Member, ...]:
    """Return the members of an ensemble; none of another model."""
    return model.members if isinstance(model, RunModel) else ()
