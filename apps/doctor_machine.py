"""What of a machine makes training slow, wrong or impossible: looked at before a user has to find out."""

import math
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

from medspeed.common.clock import seconds_of
from medspeed.common.host_memory import cgroup_free

_CUDNN = 91500  # older ones compute bf16 conv3d slowly or wrong (9.8 to 9.14)
_GIB = 2**30
_LEAST_FREE, _LEAST_MEMORY = 20 * _GIB, 8 * _GIB
_SLOW_DISK = 100.0  # MB/s: below, decoding waits for the disk
_PROBE = 2**26  # bytes that are written and read
_WRONG = 0.05  # of a gradient in bf16; rounding alone gives a tenth of that
_CGROUP = Path("/sys/fs/cgroup")


class Check(NamedTuple):
    """One look at the machine: what was found, and the remedy where one is due."""

    name: str
    state: Literal["good", "note", "warning", "error"]  # slower than need be; a run would fail, or be wrong
    text: str


def _judged(name: str, found: str, bad: bool, remedy: str, state: Literal["warning", "error"] = "warning") -> Check:
    return Check(name, state, found + remedy) if bad else Check(name, "good", found)


def check_machine(folder: Path, device: torch.device) -> list[Check]:
    """Look at all that a run depends on, for a few seconds; `folder`, for prepared data, need not exist."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    made = f"{torch.__version__}, built for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPU only'}"
    of_device = [Check("torch", "good", made), _gpu(device), _bf16(device), _cores(), _memory()]
    return [*of_device, _disk(existing), _slides(), _engines(device)]


def _gpu(device: torch.device) -> Check:
    if device.type != "cuda":
        if any(Path(path).exists() for path in ("/dev/nvidia0", "/dev/nvidiactl")):
            return Check("GPU", "warning", "found, but torch cannot use it: install a torch built for CUDA")
        return Check("GPU", "note", "none found: computing on the CPU")
    free, total = torch.cuda.mem_get_info(device)
    version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    text = f"{torch.cuda.get_device_name(device)}, {free / _GIB:.0f} of {total / _GIB:.0f} GiB free, cuDNN {version}"
    remedy = f" is slow or wrong in bf16: use {_CUDNN} or newer"
    return _judged("GPU", text, version is not None and version < _CUDNN, remedy)


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
    remedy = f" (bound {_WRONG}): use --precision fp32, or another torch or cuDNN"
    return _judged("bf16", text, not difference <= _WRONG, remedy, "error")


def _cores() -> Check:
    usable = len(os.sched_getaffinity(0))
    text = f"{usable} of {os.cpu_count()} usable, threads in torch: {torch.get_num_threads()}"
    limit = _CGROUP / "cpu.max"
    allowed, _, period = (limit.read_text(encoding="utf-8") if limit.is_file() else "max").strip().partition(" ")
    quota = min(usable, int(allowed) / int(period) if allowed.isdigit() and period.isdigit() else usable)
    threads = max(1, math.floor(min(quota, torch.get_num_threads())))
    remedy = f"; this process may use {quota:.3g} of them: set OMP_NUM_THREADS={threads}"
    return _judged("cores", text, max(1.0, quota) < torch.get_num_threads(), remedy)


def _memory() -> Check:
    memory = psutil.virtual_memory()
    free = min([memory.available, *cgroup_free()])
    text = f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB free"
    if free < memory.available:
        text += f"; the container may use {free / _GIB:.1f} GiB more"
    return _judged("memory", text, free < _LEAST_MEMORY, ": low; use fewer --workers and, for volumes, --cache disk")


def _disk(folder: Path) -> Check:
    """Write a file, let the disk have it, and read it back from there where the system allows that."""
    content, free = os.urandom(_PROBE), shutil.disk_usage(folder).free
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            began = time.perf_counter()
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            written = time.perf_counter() - began
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # what memory has of it is not the disk
            file.seek(0)
            read = seconds_of(file.read)
    except OSError as error:
        return Check("disk", "error", f"{folder}: {error.strerror}: choose another --store")
    speeds = [_PROBE / seconds / 1e6 for seconds in (written, read)]
    text = f"{free / _GIB:.0f} GiB free at {folder}, write {speeds[0]:.0f} MB/s, read {speeds[1]:.0f} MB/s"
    little = ": low (prepared MSD brain data need 36 GiB)" if free < _LEAST_FREE else ""
    slow = ": slow" if min(speeds) < _SLOW_DISK else ""
    return _judged("disk", text, bool(little or slow), f"{little}{slow}; put --store on another, local disk")


def _slides() -> Check:
    readers = ", ".join(name for name in ("cucim", "openslide", "tifffile") if util.find_spec(name))
    cupy = "CuPy installed" if util.find_spec("cupy") else "no CuPy: the color jitter of recipe guide runs on the CPU"
    remedy = "; no slide reader: pip install openslide-python openslide-bin tifffile"
    return _judged("slides", f"readers: {readers or 'none'}; {cupy}", not readers, remedy)


def _engines(device: torch.device) -> Check:
    wanted = ("tensorrt", "tensorrt-rtx", "onnxruntime", "onnxruntime-gpu")
    found = [next(iter(metadata.distributions(name=name)), None) for name in wanted]
    text = ", ".join(f"{each.name} {each.version}" for each in found if each) or "none"
    lacks = device.type == "cuda" and "tensorrt" not in text
    remedy = ": no TensorRT; pip install -e '.[trt]'" if lacks else ""
    return _judged("engines", text, lacks or text == "none", remedy)
