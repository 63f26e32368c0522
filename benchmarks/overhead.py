"""What watching costs: training steps with monitor, timers and spans against the same steps without, in turn.

Run: python benchmarks/overhead.py [--rounds 20] [--steps 16] [--output FILE.json]

The steps are the spleen app's, on the GPU where there is one. NVTX ranges are on where torch has NVTX.
"""

from pathlib import Path

from medspeed.common.flags import Parser

PARSER = Parser(description=__doc__)
PARSER.add_argument("--rounds", type=int, default=20, help="pairs of runs")
PARSER.add_argument("--steps", type=int, default=16, help="steps per run")
PARSER.add_argument("--output", type=Path, help="JSON file for the results")
PARSER.answer(__name__)

import statistics
import tempfile
from contextlib import nullcontext

import torch

from medspeed.apps.opening import parse_flags
from medspeed.benchmarks.harness import median, opened, step_of, tell
from medspeed.common.clock import StepTimer, seconds_of, spans_to
from medspeed.common.observe.monitor import monitored
from medspeed.common.run import environment


def main() -> None:
    """Time both sides and print what watching adds to a step; the start and the picture of a monitor do not count."""
    given, device = PARSER.parse_args(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plain, watched = list[float](), list[float]()
    flags = ["--device", device.type, "--crop-size", "48", "48", "32", "--optimizer", "novograd"]
    with tempfile.TemporaryDirectory() as store, opened(parse_flags("spleen", [*flags, "--store", store])) as found:
        setup = found[1]
        batch, step, timer = next(iter(setup.batches.epoch(0))), step_of(setup), StepTimer(device)

    def watch() -> None:
        with timer.host("waited"):
            pass
        with timer.computing():
            step(batch)
        with timer.host("logged"):
            pass

    for _ in range(given.rounds + 1):
        plain.append(seconds_of(lambda: [step(batch) for _ in range(given.steps)]) / given.steps)
        ranges = spans_to("nvtx") if device.type == "cuda" else nullcontext()
        with tempfile.TemporaryDirectory(prefix="overhead-") as folder, monitored(Path(folder), device), ranges:
            watched.append(seconds_of(lambda: [watch() for _ in range(given.steps)]) / given.steps)  # type: ignore[func-returns-value]
    more = statistics.median(b / a - 1 for a, b in list(zip(plain, watched, strict=True))[1:])
    record = {
        "environment": environment(device),
        "plain, s per step": median(plain[1:]),
        "watched, s per step": median(watched[1:]),
        "watching takes more, percent": round(100 * more, 2),
    }
    tell(record, given.output)


if __name__ == "__main__":
    main()
