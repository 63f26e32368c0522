"""What came out of both sides of a comparison, judged from files by code that neither side trains with."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from monai.metrics import compute_dice

import medspeed
from medspeed.apps.pathology.model import load_model
from medspeed.apps.pathology.scan.scan import ProbabilityMap, choose_view, find_detections, write_detections_csv
from medspeed.apps.pathology.slides.reader import open_slide
from medspeed.common.data.dataset import read_dataset
from medspeed.common.data.volumes import read_volume
from medspeed.common.files import write_json

Regions = Mapping[str, Sequence[int]]  # labels of each
Scores = dict[str, tuple[list[float], list[float]]]  # of the guide and of fast


def dices(some: Sequence[Path], others: Sequence[Path], regions: Regions) -> np.ndarray:
    """Return the Dice of each region in each pair of files of label maps, [N, R]; 1 where it is in neither."""
    found = []
    for paths in zip(some, others, strict=True):
        voxels = [read_volume(path).voxels.astype(np.int64) for path in paths]
        pair = [torch.from_numpy(np.stack([np.isin(each, of) for of in regions.values()])[None]) for each in voxels]
        found.append(compute_dice(*pair, include_background=True, ignore_empty=False)[0].numpy())
    return np.stack(found)


def judge_masks(regions: Regions, files: Sequence[Path], data: Path, guide: Path, fast: Path) -> Scores:
    """Return the mean Dice of both sides' masks of the scans of a dataset, and the least of ours to the guide's."""
    labels = {case.image: case.label or case.image for case in read_dataset(data).cases}
    theirs, ours = ([folder / file.name for file in files] for folder in (guide, fast))
    means = [float(dices(masks, [labels[file] for file in files], regions).mean()) for masks in (theirs, ours)]
    least = float(dices(ours, theirs, regions).min())
    return {"Dice of these masks": (means[:1], means[1:]), "least Dice of a mask to the guide's": ([], [least])}


def judge_maps(run: Path, files: Sequence[Path], data: Path, guide: Path, fast: Path) -> Scores:
    """Return FROC and slide AUC of both sides' scans; the guide's maps are written as ours are, to be judged alike."""
    model, to = load_model(run), guide / "scans"
    for file in files:
        values = np.load(guide / f"{file.stem}.npy").astype(np.float32)
        slide = open_slide(file)
        view, mpp, level = choose_view(slide, model.mpp), slide.mpp, slide.levels[0]
        found = ProbabilityMap(values, round(level.width / values.shape[1]), values > 0, 0)
        write_detections_csv(to / file.stem / "detections.csv", find_detections(found, view.base_mpp))
        about = {"name": file.stem, "probability": float(values.max(initial=0)), "mpp": mpp}
        write_json(to / file.stem / "slide.json", {**about, "size": [level.width, level.height]})
    theirs, ours = (medspeed.evaluate(each, data, app="pathology", quiet=True) for each in (to, fast))
    scores = {"FROC of these scans": "froc", "slide AUC of these scans": "slide_auc"}
    return {what: ([getattr(theirs, key)], [getattr(ours, key)]) for what, key in scores.items()}
