"""Measure the guide against fast, both sides in turn in one process, and print median ratios.

Run: python benchmarks/compare.py spleen --data FOLDER [--part preparation step inference quality] [--output FILE.json]

`--data` is a dataset in MSD layout, best of MSD's own size, for instance phantoms built around real labels:
  python data_scripts/make_phantoms.py ct --to FOLDER --labels Task09_Spleen
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.spleen_parts import inference, preparation, quality, step
from common.data.cases import read_dataset
from common.files import write_json
from common.observe.run import environment

PARTS = {"preparation": preparation, "step": step, "inference": inference, "quality": quality}


def main() -> None:
    """Run the parts that were asked for, print a line per figure, and write all of it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("app", choices=["spleen"])
    parser.add_argument("--data", type=Path, required=True, help="folder in MSD layout")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure; default all")
    parser.add_argument("--cases", type=int, default=8, help="cases to prepare; half as many are segmented")
    parser.add_argument("--rounds", type=int, default=3, help="times each side runs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    cases = read_dataset(arguments.data).cases[: arguments.cases]
    record: dict[str, Any] = {"environment": environment(device), "data": str(arguments.data), "cases": len(cases)}
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        for part in arguments.part:
            print(f"== {part}", flush=True)
            record[part] = PARTS[part](cases, arguments.rounds, device, Path(folder))
            for name, value in record[part].items():
                print(f"{name}: {value}", flush=True)
    if arguments.output is not None:
        write_json(arguments.output, record)


if __name__ == "__main__":
    main()
