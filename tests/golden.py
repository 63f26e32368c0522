"""Twenty steps of every app and recipe on small made-up data: what `test_golden_losses.py` holds, and how it is taken.

`python -m tests.golden` writes the losses of the code as it is. Every option is given, so that no default decides, and
the learning rates are small enough that rounding, which is another on each kind of processor, does not grow.
"""

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import nibabel
import numpy as np
from PIL import Image

KNOWN = Path(__file__).parent / "golden_losses.json"
EPOCHS = 5

_COMMON = {
    "device": "cpu", "precision": "fp32", "engine": "none", "seed": 3, "workers": 1, "compile": False,
    "epochs": EPOCHS, "validate_every": EPOCHS, "parallel.accumulate": 1, "batch_size": 2, "learning_rate": 0.002,
}  # fmt: skip
_VOLUMES = _COMMON | {
    "split": "0.2:0", "spacing": [2, 2, 2], "crop_size": [16, 16, 16], "windows.size": [32, 32, 32],
    "windows.overlap": 0.25,
}  # fmt: skip
_SPLEEN = _VOLUMES | {"window": [-100, 200], "crops.per_case": 2, "channels": [4, 8, 16]}
_BRATS = _VOLUMES | {"regions": "names", "network.filters": 8, "network.blocks_down": [1, 1], "parallel.partitions": 1}
_PATHOLOGY = _COMMON | {
    "batch_size": 4, "patch_size": 64, "tile_size": 512, "mpp": 0.25, "held_out": 0.2, "learning_rate": 0.00002,
    "augmentation.jitter": [64 / 255, 0.75, 0.25, 0.04],
}  # fmt: skip

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "spleen-fast": ("spleen", _SPLEEN | {
        "recipe": "fast", "cache": "ram", "loss": "dice_ce", "optimizer": "novograd",
        "schedule": "linear", "channels_last": True, "crops.flips": "xz", "crops.intensity": 0.1,
    }),
    "spleen-muon": ("spleen", _SPLEEN | {
        "recipe": "fast", "cache": "ram", "loss": "dice_ce", "optimizer": "muon",
        "schedule": "linear", "channels_last": True, "crops.flips": "", "crops.intensity": 0.1,
    }),
    "spleen-guide": ("spleen", _SPLEEN | {
        "recipe": "guide", "cache": "monai", "loss": "monai_dice_ce", "optimizer": "monai_novograd",
        "schedule": "constant", "channels_last": False, "crops.flips": "", "crops.intensity": 0,
    }),
    "spleen-baseline": ("spleen", _SPLEEN | {
        "recipe": "baseline", "cache": "uncached", "loss": "monai_dice", "optimizer": "adam",
        "schedule": "constant", "channels_last": False, "crops.flips": "", "crops.intensity": 0,
        "learning_rate": 0.0002,
    }),
    "brats-fast": ("brats", _BRATS | {
        "recipe": "fast", "cache": "disk", "crops.per_case": 2, "loss": "dice_focal",
        "optimizer": "novograd", "schedule": "cosine", "channels_last": True, "crops.flips": "xyz",
        "crops.intensity": 0.1, "parallel.partitions": 2,
    }),
    "brats-muon": ("brats", _BRATS | {
        "recipe": "fast", "cache": "ram", "crops.per_case": 2, "loss": "dice_focal",
        "optimizer": "muon", "schedule": "cosine", "channels_last": True, "crops.flips": "x",
        "crops.intensity": 0.1,
    }),
    "brats-guide": ("brats", _BRATS | {
        "recipe": "guide", "cache": "monai", "crops.per_case": 1, "loss": "monai_dice_focal", "batch_size": 1,
        "optimizer": "monai_novograd", "schedule": "cosine", "channels_last": False, "crops.flips": "xyz",
        "crops.intensity": 0.1,
    }),
    "brats-baseline": ("brats", _BRATS | {
        "recipe": "baseline", "cache": "uncached", "crops.per_case": 1, "loss": "monai_dice", "batch_size": 1,
        "optimizer": "adam", "schedule": "cosine", "channels_last": False, "crops.flips": "xyz", "crops.intensity": 0.1,
        "network.dropout": 0.2,
    }),
    "pathology-fast": ("pathology", _PATHOLOGY | {
        "recipe": "fast", "source": "resident", "optimizer": "novograd", "schedule": "cosine", "channels_last": True,
        "augmentation.label_smoothing": 0.05, "augmentation.zoom": [0.9, 1.1], "parallel.partitions": 1,
    }),
    "pathology-muon": ("pathology", _PATHOLOGY | {
        "recipe": "fast", "source": "resident", "optimizer": "muon", "schedule": "cosine", "channels_last": True,
        "augmentation.label_smoothing": 0.05, "augmentation.zoom": [0.9, 1.1], "parallel.partitions": 1,
        "learning_rate": 0.0002,
    }),
    "pathology-plain": ("pathology", _PATHOLOGY | {
        "recipe": "fast", "source": "resident", "optimizer": "muon", "schedule": "cosine", "channels_last": True,
        "augmentation.label_smoothing": 0.0, "augmentation.zoom": [1.0, 1.0], "parallel.partitions": 1,
        "learning_rate": 0.0002,
    }),
    "pathology-plain-colours": ("pathology", _PATHOLOGY | {
        "recipe": "fast", "source": "resident", "optimizer": "muon", "schedule": "cosine", "channels_last": True,
        "augmentation.label_smoothing": 0.0, "augmentation.zoom": [1.0, 1.0], "parallel.partitions": 1,
        "augmentation.jitter": [0.0, 0.0, 0.0, 0.0], "learning_rate": 0.0002,
    }),
    "pathology-guide": ("pathology", _PATHOLOGY | {
        "recipe": "guide", "source": "uncached", "optimizer": "monai_novograd", "schedule": "cosine",
        "channels_last": False, "augmentation.label_smoothing": 0.0, "augmentation.zoom": [0.9, 1.1],
    }),
    "pathology-baseline": ("pathology", _PATHOLOGY | {
        "recipe": "baseline", "source": "uncached", "optimizer": "sgd", "schedule": "constant", "channels_last": False,
        "augmentation.label_smoothing": 0.0, "augmentation.zoom": [0.9, 1.1], "learning_rate": 0.000001,
    }),
}  # fmt: skip


class TrainedError(Exception):
    """Raised where training ends: the losses are on disk, and no export is wanted."""


@contextmanager
def told_to_stop(step: int) -> Iterator[list[None]]:
    """Send this process SIGTERM at a step inside; yield what has as many items as steps were done."""
    fit, done = import_module("medspeed.common.training.fit"), list[None]()
    train_step = fit.train_step

    def counted(*arguments: Any, **named: Any) -> Any:
        done.append(None)
        if len(done) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(*arguments, **named)

    with mock.patch.object(fit, "train_step", counted):
        yield done


def losses(name: str, folder: Path, store: Path, data: Path, **changed: object) -> list[float]:
    """Return the loss of each step of one of the runs.

    Args:
        name: of the run.
        folder: of the run; it is made.
        store: of prepared cases.
        data: what `make_data` made.
        changed: options that are others.
    """
    app, options = RUNS[name]
    train(app, {**options, "data": data / app, "run": folder, "store": store, **changed})
    return recorded(folder)


def recorded(folder: Path) -> list[float]:
    """Return the losses in the log of a run, step by step."""
    return [loss for row in logged(folder) for loss in row["losses"]]


def logged(folder: Path) -> list[dict[str, Any]]:
    """Return the log of a run, epoch by epoch."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def train(app: str, options: dict[str, object]) -> None:
    """Run an app's `main` until its training is done."""
    module = import_module(f"medspeed.apps.{app}.train")
    parse = import_module(f"medspeed.apps.{app}.config").parse
    fit = module.fit

    def fit_only(*arguments: Any, **named: Any) -> None:
        fit(*arguments, **named)
        raise TrainedError

    with mock.patch.object(module, "fit", fit_only):
        try:
            module.main(parse(flags(options)))
        except TrainedError:
            return


def flags(options: dict[str, object]) -> list[str]:
    """Return options as a command line has them."""
    return [f"--{name}={value if isinstance(value, str) else _text(value)}" for name, value in options.items()]


def make_data(folder: Path) -> None:
    """Write five CT volumes, five of MRI, and twenty patches, all small."""
    random = np.random.default_rng(7)
    _msd_folder(folder / "spleen", {"0": "CT"}, {"0": "background", "1": "organ"}, [_ct(random) for _ in range(5)])
    labels = {"0": "background", "1": "edema", "2": "non-enhancing tumor", "3": "enhancing tumour"}
    channels = {str(number): name for number, name in enumerate(("FLAIR", "T1w", "t1gd", "T2w"))}
    _msd_folder(folder / "brats", channels, labels, [_mri(random) for _ in range(5)])
    _patches(folder / "pathology", random)


def main(argument: str) -> None:
    """Be one rank of a run: the arguments of `losses` as JSON."""
    (name, *folders), changed = json.loads(argument)
    losses(name, *map(Path, folders), **changed)


def take(names: Sequence[str]) -> None:
    """Write the losses of some runs, or of all."""
    found = json.loads(KNOWN.read_text(encoding="utf-8")) if KNOWN.is_file() else {}
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        make_data(place / "data")
        for name in names or RUNS:
            found[name] = losses(name, place / name, place / "store", place / "data")
    KNOWN.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _text(value: object) -> str:
    return str(value) if isinstance(value, Path) else json.dumps(value)


def _ball(shape: tuple[int, ...], centre: np.ndarray, radius: float) -> np.ndarray:
    grid = np.stack(np.meshgrid(*(np.arange(side) for side in shape), indexing="ij"), axis=-1)
    inside: np.ndarray = np.linalg.norm(grid - centre, axis=-1) < radius
    return inside


def _ct(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    shape = (36, 34, 30)
    label = _ball(shape, random.uniform(13, 20, 3), random.uniform(6, 9))
    image = random.normal(20, 30, shape) + 70 * label
    return image.astype(np.int16), label.astype(np.uint8)


def _mri(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    shape, centre = (34, 36, 32), random.uniform(14, 19, 3)
    head = _ball(shape, np.array([17, 18, 16]), 15)
    label = np.zeros(shape, np.uint8)
    for number, radius in ((1, 9), (2, 6.5), (3, 4)):
        label[_ball(shape, centre, radius)] = number
    lift = np.array([[0, 60, 20, 30], [0, -10, -30, -25], [0, 0, -10, 70], [0, 50, 40, 10]])
    image = np.stack([(200 + random.normal(0, 15, shape) + row[label]) * head for row in lift], axis=-1)
    return image.astype(np.float32), label


def _msd_folder(folder: Path, channels: dict[str, str], labels: dict[str, str], cases: list[Any]) -> None:
    for part in ("imagesTr", "labelsTr"):
        (folder / part).mkdir(parents=True)
    listed = []
    for number, (image, label) in enumerate(cases):
        name = f"case_{number}.nii.gz"
        for part, array in (("imagesTr", image), ("labelsTr", label)):
            nibabel.save(nibabel.Nifti1Image(array, np.diag([2.0, 2.0, 2.0, 1.0])), folder / part / name)
        listed.append({"image": f"./imagesTr/{name}", "label": f"./labelsTr/{name}"})
    content = {"name": "golden", "modality": channels, "labels": labels, "training": listed, "test": []}
    (folder / "dataset.json").write_text(json.dumps(content), encoding="utf-8")


def _patches(folder: Path, random: np.random.Generator) -> None:
    (folder / "images").mkdir(parents=True)
    rows = ["image,label,split"]
    for number in range(20):
        label, split = number % 2, "train" if number < 16 else "val"
        pixels = random.normal((200, 150 - 30 * label, 190), 20, (64, 64, 3)).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{number:02d}.png")
        rows.append(f"images/{number:02d}.png,{label},{split}")
    (folder / "labels.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    take(sys.argv[1:])
