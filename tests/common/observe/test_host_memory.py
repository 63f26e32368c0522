"""Freed memory is kept, and given back where asked: counted in page faults."""

import platform
import resource

import pytest
import torch

from common.observe.host_memory import keep_freed_memory

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only the GNU C library keeps memory")


def faults() -> int:
    """Return the page faults of making and freeing 64 MiB ten times."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.empty(2**24).fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_kept_memory_costs_no_page_faults():
    try:
        assert keep_freed_memory(True)
        faults()
        kept = faults()
        assert keep_freed_memory(False)
        faults()
        given_back = faults()
    finally:
        keep_freed_memory(False)
    assert kept < given_back / 10
