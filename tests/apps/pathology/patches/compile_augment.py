import pytest
import torch

from medspeed.apps.pathology.patches.augment import DRAW
from medspeed.apps.pathology.patches.augment_triton import augmented, grey_sums
from tests.kernels import CAPABILITIES, compiled_not_launched


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("size", [32, 224])
def test_the_kernels_compile_without_spilling(size, capability):
    pixels, table = (
        torch.zeros(3, 3, size, size, dtype=torch.uint8),
        torch.zeros(2, DRAW.itemsize // 4, dtype=torch.int32),
    )
    with compiled_not_launched(capability):
        greys = grey_sums(pixels, table)
        augmented(pixels, table, greys, torch.bfloat16, True)
        augmented(pixels, table, greys, torch.float32, False)
