"""The ladder: from MONAI's baseline to fast one technique at a time, with quality beside time; then single changes.

Run: python benchmarks/ladder.py APP [--device cpu] [--seeds 1] [--epochs N] [--output FOLDER]

Each rung (benchmarks/rungs.yaml) is a training in a process of its own, on the app's small synthetic data (or --data):
crop, network, batch and epochs are equal on all rungs of the climb. In each round (seed) the rungs run one after the
other, so that neighbours are neighbours in time, and a ratio is the median over the rounds. FOLDER gets ladder.json
(with each rung's curve of quality against time) and ladder.md; what cannot run here is listed with its reason. With
16 GiB of memory and two cores it takes 12 to 22 minutes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from medspeed.common.flags import Parser

RUNGS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("rungs.yaml").read_text(encoding="utf-8"))

PARSER = Parser(description=__doc__)
PARSER.add_argument("app", choices=[each for each in RUNGS if each != "all"], help="app with a section in rungs.yaml")
PARSER.add_argument("--data", type=Path, help="dataset folder; small phantoms or slides by default")
PARSER.add_argument("--device", choices=("cpu", "cuda"), help="the GPU by default if there is one")
PARSER.add_argument("--seeds", type=int, default=1, help="number of rounds, each with its own seed")
PARSER.add_argument("--epochs", type=int, help="epochs of each rung; those of rungs.yaml by default")
PARSER.add_argument("--output", type=Path, help="folder for the results; runs/ladder-APP by default")
if __name__ == "__main__":
    PARSER.parse_args()  # before torch is loaded: --help answers at once

import os
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from tqdm import tqdm

from medspeed.apps import parse_flags
from medspeed.benchmarks.harness import Figures, attempt, in_a_process, make_data, trained
from medspeed.common.config import flat, replaced
from medspeed.common.files import write_json, write_text
from medspeed.common.run import environment, one_line_errors
from medspeed.common.training.config import TrainingConfig

RAM_DISK = Path("/dev/shm")
_SHORT = 2  # epochs of a single change, of which the second is timed
_BEFORE, _FIRST, _MEMORY = "to the rung before", "to the first", "peak memory, MiB"


@one_line_errors()
def main() -> None:
    """Climb, and write what was found."""
    given = PARSER.parse_args()
    if given.seeds < 1:
        PARSER.error(f"--seeds {given.seeds}: must be at least 1")
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    app, output = given.app, given.output or Path("runs") / f"ladder-{given.app}"
    began = time.perf_counter()
    about = environment(torch.device(device))  # now: the files may change while it climbs
    with tempfile.TemporaryDirectory(prefix="ladder-") as made:
        folder = Path(made)
        data = given.data or make_data(app, "small", folder / "data")
        record = measure(app, data, device, given.seeds, given.epochs or RUNGS[app]["epochs"], folder)
    record |= {"environment": about, "seconds in all": round(time.perf_counter() - began, 1)}
    write_json(output / "ladder.json", record)
    write_text(output / "ladder.md", markdown(record) + "\n")
    print(f"{markdown(record)}\n{record['seconds in all']:.0f} s; {output / 'ladder.json'}", flush=True)


def measure(app: str, data: Path, kind: str, seeds: int, epochs: int, folder: Path) -> Figures:
    """Run all rungs (`seeds` times so many epochs) and single changes on a kind of device; return their figures."""
    rungs = climb(app, kind, data, folder / "store")
    *_, fast = rungs.values()

    def run(config: TrainingConfig | str, **changes: object) -> Figures | str:
        if isinstance(config, str):
            return config
        return attempt(partial(in_a_process, trained, replace(config, **changes)))  # type: ignore[arg-type]

    rounds: list[Figures] = []
    for seed in range(seeds):
        own: dict[str, Any] = {"seed": seed, "store": folder / f"store-{seed}", "epochs": epochs, "validate_every": 1}
        each_rung = tqdm(rungs.items(), f"ladder {app}, seed {seed}", unit="rung")
        rounds.append({name: run(each, **own) for name, each in each_rung})
    with tempfile.TemporaryDirectory(dir=RAM_DISK if RAM_DISK.is_dir() else None) as ram:
        singles = {"fast itself": fast, **beside(app, fast, Path(ram)), "fast again": fast}
        each_single = tqdm(singles.items(), f"ladder {app}, single changes", unit="rung")
        changed = {name: run(each, epochs=_SHORT, validate_every=_SHORT) for name, each in each_single}
    return {
        "app": app,
        "epochs": epochs,
        "metric": fast.METRIC,
        "climb": climbed(rounds),
        "beside": climbed([changed]),
        "absent": (RUNGS["all"]["absent on a cpu"] if kind == "cpu" else {}) | RUNGS["all"]["absent"],
    }


def climb(app: str, kind: str, data: Path, store: Path) -> dict[str, TrainingConfig]:
    """Return the rungs from the baseline to fast, each with all techniques of those below it."""
    recipe = parse_flags(app, ["--recipe", "baseline"])
    own: dict[str, Any] = RUNGS[app]
    base = {"data": data, "store": store, "engine": "none", "device": kind, **own.get(kind, {})}
    workers = min(recipe.workers or 1, len(os.sched_getaffinity(0)))
    config = replaced(recipe, {**base, "workers": workers, "validate_every": None})
    rungs = {"baseline: Dataset, DataLoader, plain optimizer and loss, fp32": config}
    for name, changes in own["climb"].items():
        rungs[name] = config = replaced(config, changes)
    equal = {name: value for name, value in flat(config).items() if name in RUNGS["all"]["equal"]}
    fast = replaced(parse_flags(app, ["--recipe", "fast"]), {**base, **equal})
    return {**rungs, "what else is fast's (optimizer, learning rate, schedule, augmentation): fast": fast}


def beside(app: str, fast: TrainingConfig, ram: Path) -> dict[str, TrainingConfig | str]:
    """Return single changes of fast, or why one cannot run; `ram` is a folder in a RAM disk, if there is one."""
    disk = replace(fast, store=ram) if RAM_DISK.is_dir() else f"there is no {RAM_DISK}"
    changes = {**RUNGS["all"]["beside"], **RUNGS[app]["beside"]}
    rungs = {rung: replaced(fast, each) for rung, each in changes.items()}
    return {"the store in a RAM disk (--store /dev/shm)": disk, **rungs}


def climbed(rounds: Sequence[Figures]) -> Figures:
    """Return each rung's medians over the rounds and its ratios to others, of the same round; or why it has none."""
    found: Figures = {}
    for before, name in pairwise(["", *rounds[0]]):
        runs: list[Any] = [each[name] for each in rounds]
        found[name] = next((run for run in runs if isinstance(run, str)), None)
        if found[name] is None:
            numbers = [key for key, each in runs[0].items() if isinstance(each, int | float)]
            found[name] = {key: round(statistics.median(run[key] for run in runs), 5) for key in numbers}
            found[name] |= {_BEFORE: _times(rounds, before, name), _FIRST: _times(rounds, next(iter(rounds[0])), name)}
            found[name] |= {"curves": [run["curve"] for run in runs], "precision": runs[0]["precision"]}
    return found


def _times(rounds: Sequence[Figures], before: str, name: str) -> str:
    """Return how many times as fast one is as another, by samples, since some make the batch larger."""
    pairs = [(each[name]["samples per s"], each[before]) for each in rounds if isinstance(each.get(before), dict)]
    return f"{statistics.median(one / other['samples per s'] for one, other in pairs):.2f}x" if pairs else ""


def markdown(record: Figures) -> str:
    """Return all tables of a ladder, most important first."""
    costs = ("waited, percent", "prepare and cache, s", "first epoch, s", record["metric"], _MEMORY)
    parts = {
        f"The climb ({record['app']}, {record['epochs']} epochs)": ("climb", "s per step", _BEFORE, _FIRST, *costs),
        "Single changes of fast (an epoch each, not repeated: differences of a few percent are noise)": (
            "beside", "s per step", _FIRST, "s per validation", "compile, s", _MEMORY,
        ),
        "Not here": ("absent", "why not"),
    }  # fmt: skip
    return "\n\n".join(f"## {title}\n\n{_table(record[part], names)}" for title, (part, *names) in parts.items())


def _table(part: Figures, names: Sequence[str]) -> str:
    """Return named columns of named rows, or of the reason why one is not there, as a Markdown table."""
    lines = [["", *names], ["---"] * (len(names) + 1)]
    for name, found in part.items():
        cells = {names[0]: found} if isinstance(found, str) else found
        lines.append([name, *(_cell(cells.get(each, "")) for each in names)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else str(value)


if __name__ == "__main__":
    main()
