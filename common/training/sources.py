"""Where the batches and the validation of a run on volumes come from: our store and caches, or MONAI's datasets.

`our_source` and `monai_source` give the same two things, and nothing else in an app knows which one runs: training
batches of this rank, image [B, C, X, Y, Z] and label [B, 1, X, Y, Z] on the run's device; and what counts, of this
rank's validation cases, the voxels that the Dice on the working grid is computed from, [R, 2] of each.
"""

import os
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from medspeed.common.data import cache as tiers
from medspeed.common.data.batches import Batches, crop_batches, partition_cases
from medspeed.common.data.cache import CacheMode, CachePlan, CaseCache, smart_indices
from medspeed.common.data.crops import CachedCase, Tier, place_cases
from medspeed.common.data.dataset import Case
from medspeed.common.data.preparation import PreparedCase, prepare_case, read_case
from medspeed.common.data.store import prepared_bytes, prepared_cases, store_folder
from medspeed.common.data.threads import map_in_threads
from medspeed.common.files import read_object, write_json
from medspeed.common.inference.labels import dice_counts, mean_dice
from medspeed.common.inference.model import VolumeModel
from medspeed.common.inference.predict import working_counts
from medspeed.common.inference.predictors import torch_predictor
from medspeed.common.run import Run
from medspeed.common.training.config import decided
from medspeed.common.training.fit import Setup
from medspeed.common.training.losses import build_loss, say_inexact
from medspeed.common.training.optimizers import build_optimizer
from medspeed.common.training.resolve import Data
from medspeed.common.training.setup import compile_if_asked, dtype_of, network_trials, trust_kernels, volume_trials
from medspeed.common.training.volume_config import SegmentationConfig

Transforms = Sequence[Callable[[Any], Any]]
Counts = Callable[..., list[torch.Tensor]]

_RECENT = 8  # cases that the cache "none" keeps since they were used last
_SLOWEST_LAST: list[Tier] = ["gpu", "ram", "disk", "none"]


def volume_setup(
    config: SegmentationConfig, data: Data, model: VolumeModel, chains: tuple[Transforms, Transforms] | None, run: Run
) -> Setup:
    """Build the network of a decided run, the source of its batches, the loss and the optimizer.

    The network starts with the weights of --init, unless there is a checkpoint, whose weights `fit` takes. Batches come
    by MONAI's `chains`, its transforms of training and of validation, or, where they are None, from our store.
    """
    resumed = (run.directory / "checkpoints" / "last").exists()
    network = model.build(None if resumed else config.init).to(run.device)
    if config.channels_last:
        network = network.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    trust_kernels(network_trials(network, config, run), config, run)
    source = our_source if chains is None else partial(monai_source, chains)
    batches, counts = source(data, model, config, run)
    with run.clock.stage("compile"):
        trust_kernels(volume_trials(config, model, batches, run.ranks.world, run.device), config, run)
    windows = (model.window_batch, model.preparation.channels, *model.window_size)
    compile_if_asked(network, batches, windows, config, run)
    say_inexact(config.loss, run.ranks, config.parallel.accumulate, run)
    scheme = model.labelling
    loss = build_loss(config.loss, run.ranks, () if scheme.exclusive else scheme.regions)
    optimizer = build_optimizer(decided(config.optimizer), network.parameters(), decided(config.learning_rate))

    def validate(network: nn.Module, check: Callable[[], None]) -> float:
        mine = counts(network=network, check=check)
        return mean_dice(run.ranks.gather(torch.stack(mine).cpu().unbind() if mine else []))

    return Setup(network, batches, loss, optimizer, model.precision, validate)


def our_source(data: Data, model: VolumeModel, config: SegmentationConfig, run: Run) -> tuple[Batches, Counts]:
    """Recipe fast: each rank holds the prepared cases of its own partitions as near the device as they fit."""
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
    if ranks.world > 1:
        names = ", ".join(case.name for case in mine)
        for share in ranks.gather([f"rank {ranks.rank} holds {len(mine)} of {len(cases)} cases: {names}"]):
            run.say(share)
    caches: list[CaseCache] = []
    place = 0
    with run.clock.stage("cache"):
        for number, part in zip(local, parts, strict=True):
            rows = slice(place, place := place + len(part))
            if ahead and cache.reshuffle is None:
                caches.append(tiers.fill_cache(prepared[rows], plan.tiers[rows], size, run.device, part))
            else:
                caches.append(_changing(number, part, data, model, config, plan, run))
        held = tiers.hold_cases(validation, plan.free, run.device)
    if run.device.type == "cuda":
        run.say(f"validation: {sum(case.image.is_cuda for case in held)} of {len(held)} cases kept in GPU memory")
    count = plan.held * partitions if cache.mode == "smart" else len(cases)
    sizes = decided(config.crops.per_case), decided(config.batch_size), count, partitions
    changes = config.crops.flips or "", config.crops.intensity, config.seed
    form = dtype_of(config.precision), bool(config.channels_last)
    batches = crop_batches(caches, *sizes, *changes, form)
    return batches, partial(working_counts, held, model=model)


def monai_source(
    transforms: tuple[Transforms, Transforms], data: Data, model: VolumeModel, config: SegmentationConfig, run: Run
) -> tuple[Batches, Counts]:
    """Recipes baseline and guide: MONAI's transforms, of training and of validation, and its loaders.

    MONAI says little about a bad file, so each is read and checked first. Each rank has a part of the cases; the last
    ones begin anew with the first cases, so that all are equally long, as in the guide.
    """
    from monai import data as monai  # here: MONAI takes longer to load than all the rest
    from monai.transforms import Compose

    from medspeed.common.data.monai_batches import monai_crops, monai_items

    cases, ranks = data.split.training, run.ranks
    cached = config.cache == "monai"
    even = -(-len(cases) // ranks.world) * ranks.world
    mine = ranks.shard([cases[index % len(cases)] for index in range(even)])
    judged = ranks.shard(data.split.validation)

    def check(case: Case) -> None:
        read_case(case, model.preparation.channels, model.labelling.numbers)

    with run.clock.stage("prepare"):
        map_in_threads(check, list(dict.fromkeys([*mine, *judged])), "checking cases", config.workers, run.leader)
    with run.clock.stage("cache"):
        batches = monai_crops(
            mine,
            transforms[0],
            cached=cached,
            crops_per_case=decided(config.crops.per_case),
            batch_size=decided(config.batch_size) // ranks.world,
            workers=config.workers,
            seed=config.seed * ranks.world + ranks.rank,
            device=run.device,
        )
        chain, items = Compose(list(transforms[1])), monai_items(judged)
        keep = partial(monai.CacheDataset, num_workers=config.workers) if cached else monai.Dataset
        return batches, partial(_monai_counts, keep(items, chain), model, run.device)


def _monai_counts(
    dataset: Dataset[Any], model: VolumeModel, device: torch.device, network: nn.Module, check: Callable[[], None]
) -> list[torch.Tensor]:
    """Return [R, 2] of each case (see `dice_counts`), by MONAI's sliding windows; `check` is called before each."""
    from monai.inferers import sliding_window_inference

    from medspeed.common.data.monai_batches import plain

    predictor = torch_predictor(network.eval(), model.precision, tf32=True)
    counts = []
    windows = model.window_size, model.window_batch, predictor, model.overlap
    for index in range(len(dataset)):  # type: ignore[arg-type]  # MONAI's
        check()
        item = dataset[index]
        image = plain(item["image"]).to(device, torch.float32)[None]
        with torch.no_grad():
            logits = sliding_window_inference(image, *windows)
        truth = plain(item["label"]).to(device, torch.uint8)[0]
        counts.append(dice_counts(model.labelling.labels_of(logits[0]), truth, model.labelling.regions))
    return counts


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
    """Decide where the cases of this rank's `parts` partitions lie, before anything is prepared, and say it.

    A smart cache rotates within each partition, all alike: by the number of cases of the `smallest` of all.
    """
    cache, ranks = config.caching(), run.ranks
    mode, smart = cast(CacheMode, cache.mode), cache.mode == "smart"
    asked = None if config.fast_dev_run else cache.cases  # its few cases may be fewer
    sizes = {case: prepared_bytes(case, model.preparation) for case in mine}
    some = sorted(mine, key=lambda case: -sizes[case])[:smallest] if smart else mine
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    budgets = tiers.measure_budgets(run.device, _kept_in(mine, model, config), here * (parts if smart else 1))
    if smart and "gpu" in budgets:
        budgets["gpu"] //= parts
    plan_of = partial(tiers.plan_cache, {case.name: sizes[case] for case in some}, mode, budgets, share=cache.share)

    def held() -> int:
        """Return the number that decides what is trained on, which every rank and every later start takes."""
        kept = run.directory / "smart_cache.json"
        number: int = read_object(kept)["cases"] if kept.is_file() else plan_of(smart_cases=asked).held
        write_json(kept, {"cases": number})
        return number

    plan = plan_of(smart_cases=ranks.once(held) if smart else asked)
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
