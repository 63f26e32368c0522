"""Two ranks of the brats app against one that emulates their partitions."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import last_weights

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
SETTINGS = [
    "--device", "cpu", "--split", "0.2", "--spacing", "[5,5,5]", "--network.filters", "8",
    "--network.blocks_down", "[1,1]",
    "--crop_size", "[16,16,16]", "--crops.per_case", "10", "--windows.size", "[24,24,24]", "--batch_size", "4",
    "--epochs", "2", "--learning_rate", "0.002", "--precision", "fp32", "--engine", "none",
    "--parallel.partitions", "2",
]  # fmt: skip


def train(ranks: int, *arguments: object) -> tuple[int, str]:
    """Run the app under torchrun; return exit status and output."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--"]
    command = [*launch, "tests/without_exports.py", "apps/brats/train.py", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def losses(run: Path) -> list[float]:
    return [loss for line in (run / "metrics.jsonl").read_text().splitlines() for loss in json.loads(line)["losses"]]


@pytest.fixture(scope="module")
def runs(heads, store, tmp_path_factory):
    """The same training by one and by two ranks."""
    folder = tmp_path_factory.mktemp("runs")
    for ranks in (1, 2):
        status, output = train(
            ranks, "--data", heads, "--store", store, "--run", folder / str(ranks), *SETTINGS
        )  # fmt: skip
        assert status == 0, output
    return folder


def test_two_ranks_have_the_losses_and_the_weights_of_one(runs):
    one, two = losses(runs / "1"), losses(runs / "2")
    assert len(one) == len(two) == 20
    assert max(abs(a - b) for a, b in zip(one, two, strict=True)) < 1e-4
    weights, others = (last_weights(runs / name) for name in ("1", "2"))
    assert max(float((weights[name] - others[name]).abs().max()) for name in weights) < 1e-5


def test_each_rank_holds_its_half_of_the_cases(runs):
    log = (runs / "2" / "run.log").read_text()
    held = [
        line.split(": ")[1].split(", ") for line in log.splitlines() if line.startswith("rank ") and "holds" in line
    ]
    assert [len(cases) for cases in held] == [2, 2]
    assert not set(held[0]) & set(held[1])
    assert json.loads((runs / "2" / "summary.json").read_text())["ranks"] == 2


def test_both_judge_the_same_cases_alike(runs):
    one, two = (json.loads((runs / name / "summary.json").read_text())["quality"] for name in ("1", "2"))
    assert one["per_case"].keys() == two["per_case"].keys()
    assert one["value"] == pytest.approx(two["value"], abs=1e-3)


def test_a_number_of_ranks_that_cannot_share_the_partitions_is_refused(runs):
    status, output = train(3, "--resume", runs / "2")
    assert status != 0
    assert "partitions 2: 3 ranks cannot share them evenly" in output
    assert "use 1, 2 ranks" in output
