import pytest
import torch

from medspeed.common.kernels.crops_triton import gathered_crops
from tests.kernels import CAPABILITIES, compiled_not_launched


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("channels", [1, 4])
def test_the_kernel_compiles_without_spilling(channels, capability):
    image, label = torch.zeros(channels, 1000).half(), torch.zeros(1000, dtype=torch.uint8)
    table = torch.zeros(2, 5, dtype=torch.int64)
    with compiled_not_launched(capability):
        gathered_crops(image, label, table, [8, 4, 1], torch.float32, False)
        gathered_crops(image, label, table, [8, 4, 5], torch.bfloat16, True)
