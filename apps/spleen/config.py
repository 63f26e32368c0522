"""The configuration of the spleen app: one frozen dataclass and three recipes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from common.export.options import ExportConfig
from common.training.bounds import Check
from common.training.config import SegmentationConfig, parse_training

_DESCRIPTION = (
    "Train a segmentation network on CT (or any dataset in MSD layout), from raw volumes to a TensorRT engine."
)


@dataclass(frozen=True)
class SpleenConfig(SegmentationConfig):
    """What a training run is told; a field that is null is chosen from the data and the device, and printed.

    Args:
        window: lower and upper HU for CT; null takes the dataset's fingerprint.
        cache: where the prepared cases lie while training (resident source only): auto (the device, then memory, then
            disk, as they fit), gpu, ram or disk.
        channels: width of each level of the U-Net.
        residual_units: convolutions per residual block.
        loss: dice_ce (ours), or MONAI's DiceCELoss, DiceFocalLoss or DiceLoss.
        channels_last: memory layout of the network, channels innermost.
        fast_prelu: replace torch's PReLU gradient on a CPU by vectorised operators.
    """

    window: tuple[float, float] | None = None
    cache: Literal["auto", "gpu", "ram", "disk"] = "auto"
    crops_per_case: int = 4
    channels: tuple[int, ...] | None = None
    residual_units: int | None = None
    loss: Literal["dice_ce", "monai_dice_ce", "monai_dice_focal", "monai_dice"] = "dice_ce"
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    channels_last: bool = True
    fast_prelu: bool = True

    def checks(self) -> Sequence[Check]:
        """Return the checks of the fields that are this app's own."""
        resident = self.source == "resident"
        return (
            ("intensity", not self.intensity or resident, "0 with MONAI's sources, which do not augment"),
            ("flip_axes", not self.flip_axes or resident, "empty with MONAI's sources"),
            ("window", self.window is None or self.window[0] < self.window[1], "lower bound first, in HU"),
            (
                "channels",
                self.channels is None or (len(self.channels) > 1 and min(self.channels) > 0),
                "2 or more widths",
            ),
        )

    def halvings(self) -> int | None:
        """Return how often the network halves a crop; None where that is not chosen yet."""
        return None if self.channels is None else len(self.channels) - 1


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


def parse_spleen_config(arguments: Sequence[str] | None = None) -> SpleenConfig:
    """Parse the command line of `apps/spleen/train.py`; with --resume, take the run's own configuration."""
    return parse_training(SpleenConfig, RECIPES, _DESCRIPTION, arguments)


@dataclass(frozen=True)
class SpleenExport(ExportConfig):
    """What the hand-over of a run is told.

    Args:
        labels: with --init only, as all that follow: name of each class, background first.
        channels: width of each level of the U-Net.
        residual_units: convolutions per residual block.
        spacing: mm along R, A, S that the weights were trained at.
        window: lower and upper HU.
        window_size: sliding window, voxels X, Y, Z; the defaults are those of MONAI's bundle spleen_ct_segmentation.
        overlap: part of a window that its neighbour also covers.
    """

    labels: tuple[str, ...] = ("background", "spleen")
    channels: tuple[int, ...] = (16, 32, 64, 128, 256)
    residual_units: int = 2
    spacing: tuple[float, float, float] = (1.5, 1.5, 2.0)
    window: tuple[float, float] = (-57.0, 164.0)
    window_size: tuple[int, int, int] = (96, 96, 96)
    overlap: float = 0.25
