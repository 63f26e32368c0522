"""Time to target: whole runs from nothing until a quality is held, over several seeds, each judged anew from its files.

Run: python benchmarks/time_to_target.py --app APP --until dice=0.90 --data FOLDER [--seeds 5] [--warm] [-- FLAGS]

Each seed is a process of its own with an empty store: preparation, training until three validations in a row have
reached the target, export. With --warm it runs once more, the store and the system's caches filled. What it claims is
then checked by other code: the saved weights segment the validation cases from file to file and numpy counts the voxels
(pathology: the exported network in ONNX Runtime scores the validation patches, and their ranks give the AUC). The run's
own clock is checked against this process's.
"""

from collections.abc import Callable
from pathlib import Path

from medspeed.benchmarks import GUIDES
from medspeed.common.flags import Parser

PARSER = Parser(description=__doc__)
PARSER.add_argument("--app", required=True, choices=GUIDES, help="app to train")
PARSER.add_argument("--until", required=True, help="target, such as dice=0.90 or auc=0.95")
PARSER.add_argument("--data", type=Path, required=True, help="dataset folder")
PARSER.add_argument("--seeds", type=int, default=5, help="number of runs, with seeds 0, 1, ...")
PARSER.add_argument("--warm", action="store_true", help="run each seed a second time with filled caches")
PARSER.add_argument("--output", type=Path, help="JSON file for the results")
PARSER.add_argument("flags", nargs="*", help="flags of train.py, after --")
PARSER.answer(__name__)

import statistics
import tempfile
import time
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime
import torch
from scipy.stats import mannwhitneyu

from medspeed.apps.pathology.config import PathologyConfig
from medspeed.apps.pathology.patches.store import decoded
from medspeed.apps.pathology.patches.tables import find_tables
from medspeed.benchmarks.harness import call, tell
from medspeed.benchmarks.volumes import dices
from medspeed.common.clock import Clock
from medspeed.common.data.dataset import read_dataset
from medspeed.common.files import from_json, read_object, write_json
from medspeed.common.inference.model import load_model
from medspeed.common.ranks import Ranks
from medspeed.common.run import Run, environment
from medspeed.models.segresnet3d import segresnet3d
from medspeed.models.unet3d import unet3d


def main() -> None:
    """Run the seeds, print a line for each and the median, and write all of it as JSON."""
    given = PARSER.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record = {"app": given.app, "until": given.until, "flags": given.flags, "environment": environment(device)}
    flags = ["--until", given.until, "--data", str(given.data.resolve()), *given.flags]
    runs: list[dict[str, Any]] = []
    warm: list[dict[str, Any]] = []
    for seed in range(given.seeds):
        with tempfile.TemporaryDirectory(prefix="target-") as folder:
            for name, done in [("cold", runs), ("warm", warm)][: 1 + given.warm]:
                done.append(one_run(given.app, [*flags, "--seed", str(seed)], Path(folder), name))
                print(
                    f"seed {seed}, {name}: " + ", ".join(f"{key} {value}" for key, value in done[-1].items()),
                    flush=True,
                )
                if given.output is not None:
                    write_json(given.output, record | summary_of(runs) | {"runs": runs, "warm": warm})
    tell(summary_of(runs), None)


def one_run(app: str, given: list[str], folder: Path, name: str) -> dict[str, Any]:
    """Train in a new process, in a folder with a store; return what it claims, and what other code finds."""
    run = folder / name
    began = time.perf_counter()
    call(f"apps/{app}/train.py", *given, "--run", run, "--store", folder / "store")
    wall = time.perf_counter() - began
    summary = read_object(run / "summary.json")
    metric, _, value = summary["target"]["until"].partition("=")
    judged = JUDGES[metric.strip().lower()](app, run)
    return {
        "held": summary["target"]["held"],
        "seconds to target": round(summary["target"]["seconds"], 2),
        "seconds in all": summary["seconds"]["total"],
        "seconds by this clock": round(wall, 2),
        "steps": summary["steps"],
        "validation, best weights": round(summary["working_grid"]["best"], 4),
        "judged anew": round(judged, 4),
        "holds": judged >= float(value),
    }


def summary_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many runs reached the target, and their median time from nothing to it, with the least and most.

    A run that did not reach it has no time; then neither has the median more than those that did.
    """
    seconds = sorted(run["seconds to target"] for run in runs if run["held"])
    return {
        "reached": f"{len(seconds)} of {len(runs)}",
        "held when judged anew": f"{sum(run['held'] and run['holds'] for run in runs)} of {len(runs)}",
        "cold seconds, median": statistics.median(seconds) if seconds else None,
        "cold seconds, interval": [seconds[0], seconds[-1]] if seconds else None,
    }


def judge_segmentation(app: str, run: Path) -> float:
    """Return the mean Dice of the validation cases on their own grids, from files that `infer.py` writes."""
    regions = [region.members for region in load_model(run, app, unet3d, segresnet3d).labelling.regions]
    data = read_dataset(Path(read_object(run / "summary.json")["data"]["folder"]).resolve())
    cases = [case for case in data.cases if case.name in read_object(run / "split.json")["validation"]]
    found = []
    with tempfile.TemporaryDirectory(prefix="judged-") as made:
        images, masks = Path(made) / "images", Path(made) / "masks"
        images.mkdir()
        for case in cases:
            (images / case.image.name).symlink_to(case.image)
        call(f"apps/{app}/infer.py", "--model", run, "--input", images, "--output", masks, "--no-overlays")
        for case in cases:
            assert case.label is not None
            each = dices([masks / case.image.name], [case.label], regions)
            found.append(np.nanmean(each) if np.isfinite(each).any() else 1.0)
    return float(np.mean(found))


def judge_patches(app: str, run: Path) -> float:
    """Return the AUC of the validation patches, drawn again, by the exported network in ONNX Runtime."""
    config = from_json(PathologyConfig, read_object(run / "plan.json"))
    here = Run(run, torch.device("cpu"), Clock(), resumed=False, ranks=Ranks(rank=1))
    patches = decoded(find_tables(config, here).validation, replace(config, store=run.parent / "judged"), here)
    session = onnxruntime.InferenceSession(run / "exports" / "model_fp32.onnx")
    name = session.get_inputs()[0].name
    images = (pixels[None].astype(np.float32) / 127.5 - 1 for pixels in patches.pixels)  # [1, 3, S, S] in [-1, 1]
    scores = np.array([session.run(None, {name: image})[0].item() for image in images])
    tumour = patches.table.label.astype(bool)
    above = mannwhitneyu(scores[tumour], scores[~tumour]).statistic
    return float(above / (tumour.sum() * (~tumour).sum()))


JUDGES: dict[str, Callable[[str, Path], float]] = {"dice": judge_segmentation, "auc": judge_patches}


if __name__ == "__main__":
    main()
