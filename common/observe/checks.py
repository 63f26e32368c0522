"""What of a machine makes training slow, wrong or impossible: looked at before a user has to find out."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Literal

import psutil
import torch
from torch import nn

from common.observe.host_memory import cgroup_free

State = Literal["good", "note", "warning", "error"]

_CUDNN = 91500  # older ones compute bf16 conv3d slowly or wrong (9.8 to 9.14)
_GIB, _MIB = 2**30, 2**20
_LEAST_FREE, _LEAST_MEMORY = 20 * _GIB, 8 * _GIB
_SLOW_DISK = 100.0  # MB/s: below, decoding waits for the disk
_PROBE = 64 * _MIB
_WRONG = 0.05  # of a gradient in bf16; rounding alone gives a tenth of that
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Check:
    """One look at the machine.

    Args:
        name: of what was looked at.
        state: "good"; "note", good to know; "warning", slower than need be; "error", a run would fail or be wrong.
        text: what was found, and the remedy where one is due.
    """

    name: str
    state: State
    text: str


def check_machine(folder: Path, device: torch.device) -> list[Check]:
    """Look at all that a run depends on; takes a few seconds.

    Args:
        folder: where prepared data are kept; it need not exist.
        device: that computes.
    """
    looks: Sequence[Callable[[], Check]] = (
        _torch,
        lambda: _gpu(device),
        lambda: _bf16(device),
        _cores,
        _memory,
        lambda: _space(folder),
        lambda: _disk(folder),
        _slides,
        lambda: _engines(device),
        _shared_memory,
    )
    return [look() for look in looks]


def _torch() -> Check:
    kind = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs alone"
    return Check("torch", "good", f"{torch.__version__}, built {kind}")


def _gpu(device: torch.device) -> Check:
    if device.type != "cuda":
        seen = any(Path(path).exists() for path in ("/dev/nvidia0", "/dev/nvidiactl"))
        if seen:
            return Check("GPU", "warning", "one is there, but torch does not use it: install a torch built for CUDA")
        return Check("GPU", "note", "none: the CPU computes")
    name, memory = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)
    text = f"{name}, {memory[0] / _GIB:.0f} of {memory[1] / _GIB:.0f} GiB free"
    version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    if version is not None and version < _CUDNN:
        return Check("GPU", "warning", f"{text}; cuDNN {version} is slow or wrong in bf16: take {_CUDNN} or newer")
    return Check("GPU", "good", f"{text}, cuDNN {version}")


def _bf16(device: torch.device) -> Check:
    """Compare the gradient of a small convolution in bf16 with that in float32, as a wrong library fails."""
    torch.manual_seed(0)
    image = torch.randn(2, 4, 8, 8, 8, device=device)
    layer = nn.Conv3d(4, 8, 3, padding=1, device=device)
    found = []
    for half in (False, True):
        layer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            output = layer(image)
        torch.autograd.backward(output.float().square().mean())
        assert layer.weight.grad is not None
        found.append(layer.weight.grad.clone())
    difference = float((found[1] - found[0]).abs().max() / found[0].abs().max())
    text = f"conv3d gradients differ from float32 by {difference:.2g} of the largest"
    if not difference <= _WRONG:
        return Check("bf16", "error", f"{text} (bound {_WRONG}): use --precision fp32, or another torch or cuDNN")
    return Check("bf16", "good", text)


def _cores() -> Check:
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota = _quota()
    text = f"{usable} of {there} to use, {torch.get_num_threads()} threads in torch"
    if quota is not None and max(1.0, quota) < torch.get_num_threads():
        fitting = max(1, int(quota))
        return Check("cores", "warning", f"{text}; the container may use {quota:.1f}: set OMP_NUM_THREADS={fitting}")
    return Check("cores", "good", text)


def _quota() -> float | None:
    """Return the cores that the container may use; None where there is no limit."""
    limit = _CGROUP / "cpu.max"
    if not limit.is_file():
        return None
    allowed, _, period = limit.read_text(encoding="utf-8").strip().partition(" ")
    return int(allowed) / int(period) if allowed.isdigit() and period.isdigit() else None


def _memory() -> Check:
    memory, left = psutil.virtual_memory(), cgroup_free()
    free = min([memory.available, *left])
    text = f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB free"
    if free < memory.available:
        text += f"; the container may take {free / _GIB:.1f} GiB more"
    if free < _LEAST_MEMORY:
        return Check("memory", "warning", f"{text}: little; take --cache disk and few --workers")
    return Check("memory", "good", text)


def _space(folder: Path) -> Check:
    existing = _existing(folder)
    free = shutil.disk_usage(existing).free
    text = f"{free / _GIB:.0f} GiB free at {existing}"
    if not os.access(existing, os.W_OK):
        return Check("disk", "error", f"{existing} cannot be written: choose another --store")
    if free < _LEAST_FREE:
        return Check(
            "disk", "warning", f"{text}: little; MSD's brains take 36 GiB once prepared; choose another --store"
        )
    return Check("disk", "good", text)


def _disk(folder: Path) -> Check:
    """Write a file, let the disk have it, and read it back from there where the system allows that."""
    try:
        with tempfile.NamedTemporaryFile(dir=_existing(folder)) as file:
            block = os.urandom(_MIB)
            began = time.perf_counter()
            for _ in range(_PROBE // _MIB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            written = time.perf_counter() - began
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # what memory has of it is not the disk
            file.seek(0)
            began = time.perf_counter()
            while file.read(_MIB):
                pass
            read = time.perf_counter() - began
    except OSError as error:
        return Check("disk speed", "error", f"{folder}: {error.strerror}: choose another --store")
    speeds = {"written": _PROBE / written / 1e6, "read": _PROBE / read / 1e6}
    text = ", ".join(f"{name} at {speed:.0f} MB/s" for name, speed in speeds.items())
    if min(speeds.values()) < _SLOW_DISK:
        return Check("disk speed", "warning", f"{text}: slow; put --store on a local disk")
    return Check("disk speed", "good", text)


def _slides() -> Check:
    readers = [name for name in ("cucim", "openslide", "tifffile") if util.find_spec(name) is not None]
    if not readers:
        return Check("slides", "warning", "no reader: pip install openslide-python openslide-bin tifffile")
    cupy = (
        "cuPy is there" if util.find_spec("cupy") is not None else "without cuPy, so the guide's jitter runs on the CPU"
    )
    return Check("slides", "good", f"read by {', '.join(readers)}; {cupy}")


def _engines(device: torch.device) -> Check:
    there = []
    for package in ("tensorrt", "tensorrt-rtx", "onnxruntime", "onnxruntime-gpu"):
        try:
            there.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    text = ", ".join(there) or "none"
    if device.type == "cuda" and not any(name.startswith("tensorrt") for name in there):
        return Check("engines", "warning", f"{text}: no TensorRT; pip install -e '.[trt]'")
    return Check("engines", "good" if there else "warning", text)


def _shared_memory() -> Check:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Check("shared memory", "note", "there is none: loader processes may be slow")
    size = shutil.disk_usage(folder).total
    text = f"{size / _GIB:.1f} GiB at {folder}"
    if size < _GIB:
        return Check("shared memory", "warning", f"{text}: loader processes may die; docker run --shm-size 8g")
    return Check("shared memory", "good", text)


def _existing(folder: Path) -> Path:
    return next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
