import os
import subprocess
import sys
from pathlib import Path

import pytest

from medspeed.benchmarks.fake_cuda import shim
from medspeed.benchmarks.fake_cuda.costs import Kernel
from medspeed.benchmarks.fake_cuda.device import Layout, Operator
from medspeed.benchmarks.floor import GPUS, Gpu, compiled, estimate, seconds

ROOT = Path(__file__).parents[2]
GPU = Gpu(flops=100e12, bandwidth=1e12)
WIDE = Layout((1, 1000, 1000), (1_000_000, 1000, 1), "float32", "cuda")  # 4 MB
HALF = WIDE._replace(dtype="bfloat16")  # 2 MB


def operator(name: str, inputs: list[Layout], outputs: list[Layout]) -> Operator:
    return Operator(name, "train", tuple(inputs), tuple(outputs), (), "", 0)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (Kernel("pointwise", 8_000_000), 8e6 / (0.8 * 1e12)),
        (Kernel("layout", 9_000_000), 9e6 / (0.45 * 1e12)),
        (Kernel("pointwise", 1000), 2.2e-6),  # no kernel takes less
        (Kernel("convolution", 1000, 10**9, 64 * 64), 1e9 / (0.55 * 100e12)),  # bound by its products
        (Kernel("convolution", 1000, 10**9, 4 * 5), 100 * 1e9 / (0.55 * 100e12)),  # of few channels
        (Kernel("convolution", 75_000_000, 10**9), 75e6 / (0.75 * 1e12)),  # by its memory
    ],
)
def test_a_kernels_seconds_by_hand(kernel, expected):
    assert seconds(kernel, GPU) == pytest.approx(expected)


def test_a_step_takes_as_long_as_the_slower_of_device_and_host():
    """Two operators of which one is a convolution: 2 x 9 + 20 us of the host; the device 10 and 20 us."""
    launched = [[Kernel("pointwise", 8_000_000)], [Kernel("convolution", 0, 11 * 10**8)], []]
    found = estimate(launched, GPU)
    assert (found.kernels, found.bytes) == (2, 8_000_000)
    assert (found.device, found.host) == pytest.approx((30e-6, 38e-6))
    captured = estimate(launched, GPU, graph=True)
    assert captured.host == pytest.approx(20e-6)


def test_a_compiler_lets_an_operator_join_the_one_before_it():
    """The second reads 2 MB from registers, and the third, a sum, likewise: 4 + 2, + 4 + 2 - 2, + 4 - 4 of 4 MB."""
    cast = operator("_to_copy", [WIDE], [HALF])
    back = operator("_to_copy", [HALF], [WIDE])
    summed = operator("sum", [WIDE], [WIDE._replace(shape=(1,), strides=(1,))])
    found = compiled([cast, back, summed])
    assert [kernel for each in found for kernel in each] == [Kernel("pointwise", 6_000_000 + 4_000_000 + 4)]


def test_a_compiler_joins_nothing_across_another_tensor_or_a_convolution():
    cast, other = operator("_to_copy", [WIDE], [HALF]), operator("exp", [WIDE], [WIDE])
    assert len(compiled([cast, other])) == 2
    weight = Layout((8, 8, 1, 1), (8, 1, 8, 8), "bfloat16", "cuda")
    image = Layout((1, 8, 100, 100), (80_000, 1, 800, 8), "bfloat16", "cuda")
    convolution = operator("convolution", [image, weight], [image])
    assert [len(each) for each in compiled([convolution, operator("relu", [image], [image])])] == [1, 1]


def test_every_gpu_has_figures_of_its_own():
    assert len(set(GPUS.values())) == len(GPUS) == 5
    assert GPUS["h200"] == (790e12, 4.3e12)


@pytest.mark.slow
def test_the_program_says_that_it_estimates():
    if reason := shim.why_not():
        pytest.skip(reason)
    command = [sys.executable, "benchmarks/floor.py", "spleen", "--gpu", "l40s"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    assert "AN ESTIMATE, nothing was run: a training step of spleen in bf16 on one l40s (290 TFLOP/s" in said
    assert said.startswith("spleen, bf16: kernels ")
    assert "in a graph" in said
    assert "compiled" in said
    assert "assumed, not measured:" in said
