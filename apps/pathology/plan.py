"""What a run decides from its configuration, its data and its device before it starts, each choice said in a line."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from apps.pathology.config import PathologyConfig
from apps.pathology.model import APP, HALO, PathologyModel
from common.files import write_json
from common.inference.model_file import write_model
from common.observe.run import Run
from common.training.distributed import Ranks
from common.training.precision import choose_precision
from common.training.source import check_partitions
from models.resnet18_fcn import STRIDE

# What `fast` takes where the user says nothing: the guide's patches on a GPU, small ones on a CPU. Steps, not epochs,
# so that small and large sets train equally long.
PATCH_SIZE = {"cuda": 224, "cpu": 96}
PATCHES_PER_SLIDE = {"cuda": 2000, "cpu": 400}
_BATCH_SIZE = {"cuda": 256, "cpu": 32}
_STEPS = {"cuda": 15_600, "cpu": 400}  # CUDA: the guide's 400,000 patches for 10 epochs, in batches of 256
_VALIDATIONS = 8
_CORE = {"cuda": 1536, "cpu": 1024}  # pixels of a tile whose logits are kept
_TILE_BATCH = {"cuda": 4, "cpu": 1}
_GUIDE_PRECISION: dict[str, Literal["fp16", "fp32"]] = {"cuda": "fp16", "cpu": "fp32"}  # autocast("cuda")


@dataclass(frozen=True)
class PathologyPlan:
    """The decisions of a run.

    Args:
        model: network, tiles, precision: what inference needs too.
        batch_size: patches in one step, over all ranks.
        partitions: parts of the training patches; the number of ranks must divide it.
        epochs: passes over the training patches.
        validate_every: epochs between validations.
        patches: digests of the training and the validation patches.
    """

    model: PathologyModel
    batch_size: int
    partitions: int
    epochs: int
    validate_every: int
    patches: tuple[str, str]

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "PathologyPlan":
        """Return what `asdict` made, as JSON gives it back."""
        model = PathologyModel.from_json(content["model"])
        return cls(**{**content, "model": model, "patches": tuple(content["patches"])})


def plan_run(
    config: PathologyConfig,
    patch_size: int,
    mpp: float | None,
    count: int,
    patches: tuple[str, str],
    device: torch.device,
    ranks: int = 1,
) -> PathologyPlan:
    """Decide what the configuration leaves open.

    Args:
        config: what was asked for; it always wins.
        patch_size: of the patches.
        mpp: of their pixels, um; None where the data do not say.
        count: training patches.
        patches: digests of the training and the validation patches.
        device: a CPU gets smaller batches and tiles.
        ranks: processes that train together.

    Raises:
        ValueError: what was asked for does not fit the data or the device.
    """
    kind = device.type
    as_guide = config.recipe == "guide" and config.precision == "auto"
    partitions = config.partitions or ranks
    batch_size = config.batch_size or max(1, min(_BATCH_SIZE[kind], count) // partitions) * partitions
    check_partitions(partitions, batch_size, config.accumulate, ranks, config.source == "resident")
    epochs, validate_every = config.plan_epochs(_STEPS[kind], max(1, count // batch_size), _VALIDATIONS)
    if patch_size % STRIDE:
        raise ValueError(f"patches of {patch_size} pixels: sides must be multiples of {STRIDE}, the network's stride")
    margin = 2 * HALO + patch_size - STRIDE
    tile_size = config.tile_size or _CORE[kind] + margin
    if tile_size <= margin:
        raise ValueError(
            f"tile_size {tile_size}: must be above {margin} for patches of {patch_size} pixels; the network sees "
            f"{HALO} pixels around each of them, whose logits are thrown away"
        )
    model = PathologyModel(
        patch_size=patch_size,
        mpp=mpp,
        tile_size=tile_size,
        tile_batch=_TILE_BATCH[kind],
        precision=choose_precision(_GUIDE_PRECISION[kind] if as_guide else config.precision, device),
    )
    return PathologyPlan(
        model=model,
        batch_size=batch_size,
        partitions=partitions,
        epochs=epochs,
        validate_every=validate_every,
        patches=patches,
    )


def decide(plan: PathologyPlan, config: PathologyConfig, run: Run, ranks: Ranks) -> PathologyPlan:
    """Keep the plan in the run's folder and say its choices; a resumed run finds that of its first start.

    Raises:
        ValueError: the run goes on with other patches than it began with.
    """
    kept = run.directory / "plan.json"

    def make() -> dict[str, Any]:
        if run.resumed and kept.is_file():
            content: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
            if tuple(content["patches"]) != plan.patches:
                raise ValueError(
                    f"{kept}: the run began with other patches than --data now gives, so it cannot go on; restore the "
                    "files, or start a new run from its weights with --init"
                )
            return content
        decided = {**asdict(plan.model), **asdict(plan)}
        for name in [name for name in decided if name != "patch_size"]:  # the data's line has it
            if hasattr(config, name) and getattr(config, name) in (None, "auto"):
                run.say(f"{name} {decided[name]}: chosen for this {run.device.type}; change it with --{name}")
        write_model(run.directory, APP, plan.model)
        write_json(kept, asdict(plan))
        return asdict(plan)

    return PathologyPlan.from_json(json.loads(json.dumps(ranks.once(make))))
