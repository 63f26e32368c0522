import os
import shutil
from collections import namedtuple

import psutil
import pytest
import torch
from torch import nn

from medspeed.apps import doctor_machine
from medspeed.apps.doctor_machine import check_machine

CPU = torch.device("cpu")
GIB = 2**30
Usage = namedtuple("Usage", "total used free")
Memory = namedtuple("Memory", "total available")


def found(tmp_path, name):
    return next(check for check in check_machine(tmp_path / "store", CPU) if check.name == name)


def test_every_look_has_a_name_of_its_own_and_says_something(tmp_path):
    made = check_machine(tmp_path / "store", CPU)
    assert len({check.name for check in made}) == len(made) == 8
    assert all(check.text for check in made)
    assert not (tmp_path / "store").exists()
    assert not list(tmp_path.iterdir())  # nor is anything left behind


def test_wrong_bf16_gradients_are_an_error(tmp_path, monkeypatch):
    assert found(tmp_path, "bf16").state == "good"

    class Wrong(nn.Conv3d):
        def forward(self, image):
            factor = 1.2 if torch.is_autocast_enabled("cpu") else 1.0
            return super().forward(image) * factor

    monkeypatch.setattr(nn, "Conv3d", Wrong)
    check = found(tmp_path, "bf16")
    assert check.state == "error"
    assert "--precision fp32" in check.text


@pytest.mark.parametrize(
    ("content", "usable", "threads", "advice"),
    [
        ("50000 100000", 8, 2, "OMP_NUM_THREADS=1"),
        ("250000 100000", 8, 4, "OMP_NUM_THREADS=2"),
        ("250000 100000", 8, 2, ""),  # the advice was followed
        ("max 100000", 8, 4, ""),
        ("max 100000", 3, 4, "OMP_NUM_THREADS=3"),  # as SLURM and taskset give them
    ],
)
def test_a_share_of_the_cores_is_told(content, usable, threads, advice, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(usable)))
    (tmp_path / "cpu.max").write_text(content + "\n")
    monkeypatch.setattr(doctor_machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    check = found(tmp_path, "cores")
    assert check.state == ("warning" if advice else "good")
    assert check.text.endswith(advice)


def test_what_a_container_leaves_is_what_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor_machine, "cgroup_free", lambda: [3 * GIB, 2 * GIB])
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(64 * GIB, 60 * GIB))
    check = found(tmp_path, "memory")
    assert check.state == "warning"
    assert "may use 2.0 GiB more" in check.text


@pytest.mark.parametrize(("free", "state"), [(5 * GIB, "warning"), (500 * GIB, "good")])
def test_little_space_is_told(free, state, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1000 * GIB, 0, free))
    monkeypatch.setattr(doctor_machine, "_SLOW_DISK", 0.0)  # as this one may be, beside other work
    assert found(tmp_path, "disk").state == state


def test_a_disk_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    check = found(tmp_path, "disk")
    assert check.state == "error"
    assert "No space left on device" in check.text


def test_a_slow_disk_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor_machine, "_SLOW_DISK", 1e9)
    assert found(tmp_path, "disk").state == "warning"
