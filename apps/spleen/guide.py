"""The recipes `baseline` and `guide`: MONAI's datasets, transforms and loaders only, in the guides' own order."""

from collections.abc import Callable
from typing import Any

import torch
from monai.transforms import (
    CropForegroundd,
    EnsureChannelFirstd,
    EnsureTyped,
    FgBgToIndicesd,
    LoadImaged,
    NormalizeIntensityd,
    Orientationd,
    RandCropByPosNegLabeld,
    ScaleIntensityRanged,
    Spacingd,
    SpatialPadd,
)

from apps.spleen.config import SpleenConfig
from common.data.preparation import Preparation
from common.training.config import decided

_KEYS = ("image", "label")
_AXES = (("L", "R"), ("P", "A"), ("I", "S"))

Chain = list[Callable[[Any], Any]]


def transforms(config: SpleenConfig, preparation: Preparation, device: torch.device) -> tuple[Chain, Chain]:
    """Return the transforms of training and validation; with the cache "monai" what is cached lies on the device."""
    fixed = deterministic_transforms(preparation, device if config.cache == "monai" else None)
    return [*fixed, *random_crops(decided(config.crop_size), decided(config.crops.per_case))], fixed


def deterministic_transforms(preparation: Preparation, device: torch.device | None) -> Chain:
    """Return the transforms whose result is the same every time, in the guide's order; cached on `device` if given."""
    if preparation.window is not None:
        low, high = preparation.window
        normalise = ScaleIntensityRanged("image", low, high, 0.0, 1.0, clip=True)
    else:
        normalise = NormalizeIntensityd("image", nonzero=True, channel_wise=True)
    chain = [
        LoadImaged(_KEYS),
        EnsureChannelFirstd(_KEYS),
        Orientationd(_KEYS, axcodes="RAS", labels=_AXES),
        Spacingd(_KEYS, pixdim=preparation.spacing, mode=("bilinear", "nearest")),
        normalise,
        CropForegroundd(_KEYS, source_key="image", allow_smaller=True),
    ]
    return chain if device is None else [*chain, EnsureTyped(_KEYS, device=device, track_meta=False)]


def random_crops(crop_size: tuple[int, int, int], crops: int) -> Chain:
    """Return the guide's random transforms; volumes smaller than a crop are padded first (our addition)."""
    return [
        SpatialPadd(_KEYS, crop_size),
        FgBgToIndicesd("label", image_key="image"),
        RandCropByPosNegLabeld(
            _KEYS,
            label_key="label",
            spatial_size=crop_size,
            pos=1,
            neg=1,
            num_samples=crops,
            fg_indices_key="label_fg_indices",
            bg_indices_key="label_bg_indices",
        ),
    ]
