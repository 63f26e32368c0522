"""Freed memory is kept: counted in page faults, in a process of its own."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from medspeed.common import host_memory
from medspeed.common.host_memory import cgroup_free, free_memory

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only the GNU C library keeps memory")

FAULTS = """
import resource
from medspeed.common.host_memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        bytearray(2**26)  # of malloc, as torch's memory is, and filled
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given_back = faults()
keep_freed_memory()
faults()
print(faults(), given_back)
"""


def test_kept_memory_costs_no_page_faults():
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    kept, given_back = map(int, done.stdout.split())
    assert kept < given_back / 10


GIVEN_BACK = """
import psutil
from medspeed.common.host_memory import free_memory, keep_freed_memory

def resident():
    return psutil.Process().memory_info().rss / 2**20

keep_freed_memory()
begin = resident()
below, above = bytearray(2**28), bytearray(2**20)  # 256 MiB, under a little that stays
del below
kept = resident()
free_memory(2**62)
print(kept - begin, resident() - begin, len(above))
"""


def test_kept_memory_is_given_back_when_asked_even_under_what_stays():
    done = subprocess.run([sys.executable, "-c", GIVEN_BACK], capture_output=True, text=True, check=True)
    kept, left, above = map(float, done.stdout.split())
    assert above == 2**20
    assert kept > 200
    assert left < 50


def write(folder: Path, **contents: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_limits_of_control_groups_version_2(tmp_path):
    write(tmp_path, membership="0::/pod/box")
    root = tmp_path / "cgroup"
    write(root / "pod/box", memory__max="max", memory__current=500)
    write(root / "pod", memory__max=1000, memory__current=700, memory__stat="anon 400\ninactive_file 200")
    assert cgroup_free(root, tmp_path / "membership") == [500]
    write(root / "pod/box", memory__max=600)
    assert cgroup_free(root, tmp_path / "membership") == [100, 500]


def test_limits_of_control_groups_version_1(tmp_path):
    write(tmp_path, membership="5:devices:/\n4:cpu,memory:/box\n0::/")
    root = tmp_path / "cgroup"
    write(root / "memory", memory__limit_in_bytes=5000, memory__usage_in_bytes=4000)  # the box itself is not mounted
    assert cgroup_free(root, tmp_path / "membership") == [1000]


def test_no_control_groups_no_limits(tmp_path):
    assert cgroup_free(tmp_path, tmp_path / "missing") == []


def test_what_is_free_is_what_the_tightest_limit_leaves(monkeypatch):
    monkeypatch.setattr(host_memory, "cgroup_free", lambda: [3 * 2**20, 5 * 2**20])
    assert free_memory() == 3 * 2**20


LIMITED = """
import resource
import psutil
from medspeed.common.host_memory import free_memory

taken = psutil.Process().memory_info().vms
resource.setrlimit(resource.RLIMIT_AS, (taken + 2**25, resource.RLIM_INFINITY))
print(free_memory() / 2**20)
"""


def test_a_limit_on_the_process_counts():
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True)
    assert 24 < float(done.stdout) <= 32
