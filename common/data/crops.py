"""Crops cut from cases in their place: one gather from flat tensors on the device, else case by case on the host."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch

from medspeed.common.data.geometry import Shape
from medspeed.common.data.preparation import PreparedCase
from medspeed.common.data.threads import map_in_threads
from medspeed.common.kernels.trust import trusts

Tier = Literal["gpu", "ram", "disk", "none"]
FUSED = "crops"  # the name that `trusts` knows the kernel by
Crops = tuple[torch.Tensor, torch.Tensor]  # image [N, C, X, Y, Z] float16 and label [N, 1, X, Y, Z] uint8
_AT_ONCE = 16  # cases in pinned memory on their way to a GPU


@dataclass(frozen=True)
class CachedCase:
    """A prepared case in its place.

    Attributes:
        name: of the case.
        image: [C, X, Y, Z] float16 in host memory or a mapped file. On the device [C, V]: all cases that were placed
            with it, each flat and padded with zeros, one after the other.
        label: [X, Y, Z] or [V] uint8, likewise.
        shape: [3] int64, X, Y, Z, padded at the far end to at least one crop.
        foreground: for each foreground class that the case holds, its voxels as flat row-major indices in `shape`.
        offset: the case's first voxel among the V; None where it lies by itself.
    """

    name: str
    image: torch.Tensor
    label: torch.Tensor
    shape: np.ndarray
    foreground: tuple[np.ndarray, ...]
    offset: int | None = None


def place_cases(cases: Sequence[PreparedCase], tier: Tier, crop_size: Shape, device: torch.device) -> list[CachedCase]:
    """Put prepared, labelled cases in a tier; crops of `crop_size` X, Y, Z will be cut from them.

    "gpu" copies them to `device`, "ram" to CPU memory; "disk" and "none" leave them where they are.
    """
    labels = [case.label for case in cases if case.label is not None]
    shapes = [np.maximum(label.shape, crop_size).astype(np.int64) for label in labels]
    given = list(zip(cases, labels, shapes, strict=True))
    pinned_there = tier == "gpu" and device.type == "cuda"
    copied = torch.Tensor.pin_memory if pinned_there else torch.clone if tier == "ram" else torch.Tensor.detach

    def read(item: tuple[PreparedCase, torch.Tensor, np.ndarray]) -> CachedCase:
        case, label, shape = item
        return CachedCase(case.name, copied(case.image), copied(label), shape, _foreground(label.numpy(), shape))

    reads = partial(map_in_threads, read, title="placing cases", progress=False)
    if tier != "gpu":
        return reads(given)
    ends = np.cumsum([0, *(shape.prod() for shape in shapes)]).tolist()
    images = torch.zeros(len(cases[0].image), ends[-1], dtype=torch.float16, device=device)
    truth = torch.zeros(ends[-1], dtype=torch.uint8, device=device)
    placed: list[CachedCase] = []
    while len(placed) < len(given):
        for case in reads(given[len(placed) : len(placed) + _AT_ONCE]):
            x, y, z = case.label.shape
            first, end = ends[len(placed)], ends[len(placed) + 1]
            images[:, first:end].view(-1, *case.shape)[:, :x, :y, :z].copy_(case.image, non_blocking=True)
            truth[first:end].view(*case.shape)[:x, :y, :z].copy_(case.label, non_blocking=True)
            placed.append(replace(case, image=images, label=truth, offset=first))
    return placed


def cut(cases: Sequence[CachedCase], starts: np.ndarray, flips: np.ndarray, size: Shape, device: torch.device) -> Crops:
    """Cut one crop from each of these cases; the host never waits for the device.

    Args:
        cases: [N], each wherever it lies.
        starts: [N, 3] int64, first voxel of each crop along X, Y, Z, before it is flipped.
        flips: [N, 3] bool, whether it is then flipped along each axis.
        size: of the crops, X, Y, Z in voxels.
        device: where the crops are wanted.
    """
    together: dict[int | None, list[int]] = {}  # rows by the tensor that their cases lie in; None on the host
    for row, case in enumerate(cases):
        together.setdefault(None if case.offset is None else id(case.image), []).append(row)
    parts = []
    for place, rows in together.items():
        some = [cases[row] for row in rows]
        if place is None:
            parts.append(_copy(some, starts[rows], flips[rows], size, device))
        else:
            places = upload(_places(some, starts[rows], flips[rows], size), device)
            parts.append(_gather(some[0].image, some[0].label, places, size))
    if len(parts) == 1:
        return parts[0]
    order = upload(np.argsort(np.concatenate(list(together.values()))), device)
    image, label = (torch.cat(part).index_select(0, order) for part in zip(*parts, strict=True))
    return image, label


def cut_and_change(
    cases: Sequence[CachedCase],
    starts: np.ndarray,
    flips: np.ndarray,
    changes: np.ndarray,
    size: Shape,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
) -> Crops:
    """Cut crops and multiply and add to each what `changes` [N, 2] float32 says; for the others see `cut`.

    Returns:
        Image and label: float32 [N, C, X, Y, Z], contiguous, unless a fused kernel on a GPU gives it in the dtype and
        layout that the network takes; and uint8 [N, 1, X, Y, Z].
    """
    table = crop_table(cases, starts, flips, changes, size)
    if table is not None:
        found = upload(table, device), cases[0].image, cases[0].label
        return crops_of_table(*found, size, (dtype, channels_last))
    image, label = cut(cases, starts, flips, size, device)
    scale, shift = upload(changes, device).view(-1, 2, 1, 1, 1, 1).unbind(1)
    return image * scale + shift, label  # float16 times float32


def crop_table(
    cases: Sequence[CachedCase], starts: np.ndarray, flips: np.ndarray, changes: np.ndarray, size: Shape
) -> np.ndarray | None:
    """Return what `gathered_crops` reads, [N, 5] int64; None of cases that do not lie in the same tensors."""
    if cases[0].offset is None or any(case.image is not cases[0].image for case in cases):
        return None
    return np.column_stack([_places(cases, starts, flips, size), changes.view(np.int64)])


def crops_of_table(
    table: torch.Tensor, image: torch.Tensor, label: torch.Tensor, size: Shape, form: tuple[torch.dtype, bool]
) -> Crops:
    """Return the crops that a table on the device says, as `cut_and_change` does; `form` is the kernel's."""
    if trusts(FUSED, image):
        from medspeed.common.kernels.crops_triton import gathered_crops

        crops: Crops = gathered_crops(image, label, table, size, *form)
        return crops
    scale, shift = table[:, 4:].view(torch.float32).view(-1, 2, 1, 1, 1, 1).unbind(1)
    cropped, labels = _gather(image, label, table[:, :4], size)
    return cropped * scale + shift, labels


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return a small array on the device; the host does not wait for the copy."""
    return pinned(array, device).to(device, non_blocking=True)


def pinned(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return an array as a tensor in host memory, from which a GPU copies it without the host."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host on the device; the host does not wait for the copy."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def _gather(image: torch.Tensor, label: torch.Tensor, places: torch.Tensor, size: Shape) -> Crops:
    """Cut crops from cases that lie in the same tensors; places [N, 4] as of `_places`."""
    first, *steps = places.unbind(1)
    x, y, z = (step[:, None] * torch.arange(side, device=image.device) for step, side in zip(steps, size, strict=True))
    index = first[:, None, None, None] + x[:, :, None, None] + y[:, None, :, None] + z[:, None, None]
    crops = image[:, index].transpose(0, 1).contiguous()
    # A view that gives axes of length 1 the strides of the other crops: a compiled network asks for them.
    return crops.view(crops.shape), label[index].unsqueeze(1)


def _places(cases: Sequence[CachedCase], starts: np.ndarray, flips: np.ndarray, size: Shape) -> np.ndarray:
    """Return which voxel each crop begins with and how far the next one lies along each axis, [N, 4] int64."""
    shapes = np.stack([case.shape for case in cases])
    strides = np.stack([shapes[:, 1] * shapes[:, 2], shapes[:, 2], np.ones(len(shapes), np.int64)], axis=1)
    corner = np.where(flips, starts + np.array(size) - 1, starts)
    origin = np.array([case.offset for case in cases]) + (corner * strides).sum(1)
    return np.column_stack([origin, np.where(flips, -strides, strides)])


def _copy(
    cases: Sequence[CachedCase], starts: np.ndarray, flips: np.ndarray, size: Shape, device: torch.device
) -> Crops:
    """Copy crops of cases on the host into one buffer, pinned for a GPU, and send it."""
    to_gpu = device.type == "cuda"
    image = torch.empty((len(cases), len(cases[0].image), *size), dtype=torch.float16, pin_memory=to_gpu)
    label = torch.empty((len(cases), 1, *size), dtype=torch.uint8, pin_memory=to_gpu)
    for row, (case, start, flip) in enumerate(zip(cases, starts.tolist(), flips.tolist(), strict=True)):
        box = tuple(slice(first, first + side) for first, side in zip(start, size, strict=True))
        # A flipped crop is filled from its far end; the padding is then at its near one, as if padded before.
        turned = tuple(slice(None, None, -1 if flipped else 1) for flipped in flip)
        for crops, volume in ((image, case.image), (label, case.label[None])):
            piece, target = volume.numpy()[:, *box], crops[row].numpy()[:, *turned]
            if piece.shape != target.shape:
                target[...] = 0
            target[tuple(map(slice, piece.shape))] = piece
    return image.to(device, non_blocking=to_gpu), label.to(device, non_blocking=to_gpu)


def _foreground(label: np.ndarray, shape: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the foreground of a `CachedCase` of this shape from its label [X, Y, Z]."""
    found = np.flatnonzero(label != 0)  # NumPy finds the true ones of bools several times as fast
    values = label.reshape(-1)[found]
    if label.shape != tuple(shape):
        found = np.ravel_multi_index(np.unravel_index(found, label.shape), tuple(shape))
    return tuple(found[values == number].astype(np.int32) for number in np.flatnonzero(np.bincount(values)))
