"""Measure the guide against fast, both sides in turn on one machine, and print median ratios.

Run: python benchmarks/compare.py APP --data FOLDER [--part step inference quality] [--output FILE.json]

`--data` is a dataset in MSD layout, best of MSD's own size, or for pathology a set of slides; for instance phantoms:
  spleen: python data_scripts/make_phantoms.py ct --to FOLDER --labels Task09_Spleen  (built around real labels)
  brats: python data_scripts/make_phantoms.py mri --to FOLDER --cases 4 --size msd
  pathology: python data_scripts/make_slides.py --to FOLDER
Ours is the app itself, with the guide's network (benchmarks/guides.yaml); of the guide's ways to load regions of nine
patches the quicker counts. `--sides fast` runs ours alone, to compare two versions: python benchmarks/compare.py
spleen --data FOLDER --part step --sides fast --cases 2 --rounds 1, in turn in the work tree of each.
"""

from pathlib import Path

from medspeed.benchmarks import GUIDES
from medspeed.common.flags import Parser

PARSER = Parser(description=__doc__)
PARSER.add_argument("app", choices=GUIDES)
PARSER.add_argument("--data", type=Path, required=True, help="dataset folder: MSD layout, or slides")
_PARTS = ("step", "inference", "quality")
PARSER.add_argument("--part", nargs="+", choices=_PARTS, default=_PARTS, help="what to measure")
PARSER.add_argument("--sides", choices=("both", "fast"), default="both", help="fast: without the guide")
PARSER.add_argument("--cases", type=int, default=8, help="cases (pathology: all slides); half as many are segmented")
PARSER.add_argument("--rounds", type=int, default=3, help="repetitions of each side")
PARSER.add_argument("--device", help="cpu or cuda; the GPU by default if there is one")
PARSER.add_argument("--output", type=Path, help="JSON file for the results")
PARSER.answer(__name__)

import shlex
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from medspeed.apps.opening import parse_flags
from medspeed.benchmarks import harness, sides
from medspeed.benchmarks.harness import Figures, Sides, Values, row, show
from medspeed.benchmarks.sides import Task
from medspeed.common.files import write_json
from medspeed.common.run import environment


def timed(
    task: Task, guide: Callable[..., Sides], fast: Sequence[Callable[..., Sides]], flags: str, **how: bool | int
) -> tuple[Values, Figures]:
    """Run the guide's sides, if it runs, and ours in turn, each maker's in a process of its own; ours are made first.

    The makers are functions of modules, of the task and flags of ours; what sides return must pickle.
    """
    with ExitStack() as stack:
        ours = [stack.enter_context(harness.apart(make, task, flags)) for make in fast]
        theirs = [stack.enter_context(harness.apart(make, task, flags)) for make in [guide] * task.both]
        turns = {name: run for each in (*theirs, *ours) for name, run in each.items()}
        return harness.in_turn(turns, **{"rounds": task.rounds, **how})  # type: ignore[arg-type]


def quickest(seconds: Values) -> tuple[str, list[float]]:
    """Return which of the guide's ways counts, and its seconds; none where it did not run."""
    ways = {name: values for name, values in seconds.items() if name == "guide" or name.startswith("guide (")}
    best = min(ways, key=lambda name: statistics.median(ways[name]), default="guide")
    return best, ways.get(best, [])


def step(task: Task) -> list[Figures]:
    """Time the training step of the guide's network on equal batches, then epochs of each side's own batches."""
    rows = []
    for flags in task.known["steps"]:
        seconds, left = timed(task, sides.guide_steps, [sides.fast_steps], flags, rounds=2 * task.rounds + 1)
        epochs, steps = timed(task, sides.guide_epochs, [sides.fast_epochs], flags)
        each = {name: [value / steps[name] for value in values] for name, values in epochs.items()}
        way, seconds["guide with its batch"] = quickest(each)
        seconds["fast with its batch"] = each["fast"]
        batch, _, *shape = left["fast fp32"]
        rows += step_rows(f"{batch} x {'x'.join(map(str, shape))}", seconds, task, way[5:])
    return rows


def step_rows(what: str, seconds: Values, task: Task, way: str = "") -> list[Figures]:
    """Return the rows of a training step: each pair of precisions that was measured, and with the making of the batch.

    The seconds are of the sides "guide PRECISION", "fast PRECISION", "guide with its batch" and "fast with its batch".
    """
    pairs = [(task.usual, task.chosen), ("fp32", "fp32"), (task.half, "bf16")]
    if not task.both:
        pairs = [(None, precision) for precision in task.precisions]
    rows = []
    for guide, fast in dict.fromkeys(pairs):
        if f"fast {fast}" in seconds:
            pair = f"both {fast}" if guide == fast else f"guide {guide}, fast {fast}"
            name = f"training step, {what}, {pair if task.both else f'fast {fast}'}"
            rows.append(row(name, "s", seconds.get(f"guide {guide}", []), seconds[f"fast {fast}"]))
    batches = [seconds.get(f"{side} with its batch", []) for side in ("guide", "fast")]
    return [*rows, row(f"training step, {what}, with the making of the batch{way}", "s", *batches)]


def inference(task: Task) -> list[Figures]:
    """Time the way from files to masks (of slides to maps) with equal weights, and judge what came out.

    Fast alone has nothing to compare its answers with: its network has seen one epoch.
    """
    warm, run, scans = task.known["warm"] + " --epochs 1" * (not task.both), task.folder / "run", task.scans()
    config = replace(task.config(warm), run=run)
    harness.in_a_process(sides.train, config)
    (task.folder / "scans").mkdir()
    for file in scans:
        (task.folder / "scans" / file.name).symlink_to(file.resolve())
    ways = [name for name, way in task.known["ways"].items() if way["precision"] in task.precisions]
    seconds, left = timed(
        task, sides.guide_inference, [partial(sides.fast_inference, way=name) for name in ways], warm, warm_up=False
    )
    each = {name: [value / len(scans) for value in values] for name, values in seconds.items()}
    side, guide = quickest(each)
    peak, theirs = left.get(side, (None, None))
    rows = [row(f"file to file, {name}{side[5:]}", "s", guide, each[name]) for name in ways]
    if task.app != "pathology":  # where the guide's ways share a process
        rows += [row(f"peak memory, {name}", "MiB", [peak] * task.both, [left[name][0]]) for name in ways]
    for name in ways * task.both:
        judge = sides.judge_maps if task.app == "pathology" else sides.judge_masks
        scores = judge(task, theirs, left[name][1])
        rows += [row(f"{what}, {name}", "", *pair) for what, pair in scores.items()]
    return rows


def quality(task: Task) -> list[Figures]:
    """Train both recipes over as many seeds as rounds, equal in what `guides.yaml` names."""
    known, scores = task.known["quality"], Values(guide=[], fast=[])
    given = ["--store", task.folder, "--device", task.device, "--precision", task.chosen, "--engine", "none"]
    for seed in range(task.rounds):
        for name in ("guide", "fast")[not task.both :]:
            own = [*given, "--recipe", name, "--seed", seed, "--run", task.folder / f"{name}-{seed}"]
            flags = shlex.split(known["both"] + f" {known['guide']}" * (name == "guide"))
            summary = sides.train(parse_flags(task.app, [*map(str, own), *flags]))
            scores[name].append(summary["quality"]["value"])
    return [row(f"{known['judged']}, {task.rounds} seeds, equal epochs", "", scores["guide"], scores["fast"])]


def main() -> None:
    """Run the parts that were asked for, print their rows, and write all of it as JSON."""
    given = PARSER.parse_args()
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    rows: list[Figures] = []
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        sizes = given.rounds, given.cases, given.sides == "both"
        task = Task(given.app, given.data.resolve(), device, *sizes, Path(folder))
        if task.half is None:
            print(f"bf16: this processor only emulates it, so no side runs in it; fast chooses {task.chosen}")
        record: dict[str, Any] = {
            "app": given.app, "environment": environment(device), "data": str(given.data), "cases": given.cases,
            "rounds": given.rounds, "fast chooses": task.chosen, "rows": rows,
        }  # fmt: skip
        for part in given.part:
            found = globals()[part](task)
            print(f"== {part}", *map(show, found), sep="\n", flush=True)
            rows += found
            if given.output is not None:  # after each part, so that an interrupted run keeps the parts before
                write_json(given.output, record)


if __name__ == "__main__":
    main()
