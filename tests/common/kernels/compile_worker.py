"""Compile Triton kernels for a GPU that is not there, and tell of each what the assembler found."""

import itertools
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from medspeed.common.kernels import norms_triton
from medspeed.common.kernels.norm_operators import STAGES, TILE

_HALVES = (
    "x",
    "y",
    "result",
    "gradient",
    "second",
    "third",
    "joined",
    "dx",
    "residual",
    "residual_bias",
    "dresidual_bias",
    "beside",
)
_OPTIONAL = (
    *("slope", "residual", "residual_bias", "running_mean", "running_var", "steps_seen", "shift"),
    *("second", "third", "result", "joined", "beside", "dslope", "dresidual_bias"),
)
_INTEGERS = ("rows", "tiles", "parts", "part_rows")
_NUMBERS = ("epsilon", "momentum")
_SHARED = 101_376  # bytes of a block on an RTX 30, 40 or 50, the least of all
CASES = ((16, 8, "relu"), (128, 8, "relu"), (16, 16, "prelu"), (256, 256, "prelu"), (512, 512, "sum_relu"))


def jobs() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield each kernel with its constants: of few channels and of many, of groups and of batches."""
    names = ("sums_kernel", "apply_kernel", "gradient_sums_kernel", "gradient_kernel")
    for kernel in (getattr(norms_triton, name) for name in names):
        for channels, groups, kind in CASES:
            several, size = groups == channels, channels // groups
            absent: dict[str, Any] = {} if several else dict.fromkeys(_OPTIONAL)
            strides = {
                "FIRST": channels,
                "ROW": channels * (1 + several),
                **dict.fromkeys(("RESIDUAL", "SECOND", "THIRD"), 2 * channels * several),
            }
            sizes = {"C": channels, "GS": size, "BG": groups, "BS": size, "BLOCK": TILE // channels}
            yield kernel, {**absent, **strides, **sizes, "PARTS": TILE // channels, "KIND": kind}


def compiled(kernel: Any, constants: dict[str, Any], capability: int, dtype: str) -> tuple[str, bool]:
    """Return the PTX of a kernel for tensors that begin at multiples of 16 bytes, and whether its memory fits."""
    kinds = dict.fromkeys(_HALVES, f"*{dtype}") | {"steps_seen": "*i64"}
    constants = {**constants, "STAGES": STAGES if dtype == "bf16" else 2}
    kinds |= dict.fromkeys(_INTEGERS, "i32") | dict.fromkeys(_NUMBERS, "fp32") | dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "*fp32") for name in kernel.arg_names}
    known = {(kernel.arg_names.index(name),): value for name, value in constants.items() if name in signature}
    aligned = {
        (number,): [["tt.divisibility", 16]] for number, kind in enumerate(signature.values()) if kind.startswith("*")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=known, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
    return str(made.asm["ptx"]), made.metadata.shared <= _SHARED


def assembled(ptx: str, capability: int) -> str:
    """Return what ptxas says of its memory."""
    found = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert found, ptx[:300]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={found[1]}", file.name, "-o", "/dev/null"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def main(*capabilities: int) -> None:
    """Print a line for each kernel."""
    warnings.simplefilter("ignore")
    for capability, (kernel, constants), dtype in itertools.product(capabilities, [*jobs()], ("bf16", "fp32")):
        ptx, fits = compiled(kernel, constants, capability, dtype)
        spilled = sum(map(int, re.findall(r"(\d+) bytes (?:stack frame|spill)", assembled(ptx, capability))))
        atomics = len(re.findall(r"^\s*(?:@\S+ )?(?:atom|red)\.", ptx, re.MULTILINE))
        found = f"fits {fits} local {ptx.count('.local')} spilled {spilled} atomics {atomics}"
        sys.stdout.write(f"{capability} {kernel.__name__} {constants['C']} {dtype}: {found}\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
