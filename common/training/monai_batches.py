"""Batches from MONAI's own datasets and loaders, for the recipes `baseline` and `guide`."""

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any

import nibabel
import torch
from monai import transforms as mt
from monai.data import CacheDataset, DataLoader, Dataset, ThreadBuffer, ThreadDataLoader
from monai.data.utils import set_rnd

from medspeed.common.data.batches import Batch, Batches
from medspeed.common.data.dataset import Case
from medspeed.common.data.preparation import Preparation, read_case
from medspeed.common.data.threads import map_in_threads
from medspeed.common.inference.model import VolumeModel
from medspeed.common.run import Run
from medspeed.common.training.config import decided
from medspeed.common.training.volume_config import SegmentationConfig

Transforms = Sequence[Callable[[Any], Any]]
KEYS = ("image", "label")


def monai_batches(loader: Any, to_batch: Callable[[Any], Batch], seed: int) -> Batches:  # noqa: ANN401 - MONAI's
    """Return the batches of a loader with a generator of its own, equal for the same (seed, epoch).

    A run resumes at the start of an epoch. The seed, of the order and of MONAI's random transforms, must differ between
    ranks. `to_batch` leads from what the loader yields to a batch on the device.
    """

    def epoch(number: int, first_step: int = 0) -> Generator[Batch, None, None]:
        if first_step == len(loader):  # nothing is left
            return
        assert first_step == 0, first_step
        keyed = (seed * 1_000_003 + number) % 2**63
        loader.generator.manual_seed(keyed)
        set_rnd(loader.dataset, keyed)
        for items in loader:
            yield to_batch(items)

    return Batches(epoch, len(loader), resumes_within_epoch=False, made_on_device=False, loader=loader)


def guide_batches(
    transforms: Transforms, cases: Sequence[Case], model: VolumeModel, config: SegmentationConfig, run: Run
) -> Batches:
    """Return batches of recipes baseline and guide, by MONAI's transforms and loaders, on the device.

    They are image [B, C, X, Y, Z] float32 and label [B, 1, X, Y, Z] uint8. The transforms lead from a case's files to
    `crops.per_case` items "image" [C, X, Y, Z] and "label" [1, X, Y, Z]. MONAI says little about a bad file, so each is
    read and checked first. Each rank has a part of the cases; the last ones begin anew with the first cases, so that
    all are equally long, as in the guide. Cached, CacheDataset is filled now, by `workers` threads; else
    DataLoader takes as many processes.
    """
    per_case, workers, world = decided(config.crops.per_case), config.workers, run.ranks.world
    cases_per_step, left = divmod(batch_size := decided(config.batch_size) // world, per_case)
    if left or not cases_per_step:
        raise ValueError(f"batch_size {batch_size} per rank: MONAI's must be a multiple of crops.per_case ({per_case})")
    mine = run.ranks.shard([cases[index % len(cases)] for index in range(-(-len(cases) // world) * world)])
    if (last := len(mine) * per_case % batch_size) % (parts := config.parallel.accumulate):
        raise ValueError(f"parallel.accumulate {parts}: must divide the {last} crops of the last batch; change either")
    files = [file for case in cases for file in (case.image, case.label) if file]
    if other := [file for file in files if not file.name.lower().endswith((".nii", ".nii.gz"))]:
        raise ValueError(f"{other[0]}: MONAI's transforms read only NIfTI here: convert it, or use --recipe fast")
    check = partial(read_case, channels=model.preparation.channels, allowed=model.labelling.numbers)
    with run.clock.stage("prepare"):
        map_in_threads(check, list(dict.fromkeys(mine)), "checking cases" if run.ranks.leader else "", workers)
    if deep := [file for file in files if len(nibabel.load(file).shape) > 4]:
        raise ValueError(f"{deep[0]}: MONAI's transforms read at most 4 axes: save it with 4, or use --recipe fast")
    items = [{"image": str(case.image), "label": str(case.label), "name": case.name} for case in mine]
    chain = mt.Compose(list(transforms))
    given = {"batch_size": cases_per_step, "shuffle": True, "generator": torch.Generator()}
    with run.clock.stage("cache"):
        if config.cache == "monai":
            cache = CacheDataset(items, chain, cache_rate=1.0, num_workers=workers, copy_cache=False)
            loader = ForwardingThreadDataLoader(cache, num_workers=0, **given)
        else:
            loader = DataLoader(Dataset(items, chain), num_workers=workers or 0, **given)

    def to_batch(items: dict[str, Any]) -> Batch:
        image = items["image"].to(run.device, torch.float32, non_blocking=True).as_subclass(torch.Tensor)  # no metadata
        label = items["label"].to(run.device, torch.uint8, non_blocking=True).as_subclass(torch.Tensor)
        return Batch(image, label, tuple(items["name"]))

    return monai_batches(loader, to_batch, config.seed * world + run.ranks.rank)


def read_transforms(preparation: Preparation, device: torch.device | None = None) -> list[Callable[[Any], Any]]:
    """Return the transforms that read image and label onto the working grid, in the guides' order; on `device`."""
    return [
        mt.LoadImaged(KEYS),
        *([] if device is None else [mt.ToDeviced(KEYS, device)]),
        mt.EnsureChannelFirstd(KEYS),
        mt.Orientationd(KEYS, axcodes="RAS", labels=(("L", "R"), ("P", "A"), ("I", "S"))),
        mt.Spacingd(KEYS, pixdim=preparation.spacing, mode=("bilinear", "nearest")),
    ]


def normalise_transforms(preparation: Preparation) -> list[Callable[[Any], Any]]:
    """Return what scales the image to [0, 1] in its window, or each channel to its own z-scores."""
    if preparation.window is not None:
        return [mt.ScaleIntensityRanged("image", *preparation.window, 0.0, 1.0, clip=True)]
    return [mt.NormalizeIntensityd("image", nonzero=True, channel_wise=True)]


class ForwardingThreadDataLoader(ThreadDataLoader):  # type: ignore[misc]
    """A `monai.data.ThreadDataLoader` that raises what goes wrong in its thread, where MONAI's just ends the epoch."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches; raise what the producer thread raised."""

        def and_error() -> Iterator[Any]:
            try:
                yield from DataLoader.__iter__(self)
            except Exception as error:  # it crosses to the reading thread, whatever it is; a reader that stops is none
                yield error

        for item in ThreadBuffer(and_error(), self.buffer_size, self.buffer_timeout):
            if isinstance(item, Exception):
                raise item
            yield item
