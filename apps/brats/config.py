"""The configuration of the brats app: one frozen dataclass and three recipes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from common.export.options import ExportConfig
from common.training.bounds import Check
from common.training.config import SegmentationConfig, parse_training

_DESCRIPTION = (
    "Train a segmentation network on multi-channel MRI (MSD Task01, or any dataset in its layout), from raw volumes to "
    "a TensorRT engine; on one device, or with torchrun on many."
)


@dataclass(frozen=True)
class BratsConfig(SegmentationConfig):
    """What a training run is told; a field that is null is chosen from the data and the device, and printed.

    Args:
        regions: what is learned: names (TC, WT and ET, by the names of the labels), labels (each label by itself),
            or the numbers of a challenge: brats2013, brats2018 (2018 to 2021), brats2023.
        cache: where the prepared cases lie while training (resident source only): auto (the device, then memory, then
            the disk, as they fit), gpu, ram, disk, smart (some at a time, in turn) or none (prepared at every use).
        cache_cases: cases of each partition that the cache "smart" holds at a time; null takes what fits.
        replace_share: share of them that "smart" replaces after each epoch.
        reshuffle_every: epochs after which the cases are dealt to the partitions anew; null never does.
        filters: width of the first level of the SegResNet, a multiple of 8.
        blocks_down: residual blocks of each of its levels.
        dropout: probability before the first block.
        loss: dice_focal (over the batch of all ranks), dice_focal_per_sample (exact under accumulation), or MONAI's
            DiceFocalLoss or DiceLoss (each rank by itself).
        channels_last: memory layout of the network, channels innermost; null takes the layout that is faster here.
    """

    regions: Literal["names", "labels", "brats2013", "brats2018", "brats2023"] = "names"
    cache: Literal["auto", "gpu", "ram", "disk", "smart", "none"] = "auto"
    cache_cases: int | None = None
    replace_share: float = 0.2
    reshuffle_every: int | None = None
    filters: int | None = None
    blocks_down: tuple[int, ...] | None = None
    dropout: float = 0.0
    loss: Literal["dice_focal", "dice_focal_per_sample", "monai_dice_focal", "monai_dice"] = "dice_focal"
    channels_last: bool | None = None

    RESUMABLE: ClassVar[tuple[str, ...]] = (*SegmentationConfig.RESUMABLE, "accumulate")

    def checks(self) -> Sequence[Check]:
        """Return the checks of the fields that are this app's own."""
        resident = self.source == "resident"
        return (
            ("replace_share", 0 < self.replace_share <= 1, "above 0, 1 at most"),
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

    def halvings(self) -> int | None:
        """Return how often the network halves a crop; None where that is not chosen yet."""
        return None if self.blocks_down is None else len(self.blocks_down) - 1


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


def parse_brats_config(arguments: Sequence[str] | None = None) -> BratsConfig:
    """Parse the command line of `apps/brats/train.py`; with --resume, take the run's own configuration."""
    return parse_training(BratsConfig, RECIPES, _DESCRIPTION, arguments)


@dataclass(frozen=True)
class BratsExport(ExportConfig):
    """What the hand-over of a run is told.

    Args:
        filters: with --init only, as all that follow: width of the first level of the SegResNet.
        blocks_down: residual blocks of each level.
        spacing: mm along R, A, S that the weights were trained at.
        window_size: sliding window, voxels X, Y, Z; the defaults are those of MONAI's bundle
            brats_mri_segmentation, whose channels are T1c, T1, T2, FLAIR: scans must have them in that order.
        overlap: part of a window that its neighbour also covers.
    """

    filters: int = 16
    blocks_down: tuple[int, ...] = (1, 2, 2, 4)
    spacing: tuple[float, float, float] = (1.0, 1.0, 1.0)
    window_size: tuple[int, int, int] = (240, 240, 160)
    overlap: float = 0.25
