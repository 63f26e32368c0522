"""Batches: crops cut from the held cases, augmented, and never dependent on what ran before or where."""

from collections.abc import Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from common.data.ahead import one_ahead
from common.data.cache import HeldCases, Size, upload
from common.data.draws import keyed_uniforms
from common.data.supply import FixedSupply, Supply

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
class _Plan:
    """The crops of an epoch in one partition, in order.

    Args:
        held: the cases.
        names: of the cases.
        rows: [N] int, the case of each crop.
        draws: [N, 6] of what kind of crop, which class, which voxel of it, start (3).
        flips: [N, 3] bool.
        changes: [N, 2] float32, factor and summand of the intensity.
    """

    held: HeldCases
    names: tuple[str, ...]
    rows: np.ndarray
    draws: np.ndarray
    flips: np.ndarray
    changes: np.ndarray


@dataclass(frozen=True)
class CropBatches:
    """Foreground-balanced random crops from held cases.

    A share of the crops is centred on a random voxel of a random foreground class of the case, the others lie
    anywhere. Where a crop lies and how it is augmented depends on (seed, epoch, case, crop) alone. Each partition
    gives an equal part of every batch, from its own cases in its own order, so that it does not matter which process
    holds which partitions; a batch is the local partitions' parts, one after the other.

    Args:
        supplies: of the partitions that this process holds.
        crop_size: X, Y, Z in voxels.
        crops_per_case: crops of each case in one epoch; a few more fill the last batch. (Where partitions are not of
            one size, the larger ones may leave out a crop or two of their last cases.)
        batch_size: crops per step, over all partitions.
        cases_per_epoch: cases of one epoch, over all partitions.
        partitions: in all processes.
        flip_axes: axes, 0 to 2, each flipped with probability 1/2.
        intensity: the image becomes image * (1 + s) + t with s and t uniform in [-intensity, intensity].
        seed: of everything random here.
        device: where the batches are wanted, if the crops do not lie there.
        foreground_share: of the crops, those that are centred on foreground.

    Raises:
        ValueError: the batch does not divide by the partitions, or a figure cannot be meant.
    """

    supplies: tuple[Supply, ...]
    crop_size: Size
    crops_per_case: int
    batch_size: int
    cases_per_epoch: int
    partitions: int = 1
    flip_axes: tuple[int, ...] = (0, 1, 2)
    intensity: float = 0.1
    seed: int = 0
    device: torch.device | None = None
    foreground_share: float = 0.5
    resumes_within_epoch: bool = True

    def __post_init__(self) -> None:
        """Refuse figures that cannot be meant."""
        if not 1 <= len(self.supplies) <= self.partitions:
            raise ValueError(f"partitions {self.partitions}: this process alone holds {len(self.supplies)}")
        if self.batch_size < 1 or self.batch_size % self.partitions:
            raise ValueError(
                f"batch_size {self.batch_size}: must divide by the {self.partitions} partitions, each of which gives "
                "an equal part of every batch"
            )
        if not 0 <= self.foreground_share <= 1:
            raise ValueError(f"foreground_share {self.foreground_share}: between 0 and 1")

    @property
    def steps_per_epoch(self) -> int:
        """Batches in each epoch, the same in every process; the last one is full too."""
        return -(-self.cases_per_epoch * self.crops_per_case // self.batch_size)

    def epoch(self, number: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield the batches of one epoch, from a step on; where the CPU cuts the crops, one batch ahead.

        Raises:
            Exception: what goes wrong when a case is loaded.
        """
        with ExitStack() as stack:
            plans = [self._plan(stack.enter_context(supply.epoch(number)), number) for supply in self.supplies]
            batches = self._batches(plans, first_step)
            ahead = any(plan.held.on_host for plan in plans)
            yield from one_ahead(batches, plans[0].held.device) if ahead else batches

    def _plan(self, held: HeldCases, epoch: int) -> _Plan:
        """Return the crops of an epoch in one partition, shuffled."""
        names = held.names
        number = np.arange(self.steps_per_epoch * self.batch_size // self.partitions)
        rows, crops = number % len(names), number // len(names)
        draws = keyed_uniforms(self.seed, epoch, held.numbers[rows], crops, _DRAWS + 1)
        order = np.argsort(draws[:, _DRAWS], kind="stable")
        rows, draws = rows[order], draws[order]
        flips = (draws[:, 6:9] < 0.5) & np.isin(np.arange(3), self.flip_axes)
        changes = self.intensity * (2 * draws[:, 9:11] - 1) + np.array([1.0, 0.0])
        return _Plan(held, names, rows, draws[:, :6], flips, changes.astype(np.float32))

    def _batches(self, plans: list[_Plan], first_step: int) -> Generator[Batch, None, None]:
        each = self.batch_size // self.partitions
        for step in range(first_step, self.steps_per_epoch):
            parts = [self._crops(plan, slice(step * each, (step + 1) * each)) for plan in plans]
            if len(parts) == 1:
                yield parts[0]
            else:
                image = torch.cat([part.image for part in parts])
                label = torch.cat([part.label for part in parts])
                yield Batch(image, label, tuple(name for part in parts for name in part.cases))

    def _crops(self, plan: _Plan, crops: slice) -> Batch:
        """Cut and augment some of the crops of a partition."""
        rows = plan.rows[crops]
        starts = self._starts(plan.held, rows, plan.draws[crops])
        held, label = plan.held.cut(rows, starts, plan.flips[crops], self.crop_size)
        scale, shift = upload(plan.changes[crops], held.device).view(-1, 2, 1, 1, 1, 1).unbind(1)
        image = held * scale + shift  # float16 times float32 is float32
        if self.device is not None:
            image, label = image.to(self.device, non_blocking=True), label.to(self.device, non_blocking=True)
        return Batch(image, label, tuple(plan.names[row] for row in rows))

    def _starts(self, held: HeldCases, rows: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """Return the first voxel [N, 3] of each crop, inside its case."""
        size = np.array(self.crop_size)
        starts = np.empty((len(rows), 3), np.int64)
        for place, (row, draw) in enumerate(zip(rows, draws, strict=True)):
            outline = held.outline(row)
            room = outline.shape - size
            classes = outline.foreground
            if draw[0] < self.foreground_share and classes:
                voxels = classes[int(draw[1] * len(classes))]
                centre = np.array(np.unravel_index(voxels[int(draw[2] * len(voxels))], tuple(outline.shape)))
                starts[place] = np.clip(centre - size // 2, 0, room)
            else:
                starts[place] = np.floor(draw[3:6] * (room + 1))
        return starts


def fixed_batches(
    held: HeldCases,
    crop_size: Size,
    crops_per_case: int,
    batch_size: int,
    flip_axes: tuple[int, ...] = (0, 1, 2),
    intensity: float = 0.1,
    seed: int = 0,
    device: torch.device | None = None,
    foreground_share: float = 0.5,
) -> CropBatches:
    """Return the batches of one process that holds all its cases in every epoch (see `CropBatches`)."""
    return CropBatches(
        (FixedSupply(held),),
        crop_size,
        crops_per_case,
        batch_size,
        len(held.names),
        1,
        flip_axes,
        intensity,
        seed,
        device,
        foreground_share,
    )
