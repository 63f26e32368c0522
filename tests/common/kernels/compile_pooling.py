import pytest
import torch

from medspeed.common.kernels.pooling_triton import max_pool, max_pool_gradient
from tests.kernels import CAPABILITIES, compiled_not_launched


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("channels", [64, 8, 3])
def test_the_kernels_compile_without_spilling(channels, dtype, capability):
    """A thread's 16 bytes of a pixel are loaded and stored at once."""
    image = torch.zeros(2, channels, 112, 112, dtype=dtype).contiguous(memory_format=torch.channels_last)
    with compiled_not_launched(capability) as kernels:
        max_pool_gradient(*max_pool(image), 112, 112)
    for kernel, loads in zip(kernels, (9, 4), strict=True):
        assert "atom" not in kernel.asm["ptx"]
        if channels == 64:
            assert kernel.asm["ptx"].count("ld.global.v4.b32") == loads
