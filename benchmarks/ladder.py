"""The ladder: from MONAI's baseline to fast one technique at a time, with quality beside time; then single changes.

Run: python benchmarks/ladder.py APP [--device cpu] [--seeds 1] [--epochs N] [--output FOLDER]

Each rung (benchmarks/rungs.yaml) is a training in a process of its own, on the app's small synthetic data (or --data):
crop, network, batch and epochs are equal on all rungs of the climb. In each round (seed) the rungs run one after the
other, so that neighbours are neighbours in time, and a ratio is the median over the rounds. FOLDER gets ladder.json,
ladder.md and time.png; what cannot run here is listed with its reason. With 16 GiB of memory and two cores it takes
12 to 22 minutes.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from medspeed.apps import APPS
from medspeed.benchmarks import GUIDES
from medspeed.common.flags import Parser

RUNGS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("rungs.yaml").read_text(encoding="utf-8"))

PARSER = Parser(description=__doc__)
PARSER.add_argument("app", choices=APPS)
PARSER.add_argument("--data", type=Path, help="dataset folder; small phantoms or slides by default")
PARSER.add_argument("--device", choices=("cpu", "cuda"), help="the GPU by default if there is one")
PARSER.add_argument("--seeds", type=int, default=1, help="number of rounds, each with its own seed")
PARSER.add_argument("--epochs", type=int, help="epochs of each rung; those of rungs.yaml by default")
PARSER.add_argument("--output", type=Path, help="folder for the results; runs/ladder-APP by default")
PARSER.answer(__name__)

import math
import os
import re
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from medspeed.apps.opening import parse_flags
from medspeed.benchmarks.harness import guide_of
from medspeed.benchmarks.ladder_parts import Figures, climb_rung, datasets, in_a_process, loaders, steps
from medspeed.common.config import flat, replaced
from medspeed.common.files import write_json, write_text
from medspeed.common.observe.plots import save_png
from medspeed.common.run import environment
from medspeed.common.training.config import TrainingConfig

RAM_DISK = Path("/dev/shm")
_SHORT = 2  # epochs of a single change, of which the second is timed
_TARGET = 0.9  # of the quality that fast has in the end: what "seconds to" counts to
_BEFORE = "times as fast as the rung before"
_COLOURS = {"baseline": "#D55E00", "the guide": "#0072B2", "fast": "#009E73"}  # of the recipes' rungs, by their names


def parse_options(arguments: Sequence[str] | None = None) -> Namespace:
    """Parse the command line, and refuse an app that has no ladder."""
    given = PARSER.parse_args(arguments)
    if given.app not in RUNGS or (given.data is None and given.app not in GUIDES):
        needed = f"a section {given.app} in benchmarks/rungs.yaml, and benchmarks/guides/{given.app}.py or --data"
        PARSER.error(f"{given.app} has no ladder: it needs {needed} (see CONTRIBUTING.md)")
    return given


def main() -> None:
    """Climb, and write what was found."""
    arguments = parse_options()
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    app, output = arguments.app, arguments.output or Path("runs") / f"ladder-{arguments.app}"
    began = time.perf_counter()
    about = environment(torch.device(device))  # now: the files may change while it climbs
    with tempfile.TemporaryDirectory(prefix="ladder-") as made:
        folder = Path(made)
        data = arguments.data or guide_of(app).make_data(folder / "data", small=True)
        epochs = arguments.epochs or RUNGS[app]["epochs"]
        record = measure(app, data, device, arguments.seeds, epochs, folder)
    record |= {"environment": about, "seconds in all": round(time.perf_counter() - began, 1)}
    write_json(output / "ladder.json", record)
    write_text(output / "ladder.md", markdown(record) + "\n")
    draw_ladder(output / "time.png", record)
    print(f"{markdown(record)}\n{record['seconds in all']:.0f} s; {output / 'ladder.json'}", flush=True)


def measure(app: str, data: Path, kind: str, seeds: int, epochs: int, folder: Path) -> Figures:
    """Run all rungs (`seeds` times so many epochs) and parts on a kind of device; return their figures."""
    rungs = climb(app, kind, data, folder / "store")
    baseline, *_, fast = rungs.values()
    cached = next((config for name, config in rungs.items() if "the guide" in name), baseline)
    rounds: list[dict[str, Figures | str]] = []
    with ExitStack() as stack:
        ram = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=RAM_DISK))) if RAM_DISK.is_dir() else None
        singles = beside(app, fast, ram)
        bar = stack.enter_context(tqdm(total=seeds * len(rungs) + len(singles) + 2, desc=f"ladder {app}", unit="rung"))

        def run(config: TrainingConfig, epochs: int = _SHORT, every: int = _SHORT) -> Figures | str:
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
        "climb": {name: climbed(name, rounds, earlier) for name, earlier in zip(rungs, [None, *rungs], strict=False)},
        "fast, short": after if isinstance(before, str) else before,
        "fast, short, again": after,
        "beside": changed,
        "datasets": attempt(lambda: datasets(baseline, fast)),
        "loaders": attempt(lambda: loaders(cached, fast)),
        "networks and steps": attempt(lambda: steps(fast)),
        "absent": (RUNGS["all"]["absent on a cpu"] if kind == "cpu" else {}) | RUNGS["all"]["absent"],
    }


def climb(app: str, kind: str, data: Path, store: Path) -> dict[str, TrainingConfig]:
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


def attempt(measured: Callable[[], Figures]) -> Figures | str:
    """Return what is measured, or why it failed: a quarter of an hour of rungs must not be lost for it."""
    try:
        return measured()
    except (RuntimeError, ValueError, OSError, LookupError, ArithmeticError) as error:
        return f"failed: {type(error).__name__}: {error}"


def climbed(name: str, rounds: Sequence[dict[str, Figures | str]], before: str | None) -> Figures | str:
    """Return a rung's medians over the rounds, and its ratio to the rung before; or why it has none."""
    runs: list[Any] = [each[name] for each in rounds]
    if failed := [run for run in runs if isinstance(run, str)]:
        return str(failed[0])
    numbers = [key for key, value in runs[0].items() if isinstance(value, int | float)]
    found = {key: round(statistics.median(run[key] for run in runs), 5) for key in numbers}
    if before is not None:
        earlier = [each[before] for each in rounds]
        pairs = [a["s per step"] / b["s per step"] for a, b in zip(earlier, runs, strict=True) if isinstance(a, dict)]
        found[_BEFORE] = round(statistics.median(pairs), 2) if pairs else None
    return found | {"curves": [run["curve"] for run in runs], "precision": runs[0]["precision"]}


def markdown(record: Figures) -> str:
    """Return all tables of a ladder, most important first."""
    beside = {"fast itself": record["fast, short"], **record["beside"], "fast again": record["fast, short, again"]}
    parts = {
        f"The climb ({record['app']}, {record['epochs']} epochs)": _climb(record["climb"]),
        "Single changes of fast (an epoch each, not repeated: differences of a few percent are noise)": {
            name: _beside(found, record["fast, short"]) for name, found in beside.items()
        },
        **{title.capitalize(): record[title] for title in ("datasets", "loaders", "networks and steps")},
    }
    tables = [f"## {title}\n\n{_table(part)}" for title, part in parts.items()]
    return "\n\n".join([*tables, f"## Not here\n\n{_table(record['absent'])}"])


def _climb(rungs: Figures) -> Figures:
    """Return what the table has of each rung."""
    metric, (first, *_, last) = _metric(rungs), rungs.values()
    target = _TARGET * (1.0 if isinstance(last, str) else last[metric])

    def row(rung: Figures) -> Figures:
        so_far = None if isinstance(first, str) else first["s per step"] / rung["s per step"]
        return {
            "s per step": rung["s per step"],
            "to the rung before": _times(rung.get(_BEFORE)),
            "to the baseline": _times(so_far),
            **{name: rung[name] for name in ("waited, percent", "prepare and cache, s", "first epoch, s", metric)},
            f"seconds to {target:.2f}": _reached(rung, target),
            "peak memory, MiB": rung["peak memory, MiB"],
        }

    return {name: rung if isinstance(rung, str) else row(rung) for name, rung in rungs.items()}


def _beside(found: Figures | str, fast: Figures | str) -> Figures | str:
    """Return what the table has of a single change; by samples, since some make the batch larger."""
    if isinstance(found, str):
        return found
    ratio = None if isinstance(fast, str) else found["samples per s"] / fast["samples per s"]
    names = ("s per validation", "compile, s", "peak memory, MiB")
    return {
        "s per step": found["s per step"],
        "samples per s, this / fast": _times(ratio),
        **{name: found[name] for name in names},
    }


def _metric(rungs: Figures) -> str:
    return "AUC" if any("AUC" in rung for rung in rungs.values() if isinstance(rung, dict)) else "Dice"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def _reached(rung: Figures, target: float) -> str:
    """Return the median second, preparation included, of the first validation that has the target."""
    ends = [next((end for end, value in curve if value >= target), math.inf) for curve in rung["curves"]]
    seconds = statistics.median(ends)
    return f"{seconds:.3g}" if math.isfinite(seconds) else "not reached"


def _table(part: Figures | str) -> str:
    """Return rows of named figures, or of the reason why there are none, as a Markdown table."""
    if isinstance(part, str):
        return part
    names = list(dict.fromkeys(name for each in part.values() if isinstance(each, dict) for name in each))
    names = names or ["why not"]
    lines = [["", *names], ["---"] * (len(names) + 1)]
    for name, found in part.items():
        cells = {names[0]: found} if isinstance(found, str) else found
        lines.append([name, *(_cell(cells.get(each, "")) for each in names)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else str(value)


def draw_ladder(path: Path, record: Figures) -> None:
    """Draw each rung's quality against time, as far as they did not fail; the recipes in colour, the rest in grey."""
    rungs = {name: rung for name, rung in record["climb"].items() if isinstance(rung, dict)}
    figure = Figure(figsize=(9, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for name, rung in rungs.items():
        seconds, values = np.array(rung["curves"][0]).T
        recipe = next((recipe for recipe in _COLOURS if re.search(rf"{recipe}(:| \(|$)", name)), None)
        colour, width = (_COLOURS[recipe], 2.5) if recipe else ("0.8", 1)
        axes.plot(seconds, values, marker="o", color=colour, lw=width, ms=2 * width, zorder=1 + width, label=recipe)
    axes.plot([], [], color="0.8", label="intermediate rungs")
    axes.set(xlim=0, xlabel="seconds of preparation and training", ylabel=f"validation {_metric(rungs)}")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False)
    axes.grid(alpha=0.3)
    save_png(path, figure)


if __name__ == "__main__":
    main()
