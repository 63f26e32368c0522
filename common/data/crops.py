"""Crops cut from prepared cases: one gather where the cases lie in flat tensors on the device, else case by case."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from common.data.cache_plan import Tier
from common.data.geometry import Shape
from common.data.preparation import PreparedCase

Flat = tuple[torch.Tensor, torch.Tensor]  # cases one after the other: image [C, N] float16 and label [N] uint8
Crops = tuple[torch.Tensor, torch.Tensor]  # image [N, C, X, Y, Z] float16 and label [N, 1, X, Y, Z] uint8


@dataclass(frozen=True)
class CachedCase:
    """A prepared case in its place.

    Attributes:
        name: of the case.
        image: [C, X, Y, Z] float16, on the device, in host memory, or in a mapped file.
        label: [X, Y, Z] uint8, likewise.
        shape: [3] int64, X, Y, Z, padded at the far end to at least one crop.
        foreground: for each foreground class that the case holds, its voxels as flat row-major indices in `shape`.
        offset: the case's first voxel in the flat tensors of its cache; None where it lies by itself.
    """

    name: str
    image: torch.Tensor
    label: torch.Tensor
    shape: np.ndarray
    foreground: tuple[np.ndarray, ...]
    offset: int | None = None


def place_case(case: PreparedCase, tier: Tier, crop_size: Shape, device: torch.device) -> CachedCase:
    """Put a prepared, labelled case by itself in its tier.

    Args:
        case: in CPU memory or a mapped file.
        tier: "gpu" copies it to `device`, "ram" to CPU memory; "disk" and "none" leave it as it is.
        crop_size: X, Y, Z in voxels.
        device: of the batches.
    """
    assert case.label is not None
    image, label = case.image, case.label
    if tier == "gpu":
        image, label = image.to(device), label.to(device)
    elif tier == "ram":
        image, label = image.clone(), label.clone()
    return CachedCase(case.name, image, label, *_foreground(case.label.numpy(), crop_size))


def place_flat(cases: Sequence[PreparedCase], crop_size: Shape, device: torch.device) -> tuple[list[CachedCase], Flat]:
    """Put prepared, labelled cases into flat tensors on the device, each padded with zeros to at least one crop."""
    found = [_foreground(case.label.numpy(), crop_size) for case in cases if case.label is not None]
    ends = np.cumsum([0, *(int(shape.prod()) for shape, _ in found)]).tolist()
    image = torch.empty(len(cases[0].image), ends[-1], dtype=torch.float16, device=device)
    label = torch.empty(ends[-1], dtype=torch.uint8, device=device)
    placed = []
    for case, (shape, foreground), first, end in zip(cases, found, ends[:-1], ends[1:], strict=True):
        assert case.label is not None
        image_there, label_there = image[:, first:end].view(-1, *shape), label[first:end].view(*shape)
        image_there.copy_(_padded(case.image, shape))
        label_there.copy_(_padded(case.label, shape))
        placed.append(CachedCase(case.name, image_there, label_there, shape, foreground, first))
    return placed, (image, label)


def gather(flat: Flat, cases: Sequence[CachedCase], starts: np.ndarray, flips: np.ndarray, size: Shape) -> Crops:
    """Cut one crop from each of these cases in the flat tensors; for the arguments see `CaseCache.cut`."""
    image, label = flat
    shapes = np.stack([case.shape for case in cases])
    strides = np.stack([shapes[:, 1] * shapes[:, 2], shapes[:, 2], np.ones(len(shapes), np.int64)], axis=1)
    corner = np.where(flips, starts + np.array(size) - 1, starts)
    origin = np.array([case.offset for case in cases]) + (corner * strides).sum(1)
    places = upload(np.column_stack([origin, np.where(flips, -strides, strides)]), image.device)
    first, *steps = places.unbind(1)
    x, y, z = (step[:, None] * torch.arange(side, device=image.device) for step, side in zip(steps, size, strict=True))
    index = first[:, None, None, None] + x[:, :, None, None] + y[:, None, :, None] + z[:, None, None]
    return image[:, index].transpose(0, 1).contiguous(), label[index].unsqueeze(1)


def slices(
    cases: Sequence[CachedCase], starts: np.ndarray, flips: np.ndarray, size: Shape, device: torch.device
) -> Crops:
    """Cut one crop from each of these cases, which lie by themselves; for the arguments see `CaseCache.cut`."""
    volumes = [case.image for case in cases], [case.label[None] for case in cases]
    if cases[0].image.device.type == "cpu":
        image, label = (_copies(each, starts, flips, size, device) for each in volumes)
    else:
        image, label = (_views(each, starts, flips, size) for each in volumes)
    return image, label


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return a small array on the device; the host does not wait for the copy."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _foreground(label: np.ndarray, crop_size: Shape) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Return shape and foreground index of a `CachedCase` from its label [X, Y, Z]."""
    shape = np.maximum(label.shape, crop_size).astype(np.int64)
    found = np.flatnonzero(label)
    values = label.reshape(-1)[found]
    if label.shape != tuple(shape):
        found = np.ravel_multi_index(np.unravel_index(found, label.shape), tuple(shape))
    return shape, tuple(found[values == number].astype(np.int32) for number in np.unique(values))


def _padded(volume: torch.Tensor, shape: Sequence[int] | np.ndarray) -> torch.Tensor:
    """Return [..., X, Y, Z] padded with zeros at the far end to `shape`; itself where nothing is missing."""
    missing = [int(side) - held for side, held in zip(shape, volume.shape[-3:], strict=True)]
    return F.pad(volume, [step for extra in reversed(missing) for step in (0, extra)]) if any(missing) else volume


def _views(volumes: Sequence[torch.Tensor], starts: np.ndarray, flips: np.ndarray, size: Shape) -> torch.Tensor:
    """Return the crops [N, C, X, Y, Z] of volumes on the device."""
    crops = []
    for volume, start, flip in zip(volumes, starts.tolist(), flips.tolist(), strict=True):
        crop = _padded(volume[_box(start, size)], size)
        crops.append(crop.flip([axis + 1 for axis in range(3) if flip[axis]]))
    return torch.stack(crops)


def _copies(
    volumes: Sequence[torch.Tensor], starts: np.ndarray, flips: np.ndarray, size: Shape, device: torch.device
) -> torch.Tensor:
    """Copy the crops of volumes on the host into one buffer, pinned for a GPU, and send it; the host does not wait."""
    to_gpu = device.type == "cuda"
    buffer = torch.empty((len(volumes), len(volumes[0]), *size), dtype=volumes[0].dtype, pin_memory=to_gpu)
    for crop, volume, start, flip in zip(buffer.numpy(), volumes, starts.tolist(), flips.tolist(), strict=True):
        piece = volume.numpy()[_box(start, size)]
        # A flipped crop is filled from its far end; the padding is then at its near one, as if padded before.
        target = crop[(slice(None), *(slice(None, None, -1 if flipped else 1) for flipped in flip))]
        if piece.shape != target.shape:
            target[...] = 0
        target[(slice(None), *(slice(0, side) for side in piece.shape[1:]))] = piece
    return buffer.to(device, non_blocking=to_gpu)


def _box(start: Sequence[int], size: Shape) -> tuple[slice, ...]:
    """Return the index of a crop in a volume [C, X, Y, Z]."""
    return slice(None), *(slice(first, first + side) for first, side in zip(start, size, strict=True))
