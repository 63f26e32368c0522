import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medspeed.common.clock import Clock
from medspeed.common.data.batches import Batch
from medspeed.common.inference.predictors import autocast
from medspeed.common.kernels import trust
from medspeed.common.run import Run, how_to_go_on
from medspeed.common.training import setup
from medspeed.common.training.config import TrainingConfig
from medspeed.common.training.setup import (
    choose_precision,
    compile_if_asked,
    learning_rates,
    start_run,
    trust_kernels,
    wake,
)
from medspeed.models.unet3d import unet3d
from tests.common.training.fit_worker import tiny_batches, train

CPU = torch.device("cpu")


@pytest.fixture
def unlimited(monkeypatch):
    """No variable keeps the processor from its instructions."""
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")


def test_auto_takes_bf16_where_the_processor_computes_it(monkeypatch, unlimited):
    for there in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda there=there: there)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        assert choose_precision("auto", CPU) == ("bf16" if there else "fp32")


def test_a_wish_is_kept():
    assert choose_precision("fp32", CPU) == "fp32"
    assert choose_precision("bf16", CPU) == "bf16"


def test_fp16_on_a_cpu_is_refused():
    with pytest.raises(ValueError, match="precision fp16: needs a CUDA device"):
        choose_precision("fp16", CPU)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_autocast_computes_in_that_precision(precision, dtype):
    with autocast(precision, CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


def test_a_gpu_is_woken_and_a_cpu_is_not(tmp_path, monkeypatch):
    woken: list[torch.device] = []
    monkeypatch.setattr(setup, "wake", woken.append)
    with start_run(TrainingConfig(run=tmp_path / "run", device="cpu")) as run:
        assert woken == []
    gpu = replace(run, device=torch.device("cuda:1"))
    monkeypatch.setattr(setup, "open_run", lambda *_: gpu)
    with start_run(TrainingConfig(run=tmp_path / "run", device="cpu")):
        for thread in threading.enumerate():
            if thread.name == "wake":
                thread.join()
    assert woken == [gpu.device]


def test_waking_draws_nothing():
    before = torch.get_rng_state()
    wake(CPU)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_holds_its_folder_and_the_signals_for_as_long_as_it_lasts(tmp_path):
    program = "import fcntl, os, sys; fcntl.lockf(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    command = [sys.executable, "-c", program, str(tmp_path / "run" / ".lock")]
    before = signal.getsignal(signal.SIGTERM)
    with start_run(TrainingConfig(run=tmp_path / "run", device="cpu")):
        assert b"BlockingIOError" in subprocess.run(command, capture_output=True, check=False).stderr
        assert signal.getsignal(signal.SIGTERM) is not before
        again = TrainingConfig(resume=tmp_path / "run", device="cpu")
        with pytest.raises(BlockingIOError, match="in use by this process already"), start_run(again):
            pass
        assert b"BlockingIOError" in subprocess.run(command, capture_output=True, check=False).stderr  # still
    subprocess.run(command, check=True)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_process_of_several_that_train_alone_warns(tmp_path, monkeypatch, capsys):
    for count in ("1", "4"):
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", count)
        with start_run(TrainingConfig(run=tmp_path / count, device="cpu")):
            assert ("each trains alone: use torchrun" in capsys.readouterr().out) == (count == "4")


def test_a_start_that_fails_leaves_no_folder(tmp_path):
    config = TrainingConfig(run=tmp_path / "run", device="cpu")
    with pytest.raises(ValueError, match="a wrong name"), start_run(config):
        raise ValueError("a wrong name")
    assert not (tmp_path / "run").exists()


def test_a_start_that_fails_keeps_what_else_lies_in_the_folder(tmp_path):
    def fails() -> None:
        with start_run(TrainingConfig(run=tmp_path / "run", device="cpu")) as run:
            (run.directory / "store" / "prepared").mkdir(parents=True)
            (run.directory / "store" / "entry.json").write_text("{}")
            raise ValueError("a wrong name")

    with pytest.raises(ValueError, match="a wrong name"):
        fails()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["store"]
    assert (tmp_path / "run" / "store" / "entry.json").is_file()


@pytest.mark.parametrize("error", [SystemExit(143), KeyboardInterrupt(), RuntimeError("an export that fails")])
def test_whatever_ends_a_run_says_how_to_go_on(tmp_path, error, monkeypatch):
    """Also after the training; an export that fails costs no weights."""
    monkeypatch.setattr("sys.argv", ["apps/spleen/train.py"])

    def ends() -> None:
        with start_run(TrainingConfig(run=tmp_path / "run", device="cpu")) as run:
            (run.directory / "checkpoints").mkdir()
            (run.directory / "checkpoints" / "last").symlink_to("epoch-000002-step-000000")
            (run.directory / "best.safetensors").touch()
            raise error

    with pytest.raises(type(error)):
        ends()
    line = (tmp_path / "run" / "run.log").read_text().splitlines()[-1]
    assert "last -> epoch-000002-step-000000; the best weights are" in line
    assert line.endswith(f"--resume {tmp_path / 'run'}")
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = how_to_go_on(tmp_path / "run")
    assert "resume by torchrun with 2 processes: python apps" in line
    assert line.endswith(f"--resume {tmp_path / 'run'}")


def test_a_resume_that_is_refused_does_not_advise_itself(tmp_path, capsys):
    with start_run(TrainingConfig(run=tmp_path / "run", device="cpu")) as run:
        (run.directory / "checkpoints").mkdir()
        (run.directory / "checkpoints" / "last").symlink_to("epoch-000002-step-000000")
    capsys.readouterr()
    with pytest.raises(ValueError, match="3 ranks"), start_run(TrainingConfig(resume=tmp_path / "run", device="cpu")):
        raise ValueError("parallel.partitions 2: 3 ranks cannot share them")
    assert "the last checkpoint is" not in capsys.readouterr().out


def test_a_resumed_run_that_trained_on_says_how_to_go_on_whatever_ends_it(tmp_path, capsys):
    with start_run(TrainingConfig(run=tmp_path / "run", device="cpu")) as run:
        (last := run.directory / "checkpoints" / "last").parent.mkdir()
        last.symlink_to("epoch-000002-step-000000")

    def trains_on() -> None:
        with start_run(TrainingConfig(resume=tmp_path / "run", device="cpu")):
            last.unlink()
            last.symlink_to("epoch-000300-step-000000")
            raise ValueError("logits that are not finite")

    capsys.readouterr()
    with pytest.raises(ValueError, match="finite"):
        trains_on()
    assert "the last checkpoint is" in capsys.readouterr().out


def no_space() -> None:
    raise OSError(28, "No space left on device")


def test_a_disk_that_is_full_at_the_first_line_leaves_the_folder_free(tmp_path, monkeypatch):
    config = TrainingConfig(run=tmp_path / "run", device="cpu")
    with monkeypatch.context() as full:
        full.setattr(Run, "say", lambda *_: no_space())
        with pytest.raises(OSError, match="No space left"), start_run(config):
            pass
    assert not (tmp_path / "run").exists()
    with start_run(config) as run:
        assert not run.resumed


@pytest.mark.parametrize(
    ("named", "left", "kept"), [(True, None, False), (True, "tensorboard", True), (False, None, True)]
)
def test_a_run_that_fails_after_its_plan_is_kept_but_for_a_named_one_before_it_trains(
    named, left, kept, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    config = TrainingConfig(run=tmp_path / "run" if named else None, device="cpu")

    def fails() -> None:
        with start_run(config) as run:
            (run.directory / "plan.json").write_text("{}")
            if left:
                (run.directory / left).mkdir()
            raise ValueError("a broken scan")

    with pytest.raises(ValueError, match="a broken scan"):
        fails()
    assert bool([*tmp_path.rglob("config.yaml")]) == kept
    assert (tmp_path / "run").exists() == (named and kept)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0]),
        ("linear", [1.0, 0.75, 0.5, 0.25]),
        ("cosine", [1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)]),
    ],
)
def test_schedules_by_hand(schedule, expected):
    config = TrainingConfig(learning_rate=2.0, schedule=schedule)
    assert learning_rates(config, 4) == pytest.approx([2 * each for each in expected])


def iter_of(batch: Batch) -> Iterator[Batch]:
    yield batch


@pytest.mark.slow
@pytest.mark.skipif(
    "ATEN_CPU_CAPABILITY" in os.environ, reason="torch's compiler computes wrongly where this is forced"
)
@pytest.mark.filterwarnings("default")  # the compiler warns about things of its own
def test_compiling_leaves_the_state_and_computes_the_same():
    torch.manual_seed(0)
    plain, compiled = unet3d(1, 2, (4, 8), 1), unet3d(1, 2, (4, 8), 1)
    compiled.load_state_dict(plain.state_dict())
    image = torch.rand(2, 1, 16, 16, 16)
    config = TrainingConfig(batch_size=2, precision="fp32", compile=True)
    batches: Any = SimpleNamespace(epoch=lambda number: iter_of(Batch(image, image.byte(), ("a", "b"))))
    compile_if_asked(compiled, batches, (1, 1, 16, 16, 16), config, Run(Path(), CPU, Clock(), False))
    assert compiled.training
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert torch.equal(value, compiled.state_dict()[name]), name
    assert all(parameter.grad is None for parameter in compiled.parameters())
    assert torch.allclose(compiled(image), plain(image), atol=1e-5)


@pytest.mark.parametrize(
    ("device", "wish", "taken"), [("cpu", "fused", set()), ("cuda", "fused", {"right"}), ("cuda", "torch", set())]
)
def test_kernels_are_tried_on_a_gpu_only(device, wish, taken, tmp_path):
    asked = []

    def work(name, value):
        asked.append(name)
        return [torch.tensor(value if trust.trusts(name) else 1.0)]

    trials = [trust.Trial(name, partial(work, name, value), 1e-3) for name, value in (("right", 1.0), ("wrong", 2.0))]
    config = TrainingConfig(kernels=wish, store=tmp_path / "store")
    with trust.trusting():
        trust_kernels(trials, config, Run(tmp_path, torch.device(device), Clock(), False))
        assert trust._trusted == taken
    assert bool(asked) == bool(taken)


def test_a_run_takes_two_steps_validates_each_and_ends_what_made_the_others(tmp_path, monkeypatch):
    made, ended = [], []

    def noted(*given):
        batches = tiny_batches(*given)

        def epoch(number, first_step=0):
            try:
                for batch in batches.epoch(number, first_step):
                    made.append(number)
                    yield batch
            finally:
                ended.append(number)

        return replace(batches, epoch=epoch)

    monkeypatch.setattr("tests.common.training.fit_worker.tiny_batches", noted)
    fitted = train({"run": str(tmp_path), "fast_dev_run": True, "epochs": 2, "steps": 50})
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert fitted.steps == 2
    assert [(record["step"], len(record["losses"]), record["dice"]) for record in records] == [(1, 1, 0.5), (2, 1, 0.5)]
    assert (made, ended) == ([0, 1], [0, 1])
