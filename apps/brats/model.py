"""What a run hands over to inference: the network's shape, the preparation it was trained on, its regions."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from common.data.preparation import Preparation
from common.inference.labelling import Labelling
from common.inference.model_file import read_model, with_tuples
from common.inference.predictors import Precision
from common.training.checkpoints import initialise
from models.segresnet3d import segresnet3d


@dataclass(frozen=True)
class BratsModel:
    """The content of a run's `model.json`.

    Args:
        labelling: names of the labels, and the regions that the network's channels stand for.
        preparation: how a scan becomes the network's input.
        filters: width of the first level of the SegResNet.
        blocks_down: residual blocks of each level.
        dropout: probability before the first block.
        window_size: sliding window X, Y, Z in voxels of the working grid.
        window_batch: windows computed at once.
        overlap: part of a window that its neighbour also covers.
        precision: the network was trained in, and runs in with torch.
    """

    labelling: Labelling
    preparation: Preparation
    filters: int
    blocks_down: tuple[int, ...]
    dropout: float
    window_size: tuple[int, int, int]
    window_batch: int
    overlap: float
    precision: Precision

    def build(self, weights: Path | None = None) -> nn.Module:
        """Return the network, with weights from a file if one is given, else with random ones."""
        network = segresnet3d(
            self.preparation.channels, self.labelling.channels, self.filters, self.blocks_down, self.dropout
        )
        if weights is not None:
            initialise(network, weights)
        return network

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "BratsModel":
        """Return what `asdict` made, as JSON gives it back."""
        return cls(
            **{
                **with_tuples(content),
                "labelling": Labelling.from_json(content["labelling"]),
                "preparation": Preparation(**with_tuples(content["preparation"])),
            }
        )


def load_model(run: Path) -> BratsModel:
    """Read `model.json` from the folder of a run (see `read_model`)."""
    return read_model(run, "brats", BratsModel.from_json)
