"""Data and `Setup` of a run on volumes: cases, batches (cached, or MONAI's), network, loss, optimizer, validation."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import nn

from medspeed.common.data import cache as tiers
from medspeed.common.data.batches import Batches, crop_batches, partition_cases
from medspeed.common.data.crops import CachedCase, place_case
from medspeed.common.data.dataset import Case, Dataset, Split, make_synthetic, read_dataset, read_split, split_cases
from medspeed.common.data.fingerprint import Fingerprint, fingerprint, is_ct
from medspeed.common.data.folds import split_fold, trained_before
from medspeed.common.data.preparation import Preparation, PreparedCase, prepare_case
from medspeed.common.data.threads import map_in_threads
from medspeed.common.files import plural, read_as, read_object, write_json
from medspeed.common.inference.labels import mean_dice
from medspeed.common.inference.model import VolumeModel
from medspeed.common.inference.predict import working_counts
from medspeed.common.run import Run
from medspeed.common.training.config import DEV_RUN, decided
from medspeed.common.training.fit import Setup
from medspeed.common.training.losses import build_loss, say_inexact
from medspeed.common.training.optimizers import build_optimizer
from medspeed.common.training.setup import compile_if_asked, dtype_of, network_trials, trust_kernels, volume_trials
from medspeed.common.training.volume_config import SegmentationConfig

S = TypeVar("S", bound=SegmentationConfig)


@dataclass(frozen=True)
class Data:
    """The scans of a run."""

    dataset: Dataset  # all there are
    split: Split  # which of them train, and which validate
    figures: Fingerprint  # of those that train; of a fold, of all
    known: Preparation | None = None  # that the app knows for this dataset

    def about(self) -> dict[str, Any]:
        """Return what the summary of a run says of its data, and how many cases trained and validated it."""
        data = {"folder": str(self.dataset.folder), "name": self.dataset.name, "synthetic": self.dataset.synthetic}
        return {"data": data, "cases": {name: len(getattr(self.split, name)) for name in ("training", "validation")}}


def read_volumes(
    config: SegmentationConfig, run: Run, phantoms: str = "", real: str = "", known: Mapping[str, Preparation] = {}
) -> Data:
    """Read the dataset of --data, or small phantoms, which it says loudly; split it and take its fingerprint.

    The leader decides for all ranks. A resumed run finds the split and the fingerprint of its first start. `phantoms`
    is kind, size and version of those of `make_phantoms.py` ("ct-small-2"), "" for an app without any; `real` the
    name of the folder of scans that `fetch_msd.py` downloads; `known` leads from "NAME: LABEL, LABEL" of a CT dataset
    to its preparation, and spares reading all of it. What cannot be used is a FileNotFoundError or ValueError.
    """
    with run.clock.stage("prepare"):
        folder = config.data
        if folder is None:
            if not phantoms:
                raise ValueError("data null: this app has no synthetic phantoms; pass a dataset folder with --data")
            made, words = config.store / "phantoms" / phantoms, (phantoms.split("-")[0], "--cases", "20")
            folder = run.ranks.once(lambda: make_synthetic(made, "make_phantoms", *words))  # 16 train, 4 validate
        dataset = read_dataset(folder)
        run.say(f"data: {dataset.folder} ({dataset.name}, {plural(len(dataset.cases), 'labelled case')})")
        if dataset.synthetic:
            remedy = f"medspeed data fetch-msd {config.APP} --to data && medspeed train {config.APP} --data data/{real}"
            said = "SYNTHETIC DATA: these are phantoms; a Dice on them says nothing about patients. For real scans:"
            run.say(f"{said}\n  {remedy}", "warning")
        preparation = known.get(f"{dataset.name}: {', '.join(dataset.labels[1:])}") if is_ct(dataset) else None
        split, figures = run.ranks.once(lambda: _divided(dataset, preparation, config, run))
    return Data(dataset, split, figures, preparation)


def _divided(
    dataset: Dataset, known: Preparation | None, config: SegmentationConfig, run: Run
) -> tuple[Split, Fingerprint]:
    kept, measured = run.directory / "split.json", run.directory / "fingerprint.json"
    # Other voxels give a compressed file another size.
    sizes = {case.name: [path.stat().st_size for path in (case.image, case.label) if path] for case in dataset.cases}
    if run.planned:
        split = read_split(dataset, kept)  # which checks the kinds of the values
        due = sizes | read_object(kept).get("bytes", {})
        if changed := ", ".join(name for name in sizes if sizes[name] != due[name])[:300]:
            said = f"{kept}: {changed}: files have changed since the run began: it cannot resume"
            raise ValueError(f"{said}; restore them, or start a new run from its weights with --init")
        return split, read_as(measured, Fingerprint)
    store = tiers.store_folder(config.store / "fingerprints", dataset.folder)
    if config.fold is None:
        split = split_cases(dataset, config.split)
    else:  # all cases are measured, so that folds prepare alike
        figures = fingerprint(dataset.cases, dataset, store, None, config.workers)
        volumes = [scan.volumes_ml for scan in figures.scans]
        split = split_fold(dataset, volumes, config.fold, decided(config.folds), config.groups, config.seed)
    if config.fast_dev_run:
        parts = config.parallel.partitions or run.ranks.world
        run.say(DEV_RUN, "warning")
        training, validation = split.training[: max(2, parts)], split.validation[:parts]
        split = replace(split, training=training, validation=validation, description=f"{split.description}; shortened")
    if config.fold is None:
        figures = fingerprint(split.training, dataset, store, known, config.workers)
    run.say(split.description)
    named = [(number, name) for number, name in enumerate(dataset.labels) if number and name]
    scans = figures.scans
    if config.fold is not None:  # of all cases
        scans = tuple(scan for case, scan in zip(dataset.cases, scans, strict=True) if case in split.training)
    if absent := [name for number, name in named if not any(scan.volumes_ml[number] for scan in scans)]:
        run.say(f"none of {len(scans)} measured cases has {', '.join(absent)}: it may not be learned", "warning")
    if config.init is not None:
        trained, warning = trained_before(config.init, dataset.name, [case.name for case in split.validation])
        held_out, record = split.held_out and "OUT:" not in warning, split.record | {"trained_before": trained}
        split = replace(split, held_out=held_out, record=record)
        if warning:
            run.say(warning, "warning")
    write_json(kept, split.to_json() | {"bytes": sizes})
    write_json(measured, asdict(figures))
    return split, figures


def volume_setup(
    config: S,
    data: Data,
    model: VolumeModel,
    guide: Callable[[S, Preparation, torch.device], Sequence[Callable[[Any], Any]]] | None,
    run: Run,
) -> Setup:
    """Build the network of a decided run, the source of its batches, the loss and the optimizer.

    The network starts with the weights of --init, unless there is a checkpoint, whose weights `fit` takes. Batches come
    from our store, or by MONAI's transforms of the `guide`, where the app has one; what validates is from our store.
    """
    network = model.build(None if (run.directory / "checkpoints" / "last").exists() else config.init).to(run.device)
    if config.channels_last:
        network = network.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    if config.ours:
        batches, room = our_batches(data, model, config, run)
    else:
        assert guide is not None, f"{config.APP} has no guide: its checks require `ours`"
        from medspeed.common.training.monai_batches import guide_batches  # here: MONAI takes seconds to import

        transforms = guide(config, model.preparation, run.device)
        batches, room = guide_batches(transforms, data.split.training, model, config, run), 0
    with run.clock.stage("prepare"):
        judged = stored_cases(run.ranks.shard(data.split.validation), model, config, run.ranks.leader)
        filled = [case.label is not None and bool(case.label.any()) for case in judged]
        if not any(run.ranks.gather(filled)) and not config.fast_dev_run:
            raise ValueError("no validation case has any foreground, so there is no metric: choose another --split")
    with run.clock.stage("cache"):
        held = tiers.hold_cases(judged, room, run.device)
    if run.device.type == "cuda":
        run.say(f"validation: {sum(case.image.is_cuda for case in held)} of {len(held)} cases kept in GPU memory")
    trust_kernels([*network_trials(network, config, run), *volume_trials(config, model, batches, run)], config, run)
    windows = (model.window_batch, model.preparation.channels, *model.window_size)
    compile_if_asked(network, batches, windows, config, run)
    say_inexact(config.loss, config.parallel.accumulate, run)
    scheme = model.labelling
    loss = build_loss(config.loss, run.ranks, () if scheme.exclusive else scheme.regions)
    optimizer = build_optimizer(decided(config.optimizer), network.parameters(), decided(config.learning_rate))

    def validate(network: nn.Module, check: Callable[[], None]) -> float:
        mine = working_counts(held, network, model, check)
        return mean_dice(run.ranks.gather(torch.stack(mine).cpu().unbind() if mine else []))

    return Setup(network, batches, loss, optimizer, model.precision, validate, data.split.held_out)


def our_batches(data: Data, model: VolumeModel, config: SegmentationConfig, run: Run) -> tuple[Batches, int]:
    """Return batches of the cases of this rank's partitions, and the bytes that these leave of a GPU's budget."""
    partitions, size = decided(config.parallel.partitions), decided(config.crop_size)
    cases, cache, ranks = data.split.training, config.caching(), run.ranks
    none, epochs = cache.mode == "none", decided(config.epochs)
    local = range(ranks.rank, partitions, ranks.world)
    parts = [partition_cases(len(cases), partitions, number) for number in local]
    mine = [cases[index] for part in parts for index in part]
    plan = _cache_plan(mine, len(local), len(cases) // partitions, model, config, run)
    seen = plan.held + (epochs - 1) * (plan.replaced or int(len(parts[0]) > plan.held))
    if cache.mode == "smart" and seen < len(parts[0]):  # the largest partition, where this is the leader
        run.say("some cases are never trained on: raise --epochs, or SHARE of --cache smart:CASES:SHARE", "warning")
    with run.clock.stage("prepare"):  # "none" and "smart" prepare a case when it is needed
        prepared = [] if none or cache.mode == "smart" else stored_cases(mine, model, config, run.ranks.leader)
    if ranks.world > 1:
        names = ", ".join(case.name for case in mine)
        for share in ranks.gather([f"rank {ranks.rank} holds {len(mine)} of {len(cases)} cases: {names}"]):
            run.say(share)

    def load(number: int) -> CachedCase:
        given = cases[number], model.preparation, model.labelling.numbers
        case = prepare_case(*given) if none else tiers.prepared_case(*given, _kept_in(cases[number], model, config))
        return place_case(case, plan.tier, size, run.device)

    def cases_of(number: int, part: np.ndarray, epoch: int) -> np.ndarray:
        """Return the cases that a partition trains on in an epoch, where they are loaded when they are needed."""
        if none:
            return part
        if cache.reshuffle is not None:
            return partition_cases(len(cases), partitions, number, config.seed, epoch // cache.reshuffle)
        # A partition with more cases than are held rotates by one or more per epoch: in time all get a turn.
        replaced = plan.replaced or int(len(part) > plan.held)
        return cast(np.ndarray, part[tiers.smart_indices(len(part), plan.held, replaced, epoch)])

    # With `none`, the last cases used are kept, at least a batch's: none is prepared twice for one batch.
    taken = lru_cache(max(8, decided(config.batch_size)))(load) if none else load
    ahead = None if none else plan.replaced or int(cache.reshuffle is None)
    caches, waiting = [], iter(prepared)
    with run.clock.stage("cache"):
        for number, part in zip(local, parts, strict=True):
            if prepared and cache.reshuffle is None:
                caches.append(tiers.fill_cache([next(waiting) for _ in part], plan.tier, size, run.device, part))
            else:
                turns = partial(cases_of, number, part)
                caches.append(tiers.CaseCache(turns, size, run.device, plan.tier != "gpu", taken, ahead, epochs))
    count = plan.held * partitions if cache.cases else len(cases)
    sizes = decided(config.crops.per_case), decided(config.batch_size), count, partitions
    changes = config.crops.flips or "", config.crops.intensity, config.seed
    return crop_batches(caches, *sizes, *changes, (dtype_of(config.precision), bool(config.channels_last))), plan.free


def stored_cases(
    cases: Sequence[Case], model: VolumeModel, config: SegmentationConfig, progress: bool = False
) -> list[PreparedCase]:
    """Return cases from the prepared store; those that it lacks are prepared now."""

    def stored(case: Case) -> PreparedCase:
        return tiers.prepared_case(case, model.preparation, model.labelling.numbers, _kept_in(case, model, config))

    return map_in_threads(stored, cases, "preparing cases" if progress else "", config.workers)


def _kept_in(case: Case, model: VolumeModel, config: SegmentationConfig) -> Path:
    return tiers.store_folder(config.store / "prepared", case.image.parent.parent, model.preparation)


def _cache_plan(
    mine: Sequence[Case], parts: int, smallest: int, model: VolumeModel, config: SegmentationConfig, run: Run
) -> tiers.CachePlan:
    """Decide where the cases of this rank's `parts` partitions lie, before anything is prepared, and say it.

    A smart cache rotates within each partition, all alike: by the number of cases of the `smallest` of all.
    """
    cache, here = config.caching(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    mode, smart = cast(tiers.CacheMode, cache.mode), cache.mode == "smart"
    asked = None if config.fast_dev_run else cache.cases  # its few cases may be fewer
    sizes = sorted((tiers.prepared_bytes(case, model.preparation) for case in mine), reverse=True)
    budgets = tiers.measure_budgets(run.device, _kept_in(mine[0], model, config), here * (parts if smart else 1))
    if smart and "gpu" in budgets:
        budgets["gpu"] //= parts
    plan_of = partial(tiers.plan_cache, sizes[: smallest if smart else None], mode, budgets, share=cache.share)

    def held() -> int:
        """Return the number that decides what is trained on, which every rank and every later start takes."""
        kept = run.directory / "smart_cache.json"
        number: int = read_object(kept)["cases"] if kept.is_file() else plan_of(asked=asked).held
        write_json(kept, {"cases": number})
        return number

    plan = plan_of(asked=run.ranks.once(held) if smart else None)
    run.say(plan.words + (f"; redistributed every {cache.reshuffle} epochs" if cache.reshuffle else ""))
    return plan
