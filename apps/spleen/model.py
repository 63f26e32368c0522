"""What a run hands over to inference: the network's shape, the preparation it was trained on, its labels."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from common.data.preparation import Preparation
from common.inference.labelling import Labelling, one_region_per_label
from common.inference.model_file import read_model, with_tuples
from common.inference.predictors import Precision
from common.training.checkpoints import initialise
from models.unet3d import unet3d


@dataclass(frozen=True)
class SpleenModel:
    """The content of a run's `model.json`.

    Args:
        labels: name of each class, background first.
        preparation: how a scan becomes the network's input.
        channels: width of each level of the U-Net.
        residual_units: convolutions per residual block.
        window_size: sliding window X, Y, Z in voxels of the working grid.
        window_batch: windows computed at once.
        precision: the network was trained in, and runs in with torch.
        overlap: part of a window that its neighbour also covers.
    """

    labels: tuple[str, ...]
    preparation: Preparation
    channels: tuple[int, ...]
    residual_units: int
    window_size: tuple[int, int, int]
    window_batch: int
    precision: Precision
    overlap: float = 0.25

    @property
    def labelling(self) -> Labelling:
        """Each label is a class, and they exclude each other."""
        return one_region_per_label(self.labels)

    def build(self, weights: Path | None = None) -> nn.Module:
        """Return the network, with weights from a file if one is given, else with random ones."""
        network = unet3d(self.preparation.channels, len(self.labels), self.channels, self.residual_units)
        if weights is not None:
            initialise(network, weights)
        return network

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "SpleenModel":
        """Return what `asdict` made, as JSON gives it back."""
        content = with_tuples(content)
        return cls(**{**content, "preparation": Preparation(**with_tuples(content["preparation"]))})


def load_model(run: Path) -> SpleenModel:
    """Read `model.json` from the folder of a run (see `read_model`)."""
    return read_model(run, "spleen", SpleenModel.from_json)
