r"""Several processes that train one network together, one per device: torchrun starts them, torch's DDP joins them.

On one process all of this is a no-op, and none of it needs a process group. Two processes on this machine:

    torchrun --standalone --nproc-per-node 2 -- apps/spleen/train.py ...

Two machines with one process each, N being 0 on the first and 1 on the second, and eth0 what joins them:

    GLOO_SOCKET_IFNAME=eth0 torchrun --nnodes 2 --nproc-per-node 1 --node-rank N --max-restarts 0 \
        --master-addr FIRST --master-port 29500 -- apps/spleen/train.py ...

The two dashes keep torchrun from taking --run, which comes after the script, for a beginning of its own --run-path.
With `--rdzv-backend c10d` instead, torchrun itself (not the training, which ends) waits on a cut link for many minutes.
"""

import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.watch import SILENT_SECONDS, Phase, Watch, store_of

T = TypeVar("T")

# The watch judges whether a rank is dead; these limits only have to be longer than any honest work.
_STEP_LIMIT = timedelta(minutes=30)  # gradients, sums: the ranks differ by a checkpoint at most
_CONTROL_LIMIT = timedelta(hours=24)  # waiting for what one rank does alone: preparing cases, exporting

# What gloo says when another rank is gone; it has no error of its own for that.
_LOST = ("Connection closed", "Connection reset", "Connection refused", "Broken pipe", "Timed out", "timeout")


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among those that train together; `SINGLE` stands alone.

    Args:
        rank: number of this process, 0 to world - 1; 0 is the leader, which alone writes files and speaks.
        world: number of processes.
        local_rank: number of this process among those of its host; the number of its CUDA device.
        control: group for objects and decisions; it never touches a GPU.
        watch: tells the others that this process lives, and ends it when they do not.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    control: dist.ProcessGroup | None = None
    watch: Watch | None = None

    @property
    def leader(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks, with a gradient that is exact after DDP's mean.

        Every rank must compute the same loss from the sum. Its gradient with respect to the own part is that with
        respect to the sum, times `world`, since DDP divides the sum of the ranks' gradients by `world`.
        """
        if self.world == 1:
            return tensor
        result: Tensor = _Sum.apply(tensor, self.world)  # type: ignore[no-untyped-call]
        return result

    def shard(self, items: Sequence[T]) -> list[T]:
        """Return this rank's part of a list that is the same on every rank: every `world`-th item; may be empty."""
        return list(items[self.rank :: self.world])

    def gather(self, items: Sequence[T]) -> list[T]:
        """Return the parts that `shard` made, on every rank and in the order of the whole list; tensors on the CPU."""
        if self.world == 1:
            return list(items)
        parts: list[list[T]] = [[] for _ in range(self.world)]
        dist.all_gather_object(parts, list(items), group=self.control)
        total = sum(len(part) for part in parts)
        assert [len(part) for part in parts] == [len(range(r, total, self.world)) for r in range(self.world)], (
            f"{[len(part) for part in parts]} items: not the parts of one list"
        )
        return [parts[index % self.world][index // self.world] for index in range(total)]

    def from_leader(self, value: T) -> T:
        """Return the leader's value on every rank; what can be pickled, tensors on the CPU."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def once(self, make: Callable[[], T]) -> T:
        """Return what `make` returns on the leader, which alone calls it.

        Raises:
            SystemExit: `make` failed; the leader raises the error itself, the others end quietly with status 1.
        """
        if self.world == 1:
            return make()
        if not self.leader:
            made, value = self.from_leader((False, None))
            if not made:
                raise SystemExit(1)
            return value  # type: ignore[return-value]
        made = False
        try:
            value = make()
            made = True
        finally:
            if not made:
                self.from_leader((False, None))
        return self.from_leader((True, value))[1]

    def parallel(self, network: nn.Module) -> nn.Module:
        """Return the network to train: its backward pass averages the gradients over the ranks.

        Buffers, such as the running figures of a batch normalisation, stay each rank's own: see `average_buffers`.

        A run of two ranks goes on from a checkpoint bit for bit. With more, the last bits differ: DDP rearranges the
        gradients after the first step of a process, and they are then summed in another order. A checkpoint holds the
        leader's buffers, so after it the running figures of a batch normalisation differ until they have forgotten.
        """
        if self.world == 1:
            return network
        device = next(network.parameters()).device
        # The strides of a 1 x 1 x 1 kernel have no meaning where channels come last; a few bytes are copied once more.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides", UserWarning)
        with warnings.catch_warnings():
            # torch 2.13 renames broadcast_buffers; its new name is not known to the versions before.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            return DistributedDataParallel(
                network,
                device_ids=[device.index] if device.type == "cuda" else None,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
            )

    @torch.no_grad()
    def average_buffers(self, network: nn.Module) -> None:
        """Replace each floating buffer of the network by its mean over the ranks; before each validation."""
        buffers = [buffer for buffer in network.buffers() if buffer.is_floating_point()]
        if self.world == 1 or not buffers:
            return
        flat = torch.cat([buffer.reshape(-1).double() for buffer in buffers])
        dist.all_reduce(flat)
        parts = torch.split(flat / self.world, [buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view_as(buffer))

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world > 1:
            dist.barrier(group=self.control)

    def at_step(self, step: int) -> None:
        """Tell the watch that the training loop moves; `step` is counted from 1."""
        if self.watch is not None:
            self.watch.at_step(step)

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """Tell the watch what a block does."""
        return self.watch.phase(name) if self.watch is not None else nullcontext()

    def saves_in(self, directory: Path) -> None:
        """Tell the watch which run it names when it ends this process."""
        if self.watch is not None:
            self.watch.run_directory = directory


SINGLE = Ranks()


def torchrun_place() -> tuple[int, int, int | None]:
    """Return this process's number, how many there are, and its number on its host, as torchrun says; 0, 1, None alone.

    For work that is only shared out; who must talk to the others joins them (`common.ranks`).
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return (int(os.environ["RANK"]), world, int(os.environ["LOCAL_RANK"])) if world > 1 else (0, 1, None)


def wait_for_all() -> None:
    """Under torchrun wait until every process has come here, for a day at most; else do nothing.

    torchrun ends all processes when one of them ends with an error: none may do so while others are still at work.
    """
    if torchrun_place()[1] > 1:
        torch.distributed.init_process_group("gloo", timeout=timedelta(days=1))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def choose_device(name: str, local_rank: int | None = None) -> torch.device:
    """Return the torch device of a name, where "auto" is the first CUDA device if there is one.

    Args:
        name: "auto", "cpu", "cuda" or "cuda:N".
        local_rank: number of this process among several on its host; it gets the CUDA device of that number.

    Raises:
        ValueError: the name is no device, or the device is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind not in {"cpu", "cuda"} or (number and not number.isdigit()):
        raise ValueError(f"device {name}: must be auto, cpu, cuda or cuda:N")
    if kind == "cuda" and local_rank is not None:
        if number:
            raise ValueError(f"device {name}: several ranks take one GPU each, by their number; use --device cuda")
        name, number = f"cuda:{local_rank}", str(local_rank)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and int(number or 0) >= count:
        raise ValueError(f"device {name}: {count} CUDA devices found; use --device cpu, or check the driver")
    if kind == "cuda":
        torch.cuda.set_device(int(number or 0))  # what asks for "the" GPU, as a synchronisation does, means this one
    return torch.device(name)


@contextmanager
def join_ranks(device: str) -> Iterator[Ranks]:
    """Join the processes that torchrun started, for as long as the block runs; without torchrun there is one.

    On CUDA, rank n of a host computes on the device cuda:n and talks over NCCL; on the CPU all is gloo.

    Args:
        device: "auto", "cpu" or "cuda", as for `open_run`.

    Raises:
        ValueError: the device is not there, or a numbered one was asked for.
        ConnectionError: another rank was lost.
    """
    rank, world, local_rank = torchrun_place()
    if local_rank is None:
        yield SINGLE
        return
    chosen = choose_device(device, local_rank)
    watch, left = None, False
    try:
        if chosen.type == "cuda":
            dist.init_process_group("cpu:gloo,cuda:nccl", timeout=_STEP_LIMIT, device_id=chosen)
        else:
            dist.init_process_group("gloo", timeout=_STEP_LIMIT)
        control = dist.new_group(backend="gloo", timeout=_CONTROL_LIMIT)
        watch = Watch(store_of(world, timedelta(seconds=SILENT_SECONDS)), rank, world)
        watch.start()
        ranks = Ranks(rank, world, local_rank, control, watch)
        yield ranks
        ranks.barrier()
        left = True
    except SystemExit:  # a stop on which the ranks agreed
        left = True
        raise
    except RuntimeError as error:
        if not _is_lost(error):
            raise
        hint = watch.hint() if watch is not None else "the ranks had not come together yet"
        raise ConnectionError(f"lost the other ranks ({_brief(error)}); {hint}") from error
    finally:
        if watch is not None:
            watch.stop(left)
    dist.destroy_process_group()


def _brief(error: RuntimeError) -> str:
    """Return the first line of an error without gloo's place in its source and its advice."""
    line = re.sub(r"^\[[^]]*\.cc:\d+\] ", "", str(error).strip().split("\n")[0])
    return line.split(". This is typically")[0]


def _is_lost(error: RuntimeError) -> bool:
    """Return whether an error says that another rank is gone."""
    if isinstance(error, dist.DistError):
        return True
    return any(sign in str(error) for sign in _LOST)


class _Sum(torch.autograd.Function):
    """The sum over ranks; backward needs no communication, since every rank has the gradient of the same loss."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, world: int) -> Tensor:  # noqa: ANN401 - torch's context has no type
        ctx.world = world
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return gradient * ctx.world, None
