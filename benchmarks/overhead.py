"""What watching costs: training steps with monitor, timers and spans against the same steps without, in turn.

Run: python benchmarks/overhead.py [--rounds 20] [--steps 16] [--output FILE.json]

The network is the spleen app's on a CPU, or on the GPU where there is one. NVTX ranges are on where torch has NVTX.
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
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch

from medspeed.benchmarks.harness import fast_step, median, tell
from medspeed.common.clock import StepTimer, seconds_of, spans_to
from medspeed.common.data.batches import Batch
from medspeed.common.observe.monitor import Monitor
from medspeed.common.run import environment
from medspeed.common.training.losses import build_loss
from medspeed.common.training.setup import choose_precision
from medspeed.models.unet3d import unet3d

_CHANNELS, _CROP, _BATCH = (8, 16, 32, 64), (48, 48, 32), 4  # the spleen app's on a CPU


def main() -> None:
    """Time both sides and print what watching adds to a step."""
    arguments = PARSER.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    step = make_step(device)
    pairs = [pair(step, arguments.steps, device) for _ in range(arguments.rounds + 1)][1:]
    plain, watched = ([each / arguments.steps for each in side] for side in zip(*pairs, strict=True))
    more = statistics.median(b / a - 1 for a, b in pairs)
    record = {
        "environment": environment(device),
        "plain, s per step": median(plain),
        "watched, s per step": median(watched),
        "watching takes more, percent": round(100 * more, 2),
    }
    tell(record, arguments.output)


def make_step(device: torch.device) -> Callable[[], object]:
    """Return a training step of the spleen app's network on one batch."""
    torch.manual_seed(0)
    network = unet3d(1, 2, _CHANNELS, 2).to(device, memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    image = torch.rand(_BATCH, 1, *_CROP, device=device)
    batch = Batch(image, (image > 0.7).to(torch.uint8), ("case",) * _BATCH)
    return partial(fast_step(network, build_loss("dice_ce"), choose_precision("auto", device), device), batch)


def pair(step: Callable[[], object], steps: int, device: torch.device) -> tuple[float, float]:
    """Return the seconds of so many steps by themselves, and of as many watched as `fit` watches them.

    To start the monitor and to draw its picture is done once in a run, and is not counted.
    """
    alone = seconds_of(lambda: [step() for _ in range(steps)])
    timer = StepTimer(device)

    def watched() -> None:
        with timer.host("waited"):
            pass
        with timer.computing():
            step()
        with timer.host("logged"):
            pass

    ranges = spans_to("nvtx") if device.type == "cuda" else nullcontext()
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder, Monitor(Path(folder), device), ranges:
        return alone, seconds_of(lambda: [watched() for _ in range(steps)])  # type: ignore[func-returns-value]


if __name__ == "__main__":
    main()
