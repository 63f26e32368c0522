"""The recipes `baseline` and `guide`: MONAI's transforms only, in the guide's own order."""

from collections.abc import Callable
from typing import Any

import torch
from monai import transforms as monai

from medspeed.apps.brats.config import BratsConfig
from medspeed.common.data.monai_batches import KEYS, normalise_transforms, read_transforms
from medspeed.common.data.preparation import Preparation
from medspeed.common.training.config import decided

_PROBABILITY = 0.5  # the guide's, of each flip and of each change of intensity

Chain = list[Callable[[Any], Any]]


def transforms(config: BratsConfig, preparation: Preparation, device: torch.device) -> tuple[Chain, Chain]:
    """Return the transforms of training and validation; with the cache "monai" what is cached lies on the device."""
    fixed = deterministic_transforms(preparation, device if config.cache == "monai" else None)
    drawn = random_transforms(preparation, decided(config.crop_size), config.crops.flips or "", config.crops.intensity)
    return [*fixed, *drawn], [*fixed, *normalisation(preparation)]


def deterministic_transforms(preparation: Preparation, device: torch.device | None) -> Chain:
    """Return the transforms whose result is the same every time, in the guide's order; on `device` if given.

    The guide makes three masks of the label here; we keep the class numbers, and the loss makes the masks.
    """
    return read_transforms(preparation, device)


def normalisation(preparation: Preparation) -> Chain:
    """Return the normalisation, which the guide does after the crop, in every step, and in validation on the whole."""
    scaled = normalise_transforms(preparation)
    return scaled if preparation.window else [*scaled, monai.EnsureTyped(KEYS, track_meta=False)]


def random_transforms(
    preparation: Preparation, crop_size: tuple[int, int, int], flip_axes: str, intensity: float
) -> Chain:
    """Return the guide's random transforms; volumes smaller than a crop are padded first (our addition)."""
    return [
        monai.SpatialPadd(KEYS, crop_size),
        monai.RandSpatialCropd(KEYS, roi_size=crop_size, random_size=False),
        monai.Lambdad("image", torch.clone),  # the crop is a view of the cache, and the normalisation writes into it
        *(monai.RandFlipd(KEYS, prob=_PROBABILITY, spatial_axis="xyz".index(axis)) for axis in flip_axes),
        *normalisation(preparation),
        monai.RandScaleIntensityd("image", factors=intensity, prob=_PROBABILITY),
        monai.RandShiftIntensityd("image", offsets=intensity, prob=_PROBABILITY),
    ]
