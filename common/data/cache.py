"""The device-resident cache: every prepared case in two flat tensors, so that a batch is one gather."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from common.data.preparation import PreparedCase

# Share of the free device memory that the cache may take; the network, its gradients and activations need the rest.
_SHARE = 0.5


@dataclass(frozen=True)
class ResidentCache:
    """Prepared cases, each padded to at least one crop, one after the other.

    Args:
        image: [C, N] float16, the voxels of all cases in row-major order of X, Y, Z.
        label: [N] uint8, class numbers.
        names: of the cases.
        offsets: [cases] int64, index of each case's first voxel.
        shapes: [cases, 3] int64, X, Y, Z after padding.
        strides: [cases, 3] int64, steps in N along X, Y, Z.
        foreground: for each case, the flat indices within the case of each foreground class that it holds.
    """

    image: torch.Tensor
    label: torch.Tensor
    names: tuple[str, ...]
    offsets: np.ndarray
    shapes: np.ndarray
    strides: np.ndarray
    foreground: tuple[tuple[np.ndarray, ...], ...]


def fill_cache(cases: Sequence[PreparedCase], crop_size: tuple[int, int, int], device: torch.device) -> ResidentCache:
    """Copy prepared, labelled cases to `device`; volumes smaller than a crop are padded with zeros at the far end."""
    shapes = np.array([np.maximum(case.image.shape[1:], crop_size) for case in cases], dtype=np.int64)
    voxels = shapes.prod(axis=1)
    offsets = np.concatenate([[0], voxels.cumsum()[:-1]])
    channels = cases[0].image.shape[0]
    image = torch.empty(channels, int(voxels.sum()), dtype=torch.float16, device=device)
    label = torch.empty(int(voxels.sum()), dtype=torch.uint8, device=device)
    foreground = []
    for case, shape, offset, count in zip(cases, shapes, offsets, voxels, strict=True):
        assert case.label is not None
        padding = [
            step for side, held in zip(shape[::-1], case.image.shape[:0:-1], strict=True) for step in (0, side - held)
        ]
        held = F.pad(case.label, padding) if any(padding) else case.label
        image[:, offset : offset + count] = (F.pad(case.image, padding) if any(padding) else case.image).reshape(
            channels, -1
        )
        label[offset : offset + count] = held.reshape(-1)
        foreground.append(_foreground(held.numpy().reshape(-1)))
    strides = np.stack([shapes[:, 1] * shapes[:, 2], shapes[:, 2], np.ones(len(shapes), np.int64)], axis=1)
    return ResidentCache(image, label, tuple(case.name for case in cases), offsets, shapes, strides, tuple(foreground))


def cache_device(cases: Sequence[PreparedCase], device: torch.device) -> tuple[torch.device, str]:
    """Return where the cache of these cases lies, the device itself or host memory, and why in one sentence."""
    need = sum(case.image.numel() * 2 + case.image[0].numel() for case in cases)
    size = f"{len(cases)} cases, {need / 2**20:.0f} MiB"
    if device.type == "cpu":
        return device, f"cache: {size} in memory"
    free, _ = torch.cuda.mem_get_info(device)
    if need <= _SHARE * free:
        return device, f"cache: {size} on {device}"
    return torch.device("cpu"), (
        f"cache: {size} in host memory, since {device} has {free / 2**20:.0f} MiB free and the cache may take half; "
        "crops are cut on the CPU"
    )


def _foreground(label: np.ndarray) -> tuple[np.ndarray, ...]:
    found = np.flatnonzero(label)
    values = label[found]
    return tuple(found[values == number].astype(np.int32) for number in np.unique(values))
