"""Where the batches and the validation of the spleen app come from: MONAI's datasets, or our store and cache.

`dataset_source` and `resident_source` offer the same two things, and nothing else in the app knows which one runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from apps.spleen.config import SpleenConfig
from apps.spleen.model import SpleenModel
from apps.spleen.monai_recipe import MonaiBatches, MonaiValidation
from apps.spleen.plan import SpleenPlan
from common.data.batches import Batches, CropBatches
from common.data.cache import cache_device, fill_cache
from common.data.cases import Case, Dataset, Split, read_dataset
from common.data.parallel import map_in_threads
from common.data.preparation import PreparedCase, check_values
from common.data.store import prepared_cases, store_folder
from common.data.volumes import check_same_grid, read_volume
from common.inference.predictors import torch_predictor
from common.inference.quality import dice_counts, labels_of, mean_dice
from common.inference.windows import sliding_windows
from common.observe.run import Run
from common.training.fit import Validate
from data_scripts.make_phantoms import CT_VERSION, make_ct_phantoms

PHANTOM_CASES = 20  # the default data: 16 train, 4 validate


@dataclass(frozen=True)
class Source:
    """What trains and what validates.

    Args:
        batches: training batches, image [B, C, X, Y, Z] and label [B, 1, X, Y, Z] on the run's device.
        validate: from a network to its mean foreground Dice on the working grid of the validation cases.
    """

    batches: Batches
    validate: Validate


def find_dataset(config: SpleenConfig, run: Run) -> Dataset:
    """Return the dataset of --data; without it, make the small phantom set once and say loudly that it is synthetic."""
    folder = config.data
    if folder is None:
        folder = make_ct_phantoms(config.cache / "phantoms" / f"ct-small-{CT_VERSION}", PHANTOM_CASES)
    dataset = read_dataset(folder)
    run.say(f"data: {dataset.folder} ({dataset.name}, {len(dataset.cases)} labelled cases)")
    if dataset.synthetic:
        run.say(
            "SYNTHETIC DATA: these are phantoms, and a Dice on them says nothing about patients. For the real scans:\n"
            "  python data_scripts/fetch_msd.py spleen --to data && "
            "python apps/spleen/train.py --data data/Task09_Spleen"
        )
    return dataset


def make_source(split: Split, plan: SpleenPlan, config: SpleenConfig, run: Run) -> Source:
    """Return the source that the configuration names."""
    return {"resident": resident_source}.get(config.source, dataset_source)(split, plan, config, run)


def dataset_source(split: Split, plan: SpleenPlan, config: SpleenConfig, run: Run) -> Source:
    """Recipes baseline and guide: MONAI's transforms and loaders; with "cached" both sets are filled here.

    MONAI says little about a bad file, so each is read and checked first.
    """
    with run.clock.stage("prepare"):
        cases = list(dict.fromkeys([*split.training, *split.validation]))
        map_in_threads(lambda case: check_case(case, plan.model), cases, "checking cases", config.workers)
    with run.clock.stage("cache"):
        batches = MonaiBatches(split.training, plan, config, run.device)
        validate = MonaiValidation(split.validation, plan, config, run.device)
    return Source(batches, validate)


def check_case(case: Case, model: SpleenModel) -> None:
    """Read image and label of a case.

    Raises:
        ValueError: one is damaged, they do not fit each other, or a label is not listed; the file is named.
    """
    assert case.label is not None
    image, label = read_volume(case.image, model.preparation.channels), read_volume(case.label)
    check_same_grid(image, label)
    check_values(label, len(model.labels))


def resident_source(split: Split, plan: SpleenPlan, config: SpleenConfig, run: Run) -> Source:
    """Recipe fast: prepared cases from the store, resident on the device, crops cut and augmented there."""
    with run.clock.stage("prepare"):
        training = stored_cases(split.training, plan, config)
        validation = stored_cases(split.validation, plan, config)
    with run.clock.stage("cache"):
        device, line = cache_device(training, run.device)
        run.say(line)
        batches = CropBatches(
            fill_cache(training, plan.crop_size, device),
            plan.crop_size,
            config.crops_per_case,
            plan.batch_size,
            tuple("xyz".index(axis) for axis in plan.flip_axes),
            config.intensity,
            config.seed,
            run.device,
        )
    return Source(batches, resident_validation(validation, plan.model))


def resident_validation(cases: list[PreparedCase], model: SpleenModel) -> Validate:
    """Return the validation on prepared cases: batched sliding windows, Dice counted on the device, read once."""

    def validate(network: nn.Module, check: Callable[[], None]) -> float:
        device = next(network.parameters()).device
        predictor = torch_predictor(network.eval(), model.precision)
        counts = []
        for case in cases:
            check()
            assert case.label is not None
            image = case.image.to(device, non_blocking=True)
            logits = sliding_windows(image, predictor, model.window_size, batch_size=model.window_batch)
            truth = case.label.to(device, non_blocking=True)
            counts.append(dice_counts(labels_of(logits), truth, len(model.labels)))
        return mean_dice(counts)

    return validate


def stored_cases(cases: Sequence[Case], plan: SpleenPlan, config: SpleenConfig) -> list[PreparedCase]:
    """Return cases from the prepared store; those that it lacks are prepared now."""
    model = plan.model
    folder = store_folder(config.cache / "prepared", cases[0].image.parent.parent, model.preparation)
    return prepared_cases(cases, model.preparation, len(model.labels), folder, workers=config.workers)
