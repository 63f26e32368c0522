"""Several processes, one per device, that train one network (torchrun starts them, DDP joins them); a no-op on one."""

import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]  # public, though not listed
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")
BEAT_SECONDS = 2.0
# Without a sign of life: a library may hold Python's lock, and with it the beats, for a while. torchrun then gives the
# other ranks up to 30 seconds to end, and the whole has to be over in 60.
SILENT_SECONDS = 16.0
_GONE = f"no contact with the other ranks for {SILENT_SECONDS:.0f} s (network down, or rank 0's host lost)"
HUNG_SECONDS, HUNG_STEPS = 40.0, 4  # without a move within a step, and so many times the longest step before


class Watch:
    """Whether the other ranks live: one that is killed, stopped, cut off or hung in a step ends all within a minute.

    The time limit of a collective must allow for honest long work. So a thread of each rank tells the others every two
    seconds that it lives and where it stands, by a connection of its own, and judges what it hears. It counts by its
    own beats: a machine that slept has missed none, and clocks need not agree.
    """

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self.hint: Callable[[], str] = lambda: "there is no checkpoint of this run yet"  # how to go on
        self._store, self._rank, self._world = store, rank, world
        self._others = [other for other in range(world) if other != rank]
        self._heard: dict[tuple[int, str], tuple[object, int]] = {}
        self._beats, self._failed, self._stood, self._place, self._longest = 0, 0, 0, (0, 0), 0.0
        self._moved = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat_on, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; every rank must do so at about the same time."""
        self._stopped.set()
        self._thread.join(timeout=BEAT_SECONDS)

    def leave(self) -> None:
        """End the thread, that of rank 0 after the others: with its process ends the store that they ask."""
        self.stop()
        with suppress(RuntimeError):  # a courtesy, no more: another rank may be lost in this moment
            if self._rank and not self._thread.is_alive():
                self._store.set(f"left {self._rank}", "")
            elif not self._rank:
                self._store.wait([f"left {rank}" for rank in self._others], timedelta(seconds=SILENT_SECONDS))

    def at_step(self, step: int) -> None:
        """Note a move to a step, counted from 1, in which to stand for long is to hang; 0 is any other work.

        Every rank must make the same moves to steps.
        """
        now, (moves, before) = time.monotonic(), self._place
        if before and step and moves > 1:  # the first step compiles and fills caches
            self._longest = max(self._longest, now - self._moved)
        self._place, self._moved, self._stood = (moves + bool(step), step), now, 0

    def beat(self) -> str | None:
        """Tell the others where this rank stands and hear where they do; return why they cannot go on together."""
        self._beats, self._stood = self._beats + 1, self._stood + 1
        moves, step = self._place
        try:
            self._store.set(str(self._rank), f"{self._beats} {moves} {step} {socket.gethostname()}")
            texts = self._store.multi_get([str(rank) for rank in self._others])
        except RuntimeError:
            self._failed += 1
            return _GONE if self._failed * BEAT_SECONDS >= SILENT_SECONDS else None
        self._failed = 0
        told = [(text.decode().split(" ", 3), rank) for text, rank in zip(texts, self._others, strict=True)]
        for place, rank, beat, host in sorted(((int(m), int(s)), own, beat, host) for (beat, m, s, host), own in told):
            silent, stood = self._same(rank, "beat", beat), min(self._stood, self._same(rank, "place", place))
            who = f"rank {rank} (host {host})"
            if silent * BEAT_SECONDS >= SILENT_SECONDS:
                return f"{who} has not responded for {silent * BEAT_SECONDS:.0f} s"
            hung = place[1] and step and place[0] <= moves and self._longest
            if hung and stood * BEAT_SECONDS >= max(HUNG_SECONDS, HUNG_STEPS * self._longest):
                waited = f"{stood * BEAT_SECONDS:.0f} s while this rank waits in step {step}"
                return f"{who} hangs: it has been in step {place[1]} for {waited}"
        return None

    def _same(self, rank: int, name: str, value: object) -> int:
        """Return for how many of our beats something that is heard of a rank was the same."""
        before, beats = self._heard.get((rank, name), (None, 0))
        self._heard[rank, name] = value, beats + 1 if value == before else 0
        return self._heard[rank, name][1]

    def _beat_on(self) -> None:
        while not self._stopped.is_set():
            late = threading.Timer(SILENT_SECONDS, self._end, [_GONE])  # on a cut link the store blocks for good
            late.daemon = True
            late.start()
            if reason := self.beat():
                self._end(reason)
            late.cancel()
            self._stopped.wait(BEAT_SECONDS)

    def _end(self, reason: str) -> None:
        """End the process, at once: the main thread may be blocked for good."""
        if not self._stopped.is_set():
            os.write(2, f"\nrank {self._rank} of {self._world}: {reason}; {self.hint()}\n".encode())
            os._exit(1)


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among those that train together; `SINGLE` stands alone."""

    rank: int = 0  # 0 is the leader, which alone writes files and speaks
    world: int = 1  # number of processes
    control: dist.ProcessGroup | None = None  # group for objects and decisions; it never touches a GPU
    watch: Watch | None = None  # tells the others that this process lives, and ends it when they do not

    @property
    def leader(self) -> bool:
        """Whether this process is the one that writes and speaks."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks, from which all compute the same loss.

        The gradient of the own part is that of the sum, times `world`, since DDP averages the ranks' gradients.
        """
        if self.world == 1:
            return tensor
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total + self.world * (tensor - tensor.detach())

    def shard(self, items: Sequence[T]) -> list[T]:
        """Return this rank's part of a list that is the same on every rank: every `world`-th item; may be empty."""
        return list(items[self.rank :: self.world])

    def gather(self, items: Sequence[T]) -> list[T]:
        """Return on every rank the whole list, of the parts that `shard` made; tensors on the CPU."""
        if self.world == 1:
            return list(items)
        parts: list[list[T]] = [[] for _ in range(self.world)]
        dist.all_gather_object(parts, list(items), group=self.control)
        return [parts[index % self.world][index // self.world] for index in range(sum(map(len, parts)))]

    def from_leader(self, value: T) -> T:
        """Return the leader's value on every rank; what can be pickled, tensors on the CPU."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def once(self, make: Callable[[], T]) -> T:
        """Return what `make` returns on the leader, which alone calls it.

        Where it fails, the leader raises the error itself, and the others end quietly with status 1.
        """
        found: list[T] = []
        try:
            if self.leader:
                found = [make()]
        finally:
            found = self.from_leader(found)
            if not found:
                self.leave()
        if not found:
            raise SystemExit(1)
        return found[0]

    def parallel(self, network: nn.Module) -> nn.Module:
        """Return the network to train: its backward pass averages the gradients over the ranks.

        Buffers stay each rank's own (see `average_buffers`); a checkpoint holds the leader's. More than two ranks go on
        from it, but not to the bit: after the first step of a process DDP sums the gradients in another order.
        """
        if self.world == 1:
            return network
        device = next(network.parameters()).device
        # The strides of a 1 x 1 x 1 kernel have no meaning where channels come last; a few bytes are copied once more.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides", UserWarning)
        # torch 2.13 renames broadcast_buffers; its new name is not known to the versions before.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        devices = [device.index] if device.type == "cuda" else None
        return DistributedDataParallel(network, devices, broadcast_buffers=False, gradient_as_bucket_view=True)

    @torch.no_grad()
    def average_buffers(self, network: nn.Module) -> None:
        """Replace each floating buffer of the network by its mean over the ranks, for a validation or a stop."""
        for buffer in network.buffers() if self.world > 1 else ():
            if buffer.is_floating_point():
                mean = buffer.double().contiguous() / self.world
                dist.all_reduce(mean)
                buffer.copy_(mean)

    def leave(self) -> None:
        """Wait until every rank is here to leave: the first to go might have the others killed at their work."""
        if self.watch is not None:
            dist.barrier(group=self.control)
            self.watch.leave()

    def at_step(self, step: int) -> None:
        """Tell the watch that the training moves; see `Watch.at_step`."""
        if self.watch is not None:
            self.watch.at_step(step)


SINGLE = Ranks()


def torchrun_place() -> tuple[int, int, int | None]:
    """Return this process's number, how many there are, and its number on its host; 0, 1, None without torchrun."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and (lacking := " and ".join({"RANK", "LOCAL_RANK"} - os.environ.keys())):
        raise ValueError(f"WORLD_SIZE {world}: {lacking} must be set, too; start the ranks with torchrun")
    return (int(os.environ["RANK"]), world, int(os.environ["LOCAL_RANK"])) if world > 1 else (0, 1, None)


def choose_device(name: str) -> torch.device:
    """Return a device by name: "auto" (CUDA, if there), "cpu", "cuda" (a local rank's), "cuda:N"; else a ValueError."""
    local_rank = torchrun_place()[2]
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind not in {"cpu", "cuda"} or (number and not number.isdigit()):
        raise ValueError(f"device {name}: must be auto, cpu, cuda or cuda:N")
    if kind == "cpu":
        return torch.device(name)
    if local_rank is not None:
        if number:
            raise ValueError(f"device {name}: each of several ranks uses the GPU of its number; use --device cuda")
        name, number = f"cuda:{local_rank}", str(local_rank)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(number or 0) >= count:
        raise ValueError(f"device {name}: found {count} CUDA devices; use --device cpu, or check the driver")
    torch.cuda.set_device(int(number or 0))  # what asks for "the" GPU, as a synchronisation does, means this one
    return torch.device(name)


def wait_for_all() -> None:
    """Under torchrun wait until every process has come here, for a day at most; else do nothing.

    torchrun ends all processes when one of them ends with an error: none may do so while others are still at work.
    """
    if torchrun_place()[1] > 1:
        dist.init_process_group("gloo", timeout=timedelta(days=1))
        dist.barrier()
        dist.destroy_process_group()
