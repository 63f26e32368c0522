"""MONAI's fast training guide for the spleen, as `compare.py` calls it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from medspeed.benchmarks import volumes
from medspeed.benchmarks.peers import spleen_guide as peer
from medspeed.common.data.dataset import Case, Dataset
from medspeed.common.data.monai_batches import monai_items
from medspeed.common.data.preparation import Preparation
from medspeed.common.inference.labels import one_region_per_label
from medspeed.common.inference.model import VolumeModel
from medspeed.common.training.volume_config import Windows
from medspeed.data_scripts.make_phantoms import make_ct_phantoms
from medspeed.models.unet3d import unet3d

parts = volumes

STEPS = (((96, 96, 96), 4),)  # crop and batch of each training step
CROPS_PER_CASE = 4
WARM = ((96, 96, 96), 4, 240)  # of the training before inference
HALVINGS = 4
LOSS = "dice_ce"  # ours
QUALITY = {
    "channels": (8, 16, 32, 64), "crop_size": (64, 64, 48), "windows": Windows(size=(96, 96, 64)), "batch_size": 4,
    "epochs": 20, "validate_every": 5,
}  # fmt: skip
JUDGED = "Dice on phantoms"


def make_data(folder: Path, small: bool) -> Path:
    """Make the data of a ladder, or of a record."""
    return make_ct_phantoms(folder, 20) if small else make_ct_phantoms(folder, 8, size="msd")


def plan(dataset: Dataset, store: Path) -> VolumeModel:
    """Return the guide's network, preparation and windows."""
    preparation = Preparation(peer.SPACING, "window", peer.WINDOW)
    arguments = {"channels": (16, 32, 64, 128, 256), "residual_units": 2}
    labelling = one_region_per_label(dataset.labels)
    return VolumeModel(unet3d, arguments, labelling, preparation, peer.VALIDATION_ROI, 1, 0.25, "fp32")


def fixed(model: VolumeModel, device: torch.device) -> list[Callable[..., Any]]:
    """Return the transforms whose result is the same every time."""
    return peer.fixed_transforms(("image", "label"))


def loader(cases: Sequence[Case], model: VolumeModel, crop: Sequence[int], batch: int, device: torch.device) -> Any:  # noqa: ANN401
    """Fill the guide's cache and return its loader; each case gives four crops."""
    return peer.training_loader(monai_items(cases), device, batch // CROPS_PER_CASE)


def target(label: torch.Tensor) -> torch.Tensor:
    """Return what the guide's loss takes of labels [B, 1, X, Y, Z]."""
    return label.float()


def channels_last(precision: str, device: torch.device) -> bool:
    """Return whether we train with the channels innermost."""
    return True
