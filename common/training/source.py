"""Where the batches and the validation of a run come from: MONAI's datasets here, our store and caches in `resident`.

`dataset_source` and `resident_source` offer the same two things, and nothing else in an app knows which one runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from common.data.batches import Batches
from common.data.cases import Case, Split
from common.data.monai_batches import MonaiBatches, MonaiSource, Transforms
from common.data.parallel import map_in_threads
from common.data.preparation import Preparation, PreparedCase, check_values
from common.data.store import prepared_cases, store_folder
from common.data.tiers import CacheMode
from common.data.volumes import check_same_grid, read_volume
from common.inference.monai_validation import MonaiValidation
from common.inference.quality import mean_dice
from common.inference.segmentation import SegmentationModel
from common.observe.run import Run
from common.training.distributed import Ranks
from common.training.fit import Validate


@dataclass(frozen=True)
class Source:
    """What trains and what validates.

    Args:
        batches: training batches of this rank, image [B, C, X, Y, Z] and label [B, 1, X, Y, Z] on the run's device.
        validate: from a network to its mean foreground Dice on the working grid of the validation cases of all ranks.
    """

    batches: Batches
    validate: Validate


@dataclass(frozen=True)
class Crops:
    """How batches are cut (see `CropBatches`).

    Args:
        size: X, Y, Z in voxels of the working grid.
        per_case: of each case in one epoch.
        batch_size: in one step, over all ranks.
        partitions: parts of the training cases.
        epochs: of the run.
        flip_axes: letters of "xyz".
        intensity: largest random relative scale and shift.
        seed: of everything random.
    """

    size: tuple[int, int, int]
    per_case: int
    batch_size: int
    partitions: int
    epochs: int
    flip_axes: str
    intensity: float
    seed: int


@dataclass(frozen=True)
class Keeping:
    """Where prepared cases are kept.

    Args:
        store: folder of all stores.
        cache: where they lie while training.
        cache_cases: cases of each partition that the cache "smart" holds at a time; None takes what fits.
        replace_share: share of them that it replaces after each epoch.
        reshuffle_every: epochs after which the cases are dealt to the partitions anew; None never does.
        workers: preparation threads.
    """

    store: Path
    cache: CacheMode = "auto"
    cache_cases: int | None = None
    replace_share: float = 0.2
    reshuffle_every: int | None = None
    workers: int | None = None


def dataset_source(
    split: Split,
    model: SegmentationModel,
    crops: Crops,
    source: MonaiSource,
    training: Transforms,
    validation: Transforms,
    run: Run,
    ranks: Ranks,
    workers: int | None = None,
) -> Source:
    """Recipes baseline and guide: MONAI's transforms and loaders; with "cached" both sets are filled here.

    MONAI says little about a bad file, so each is read and checked first. Each rank has a part of the cases; the last
    ones begin anew with the first cases, so that all are equally long, as in the guide.
    """
    even = -(-len(split.training) // ranks.world) * ranks.world
    mine = ranks.shard([split.training[index % len(split.training)] for index in range(even)])
    judged = ranks.shard(split.validation)
    with run.clock.stage("prepare"):
        check = partial(check_case, model=model)
        map_in_threads(check, list(dict.fromkeys([*mine, *judged])), "checking cases", workers, run.leader)
    with run.clock.stage("cache"):
        batches = MonaiBatches(
            mine,
            training,
            source,
            crops_per_case=crops.per_case,
            batch_size=crops.batch_size // ranks.world,
            workers=workers,
            seed=crops.seed * ranks.world + ranks.rank,
            device=run.device,
        )
        validate = MonaiValidation(judged, validation, source, model, workers, run.device)
    return Source(batches, shared_validation(validate, ranks))


def stored_cases(cases: Sequence[Case], model: SegmentationModel, keeping: Keeping, run: Run) -> list[PreparedCase]:
    """Return cases from the prepared store; those that it lacks are prepared now."""
    if not cases:
        return []
    folder, classes = kept_in(cases, model.preparation, keeping), model.labelling.numbers
    return prepared_cases(
        cases, model.preparation, classes, folder, workers=keeping.workers, progress=run.leader and len(cases) > 1
    )


def check_case(case: Case, model: SegmentationModel) -> None:
    """Read image and label of a case.

    Raises:
        ValueError: one is damaged, they do not fit each other, or a label is not listed; the file is named.
    """
    assert case.label is not None
    image, label = read_volume(case.image, model.preparation.channels), read_volume(case.label)
    check_same_grid(image, label)
    check_values(label, model.labelling.numbers)


def check_partitions(partitions: int, batch_size: int, accumulate: int, ranks: int, alike: bool = True) -> None:
    """Check that the partitions of a run can be shared, and its batch divided.

    Args:
        partitions: of the run.
        batch_size: crops in one step, over all ranks.
        accumulate: parts that each rank's batch is computed in.
        ranks: how many share them.
        alike: whether fewer ranks that hold more partitions each compute the same; MONAI's sources and losses do not.

    Raises:
        ValueError: names the numbers that do not divide each other, and what would.
    """
    if not alike and partitions != ranks:
        raise ValueError(
            f"partitions {partitions}: {ranks} ranks would not compute the same with MONAI's sources or losses, which "
            f"go by rank, so this run cannot go on exactly; use {partitions} ranks, or begin a new run"
        )
    if partitions % ranks:
        fitting = ", ".join(str(n) for n in range(1, partitions + 1) if partitions % n == 0)
        raise ValueError(
            f"partitions {partitions}: {ranks} ranks cannot share them evenly, so this run cannot go on exactly; use "
            f"{fitting} ranks, or begin a new run with --partitions {ranks}"
        )
    if batch_size % (partitions * accumulate):
        raise ValueError(
            f"batch_size {batch_size}: must be a multiple of {partitions * accumulate} ({partitions} partitions, each "
            f"computed in {accumulate} parts)"
        )


def shared_validation(counts: Callable[..., list[torch.Tensor]], ranks: Ranks) -> Validate:
    """Return the validation whose cases are shared by the ranks: counted on the device, read once."""

    def validate(network: nn.Module, check: Callable[[], None]) -> float:
        mine = counts(network=network, check=check)
        read = torch.stack(mine).cpu().unbind() if mine else []
        return mean_dice(ranks.gather(read))

    return validate


def kept_in(cases: Sequence[Case], preparation: Preparation, keeping: Keeping) -> Path:
    """Return the folder of the prepared cases of one dataset and one preparation."""
    return store_folder(keeping.store / "prepared", cases[0].image.parent.parent, preparation)
