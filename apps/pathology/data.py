"""The source of the pathology app's batches, and the scores of its patches."""

import os

import numpy as np
import torch
from torch import nn

from apps.pathology.batches import HeldPatches, PatchBatches, Tier, hold_patches, partition_numbers
from apps.pathology.config import PathologyConfig
from apps.pathology.cucim_recipe import batch_transforms, why_not_cucim
from apps.pathology.froc import accuracy, auc
from apps.pathology.model import normalised
from apps.pathology.monai_recipe import MonaiPatchBatches, training_transforms
from apps.pathology.patch_store import Patches, stored_patches
from apps.pathology.patch_table import PatchTable
from apps.pathology.plan import PathologyPlan
from apps.pathology.tables import Tables
from common.data.batches import Batches
from common.data.colour import ColourJitter
from common.data.patch_augmentation import PatchAugmentation
from common.data.slide_pool import SlidePool
from common.data.store import store_folder
from common.data.tiers import measure_budgets
from common.inference.predictors import Predictor, torch_predictor
from common.observe.run import Run
from common.training.distributed import Ranks
from common.training.fit import Validate

_VALIDATION_BATCH = 256


def training_batches(
    tables: Tables, plan: PathologyPlan, config: PathologyConfig, run: Run, ranks: Ranks, pool: SlidePool
) -> Batches:
    """Return this rank's batches from the source that the configuration names."""
    settings = ColourJitter(config.brightness, config.contrast, config.saturation, config.hue)
    if config.source == "uncached":
        mine = tables.training.take(
            np.arange(ranks.rank, len(tables.training) // ranks.world * ranks.world, ranks.world)
        )
        return _uncached(mine, settings, plan.batch_size // ranks.world, config, run, ranks)
    patches = decoded(tables.training, config, run, ranks, pool)
    local = range(ranks.rank, plan.partitions, ranks.world)
    numbers = partition_numbers(len(tables.training), plan.partitions, local)
    with run.clock.stage("cache"):
        held = hold_all(patches, numbers, config, run)
    augmentation = PatchAugmentation(settings, zoom=config.zoom)
    count = len(tables.training)
    return PatchBatches(held, count, plan.batch_size, plan.partitions, augmentation, config.seed, run.device)


def _uncached(
    mine: PatchTable, settings: ColourJitter, batch_size: int, config: PathologyConfig, run: Run, ranks: Ranks
) -> Batches:
    """Return MONAI's batches; the guide's are augmented on the GPU where cuCIM can."""
    reader = "cucim" if config.reader == "auto" else config.reader
    run.say(f"patches: read by {reader}, each anew in each epoch")
    seed = config.seed * ranks.world + ranks.rank
    against = why_not_cucim(run.device) if config.recipe == "guide" else f"the recipe is {config.recipe}"
    if against is None:
        run.say("augmentation: cuCIM on the GPU, whose draws nobody can seed")
        on_device = batch_transforms(settings, config.zoom)
        return MonaiPatchBatches(mine, [], reader, batch_size, config.workers, seed, run.device, on_device)
    run.say(f"augmentation: patch by patch on the CPU, since {against}")
    transforms = training_transforms(settings, config.zoom)
    return MonaiPatchBatches(mine, transforms, reader, batch_size, config.workers, seed, run.device)


def hold_all(patches: Patches, numbers: list[np.ndarray], config: PathologyConfig, run: Run) -> tuple[HeldPatches, ...]:
    """Hold these partitions as near the device as they fit, and say where."""
    needed = sum(len(part) for part in numbers) * patches.pixels[0].nbytes
    budgets = measure_budgets(run.device, config.store, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    tier: Tier = "disk"
    if budgets.gpu is not None and needed <= budgets.gpu:
        tier = "gpu"
    elif needed <= budgets.ram:
        tier = "ram"
    place = {"gpu": "GPU memory", "ram": "host memory", "disk": "the store's pages on disk"}[tier]
    run.say(f"cache: {sum(len(part) for part in numbers)} patches, {needed / 2**20:.0f} MiB, in {place}")
    return tuple(hold_patches(patches, part, tier, run.device) for part in numbers)


def decoded(table: PatchTable, config: PathologyConfig, run: Run, ranks: Ranks, pool: SlidePool) -> Patches:
    """Return patches from the store, decoded now where it lacks them; the leader decodes, the others wait."""
    folder = store_folder(config.store / "patches", table.files[0].parent)
    with run.clock.stage("prepare"):
        ranks.once(lambda: stored_patches(table, folder, pool, config.workers, run.leader) and None)
        for path, tiles in pool.damaged.items():
            if path in table.files:
                run.say(f"{path.name}: {len(tiles)} DAMAGED TILES taken as white")
        return stored_patches(table, folder, pool, config.workers, False)


def patch_scores(patches: Patches, predictor: Predictor, device: torch.device, rows: np.ndarray) -> torch.Tensor:
    """Return the tumour probability of some patches, [M] float32 on the device."""
    scores = []
    for start in range(0, len(rows), _VALIDATION_BATCH):
        some = torch.from_numpy(patches.pixels[rows[start : start + _VALIDATION_BATCH]]).to(device, non_blocking=True)
        scores.append(torch.sigmoid(predictor(normalised(some.permute(0, 2, 3, 1)))).flatten())
    return torch.cat(scores)


def shared_validation(patches: Patches, ranks: Ranks, device: torch.device) -> Validate:
    """Return the validation whose patches are shared by the ranks: the AUC of all of them."""

    def validate(network: nn.Module, check: object) -> float:
        scores = all_scores(patches, torch_predictor(network.eval()), ranks, device)
        return auc(patches.label, scores)

    return validate


def all_scores(patches: Patches, predictor: Predictor, ranks: Ranks, device: torch.device) -> np.ndarray:
    """Return the tumour probability of all patches, [N] float32; each rank computes its share."""
    shares = ranks.gather([patch_scores(patches, predictor, device, rows).cpu() for rows in _shares(patches, ranks)])
    scores = np.empty(len(patches.label), np.float32)
    for number, share in enumerate(shares):
        scores[number :: len(shares)] = share.numpy()
    return scores


def _shares(patches: Patches, ranks: Ranks) -> list[np.ndarray]:
    return [np.arange(ranks.rank, len(patches.label), ranks.world)]


def figures(patches: Patches, scores: np.ndarray) -> dict[str, float]:
    """Return AUC and accuracy of the scores."""
    return {"AUC": auc(patches.label, scores), "accuracy": accuracy(patches.label, scores)}
