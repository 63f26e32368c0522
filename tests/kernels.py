"""What tests of Triton kernels share: to interpret them on the CPU, and to compile them for GPUs that are not here."""

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

ROOT = Path(__file__).parents[1]
CAPABILITIES = (80, 90, 100, 120)


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> None:
    """Let Triton's interpreter leave out its checks of sums for overflow, whose answers it drops."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        try:
            from triton.runtime import interpreter
        except ModuleNotFoundError:  # most tests of the kernels' twins need none
            return
        builder = interpreter.interpreter_builder
        builder.options = replace(builder.options, sanitize_overflow=False)


def run_interpreted(*checks: str) -> None:
    """Run files of tests with Triton's interpreter, in their own process: it must be chosen before Triton loads."""
    _run(checks, "1")


def run_compiled(*checks: str) -> None:
    """Run files of tests that compile kernels, in their own process: without a GPU this one interprets them."""
    _run(checks, "0")


def _run(checks: Sequence[str], interpret: str) -> None:
    pytest.importorskip("triton", reason="no Triton: pip install triton")
    environment = {**os.environ, "TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "tests.kernels", *checks]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout, done.stdout[-1000:]


class _Driver:
    """Stands for the driver of a GPU of one capability, 90 for 9.0; each has its own number as a device."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiled_not_launched(capability: int) -> Iterator[list[Any]]:
    """Let kernels that are launched be compiled only, as a GPU of this capability would have it; yield them."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    kernels: list[Any] = []
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernels.append(launch(self, *args, grid=grid, warmup=True, **kwargs))

    before = driver._active
    driver.set_active(_Driver(capability))
    try:
        with mock.patch.object(JITFunction, "run", compile_only), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Triton 3.9 announces what 3.10 will change
            yield kernels
    finally:
        driver._active = before
    assert kernels
    for kernel in kernels:
        assert_in_registers(kernel.asm["ptx"], capability)


def assert_in_registers(ptx: str, capability: int) -> None:
    """Check that a compiled kernel keeps what it computes in registers, as its PTX and ptxas say it."""
    from triton import backends

    assert not re.search(r"\.local|ld\.local|st\.local", ptx)
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target
    assert target[1].startswith(f"sm_{capability}")
    tools = Path(backends.__file__).parent / "nvidia" / "bin"
    ptxas = max(tools.glob("ptxas*"), key=lambda path: path.name)  # ptxas-blackwell is the newer of the two
    words = [str(ptxas), "-v", f"--gpu-name={target[1]}", "-o", os.devnull, "/dev/stdin"]
    told = subprocess.run(words, input=ptx, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in told.stderr, told.stderr
