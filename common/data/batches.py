"""Batches: crops cut and augmented by random numbers of their keys alone, so that runs resume and spread exactly."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from medspeed.common.data.cache import CaseCache
from medspeed.common.data.crops import PLAIN, CachedCase, Crops, Form, crop_table, crops_of_table, cut, upload
from medspeed.common.data.geometry import Array
from medspeed.common.data.threads import prefetch

# The random numbers of one crop, by place: what kind of crop, which class, which voxel of it, start (3), flips (3),
# scale, shift; the last one orders the epoch.
_DRAWS = 12
_NO_CROP = 2**62  # in the place of a crop number, so that the deal and the crops never share random numbers
_FOREGROUND_SHARE = 0.5  # of the crops is centred on foreground. Source: the guide's RandCropByPosNegLabeld, pos = neg

Make = Callable[..., Crops]


@dataclass(frozen=True)
class Batch:
    """One step's crops, or 2-D patches (image [B, 3, S, S], label [B] float32), on the device."""

    # [B, C, X, Y, Z] float32, normalised; from a fused kernel in the network's own precision and layout
    image: torch.Tensor
    label: torch.Tensor  # [B, 1, X, Y, Z] uint8, class numbers
    cases: tuple[str, ...]  # the name of the case of each crop


class Draft(Batch):
    """A lazy batch: made on the device from tables on the host, when image or label is read, or inside a CUDA graph."""

    device: torch.device  # where it is made
    tables: list[Array]  # all that differs between the drafts of a key
    make: Make  # from the tables on the device to image and label
    key: int  # the same for drafts of one source, which one CUDA graph can make

    def __init__(self, device: torch.device, tables: list[Array], make: Make, key: int, cases: tuple[str, ...]) -> None:
        vars(self).update(device=device, tables=tables, make=make, key=key, cases=cases)

    def __getattr__(self, name: str) -> torch.Tensor:
        if name not in ("image", "label"):
            raise AttributeError(name)
        image, label = self.make(*(upload(table, self.device) for table in self.tables))
        vars(self).update(image=image, label=label)
        return image if name == "image" else label


@dataclass(frozen=True)
class Batches:
    """Where `fit` gets its batches from."""

    # From the number of an epoch, and of its first step (0), to its batches: the same whatever ran before
    epoch: Callable[..., Generator[Batch, None, None]]
    steps_per_epoch: int
    resumes_within_epoch: bool  # whether `epoch` can start at any step; else at the first only
    made_on_device: bool  # whether each batch is made there, and like the others but for its numbers
    loader: Any = None  # MONAI's, where one makes them


Take = Callable[[slice], Batch]  # from a range of an epoch's items, in their random order, to that part of a batch


def keyed_batches(
    partitions_here: Sequence[Callable[[int], AbstractContextManager[Take]]],
    steps_per_epoch: int,
    each: int,
    prefetch_for: torch.device | None = None,
) -> Batches:
    """Return batches whose order and augmentation are keyed, so that an epoch goes on at any step as if never stopped.

    Each partition gives `each` items to every batch, its own in its own order, so that it does not matter which process
    holds which partitions; a batch is the local partitions' parts, one after the other. `partitions_here` lead from an
    epoch to what takes its items meanwhile. Batches that keep the CPU busy are made one ahead, for a device.
    """

    def made(takes: Sequence[Take], first_step: int) -> Generator[Batch, None, None]:
        for step in range(first_step, steps_per_epoch):
            parts = [take(slice(step * each, (step + 1) * each)) for take in takes]
            if len(parts) == 1:
                yield parts[0]
            else:
                image, label = (torch.cat([getattr(part, name) for part in parts]) for name in ("image", "label"))
                yield Batch(image, label, tuple(name for part in parts for name in part.cases))

    def epoch(number: int, first_step: int = 0) -> Generator[Batch, None, None]:
        with ExitStack() as stack:
            batches = made([stack.enter_context(open_epoch(number)) for open_epoch in partitions_here], first_step)
            yield from batches if prefetch_for is None else prefetch(batches, prefetch_for)

    return Batches(epoch, steps_per_epoch, resumes_within_epoch=True, made_on_device=prefetch_for is None)


def crop_batches(
    caches: Sequence[CaseCache],
    crops_per_case: int,
    batch_size: int,
    cases_per_epoch: int | None = None,
    partitions: int = 1,
    flip_axes: str = "xyz",
    intensity: float = 0.1,
    seed: int = 0,
    form: Form = PLAIN,
) -> Batches:
    """Return foreground-balanced random crops from the caches of the partitions here, out of `partitions` in all.

    Half of the crops are centred on a random voxel of a random foreground class of the case, the others lie anywhere.
    Each of the `flip_axes` is flipped with probability 1/2, and the image becomes image * (1 + s) + t with s and t
    uniform in [-intensity, intensity]. All of it depends on (seed, epoch, case, crop) alone.

    Cases per epoch (by default those of the caches) and crops per step are those of all partitions; the last batch is
    filled up, with crops of other cases in each epoch. Images have the `form` where the cases lie together and a fused
    kernel makes them; else they are float32.
    """
    cases = cases_per_epoch or sum(len(cache.cases_of(0)) for cache in caches)
    steps, each = -(-cases * crops_per_case // batch_size), batch_size // partitions
    flipped = np.array([axis in flip_axes for axis in "xyz"])
    # Where the cases stay, the last batch is filled up from the next in turn; a smart cache moves on by itself.
    stay = [np.array_equal(cache.cases_of(0), cache.cases_of(1)) for cache in caches]

    @contextmanager
    def crops(cache: CaseCache, stays: bool, epoch: int) -> Iterator[Take]:
        """Have the cases of one epoch; yield what cuts and augments its crops, which are shuffled."""
        size, device = cache.crop_size, cache.device
        with cache.epoch(epoch) as numbers:
            place = np.arange(steps * each)
            cases, crops = numbers[(stays * epoch * len(place) + place) % len(numbers)], place // len(numbers)
            draws = keyed_uniforms(seed, epoch, cases, crops, _DRAWS)
            order = np.argsort(draws[:, -1], kind="stable")
            cases, draws = cases[order], draws[order]
            flips = (draws[:, 6:9] < 0.5) & flipped
            changes = (intensity * (2 * draws[:, 9:11] - 1) + np.array([1.0, 0.0])).astype(np.float32)

            def take(part: slice) -> Batch:
                some = [cache.case(number) for number in cases[part].tolist()]
                given = some, _starts(some, draws[part], np.array(size)), flips[part], changes[part], size
                image, names = some[0].image, tuple(case.name for case in some)
                if some[0].offset is None:
                    return Batch(*cut(*given, device), names)
                make = partial(crops_of_table, image=image, label=some[0].label, size=size, form=form)
                return Draft(device, [crop_table(*given)], make, id(image), names)

            yield take

    here = [partial(crops, *each) for each in zip(caches, stay, strict=True)]
    return keyed_batches(here, steps, each, next((cache.device for cache in caches if cache.on_host), None))


def _starts(cases: Sequence[CachedCase], draws: Array, size: Array) -> Array:
    """Return the first voxel [N, 3] of each crop, inside its case."""
    starts = np.empty((len(cases), 3), np.int64)
    for place, (case, draw) in enumerate(zip(cases, draws, strict=True)):
        room = case.shape - size
        if draw[0] < _FOREGROUND_SHARE and case.foreground:
            voxels = case.foreground[int(draw[1] * len(case.foreground))]
            centre = np.array(np.unravel_index(voxels[int(draw[2] * len(voxels))], tuple(case.shape)))
            starts[place] = np.clip(centre - size // 2, 0, room)
        else:
            starts[place] = np.floor(draw[3:6] * (room + 1))
    return starts


def keyed_uniforms(seed: int, epoch: int, cases: Array, crops: Array, count: int) -> Array:
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
    return np.asarray(value ^ (value >> np.uint64(31)))


def partition_cases(count: int, partitions: int, number: int, seed: int = 0, round: int = 0) -> Array:
    """Return the indices of the cases of one partition, int64; each of range(count) is in exactly one partition.

    Round 0 deals in turn: number (from 0), number + partitions, ... A later round permutes all cases first, by (seed,
    round) alone. Sizes differ by one at most. More partitions than cases are a ValueError.
    """
    if not 1 <= partitions <= count:
        said = f"partitions {partitions}: must be between 1 and the number of training cases ({count})"
        raise ValueError(f"{said}; by default there is one for each rank")
    dealt = np.arange(count, dtype=np.int64)
    if round:
        draws = keyed_uniforms(seed, round, dealt, np.full(count, _NO_CROP), 1)[:, 0]
        dealt = np.argsort(draws, kind="stable").astype(np.int64)
    return dealt[number::partitions]
