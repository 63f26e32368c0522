"""Crops cut from cases in their place: one gather from flat tensors on the device, else case by case."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch

from medspeed.common.data.geometry import Array, Shape
from medspeed.common.data.preparation import PreparedCase
from medspeed.common.data.threads import map_in_threads
from medspeed.common.kernels.trust import trusts

Tier = Literal["gpu", "ram", "disk"]
Form = tuple[torch.dtype, bool]  # of images that a fused kernel makes: dtype, and whether channels come last
Crops = tuple[torch.Tensor, torch.Tensor]  # image [N, C, X, Y, Z] and label [N, 1, X, Y, Z] uint8
FUSED = "crops"  # the name that `trusts` knows the kernel by
PLAIN: Form = (torch.float32, False)
_AT_ONCE = 16  # cases in pinned memory on their way to a GPU


@dataclass(frozen=True)
class CachedCase:
    """A prepared case in its place."""

    name: str  # of the case
    # [C, X, Y, Z] float16 where it lies by itself; else [C, V]: all cases that were placed with it, one after the
    # other, each flat and padded with zeros
    image: torch.Tensor
    label: torch.Tensor  # [X, Y, Z] or [V] uint8, likewise
    shape: Array  # [3] int64, X, Y, Z, padded on both sides, as in inference, to at least one crop
    # for each foreground class that the case holds, its voxels as flat row-major indices in `shape`
    foreground: tuple[Array, ...]
    offset: int | None = None  # the case's first voxel among the V; None where it lies by itself


def place_case(case: PreparedCase, tier: Tier, crop_size: Shape, device: torch.device) -> CachedCase:
    """Put a labelled case, for crops of `crop_size` X, Y, Z, in a tier, by itself: "disk" leaves it where it is."""
    assert case.label is not None
    copied = partial(upload, device=device) if tier == "gpu" else torch.clone if tier == "ram" else torch.Tensor.detach
    shape, numbers = _padded(case, crop_size), case.label.numpy()
    found = np.flatnonzero(numbers != 0)  # NumPy finds the true ones of bools several times as fast
    values = numbers.reshape(-1)[found]
    if numbers.shape != tuple(shape):
        before = (shape - numbers.shape) // 2
        found = np.ravel_multi_index(np.add(np.unravel_index(found, numbers.shape), before[:, None]), tuple(shape))
    foreground = tuple(found[values == number].astype(np.uint32) for number in np.flatnonzero(np.bincount(values)))
    return CachedCase(case.name, copied(case.image), copied(case.label), shape, foreground)


def place_together(cases: Sequence[PreparedCase], crop_size: Shape, device: torch.device) -> list[CachedCase]:
    """Put prepared, labelled cases on the device, one after the other in the same tensors."""

    def read(case: PreparedCase) -> CachedCase:
        placed = place_case(case, "disk", crop_size, device)
        return replace(placed, image=pinned(placed.image, device), label=pinned(placed.label, device))

    ends = np.cumsum([0, *(_padded(case, crop_size).prod() for case in cases)]).tolist()
    images = torch.zeros(len(cases[0].image), ends[-1], dtype=torch.float16, device=device)
    truth = torch.zeros(ends[-1], dtype=torch.uint8, device=device)
    placed: list[CachedCase] = []
    while len(placed) < len(cases):
        for case in map_in_threads(read, cases[len(placed) : len(placed) + _AT_ONCE]):
            first, end = ends[len(placed)], ends[len(placed) + 1]
            sides = zip(case.shape.tolist(), case.label.shape, strict=True)
            held = [slice(gap := (side - n) // 2, gap + n) for side, n in sides]
            images[:, first:end].view(-1, *case.shape)[:, *held].copy_(case.image, non_blocking=True)
            truth[first:end].view(*case.shape)[*held].copy_(case.label, non_blocking=True)
            placed.append(replace(case, image=images, label=truth, offset=first))
    return placed


def cut(
    cases: Sequence[CachedCase], starts: Array, flips: Array, changes: Array, size: Shape, device: torch.device
) -> Crops:
    """Cut a crop of a size X, Y, Z from each of N cases, which lie by themselves, all on the host or on the device.

    `starts` [N, 3] int64 is the first voxel of each crop, `flips` [N, 3] bool says along which axes it is then turned,
    `changes` [N, 2] float32 by what its image is multiplied, and what is added. The host never waits for the device.
    """
    there = cases[0].image.device
    pin = device.type == "cuda" and there.type == "cpu"
    image = torch.empty((len(cases), len(cases[0].image), *size), dtype=torch.float16, device=there, pin_memory=pin)
    label = torch.empty((len(cases), 1, *size), dtype=torch.uint8, device=there, pin_memory=pin)
    for row, (case, start, flip) in enumerate(zip(cases, starts.tolist(), flips.tolist(), strict=True)):
        sides = [min(n, whole) for n, whole in zip(size, case.image.shape[1:], strict=True)]  # a short axis starts at 0
        box = [slice(first, first + n) for first, n in zip(start, sides, strict=True)]
        gaps = [(side - n + flipped) // 2 for side, n, flipped in zip(size, sides, flip, strict=True)]
        held = [slice(gap, gap + n) for gap, n in zip(gaps, sides, strict=True)]
        axes = [axis for axis, flipped in enumerate(flip, 1) if flipped]
        for crop, volume in ((image[row], case.image), (label[row], case.label[None])):
            if sides != list(size):
                crop.zero_()
            piece = volume[:, *box]
            crop[:, *held].copy_(piece.flip(axes) if axes else piece)
    image, label = (each.to(device, non_blocking=pin) for each in (image, label))
    return _changed(image, upload(changes, device)), label


def crop_table(cases: Sequence[CachedCase], starts: Array, flips: Array, changes: Array, size: Shape) -> Array:
    """Return [N, 5] int64: each crop's first voxel of the V, steps along X, Y, Z, and `changes` as bits; see `cut`."""
    shapes = np.stack([case.shape for case in cases])
    strides = np.stack([shapes[:, 1] * shapes[:, 2], shapes[:, 2], np.ones(len(shapes), np.int64)], axis=1)
    corner = np.where(flips, starts + np.array(size) - 1, starts)
    origin = np.array([case.offset for case in cases]) + (corner * strides).sum(1)
    return np.column_stack([origin, np.where(flips, -strides, strides), changes.view(np.int64)])


def crops_of_table(table: torch.Tensor, image: torch.Tensor, label: torch.Tensor, size: Shape, form: Form) -> Crops:
    """Return the crops that a table on the device says, from the flat tensors of the cases; see `cut`."""
    if trusts(FUSED, image):
        from medspeed.common.kernels.crops_triton import gathered_crops

        made: Crops = gathered_crops(image, label, table, size, *form)
        return made
    first, *steps = table[:, :4].unbind(1)
    x, y, z = (step[:, None] * torch.arange(side, device=image.device) for step, side in zip(steps, size, strict=True))
    index = first[:, None, None, None] + x[:, :, None, None] + y[:, None, :, None] + z[:, None, None]
    crops = image[:, index].transpose(0, 1).contiguous()
    # A view that gives axes of length 1 the strides of the other crops: a compiled network asks for them.
    return _changed(crops.view(crops.shape), table[:, 4:].view(torch.float32)), label[index].unsqueeze(1)


def pinned(array: Array | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an array as a tensor in host memory, from which a GPU copies it without the host."""
    tensor = torch.as_tensor(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def upload(array: Array | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an array on the device; the host does not wait for the copy."""
    return pinned(array, device).to(device, non_blocking=True)


def _changed(image: torch.Tensor, changes: torch.Tensor) -> torch.Tensor:
    """Multiply and add to each of [N, C, X, Y, Z] float16 what `changes` [N, 2] float32 says."""
    scale, shift = changes.view(-1, 2, 1, 1, 1, 1).unbind(1)
    return image * scale + shift


def _padded(case: PreparedCase, crop_size: Shape) -> Array:
    return np.maximum(case.image.shape[1:], crop_size).astype(np.int64)
