"""What the apps' configurations share; it loads no torch, so that a wrong flag answers at once."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from common.config import config_from_yaml, parse_config, resumed_config
from common.training.bounds import Check, check_bounds, check_divides

C = TypeVar("C", bound="TrainingConfig")

DEV_RUN_EPOCHS = 2
"""Epochs of a fast dev run, each of one step and validated: two steps, two validations."""


@dataclass(frozen=True)
class TrainingConfig:
    """What every training run is told; a field that is null is chosen from the data and the device, and printed.

    Args:
        recipe: baseline (what people write first, in MONAI), guide (MONAI's fast recipe) or fast (ours).
        data: folder of the dataset, in one of the layouts that the app's README names; null makes a synthetic one.
        run: folder of this run; null names it by the time below runs/.
        resume: folder of a run to go on with; it keeps its own configuration.
        init: weights to start from, a .safetensors of ours or what the app's README names.
        store: folder for what is made of the data and kept, and for synthetic data.
        seed: of the split's default, the initial weights, the crops, the order and the augmentation.
        device: auto, cpu, cuda or cuda:N.
        workers: loader processes or preparation threads; null takes the cores at hand.
        batch_size: crops or patches in one step, over all ranks.
        accumulate: parts of a rank's batch computed one after the other, for less memory.
        partitions: parts of the training data, each held by one rank; null takes as many as there are ranks. A run
            goes on exactly on any number of ranks that divides them.
        optimizer: novograd (ours, foreach), MONAI's Novograd, adam or sgd.
        learning_rate: at the first step.
        schedule: of the learning rate over all steps.
        epochs: passes over the training data.
        precision: fp32, bf16, fp16 (with loss scaling) or auto (bf16 where the device computes it; with the recipe
            guide what its autocast does: fp16 on a GPU, fp32 on a CPU).
        compile: compile the network with torch.compile.
        validate_every: epochs between validations; null validates about ten times.
        until: a target such as "dice=0.90" (pathology: "auc=0.95"): the run ends when three validations in a row have
            reached it, instead of after all epochs.
        checkpoint_seconds: least time between two checkpoints.
        engine: TensorRT flavour to build for: auto, tensorrt, tensorrt_rtx or none.
        fast_dev_run: try the whole way on a few cases: two steps, each validated, export, summary; the figures it
            gives mean nothing.
        profile: what some steps are recorded with: nothing, torch (profiler: a Chrome trace, the top operations and
            what a step waits for, in the folder profile of the run) or nvtx (ranges for Nsight Systems, all steps).
        monitor: seconds between two looks at processor, memory, disk and GPU while training (monitor.csv,
            monitor.png); 0 for none.
    """

    recipe: Literal["baseline", "guide", "fast"] = "fast"
    data: Path | None = None
    run: Path | None = None
    resume: Path | None = None
    init: Path | None = None
    store: Path = Path("~/.cache/medspeed")
    seed: int = 0
    device: str = "auto"
    workers: int | None = None
    batch_size: int | None = None
    accumulate: int = 1
    partitions: int | None = None
    optimizer: Literal["novograd", "monai_novograd", "adam", "sgd"] = "novograd"
    learning_rate: float = 0.01
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    epochs: int | None = None
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    compile: bool = False
    validate_every: int | None = None
    until: str | None = None
    checkpoint_seconds: float = 30.0
    engine: Literal["auto", "tensorrt", "tensorrt_rtx", "none"] = "auto"
    fast_dev_run: bool = False
    profile: Literal["nothing", "torch", "nvtx"] = "nothing"
    monitor: float = 1.0

    METRIC: ClassVar[str] = "Dice"  # what validations measure, and --until names in small letters
    # What may differ when a run goes on: where its data lie now, what computes, how often it saves.
    RESUMABLE: ClassVar[tuple[str, ...]] = (
        "resume", "data", "store", "device", "workers", "checkpoint_seconds", "engine", "until", "profile", "monitor",
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Check each value against its bound.

        Raises:
            ValueError: names the field, the value and the bound.
        """
        object.__setattr__(self, "store", self.store.expanduser())
        check_bounds(self, self.checks())
        self.target()

    def target(self) -> float | None:
        """Return the value that `until` asks for; None where it asks for none.

        Raises:
            ValueError: it is not "METRIC=VALUE" with the app's metric and a value above 0, 1 at most.
        """
        if self.until is None:
            return None
        name, _, text = self.until.partition("=")
        value = float(text) if re.fullmatch(r"[01]?\.?\d*", text) and any(map(str.isdigit, text)) else 0.0
        metric = self.METRIC.lower()
        if name.strip().lower() != metric or not 0 < value <= 1:
            raise ValueError(f"until {self.until}: must be {metric}=VALUE, the value above 0 and 1 at most")
        return value

    def plan_epochs(self, steps: int, per_epoch: int, validations: int) -> tuple[int, int]:
        """Return the epochs of the run, and those between two validations.

        Args:
            steps: of a run that is not told its epochs, at least.
            per_epoch: steps of an epoch.
            validations: of a run that is not told when to validate, about.
        """
        if self.fast_dev_run:
            return DEV_RUN_EPOCHS, 1
        epochs = self.epochs or -(-steps // per_epoch)
        return epochs, self.validate_every or max(1, epochs // validations)

    def checks(self) -> Sequence[Check]:
        """Return the checks of an app's own fields."""
        return ()


@dataclass(frozen=True)
class SegmentationConfig(TrainingConfig):
    """What a run is told that learns to label the voxels of volumes.

    Args:
        data: folder in MSD layout (dataset.json, imagesTr, labelsTr); null makes synthetic phantoms.
        init: weights to start from, a .safetensors of ours or a MONAI bundle's model.pt.
        split: validation fraction and seed ("0.2:0"), "all" (validate on the training cases), or a JSON file.
        spacing: working spacing R, A, S in mm; null takes the dataset's fingerprint.
        source: uncached (MONAI Dataset), cached (MONAI CacheDataset) or resident (prepared store, caches below).
        crop_size: crop X, Y, Z in voxels of the working grid.
        crops_per_case: crops of each case in one epoch.
        window_size: sliding window X, Y, Z in voxels of the working grid; the exported networks take it.
        window_batch: windows computed at once.
        overlap: part of a window that its neighbour also covers.
        flip_axes: axes flipped at random, letters of "xyz" ("" for none). Flips make a network indifferent to how a
            file is stamped, and take it longer to learn.
        intensity: largest random relative scale and absolute shift of the normalised image, for all channels alike.
        loss: of the app's list.
    """

    split: str = "0.2:0"
    spacing: tuple[float, float, float] | None = None
    source: Literal["uncached", "cached", "resident"] = "resident"
    crop_size: tuple[int, int, int] | None = None
    crops_per_case: int | None = None
    window_size: tuple[int, int, int] | None = None
    window_batch: int | None = None
    overlap: float = 0.25
    flip_axes: str | None = None
    intensity: float = 0.1
    loss: str = ""

    RESUMABLE: ClassVar[tuple[str, ...]] = (*TrainingConfig.RESUMABLE, "cache")

    def __post_init__(self) -> None:
        """Check each value against its bound, and that the network can halve crops and windows.

        Raises:
            ValueError: names the field, the value and the bound.
        """
        super().__post_init__()
        for name in ("crop_size", "window_size"):
            check_divides(name, getattr(self, name), self.halvings())

    def alike(self) -> bool:
        """Return whether fewer ranks that hold more partitions each compute the same; MONAI's parts go by rank."""
        return self.source == "resident" and not self.loss.startswith("monai_")

    def halvings(self) -> int | None:
        """Return how often the network halves a crop; None where that is not chosen yet."""
        return None


def parse_training(
    kind: type[C], recipes: Mapping[str, C], description: str, arguments: Sequence[str] | None = None
) -> C:
    """Parse the command line of a `train.py`; with --resume, take the run's own configuration."""

    def resumed(config: C) -> C:
        if config.resume is None:
            return config
        stored = config_from_yaml(kind, config.resume / "config.yaml")
        return resumed_config(config, stored, recipes[config.recipe], keep=config.RESUMABLE)

    return parse_config(kind, recipes, arguments, description, then=resumed)
