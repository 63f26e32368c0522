"""The rungs of the ladder: from the baseline to fast one technique at a time, then single changes of fast.

A rung is a name and the fields of the app's configuration that it changes. Crop, network and batch are the same on all
rungs of the climb, so that each differs from the one before in its technique alone.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from apps.brats.config import RECIPES as BRATS
from apps.pathology.config import RECIPES as PATHOLOGY
from apps.spleen.config import RECIPES as SPLEEN
from common.training.config import TrainingConfig

RAM_DISK = Path("/dev/shm")


@dataclass(frozen=True)
class Rung:
    """One technique.

    Args:
        name: of the technique, with the flag that turns it where it has one.
        config: of the whole rung.
        why_not: where it cannot run here, the reason; the rung is listed with it.
    """

    name: str
    config: TrainingConfig
    why_not: str = ""


_SIZES: dict[str, dict[str, dict[str, Any]]] = {
    # A CPU's sizes are what `fast` chooses there; a GPU's are the guide's.
    "spleen": {
        "cpu": {"channels": (8, 16, 32, 64), "crop_size": (64, 64, 48), "window_size": (64, 64, 48), "batch_size": 4},
        "cuda": {},
    },
    "brats": {
        "cpu": {
            "filters": 8, "blocks_down": (1, 2, 2), "crop_size": (48, 48, 48), "window_size": (72, 96, 72),
            "window_batch": 1, "overlap": 0.25, "batch_size": 4,
        },
        "cuda": {},
    },
    "pathology": {"cpu": {"patch_size": 96, "batch_size": 32, "patches_per_slide": 96}, "cuda": {}},
}  # fmt: skip

_EQUAL = (
    "crop_size", "crops_per_case", "window_size", "window_batch", "overlap", "batch_size", "epochs", "channels",
    "filters", "residual_units", "blocks_down", "patch_size", "patches_per_slide",
)  # fmt: skip

# Each step of the climb: the technique, and the fields that it changes for good.
_CLIMB: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "spleen": [
        ("CacheDataset and ThreadDataLoader (--source cached)", {"source": "cached", "workers": None}),
        ("DiceCE (--loss monai_dice_ce)", {"loss": "monai_dice_ce"}),
        ("Novograd, MONAI's: the guide (--optimizer monai_novograd)",
         {"optimizer": "monai_novograd", "learning_rate": 2e-3}),
        ("prepared store, batches cut on the device (--source resident)", {"source": "resident"}),
        ("Novograd in foreach (--optimizer novograd)", {"optimizer": "novograd"}),
        ("a higher learning rate (--learning_rate 0.01)", {"learning_rate": 0.01}),
        ("DiceCE without MONAI (--loss dice_ce)", {"loss": "dice_ce"}),
        ("channels innermost (--channels_last true)", {"channels_last": True}),
        ("vectorised PReLU (--fast_prelu true)", {"fast_prelu": True}),
        ("bf16 where the device has it (--precision auto)", {"recipe": "fast", "precision": "auto"}),
    ],
    "brats": [
        ("CacheDataset and ThreadDataLoader (--source cached)", {"source": "cached", "workers": None}),
        ("DiceFocal (--loss monai_dice_focal)", {"loss": "monai_dice_focal"}),
        ("Novograd, MONAI's: the guide (--optimizer monai_novograd)", {"optimizer": "monai_novograd", "dropout": 0.0}),
        ("prepared store, batches cut on the device (--source resident)", {"source": "resident"}),
        ("Novograd in foreach (--optimizer novograd)", {"optimizer": "novograd"}),
        ("a higher learning rate (--learning_rate 0.01)", {"learning_rate": 0.01}),
        ("DiceFocal without MONAI (--loss dice_focal)", {"loss": "dice_focal"}),
        ("the faster layout (--channels_last null)", {"channels_last": None}),
        ("bf16 where the device has it (--precision auto)", {"recipe": "fast", "precision": "auto"}),
    ],
    "pathology": [
        ("Novograd, MONAI's, and cosine: the guide (--optimizer monai_novograd)",
         {"optimizer": "monai_novograd", "learning_rate": 1e-3, "schedule": "cosine"}),
        ("patch store, batches augmented on the device (--source resident)", {"source": "resident"}),
        ("Novograd in foreach (--optimizer novograd)", {"optimizer": "novograd"}),
        ("a higher learning rate (--learning_rate 0.01)", {"learning_rate": 0.01}),
        ("channels innermost (--channels_last true)", {"channels_last": True}),
        ("bf16 where the device has it (--precision auto)", {"recipe": "fast", "precision": "auto"}),
    ],
}  # fmt: skip

# Changes of fast, one at a time; None stands for twice the batch, the other layout, and a folder in a RAM disk.
_BESIDE: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "all": [
        ("full precision (--precision fp32)", {"precision": "fp32"}),
        ("the other layout (--channels_last)", {"channels_last": None}),
        ("torch.compile, default mode (--compile true)", {"compile": True}),
        ("Adam (--optimizer adam)", {"optimizer": "adam", "learning_rate": 1e-3}),
        ("SGD (--optimizer sgd)", {"optimizer": "sgd", "learning_rate": 0.05}),
        ("gradient accumulation (--accumulate 2)", {"accumulate": 2}),
        ("batch size (--batch_size, doubled)", {"batch_size": None}),
        ("no monitor (--monitor 0)", {"monitor": 0.0}),
        ("a monitor ten times as often (--monitor 0.1)", {"monitor": 0.1}),
        ("a checkpoint in every step (--checkpoint_seconds 0)", {"checkpoint_seconds": 0.0}),
        ("the store in a RAM disk (--store /dev/shm)", {"store": None}),
    ],
    "spleen": [
        ("Dice alone, MONAI's (--loss monai_dice)", {"loss": "monai_dice"}),
        ("the guide's loss on fast (--loss monai_dice_ce)", {"loss": "monai_dice_ce"}),
        ("DiceFocal, MONAI's (--loss monai_dice_focal)", {"loss": "monai_dice_focal"}),
        ("a smaller patch (--crop_size 32 32 32)", {"crop_size": (32, 32, 32)}),
        ("wider channels (--channels, doubled)", {"channels": (16, 32, 64, 128)}),
        ("more crops per case (--crops_per_case 8)", {"crops_per_case": 8}),
        ("no augmentation (--intensity 0)", {"intensity": 0.0}),
        ("flips (--flip_axes xyz)", {"flip_axes": "xyz"}),
        ("more overlap of windows (--overlap 0.6)", {"overlap": 0.6}),
        ("batches from the disk (--cache disk)", {"cache": "disk"}),
    ],
    "brats": [
        ("Dice alone, MONAI's (--loss monai_dice)", {"loss": "monai_dice"}),
        ("loss per sample (--loss dice_focal_per_sample)", {"loss": "dice_focal_per_sample"}),
        ("a smaller patch (--crop_size 32 32 32)", {"crop_size": (32, 32, 32)}),
        ("wider channels (--filters 16)", {"filters": 16}),
        ("more crops per case (--crops_per_case 8)", {"crops_per_case": 8}),
        ("no augmentation (--intensity 0, no flips)", {"intensity": 0.0, "flip_axes": ""}),
        ("more overlap of windows (--overlap 0.6)", {"overlap": 0.6}),
        ("batches from the disk (--cache disk)", {"cache": "disk"}),
        ("part of the cases in turn (--cache smart)", {"cache": "smart", "cache_cases": 8}),
        ("prepared at every use (--cache none)", {"cache": "none"}),
    ],
    "pathology": [
        ("a smaller patch (--patch_size 64)", {"patch_size": 64}),
        ("no colour jitter (--brightness 0 ...)", {"brightness": 0.0, "contrast": 0.0, "saturation": 0.0, "hue": 0.0}),
        ("no zoom (--zoom 1 1)", {"zoom": (1.0, 1.0)}),
        ("no label smoothing (--label_smoothing 0)", {"label_smoothing": 0.0}),
    ],
}

# What the guides name and these machines or apps cannot show, and why.
ABSENT = {
    "transforms on a GPU": ("cpu", "there is no GPU"),
    "pinned memory": (
        "cpu",
        "there is no GPU to copy to; batches of resident sources are uploaded from pinned memory there",
    ),
    "CUDA graphs (torch.compile mode reduce-overhead), mode max-autotune": (
        "cpu",
        "there is no GPU: on a CPU these modes launch and tune the same kernels as the default",
    ),
    "workers, validations per epoch": ("any", "they change no step; apps/doctor.py says when they matter"),
    "GPUDirect storage (GDSDataset)": (
        "any",
        "needs kvikio and a file system that supports it; the store fits in memory",
    ),
    "several nodes": ("any", "apps/brats/README.md; tests/common/training/test_two_hosts.py runs two hosts"),
}


def climb(app: str, kind: str, data: Path, store: Path) -> list[Rung]:
    """Return the rungs from the baseline to fast, each with all techniques of those below it."""
    recipes: Any = {"spleen": SPLEEN, "brats": BRATS, "pathology": PATHOLOGY}[app]
    base = _base(app, kind, data, store)
    workers = min(recipes["baseline"].workers or 1, len(os.sched_getaffinity(0)))
    config = replace(recipes["baseline"], **base, workers=workers, validate_every=None)
    rungs = [Rung("baseline: Dataset, DataLoader, plain optimizer and loss, fp32", config)]
    for name, changes in _CLIMB[app]:
        config = replace(config, **changes)
        rungs.append(Rung(name, config))
    equal = {name: getattr(config, name) for name in _EQUAL if hasattr(config, name)}
    fast = replace(recipes["fast"], **{**base, **equal})  # what is left: augmentation, schedule, label smoothing
    return [*rungs, Rung("fast's augmentation and schedule: fast", fast)]


def beside(app: str, fast: TrainingConfig, ram: Path | None) -> list[Rung]:
    """Return single changes of fast; `ram` is a folder in a RAM disk, None where there is none."""
    rungs = []
    for name, changes in [*_BESIDE["all"], *_BESIDE[app]]:
        made: dict[str, Any] = dict(changes)
        if made.get("batch_size", 0) is None:
            made["batch_size"] = 2 * (fast.batch_size or 1)
        if made.get("channels_last", 0) is None:
            made["channels_last"] = not getattr(fast, "channels_last", False)
        why_not = f"there is no {RAM_DISK}" if "store" in made and ram is None else ""
        if "store" in made:
            made["store"] = ram or fast.store
        rungs.append(Rung(name, fast if why_not else replace(fast, **made), why_not))
    return rungs


def _base(app: str, kind: str, data: Path, store: Path) -> dict[str, Any]:
    return {"data": data, "store": store, "engine": "none", "device": kind, **_SIZES[app][kind]}
