"""What of a machine makes training slow, wrong or impossible: looked at before a user has to find out."""

import os
import shutil
import tempfile
import time
from importlib import metadata, util
from pathlib import Path
from typing import Literal, NamedTuple

import psutil
import torch
from torch import nn

from medspeed.common.host_memory import cgroup_free

_CUDNN = 91500  # older ones compute bf16 conv3d slowly or wrong (9.8 to 9.14)
_GIB, _MIB = 2**30, 2**20
_LEAST_FREE, _LEAST_MEMORY = 20 * _GIB, 8 * _GIB
_SLOW_DISK = 100.0  # MB/s: below, decoding waits for the disk
_PROBE = 64  # MiB that are written and read
_WRONG = 0.05  # of a gradient in bf16; rounding alone gives a tenth of that
_CGROUP = Path("/sys/fs/cgroup")


class Check(NamedTuple):
    """One look at the machine.

    Attributes:
        name: of what was looked at.
        state: "good"; "note", good to know; "warning", slower than need be; "error", a run would fail or be wrong.
        text: what was found, and the remedy where one is due.
    """

    name: str
    state: Literal["good", "note", "warning", "error"]
    text: str


def check_machine(folder: Path, device: torch.device) -> list[Check]:
    """Look at all that a run depends on, for a few seconds; `folder`, for prepared data, need not exist."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    kind = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPU only"
    return [
        Check("torch", "good", f"{torch.__version__}, built {kind}"),
        _gpu(device),
        _bf16(device),
        _cores(),
        _memory(),
        _space(existing),
        _disk(existing),
        _slides(),
        _engines(device),
        _shared_memory(),
    ]


def _gpu(device: torch.device) -> Check:
    if device.type != "cuda":
        if any(Path(path).exists() for path in ("/dev/nvidia0", "/dev/nvidiactl")):
            return Check("GPU", "warning", "found, but torch cannot use it: install a torch built for CUDA")
        return Check("GPU", "note", "none found: computing on the CPU")
    name, memory = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)
    text = f"{name}, {memory[0] / _GIB:.0f} of {memory[1] / _GIB:.0f} GiB free"
    version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    if version is not None and version < _CUDNN:
        return Check("GPU", "warning", f"{text}; cuDNN {version} is slow or wrong in bf16: use {_CUDNN} or newer")
    return Check("GPU", "good", f"{text}, cuDNN {version}")


def _bf16(device: torch.device) -> Check:
    """Compare the gradient of a small convolution in bf16 with that in float32, as a wrong library fails."""
    torch.manual_seed(0)
    image = torch.randn(2, 4, 8, 8, 8, device=device)
    layer = nn.Conv3d(4, 8, 3, padding=1, device=device)
    gradients: list[torch.Tensor] = []
    for half in (False, True):
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            output = layer(image)
        gradients += torch.autograd.grad(output.float().square().mean(), layer.weight)
    difference = float((gradients[1] - gradients[0]).abs().max() / gradients[0].abs().max())
    text = f"conv3d gradients differ from float32 by {difference:.2g} of the largest gradient"
    if not difference <= _WRONG:
        return Check("bf16", "error", f"{text} (bound {_WRONG}): use --precision fp32, or another torch or cuDNN")
    return Check("bf16", "good", text)


def _cores() -> Check:
    text = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} usable, threads in torch: {torch.get_num_threads()}"
    limit = _CGROUP / "cpu.max"
    allowed, _, period = (limit.read_text(encoding="utf-8") if limit.is_file() else "max").strip().partition(" ")
    if allowed.isdigit() and period.isdigit():
        quota = int(allowed) / int(period)
        if max(1.0, quota) < torch.get_num_threads():
            remedy = f"set OMP_NUM_THREADS={max(1, int(quota))}"
            return Check("cores", "warning", f"{text}; the container is limited to {quota:.1f}: {remedy}")
    return Check("cores", "good", text)


def _memory() -> Check:
    memory = psutil.virtual_memory()
    free = min([memory.available, *cgroup_free()])
    text = f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB free"
    if free < memory.available:
        text += f"; the container may use {free / _GIB:.1f} GiB more"
    if free < _LEAST_MEMORY:
        return Check("memory", "warning", f"{text}: low; use --cache disk and fewer --workers")
    return Check("memory", "good", text)


def _space(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free
    text = f"{free / _GIB:.0f} GiB free at {folder}"
    if not os.access(folder, os.W_OK):
        return Check("disk", "error", f"{folder} cannot be written: choose another --store")
    if free < _LEAST_FREE:
        little = "low (prepared MSD brain data need 36 GiB); choose another --store"
        return Check("disk", "warning", f"{text}: {little}")
    return Check("disk", "good", text)


def _disk(folder: Path) -> Check:
    """Write a file, let the disk have it, and read it back from there where the system allows that."""
    block = os.urandom(_MIB)
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            began = time.perf_counter()
            for _ in range(_PROBE):
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
    speeds = [_PROBE * _MIB / seconds / 1e6 for seconds in (written, read)]
    text = f"write {speeds[0]:.0f} MB/s, read {speeds[1]:.0f} MB/s"
    if min(speeds) < _SLOW_DISK:
        return Check("disk speed", "warning", f"{text}: slow; put --store on a local disk")
    return Check("disk speed", "good", text)


def _slides() -> Check:
    readers = [name for name in ("cucim", "openslide", "tifffile") if util.find_spec(name) is not None]
    if not readers:
        return Check("slides", "warning", "no slide reader: pip install openslide-python openslide-bin tifffile")
    cupy = "cuPy installed" if util.find_spec("cupy") else "no cuPy: the color jitter of recipe guide runs on the CPU"
    return Check("slides", "good", f"readers: {', '.join(readers)}; {cupy}")


def _engines(device: torch.device) -> Check:
    packages = {distribution.name: distribution.version for distribution in metadata.distributions()}
    wanted = ("tensorrt", "tensorrt-rtx", "onnxruntime", "onnxruntime-gpu")
    there = [f"{name} {packages[name]}" for name in wanted if name in packages]
    text = ", ".join(there) or "none"
    if device.type == "cuda" and not any(name.startswith("tensorrt") for name in there):
        return Check("engines", "warning", f"{text}: no TensorRT; pip install -e '.[trt]'")
    return Check("engines", "good" if there else "warning", text)


def _shared_memory() -> Check:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Check("shared memory", "note", "none: loader processes may be slow")
    size = shutil.disk_usage(folder).total
    text = f"{size / _GIB:.1f} GiB at {folder}"
    if size < _GIB:
        return Check("shared memory", "warning", f"{text}: loader processes may crash; docker run --shm-size 8g")
    return Check("shared memory", "good", text)
