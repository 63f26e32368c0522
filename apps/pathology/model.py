"""What inference must know of a trained patch classifier, and how it is built from it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.inference.model_file import read_model
from common.inference.predictors import Precision
from common.training.checkpoints import load_weights
from models.resnet18_fcn import STRIDE, resnet18_fcn

APP = "pathology"
HALO = 224
"""Pixels around a tile whose logits are thrown away: half the receptive field (218), rounded up to the stride."""


@dataclass(frozen=True)
class PathologyModel:
    """The content of `model.json`.

    Args:
        patch_size: side of the patches that the network was trained on, in pixels.
        mpp: um per pixel of those patches; None where the data did not say.
        tile_size: side of the tiles of a dense scan in pixels, halo included; a multiple of 32.
        tile_batch: tiles in one call.
        precision: of the training steps.
    """

    patch_size: int
    mpp: float | None
    tile_size: int
    tile_batch: int
    precision: Precision

    def build(self, weights: Path | None = None) -> nn.Module:
        """Return the network, with the weights of a safetensors file where one is given."""
        network = resnet18_fcn(self.patch_size)
        if weights is not None:
            network.load_state_dict(load_weights(weights))
        return network

    @property
    def core(self) -> int:
        """Side, in pixels, of the square of patch corners whose logits one tile gives exactly; a multiple of 32."""
        return self.tile_size - 2 * HALO - (self.patch_size - STRIDE)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "PathologyModel":
        """Return what was written as JSON."""
        return cls(**content)


def load_model(run: Path) -> PathologyModel:
    """Read `model.json` of a run; see `read_model` for what it raises."""
    return read_model(run, APP, PathologyModel.from_json)


def normalised(patches: torch.Tensor) -> torch.Tensor:
    """Return images [N, Y, X, 3] uint8 as [N, 3, Y, X] float32 in [-1, 1], as the guide scales them."""
    return patches.permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)
