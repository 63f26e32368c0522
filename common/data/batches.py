"""Batches: crops cut from the device-resident cache, augmented, and never dependent on what ran before."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from common.data.cache import ResidentCache

# The random numbers of one crop, by place: what kind of crop, which class, which voxel of it, start (3), flips (3),
# scale, shift.
_DRAWS = 11


@dataclass(frozen=True)
class Batch:
    """One step's crops on the device.

    Args:
        image: [B, C, X, Y, Z] float32, normalised.
        label: [B, 1, X, Y, Z] uint8, class numbers.
        cases: name of the case of each crop.
    """

    image: torch.Tensor
    label: torch.Tensor
    cases: tuple[str, ...]


class Batches(Protocol):
    """Where `fit` gets its batches from."""

    @property
    def steps_per_epoch(self) -> int:
        """Batches in each epoch."""
        ...

    @property
    def resumes_within_epoch(self) -> bool:
        """Whether `epoch` can start at any step; else at the first only."""
        ...

    def epoch(self, number: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield the batches of one epoch, from a step on; the same for the same arguments, whatever ran before."""
        ...


@dataclass(frozen=True)
class CropBatches:
    """Foreground-balanced random crops from a resident cache.

    Half of the crops are centred on a random voxel of a random foreground class of the case, the others lie anywhere.
    Where a crop lies and how it is augmented depends on (seed, epoch, case, crop) alone.

    Args:
        cache: the prepared cases on the device.
        crop_size: X, Y, Z in voxels.
        crops_per_case: crops of each case in one epoch; a few more fill the last batch.
        batch_size: crops per step.
        flip_axes: axes, 0 to 2, each flipped with probability 1/2.
        intensity: the image becomes image * (1 + s) + t with s and t uniform in [-intensity, intensity].
        seed: of everything random here.
        device: where the batches are wanted, if the cache does not lie there.
    """

    cache: ResidentCache
    crop_size: tuple[int, int, int]
    crops_per_case: int
    batch_size: int
    flip_axes: tuple[int, ...] = (0, 1, 2)
    intensity: float = 0.1
    seed: int = 0
    device: torch.device | None = None
    resumes_within_epoch: bool = True

    @property
    def steps_per_epoch(self) -> int:
        """Batches in each epoch; the last one is full too."""
        return -(-len(self.cache.names) * self.crops_per_case // self.batch_size)

    def epoch(self, number: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield the batches of one epoch, from a step on."""
        cases, places, change = self._plan(number)
        offsets = self._crop_offsets()
        for step in range(first_step, self.steps_per_epoch):
            rows = slice(step * self.batch_size, (step + 1) * self.batch_size)
            origin, *strides = places[rows].unbind(1)
            axes = [stride[:, None] * offset for stride, offset in zip(strides, offsets, strict=True)]
            index = (
                origin[:, None, None, None]
                + axes[0][:, :, None, None]
                + axes[1][:, None, :, None]
                + axes[2][:, None, None]
            )
            scale, shift = change[rows].view(-1, 2, 1, 1, 1, 1).unbind(1)
            image = self.cache.image[:, index].transpose(0, 1).contiguous() * scale + shift
            label = self.cache.label[index].unsqueeze(1)
            if self.device is not None:
                image, label = image.to(self.device, non_blocking=True), label.to(self.device, non_blocking=True)
            yield Batch(image, label, tuple(self.cache.names[case] for case in cases[rows]))

    def _plan(self, epoch: int) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
        """Return, for each crop of an epoch in order, its case, its place in the cache and its change of intensity.

        The place is four numbers: the flat index of the crop's first voxel and the step along each axis, negative
        where the axis is flipped.
        """
        cases, crops = self._order(epoch)
        draws = keyed_uniforms(self.seed, epoch, cases, crops, _DRAWS)
        start = self._starts(cases, draws[:, :6])
        size = np.array(self.crop_size)
        flip = (draws[:, 6:9] < 0.5) & np.isin(np.arange(3), self.flip_axes)
        strides = self.cache.strides[cases]
        corner = np.where(flip, start + size - 1, start)
        origin = self.cache.offsets[cases] + (corner * strides).sum(1)
        places = np.column_stack([origin, np.where(flip, -strides, strides)])
        change = self.intensity * (2 * draws[:, 9:11] - 1) + np.array([1.0, 0.0])
        device = self.cache.image.device
        return cases, torch.from_numpy(places).to(device), torch.from_numpy(change.astype(np.float32)).to(device)

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return case and crop number of every crop of an epoch, shuffled."""
        count = self.steps_per_epoch * self.batch_size
        number = np.arange(count)
        cases, crops = number % len(self.cache.names), number // len(self.cache.names)
        order = np.argsort(keyed_uniforms(self.seed, epoch, cases, crops, _DRAWS + 1)[:, _DRAWS], kind="stable")
        return cases[order], crops[order]

    def _starts(self, cases: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """Return the first voxel [N, 3] of each crop, inside its case."""
        size = np.array(self.crop_size)
        room = self.cache.shapes[cases] - size
        start = np.floor(draws[:, 3:6] * (room + 1)).astype(np.int64)
        for row in np.flatnonzero(draws[:, 0] < 0.5):
            classes = self.cache.foreground[cases[row]]
            if classes:
                voxels = classes[int(draws[row, 1] * len(classes))]
                voxel = voxels[int(draws[row, 2] * len(voxels))]
                centre = np.array(np.unravel_index(voxel, self.cache.shapes[cases[row]]))
                start[row] = np.clip(centre - size // 2, 0, room[row])
        result: np.ndarray = start
        return result

    def _crop_offsets(self) -> list[torch.Tensor]:
        return [torch.arange(side, device=self.cache.image.device) for side in self.crop_size]


def keyed_uniforms(seed: int, epoch: int, cases: np.ndarray, crops: np.ndarray, count: int) -> np.ndarray:
    """Return random numbers [N, count] in [0, 1), float64, a pure function of (seed, epoch, case, crop, place).

    Source: SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), its
    finaliser applied once for each part of the key.
    """
    with np.errstate(over="ignore"):
        key = _mix(np.full(len(cases), seed, np.uint64))
        for part in (np.uint64(epoch), cases.astype(np.uint64), crops.astype(np.uint64)):
            key = _mix(key ^ part)
        bits = _mix(key[:, None] ^ np.arange(count, dtype=np.uint64))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = value ^ (value >> np.uint64(31))
    return mixed
