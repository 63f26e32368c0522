"""What several ranks compute, stored for `test_ranks` to compare: `main(FOLDER)`, once per rank."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from medspeed.common.ranks import SINGLE, Ranks
from medspeed.common.run import join_ranks
from medspeed.common.training.fit import train_step
from medspeed.common.training.optimizers import build_optimizer
from tests.common.training.fit_worker import batch_dice, sample_mean, tiny_batches, tiny_network

STEPS = 20
SCALER = torch.amp.GradScaler("cpu", enabled=False)
LOSSES = {"dice": batch_dice, "mean": sample_mean}


def twenty_steps(ranks: Ranks, norm: str, loss: str, accumulate: int = 1) -> tuple[list[float], dict[str, Any]]:
    """Return the losses of some Novograd steps, and the state at the end with the buffers averaged."""
    network = tiny_network(norm)
    parallel, optimizer = ranks.parallel(network), build_optimizer("novograd", network.parameters(), 0.01)
    losses = [
        float(train_step(parallel, batch, LOSSES[loss](ranks), optimizer, SCALER, "fp32", 0.01, accumulate))
        for batch in tiny_batches(ranks, STEPS).epoch(0)
    ]
    ranks.average_buffers(network)
    return losses, {name: value.clone() for name, value in network.state_dict().items()}


def sum_and_gradient(ranks: Ranks, world: int) -> tuple[float, torch.Tensor]:
    """Return f = (sum over all rows of x @ w) ^ 2 and its gradient by w, as DDP would average it."""
    w = torch.tensor([1.0, -2.0, 0.5], requires_grad=True)
    x = torch.arange(3.0 * 6).reshape(6, 3)[ranks.rank :: ranks.world]
    f = ranks.sum((x @ w).sum()).square()
    torch.autograd.backward(f)
    assert w.grad is not None
    mean = ranks.sum(w.grad) / world
    return f.item(), mean


def gathers(ranks: Ranks) -> dict[int, Any]:
    """Return what is gathered of lists of several lengths, and of tensors."""
    found: dict[int, Any] = {n: ranks.gather([f"case {i}" for i in ranks.shard(range(n))]) for n in (0, 1, 2, 6, 7)}
    found[-1] = ranks.gather([torch.full((2,), float(i)) for i in ranks.shard(range(5))])
    return found


def buffers(ranks: Ranks) -> dict[str, torch.Tensor]:
    """Return the averaged buffers of a network whose running mean is the rank."""
    network = nn.BatchNorm1d(3)
    assert network.running_mean is not None
    network.running_mean.fill_(float(ranks.rank))
    ranks.average_buffers(network)
    return dict(network.state_dict())


def everything(ranks: Ranks = SINGLE) -> dict[str, Any]:
    found: dict[str, Any] = {
        "gather": gathers(ranks),
        "leader": ranks.from_leader({"folder": f"run of rank {ranks.rank}"}),
        "once": ranks.once(lambda: ranks.rank),
        "sum": sum_and_gradient(ranks, ranks.world),
        "buffers": buffers(ranks),
    }
    if ranks.world < 3:
        found["group dice"] = twenty_steps(ranks, "group", "dice")
        found["batch dice"] = twenty_steps(ranks, "batch", "dice")
        found["two micro-batches, mean"] = twenty_steps(ranks, "group", "mean", accumulate=2)
        found["two micro-batches, dice"] = twenty_steps(ranks, "group", "dice", accumulate=2)
    return found


def main(folder: str) -> None:
    with join_ranks("cpu") as ranks:
        torch.save(everything(ranks), Path(folder) / f"{ranks.rank}.pt")
