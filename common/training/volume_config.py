"""What the configurations of the apps that segment volumes share; it loads no torch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Self

from medspeed.common.training.config import Check, TrainingConfig

Size = tuple[int, int, int]

_CACHE = r"(none|monai|uncached)|(auto|gpu|ram|disk)(?::([1-9]\d*))?"
_CACHE += r"|(smart)(?::([1-9]\d*)(?::(0?\.\d*[1-9]\d*|1(?:\.0*)?))?)?"


@dataclass(frozen=True)
class Crops:
    """How training crops are sampled and augmented.

    Args:
        per_case: crops per case and epoch.
        flips: axes flipped at random, such as xyz; "" for none. More robust, but slower convergence.
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


@dataclass(frozen=True)
class Network:
    """The network, and its sizes; those that the network does not take stay null.

    Args:
        name: unet3d, segresnet, dynunet, mednext, or your.module:function (its code runs).
        filters: channels of the first level (segresnet: a multiple of 8; mednext).
        blocks_down: blocks per level (segresnet, mednext).
        dropout: dropout probability before the first block (segresnet).
    """

    name: str | None = None
    filters: int | None = None
    blocks_down: tuple[int, ...] | None = None
    dropout: float | None = None


class Cache(NamedTuple):
    """Where the training cases lie, as `--cache` says it."""

    mode: str
    cases: int | None = None  # of each partition that "smart" holds at a time; None takes what fits
    share: float = 0.2  # of them that "smart" replaces after each epoch
    reshuffle: int | None = None  # epochs after which the cases are dealt to the partitions anew


@dataclass(frozen=True)
class SegmentationConfig(TrainingConfig):
    """The configuration of a training run that segments volumes.

    Args:
        data: dataset folder in MSD layout (dataset.json, imagesTr, labelsTr); synthetic phantoms without it.
        init: initial weights: a .safetensors file of this project, or the model.pt of a MONAI bundle.
        split: validation fraction and seed (0.2:0), all (validate on the training cases), or a JSON file.
        spacing: voxel spacing R, A, S of the working grid in mm; from the dataset's fingerprint by default.
        window: CT intensity window, lower and upper HU; from the dataset's fingerprint by default.
        crop_size: training crop X, Y, Z in voxels of the working grid.
        cache: where training cases are kept: gpu, ram, disk or auto (the first of them with room), optionally with
            :EPOCHS after which cases are reassigned to ranks; smart[:CASES[:SHARE]] (CASES per partition at a time, a
            SHARE of them replaced each epoch); none (prepared at each use); or MONAI's monai or uncached.
        channels: channels of each level (unet3d, dynunet).
        channels_last: channels-last memory layout; null takes the layout that is faster here.
        loss: one of the app's losses.
    """

    split: str = "0.2:0"
    spacing: tuple[float, float, float] | None = None
    window: tuple[float, float] | None = None
    crop_size: Size | None = None
    cache: str = "auto"
    network: Network = field(default_factory=Network)
    channels: tuple[int, ...] | None = None
    channels_last: bool | None = None
    loss: str = ""
    crops: Crops = field(default_factory=Crops)
    windows: Windows = field(default_factory=Windows)

    COUNTS: ClassVar[str] = f"{TrainingConfig.COUNTS} crops.per_case network.filters"
    NETWORK: ClassVar[str] = "unet3d"
    RESUMABLE: ClassVar[tuple[str, ...]] = (*TrainingConfig.RESUMABLE, "cache")

    def __post_init__(self) -> None:
        """Check each value against its bound, and that the network can halve crops and windows; raise a ValueError."""
        self.caching()
        super().__post_init__()
        if (levels := self.halvings()) is not None:
            self.check_sides(2**levels, f"({levels} stride-2 levels)")

    def check_sides(self, divisor: int, why: str) -> None:
        """Check that the sides of crops and windows are multiples; a ValueError says `why`."""
        for name, size in (("crop_size", self.crop_size), ("windows.size", self.windows.size)):
            if size is not None and any(side < 1 or side % divisor for side in size):
                raise ValueError(f"{name} {size}: sides must be multiples of {divisor} {why}")

    def checks(self) -> Sequence[Check]:
        """Return the checks of single fields; an app adds its own."""
        levels = (self.network.blocks_down, self.channels)
        blocks, widths = (each is None or (len(each) > 1 and min(each) > 0) for each in levels)
        fits = self.network_name != "segresnet3d" or (self.network.filters or 0) % 8 == 0
        return (
            *super().checks(),
            ("split", self.fold is None or self.split == SegmentationConfig.split, "left out with fold"),
            ("spacing", all(0.01 <= side <= 100 for side in self.spacing or ()), "0.01 to 100 mm on each axis"),
            ("window", self.window is None or self.window[0] < self.window[1], "two HU values, lower first"),
            ("crops.flips", set(self.crops.flips or "") <= set("xyz"), "some of the letters x, y and z, or empty"),
            ("crops.intensity", 0 <= self.crops.intensity < 1, "in [0, 1)"),
            ("windows.overlap", 0 <= self.windows.overlap < 1, "in [0, 1)"),
            ("network.dropout", 0 <= (self.network.dropout or 0) < 1, "in [0, 1)"),
            ("network.filters", fits, "a multiple of 8, the groups of GroupNorm"),
            ("network.blocks_down", blocks, "at least 2 levels with at least 1 block each"),
            ("channels", widths, "2 or more widths"),
        )

    def caching(self) -> Cache:
        """Return what `cache` says; raise a ValueError where that is nothing that there is."""
        found = re.fullmatch(_CACHE, self.cache)
        if found is None:
            smart = "smart[:CASES[:SHARE]] (at least 1 case; a share above 0 and at most 1)"
            known = f"auto, gpu, ram or disk (each also with :EPOCHS, at least 1), {smart}, none, monai or uncached"
            raise ValueError(f"cache {self.cache}: must be {known}")
        whole, tier, epochs, smart, cases, share = found.groups()
        held, every = (int(number) if number else None for number in (cases, epochs))
        return Cache(whole or tier or smart, held, float(share or 0.2), every)

    def check_resumed(self, began: Self) -> None:
        """Check that the cache differs only in where cases lie: not in which train, how they mix, or who crops."""
        caches = (began, began.caching()), (self, self.caching())
        kinds = [(cache._replace(mode=""), cache.mode == "smart", config.ours) for config, cache in caches]
        if kinds[0] != kinds[1]:
            raise ValueError(f"cache {self.cache}: the run began with {began.cache}, which trains on other data")

    @property
    def ours(self) -> bool:
        """Whether this project's preparation and crops feed the training (cache none, too), not MONAI's datasets."""
        return self.caching().mode not in ("monai", "uncached")

    def alike(self) -> bool:
        """Return whether fewer ranks that hold more partitions each compute the same; MONAI's parts go by rank."""
        return self.ours and not self.loss.startswith("monai_")

    @property
    def network_name(self) -> str:
        """Name of the network's function, or the user's own."""
        name = self.network.name or self.NETWORK
        return f"{name}3d" if name in ("unet", "segresnet") else name

    def halvings(self) -> int | None:
        """Return how often the network halves a crop; None where that is not chosen yet, or not known of its name."""
        levels = {"unet3d": self.channels, "segresnet3d": self.network.blocks_down}.get(self.network_name)
        return len(levels) - 1 if levels else None
