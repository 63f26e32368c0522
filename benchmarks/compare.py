"""Measure the guide against fast, both sides in turn on one machine, and print median ratios.

Run: python benchmarks/compare.py APP --data FOLDER [--part preparation step inference quality] [--output FILE.json]

`--data` is a dataset in MSD layout, best of MSD's own size, or for pathology a set of slides; for instance phantoms:
  spleen: python data_scripts/make_phantoms.py ct --to FOLDER --labels Task09_Spleen  (built around real labels)
  brats: python data_scripts/make_phantoms.py mri --to FOLDER --cases 4 --size msd
  pathology: python data_scripts/make_slides.py --to FOLDER
`--sides fast` runs ours alone, for a comparison of two versions: python benchmarks/compare.py spleen --data FOLDER
--part step --sides fast --cases 2 --rounds 1 --output FILE.json, in turn in the work tree of each.
"""

from pathlib import Path

from medspeed.benchmarks import GUIDES
from medspeed.common.flags import Parser

PARSER = Parser(description=__doc__)
PARSER.add_argument("app", choices=GUIDES)
PARSER.add_argument("--data", type=Path, required=True, help="dataset folder: MSD layout, or slides")
_PARTS = ("preparation", "step", "inference", "quality")
PARSER.add_argument("--part", nargs="+", choices=_PARTS, default=_PARTS, help="what to measure")
PARSER.add_argument("--sides", choices=("both", "fast"), default="both", help="fast: without the guide")
PARSER.add_argument("--cases", type=int, default=8, help="cases to prepare; half as many are segmented or scanned")
PARSER.add_argument("--rounds", type=int, default=3, help="repetitions of each side")
PARSER.add_argument("--device", help="cpu or cuda; the GPU by default if there is one")
PARSER.add_argument("--output", type=Path, help="JSON file for the results")
PARSER.answer(__name__)

import tempfile
from importlib import import_module
from typing import Any

import torch

from medspeed.benchmarks.harness import Options, Row, Values, row, show
from medspeed.common.config import replaced
from medspeed.common.files import write_json
from medspeed.common.run import environment


def quality(options: Options) -> list[Row]:
    """Train the guide and fast over as many seeds as rounds, equal in what the guide's module names in `QUALITY`."""
    own, recipes = options.own, import_module(f"medspeed.apps.{options.app}.config").RECIPES
    train = import_module(f"medspeed.apps.{options.app}.train").main
    given = {"device": str(options.device), "store": options.folder, "precision": options.chosen, "engine": "none"}
    scores: Values = {"guide": [], "fast": []}
    for seed in range(options.rounds):
        for name in ("guide", "fast")[not options.both :]:
            changes = {**own.QUALITY, **given, "seed": seed, "run": options.folder / f"{name}-{seed}"}
            changes |= {"learning_rate": None} if name == "fast" else {}  # that of its optimizer
            scores[name].append(train(replaced(recipes[name], changes))["quality"]["value"])
    return [row(f"{own.JUDGED}, {options.rounds} seeds, equal epochs", "", scores["guide"], scores["fast"])]


def main() -> None:
    """Run the parts that were asked for, print their rows, and write all of it as JSON."""
    given = PARSER.parse_args()
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        options = Options(given.app, device, given.rounds, Path(folder), given.sides == "both")
        if options.half is None:
            print(f"bf16: this processor only emulates it, so no side runs in it; fast chooses {options.chosen}")
        record: dict[str, Any] = {
            "app": given.app, "environment": environment(device), "data": str(given.data), "cases": given.cases,
            "rounds": given.rounds, "fast chooses": options.chosen, "rows": rows,
        }  # fmt: skip
        measured = options.own.parts
        task = measured.open_task(options, given.data, given.cases)
        for part in given.part:
            found = quality(options) if part == "quality" else getattr(measured, part)(task)
            print(f"== {part}", *map(show, found), sep="\n", flush=True)
            rows += found
            if given.output is not None:  # after each part, so that an interrupted run keeps the parts before
                write_json(given.output, record)


if __name__ == "__main__":
    main()
