"""Score patches, each an image file, with a trained run: a table of their tumour probabilities."""

from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from medspeed.apps.pathology.config import ScanConfig
from medspeed.apps.pathology.model import load_model, normalised
from medspeed.apps.pathology.patches.store import IMAGES, decode
from medspeed.apps.pathology.patches.table import PatchTable
from medspeed.apps.pathology.slides.camelyon import is_slide
from medspeed.apps.pathology.slides.reader import SlidePool
from medspeed.common.console import hides_bar, say
from medspeed.common.inference.measure import write_measures
from medspeed.common.inference.open_predictor import open_predictor
from medspeed.common.inference.predictions import Prediction, Predictions
from medspeed.common.inference.uncertain import warn_of_training
from medspeed.common.ranks import choose_device, torchrun_place

_AT_ONCE = 256  # patches in one call


def find_patches(path: Path) -> list[Path]:
    """Return the images of patches (.png, .jpg, .jpeg, .bmp) in and below a folder, or the one; none beside slides."""
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    if any(map(is_slide, files)):
        return []
    shown = (file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts))
    return [file for file in shown if file.suffix.lower() in IMAGES]


def score_patches(files: list[Path], config: ScanConfig) -> Predictions:
    """Write `probabilities.csv` (image, probability of tumour) of square images.

    Raises:
        ValueError: an image is damaged, or is not as large as the patches that the network was trained on.
    """
    output = config.output / "probabilities.csv"
    model, device = load_model(config.model), choose_device(config.device, torchrun_place()[2])
    opened = open_predictor(config.model, model, backend=config.backend, precision=config.precision, device=device)
    say(f"{len(files)} patches, {opened.backend} {opened.precision} on {device}: {opened.reason}")
    warn_of_training(config.model)
    rows, label = np.arange(len(files), dtype=np.int32), np.zeros(len(files), np.uint8)  # which is not known
    table = PatchTable(tuple(files), rows, np.zeros((len(files), 2), np.int32), label, model.patch_size)
    at_once = model.tile_batch if opened.backend == "tensorrt" else _AT_ONCE
    folder = config.input if config.input.is_dir() else config.input.parent
    found: dict[str, list[dict[str, str]]] = {}
    for some, pixels in tqdm(decode(table, SlidePool(config.reader), None), disable=hides_bar()):
        calls = torch.split(torch.from_numpy(pixels), at_once)
        scores = torch.cat([torch.sigmoid(opened.predict(normalised(call.to(device)))).flatten() for call in calls])
        for row, score in zip(some, scores.tolist(), strict=True):
            found[files[row].relative_to(folder).as_posix()] = [{"probability": f"{score:.6f}"}]
    write_measures(output, found, "image")
    return Predictions({config.input.name: Prediction((output,), {"patches": len(files)})}, {})
