"""How the tests of several ranks start them: by torchrun as users do, or as forks of one server, which is quicker."""

import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKERS = ["tests.common.training.exact_worker", "tests.common.training.fit_worker"]
PRELOADED = [*WORKERS, "medspeed.apps.spleen.train", "torch._dynamo"]  # the first optimizer loads the last, in 3 s


@dataclass(frozen=True)
class RankProgram:
    """One rank, and the file that its output goes to."""

    process: ForkServerProcess
    output: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def wait(self, seconds: float = 120.0) -> tuple[int | None, str]:
        """Return exit status and output; kill what has not ended by then."""
        self.process.join(seconds)
        status = self.process.exitcode
        self.process.kill()
        return status, self.output.read_text()


StartRanks = Callable[[int, str, str], list[RankProgram]]
Torchrun = Callable[..., "subprocess.Popen[str]"]


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def run_rank(module: str, argument: str, place: dict[str, str], output: Path) -> None:
    """Run one rank in this process, its output in a file."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(place)
    importlib.import_module(module).main(argument)


@pytest.fixture(scope="session")
def start_ranks(tmp_path_factory: pytest.TempPathFactory) -> StartRanks:
    """Start `MODULE.main(ARGUMENT)` once per rank, without torchrun."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)

    def start(world: int, module: str, argument: str) -> list[RankProgram]:
        folder = tmp_path_factory.mktemp("outputs")
        place = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        place |= {"LOCAL_WORLD_SIZE": str(world)}
        ranks = []
        for rank in range(world):
            own, output = {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}, folder / f"{rank}.txt"
            process = context.Process(target=run_rank, args=(module, argument, own, output), daemon=True)
            process.start()
            ranks.append(RankProgram(process, output))
        return ranks

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # the server keeps what it finds at its start
        multiprocessing.forkserver.ensure_running()
    return start


def start_torchrun(options: list[str], argument: str, before: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
    """Start `torchrun OPTIONS -m fit_worker ARGUMENT`, its output readable as text; `before` is put in front."""
    command = [*before, sys.executable, "-m", "torch.distributed.run", *options, "-m", WORKERS[1], argument]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.fixture(scope="session")
def torchrun() -> Torchrun:
    """See `start_torchrun`."""
    return start_torchrun
