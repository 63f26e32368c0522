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
    """Return the transforms of training and validation; with the cache "monai" what is cached lies on the device.

    The guide makes three masks of the label first; we keep the class numbers, and the loss makes the masks. It
    normalises after the crop, in every step, and in validation the whole. Volumes smaller than a crop are padded first
    (our addition).
    """
    fixed = read_transforms(preparation, device if config.cache == "monai" else None)
    size, intensity = decided(config.crop_size), config.crops.intensity
    normalised = normalise_transforms(preparation)
    if not preparation.window:
        normalised.append(monai.EnsureTyped(KEYS, track_meta=False))
    drawn = [
        monai.SpatialPadd(KEYS, size),
        monai.RandSpatialCropd(KEYS, roi_size=size, random_size=False),
        monai.Lambdad("image", torch.clone),  # the crop is a view of the cache, and the normalisation writes into it
        *(monai.RandFlipd(KEYS, _PROBABILITY, "xyz".index(axis)) for axis in config.crops.flips or ""),
        *normalised,
        monai.RandScaleIntensityd("image", factors=intensity, prob=_PROBABILITY),
        monai.RandShiftIntensityd("image", offsets=intensity, prob=_PROBABILITY),
    ]
    return [*fixed, *drawn], [*fixed, *normalised]
