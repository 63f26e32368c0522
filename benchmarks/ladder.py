"""The ladder: from MONAI's baseline to fast one technique at a time, with quality beside time; then single changes.

Run: python benchmarks/ladder.py APP [--device cpu] [--seeds 1] [--epochs N] [--output FOLDER]

Each rung (benchmarks/rungs.yaml) is a training in a process of its own, on the app's small synthetic data (or --data):
crop, network, batch and epochs are equal on all rungs of the climb. In each round (seed) the rungs run one after the
other, so that neighbours are neighbours in time, and a ratio is the median over the rounds. FOLDER gets ladder.json,
ladder.md and the figures; what cannot run here is listed with its reason. With 16 GiB of memory and two cores it takes
12 to 22 minutes.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from tqdm import tqdm

from apps.opening import APPS, parse_flags
from benchmarks.harness import guide_of
from benchmarks.ladder_parts import climb_rung, datasets, in_a_process, loaders, steps
from benchmarks.ladder_report import draw_ladder, markdown
from common.config import flat, replaced
from common.files import write_json, write_text
from common.run import environment
from common.training.config import TrainingConfig

RAM_DISK = Path("/dev/shm")
RUNGS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("rungs.yaml").read_text(encoding="utf-8"))
_SHORT = 2  # epochs of a single change, of which the second is timed

Rungs = dict[str, TrainingConfig]
Figures = dict[str, Any]


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("app", choices=APPS)
    parser.add_argument("--data", type=Path, help="folder of the dataset; by default small phantoms or slides")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=1, help="rounds; each has its seed")
    parser.add_argument("--epochs", type=int, help="of each rung of the climb; by default those of rungs.yaml")
    parser.add_argument("--output", type=Path, help="folder; by default runs/ladder-APP")
    return parser.parse_args(arguments)


def main() -> None:
    """Climb, and write what was found."""
    arguments = parse_options()
    app, output = arguments.app, arguments.output or Path("runs") / f"ladder-{arguments.app}"
    began = time.perf_counter()
    about = environment(torch.device(arguments.device))  # now: the files may change while it climbs
    with tempfile.TemporaryDirectory(prefix="ladder-") as made:
        folder = Path(made)
        data = arguments.data or guide_of(app).make_data(folder / "data", small=True)
        epochs = arguments.epochs or RUNGS[app]["epochs"]
        record = measure(app, data, arguments.device, arguments.seeds, epochs, folder)
    record |= {"environment": about, "seconds in all": round(time.perf_counter() - began, 1)}
    write_json(output / "ladder.json", record)
    write_text(output / "ladder.md", markdown(record) + "\n")
    draw_ladder(output, record)
    print(f"{markdown(record)}\n{record['seconds in all']:.0f} s; {output / 'ladder.json'}", flush=True)


def measure(app: str, data: Path, kind: str, seeds: int, epochs: int, folder: Path) -> Figures:
    """Run all rungs and parts; return their figures.

    Args:
        app: name of the app.
        data: folder of its data.
        kind: of device.
        seeds: rounds of the climb.
        epochs: of each of its rungs.
        folder: for the stores.
    """
    rungs = climb(app, kind, data, folder / "store")
    baseline, *_, fast = rungs.values()
    cached = next(config for name, config in rungs.items() if "the guide" in name)
    rounds: list[dict[str, Figures]] = []
    with ExitStack() as stack:
        ram = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=RAM_DISK))) if RAM_DISK.is_dir() else None
        singles = beside(app, fast, ram)
        bar = stack.enter_context(tqdm(total=seeds * len(rungs) + len(singles) + 2, desc=f"ladder {app}", unit="rung"))

        def run(config: TrainingConfig, epochs: int = _SHORT, every: int = _SHORT) -> Figures:
            bar.update()
            return attempt(partial(in_a_process, climb_rung, config, epochs, every))

        for seed in range(seeds):
            own = {name: replace(config, seed=seed, store=folder / f"store-{seed}") for name, config in rungs.items()}
            rounds.append({name: run(config, epochs, 1) for name, config in own.items()})
        before = run(fast)
        changed = {name: found if isinstance(found, str) else run(found) for name, found in singles.items()}
        after = run(fast)
    return {
        "app": app,
        "epochs": epochs,
        "climb": [climbed(name, rounds, earlier) for name, earlier in zip(rungs, [None, *rungs], strict=False)],
        "fast, short": after if "failed" in before else before,
        "fast, short, again": after,
        "beside": changed,
        "datasets": attempt(lambda: datasets(baseline, fast)),
        "loaders": attempt(lambda: loaders(cached, fast)),
        "networks and steps": attempt(lambda: steps(fast)),
        "absent": (RUNGS["all"]["absent on a cpu"] if kind == "cpu" else {}) | RUNGS["all"]["absent"],
    }


def climb(app: str, kind: str, data: Path, store: Path) -> Rungs:
    """Return the rungs from the baseline to fast, each with all techniques of those below it."""
    recipe = parse_flags(app, ["--recipe", "baseline"])
    own: dict[str, Any] = RUNGS[app]
    base = {"data": data, "store": store, "engine": "none", "device": kind, **_tuples(own.get(kind, {}))}
    workers = min(recipe.workers or 1, len(os.sched_getaffinity(0)))
    config = replaced(recipe, {**base, "workers": workers, "validate_every": None})
    rungs = {"baseline: Dataset, DataLoader, plain optimizer and loss, fp32": config}
    for name, changes in own["climb"].items():
        rungs[name] = config = replaced(config, _tuples(changes))
    equal = {name: value for name, value in flat(config).items() if name in RUNGS["all"]["equal"]}
    fast = replaced(parse_flags(app, ["--recipe", "fast"]), {**base, **equal})
    return {**rungs, "fast's augmentation and schedule: fast": fast}  # label smoothing, too


def beside(app: str, fast: TrainingConfig, ram: Path | None) -> dict[str, TrainingConfig | str]:
    """Return single changes of fast, or why one cannot run; `ram` is a folder in a RAM disk, if there is one."""
    special: dict[str, Callable[[Any], Any]] = {
        "twice": lambda value: 2 * (value or 1),
        "other": lambda value: not value,
        "ram": lambda value: ram,
    }
    rungs: dict[str, TrainingConfig | str] = {}
    for rung, changes in {**RUNGS["all"]["beside"], **RUNGS[app]["beside"]}.items():
        if "ram" in changes.values() and ram is None:
            rungs[rung] = f"there is no {RAM_DISK}"
            continue
        given = {name: special[value](flat(fast)[name]) for name, value in changes.items() if str(value) in special}
        rungs[rung] = replaced(fast, _tuples({**changes, **given}))
    return rungs


def _tuples(changes: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()}


def attempt(measured: Callable[[], Figures]) -> Figures:
    """Return what is measured, or why it failed: a quarter of an hour of rungs must not be lost for it."""
    try:
        return measured()
    except (RuntimeError, ValueError, OSError, LookupError, ArithmeticError) as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def climbed(name: str, rounds: Sequence[dict[str, Figures]], before: str | None) -> Figures:
    """Return a rung's medians over the rounds, and its ratio to the rung before."""
    runs = [each[name] for each in rounds]
    failed = next((run["failed"] for run in runs if "failed" in run), None)
    if failed is not None:
        return {"rung": name, "failed": failed}
    numbers = [key for key, value in runs[0].items() if isinstance(value, int | float)]
    found = {"rung": name, **{key: round(statistics.median(run[key] for run in runs), 5) for key in numbers}}
    if before is not None:
        earlier = [each[before] for each in rounds]
        pairs = [a["s per step"] / b["s per step"] for a, b in zip(earlier, runs, strict=True) if "failed" not in a]
        found["times as fast as the rung before"] = round(statistics.median(pairs), 2) if pairs else None
    return found | {"curves": [run["curve"] for run in runs], "precision": runs[0]["precision"]}


if __name__ == "__main__":
    main()
