"""Measure what a second rank is worth: the same training with one rank and with two, of one thread each, in turn.

Run: python benchmarks/ranks.py [--rounds 3] [--ranks 2] [--output FILE.json]

It trains the brats app on its small phantoms with torchrun, the same global batch on both sides, and compares the crops
per second of the last epoch.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.in_turn import median, ratio
from common.files import write_json
from common.observe.run import environment
from data_scripts.make_phantoms import make_mri_phantoms

_ROOT = Path(__file__).resolve().parents[1]
_SETTINGS = ["--device", "cpu", "--epochs", "2", "--batch_size", "4", "--engine", "none", "--validate_every", "2"]
_CASES = 10


def main() -> None:
    """Run both sides in turn, print a line per figure, and write all of it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="times each side runs")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the second side; one core each")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args()
    seconds: dict[int, list[float]] = {1: [], arguments.ranks: []}
    losses: dict[int, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        data = make_mri_phantoms(Path(folder) / "data", _CASES, progress=False)
        for number in range(arguments.rounds):
            for ranks, measured in seconds.items():
                run = Path(folder) / f"run-{number}-{ranks}"
                epochs = train(ranks, arguments.ranks, data, Path(folder) / "store", run)
                measured.append(1 / epochs[-1]["samples_per_second"])
                losses[ranks] = [loss for epoch in epochs for loss in epoch["losses"]]
    one, several = seconds[1], seconds[arguments.ranks]
    record: dict[str, Any] = {
        "environment": environment(torch.device("cpu")),
        "1 rank, crops per second": round(1 / median(one), 3),
        f"{arguments.ranks} ranks, crops per second": round(1 / median(several), 3),
        "throughput ratio": ratio(one, several),
        "largest difference of a loss": max(abs(a - b) for a, b in zip(*losses.values(), strict=True)),
        "steps compared": len(losses[1]),
    }
    for name, value in record.items():
        if name != "environment":
            print(f"{name}: {value}", flush=True)
    if arguments.output is not None:
        write_json(arguments.output, record)


def train(ranks: int, partitions: int, data: Path, store: Path, run: Path) -> list[dict[str, Any]]:
    """Train with so many ranks of one thread; return the records of the epochs."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--"]
    given = ["--data", str(data), "--store", str(store), "--run", str(run), "--partitions", str(partitions)]
    command = [*launch, "apps/brats/train.py", *given, *_SETTINGS]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=_ROOT, env=environ, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
