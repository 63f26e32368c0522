"""The configuration of the brats app: one frozen dataclass and three recipes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from common.config import config_from_yaml, parse_config, resumed_config
from common.training.bounds import check_bounds, check_divides

_DESCRIPTION = (
    "Train a segmentation network on multi-channel MRI (MSD Task01, or any dataset in its layout), from raw volumes to "
    "a TensorRT engine; on one device, or with torchrun on many."
)


@dataclass(frozen=True)
class BratsConfig:
    """What a training run is told; a field that is null is chosen from the data and the device, and printed.

    Args:
        recipe: baseline (MONAI's plain tutorial), guide (MONAI's fast multi-GPU recipe) or fast (ours).
        data: folder in MSD layout (dataset.json, imagesTr, labelsTr); null makes synthetic phantoms.
        regions: what is learned: names (TC, WT and ET, by the names of the labels), labels (each label by itself),
            or the numbers of a challenge: brats2013, brats2018 (2018 to 2021), brats2023.
        split: validation fraction and seed ("0.2:0"), "all" (validate on the training cases), or a JSON file.
        run: folder of this run; null names it by the time below runs/brats.
        resume: folder of a run to go on with; it keeps its own configuration.
        init: weights to start from, a .safetensors of ours or a MONAI bundle's model.pt.
        store: folder for prepared cases and phantoms.
        seed: of the split's default, the initial weights, the crops and the augmentation.
        device: auto, cpu, cuda or cuda:N.
        spacing: working spacing R, A, S in mm; null takes the dataset's fingerprint.
        source: uncached (MONAI Dataset), cached (MONAI CacheDataset) or resident (prepared store, caches below).
        cache: where the prepared cases lie while training (resident source only): auto (the device, then memory, then
            the disk, as they fit), gpu, ram, disk, smart (some at a time, in turn) or none (prepared at every use).
        cache_cases: cases of each partition that the cache "smart" holds at a time; null takes what fits.
        replace_share: share of them that "smart" replaces after each epoch.
        partitions: parts of the training cases, each held by one rank; null takes as many as there are ranks. A run
            goes on exactly on any number of ranks that divides them.
        reshuffle_every: epochs after which the cases are dealt to the partitions anew; null never does.
        workers: loader processes or preparation threads; null takes the cores at hand.
        crop_size: crop X, Y, Z in voxels of the working grid.
        crops_per_case: crops of each case in one epoch.
        batch_size: crops in one step, over all ranks; the guide's is one on each.
        accumulate: parts of a rank's batch computed one after the other, for less memory.
        window_size: sliding window X, Y, Z in voxels of the working grid; the exported networks take it.
        window_batch: windows computed at once.
        overlap: part of a window that its neighbour also covers.
        flip_axes: axes flipped at random, letters of "xyz" ("" for none).
        intensity: largest random relative scale and absolute shift of the normalised image, for all channels alike.
        filters: width of the first level of the SegResNet, a multiple of 8.
        blocks_down: residual blocks of each of its levels.
        dropout: probability before the first block.
        loss: dice_focal (over the batch of all ranks), dice_focal_per_sample (exact under accumulation), or MONAI's
            DiceFocalLoss or DiceLoss (each rank by itself).
        optimizer: novograd (ours, foreach), MONAI's Novograd, adam or sgd.
        learning_rate: at the first step.
        schedule: of the learning rate over all steps.
        epochs: passes over the training cases.
        precision: fp32, bf16, fp16 (with loss scaling) or auto (bf16 where the device computes it; with the recipe
            guide what its autocast does: fp16 on a GPU, fp32 on a CPU).
        channels_last: memory layout of the network, channels innermost; null takes the layout that is faster here.
        compile: compile the network with torch.compile.
        validate_every: epochs between validations; null validates about ten times.
        checkpoint_seconds: least time between two checkpoints.
        engine: TensorRT flavour to build for: auto, tensorrt, tensorrt_rtx or none.
    """

    recipe: Literal["baseline", "guide", "fast"] = "fast"
    data: Path | None = None
    regions: Literal["names", "labels", "brats2013", "brats2018", "brats2023"] = "names"
    split: str = "0.2:0"
    run: Path | None = None
    resume: Path | None = None
    init: Path | None = None
    store: Path = Path("~/.cache/medspeed")
    seed: int = 0
    device: str = "auto"
    spacing: tuple[float, float, float] | None = None
    source: Literal["uncached", "cached", "resident"] = "resident"
    cache: Literal["auto", "gpu", "ram", "disk", "smart", "none"] = "auto"
    cache_cases: int | None = None
    replace_share: float = 0.2
    partitions: int | None = None
    reshuffle_every: int | None = None
    workers: int | None = None
    crop_size: tuple[int, int, int] | None = None
    crops_per_case: int | None = None
    batch_size: int | None = None
    accumulate: int = 1
    window_size: tuple[int, int, int] | None = None
    window_batch: int | None = None
    overlap: float = 0.25
    flip_axes: str | None = None
    intensity: float = 0.1
    filters: int | None = None
    blocks_down: tuple[int, ...] | None = None
    dropout: float = 0.0
    loss: Literal["dice_focal", "dice_focal_per_sample", "monai_dice_focal", "monai_dice"] = "dice_focal"
    optimizer: Literal["novograd", "monai_novograd", "adam", "sgd"] = "novograd"
    learning_rate: float = 0.01
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    epochs: int | None = None
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    channels_last: bool | None = None
    compile: bool = False
    validate_every: int | None = None
    checkpoint_seconds: float = 30.0
    engine: Literal["auto", "tensorrt", "tensorrt_rtx", "none"] = "auto"

    def __post_init__(self) -> None:
        """Check each value against its bound.

        Raises:
            ValueError: names the field, the value and the bound.
        """
        object.__setattr__(self, "store", self.store.expanduser())
        resident = self.source == "resident"
        checks = (
            ("replace_share", 0 < self.replace_share <= 1, "above 0, 1 at most"),
            ("overlap", 0 <= self.overlap < 1, "in [0, 1)"),
            ("dropout", 0 <= self.dropout < 1, "in [0, 1)"),
            ("filters", self.filters is None or self.filters % 8 == 0, "a multiple of 8, the groups of GroupNorm"),
            (
                "blocks_down",
                self.blocks_down is None or (len(self.blocks_down) > 1 and min(self.blocks_down) > 0),
                "2 or more levels, each of 1 block or more",
            ),
            ("cache", resident or self.cache == "auto", "auto with MONAI's sources, which have caches of their own"),
            ("crops_per_case", resident or self.crops_per_case == 1, "1 with MONAI's sources, whose crop is one"),
            ("cache_cases", self.cache_cases is None or self.cache == "smart", "null unless --cache is smart"),
            (
                "reshuffle_every",
                self.reshuffle_every is None or (resident and self.cache not in ("smart", "none")),
                "null with MONAI's sources and with --cache smart or none",
            ),
        )
        check_bounds(self, checks)
        levels = None if self.blocks_down is None else len(self.blocks_down) - 1
        for name in ("crop_size", "window_size"):
            check_divides(name, getattr(self, name), levels)


GUIDE = BratsConfig(
    # MONAI tutorials, acceleration/distributed_training/brats_training_ddp.py, kept exactly but for its two mistakes:
    # label 2 is not the enhancing tumour, and a window as large as the volume has no overlap.
    recipe="guide",
    source="cached",
    crop_size=(224, 224, 144),
    crops_per_case=1,
    window_size=(240, 240, 160),
    window_batch=4,
    overlap=0.6,
    flip_axes="xyz",
    filters=16,
    blocks_down=(1, 2, 2, 4),
    loss="monai_dice_focal",
    optimizer="monai_novograd",
    learning_rate=1e-4,
    epochs=300,
    channels_last=False,
    validate_every=20,
)

BASELINE = replace(
    # MONAI tutorials, 3d_segmentation/brats_segmentation_3d.ipynb, in fp32 as people first write it.
    GUIDE,
    recipe="baseline",
    source="uncached",
    workers=4,
    dropout=0.2,
    loss="monai_dice",
    optimizer="adam",
    overlap=0.5,
    precision="fp32",
    validate_every=1,
)

RECIPES = {"fast": BratsConfig(), "guide": GUIDE, "baseline": BASELINE}

RUNS = Path("runs/brats")
# What may differ when a run goes on: where its data lie now, what computes, how often it saves.
_RESUMABLE = ("resume", "data", "store", "cache", "device", "workers", "accumulate", "checkpoint_seconds", "engine")


def parse_brats_config(arguments: Sequence[str] | None = None) -> BratsConfig:
    """Parse the command line of `apps/brats/train.py`; with --resume, take the run's own configuration."""
    return parse_config(BratsConfig, RECIPES, arguments, _DESCRIPTION, then=_resumed)


def _resumed(config: BratsConfig) -> BratsConfig:
    if config.resume is None:
        return config
    stored = config_from_yaml(BratsConfig, config.resume / "config.yaml")
    return resumed_config(config, stored, RECIPES[config.recipe], keep=_RESUMABLE)
