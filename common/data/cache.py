"""Held cases: prepared cases kept where crops are cut from them; here the fastest, all in two tensors on the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from common.data.preparation import PreparedCase

Size = tuple[int, int, int]


@dataclass(frozen=True)
class Outline:
    """What must be known of a case before a crop of it is placed.

    Args:
        shape: [3] int64, X, Y, Z, padded at the far end to at least one crop.
        foreground: for each foreground class that the case holds, its voxels as flat row-major indices in `shape`.
    """

    shape: np.ndarray
    foreground: tuple[np.ndarray, ...]


class HeldCases(Protocol):
    """Cases from which crops are cut, wherever they lie; for the same cases, every kind cuts the same crops."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the cases."""
        ...

    @property
    def numbers(self) -> np.ndarray:
        """[cases] int64: the global number of each case, the key of its random draws."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the crops lie."""
        ...

    @property
    def on_host(self) -> bool:
        """Whether cutting keeps the CPU busy, so that it is worth doing ahead of time."""
        ...

    def outline(self, row: int) -> Outline:
        """Return the outline of one case."""
        ...

    def cut(
        self, rows: np.ndarray, starts: np.ndarray, flips: np.ndarray, size: Size
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cut one crop per row.

        Args:
            rows: [N] int, the place of each crop's case in `names`.
            starts: [N, 3] int64, first voxel of each crop along X, Y, Z, before it is flipped.
            flips: [N, 3] bool, whether it is then flipped along each axis.
            size: X, Y, Z of a crop.

        Returns:
            image [N, C, X, Y, Z] float16 and label [N, 1, X, Y, Z] uint8 on `device`.
        """
        ...


@dataclass(frozen=True)
class ResidentCache:
    """Prepared cases on the device, each padded to at least one crop, one after the other: a batch is one gather.

    Args:
        image: [C, N] float16, the voxels of all cases in row-major order of X, Y, Z.
        label: [N] uint8, class numbers.
        names: of the cases.
        numbers: [cases] int64, global number of each case.
        offsets: [cases] int64, index of each case's first voxel.
        shapes: [cases, 3] int64, X, Y, Z after padding.
        strides: [cases, 3] int64, steps in N along X, Y, Z.
        foreground: for each case, the flat indices within the case of each foreground class that it holds.
    """

    image: torch.Tensor
    label: torch.Tensor
    names: tuple[str, ...]
    numbers: np.ndarray
    offsets: np.ndarray
    shapes: np.ndarray
    strides: np.ndarray
    foreground: tuple[tuple[np.ndarray, ...], ...]
    on_host: bool = False

    @property
    def device(self) -> torch.device:
        """Where the cases and the crops lie."""
        return self.image.device

    def outline(self, row: int) -> Outline:
        """Return the outline of one case."""
        return Outline(self.shapes[row], self.foreground[row])

    def cut(
        self, rows: np.ndarray, starts: np.ndarray, flips: np.ndarray, size: Size
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cut one crop per row (see `HeldCases.cut`); the host never waits for the device."""
        strides = self.strides[rows]
        corner = np.where(flips, starts + np.array(size) - 1, starts)
        origin = self.offsets[rows] + (corner * strides).sum(1)
        places = upload(np.column_stack([origin, np.where(flips, -strides, strides)]), self.device)
        first, *steps = places.unbind(1)
        x, y, z = (
            step[:, None] * torch.arange(side, device=self.device) for step, side in zip(steps, size, strict=True)
        )
        index = first[:, None, None, None] + x[:, :, None, None] + y[:, None, :, None] + z[:, None, None]
        return self.image[:, index].transpose(0, 1).contiguous(), self.label[index].unsqueeze(1)


def fill_cache(
    cases: Sequence[PreparedCase], crop_size: Size, device: torch.device, numbers: np.ndarray | None = None
) -> ResidentCache:
    """Copy prepared, labelled cases to `device`; volumes smaller than a crop are padded with zeros at the far end.

    Args:
        cases: what to hold.
        crop_size: X, Y, Z in voxels.
        device: where to.
        numbers: global number of each case; by default 0, 1, 2, ...
    """
    outlines = [outline(case, crop_size) for case in cases]
    shapes = np.stack([each.shape for each in outlines])
    voxels = shapes.prod(axis=1)
    offsets = np.concatenate([[0], voxels.cumsum()[:-1]])
    channels = cases[0].image.shape[0]
    image = torch.empty(channels, int(voxels.sum()), dtype=torch.float16, device=device)
    label = torch.empty(int(voxels.sum()), dtype=torch.uint8, device=device)
    for case, shape, offset, count in zip(cases, shapes, offsets, voxels, strict=True):
        assert case.label is not None
        image[:, offset : offset + count] = padded(case.image, shape).reshape(channels, -1)
        label[offset : offset + count] = padded(case.label, shape).reshape(-1)
    strides = np.stack([shapes[:, 1] * shapes[:, 2], shapes[:, 2], np.ones(len(shapes), np.int64)], axis=1)
    return ResidentCache(
        image,
        label,
        tuple(case.name for case in cases),
        np.arange(len(cases)) if numbers is None else numbers,
        offsets,
        shapes,
        strides,
        tuple(each.foreground for each in outlines),
    )


def outline(case: PreparedCase, crop_size: Size) -> Outline:
    """Read a labelled case's label, in CPU memory, for its outline."""
    assert case.label is not None
    label = case.label.numpy()
    shape = np.maximum(label.shape, crop_size).astype(np.int64)
    found = np.flatnonzero(label)
    values = label.reshape(-1)[found]
    if label.shape != tuple(shape):
        found = np.ravel_multi_index(np.unravel_index(found, label.shape), tuple(shape))
    return Outline(shape, tuple(found[values == number].astype(np.int32) for number in np.unique(values)))


def padded(volume: torch.Tensor, shape: np.ndarray) -> torch.Tensor:
    """Return [..., X, Y, Z] padded with zeros at the far end to `shape`; itself where nothing is missing."""
    missing = [int(side) - held for side, held in zip(shape, volume.shape[-3:], strict=True)]
    return F.pad(volume, [step for extra in reversed(missing) for step in (0, extra)]) if any(missing) else volume


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return a small array on the device; the host does not wait for the copy."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
