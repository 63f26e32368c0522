"""Measure the guide against fast, both sides in turn on one machine, and print median ratios.

Run: python benchmarks/compare.py APP --data FOLDER [--part preparation step inference quality] [--output FILE.json]

`--data` is a dataset in MSD layout, best of MSD's own size, or for pathology a set of slides; for instance phantoms:
  spleen: python data_scripts/make_phantoms.py ct --to FOLDER --labels Task09_Spleen  (built around real labels)
  brats: python data_scripts/make_phantoms.py mri --to FOLDER --cases 4 --size msd
  pathology: python data_scripts/make_slides.py --to FOLDER
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import brats_parts, pathology_parts, spleen_parts
from common.data.cases import Case, read_dataset
from common.files import write_json
from common.observe.run import environment

Read = Callable[[Path, int], tuple[Any, int]]


def _read_msd(folder: Path, most: int) -> tuple[tuple[Case, ...], int]:
    cases = read_dataset(folder).cases[:most]
    return cases, len(cases)


# How each app reads its cases: what its parts take, and how many cases that is.
READERS: dict[str, Read] = {"spleen": _read_msd, "brats": _read_msd, "pathology": pathology_parts.read_slides}
PARTS: dict[str, dict[str, Callable[..., dict[str, Any]]]] = {
    app: {"preparation": own.preparation, "step": own.step, "inference": own.inference, "quality": own.quality}
    for app, own in (("spleen", spleen_parts), ("brats", brats_parts), ("pathology", pathology_parts))
}
NAMES = tuple(PARTS["spleen"])


def main() -> None:
    """Run the parts that were asked for, print a line per figure, and write all of it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("app", choices=list(PARTS))
    parser.add_argument("--data", type=Path, required=True, help="folder in MSD layout, or of slides")
    parser.add_argument("--part", nargs="+", choices=NAMES, default=list(NAMES), help="what to measure; default all")
    parser.add_argument("--cases", type=int, default=8, help="cases to prepare; half as many are segmented (scanned)")
    parser.add_argument("--rounds", type=int, default=3, help="times each side runs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    cases, count = READERS[arguments.app](arguments.data, arguments.cases)
    record: dict[str, Any] = {
        "app": arguments.app,
        "environment": environment(device),
        "data": str(arguments.data),
        "cases": count,
    }
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        for part in arguments.part:
            print(f"== {part}", flush=True)
            record[part] = PARTS[arguments.app][part](cases, arguments.rounds, device, Path(folder))
            _print(record[part])
    if arguments.output is not None:
        write_json(arguments.output, record)


def _print(figures: dict[str, Any], indent: str = "") -> None:
    for name, value in figures.items():
        if isinstance(value, dict):
            print(f"{indent}{name}:", flush=True)
            _print(value, indent + "  ")
        else:
            print(f"{indent}{name}: {value}", flush=True)


if __name__ == "__main__":
    main()
