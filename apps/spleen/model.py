"""What a run hands over to inference: the network's shape, the preparation it was trained on, its labels."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from common.data.preparation import Preparation
from common.files import write_json
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
    """

    labels: tuple[str, ...]
    preparation: Preparation
    channels: tuple[int, ...]
    residual_units: int
    window_size: tuple[int, int, int]
    window_batch: int
    precision: Precision

    def build(self, weights: Path | None = None) -> nn.Module:
        """Return the network, with weights from a file if one is given, else with random ones."""
        network = unet3d(self.preparation.channels, len(self.labels), self.channels, self.residual_units)
        if weights is not None:
            initialise(network, weights)
        return network

    def save(self, run: Path) -> None:
        """Write `model.json` into the folder of a run."""
        write_json(run / "model.json", {"app": "spleen", **asdict(self)})

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "SpleenModel":
        """Return what `asdict` made, as JSON gives it back."""
        content = _with_tuples(content)
        return cls(**{**content, "preparation": Preparation(**_with_tuples(content["preparation"]))})


def load_model(run: Path) -> SpleenModel:
    """Read `model.json` from the folder of a run.

    Raises:
        FileNotFoundError: the folder holds no run.
        ValueError: the file is damaged or belongs to another app.
    """
    path = run / "model.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; --model takes the folder of a training run")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("app") != "spleen":
            raise ValueError("it belongs to another app")
        return SpleenModel.from_json(content)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not the model file of a spleen run ({error})") from error


def _with_tuples(content: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with JSON's lists as tuples again."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
