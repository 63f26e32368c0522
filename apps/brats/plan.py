"""What a run decides from its configuration, its data and its device before it starts, each choice said in a line."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from apps.brats.config import BratsConfig
from apps.brats.model import BratsModel
from apps.brats.regions import choose_labelling
from common.data.cases import Dataset
from common.data.fingerprint import Fingerprint, explain_preparation, plan_preparation
from common.inference.predictors import Precision
from common.training.bounds import check_divides
from common.training.precision import choose_precision
from common.training.source import check_partitions

# What `fast` takes where the user says nothing: the guide's network and crop on a GPU, small ones on a CPU (trained in
# about a minute and a half on two cores). Steps, not epochs, so that small and large datasets train equally long.
_FILTERS = {"cuda": 16, "cpu": 8}
_BLOCKS_DOWN = {"cuda": (1, 2, 2, 4), "cpu": (1, 2, 2)}
_FLIP_AXES = {"cuda": "xyz", "cpu": "x"}  # the two halves of a brain are alike; a minute is too short for more
_CROP_LIMIT = {"cuda": (224, 224, 144), "cpu": (48, 48, 48)}
_WINDOW_LIMIT = {"cuda": (160, 160, 160), "cpu": (96, 64, 64)}
_WINDOW_BATCH = {"cuda": 2, "cpu": 1}
_BATCH_SIZE = {"cuda": 1, "cpu": 4}
_CROPS_PER_CASE = {"cuda": 1, "cpu": 4}
_STEPS = {"cuda": 31_040, "cpu": 112}  # CUDA: the guide's 388 cases for 80 epochs, when it has reached its target
_VALIDATIONS = 5
_GUIDE_PRECISION: dict[str, Literal["fp16", "fp32"]] = {"cuda": "fp16", "cpu": "fp32"}  # autocast("cuda")


@dataclass(frozen=True)
class BratsPlan:
    """The decisions of a run.

    Args:
        model: network, preparation, regions, windows, precision: what inference needs too.
        crop_size: crop X, Y, Z in voxels of the working grid.
        crops_per_case: crops of each case in one epoch.
        flip_axes: axes flipped at random, letters of "xyz".
        batch_size: crops in one step, over all ranks.
        channels_last: whether the network is trained with its channels innermost.
        partitions: parts of the training cases; the number of ranks must divide it.
        epochs: passes over the training cases.
        validate_every: epochs between validations.
    """

    model: BratsModel
    crop_size: tuple[int, int, int]
    crops_per_case: int
    flip_axes: str
    batch_size: int
    channels_last: bool
    partitions: int
    epochs: int
    validate_every: int

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON takes it."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "BratsPlan":
        """Return what `to_json` was made from."""
        model = BratsModel.from_json(content["model"])
        return cls(**{**content, "model": model, "crop_size": tuple(content["crop_size"])})


def plan_run(
    config: BratsConfig,
    dataset: Dataset,
    figures: Fingerprint,
    cases: int,
    device: torch.device,
    ranks: int = 1,
) -> tuple[BratsPlan, list[str]]:
    """Decide what the configuration leaves open.

    Args:
        config: what was asked for; it always wins.
        dataset: its modality decides the normalisation and the channels, its labels the regions.
        figures: fingerprint of the training cases.
        cases: number of training cases.
        device: a CPU gets a smaller network, smaller crops and batches.
        ranks: processes that train together; each gets a crop at least.

    Returns:
        The plan, and the lines that explain it.

    Raises:
        ValueError: what was asked for does not fit the data or the device.
    """
    kind = device.type
    model = _model(config, dataset, figures, device)
    levels = len(model.blocks_down) - 1
    crop_size = config.crop_size or _within(_shape(model, figures), _CROP_LIMIT[kind], 2**levels)
    for name, size in (("crop_size", crop_size), ("window_size", model.window_size)):
        check_divides(name, size, levels)
    model = replace(model, precision=_precision(config, device, [side // 2**levels for side in crop_size]))
    partitions = config.partitions or ranks
    crops_per_case = config.crops_per_case or _CROPS_PER_CASE[kind]
    least = _BATCH_SIZE[kind] if config.source == "resident" else 1  # the guide's, on each rank
    batch_size = config.batch_size or -(-least // partitions) * partitions
    epochs, validate_every = config.plan_epochs(_STEPS[kind], -(-cases * crops_per_case // batch_size), _VALIDATIONS)
    check_partitions(partitions, batch_size, config.accumulate, ranks, config.alike())
    plan = BratsPlan(
        model=model,
        crop_size=crop_size,
        crops_per_case=crops_per_case,
        flip_axes=_FLIP_AXES[kind] if config.flip_axes is None else config.flip_axes,
        batch_size=batch_size,
        channels_last=faster_channels_last(model.precision, device)
        if config.channels_last is None
        else config.channels_last,
        partitions=partitions,
        epochs=epochs,
        validate_every=validate_every,
    )
    regions = ", ".join(f"{each.name} = labels {'+'.join(map(str, each.members))}" for each in model.labelling.regions)
    explained = explain_preparation(dataset, figures, config.spacing)
    return plan, [f"regions: {regions}", *explained, *_choices(config, plan, kind)]


def faster_channels_last(precision: Precision, device: torch.device) -> bool:
    """Return whether a SegResNet trains faster with its channels innermost.

    It does, except in bf16 on a CPU: there the gradient of torch's group normalisation takes ten times as long
    (172 ms against 16 ms for [2, 16, 64, 64, 64], torch 2.13 on an EPYC with AVX-512 BF16).
    """
    return device.type == "cuda" or precision != "bf16"


def _model(config: BratsConfig, dataset: Dataset, figures: Fingerprint, device: torch.device) -> BratsModel:
    """Decide what inference needs too, all but the precision, which depends on the crops."""
    kind = device.type
    model = BratsModel(
        labelling=choose_labelling(dataset, config.regions),
        preparation=plan_preparation(dataset, figures, config.spacing),
        filters=config.filters or _FILTERS[kind],
        blocks_down=config.blocks_down or _BLOCKS_DOWN[kind],
        dropout=config.dropout,
        window_size=config.window_size or (1, 1, 1),
        window_batch=config.window_batch or _WINDOW_BATCH[kind],
        overlap=config.overlap,
        precision="fp32",
    )
    if config.window_size is not None:
        return model
    extent = [
        round(side * native / working)
        for side, native, working in zip(figures.extent, figures.spacing, model.preparation.spacing, strict=True)
    ]
    divisor = 2 ** (len(model.blocks_down) - 1)
    x, y, z = (
        _window_side(side, limit, divisor, config.overlap)
        for side, limit in zip(extent, _WINDOW_LIMIT[kind], strict=True)
    )
    return replace(model, window_size=(x, y, z))


def _precision(config: BratsConfig, device: torch.device, deepest: Sequence[int]) -> Precision:
    """Return the precision; `deepest`: sides X, Y, Z of a crop at the coarsest level."""
    as_guide = config.recipe == "guide" and config.precision == "auto"
    return choose_precision(_GUIDE_PRECISION[device.type] if as_guide else config.precision, device, deepest)


def _window_side(extent: int, limit: int, divisor: int, overlap: float) -> int:
    """Return the side of the fewest equal windows, none above the limit, that cover an extent with their overlap."""
    count = 1
    while (side := extent / (count - (count - 1) * overlap)) > limit:
        count += 1
    return -(-math.ceil(side) // divisor) * divisor


def _shape(model: BratsModel, figures: Fingerprint) -> list[int]:
    """Return the median shape X, Y, Z of the training cases in voxels of the working grid."""
    sizes = zip(figures.shape, figures.spacing, model.preparation.spacing, strict=True)
    return [round(side * native / working) for side, native, working in sizes]


def _choices(config: BratsConfig, plan: BratsPlan, kind: str) -> list[str]:
    """Return a line for each field that the configuration left open."""
    decided = {**vars(plan.model), **vars(plan)}
    names = [name for name in decided if hasattr(config, name) and getattr(config, name) in (None, "auto")]
    return [
        f"{name} {'none' if decided[name] == '' else decided[name]}: chosen for this {kind}; change it with --{name}"
        for name in names
    ]


def _within(shape: Sequence[int], limit: Sequence[int], divisor: int) -> tuple[int, int, int]:
    """Return, per axis, the smaller of the shape and the limit, rounded up to what the network's levels divide."""
    x, y, z = (-(-min(side, most) // divisor) * divisor for side, most in zip(shape, limit, strict=True))
    return x, y, z
