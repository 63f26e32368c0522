"""Measure what more ranks are worth: the same training with one rank and with several, of one thread each, in turn.

Run: python benchmarks/ranks.py [--app brats] [--rounds 3] [--ranks 2] [--output FILE.json]

It trains the app on its small synthetic data with torchrun, the same global batch on both sides, and compares the crops
(or patches) per second of the last epoch.
"""

from pathlib import Path

from medspeed.benchmarks import GUIDES
from medspeed.common.flags import Parser

PARSER = Parser(description=__doc__)
PARSER.add_argument("--app", choices=GUIDES, default="brats", help="app to train")
PARSER.add_argument("--rounds", type=int, default=3, help="repetitions of each side")
PARSER.add_argument("--ranks", type=int, default=2, help="ranks to compare with one rank, each on one core")
PARSER.add_argument("--output", type=Path, help="JSON file for the results")
PARSER.answer(__name__)

import tempfile

import torch

from medspeed.benchmarks.harness import call, make_data, median, ratio, tell
from medspeed.common.files import read_json_lines
from medspeed.common.run import environment

_FLAGS = "--device cpu --epochs 2 --batch-size 4 --engine none --validate-every 2"


def main() -> None:
    """Run both sides in turn, print a line per figure, and write all of it as JSON."""
    given = PARSER.parse_args()
    seconds: dict[int, list[float]] = {1: [], given.ranks: []}
    losses: dict[int, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="ranks-") as made:
        folder = Path(made)
        data = make_data(given.app, "small", folder / "data")
        for number, ranks in [(number, ranks) for number in range(given.rounds) for ranks in seconds]:
            run = folder / f"run-{number}-{ranks}"
            launch = f"-m torch.distributed.run --standalone --nproc-per-node {ranks} -- apps/{given.app}/train.py"
            own = "--data", data, "--store", folder / "store", "--run", run, "--parallel.partitions", given.ranks
            call(*launch.split(), *_FLAGS.split(), *own, OMP_NUM_THREADS="1")
            epochs = read_json_lines(run / "metrics.jsonl")
            seconds[ranks].append(1 / epochs[-1]["samples_per_second"])
            losses[ranks] = [loss for epoch in epochs for loss in epoch["losses"]]
    one, several = seconds[1], seconds[given.ranks]
    record = {
        "environment": environment(torch.device("cpu")),
        "1 rank, samples per second": round(1 / median(one), 3),
        f"{given.ranks} ranks, samples per second": round(1 / median(several), 3),
        "throughput ratio": ratio(one, several),
        "largest difference of a loss": max(abs(a - b) for a, b in zip(*losses.values(), strict=True)),
        "steps compared": len(losses[1]),
    }
    tell(record, given.output)


if __name__ == "__main__":
    main()
