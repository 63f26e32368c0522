"""The ladder: from MONAI's baseline to fast one technique at a time, with quality beside time; then single changes.

Run: python benchmarks/ladder.py spleen|brats|pathology [--device cpu] [--seeds 1] [--epochs N] [--output FOLDER]

Each rung is a training in a process of its own, on the app's small synthetic data (or --data): crop, network, batch and
epochs are equal on all rungs of the climb. In each round (seed) the rungs run one after the other, so that neighbours
are neighbours in time, and a ratio is the median over the rounds. FOLDER gets ladder.json, ladder.md and the figures;
what cannot run here is listed with its reason. With 16 GiB of memory and two cores it takes 12 to 22 minutes.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from apps.brats.data import PHANTOM_CASES as HEADS
from benchmarks.ladder_figures import draw_ladder
from benchmarks.ladder_parts import datasets, loaders, steps
from benchmarks.ladder_rungs import ABSENT, RAM_DISK, Rung, beside, climb
from benchmarks.ladder_tables import markdown
from benchmarks.ranks import train as train_ranks
from common.config import config_to_yaml
from common.files import write_json, write_text
from common.observe.run import environment
from data_scripts.make_phantoms import make_ct_phantoms, make_mri_phantoms
from data_scripts.make_slides import make_slides

_ROOT = Path(__file__).resolve().parents[1]
# Of each rung of the climb, unless told: what the three ladders in benchmarks/records took, each below half an hour.
_EPOCHS = {"spleen": 10, "brats": 5, "pathology": 4}
_SHORT = 2  # epochs of a single change, of which the second is timed
_MAKERS = {
    "spleen": lambda folder: make_ct_phantoms(folder, 20, progress=False),
    "brats": lambda folder: make_mri_phantoms(folder, HEADS, progress=False),
    "pathology": lambda folder: make_slides(folder, 8, 2, progress=False),
}


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("app", choices=list(_MAKERS))
    parser.add_argument("--data", type=Path, help="folder of the dataset; by default small phantoms or slides")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=1, help="rounds; each has its seed")
    parser.add_argument("--epochs", type=int, help=f"of each rung of the climb; by default {_EPOCHS}")
    parser.add_argument("--output", type=Path, help="folder; by default runs/ladder-APP")
    return parser.parse_args(arguments)


def main() -> None:
    """Climb, and write what was found."""
    arguments = parse_options()
    output = arguments.output or Path("runs") / f"ladder-{arguments.app}"
    epochs = arguments.epochs or _EPOCHS[arguments.app]
    began = time.perf_counter()
    about = environment(torch.device(arguments.device))  # now: the files may change while it climbs
    with tempfile.TemporaryDirectory(prefix="ladder-") as made:
        folder = Path(made)
        data = arguments.data or _MAKERS[arguments.app](folder / "data")
        record = measure(arguments.app, data, arguments.device, arguments.seeds, epochs, folder)
    record["environment"] = about
    record["seconds in all"] = round(time.perf_counter() - began, 1)
    write_json(output / "ladder.json", record)
    write_text(output / "ladder.md", markdown(record) + "\n")
    draw_ladder(output, record)
    print(markdown(record), flush=True)
    print(f"{record['seconds in all']:.0f} s; {output / 'ladder.json'}", flush=True)


def measure(app: str, data: Path, kind: str, seeds: int, epochs: int, folder: Path) -> dict[str, Any]:
    """Run all rungs and parts; return their figures."""
    rungs = climb(app, kind, data, folder / "store")
    fast, cached = rungs[-1].config, next(rung.config for rung in rungs if "the guide" in rung.name)
    rounds: list[dict[str, Any]] = []
    with ExitStack() as stack:
        ram = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=RAM_DISK))) if RAM_DISK.is_dir() else None
        singles = beside(app, fast, ram)
        bar = stack.enter_context(tqdm(total=seeds * len(rungs) + len(singles) + 2, desc=f"ladder {app}", unit="rung"))
        for seed in range(seeds):
            own = [replace(rung, config=replace(rung.config, store=folder / f"store-{seed}")) for rung in rungs]
            rounds.append({rung.name: _run(app, rung, seed, epochs, folder, bar) for rung in own})
        before = _run(app, Rung("fast", fast), 0, _SHORT, folder, bar)
        changed = {rung.name: rung.why_not or _run(app, rung, 0, _SHORT, folder, bar) for rung in singles}
        after = _run(app, Rung("fast", fast), 0, _SHORT, folder, bar)
    return {
        "app": app,
        "epochs": epochs,
        "climb": [_climbed(rung.name, rounds, before) for rung, before in zip(rungs, [None, *rungs], strict=False)],
        "fast, short": after if "failed" in before else before,
        "fast, short, again": after,
        "beside": changed,
        "datasets": _part(lambda: datasets(app, rungs[0].config, fast)),
        "loaders": _part(lambda: loaders(app, cached, fast)),
        "networks and steps": _part(lambda: steps(app, fast)),
        "ranks, on the CPU": _part(lambda: _ranks(app, folder)),
        "absent": {name: why for name, (where, why) in ABSENT.items() if where in (kind, "any")},
    }


def _part(measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what is measured, or why it failed: a quarter of an hour of rungs must not be lost for it."""
    try:
        return measured()
    except (RuntimeError, ValueError, OSError, KeyError, subprocess.SubprocessError) as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def _run(app: str, rung: Rung, seed: int, epochs: int, folder: Path, bar: Any) -> dict[str, Any]:  # noqa: ANN401 - tqdm
    """Run a rung in a new process; one that fails says why."""
    config = replace(rung.config, seed=seed)
    write_text(folder / "config.yaml", config_to_yaml(config))
    output = folder / "rung.json"
    output.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.ladder_worker", app, str(folder / "config.yaml")]
    command += [str(epochs), "1" if epochs > _SHORT else str(_SHORT), str(output)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    bar.update()
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {"failed": lines[-1] if lines else f"status {done.returncode}"}
    found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return found


def _climbed(name: str, rounds: Sequence[dict[str, Any]], before: Rung | None) -> dict[str, Any]:
    """Return a rung's medians over the rounds, and its ratio to the rung before."""
    runs = [each[name] for each in rounds]
    failed = next((run["failed"] for run in runs if "failed" in run), None)
    if failed is not None:
        return {"rung": name, "failed": failed}
    numbers = [key for key, value in runs[0].items() if isinstance(value, int | float)]
    found = {"rung": name, **{key: round(statistics.median(run[key] for run in runs), 5) for key in numbers}}
    if before is not None:
        earlier = [each[before.name] for each in rounds]
        pairs = [a["s per step"] / b["s per step"] for a, b in zip(earlier, runs, strict=True) if "failed" not in a]
        found["times as fast as the rung before"] = round(statistics.median(pairs), 2) if pairs else None
    return found | {"curves": [run["curve"] for run in runs], "precision": runs[0]["precision"]}


def _ranks(app: str, folder: Path) -> dict[str, Any]:
    """Return the crops per second of 1, 2 and 4 ranks of one thread (brats; the others distribute by the same code)."""
    if app != "brats":
        return {"1, 2, 4 ranks": "see the ladder of brats: the code is the same"}
    data = make_mri_phantoms(folder / "ranked", 10, progress=False)
    found = {}
    for ranks in (1, 2, 4):
        epochs = train_ranks(ranks, 4, data, folder / "ranked-store", folder / f"ranked-{ranks}")
        found[f"{ranks} ranks"] = {"samples per s": epochs[-1]["samples_per_second"]}
    return found


if __name__ == "__main__":
    main()
