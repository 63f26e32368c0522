"""The shim that lets a CPU build of torch take tensors on cuda:0: built at need, loaded before torch."""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

from medspeed.common.files import atomic_path

_SOURCE = Path(__file__).with_name("shim.cpp")
_TORCH = Path(str(distribution("torch").locate_file("torch")))  # its folder; it is not loaded


def why_not() -> str | None:
    """Return why there can be no shim here: no compiler, or a torch that has CUDA itself; None where there can."""
    version = (_TORCH / "version.py").read_text(encoding="utf-8")
    if re.search(r"^cuda\b.*= None$", version, re.MULTILINE) is None:
        return "torch is built for CUDA; the fake device needs the CPU build"
    if find_spec("triton") is None:
        return "no Triton, whose operators are counted: pip install triton"
    return None if _compiler() else "no C++ compiler: install g++, or name one in the variable CXX"


def load(source: Path = _SOURCE) -> None:
    """Build the shim, unless it lies in the cache, and load it; a RuntimeError says why there can be none."""
    assert "torch" not in sys.modules, "torch looks for CUDA once, when it is loaded"
    if reason := why_not():
        raise RuntimeError(f"fake CUDA: {reason}")
    for library in (_TORCH / "lib" / "libc10.so", _TORCH / "lib" / "libtorch_cpu.so", _build(source)):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _build(source: Path) -> Path:
    made_of = (source, _SOURCE, _TORCH / "version.py")  # the second is part of the others
    key = hashlib.sha256(b"".join(path.read_bytes() for path in made_of)).hexdigest()[:16]
    path = Path("~/.cache/medspeed/fake_cuda").expanduser() / f"shim-{key}.so"
    if path.is_file():
        return path
    with atomic_path(path) as part:  # several processes may build it at once
        words = ["-std=c++20", "-O1", "-shared", "-fPIC", f"-I{_TORCH / 'include'}", str(source)]
        command = [_compiler(), *words, f"-L{_TORCH / 'lib'}", "-lc10", "-ltorch_cpu", "-o", str(part)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"fake CUDA: {' '.join(command)}: {done.stderr.strip()[:2000]}")
    return path


def _compiler() -> str:
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or ""
