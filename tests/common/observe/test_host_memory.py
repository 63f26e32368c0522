"""Freed memory is kept, and given back where asked: counted in page faults, in a process of its own."""

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only the GNU C library keeps memory")

FAULTS = """
import resource
import torch
from common.observe.host_memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.empty(2**24).fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given_back = faults()
assert keep_freed_memory(True)
faults()
print(faults(), given_back)
assert keep_freed_memory(False)
"""


def test_kept_memory_costs_no_page_faults():
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    kept, given_back = map(int, done.stdout.split())
    assert kept < given_back / 10


CHILD = """
from common.observe.host_memory import peak_memory

before = peak_memory()
held = bytearray(2**28)
print(before, peak_memory() - before)
"""
PARENT = f"""
import subprocess, sys

held = bytearray(2**29)
del held
subprocess.run([sys.executable, "-c", {CHILD!r}], check=True)
"""


def test_the_peak_is_the_process_s_own_and_counts_what_it_takes():
    done = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, check=True)
    before, more = map(int, done.stdout.split())
    assert 2**22 < before < 2**28
    assert 0.9 * 2**28 < more < 2**29
