"""MONAI's multi-GPU BraTS guide, as `compare.py` calls it. Its crop is too large for a CPU: both sides take smaller."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from medspeed.apps.brats.regions import choose_labelling
from medspeed.apps.brats.train import faster_channels_last
from medspeed.benchmarks import volumes
from medspeed.benchmarks.peers import brats_guide as peer
from medspeed.common.data.dataset import Case, Dataset
from medspeed.common.data.fingerprint import fingerprint, plan_preparation
from medspeed.common.data.monai_batches import monai_items
from medspeed.common.inference.model import VolumeModel
from medspeed.common.training.volume_config import Network, Windows
from medspeed.data_scripts.make_phantoms import make_mri_phantoms
from medspeed.models.segresnet3d import segresnet3d

parts, channels_last = volumes, faster_channels_last

STEPS = (((96, 96, 96), 1), ((64, 64, 64), 2))  # crop and batch of each training step
CROPS_PER_CASE = 1
WARM = ((64, 64, 64), 2, 40)  # of the training before inference
HALVINGS = 3
LOSS = "dice_focal"  # ours
WINDOW = (144, 104, 144)  # ours: what the app plans for MSD's scans, two of which cover a brain
# The app's own figures for a CPU, for both sides: 112 steps of four crops, here one of each case in an epoch, since the
# guide's transforms give no more. The guide's learning rate, 1e-4, needs tens of thousands of steps; with ours it
# learns in the hundred that there is time for.
QUALITY = {
    "crop_size": (48, 48, 48), "crops.per_case": 1, "batch_size": 4, "windows": Windows(size=(96, 64, 64)),
    "network": Network(filters=8, blocks_down=(1, 2, 2)), "learning_rate": 0.01, "epochs": 28, "validate_every": 28,
}  # fmt: skip
JUDGED = "Dice on phantoms"


def make_data(folder: Path, small: bool) -> Path:
    """Make the data of a ladder, or of a record."""
    return make_mri_phantoms(folder, 20) if small else make_mri_phantoms(folder, 8, size="msd")


def plan(dataset: Dataset, store: Path) -> VolumeModel:
    """Return the guide's network at the median spacing of the data (its own 1 mm for MSD's), and our windows.

    Raises:
        ValueError: the regions of the data are not the guide's.
    """
    labelling = choose_labelling(dataset, "names")
    found = {region.name: region.members for region in labelling.regions}
    if found != peer.REGIONS:
        raise ValueError(f"{dataset.folder}: regions {found}; the guide knows those of MSD only, {peer.REGIONS}")
    preparation, _ = plan_preparation(dataset, fingerprint(dataset.cases, dataset, store))
    arguments = {"filters": 16, "blocks_down": (1, 2, 2, 4), "dropout": 0.0}  # the guide's
    return VolumeModel(segresnet3d, arguments, labelling, preparation, WINDOW, 1, 0.25, "fp32")


def fixed(model: VolumeModel, device: torch.device) -> list[Callable[..., Any]]:
    """Return the transforms whose result is the same every time."""
    return peer.fixed_transforms(("image", "label"), device, model.preparation.spacing)


def loader(cases: Sequence[Case], model: VolumeModel, crop: volumes.Size, batch: int, device: torch.device) -> Any:  # noqa: ANN401
    """Fill the guide's cache and return its loader of random crops."""
    return peer.training_loader(monai_items(cases), device, model.preparation.spacing, crop, batch)


def target(label: torch.Tensor) -> torch.Tensor:
    """Return the guide's regions [B, 3, X, Y, Z] of labels [B, 1, X, Y, Z]."""
    return torch.stack([peer.label_to_regions(each[0]) for each in label])
