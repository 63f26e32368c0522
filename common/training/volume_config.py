"""What the configurations of the apps that segment volumes share; it loads no torch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from medspeed.common.training.config import Check, TrainingConfig

Size = tuple[int, int, int]

_CACHE = re.compile(
    r"(none|monai|uncached)|(auto|gpu|ram|disk)(?::([1-9]\d*))?"
    r"|(smart)(?::([1-9]\d*)(?::(0?\.\d*[1-9]\d*|1(?:\.0*)?))?)?"
)


@dataclass(frozen=True)
class Crops:
    """How training crops are sampled and augmented.

    Args:
        per_case: crops per case and epoch.
        flips: axes flipped at random, such as xyz; "" for none. Flips add robustness, but slow convergence.
        intensity: maximum random scaling and shift of the normalized intensities, the same for all channels.
    """

    per_case: int | None = None
    flips: str | None = None
    intensity: float = 0.1


@dataclass(frozen=True)
class Windows:
    """The sliding windows of validation, inference and the exported networks.

    Args:
        size: sliding window X, Y, Z in voxels of the working grid.
        overlap: fraction of a window that its neighbor also covers.
    """

    size: Size | None = None
    overlap: float = 0.25


class Cache(NamedTuple):
    """Where the training cases lie, as `--cache` says it.

    Args:
        mode: auto, gpu, ram, disk, smart, none; or MONAI's: monai, uncached.
        cases: of each partition that "smart" holds at a time; None takes what fits.
        share: of them that "smart" replaces after each epoch.
        reshuffle: epochs after which the cases are dealt to the partitions anew; None never does.
    """

    mode: str
    cases: int | None = None
    share: float = 0.2
    reshuffle: int | None = None


@dataclass(frozen=True)
class SegmentationConfig(TrainingConfig):
    """The configuration of a training run that segments volumes.

    Args:
        data: dataset folder in MSD layout (dataset.json, imagesTr, labelsTr); synthetic phantoms without it.
        init: initial weights: a .safetensors file of this project, or the model.pt of a MONAI bundle.
        split: validation fraction and seed (0.2:0), all (validate on the training cases), or a JSON file.
        spacing: voxel spacing R, A, S of the working grid in mm; from the dataset's fingerprint by default.
        crop_size: training crop X, Y, Z in voxels of the working grid.
        cache: where training cases are kept: gpu, ram, disk or auto (the first of them with room), optionally with
            :EPOCHS after which cases are reassigned to ranks; smart[:CASES[:SHARE]] (CASES per partition at a time, a
            SHARE of them replaced each epoch); none (prepared at each use); or MONAI's monai or uncached.
        channels_last: channels-last memory layout; null takes the layout that is faster here.
        loss: one of the app's losses.
    """

    split: str = "0.2:0"
    spacing: tuple[float, float, float] | None = None
    crop_size: Size | None = None
    cache: str = "auto"
    channels_last: bool | None = None
    loss: str = ""
    crops: Crops = field(default_factory=Crops)
    windows: Windows = field(default_factory=Windows)

    COUNTS: ClassVar[tuple[str, ...]] = (*TrainingConfig.COUNTS, "crops.per_case")
    RESUMABLE: ClassVar[tuple[str, ...]] = (*TrainingConfig.RESUMABLE, "cache")

    def __post_init__(self) -> None:
        """Check each value against its bound, and that the network can halve crops and windows; raise a ValueError."""
        self.caching()
        super().__post_init__()
        levels = self.halvings()
        for name, size in (("crop_size", self.crop_size), ("windows.size", self.windows.size)):
            if size is not None and levels is not None and any(side < 1 or side % 2**levels for side in size):
                raise ValueError(f"{name} {size}: sides must be multiples of {2**levels} ({levels} stride-2 levels)")

    def checks(self) -> Sequence[Check]:
        """Return the checks of single fields; an app adds its own."""
        return (
            *super().checks(),
            ("split", self.fold is None or self.split == SegmentationConfig.split, "left out with fold"),
            ("spacing", all(0.01 <= side <= 100 for side in self.spacing or ()), "0.01 to 100 mm on each axis"),
            ("crops.flips", set(self.crops.flips or "") <= set("xyz"), "some of the letters x, y and z, or empty"),
            ("crops.intensity", 0 <= self.crops.intensity < 1, "in [0, 1)"),
            ("windows.overlap", 0 <= self.windows.overlap < 1, "in [0, 1)"),
        )

    def caching(self) -> Cache:
        """Return what `cache` says.

        Raises:
            ValueError: it says nothing that there is.
        """
        found = _CACHE.fullmatch(self.cache)
        if found is None:
            raise ValueError(
                f"cache {self.cache}: must be auto, gpu, ram or disk (each also with :EPOCHS, at least 1), "
                "smart[:CASES[:SHARE]] (at least 1 case; a share above 0 and at most 1), none, monai or uncached"
            )
        whole, tier, epochs, smart, cases, share = found.groups()
        held, every = (int(number) if number else None for number in (cases, epochs))
        return Cache(whole or tier or smart, held, float(share or 0.2), every)

    @property
    def ours(self) -> bool:
        """Whether our prepared store and caches feed the training, and not MONAI's datasets."""
        return self.caching().mode not in ("monai", "uncached")

    def alike(self) -> bool:
        """Return whether fewer ranks that hold more partitions each compute the same; MONAI's parts go by rank."""
        return self.ours and not self.loss.startswith("monai_")

    def halvings(self) -> int | None:
        """Return how often the network halves a crop; None where that is not chosen yet."""
        return None
