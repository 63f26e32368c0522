"""The recipes `baseline` and `guide`: MONAI's datasets, transforms and loaders only, in the guides' own order."""

from collections.abc import Callable
from typing import Any

import torch
from monai.transforms import CropForegroundd, EnsureTyped, FgBgToIndicesd, RandCropByPosNegLabeld, SpatialPadd

from medspeed.apps.spleen.config import SpleenConfig
from medspeed.common.data.monai_batches import KEYS, normalise_transforms, read_transforms
from medspeed.common.data.preparation import Preparation
from medspeed.common.training.config import decided

Chain = list[Callable[[Any], Any]]


def transforms(config: SpleenConfig, preparation: Preparation, device: torch.device) -> tuple[Chain, Chain]:
    """Return the transforms of training and validation; with the cache "monai" what is cached lies on the device."""
    fixed = deterministic_transforms(preparation, device if config.cache == "monai" else None)
    return [*fixed, *random_crops(decided(config.crop_size), decided(config.crops.per_case))], fixed


def deterministic_transforms(preparation: Preparation, device: torch.device | None) -> Chain:
    """Return the transforms whose result is the same every time, in the guide's order; cached on `device` if given."""
    crop = CropForegroundd(KEYS, source_key="image", allow_smaller=True)
    chain = [*read_transforms(preparation), *normalise_transforms(preparation), crop]
    return chain if device is None else [*chain, EnsureTyped(KEYS, device=device, track_meta=False)]


def random_crops(crop_size: tuple[int, int, int], crops: int) -> Chain:
    """Return the guide's random transforms; volumes smaller than a crop are padded first (our addition)."""
    return [
        SpatialPadd(KEYS, crop_size),
        FgBgToIndicesd("label", image_key="image"),
        RandCropByPosNegLabeld(
            KEYS,
            label_key="label",
            spatial_size=crop_size,
            pos=1,
            neg=1,
            num_samples=crops,
            fg_indices_key="label_fg_indices",
            bg_indices_key="label_bg_indices",
        ),
    ]
