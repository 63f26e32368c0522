import pytest
import torch

from medspeed.common.kernels.doubling_triton import doubling_backward, doubling_forward
from tests.kernels import CAPABILITIES, compiled_not_launched


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("channels", "dtype"),
    [*((each, torch.bfloat16) for each in (3, 8, 16, 128)), (16, torch.float32), (64, torch.float16)],
)
def test_the_kernels_compile_without_spilling_and_load_16_bytes_at_a_time(channels, dtype, capability):
    with compiled_not_launched(capability) as kernels:
        for sides in ((5, 6, 7), (1, 1, 1), (16, 32, 16)):  # for sides of 1 and multiples of 16 Triton compiles anew
            shapes = (2, channels, *sides), (2, channels, *(2 * side for side in sides))
            small, large = (torch.zeros(each, dtype=dtype) for each in shapes)
            image, result = (each.contiguous(memory_format=torch.channels_last_3d) for each in (small, large))
            doubling_forward(image, result)
            doubling_backward(result)
    for kernel in kernels:
        loads = [line for line in kernel.asm["ptx"].splitlines() if "ld.global" in line]
        assert loads
        assert channels % 8 or all("v4.b32" in load for load in loads)
