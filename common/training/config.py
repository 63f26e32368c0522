"""What the apps' configurations share; it loads no torch, so that a wrong flag answers at once."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal, Self, TypeVar

from medspeed.common.config import flat
from medspeed.common.inference import Precision

T = TypeVar("T")
DEV_RUN = "FAST DEV RUN: two steps on a few cases; the results of this run are meaningless"
VALIDATIONS_HELD = 3  # validations in a row that must reach a target: one may be luck
Check = tuple[str, bool, str]  # field, whether it holds, its bound in words


def decided(value: T | None) -> T:
    """Return the value of a field of a decided configuration."""
    if value is None:  # as in a plan.json that somebody changed: see `medspeed.common.training.resolve`
        raise ValueError("a field is open in plan.json (restore it, or start a new run), or in this app's DEFAULTS")
    return value


@dataclass(frozen=True)
class Parallel:
    """How a batch is split.

    Args:
        partitions: parts of the training data; one per rank by default. Any number of ranks that divides it can resume.
        accumulate: parts of a batch that a rank computes one after the other, to save memory.
    """

    partitions: int | None = None
    accumulate: int = 1


@dataclass(frozen=True)
class TrainingConfig:
    """The configuration of a training run; a field that is null is chosen from the data and the device, and printed.

    Args:
        recipe: baseline (plain MONAI), guide (MONAI's optimized tutorial) or fast (this project's own).
        data: dataset folder, in one of the layouts listed in the app's README; synthetic data without it.
        run: run folder to create; runs/APP/TIME by default.
        resume: run folder to resume, with its own configuration.
        init: initial weights: a .safetensors file of this project, or a file that the app's README names.
        fold: fold that validates, from 0; the others train.
        folds: number of folds of a cross-validation, which `medspeed folds` runs.
        groups: what must stay in one fold (patients): FILE.csv:COLUMN, cases in its first column; or a pattern in
            case names, such as P[0-9]+ for P12 in P12_ct.
        store: cache directory for prepared and synthetic data.
        seed: random seed for the initial weights, the sampling and order of crops or patches, and the augmentation.
        device: auto, cpu, cuda or cuda:N.
        workers: processes of MONAI's DataLoader (none by default), else threads (one per core by default).
        batch_size: crops or patches per step, over all ranks.
        optimizer: muon (fast's default on CPUs), novograd (on GPUs), monai_novograd (MONAI's), adam or sgd.
        learning_rate: initial learning rate; 0.025 with muon, else 0.01, by default.
        schedule: how the learning rate changes over the run.
        epochs: passes over the training data.
        precision: fp32, bf16, fp16 (with loss scaling) or auto (mostly bf16 if the device has it; guide: fp16 on GPUs).
        compile: compile the network with torch.compile.
        kernels: GPU kernels: torch, fused (where verified correct) or auto (fused where also measured to be faster).
        graph: run each GPU step as one CUDA graph: auto (where a trial shows it correct and faster) or off.
        validate_every: epochs between validations; by default a run of many epochs has 5 to 19.
        until: target, such as dice=0.90 (pathology: auc=0.95); stop once three validations in a row reach it.
        engine: TensorRT engine to build: auto, tensorrt, tensorrt_rtx or none.
        fast_dev_run: smoke test: two steps on a few cases, validation, export and summary; scores mean nothing.
        log: trackers that get curves, settings and results: tensorboard (into the run folder), mlflow, wandb, trackio.
        profile: profile some steps: torch (into the run folder's profile) or nvtx (for Nsight Systems).
        parallel: how a batch is split.
    """

    recipe: Literal["baseline", "guide", "fast"] = "fast"
    data: Path | None = None
    run: Path | None = None
    resume: Path | None = None
    init: Path | None = None
    fold: int | None = None
    folds: int | None = None
    groups: str | None = None
    store: Path = Path("~/.cache/medspeed")
    seed: int = 0
    device: str = "auto"
    workers: int | None = None
    batch_size: int | None = None
    optimizer: Literal["novograd", "muon", "monai_novograd", "adam", "sgd"] | None = None
    learning_rate: float | None = None
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    epochs: int | None = None
    precision: Literal["auto", Precision] = "auto"
    compile: bool = False
    kernels: Literal["auto", "torch", "fused"] = "auto"
    graph: Literal["auto", "off"] = "auto"
    validate_every: int | None = None
    until: str | None = None
    engine: Literal["auto", "tensorrt", "tensorrt_rtx", "none"] = "auto"
    fast_dev_run: bool = False
    log: tuple[Literal["tensorboard", "mlflow", "wandb", "trackio"], ...] = ("tensorboard",)
    profile: Literal["nothing", "torch", "nvtx"] = "nothing"
    parallel: Parallel = field(default_factory=Parallel)

    GROUPS: ClassVar[dict[str, str]] = {  # of the help; what only one app has is of its model, or named here too
        "run": "recipe run resume init seed fast_dev_run log profile",
        "data": "data store split fold folds groups spacing window crop_size lists held_out reader patches_per_slide "
        "patches_per_epoch",
        "model": "*",
        "training": "batch_size optimizer learning_rate schedule epochs until loss crops augmentation",
        "device and speed": "device workers precision compile kernels graph parallel cache source channels_last",
        "validation and export": "validate_every windows tile_size engine",
    }
    APP: ClassVar[str] = "training"
    METRIC: ClassVar[str] = "Dice"  # what validations measure, and --until names in small letters
    # Fields that are null, or 1 at least.
    COUNTS: ClassVar[str] = "batch_size epochs validate_every workers parallel.partitions parallel.accumulate"
    RESUMABLE: ClassVar[tuple[str, ...]] = (  # may differ when a run goes on: where its data lie now, what computes
        *("resume", "data", "store", "device", "workers", "engine", "until", "log", "profile", "kernels", "graph"),
        "parallel.accumulate",
    )

    def __post_init__(self) -> None:
        """Check each value against its bound; a ValueError names the field, the value and the bound."""
        object.__setattr__(self, "store", Path(os.path.expanduser(self.store)))  # noqa: PTH111 - nor raise
        object.__setattr__(self, "data", self.data and self.data.absolute())  # wherever the run goes on
        object.__setattr__(self, "resume", self.resume and self.resume.resolve())  # wherever `latest` moves
        values = flat(self)
        counts = [(name, values[name] is None or values[name] >= 1, "at least 1") for name in self.COUNTS.split()]
        for name, holds, bound in (*counts, *self.checks()):
            if not holds:
                raise ValueError(f"{name} {values[name]}: must be {bound}")
        self.target()

    def checks(self) -> Sequence[Check]:
        """Return the checks of single fields; an app adds its own."""
        return (
            ("seed", 0 <= self.seed < 2**63, "0 or more, below 2 ** 63"),
            ("learning_rate", self.learning_rate is None or 0 < self.learning_rate < 1e30, "above 0, below 1e30"),
            ("folds", self.folds is None if self.fold is None else (self.folds or 0) > 1, "2 or more, with --fold"),
            ("fold", 0 <= (self.fold or 0) < (self.folds or 1), "0 or more, and below folds"),
            ("groups", self.groups is None or self.fold is not None, "given with --fold and --folds"),
        )

    def target(self) -> float | None:
        """Return the value that `until` asks for; raise a ValueError where it is no METRIC=VALUE of this app."""
        if self.until is None:
            return None
        metric = self.METRIC.lower()
        found = re.fullmatch(rf"\s*{metric}\s*=\s*((?=\.?\d)[01]?\.?\d*)", self.until.lower())
        if found is None or not 0 < float(found[1]) <= 1:
            raise ValueError(f"until {self.until}: must be {metric}=VALUE with a value above 0 and at most 1")
        return float(found[1])

    def optimized(self) -> Self:
        """Return the configuration with optimizer and learning rate decided: Novograd, where the app takes no other."""
        name = self.optimizer or "novograd"
        return replace(self, optimizer=name, learning_rate=self.learning_rate or (0.025 if name == "muon" else 0.01))

    def plan_epochs(self, steps: int, per_epoch: int, validations: int) -> tuple[int, int]:
        """Return the run's epochs, for about `steps` steps, and `validate_every`, for about `validations` of them.

        A run with a target has at least the validations that must hold it.
        """
        if self.fast_dev_run:
            return 2, 1  # each of one step and validated
        epochs = self.epochs or max(-(-steps // per_epoch), VALIDATIONS_HELD if self.until else 1)
        return epochs, self.validate_every or max(1, epochs // validations)

    def check_resumed(self, began: Self) -> None:
        """Check that a run goes on with what it `began` with, though some fields may change; else a ValueError."""

    def alike(self) -> bool:
        """Return whether fewer ranks that hold more partitions each compute the same."""
        return True
