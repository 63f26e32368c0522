"""Memory of the host: what a step frees is kept for the next one, which spares the operating system's page faults."""

import ctypes
import resource
import sys
from pathlib import Path

import psutil

# mallopt's parameters (malloc.h of the GNU C library).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_NEVER_TRIM = 2**31 - 1
_GROW_BY = 2**28
_MMAP_MAX_DEFAULT, _TRIM_DEFAULT, _PAD_DEFAULT = 65536, 128 * 1024, 128 * 1024


def keep_freed_memory(keep: bool = True) -> bool:
    """Let the C library keep freed memory instead of giving it back; return whether it could.

    By default each large tensor is mapped anew from the operating system, which fills it with zeros page by page when
    it is first touched: a fifth to a third of a SegResNet's training step on two CPU cores. With this, a process never
    shrinks below its peak. Only the GNU C library knows it; elsewhere nothing happens.

    Args:
        keep: False goes back to the library's defaults.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    values = {
        _M_MMAP_MAX: 0 if keep else _MMAP_MAX_DEFAULT,
        _M_TRIM_THRESHOLD: _NEVER_TRIM if keep else _TRIM_DEFAULT,
        _M_TOP_PAD: _GROW_BY if keep else _PAD_DEFAULT,
    }
    return all(mallopt(name, value) == 1 for name, value in values.items())


def peak_memory() -> int:
    """Return the most memory that this process has had at once, bytes (its resident set).

    Linux hands getrusage's figure on to children, which would begin with the peak of the process that started them.
    """
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.is_file() else ():  # a sandbox may leave VmHWM out
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def free_memory() -> int:
    """Return the bytes that this process may still take: of the machine, and of a container around it."""
    return min([psutil.virtual_memory().available, *cgroup_free()])


def cgroup_free(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Return the bytes that each memory limit on this process, or on a container around it, leaves; v2 and v1.

    Cached file pages count as used there, but give way when memory is needed.
    """
    if not membership.is_file():
        return []
    free = []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names, page_cache = root, ("memory.max", "memory.current"), "inactive_file"
        elif "memory" in controllers.split(","):
            top, page_cache = root / "memory", "total_inactive_file"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = top / path.lstrip("/")
        for group in (folder, *folder.parents):
            free += _left_in(group, names, page_cache)
            if group == top:
                break
    return free


def _left_in(group: Path, names: tuple[str, str], page_cache: str) -> list[int]:
    limit, used = (group / name for name in names)
    if not (limit.is_file() and used.is_file()):
        return []
    most = limit.read_text().strip()
    if most == "max":
        return []
    statistics = group / "memory.stat"
    lines = statistics.read_text().splitlines() if statistics.is_file() else []
    cached = next((int(line.split()[1]) for line in lines if line.split()[0] == page_cache), 0)
    return [max(0, int(most) - int(used.read_text()) + cached)]
