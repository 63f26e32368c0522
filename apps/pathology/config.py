"""What the pathology app is told: trainings, with three recipes as values, scans and evaluations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

from medspeed.common.config import parse_config
from medspeed.common.inference import AnyPrecision, Backend
from medspeed.common.inference.options import model_folder
from medspeed.common.training.config import Check, TrainingConfig

_DESCRIPTION = "Train a detector of metastases on patches of whole-slide images, to a checked TensorRT engine."
_STRIDE = 32  # of the ResNet-18's last features, in pixels
JITTER = (64 / 255, 0.75, 0.25, 0.04)  # the guide's
Reader = Literal["auto", "cucim", "openslide", "tifffile"]

DEFAULTS = {
    # What `fast` takes where the user says nothing: the guide's patches on a GPU, small ones on a CPU. Steps, not
    # epochs, so that small and large sets train equally long; a GPU's are ten passes over 400,000 patches. Of a
    # tile, `core` pixels have logits that are kept. An `epoch` of fewer patches lets a short run validate in time.
    "cuda": {"patch_size": 224, "patches_per_slide": 2000, "batch_size": 256, "steps": 15_600, "core": 1536},
    "cpu": {"patch_size": 96, "patches_per_slide": 400, "batch_size": 32, "steps": 150, "core": 1024, "epoch": 1216},
}


def _on_stride(side: int) -> bool:
    return side > 0 and side % _STRIDE == 0


@dataclass(frozen=True)
class Augmentation:
    """How patches are augmented: color jitter and 0 to 3 quarter turns for all, a flip for half, any zoom for half.

    MONAI's recipes turn half of the patches.

    Args:
        jitter: color jitter: maximum relative change b of brightness, contrast and saturation (the factor is uniform in
            [max(0, 1 - b), 1 + b]), and maximum shift h of the hue, in turns (uniform in [-h, h]); on a GPU by default
            the guide's, 0.251 0.75 0.25 0.04, on a CPU none: short trainings end better without.
        zoom: minimum and maximum zoom factor, uniform in between (guide: 0.9 1.1).
        label_smoothing: distance of the targets from 0 and 1.

    Source: MONAI tutorials, pathology/tumor_detection (from NCRF, Li and Ping 2018); the parameters and operations of
        the jitter are those of torchvision.transforms.ColorJitter.
    """

    jitter: tuple[float, float, float, float] | None = None
    zoom: tuple[float, float] = (1.0, 1.0)
    label_smoothing: float = 0.0


@dataclass(frozen=True)
class PathologyConfig(TrainingConfig):
    """The configuration of a training run; a field that is null is chosen from the data and the device, and printed.

    Args:
        data: folder of slides in Camelyon16 layout, or of patches with a labels.csv (image, label, split); synthetic
            slides without it.
        init: initial weights: a .safetensors file of this project, or a .pth of torchvision's ResNet-18 (ImageNet).
        lists: coordinates of training and validation patches on the slides in --data (NCRF's CSV).
        mpp: pixel size of the patches in um; by default the slides'. Scans read the coarsest level that is fine enough.
        held_out: fraction of the training slides (or patches) to validate on, if nothing else divides them.
        reader: slide reader: auto, cucim, openslide or tifffile.
        source: uncached (MONAI's datasets and loaders) or resident (patches decoded once; on a GPU where they fit).
        patches_per_slide: patches sampled from each annotated slide.
        patches_per_epoch: training patches in an epoch, at least one batch; one epoch goes on where the last one ended.
        patch_size: side of a patch in pixels, a multiple of 32; 224 with --lists.
        augmentation: how patches and targets are changed.
        channels_last: channels-last memory layout.
        tile_size: side of the tiles of a dense scan in pixels, a multiple of 32; exported networks expect it.
    """

    lists: tuple[Path, Path] | None = None
    mpp: float | None = None
    held_out: float = 0.25
    reader: Reader = "auto"
    source: Literal["uncached", "resident"] = "resident"
    patches_per_slide: int | None = None
    patches_per_epoch: int | None = None
    patch_size: int | None = None
    augmentation: Augmentation = field(default_factory=Augmentation)
    channels_last: bool = True
    tile_size: int | None = None

    APP: ClassVar[str] = "pathology"
    METRIC: ClassVar[str] = "AUC"
    COUNTS: ClassVar[str] = f"{TrainingConfig.COUNTS} patches_per_slide patches_per_epoch"

    def checks(self) -> Sequence[Check]:
        """Return the checks of single fields."""
        parts = "brightness, contrast, saturation (each at least 0) and hue (in [0, 0.5], half a turn)"
        jitter, zoom = self.augmentation.jitter or (0.0, 0.0, 0.0, 0.0), self.augmentation.zoom
        stride = f"a multiple of {_STRIDE}, above 0"
        return (
            *super().checks(),
            ("lists", self.lists is None or self.data is not None, "given together with data"),
            ("mpp", self.mpp is None or 0.05 <= self.mpp <= 100, "between 0.05 and 100 um"),
            ("held_out", 0 < self.held_out < 1, "above 0, below 1"),
            ("fold", self.fold is None or (self.lists, self.held_out) == (None, 0.25), "without --lists, --held-out"),
            ("augmentation.label_smoothing", 0 <= self.augmentation.label_smoothing < 0.5, "in [0, 0.5)"),
            ("augmentation.jitter", 0 <= min(jitter) <= max(jitter) < math.inf and jitter[3] <= 0.5, parts),
            ("augmentation.zoom", 0.5 <= zoom[0] <= zoom[1] <= 2, "two factors from 0.5 to 2, smaller first"),
            ("patches_per_epoch", self.patches_per_epoch is None or self.source == "resident", "with source resident"),
            ("patch_size", self.patch_size is None or _on_stride(self.patch_size), stride),
            ("tile_size", self.tile_size is None or _on_stride(self.tile_size), stride),
            ("tile_size", (self.tile_size or 0) <= 2**14, "16384 at most"),
        )

    def alike(self) -> bool:
        """Return whether fewer ranks that hold more partitions each compute the same; MONAI's parts go by rank."""
        return self.source == "resident"


GUIDE = PathologyConfig(
    # MONAI tutorials, pathology/tumor_detection/torch/camelyon_train_evaluate_pytorch_gpu.py with --optimized, but for
    # ImageNet's weights (see --init) and the epochs, which are those of the script for Ignite (there 4).
    recipe="guide",
    source="uncached",
    batch_size=576,
    augmentation=Augmentation(jitter=JITTER, zoom=(0.9, 1.1)),
    optimizer="monai_novograd",
    learning_rate=1e-3,
    epochs=10,
    channels_last=False,
    validate_every=1,
)

# The same script with --baseline, but for the weight decay of SGD (there none).
BASELINE = replace(GUIDE, recipe="baseline", optimizer="sgd", schedule="constant", precision="fp32")

RECIPES = {"fast": PathologyConfig(), "guide": GUIDE, "baseline": BASELINE}


def parse(arguments: Sequence[str] | None = None) -> PathologyConfig:
    """Parse the command line of `apps/pathology/train.py`; with --resume, take the run's own configuration."""
    return parse_config(PathologyConfig, RECIPES, arguments, _DESCRIPTION)


@dataclass(frozen=True)
class ScanConfig:
    """The configuration of a scan.

    Args:
        model: run folder.
        input: a slide, or a folder of slides or of patches (PNG, JPEG or BMP), which are scored.
        output: folder for the results: a subfolder for each slide, or the table of the patches.
        mode: dense (fully convolutional on tiles, a probability every 32 pixels) or patches (as MONAI does: one forward
            pass per patch, every --stride pixels).
        stride: distance between patches in pixels of the network's input, a multiple of 32.
        backend: tensorrt, onnxruntime, torch or auto (an engine that fits this GPU, else the fastest one available).
        precision: fp32, fp16, bf16 (torch only), int8 (exported models only) or auto (as trained with torch, else
            fp32).
        reader: cucim, openslide, tifffile or auto (the first one that reads all levels).
        device: auto, cpu, cuda or cuda:N.
        overlays: draw a heatmap of each slide.
    """

    model: Path
    input: Path
    output: Path
    mode: Literal["dense", "patches"] = "dense"
    stride: int = 64
    backend: Literal["auto", Backend] = "auto"
    precision: Literal["auto", AnyPrecision] = "auto"
    reader: Reader = "auto"
    device: str = "auto"
    overlays: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", model_folder(self.model))
        if self.mode != "patches" and self.stride != ScanConfig.stride:
            raise ValueError(f"stride {self.stride}: only with --mode patches")
        if not _on_stride(self.stride):
            raise ValueError(f"stride {self.stride}: must be a multiple of {_STRIDE} above 0")


@dataclass(frozen=True)
class EvaluateConfig:
    """The configuration of an evaluation.

    Args:
        scans: output folder of `medspeed infer`.
        data: folder of slides with reference annotations, the training set or another.
    """

    scans: Path
    data: Path
