"""Batches: crops cut from the cached cases, augmented, and never dependent on what ran before or where."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch

from common.data.cache import CaseCache
from common.data.crops import upload
from common.data.draws import keyed_uniforms
from common.data.threads import prefetch

# The random numbers of one crop, by place: what kind of crop, which class, which voxel of it, start (3), flips (3),
# scale, shift; the last one orders the epoch.
_DRAWS = 12
_FOREGROUND_SHARE = 0.5  # of the crops is centred on foreground. Source: the guide's RandCropByPosNegLabeld, pos = neg


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


# From a range of an epoch's items, in their random order, to that part of a batch.
Take = Callable[[slice], Batch]


@dataclass(frozen=True)
class KeyedBatches:
    """Batches whose order and augmentation are keyed, so that an epoch goes on at any step as if it had not stopped.

    Each partition gives an equal part of every batch, from its own items in its own order, so that it does not matter
    which process holds which partitions; a batch is the local partitions' parts, one after the other.

    Args:
        partitions_here: of each partition that this process holds, from an epoch to what takes its items while the
            epoch lasts.
        steps_per_epoch: batches in each epoch, the same in every process.
        batch_size: items per step, over all partitions.
        partitions: in all processes.
        prefetch_for: device of batches that keep the CPU busy, which are made one ahead; None makes each when wanted.

    Raises:
        ValueError: the batch does not divide by the partitions, or a figure cannot be meant.
    """

    partitions_here: Sequence[Callable[[int], AbstractContextManager[Take]]]
    steps_per_epoch: int
    batch_size: int
    partitions: int = 1
    prefetch_for: torch.device | None = None
    resumes_within_epoch = True

    def __post_init__(self) -> None:
        """Refuse figures that cannot be meant."""
        if not 1 <= len(self.partitions_here) <= self.partitions:
            raise ValueError(f"partitions {self.partitions}: this process alone holds {len(self.partitions_here)}")
        if self.batch_size < 1 or self.batch_size % self.partitions:
            raise ValueError(
                f"batch_size {self.batch_size}: must divide by the {self.partitions} partitions, each of which gives "
                "an equal part of every batch"
            )

    def epoch(self, number: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield the batches of one epoch, from a step on.

        Raises:
            Exception: what goes wrong when an item is loaded.
        """
        with ExitStack() as stack:
            takes = [stack.enter_context(open_epoch(number)) for open_epoch in self.partitions_here]
            batches = self._batches(takes, first_step)
            yield from batches if self.prefetch_for is None else prefetch(batches, self.prefetch_for)

    def _batches(self, takes: Sequence[Take], first_step: int) -> Generator[Batch, None, None]:
        each = self.batch_size // self.partitions
        for step in range(first_step, self.steps_per_epoch):
            parts = [take(slice(step * each, (step + 1) * each)) for take in takes]
            if len(parts) == 1:
                yield parts[0]
            else:
                image, label = (torch.cat([getattr(part, name) for part in parts]) for name in ("image", "label"))
                yield Batch(image, label, tuple(name for part in parts for name in part.cases))


def crop_batches(
    caches: Sequence[CaseCache],
    crops_per_case: int,
    batch_size: int,
    cases_per_epoch: int | None = None,
    partitions: int = 1,
    flip_axes: str = "xyz",
    intensity: float = 0.1,
    seed: int = 0,
) -> KeyedBatches:
    """Return foreground-balanced random crops from cached cases.

    Half of the crops are centred on a random voxel of a random foreground class of the case, the others lie anywhere.
    Where a crop lies and how it is augmented depends on (seed, epoch, case, crop) alone.

    Args:
        caches: of the partitions that this process holds.
        crops_per_case: crops of each case in one epoch; a few more fill the last batch. (Where partitions are not of
            one size, the larger ones may leave out a crop or two of their last cases.)
        batch_size: crops per step, over all partitions.
        cases_per_epoch: cases of one epoch, over all partitions; by default those of `caches`.
        partitions: in all processes.
        flip_axes: letters of "xyz", axes that are each flipped with probability 1/2.
        intensity: the image becomes image * (1 + s) + t with s and t uniform in [-intensity, intensity].
        seed: of everything random here.

    Raises:
        ValueError: the batch does not divide by the partitions, or a figure cannot be meant.
    """
    if cases_per_epoch is None:
        cases_per_epoch = sum(len(cache.cases_of(0)) for cache in caches)
    steps = -(-cases_per_epoch * crops_per_case // batch_size) if batch_size > 0 else 0
    crops = steps * batch_size // partitions
    here = [
        partial(_crops, cache, crops, ["xyz".index(axis) for axis in flip_axes], intensity, seed) for cache in caches
    ]
    device = next((cache.device for cache in caches if cache.on_host), None)
    return KeyedBatches(here, steps, batch_size, partitions, device)


@contextmanager
def _crops(
    cache: CaseCache, count: int, flip_axes: Sequence[int], intensity: float, seed: int, epoch: int
) -> Iterator[Take]:
    """Have the cases of one epoch; yield what cuts and augments its `count` crops, which are shuffled."""
    with cache.epoch(epoch) as numbers:
        place = np.arange(count)
        cases, crops = numbers[place % len(numbers)], place // len(numbers)
        draws = keyed_uniforms(seed, epoch, cases, crops, _DRAWS)
        order = np.argsort(draws[:, -1], kind="stable")
        cases, draws = cases[order], draws[order]
        flips = (draws[:, 6:9] < 0.5) & np.isin(np.arange(3), flip_axes)
        changes = (intensity * (2 * draws[:, 9:11] - 1) + np.array([1.0, 0.0])).astype(np.float32)

        def take(part: slice) -> Batch:
            starts = _starts(cache, cases[part], draws[part])
            cut, label = cache.cut(cases[part], starts, flips[part])
            scale, shift = upload(changes[part], cache.device).view(-1, 2, 1, 1, 1, 1).unbind(1)
            image = cut * scale + shift  # float16 times float32 is float32
            return Batch(image, label, tuple(cache.case(number).name for number in cases[part].tolist()))

        yield take


def _starts(cache: CaseCache, numbers: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Return the first voxel [N, 3] of each crop, inside its case."""
    size = np.array(cache.crop_size)
    starts = np.empty((len(numbers), 3), np.int64)
    for place, (number, draw) in enumerate(zip(numbers.tolist(), draws, strict=True)):
        case = cache.case(number)
        room = case.shape - size
        if draw[0] < _FOREGROUND_SHARE and case.foreground:
            voxels = case.foreground[int(draw[1] * len(case.foreground))]
            centre = np.array(np.unravel_index(voxels[int(draw[2] * len(voxels))], tuple(case.shape)))
            starts[place] = np.clip(centre - size // 2, 0, room)
        else:
            starts[place] = np.floor(draw[3:6] * (room + 1))
    return starts
