"""The configuration of the pathology app: one frozen dataclass and three recipes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from common.config import config_from_yaml, parse_config, resumed_config
from common.training.bounds import Check, check_bounds

_DESCRIPTION = (
    "Train a detector of metastases on patches of whole-slide images (Camelyon16, coordinate lists, or plain folders "
    "of labelled patches), to a TensorRT engine; on one device, or with torchrun on many."
)
_STRIDE = 32  # of the ResNet-18's last features, in pixels


@dataclass(frozen=True)
class PathologyConfig:
    """What a training run is told; a field that is null is chosen from the data and the device, and printed.

    Args:
        recipe: baseline (MONAI's plain script), guide (MONAI's optimized script) or fast (ours).
        data: folder of slides in Camelyon16's layout, or of patches with a labels.csv (image, label, split); null makes
            synthetic slides.
        training_list: list of coordinates to train on (NCRF's CSV or MONAI's JSON), of slides below `data`.
        validation_list: the same, to validate on; both or none.
        mpp: um per pixel of the patches; null takes what the slides say. Scans then look at the level that is nearest.
        held_out: share of the training slides (or patches) that validate.
        run: folder of this run; null names it by the time below runs/pathology.
        resume: folder of a run to go on with; it keeps its own configuration.
        init: weights to start from: a .safetensors of ours, or a .pth of torchvision's ResNet-18 (ImageNet).
        store: folder for decoded patches and synthetic slides.
        seed: of the split, the patches, the initial weights, the order and the augmentation.
        device: auto, cpu, cuda or cuda:N.
        reader: of the slides: auto, cucim, openslide or tifffile.
        source: uncached (MONAI's datasets and loaders) or resident (patches decoded once, kept near the device).
        workers: reading threads or loader processes; null takes the cores at hand.
        patches_per_slide: patches drawn from each annotated slide.
        patch_size: side of a patch in pixels, a multiple of 32; a list's patches have 224.
        batch_size: patches in one step, over all ranks.
        partitions: parts of the training patches, each held by one rank; null takes as many as there are ranks.
        accumulate: parts of a rank's batch computed one after the other, for less memory.
        brightness: largest relative change of the brightness.
        contrast: of the contrast.
        saturation: of the saturation.
        hue: largest turn of the hue, in full turns.
        zoom: smallest and greatest zoom of half of the patches.
        label_smoothing: targets lie so far from 0 and 1.
        optimizer: novograd (ours, foreach), MONAI's Novograd, adam or sgd.
        learning_rate: at the first step.
        schedule: of the learning rate over all steps.
        epochs: passes over the training patches.
        precision: fp32, bf16, fp16 (with loss scaling) or auto (bf16 where the device computes it; with the recipe
            guide what its autocast does: fp16 on a GPU, fp32 on a CPU).
        channels_last: memory layout of the network, channels innermost.
        compile: compile the network with torch.compile.
        validate_every: epochs between validations; null validates about ten times.
        checkpoint_seconds: least time between two checkpoints.
        tile_size: side of the tiles of a dense scan in pixels, a multiple of 32; the exported networks take it.
        engine: TensorRT flavour to build for: auto, tensorrt, tensorrt_rtx or none.
    """

    recipe: Literal["baseline", "guide", "fast"] = "fast"
    data: Path | None = None
    training_list: Path | None = None
    validation_list: Path | None = None
    mpp: float | None = None
    held_out: float = 0.25
    run: Path | None = None
    resume: Path | None = None
    init: Path | None = None
    store: Path = Path("~/.cache/medspeed")
    seed: int = 0
    device: str = "auto"
    reader: Literal["auto", "cucim", "openslide", "tifffile"] = "auto"
    source: Literal["uncached", "resident"] = "resident"
    workers: int | None = None
    patches_per_slide: int | None = None
    patch_size: int | None = None
    batch_size: int | None = None
    partitions: int | None = None
    accumulate: int = 1
    # The guide's colour jitter: MONAI tutorials, pathology/tumor_detection (from NCRF, Li and Ping 2018).
    brightness: float = 64 / 255
    contrast: float = 0.75
    saturation: float = 0.25
    hue: float = 0.04
    zoom: tuple[float, float] = (0.9, 1.1)
    label_smoothing: float = 0.05
    optimizer: Literal["novograd", "monai_novograd", "adam", "sgd"] = "novograd"
    learning_rate: float = 0.01
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    epochs: int | None = None
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    channels_last: bool = True
    compile: bool = False
    validate_every: int | None = None
    checkpoint_seconds: float = 30.0
    tile_size: int | None = None
    engine: Literal["auto", "tensorrt", "tensorrt_rtx", "none"] = "auto"

    def __post_init__(self) -> None:
        """Check each value against its bound.

        Raises:
            ValueError: names the field, the value and the bound.
        """
        object.__setattr__(self, "store", self.store.expanduser())
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
        check_bounds(self, checks)


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
# What may differ when a run goes on: where its data lie now, what computes, how often it saves.
_RESUMABLE = ("resume", "data", "store", "device", "workers", "accumulate", "checkpoint_seconds", "engine")


def parse_pathology_config(arguments: Sequence[str] | None = None) -> PathologyConfig:
    """Parse the command line of `apps/pathology/train.py`; with --resume, take the run's own configuration."""
    return parse_config(PathologyConfig, RECIPES, arguments, _DESCRIPTION, then=_resumed)


def _resumed(config: PathologyConfig) -> PathologyConfig:
    if config.resume is None:
        return config
    stored = config_from_yaml(PathologyConfig, config.resume / "config.yaml")
    return resumed_config(config, stored, RECIPES[config.recipe], keep=_RESUMABLE)
