"""Batches of patches: held near the device, augmented on it, and never dependent on what ran before or where."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from apps.pathology.patch_store import Patches
from common.data.batches import Batch
from common.data.cache import upload
from common.data.draws import keyed_uniforms
from common.data.partitions import partition_cases
from common.data.patch_augmentation import PatchAugmentation, augment

Tier = Literal["gpu", "ram", "disk"]
_ORDER = 2**61  # in the place of a stream number, so that the order and the augmentation never share random numbers


@dataclass(frozen=True, eq=False)
class HeldPatches:
    """Patches of one partition, where batches are cut from them.

    Args:
        numbers: [M] int64, place of each in the whole set, ascending.
        pixels: [M, 3, S, S] uint8: a tensor on the device, or pages of the store.
        label: [M] uint8.
        names: of the file of each patch, for messages.
    """

    numbers: np.ndarray
    pixels: torch.Tensor | np.ndarray
    label: np.ndarray
    names: tuple[str, ...]

    def take(self, rows: np.ndarray, device: torch.device) -> torch.Tensor:
        """Return some of the patches on the device, [B, 3, S, S] uint8; the host does not wait."""
        if isinstance(self.pixels, torch.Tensor):
            return self.pixels.index_select(0, upload(rows, self.pixels.device))
        return upload(self.pixels[rows], device)


def hold_patches(patches: Patches, numbers: np.ndarray, tier: Tier, device: torch.device) -> HeldPatches:
    """Return the patches of these numbers, held on the device, in host memory, or as pages of the store."""
    whole = len(numbers) == len(patches.pixels)
    chosen = patches.pixels if whole else patches.pixels[numbers]  # a copy in host memory
    pixels: torch.Tensor | np.ndarray = chosen
    if tier == "gpu" or (tier == "ram" and whole):
        pixels = np.array(chosen)
    if tier == "gpu":
        pixels = torch.from_numpy(pixels).to(device)
    names = tuple(patches.table.files[file].stem for file in patches.table.file[numbers])
    return HeldPatches(numbers, pixels, patches.label[numbers], names)


@dataclass(frozen=True)
class PatchBatches:
    """Batches of random order, each an equal part of every partition; an epoch leaves out what fills no batch.

    Args:
        held: the partitions that this process holds.
        count: patches of the whole set.
        batch_size: patches per step, over all partitions.
        partitions: in all processes.
        augmentation: of the patches.
        seed: of everything random here.
        device: where the batches are wanted.

    Raises:
        ValueError: the set is smaller than a batch.
    """

    held: Sequence[HeldPatches]
    count: int
    batch_size: int
    partitions: int
    augmentation: PatchAugmentation
    seed: int
    device: torch.device
    resumes_within_epoch: bool = True

    def __post_init__(self) -> None:
        """Refuse a set that gives no batch."""
        if not self.steps_per_epoch:
            raise ValueError(
                f"batch_size {self.batch_size}: {self.count} training patches in {self.partitions} partitions do not "
                "fill one batch; choose a smaller one, or more patches"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Batches in each epoch, the same in every process."""
        return (self.count // self.partitions) // (self.batch_size // self.partitions)

    def epoch(self, number: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield the batches of one epoch, from a step on: image [B, 3, S, S] float32 in [-1, 1], label [B] float32."""
        orders = [self._order(held, number) for held in self.held]
        each = self.batch_size // self.partitions
        for step in range(first_step, self.steps_per_epoch):
            parts = [
                self._batch(held, order[step * each : (step + 1) * each], number)
                for held, order in zip(self.held, orders, strict=True)
            ]
            if len(parts) == 1:
                yield parts[0]
            else:
                images, labels = (torch.cat([getattr(part, name) for part in parts]) for name in ("image", "label"))
                yield Batch(images, labels, tuple(name for part in parts for name in part.cases))

    def _order(self, held: HeldPatches, epoch: int) -> np.ndarray:
        draws = keyed_uniforms(self.seed, epoch, held.numbers, np.full(len(held.numbers), _ORDER), 1)[:, 0]
        return np.argsort(draws, kind="stable")

    def _batch(self, held: HeldPatches, rows: np.ndarray, epoch: int) -> Batch:
        draw = self.augmentation.draw(self.seed, epoch, held.numbers[rows])
        image = augment(held.take(rows, self.device), draw)
        label = upload(held.label[rows].astype(np.float32), self.device)
        return Batch(image, label, tuple(held.names[row] for row in rows))


def partition_numbers(count: int, partitions: int, mine: Sequence[int]) -> list[np.ndarray]:
    """Return the numbers of the patches of each of these partitions."""
    return [partition_cases(count, partitions, number) for number in mine]
