"""The configuration of the brats app: one frozen dataclass and three recipes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from medspeed.common.config import parse_config
from medspeed.common.training.config import Check
from medspeed.common.training.volume_config import Crops, Network, SegmentationConfig, Windows
from medspeed.models import check_name

_DESCRIPTION = "Train a segmentation network on multi-channel MRI in MSD layout, from raw volumes to a TensorRT engine."


@dataclass(frozen=True)
class BratsConfig(SegmentationConfig):
    """The configuration of a training run; a field that is null is chosen from the data and the device, and printed.

    Args:
        regions: what to learn: names (TC, WT and ET, by label name), labels (each label by itself), or a challenge's
            label values: brats2013, brats2018 (2018 to 2021), brats2023.
        loss: dice_focal (over the batch of all ranks), dice_focal_per_sample (exact with accumulation), or MONAI's
            monai_dice_focal or monai_dice (per rank).
    """

    regions: Literal["names", "labels", "brats2013", "brats2018", "brats2023"] = "names"
    loss: Literal["dice_focal", "dice_focal_per_sample", "monai_dice_focal", "monai_dice"] = "dice_focal"

    APP: ClassVar[str] = "brats"
    NETWORK: ClassVar[str] = "segresnet3d"

    def checks(self) -> Sequence[Check]:
        """Return the checks of single fields."""
        return (
            *super().checks(),
            check_name(self.network.name),
            ("crops.per_case", self.ours or self.crops.per_case in (None, 1), "1 with --cache monai or uncached"),
        )


GUIDE = BratsConfig(
    # MONAI tutorials, acceleration/distributed_training/brats_training_ddp.py, kept exactly but for a mistake: label 2
    # is not the enhancing tumour. (Its other one stays: a window as large as the volume has no overlap.)
    recipe="guide",
    cache="monai",
    crop_size=(224, 224, 144),
    crops=Crops(per_case=1, flips="xyz"),
    windows=Windows(size=(240, 240, 160), overlap=0.6),
    network=Network(filters=16, blocks_down=(1, 2, 2, 4)),
    loss="monai_dice_focal",
    optimizer="monai_novograd",
    learning_rate=1e-4,
    epochs=300,
    channels_last=False,
    validate_every=20,
)

BASELINE = replace(
    # MONAI tutorials, 3d_segmentation/brats_segmentation_3d.ipynb, in fp32 as people first write it; there all crops
    # are changed in intensity, here half of them.
    GUIDE,
    recipe="baseline",
    cache="uncached",
    workers=4,
    network=replace(GUIDE.network, dropout=0.2),
    loss="monai_dice",
    optimizer="adam",
    windows=replace(GUIDE.windows, overlap=0.5),
    precision="fp32",
    validate_every=1,
)

RECIPES = {"fast": BratsConfig(), "guide": GUIDE, "baseline": BASELINE}


def parse(arguments: Sequence[str] | None = None) -> BratsConfig:
    """Parse the command line of `apps/brats/train.py`; with --resume, take the run's own configuration."""
    return parse_config(BratsConfig, RECIPES, arguments, _DESCRIPTION)
