"""The configuration of the spleen app: one frozen dataclass and three recipes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from medspeed.common.config import parse_config
from medspeed.common.training.config import Check
from medspeed.common.training.volume_config import Crops, SegmentationConfig, Windows
from medspeed.models import check_name

_DESCRIPTION = "Train a segmentation network on CT volumes in MSD layout, from raw volumes to a TensorRT engine."


@dataclass(frozen=True)
class SpleenConfig(SegmentationConfig):
    """The configuration of a training run; a field that is null is chosen from the data and the device, and printed.

    Args:
        loss: dice_ce (this project's), or MONAI's monai_dice_ce, monai_dice_focal or monai_dice.
    """

    schedule: Literal["constant", "linear", "cosine"] = "linear"
    loss: Literal["dice_ce", "monai_dice_ce", "monai_dice_focal", "monai_dice"] = "dice_ce"

    APP: ClassVar[str] = "spleen"

    def checks(self) -> Sequence[Check]:
        """Return the checks of single fields."""
        return (
            *super().checks(),
            ("crops.intensity", not self.crops.intensity or self.ours, "0 with --cache monai or uncached"),
            ("crops.flips", not self.crops.flips or self.ours, "empty with --cache monai or uncached"),
            check_name(self.network.name),
        )


GUIDE = SpleenConfig(
    # MONAI tutorials, acceleration/fast_training_tutorial, the Novograd revision (before May 2022), kept exactly.
    recipe="guide",
    cache="monai",
    crop_size=(96, 96, 96),
    crops=Crops(per_case=4, flips="", intensity=0.0),
    windows=Windows(size=(160, 160, 160)),
    batch_size=16,
    channels=(16, 32, 64, 128, 256),
    loss="monai_dice_ce",
    optimizer="monai_novograd",
    learning_rate=2e-3,
    schedule="constant",
    epochs=300,
    channels_last=False,
    validate_every=1,
)

BASELINE = replace(
    # After the "regular" side of the same notebook: two cases of four crops a step, everything recomputed each epoch.
    GUIDE,
    recipe="baseline",
    cache="uncached",
    workers=8,
    batch_size=8,
    loss="monai_dice",
    optimizer="adam",
    learning_rate=2e-4,
    precision="fp32",
    validate_every=5,
)

RECIPES = {"fast": SpleenConfig(), "guide": GUIDE, "baseline": BASELINE}


def parse(arguments: Sequence[str] | None = None) -> SpleenConfig:
    """Parse the command line of `apps/spleen/train.py`; with --resume, take the run's own configuration."""
    return parse_config(SpleenConfig, RECIPES, arguments, _DESCRIPTION)
