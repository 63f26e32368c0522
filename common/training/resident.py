"""The fast source: prepared cases, held as near the device as they fit, and crops cut and augmented there."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from common.data.batches import CropBatches
from common.data.cache_host import CaseList, HeldCase, LoadedCases, hold_case, hold_cases
from common.data.cases import Case, Split
from common.data.partitions import partition_cases
from common.data.preparation import Preparation, prepare_case
from common.data.smart import smart_indices
from common.data.store import prepared_bytes
from common.data.supply import ChangingSupply, FixedSupply, Supply
from common.data.tiers import CachePlan, Tier, measure_budgets, plan_cache
from common.files import write_json
from common.inference.segmentation import SegmentationModel, working_counts
from common.observe.run import Run
from common.training.distributed import Ranks
from common.training.source import Crops, Keeping, Source, kept_in, shared_validation, stored_cases

_RECENT = 8  # cases that the cache "none" keeps since they were used last
_SLOWEST_LAST: list[Tier] = ["gpu", "ram", "disk", "none"]


def resident_source(
    split: Split, model: SegmentationModel, crops: Crops, keeping: Keeping, run: Run, ranks: Ranks
) -> Source:
    """Recipe fast: prepared cases from the store, held as near the device as they fit, crops cut and augmented there.

    Each rank holds the cases of its own partitions only.
    """
    local = range(ranks.rank, crops.partitions, ranks.world)
    parts = [partition_cases(len(split.training), crops.partitions, number) for number in local]
    mine = [split.training[index] for part in parts for index in part]
    smallest = len(split.training) // crops.partitions
    plan = _cache_plan(mine, len(local), smallest, model.preparation, keeping, run, ranks)
    with run.clock.stage("prepare"):
        ahead = keeping.cache not in ("none", "smart")  # those prepare a case when it is needed
        prepared = stored_cases(mine, model, keeping, run) if ahead else []
        validation = stored_cases(ranks.shard(split.validation), model, keeping, run)
    _say_shares(mine, split, run, ranks)
    supplies: list[Supply] = []
    place = 0
    with run.clock.stage("cache"):
        for number, part in zip(local, parts, strict=True):
            rows = slice(place, place := place + len(part))
            if ahead and keeping.reshuffle_every is None:
                supplies.append(FixedSupply(hold_cases(prepared[rows], plan.tiers[rows], crops.size, run.device, part)))
            else:
                supplies.append(_changing(number, part, split, model, crops, keeping, plan, run))
    batches = CropBatches(
        tuple(supplies),
        crops.size,
        crops.per_case,
        crops.batch_size,
        plan.held * crops.partitions if keeping.cache == "smart" else len(split.training),
        crops.partitions,
        tuple("xyz".index(axis) for axis in crops.flip_axes),
        crops.intensity,
        crops.seed,
        run.device,
    )
    return Source(batches, shared_validation(partial(working_counts, validation, model=model), ranks))


def _cache_plan(
    mine: Sequence[Case],
    parts: int,
    smallest: int,
    preparation: Preparation,
    keeping: Keeping,
    run: Run,
    ranks: Ranks,
) -> CachePlan:
    """Decide where this rank's cases lie, before anything is prepared, and say it.

    Args:
        mine: the cases of this rank, those of one partition after the other.
        parts: its partitions.
        smallest: cases of the smallest partition of all. A smart cache rotates within each partition, all alike.
        preparation: decides the sizes.
        keeping: what was asked for.
        run: says it.
        ranks: those that take the same numbers.
    """
    smart = keeping.cache == "smart"
    sizes = {case: prepared_bytes(case, preparation) for case in mine}
    some = sorted(mine, key=lambda case: -sizes[case])[:smallest] if smart else mine
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    budgets = measure_budgets(run.device, kept_in(mine, preparation, keeping), here * (parts if smart else 1))
    if smart and budgets.gpu is not None:
        budgets = replace(budgets, gpu=budgets.gpu // parts)
    names, bytes_each = [case.name for case in some], [sizes[case] for case in some]
    asked = keeping.cache_cases
    if smart:
        asked = ranks.once(lambda: _kept_number(run.directory / "smart_cache.json", asked))
    plan = plan_cache(names, bytes_each, keeping.cache, budgets, asked, keeping.replace_share)
    if smart:  # the number decides what is trained on, so that every rank and every later start takes the same
        held = ranks.once(lambda: plan.held)
        if held != plan.held:
            plan = plan_cache(names, bytes_each, keeping.cache, budgets, held, keeping.replace_share)
        ranks.once(lambda: write_json(run.directory / "smart_cache.json", {"cache_cases": held}))
    run.say("\n".join(plan.lines))
    if keeping.reshuffle_every is not None:
        tier = max(plan.tiers, key=_SLOWEST_LAST.index)
        run.say(
            f"cache: dealt anew every {keeping.reshuffle_every} epochs, so all cases of an epoch lie in tier {tier}"
        )
    return plan


def _kept_number(path: Path, asked: int | None) -> int | None:
    """Return the number of cases that an earlier start of the run held at a time, else what is asked for."""
    return json.loads(path.read_text(encoding="utf-8"))["cache_cases"] if path.is_file() else asked


def _changing(
    number: int,
    part: np.ndarray,
    split: Split,
    model: SegmentationModel,
    crops: Crops,
    keeping: Keeping,
    plan: CachePlan,
    run: Run,
) -> Supply:
    """Return the supply of a partition whose cases are loaded when they are needed."""
    cases, device = split.training, run.device
    tier: Tier = max(plan.tiers, key=_SLOWEST_LAST.index)

    def load(index: int) -> HeldCase:
        case = cases[index]
        if keeping.cache == "none":
            classes = model.labelling.numbers
            prepared = prepare_case(case.name, case.image, case.label, model.preparation, classes)
        else:
            (prepared,) = stored_cases([case], model, keeping, run)
        return hold_case(prepared, crops.size, tier, device)

    if keeping.cache == "none":
        names = tuple(cases[index].name for index in part)
        return FixedSupply(
            LoadedCases(names, part, device, lambda row: load(int(part[row])), max(_RECENT, crops.batch_size))
        )
    every = keeping.reshuffle_every

    def indices(epoch: int) -> np.ndarray:
        if every is None:
            # A partition of one case more than the smallest one has its turn for that, too.
            replaced = plan.replaced or int(len(part) > plan.held)
            found: np.ndarray = part[smart_indices(len(part), plan.held, replaced, epoch)]
            return found
        return partition_cases(len(cases), crops.partitions, number, crops.seed, epoch // every)

    return ChangingSupply(
        tuple(case.name for case in cases),
        indices,
        load,
        lambda held, numbers: CaseList(held, numbers, device),
        ahead=plan.replaced or int(every is None),
        epochs=crops.epochs,
    )


def _say_shares(mine: Sequence[Case], split: Split, run: Run, ranks: Ranks) -> None:
    """Say which rank holds which cases."""
    if ranks.world == 1:
        return
    for share in ranks.gather(
        [f"rank {ranks.rank} holds {len(mine)} of {len(split.training)} cases: {', '.join(case.name for case in mine)}"]
    ):
        run.say(share)
