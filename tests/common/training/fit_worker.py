"""A tiny training run for the tests of several ranks: `torchrun ... -m fit_worker '{"run": FOLDER, ...}'`.

Every batch is a function of (epoch, step) and is shared out by rows, so that any number of ranks sees the same data.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from medspeed.common import ranks as places
from medspeed.common.data.batches import Batch, Batches
from medspeed.common.files import release
from medspeed.common.ranks import SINGLE, Ranks
from medspeed.common.run import STOP_SIGNALS, exit_by_signal, join_ranks, one_line_errors, open_run, take_signals
from medspeed.common.training.config import Parallel, TrainingConfig
from medspeed.common.training.fit import Fitted, Setup, fit
from medspeed.common.training.optimizers import build_optimizer

ROWS, SIDE = 4, 8


def tiny_network(norm: str = "group") -> nn.Module:
    torch.manual_seed(0)
    between: nn.Module = nn.GroupNorm(2, 4) if norm == "group" else nn.BatchNorm3d(4)
    return nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), between, nn.PReLU(), nn.Conv3d(4, 2, 1))


def batch_dice(ranks: Ranks) -> Callable[[Tensor, Tensor], Tensor]:
    """Return soft Dice loss over the batch of all ranks as one volume."""

    def loss(logits: Tensor, label: Tensor) -> Tensor:
        p, y = logits.softmax(1)[:, 1:], (label == 1).float()
        both, all_p, all_y = ranks.sum(torch.stack([(p * y).sum(), p.square().sum(), y.sum()]))
        value: Tensor = 1 - (2 * both + 1e-5) / (all_p + all_y + 1e-5)
        return value

    return loss


def sample_mean(ranks: Ranks) -> Callable[[Tensor, Tensor], Tensor]:
    """Return cross entropy, a mean over samples, over the batch of all ranks."""

    def loss(logits: Tensor, label: Tensor) -> Tensor:
        entropy = nn.functional.cross_entropy(logits, label[:, 0].long(), reduction="sum")
        return ranks.sum(entropy) / (label.numel() * ranks.world)

    return loss


def tiny_batches(ranks: Ranks, steps: int, before: Callable[[int], None] = lambda step: None) -> Batches:
    """Return rows of noise with a bright cube to find; `before` is called at each step, to wait, hang or fail."""

    def epoch(number: int, first_step: int = 0) -> Generator[Batch, None, None]:
        for step in range(first_step, steps):
            before(number * steps + step)
            generator = torch.Generator().manual_seed(1000 * number + step)
            image = torch.rand(ROWS, 1, SIDE, SIDE, SIDE, generator=generator)
            label = torch.zeros(ROWS, 1, SIDE, SIDE, SIDE, dtype=torch.uint8)
            for row in range(ROWS):  # rows differ, and so do the sums of their losses
                label[row, :, : 2 + row, 2:6, : 1 + row] = 1
            image = image + label
            rows = slice(ranks.rank * ROWS // ranks.world, (ranks.rank + 1) * ROWS // ranks.world)
            yield Batch(image[rows], label[rows], tuple(f"case_{row}" for row in range(ROWS))[rows])

    return Batches(epoch, steps, resumes_within_epoch=True, made_on_device=False)


def train(wish: dict[str, Any], ranks: Ranks = SINGLE) -> Fitted:
    """Train as `wish` says, and return what `fit` does."""
    folder, resume = Path(wish["run"]), wish.get("resume", False)
    run = open_run(folder, None if resume else folder, folder if resume else None, "cpu", "tiny: 1\n", 0, ranks)
    run.clock._began -= wish.get("began_before", 0.0)  # seconds
    run.say(f"running with {ranks.world} ranks")
    network = tiny_network(wish.get("norm", "group"))

    def before(step: int) -> None:
        time.sleep(wish.get("step_seconds", 0.0))
        assert network.training
        if ranks.leader:
            (folder / "step").write_text(str(step))
        if step == wish.get("at") and ranks.rank == wish.get("who", 1):
            misbehave(wish["what"])

    metric = iter(wish.get("metric", [0.5] * 99))

    def validate(network: nn.Module, check: Callable[[], None]) -> float:
        check()
        network.eval()  # as all that predicts does
        found = ranks.gather([float(case) for case in ranks.shard(range(7))])
        assert found == [0.0, 1, 2, 3, 4, 5, 6]
        return float(next(metric))

    losses = {"dice": batch_dice, "mean": sample_mean}
    setup = Setup(
        network=network,
        batches=tiny_batches(ranks, wish.get("steps", 10), before),
        loss_function=losses[wish.get("loss", "dice")](ranks),
        optimizer=build_optimizer("novograd", network.parameters(), 0.01),
        precision="fp32",
        validate=validate,
    )
    config = TrainingConfig(
        learning_rate=0.01,
        schedule="constant",
        epochs=wish.get("epochs", 2),
        validate_every=wish.get("validate_every", 1),
        parallel=Parallel(accumulate=wish.get("accumulate", 1)),
        until=wish.get("until"),
        fast_dev_run=wish.get("fast_dev_run", False),
        profile=wish.get("profile", "nothing"),
    )
    seconds = {"CHECKPOINT": wish.get("checkpoint_seconds", 3600), "MONITOR": wish.get("monitor", 0)}
    with patch.dict(os.environ, {f"MEDSPEED_{name}_SECONDS": str(value) for name, value in seconds.items()}):
        try:
            return fit(setup, config, run)
        finally:
            release(run.directory / ".lock")


def misbehave(what: str) -> None:
    if what == "hang":
        time.sleep(3600)
    if what == "fail":
        raise ValueError("case_7: a scan that cannot be read")
    raise AssertionError(what)


def stop_late(self: places.Watch, folder: Path, stop: Callable[[places.Watch], None] = places.Watch.stop) -> None:
    """End a watch as one does whose process gets no core for a while, and leave a mark."""
    if not self._stopped.is_set():
        time.sleep(1.5)
        (folder / "stopped").touch()
    stop(self)


def main(argument: str) -> None:
    wish = json.loads(argument)
    if wish.get("lags") and os.environ["RANK"] == "1":
        places.Watch.stop = lambda self: stop_late(self, Path(wish["run"]))  # type: ignore[method-assign]
    for name in ("BEAT_SECONDS", "SILENT_SECONDS", "HUNG_SECONDS"):  # `test_ranks` has them as they are
        setattr(places, name, getattr(places, name) / wish.get("hurry", 1))
    with one_line_errors(), join_ranks("cpu") as ranks, take_signals(STOP_SIGNALS, exit_by_signal):
        train(wish, ranks)


if __name__ == "__main__":
    main(sys.argv[1])
