"""What tests of Triton kernels share: to interpret them on the CPU, and to compile them for GPUs that are not here."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
CAPABILITIES = (80, 90, 100, 120)


def run_interpreted(*checks: str) -> None:
    """Run files of tests with Triton's interpreter, in their own process: it must be chosen before Triton loads."""
    pytest.importorskip("triton", reason="no Triton: pip install triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *checks]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def check_compiled(kernel: Any, arguments: dict[str, str], constants: dict[str, Any], capability: int) -> None:
    """Compile a kernel for a GPU of this capability, and check that it keeps what it computes in registers.

    Args:
        kernel: what `triton.jit` made.
        arguments: Triton's type of each argument, "*fp32" or "i32".
        constants: values of the others.
        capability: 90 is 9.0.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: arguments.get(name, "constexpr") for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Triton 3.9 announces what 3.10 will change
        ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    assert not re.search(r"\.local|ld\.local|st\.local", ptx)
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target
    assert target[1].startswith(f"sm_{capability}")
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas-blackwell"  # the newer of the two
    if not ptxas.is_file():
        ptxas = ptxas.with_name("ptxas")
    words = [str(ptxas), "-v", f"--gpu-name={target[1]}", "-o", os.devnull, "-"]
    told = subprocess.run(words, input=ptx, capture_output=True, text=True, check=False)
    if told.returncode and "input" in told.stderr:  # one that reads no standard input
        pytest.skip(f"ptxas: {told.stderr[:200]}")
    assert told.returncode == 0, told.stderr
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in told.stderr
