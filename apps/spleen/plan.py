"""What a run decides from its configuration, its data and its device before it starts, each choice said in a line."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from apps.spleen.config import SpleenConfig
from apps.spleen.model import SpleenModel
from common.data.cases import Dataset
from common.data.fingerprint import Fingerprint, explain_preparation, plan_preparation
from common.training.bounds import check_divides
from common.training.precision import choose_precision
from common.training.source import check_partitions

# What `fast` takes where the user says nothing: the guide's network on a GPU, a small one on a CPU (trained in about
# a minute on two cores). Steps, not epochs, so that small and large datasets train equally long.
_CHANNELS = {"cuda": (16, 32, 64, 128, 256), "cpu": (8, 16, 32, 64)}
_RESIDUAL_UNITS = 2
_FLIP_AXES = {"cuda": "xyz", "cpu": ""}  # a minute is too short to learn the spleen from both sides
_CROP_LIMIT = {"cuda": (96, 96, 96), "cpu": (64, 64, 48)}
_WINDOW_LIMIT = (160, 160, 160)  # the guide's; large windows compute fewer borders twice
_WINDOW_BATCH = {"cuda": 4, "cpu": 1}
_BATCH_SIZE = {"cuda": 16, "cpu": 4}
_STEPS = {"cuda": 480, "cpu": 400}
_VALIDATIONS = 10
_GUIDE_PRECISION: dict[str, Literal["fp16", "fp32"]] = {"cuda": "fp16", "cpu": "fp32"}  # autocast("cuda")


@dataclass(frozen=True)
class SpleenPlan:
    """The decisions of a run.

    Args:
        model: network, preparation, labels, windows, precision: what inference needs too.
        crop_size: crop X, Y, Z in voxels of the working grid.
        flip_axes: axes flipped at random, letters of "xyz".
        batch_size: crops in one step, over all ranks.
        partitions: parts of the training cases; the number of ranks must divide it.
        epochs: passes over the training cases.
        validate_every: epochs between validations.
    """

    model: SpleenModel
    crop_size: tuple[int, int, int]
    flip_axes: str
    batch_size: int
    partitions: int
    epochs: int
    validate_every: int

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON takes it."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "SpleenPlan":
        """Return what `to_json` was made from."""
        model = SpleenModel.from_json(content["model"])
        return cls(**{**content, "model": model, "crop_size": tuple(content["crop_size"])})


def plan_run(
    config: SpleenConfig, dataset: Dataset, figures: Fingerprint, cases: int, device: torch.device, ranks: int = 1
) -> tuple[SpleenPlan, list[str]]:
    """Decide what the configuration leaves open.

    Args:
        config: what was asked for; it always wins.
        dataset: its modality decides the normalisation, its labels the classes.
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
    preparation = plan_preparation(dataset, figures, config.spacing, config.window)
    shape = [
        round(side * native / working)
        for side, native, working in zip(figures.shape, figures.spacing, preparation.spacing, strict=True)
    ]
    channels = config.channels or _CHANNELS[kind]
    divisor = 2 ** (len(channels) - 1)
    partitions = config.partitions or ranks
    batch_size = config.batch_size or -(-_BATCH_SIZE[kind] // partitions) * partitions
    check_partitions(partitions, batch_size, config.accumulate, ranks, config.alike())
    per_epoch = -(-cases * config.crops_per_case // batch_size)
    epochs, validate_every = config.plan_epochs(_STEPS[kind], per_epoch, _VALIDATIONS)
    crop_size = config.crop_size or _within(shape, _CROP_LIMIT[kind], divisor)
    check_divides("crop_size", crop_size, len(channels) - 1)
    wish = _GUIDE_PRECISION[kind] if config.recipe == "guide" and config.precision == "auto" else config.precision
    model = SpleenModel(
        labels=dataset.labels,
        preparation=preparation,
        channels=channels,
        residual_units=config.residual_units or _RESIDUAL_UNITS,
        window_size=config.window_size or _within(shape, _WINDOW_LIMIT, divisor),
        window_batch=config.window_batch or _WINDOW_BATCH[kind],
        precision=choose_precision(wish, device, [side // divisor for side in crop_size]),
        overlap=config.overlap,
    )
    plan = SpleenPlan(
        model=model,
        crop_size=crop_size,
        flip_axes=_FLIP_AXES[kind] if config.flip_axes is None else config.flip_axes,
        batch_size=batch_size,
        partitions=partitions,
        epochs=epochs,
        validate_every=validate_every,
    )
    check_divides("window_size", model.window_size, len(channels) - 1)
    lines = [*explain_preparation(dataset, figures, config.spacing, config.window), *_choices(config, plan, kind)]
    return plan, lines


def _choices(config: SpleenConfig, plan: SpleenPlan, kind: str) -> list[str]:
    """Return a line for each field that the configuration left open."""
    decided = {**vars(plan.model), **vars(plan)}
    names = [name for name in decided if hasattr(config, name) and getattr(config, name) in (None, "auto")]
    return [f"{name} {decided[name] or 'none'}: chosen for this {kind}; change it with --{name}" for name in names]


def _within(shape: Sequence[int], limit: Sequence[int], divisor: int) -> tuple[int, int, int]:
    """Return, per axis, the smaller of the shape and the limit, rounded up to what the network's levels divide."""
    x, y, z = (-(-min(side, most) // divisor) * divisor for side, most in zip(shape, limit, strict=True))
    return x, y, z
