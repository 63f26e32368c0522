"""Measure the guide against fast, both sides in turn on one machine, and print median ratios.

Run: python benchmarks/compare.py APP --data FOLDER [--part preparation step inference quality] [--output FILE.json]

`--data` is a dataset in MSD layout, best of MSD's own size, or for pathology a set of slides; for instance phantoms:
  spleen: python data_scripts/make_phantoms.py ct --to FOLDER --labels Task09_Spleen  (built around real labels)
  brats: python data_scripts/make_phantoms.py mri --to FOLDER --cases 4 --size msd
  pathology: python data_scripts/make_slides.py --to FOLDER
`--sides fast` runs ours alone, for a comparison of two versions: python benchmarks/compare.py spleen --data FOLDER
--part step --sides fast --cases 2 --rounds 1 --output FILE.json, in turn in the work tree of each.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import GUIDES, Options, guide_of, show
from common.files import write_json
from common.run import environment

PARTS = ("preparation", "step", "inference", "quality")


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("app", choices=GUIDES)
    parser.add_argument("--data", type=Path, required=True, help="folder in MSD layout, or of slides")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure; default all")
    parser.add_argument("--sides", choices=("both", "fast"), default="both", help="fast: ours alone")
    parser.add_argument("--cases", type=int, default=8, help="cases to prepare; half as many are segmented (scanned)")
    parser.add_argument("--rounds", type=int, default=3, help="times each side runs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    return parser.parse_args(arguments)


def main() -> None:
    """Run the parts that were asked for, print their rows, and write all of it as JSON."""
    given = parse_options()
    device, rows = torch.device(given.device), []
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        options = Options(given.app, device, given.rounds, Path(folder), given.sides == "both")
        if options.half is None:
            print(f"bf16: this processor only emulates it, so no side runs in it; fast chooses {options.chosen}")
        about: dict[str, Any] = {"environment": environment(device), "data": str(given.data), "cases": given.cases}
        for part, found in guide_of(given.app).compare(given.part, options, given.data, given.cases):
            print(f"== {part}", *map(show, found), sep="\n", flush=True)
            rows += found
            if given.output is not None:  # after each part, so that an interrupted run keeps the parts before
                record = {"app": given.app, **about, "rounds": given.rounds, "fast chooses": options.chosen}
                write_json(given.output, record | {"rows": rows})


if __name__ == "__main__":
    main()
