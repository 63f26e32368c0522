"""The configuration of the pathology app: one frozen dataclass and three recipes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from common.training.bounds import Check
from common.training.config import TrainingConfig, parse_training

_DESCRIPTION = (
    "Train a detector of metastases on patches of whole-slide images (Camelyon16, coordinate lists, or plain folders "
    "of labelled patches), to a TensorRT engine; on one device, or with torchrun on many."
)
_STRIDE = 32  # of the ResNet-18's last features, in pixels


@dataclass(frozen=True)
class PathologyConfig(TrainingConfig):
    """What a training run is told; a field that is null is chosen from the data and the device, and printed.

    Args:
        data: folder of slides in Camelyon16's layout, or of patches with a labels.csv (image, label, split); null makes
            synthetic slides.
        init: weights to start from: a .safetensors of ours, or a .pth of torchvision's ResNet-18 (ImageNet).
        training_list: list of coordinates to train on (NCRF's CSV or MONAI's JSON), of slides below `data`.
        validation_list: the same, to validate on; both or none.
        mpp: um per pixel of the patches; null takes what the slides say. Scans then look at the level that is nearest.
        held_out: share of the training slides (or patches) that validate.
        reader: of the slides: auto, cucim, openslide or tifffile.
        source: uncached (MONAI's datasets and loaders) or resident (patches decoded once, kept near the device).
        patches_per_slide: patches drawn from each annotated slide.
        patch_size: side of a patch in pixels, a multiple of 32; a list's patches have 224.
        brightness: largest relative change of the brightness.
        contrast: of the contrast.
        saturation: of the saturation.
        hue: largest turn of the hue, in full turns.
        zoom: smallest and greatest zoom of half of the patches.
        label_smoothing: targets lie so far from 0 and 1.
        channels_last: memory layout of the network, channels innermost.
        tile_size: side of the tiles of a dense scan in pixels, a multiple of 32; the exported networks take it.
    """

    training_list: Path | None = None
    validation_list: Path | None = None
    mpp: float | None = None
    held_out: float = 0.25
    reader: Literal["auto", "cucim", "openslide", "tifffile"] = "auto"
    source: Literal["uncached", "resident"] = "resident"
    patches_per_slide: int | None = None
    patch_size: int | None = None
    # The guide's colour jitter: MONAI tutorials, pathology/tumor_detection (from NCRF, Li and Ping 2018).
    brightness: float = 64 / 255
    contrast: float = 0.75
    saturation: float = 0.25
    hue: float = 0.04
    zoom: tuple[float, float] = (0.9, 1.1)
    label_smoothing: float = 0.05
    channels_last: bool = True
    tile_size: int | None = None

    METRIC: ClassVar[str] = "AUC"
    RESUMABLE: ClassVar[tuple[str, ...]] = (*TrainingConfig.RESUMABLE, "accumulate")

    def checks(self) -> Sequence[Check]:
        """Return the checks of the fields that are this app's own."""
        resident = self.source == "resident"
        checks: list[Check] = [
            ("mpp", self.mpp is None or 0.05 <= self.mpp <= 100, "between 0.05 and 100 um"),
            ("held_out", 0 < self.held_out < 1, "above 0, below 1"),
            ("label_smoothing", 0 <= self.label_smoothing < 0.5, "in [0, 0.5)"),
            ("hue", 0 <= self.hue <= 0.5, "in [0, 0.5], half a turn"),
            ("zoom", 0.5 <= self.zoom[0] <= self.zoom[1] <= 2, "smallest and greatest, between 0.5 and 2"),
            ("partitions", resident or self.partitions is None, "null with MONAI's source, which goes by rank"),
            (
                "validation_list",
                (self.validation_list is None) == (self.training_list is None),
                "given together with training_list",
            ),
            ("training_list", self.training_list is None or self.data is not None, "given together with data"),
        ]
        checks += [(name, getattr(self, name) >= 0, "0 or more") for name in ("brightness", "contrast", "saturation")]
        for name in ("patch_size", "tile_size"):
            value = getattr(self, name)
            checks.append((name, value is None or (value > 0 and value % _STRIDE == 0), f"a multiple of {_STRIDE}"))
        return checks


GUIDE = PathologyConfig(
    # MONAI tutorials, pathology/tumor_detection/torch/camelyon_train_evaluate_pytorch_gpu.py with --optimized.
    recipe="guide",
    source="uncached",
    batch_size=576,
    label_smoothing=0.0,
    optimizer="monai_novograd",
    learning_rate=1e-3,
    epochs=10,
    channels_last=False,
    validate_every=1,
)

BASELINE = replace(
    # The same script with --baseline.
    GUIDE,
    recipe="baseline",
    optimizer="sgd",
    schedule="constant",
    precision="fp32",
)

RECIPES = {"fast": PathologyConfig(), "guide": GUIDE, "baseline": BASELINE}

RUNS = Path("runs/pathology")


def parse_pathology_config(arguments: Sequence[str] | None = None) -> PathologyConfig:
    """Parse the command line of `apps/pathology/train.py`; with --resume, take the run's own configuration."""
    return parse_training(PathologyConfig, RECIPES, _DESCRIPTION, arguments)
