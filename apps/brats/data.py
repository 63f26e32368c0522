"""Which data the brats app trains on, and which source its batches come from."""

from apps.brats.config import BratsConfig
from apps.brats.monai_recipe import deterministic_transforms, normalisation, random_transforms
from apps.brats.plan import BratsPlan
from common.data.cases import Dataset, Split, read_dataset
from common.observe.run import Run
from common.training.distributed import Ranks
from common.training.resident import resident_source
from common.training.source import Crops, Keeping, Source, dataset_source
from data_scripts.make_phantoms import MRI_VERSION, make_mri_phantoms

PHANTOM_CASES = 20  # the default data: 16 train, 4 validate


def find_dataset(config: BratsConfig, run: Run, ranks: Ranks) -> Dataset:
    """Return the dataset of --data; without it, make the small phantom set once and say loudly that it is synthetic."""
    folder = config.data
    if folder is None:
        made = config.store / "phantoms" / f"mri-small-{MRI_VERSION}"
        folder = ranks.once(lambda: make_mri_phantoms(made, PHANTOM_CASES))
    dataset = read_dataset(folder, gaps=True)
    run.say(f"data: {dataset.folder} ({dataset.name}, {len(dataset.cases)} labelled cases)")
    if dataset.synthetic:
        run.say(
            "SYNTHETIC DATA: these are phantoms, and a Dice on them says nothing about patients. For the real scans:\n"
            "  python data_scripts/fetch_msd.py brats --to data && "
            "python apps/brats/train.py --data data/Task01_BrainTumour"
        )
    return dataset


def keeping(config: BratsConfig) -> Keeping:
    """Return where prepared cases are kept."""
    return Keeping(
        config.store,
        config.cache,
        None if config.fast_dev_run else config.cache_cases,
        config.replace_share,
        config.reshuffle_every,
        config.workers,
    )


def make_source(split: Split, plan: BratsPlan, config: BratsConfig, run: Run, ranks: Ranks) -> Source:
    """Return the source that the configuration names."""
    model, preparation = plan.model, plan.model.preparation
    crops = Crops(
        plan.crop_size,
        plan.crops_per_case,
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
    training = [*fixed, *random_transforms(preparation, plan.crop_size, plan.flip_axes, config.intensity)]
    validation = [*fixed, *normalisation(preparation)]
    return dataset_source(split, model, crops, config.source, training, validation, run, ranks, config.workers)
