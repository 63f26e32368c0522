"""Which data the spleen app trains on, and which source its batches come from."""

from apps.spleen.config import SpleenConfig
from apps.spleen.monai_recipe import deterministic_transforms, random_crops
from apps.spleen.plan import SpleenPlan
from common.data.cases import Dataset, Split, read_dataset
from common.observe.run import Run
from common.training.distributed import Ranks
from common.training.resident import resident_source
from common.training.source import Crops, Keeping, Source, dataset_source
from data_scripts.make_phantoms import CT_VERSION, make_ct_phantoms

PHANTOM_CASES = 20  # the default data: 16 train, 4 validate


def find_dataset(config: SpleenConfig, run: Run, ranks: Ranks) -> Dataset:
    """Return the dataset of --data; without it, make the small phantom set once and say loudly that it is synthetic."""
    folder = config.data
    if folder is None:
        made = config.store / "phantoms" / f"ct-small-{CT_VERSION}"
        folder = ranks.once(lambda: make_ct_phantoms(made, PHANTOM_CASES))
    dataset = read_dataset(folder)
    run.say(f"data: {dataset.folder} ({dataset.name}, {len(dataset.cases)} labelled cases)")
    if dataset.synthetic:
        run.say(
            "SYNTHETIC DATA: these are phantoms, and a Dice on them says nothing about patients. For the real scans:\n"
            "  python data_scripts/fetch_msd.py spleen --to data && "
            "python apps/spleen/train.py --data data/Task09_Spleen"
        )
    return dataset


def keeping(config: SpleenConfig) -> Keeping:
    """Return where prepared cases are kept."""
    return Keeping(config.store, config.cache, workers=config.workers)


def make_source(split: Split, plan: SpleenPlan, config: SpleenConfig, run: Run, ranks: Ranks) -> Source:
    """Return the source that the configuration names."""
    model, preparation = plan.model, plan.model.preparation
    crops = Crops(
        plan.crop_size,
        config.crops_per_case,
        plan.batch_size,
        plan.partitions,
        plan.epochs,
        plan.flip_axes,
        config.intensity,
        config.seed,
    )
    if config.source == "resident":
        return resident_source(split, model, crops, keeping(config), run, ranks)
    fixed = deterministic_transforms(preparation, run.device if config.source == "cached" else None)
    training = [*fixed, *random_crops(plan.crop_size, config.crops_per_case)]
    return dataset_source(split, model, crops, config.source, training, fixed, run, ranks, config.workers)
