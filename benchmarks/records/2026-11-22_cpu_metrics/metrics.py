"""Time metrics of label maps from files to figures: those of MONAI, case by case, and of `evaluate`, in turn.

Run: python benchmarks/records/2026-11-22_cpu_metrics/metrics.py --references FOLDER [--rounds 3]

The predictions are the first 20 references, with every voxel three further along x.
"""

from pathlib import Path

from medspeed.common.flags import Parser

PARSER = Parser(description=__doc__)
PARSER.add_argument("--references", type=Path, required=True, help="label maps (.nii.gz), best of MSD's size")
PARSER.add_argument("--rounds", type=int, default=3, help="times each side runs")
if __name__ == "__main__":
    PARSER.parse_args()  # before torch is loaded: --help answers at once

import statistics
import tempfile
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from monai import metrics
from monai.transforms import LoadImage

from medspeed.benchmarks.harness import median
from medspeed.common.clock import seconds_of
from medspeed.common.data.label_files import write_label
from medspeed.common.data.volumes import read_volume
from medspeed.common.inference.evaluation import evaluate_files


def main() -> None:
    """Time both sides, and print their seconds and the median ratio."""
    given, pairs = PARSER.parse_args(), {}
    with tempfile.TemporaryDirectory(prefix="metrics-") as folder:
        for file in sorted(given.references.glob("*.gz"))[:20]:
            volume, pairs[file.name] = read_volume(file), (Path(folder, file.name), file)
            write_label(Path(folder, file.name), np.roll(volume.voxels.astype(np.uint8), 3, 0), volume.affine)
        sides: dict[str, Callable[[], object]] = {"MONAI": lambda: [*map(of_monai, pairs.values())]}
        sides["evaluate"] = partial(evaluate_files, pairs, {"1": (1,)}, 2.0)
        rounds = [{side: seconds_of(run) for side, run in sides.items()} for _ in range(given.rounds + 1)]
        seconds = {side: [each[side] for each in rounds[1:]] for side in sides}  # after a warm-up
    print(*(f"{side}: {median(each)} s for {len(pairs)} pairs" for side, each in seconds.items()), sep="\n")
    ratio = statistics.median(a / b for a, b in zip(seconds["MONAI"], seconds["evaluate"], strict=True))
    print(f"ratio: {ratio:.2f}, the median of {given.rounds} rounds")


def of_monai(files: tuple[Path, Path]) -> list[float]:
    """Return Dice, NSD at 2 mm, HD95 and ASSD of label 1."""
    volumes = [LoadImage(image_only=True)(file) for file in files]
    pair, spacing = [torch.stack([each != 1, each == 1])[None].float() for each in volumes], volumes[1].pixdim.tolist()
    found = (
        metrics.compute_dice(*pair, include_background=False),
        metrics.compute_surface_dice(*pair, [2.0], spacing=spacing),
        metrics.compute_hausdorff_distance(*pair, percentile=95, spacing=spacing),
        metrics.compute_average_surface_distance(*pair, symmetric=True, spacing=spacing),
    )
    return [each.item() for each in found]


if __name__ == "__main__":
    main()
