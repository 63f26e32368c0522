"""Patches decoded once, held near the device and augmented on it, or read anew by MONAI: the batches of a run."""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial

import numpy as np
import torch

from apps.pathology.config import Augmentation, PathologyConfig
from apps.pathology.patches.augment import augment, draw_patches
from apps.pathology.patches.guide import cucim_transform, monai_patches, random_transforms, scaling, why_not_cucim
from apps.pathology.patches.store import Patches, Tier, stored_patches
from apps.pathology.patches.table import PatchTable
from apps.pathology.slides.reader import SlidePool
from common.data.batches import Batch, Batches, KeyedBatches, Take, keyed_uniforms, partition_cases
from common.data.cache import measure_budgets
from common.data.crops import upload
from common.data.store import store_folder
from common.run import Run
from common.training.config import decided

_ORDER = 2**61  # in the place of a stream number, so that the order and the augmentation never share random numbers


def decoded(table: PatchTable, config: PathologyConfig, run: Run) -> Patches:
    """Return patches from the store, decoded now where it lacks them; the leader decodes, the others wait."""
    folder = store_folder(config.store / "patches", table.files[0].parent)
    found: list[Patches] = []
    with run.clock.stage("prepare"), closing(SlidePool(config.reader)) as pool:
        run.ranks.once(lambda: found.append(stored_patches(table, folder, pool, config.workers, run.leader)))
        for path, tiles in pool.damaged.items():
            run.say(f"{path.name}: {len(tiles)} DAMAGED TILES taken as white")
        return found[0] if found else stored_patches(table, folder, pool, config.workers, False)


def training_batches(table: PatchTable, config: PathologyConfig, run: Run) -> Batches:
    """Return this rank's batches of a decided configuration, from the source that it names."""
    augmentation = config.augmentation
    if config.source == "uncached":
        return _uncached(table, augmentation, config, run)
    patches, partitions = decoded(table, config, run), decided(config.parallel.partitions)
    here = range(run.ranks.rank, partitions, run.ranks.world)
    rows = np.sort(np.concatenate([partition_cases(len(table), partitions, number) for number in here]))
    with run.clock.stage("cache"):
        held = hold(patches, rows, config, run)
    return patch_batches(held, here, partitions, decided(config.batch_size), augmentation, config.seed, run.device)


def _uncached(table: PatchTable, augmentation: Augmentation, config: PathologyConfig, run: Run) -> Batches:
    """Return MONAI's batches; the guide's are augmented on the GPU where cuCIM can."""
    rank, world = run.ranks.rank, run.ranks.world
    reader = "cucim" if config.reader == "auto" else config.reader
    run.say(f"patches: read by {reader}, each anew in each epoch")
    against = why_not_cucim(run.device) if config.recipe == "guide" else f"the recipe is {config.recipe}"
    on_cpu = [*random_transforms(augmentation), *scaling()] if against else []
    on_device = [] if against else [cucim_transform(augmentation)]
    how = f"patch by patch on the CPU, since {against}" if against else "cuCIM on the GPU, whose draws nobody can seed"
    run.say(f"augmentation: {how}")
    return monai_patches(
        table.take(np.arange(rank, len(table) // world * world, world)),
        on_cpu,
        reader,
        decided(config.batch_size) // world,
        config.workers,
        config.seed * world + rank,
        run.device,
        on_device,
    )


def hold(patches: Patches, rows: np.ndarray, config: PathologyConfig, run: Run) -> Patches:
    """Hold the patches of these rows ([M] int64) as near the device as they fit, and say where."""
    needed = len(rows) * 3 * patches.table.size**2
    budgets = measure_budgets(run.device, config.store, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    tier: Tier = "disk"
    if needed <= budgets.get("gpu", -1):
        tier = "gpu"
    elif needed <= budgets["ram"]:
        tier = "ram"
    place = {"gpu": "GPU memory", "ram": "host memory", "disk": "the store's pages on disk"}[tier]
    run.say(f"cache: {len(rows)} patches, {needed / 2**20:.0f} MiB, in {place}")
    return patches.near(rows, tier, run.device)


def patch_batches(
    patches: Patches,
    here: Sequence[int],
    partitions: int,
    batch_size: int,
    augmentation: Augmentation,
    seed: int,
    device: torch.device,
) -> KeyedBatches:
    """Return batches of random order; an epoch leaves out what fills no batch.

    They are image [B, 3, S, S] float32 in [-1, 1] and label [B] float32.

    Args:
        patches: hold those of the partitions here.
        here: the partitions of this process.
        partitions: in all processes.
        batch_size: patches per step, over all partitions, by which it divides.
        augmentation: of the patches.
        seed: of everything random here.
        device: where the batches are wanted.

    Raises:
        ValueError: the set is smaller than a batch.
    """
    count = len(patches.table)
    steps = count // partitions // (batch_size // partitions)
    if not steps:
        raise ValueError(
            f"batch_size {batch_size}: {count} training patches in {partitions} partitions do not fill one batch; "
            "choose a smaller one, or more patches"
        )
    rows = [partition_cases(count, partitions, number) for number in here]
    parts = [partial(_shuffled, patches, each, augmentation, seed, device) for each in rows]
    return KeyedBatches(parts, steps, batch_size // partitions)


@contextmanager
def _shuffled(
    patches: Patches, rows: np.ndarray, augmentation: Augmentation, seed: int, device: torch.device, epoch: int
) -> Iterator[Take]:
    """Yield what takes and augments patches of some rows, in the order of this epoch."""
    draws = keyed_uniforms(seed, epoch, rows, np.full(len(rows), _ORDER), 1)[:, 0]
    order, table = rows[np.argsort(draws, kind="stable")], patches.table

    def take(part: slice) -> Batch:
        some = order[part]
        image = augment(patches.take(some, device), draw_patches(augmentation, seed, epoch, some))
        label = upload(table.label[some].astype(np.float32), device)
        return Batch(image, label, tuple(table.files[file].stem for file in table.file[some]))

    yield take
