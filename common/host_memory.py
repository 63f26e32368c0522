"""Memory of the host: what this process may still take, and whether it keeps what it freed."""

import ctypes
import re
import resource
from contextlib import suppress
from pathlib import Path

import psutil

# What keeps freed memory, by mallopt's parameters (malloc.h of the GNU C library): M_MMAP_MAX, no memory maps;
# M_TRIM_THRESHOLD, no trimming; and M_TOP_PAD, growth in large pieces.
_KEEP = {-4: 0, -1: 2**31 - 1, -2: 2**28}
# Of control groups, version 2 and 1: folder, limit, use, and the part of the use that gives way.
_CGROUPS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def keep_freed_memory() -> None:
    """Let the GNU C library, where it is there, keep freed memory instead of giving it back.

    Else each large tensor is mapped anew, and filled with zeros page by page when it is first touched: a fifth to a
    third of a SegResNet's training step on two CPU cores. A process then never shrinks below its peak.
    """
    with suppress(OSError, AttributeError):
        for setting in _KEEP.items():
            ctypes.CDLL(None).mallopt(*setting)


def free_memory(wanted: float = 0) -> int:
    """Return the bytes that this process may still take; where more are wanted, first give back what it freed."""
    # Of the machine, a container around it, and `ulimit -v`.
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    limited = [] if limit == resource.RLIM_INFINITY else [max(0, limit - psutil.Process().memory_info().vms)]
    free = min([psutil.virtual_memory().available, *cgroup_free(), *limited])
    if free >= wanted:
        return free
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return free_memory()


def cgroup_free(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Return the bytes that each memory limit on this process, or on a container around it, leaves; v2 and v1.

    Cached file pages count as used there, but give way when memory is needed.
    """
    free = []
    for line in membership.read_text().splitlines() if membership.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        folder, *names, pages = _CGROUPS[1 if controllers else 0]
        top = root / folder
        own = top / path.lstrip("/")
        for group in (each for each in (own, *own.parents) if each.is_relative_to(top)):
            files = [group / name for name in (*names, "memory.stat")]
            limit, used, statistics = (file.read_text() if file.is_file() else "" for file in files)
            if used and limit.strip().isdigit():
                cached = re.search(rf"^{pages} (\d+)", statistics, re.MULTILINE)
                free.append(max(0, int(limit) - int(used) + int(cached[1] if cached else 0)))
    return free
