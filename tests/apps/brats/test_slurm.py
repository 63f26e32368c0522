"""The SLURM script with stand-ins for the commands it calls: what it starts, and when it resumes and is requeued."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "apps" / "brats" / "slurm.sh"


@pytest.fixture
def slurm(tmp_path):
    """Run the script in an empty folder; return its exit status and what it called."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    stand_ins = {
        commands / "srun": 'shift; "$@"',
        commands / "scontrol": 'if [ "$1" = show ]; then echo first; echo second; else echo "$@" >> calls; fi',
        tmp_path / ".venv" / "bin" / "torchrun": 'echo "$@" >> calls; [ ! -e saves ] || '
        "ln -sfn epoch-2 runs/big/checkpoints/last; exit $STATUS",
    }
    for path, body in stand_ins.items():
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def run(status: int, *arguments: str) -> tuple[int, list[str]]:
        place = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_ID": "7"}
        environ = {**os.environ, **place, "PATH": f"{commands}:{os.environ['PATH']}", "STATUS": str(status)}
        done = subprocess.run(["bash", SCRIPT, *arguments], cwd=tmp_path, env=environ, check=False)
        calls = (tmp_path / "calls").read_text().splitlines()
        (tmp_path / "calls").unlink()
        return done.returncode, calls

    return run


def test_the_first_start_makes_the_run(slurm):
    status, calls = slurm(0, "runs/big", "--data", "my data")
    assert status == 0
    assert calls == [
        "--nnodes 2 --nproc-per-node 1 --node-rank 1 --master-addr first --master-port 20007 --max-restarts 0 "
        "--signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 "
        "-- apps/brats/train.py --run runs/big --data my data"
    ]


def test_a_stop_with_a_checkpoint_of_its_own_is_requeued_and_resumed(slurm, tmp_path):
    """What fails again without one, as at a loss that is no number, would do so for ever."""
    (tmp_path / "runs" / "big" / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "big" / "checkpoints" / "last").symlink_to("epoch-1")
    (tmp_path / "runs" / "big" / "config.yaml").touch()
    (tmp_path / "saves").touch()
    status, calls = slurm(143, "runs/big", "--data", "d")
    assert status == 143
    assert calls[0].endswith("-- apps/brats/train.py --resume runs/big")
    assert calls[1:] == ["requeue 7"]
    assert len(slurm(1, "runs/big")[1]) == 1


def test_a_run_that_is_whole_is_not_requeued(slurm, tmp_path):
    (tmp_path / "runs" / "big" / "checkpoints" / "last").mkdir(parents=True)
    (tmp_path / "runs" / "big" / "summary.json").touch()
    assert slurm(1, "runs/big") == (1, [slurm(1, "runs/big")[1][0]])


def test_a_failure_before_the_first_checkpoint_is_not_requeued(slurm):
    status, calls = slurm(1, "runs/big")
    assert status == 1
    assert len(calls) == 1
