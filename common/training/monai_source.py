"""MONAI's datasets, transforms, loaders and sliding windows as the source of a run: recipes baseline and guide."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from monai.data import CacheDataset, Dataset
from monai.inferers import sliding_window_inference
from monai.transforms import Compose
from torch import nn

from medspeed.common.data.batches import Batches
from medspeed.common.data.dataset import Case
from medspeed.common.data.monai_batches import Transforms, monai_crops, monai_items, plain
from medspeed.common.data.preparation import label_map
from medspeed.common.data.threads import map_in_threads
from medspeed.common.data.volumes import check_same_grid, read_volume
from medspeed.common.inference.labels import dice_counts
from medspeed.common.inference.model import VolumeModel
from medspeed.common.inference.predictors import torch_predictor
from medspeed.common.run import Run
from medspeed.common.training.config import decided
from medspeed.common.training.fit import Validate
from medspeed.common.training.resolve import Data
from medspeed.common.training.setup import shared_validation
from medspeed.common.training.volume_config import SegmentationConfig


def monai_source(
    transforms: tuple[Transforms, Transforms], data: Data, model: VolumeModel, config: SegmentationConfig, run: Run
) -> tuple[Batches, Validate]:
    """Recipes baseline and guide: MONAI's transforms, of training and of validation, and its loaders.

    With the cache "monai" both sets are filled here. MONAI says little about a bad file, so each is read and checked
    first. Each rank has a part of the cases; the last ones begin anew with the first cases, so that all are equally
    long, as in the guide.
    """
    cases, ranks = data.split.training, run.ranks
    cached = config.cache == "monai"
    even = -(-len(cases) // ranks.world) * ranks.world
    mine = ranks.shard([cases[index % len(cases)] for index in range(even)])
    judged = ranks.shard(data.split.validation)
    with run.clock.stage("prepare"):
        check = partial(check_case, model=model)
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
        dataset = CacheDataset(items, chain, num_workers=config.workers) if cached else Dataset(items, chain)
    return batches, shared_validation(partial(_monai_counts, dataset, model, run.device), ranks)


def _monai_counts(
    dataset: Any,  # noqa: ANN401 - MONAI's
    model: VolumeModel,
    device: torch.device,
    network: nn.Module,
    check: Callable[[], None],
) -> list[torch.Tensor]:
    """Return [R, 2] of each case (see `dice_counts`), by MONAI's sliding windows; `check` is called before each."""
    predictor = torch_predictor(network.eval(), model.precision, tf32=True)
    counts = []
    for index in range(len(dataset)):
        check()
        item = dataset[index]
        image = plain(item["image"]).to(device, torch.float32)[None]
        with torch.no_grad():
            logits = sliding_window_inference(
                image, model.window_size, model.window_batch, predictor, overlap=model.overlap
            )
        truth = plain(item["label"]).to(device, torch.uint8)[0]
        counts.append(dice_counts(model.labelling.labels_of(logits[0]), truth, model.labelling.regions))
    return counts


def check_case(case: Case, model: VolumeModel) -> None:
    """Read image and label of a case.

    Raises:
        ValueError: one is damaged, they do not fit each other, or a label is not listed; the file is named.
    """
    assert case.label is not None
    image, label = read_volume(case.image, model.preparation.channels), read_volume(case.label)
    check_same_grid(image, label)
    label_map(label, model.labelling.numbers)
