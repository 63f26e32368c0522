"""Small slides with tissue, and the folder of a run, for the tests of scanning."""

from pathlib import Path

import numpy as np
import tifffile
import torch
import torch.nn.functional as F
from torch import nn

from medspeed.apps.pathology.model import PathologyModel
from medspeed.common.inference.model import save_weights, write_model
from medspeed.models.resnet18_fcn import resnet18_fcn

GLASS, PINK, PURPLE = (243, 242, 244), (222, 150, 190), (110, 60, 150)
MODEL = PathologyModel(64, 2.0, 608, 2, "fp32")


class Purple(nn.Module):
    """Stands in for a trained network: logits of each patch from its mean colour, above 0 where it is purple."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return logits as `ResNet18FCN` does."""
        return -8 * F.avg_pool2d(image[:, :1], 64, 32)


def write_slide(path: Path, spots: list[tuple[int, int, int]], side: int = 512, mpp: float = 2.0) -> Path:
    """Write a slide with a square of pink tissue and purple discs (x, y, radius) in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = np.tile(np.array(GLASS, np.uint8), (side, side, 1))
    image[60:-60, 60:-60] = PINK
    for x, y, radius in spots:
        image[disc(x, y, radius, side)] = PURPLE
    tifffile.imwrite(
        path,
        image,
        photometric="rgb",
        tile=(128, 128),
        resolution=(1e4 / mpp, 1e4 / mpp),
        resolutionunit="CENTIMETER",
        compression="zlib",
        metadata=None,
    )
    return path


def disc(x: int, y: int, radius: int, side: int = 512) -> np.ndarray:
    """Return a disc, [side, side] bool."""
    rows, columns = np.mgrid[:side, :side]
    return np.asarray((rows - y) ** 2 + (columns - x) ** 2 <= radius**2)


def write_run(folder: Path, model: PathologyModel = MODEL) -> Path:
    """Write the folder of a run with random weights."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    write_model(folder, "pathology", model)
    save_weights(folder / "best.safetensors", resnet18_fcn(MODEL.patch_size).state_dict(), {})
    return folder
