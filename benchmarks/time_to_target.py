"""Time to target: whole runs from nothing until a quality is held, over several seeds, each judged anew from its files.

Run: python benchmarks/time_to_target.py --app APP --until dice=0.90 --data FOLDER [--seeds 5] [-- FLAGS]

Each seed is a process of its own with an empty store: preparation, training until three validations in a row have
reached the target, export. What it claims is then checked by other code: the saved weights segment the validation cases
from file to file and numpy counts the voxels (pathology: the exported network in ONNX Runtime scores the validation
patches, and their ranks give the AUC). The run's own clock is checked against this process's.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from scipy.stats import mannwhitneyu

from apps.pathology.config import PathologyConfig
from apps.pathology.patch_store import stored_patches
from apps.pathology.tables import find_tables
from benchmarks.file_to_file import LOAD
from benchmarks.masks import dice, read_mask
from common.config import config_from_yaml
from common.data.cases import read_dataset
from common.data.slide_pool import SlidePool
from common.files import write_json
from common.observe.run import Run, environment
from common.observe.timing import Clock
from common.training.distributed import SINGLE

_ROOT = Path(__file__).resolve().parents[1]


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--app", required=True, choices=list(JUDGES))
    parser.add_argument("--until", required=True, help="METRIC=VALUE")
    parser.add_argument("--data", type=Path, required=True, help="folder of the dataset")
    parser.add_argument("--seeds", type=int, default=5, help="runs, of the seeds 0, 1, ...")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    parser.add_argument("flags", nargs="*", help="flags of train.py, after --")
    return parser.parse_args(arguments)


def main() -> None:
    """Run the seeds, print a line for each and the median, and write all of it as JSON."""
    arguments = parse_options()
    record: dict[str, Any] = {
        "app": arguments.app,
        "until": arguments.until,
        "flags": arguments.flags,
        "environment": environment(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
    }
    given = ["--until", arguments.until, "--data", str(arguments.data.resolve()), *arguments.flags]
    runs: list[dict[str, Any]] = []
    for seed in range(arguments.seeds):
        with tempfile.TemporaryDirectory(prefix="target-") as folder:
            runs.append(one_run(arguments.app, [*given, "--seed", str(seed)], Path(folder)))
        print(f"seed {seed}: " + ", ".join(f"{name} {value}" for name, value in runs[-1].items()), flush=True)
        record |= {**summary_of(runs), "runs": runs}
        if arguments.output is not None:
            write_json(arguments.output, record)
    for name in ("reached", "held when judged anew", "cold seconds, median", "cold seconds, interval"):
        print(f"{name}: {record[name]}", flush=True)


def one_run(app: str, given: list[str], folder: Path) -> dict[str, Any]:
    """Train in a new process with an empty store; return what it claims, and what other code finds."""
    run = folder / "run"
    command = [sys.executable, f"apps/{app}/train.py", *given, "--run", str(run), "--store", str(folder / "store")]
    began = time.perf_counter()
    _call(command)
    wall = time.perf_counter() - began
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    value = float(summary["target"]["until"].partition("=")[2])
    judged = JUDGES[app](run)
    return {
        "held": summary["target"]["held"],
        "seconds to target": round(summary["target"]["seconds"], 2),
        "seconds in all": summary["seconds"]["total"],
        "seconds by this clock": round(wall, 2),
        "steps": summary["steps"],
        "validation, best weights": round(summary["working_grid"]["best"], 4),
        "judged anew": round(judged, 4),
        "holds": judged >= value,
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


def _call(command: list[str]) -> None:
    done = subprocess.run(command, cwd=_ROOT, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr[-2000:]}")


def judge_segmentation(app: str, run: Path) -> float:
    """Return the mean Dice of the validation cases on their own grids, from files that `infer.py` writes."""
    split = json.loads((run / "split.json").read_text(encoding="utf-8"))
    regions = LOAD[app](run).labelling.regions
    folder = Path(json.loads((run / "summary.json").read_text(encoding="utf-8"))["data"]["folder"])
    cases = {case.name: case for case in read_dataset(folder.resolve(), gaps=True).cases}
    with tempfile.TemporaryDirectory(prefix="judged-") as made:
        images, labels = Path(made) / "images", Path(made) / "labels"
        images.mkdir()
        for name in split["validation"]:
            (images / cases[name].image.name).symlink_to(cases[name].image)
        flags = ["--model", str(run), "--input", str(images), "--output", str(labels), "--overlays", "false"]
        _call([sys.executable, f"apps/{app}/infer.py", *flags])
        found = []
        for name in split["validation"]:
            label = cases[name].label
            assert label is not None
            pair = (labels / cases[name].image.name, label)
            masks = [[read_mask(path, region.members) for path in pair] for region in regions]
            found.append(float(np.mean([dice(*both) for both in masks if any(mask.any() for mask in both)] or [1.0])))
    return float(np.mean(found))


def judge_pathology(run: Path) -> float:
    """Return the AUC of the validation patches, drawn again, by the exported network in ONNX Runtime."""
    config = config_from_yaml(PathologyConfig, run / "config.yaml")
    here = Run(run, torch.device("cpu"), Clock(), resumed=False, leader=False)
    with closing(SlidePool(reader=config.reader)) as pool:
        table = find_tables(config, here, SINGLE, pool).validation
        patches = stored_patches(table, run.parent / "judged", pool, None, progress=False)
    session = onnxruntime.InferenceSession(run / "exports" / "model_fp32.onnx")
    name = session.get_inputs()[0].name
    scores = np.array([session.run(None, {name: _image(pixels)})[0].item() for pixels in patches.pixels])
    tumour = patches.label.astype(bool)
    above = mannwhitneyu(scores[tumour], scores[~tumour]).statistic
    return float(above / (tumour.sum() * (~tumour).sum()))


def _image(pixels: np.ndarray) -> np.ndarray:
    """Return a patch [3, S, S] uint8 as the network takes it, [1, 3, S, S] float32 in [-1, 1]."""
    image: np.ndarray = pixels[None].astype(np.float32) / 127.5 - 1
    return image


JUDGES: dict[str, Callable[[Path], float]] = {
    "spleen": lambda run: judge_segmentation("spleen", run),
    "brats": lambda run: judge_segmentation("brats", run),
    "pathology": judge_pathology,
}


if __name__ == "__main__":
    main()
