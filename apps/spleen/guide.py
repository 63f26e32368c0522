"""The recipes `baseline` and `guide`: MONAI's datasets, transforms and loaders only, in the guides' own order."""

from collections.abc import Callable
from typing import Any

import torch

from medspeed.apps.spleen.config import SpleenConfig
from medspeed.common.data.preparation import Preparation
from medspeed.common.training.config import decided


def transforms(config: SpleenConfig, preparation: Preparation, device: torch.device) -> list[Callable[[Any], Any]]:
    """Return the transforms of training; with the cache "monai" what is cached lies on the device.

    Volumes smaller than a crop are padded first (our addition).
    """
    # Here: MONAI takes longer to load than all the rest.
    from monai.transforms import CropForegroundd, EnsureTyped, FgBgToIndicesd, RandCropByPosNegLabeld, SpatialPadd

    from medspeed.common.training.monai_batches import KEYS, normalise_transforms, read_transforms

    crop, size = CropForegroundd(KEYS, source_key="image", allow_smaller=True), decided(config.crop_size)
    fixed = [*read_transforms(preparation), *normalise_transforms(preparation), crop]
    cached = [EnsureTyped(KEYS, device=device, track_meta=False)] if config.cache == "monai" else []
    keys = {"fg_indices_key": "label_fg_indices", "bg_indices_key": "label_bg_indices"}
    drawn = RandCropByPosNegLabeld(KEYS, "label", size, num_samples=decided(config.crops.per_case), **keys)
    return [*fixed, *cached, SpatialPadd(KEYS, size), FgBgToIndicesd("label", image_key="image"), drawn]
