"""Where the batches and the validation of a run on volumes come from: our store and caches, or MONAI's datasets.

`our_source` and `monai_source` give the same two things, and nothing else in an app knows which one runs: training
batches of this rank, image [B, C, X, Y, Z] and label [B, 1, X, Y, Z] on the run's device; and the validation, from a
network to the mean foreground Dice on the working grid of the validation cases of all ranks.
"""

import os
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from medspeed.common.data.batches import Batches, crop_batches, partition_cases
from medspeed.common.data.cache import (
    CacheMode,
    CachePlan,
    CaseCache,
    fill_cache,
    hold_cases,
    measure_budgets,
    plan_cache,
    smart_indices,
)
from medspeed.common.data.crops import CachedCase, Tier, place_cases
from medspeed.common.data.dataset import Case
from medspeed.common.data.preparation import PreparedCase, prepare_case
from medspeed.common.data.store import prepared_bytes, prepared_cases, store_folder
from medspeed.common.files import read_object, write_json
from medspeed.common.inference.model import VolumeModel
from medspeed.common.inference.predict import working_counts
from medspeed.common.run import Run
from medspeed.common.training.config import decided
from medspeed.common.training.fit import Setup, Validate
from medspeed.common.training.losses import LossName, build_loss, say_inexact
from medspeed.common.training.optimizers import build_optimizer
from medspeed.common.training.resolve import Data
from medspeed.common.training.setup import compile_if_asked, dtype_of, shared_validation, trust_kernels, volume_network
from medspeed.common.training.trials import volume_trials
from medspeed.common.training.volume_config import SegmentationConfig

Transforms = Sequence[Callable[[Any], Any]]

_RECENT = 8  # cases that the cache "none" keeps since they were used last
_SLOWEST_LAST: list[Tier] = ["gpu", "ram", "disk", "none"]


def volume_setup(
    config: SegmentationConfig, data: Data, model: VolumeModel, chains: tuple[Transforms, Transforms] | None, run: Run
) -> Setup:
    """Build the network of a decided run, the source of its batches, the loss and the optimizer.

    Args:
        config: decided.
        data: the cases.
        model: what is trained.
        chains: MONAI's transforms of training and of validation; None for batches from our store and caches.
        run: where all of it lies.
    """
    network = volume_network(config, model, run)
    if chains is None:
        batches, validate = our_source(data, model, config, run)
    else:
        from medspeed.common.training.monai_source import (
            monai_source,  # here: MONAI takes longer to load than all the rest
        )

        batches, validate = monai_source(chains, data, model, config, run)
    with run.clock.stage("compile"):
        trust_kernels(volume_trials(config, model, batches, run.ranks.world, run.device), config, run)
    windows = (model.window_batch, model.preparation.channels, *model.window_size)
    compile_if_asked(network, batches, windows, config, run)
    say_inexact(config.loss, run.ranks, config.parallel.accumulate, run)
    scheme = model.labelling
    loss = build_loss(cast(LossName, config.loss), run.ranks, () if scheme.exclusive else scheme.regions)
    optimizer = build_optimizer(decided(config.optimizer), network.parameters(), decided(config.learning_rate))
    return Setup(network, batches, loss, optimizer, model.precision, validate)


def our_source(data: Data, model: VolumeModel, config: SegmentationConfig, run: Run) -> tuple[Batches, Validate]:
    """Recipe fast: prepared cases from the store, held as near the device as they fit, crops cut and augmented there.

    Each rank holds the cases of its own partitions only.
    """
    partitions, size = decided(config.parallel.partitions), decided(config.crop_size)
    cases, cache, ranks = data.split.training, config.caching(), run.ranks
    local = range(ranks.rank, partitions, ranks.world)
    parts = [partition_cases(len(cases), partitions, number) for number in local]
    mine = [cases[index] for part in parts for index in part]
    plan = _cache_plan(mine, len(local), len(cases) // partitions, model, config, run)
    with run.clock.stage("prepare"):
        ahead = cache.mode not in ("none", "smart")  # those prepare a case when it is needed
        prepared = stored_cases(mine, model, config, run) if ahead else []
        validation = stored_cases(ranks.shard(data.split.validation), model, config, run)
    _say_shares(mine, len(cases), run)
    caches: list[CaseCache] = []
    place = 0
    with run.clock.stage("cache"):
        for number, part in zip(local, parts, strict=True):
            rows = slice(place, place := place + len(part))
            if ahead and cache.reshuffle is None:
                caches.append(fill_cache(prepared[rows], plan.tiers[rows], size, run.device, part))
            else:
                caches.append(_changing(number, part, data, model, config, plan, run))
        held = hold_cases(validation, plan.free, run.device)
    if run.device.type == "cuda":
        run.say(f"validation: {sum(case.image.is_cuda for case in held)} of {len(held)} cases kept in GPU memory")
    batches = crop_batches(
        caches,
        decided(config.crops.per_case),
        decided(config.batch_size),
        plan.held * partitions if cache.mode == "smart" else len(cases),
        partitions,
        config.crops.flips or "",
        config.crops.intensity,
        config.seed,
        (dtype_of(config.precision), bool(config.channels_last)),
    )
    return batches, shared_validation(partial(working_counts, held, model=model), ranks)


def stored_cases(cases: Sequence[Case], model: VolumeModel, config: SegmentationConfig, run: Run) -> list[PreparedCase]:
    """Return cases from the prepared store; those that it lacks are prepared now."""
    if not cases:
        return []
    folder, progress = _kept_in(cases, model, config), run.leader and len(cases) > 1
    allowed = model.labelling.numbers
    return prepared_cases(cases, model.preparation, allowed, folder, workers=config.workers, progress=progress)


def _kept_in(cases: Sequence[Case], model: VolumeModel, config: SegmentationConfig) -> Path:
    """Return the folder of the prepared cases of one dataset and one preparation."""
    return store_folder(config.store / "prepared", cases[0].image.parent.parent, model.preparation)


def _cache_plan(
    mine: Sequence[Case], parts: int, smallest: int, model: VolumeModel, config: SegmentationConfig, run: Run
) -> CachePlan:
    """Decide where this rank's cases lie, before anything is prepared, and say it.

    Args:
        mine: the cases of this rank, those of one partition after the other.
        parts: its partitions.
        smallest: cases of the smallest partition of all. A smart cache rotates within each partition, all alike.
        model: its preparation decides the sizes.
        config: what was asked for.
        run: says it; its ranks take the same numbers.
    """
    cache, ranks = config.caching(), run.ranks
    mode, smart = cast(CacheMode, cache.mode), cache.mode == "smart"
    asked = None if config.fast_dev_run else cache.cases  # its few cases may be fewer
    sizes = {case: prepared_bytes(case, model.preparation) for case in mine}
    some = sorted(mine, key=lambda case: -sizes[case])[:smallest] if smart else mine
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    budgets = measure_budgets(run.device, _kept_in(mine, model, config), here * (parts if smart else 1))
    if smart and "gpu" in budgets:
        budgets["gpu"] //= parts
    bytes_each = {case.name: sizes[case] for case in some}
    if smart:
        kept = run.directory / "smart_cache.json"  # what an earlier start of the run held at a time
        asked = ranks.once(lambda: read_object(kept)["cases"] if kept.is_file() else asked)
    plan = plan_cache(bytes_each, mode, budgets, asked, cache.share)
    if smart:  # the number decides what is trained on, so that every rank and every later start takes the same
        held = ranks.once(lambda: plan.held)
        if held != plan.held:
            plan = plan_cache(bytes_each, mode, budgets, held, cache.share)
        ranks.once(lambda: write_json(kept, {"cases": held}))
    run.say("\n".join(plan.lines))
    if cache.reshuffle is not None:
        tier = max(plan.tiers, key=_SLOWEST_LAST.index)
        run.say(f"cache: redistributed every {cache.reshuffle} epochs, so all cases of an epoch are in tier {tier}")
    return plan


def _changing(
    number: int, part: np.ndarray, data: Data, model: VolumeModel, config: SegmentationConfig, plan: CachePlan, run: Run
) -> CaseCache:
    """Return the cache of a partition, by its number and cases, that are loaded when they are needed."""
    cases, cache = data.split.training, config.caching()
    partitions, size = decided(config.parallel.partitions), decided(config.crop_size)
    tier: Tier = max(plan.tiers, key=_SLOWEST_LAST.index)

    def load(number: int) -> CachedCase:
        if cache.mode == "none":
            prepared = prepare_case(cases[number], model.preparation, model.labelling.numbers)
        else:
            (prepared,) = stored_cases([cases[number]], model, config, run)
        return place_cases([prepared], tier, size, run.device)[0]

    def cases_of(epoch: int) -> np.ndarray:
        if cache.mode == "none":
            return part
        if cache.reshuffle is not None:
            return partition_cases(len(cases), partitions, number, config.seed, epoch // cache.reshuffle)
        # A partition of one case more than the smallest one has its turn for that, too.
        replaced = plan.replaced or int(len(part) > plan.held)
        found: np.ndarray = part[smart_indices(len(part), plan.held, replaced, epoch)]
        return found

    if cache.mode == "none":  # fewer than a batch holds would be prepared twice for it
        recent = lru_cache(max(_RECENT, decided(config.batch_size)))(load)
        return CaseCache(cases_of, size, run.device, True, recent)
    ahead = plan.replaced or int(cache.reshuffle is None)
    return CaseCache(cases_of, size, run.device, tier != "gpu", load, ahead, decided(config.epochs))


def _say_shares(mine: Sequence[Case], count: int, run: Run) -> None:
    """Say which rank holds which of so many cases."""
    if run.ranks.world == 1:
        return
    names = ", ".join(case.name for case in mine)
    for share in run.ranks.gather([f"rank {run.ranks.rank} holds {len(mine)} of {count} cases: {names}"]):
        run.say(share)
