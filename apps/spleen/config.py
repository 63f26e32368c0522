"""The configuration of the spleen app: one frozen dataclass and three recipes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from common.config import config_from_yaml, parse_config, resumed_config
from common.training.bounds import check_bounds, check_divides

_DESCRIPTION = (
    "Train a segmentation network on CT (or any dataset in MSD layout), from raw volumes to a TensorRT engine."
)


@dataclass(frozen=True)
class SpleenConfig:
    """What a training run is told; a field that is null is chosen from the data and the device, and printed.

    Args:
        recipe: baseline (what people write first), guide (MONAI's fast training recipe) or fast (ours).
        data: folder in MSD layout (dataset.json, imagesTr, labelsTr); null makes synthetic phantoms.
        split: validation fraction and seed ("0.2:0"), "all" (validate on the training cases), or a JSON file.
        run: folder of this run; null names it by the time below runs/spleen.
        resume: folder of a run to go on with; it keeps its own configuration.
        init: weights to start from, a .safetensors of ours or a MONAI bundle's model.pt.
        store: folder for prepared cases and phantoms.
        seed: of the split's default, the initial weights, the crops and the augmentation.
        device: auto, cpu, cuda or cuda:N.
        spacing: working spacing R, A, S in mm; null takes the dataset's fingerprint.
        window: lower and upper HU for CT; null takes the dataset's fingerprint.
        source: uncached (MONAI Dataset), cached (MONAI CacheDataset) or resident (prepared store, device cache).
        cache: where the prepared cases lie while training (resident source only): auto (the device, then memory, then
            disk, as they fit), gpu, ram or disk.
        workers: loader processes or preparation threads; null takes the cores at hand.
        crop_size: crop X, Y, Z in voxels of the working grid.
        window_size: sliding window X, Y, Z in voxels of the working grid; the exported networks take it.
        window_batch: windows computed at once.
        crops_per_case: crops of each case in one epoch.
        batch_size: crops in one step, over all ranks.
        accumulate: parts of a batch computed one after the other, for less memory.
        partitions: parts of the training cases, each held by one rank; null takes as many as there are ranks.
        flip_axes: axes flipped at random, letters of "xyz" ("" for none); resident source only. Flips make a network
            indifferent to how a file is stamped, and take it longer to learn.
        intensity: largest random relative scale and absolute shift of the normalised image; resident source only.
        channels: width of each level of the U-Net.
        residual_units: convolutions per residual block.
        loss: dice_ce (ours), or MONAI's DiceCELoss or DiceLoss.
        optimizer: novograd (ours, foreach), MONAI's Novograd, adam or sgd.
        learning_rate: at the first step.
        schedule: of the learning rate over all steps.
        epochs: passes over the training cases.
        precision: fp32, bf16, fp16 (with loss scaling) or auto (bf16 where the device computes it; with the recipe
            guide what its autocast does: fp16 on a GPU, fp32 on a CPU).
        channels_last: memory layout of the network, channels innermost.
        fast_prelu: replace torch's PReLU gradient on a CPU by vectorised operators.
        compile: compile the network with torch.compile.
        validate_every: epochs between validations; null validates about ten times.
        checkpoint_seconds: least time between two checkpoints.
        engine: TensorRT flavour to build for: auto, tensorrt, tensorrt_rtx or none.
    """

    recipe: Literal["baseline", "guide", "fast"] = "fast"
    data: Path | None = None
    split: str = "0.2:0"
    run: Path | None = None
    resume: Path | None = None
    init: Path | None = None
    store: Path = Path("~/.cache/medspeed")
    seed: int = 0
    device: str = "auto"
    spacing: tuple[float, float, float] | None = None
    window: tuple[float, float] | None = None
    source: Literal["uncached", "cached", "resident"] = "resident"
    cache: Literal["auto", "gpu", "ram", "disk"] = "auto"
    workers: int | None = None
    crop_size: tuple[int, int, int] | None = None
    crops_per_case: int = 4
    batch_size: int | None = None
    accumulate: int = 1
    partitions: int | None = None
    window_size: tuple[int, int, int] | None = None
    window_batch: int | None = None
    flip_axes: str | None = None
    intensity: float = 0.1
    channels: tuple[int, ...] | None = None
    residual_units: int | None = None
    loss: Literal["dice_ce", "monai_dice_ce", "monai_dice"] = "dice_ce"
    optimizer: Literal["novograd", "monai_novograd", "adam", "sgd"] = "novograd"
    learning_rate: float = 0.01
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    epochs: int | None = None
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    channels_last: bool = True
    fast_prelu: bool = True
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
            ("intensity", not self.intensity or resident, "0 with MONAI's sources, which do not augment"),
            ("flip_axes", not self.flip_axes or resident, "empty with MONAI's sources"),
            ("window", self.window is None or self.window[0] < self.window[1], "lower bound first, in HU"),
            (
                "channels",
                self.channels is None or (len(self.channels) > 1 and min(self.channels) > 0),
                "2 or more widths",
            ),
        )
        check_bounds(self, checks)
        levels = None if self.channels is None else len(self.channels) - 1
        for name in ("crop_size", "window_size"):
            check_divides(name, getattr(self, name), levels)


GUIDE = SpleenConfig(
    # MONAI tutorials, acceleration/fast_training_tutorial, the Novograd revision (before May 2022), kept exactly.
    recipe="guide",
    source="cached",
    crop_size=(96, 96, 96),
    window_size=(160, 160, 160),
    window_batch=4,
    batch_size=16,
    flip_axes="",
    intensity=0.0,
    channels=(16, 32, 64, 128, 256),
    residual_units=2,
    loss="monai_dice_ce",
    optimizer="monai_novograd",
    learning_rate=2e-3,
    schedule="constant",
    epochs=300,
    precision="auto",
    channels_last=False,
    fast_prelu=False,
    validate_every=1,
)

BASELINE = replace(
    # The "regular" side of the same notebook: two cases of four crops a step, everything recomputed each epoch.
    GUIDE,
    recipe="baseline",
    source="uncached",
    workers=8,
    batch_size=8,
    loss="monai_dice",
    optimizer="adam",
    learning_rate=2e-4,
    precision="fp32",
    validate_every=5,
)

RECIPES = {"fast": SpleenConfig(), "guide": GUIDE, "baseline": BASELINE}

RUNS = Path("runs/spleen")
# What may differ when a run goes on: where its data lie now, what computes, how often it saves.
_RESUMABLE = ("resume", "data", "store", "cache", "device", "workers", "checkpoint_seconds", "engine")


def parse_spleen_config(arguments: Sequence[str] | None = None) -> SpleenConfig:
    """Parse the command line of `apps/spleen/train.py`; with --resume, take the run's own configuration."""
    return parse_config(SpleenConfig, RECIPES, arguments, _DESCRIPTION, then=_resumed)


def _resumed(config: SpleenConfig) -> SpleenConfig:
    if config.resume is None:
        return config
    stored = config_from_yaml(SpleenConfig, config.resume / "config.yaml")
    return resumed_config(config, stored, RECIPES[config.recipe], keep=_RESUMABLE)
