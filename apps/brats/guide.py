"""The recipes `baseline` and `guide`: MONAI's transforms only, in the guide's own order."""

from collections.abc import Callable
from typing import Any

import torch

from medspeed.apps.brats.config import BratsConfig
from medspeed.common.data.preparation import Preparation
from medspeed.common.training.config import decided

_PROBABILITY = 0.5  # the guide's, of each flip and of each change of intensity


def transforms(config: BratsConfig, preparation: Preparation, device: torch.device) -> list[Callable[[Any], Any]]:
    """Return the transforms of training; with the cache "monai" what is cached lies on the device.

    The guide makes three masks of the label first; we keep the class numbers, and the loss makes the masks. It
    normalises after the crop, in every step. Volumes smaller than a crop are padded first (our addition).
    """
    from monai import transforms as monai  # here: MONAI takes longer to load than all the rest

    from medspeed.common.training.monai_batches import KEYS, normalise_transforms, read_transforms

    size, intensity = decided(config.crop_size), config.crops.intensity
    return [
        *read_transforms(preparation, device if config.cache == "monai" else None),
        monai.SpatialPadd(KEYS, size),
        monai.RandSpatialCropd(KEYS, roi_size=size, random_size=False),
        monai.Lambdad("image", torch.clone),  # the crop is a view of the cache, and the normalisation writes into it
        *(monai.RandFlipd(KEYS, _PROBABILITY, "xyz".index(axis)) for axis in config.crops.flips or ""),
        *normalise_transforms(preparation),
        *([] if preparation.window else [monai.EnsureTyped(KEYS, track_meta=False)]),
        monai.RandScaleIntensityd("image", factors=intensity, prob=_PROBABILITY),
        monai.RandShiftIntensityd("image", offsets=intensity, prob=_PROBABILITY),
    ]
