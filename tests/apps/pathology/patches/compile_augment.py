import pytest
import torch

from medspeed.apps.pathology.patches.augment import DRAW
from medspeed.apps.pathology.patches.augment_triton import augmented
from tests.kernels import CAPABILITIES, compiled_not_launched


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_kernels_compile_without_spilling(capability):
    pixels, table = (
        torch.zeros(3, 3, 224, 224, dtype=torch.uint8),
        torch.zeros(2, DRAW.itemsize // 4, dtype=torch.int32),
    )
    with compiled_not_launched(capability):
        augmented(pixels, table, torch.bfloat16, True)
        augmented(pixels, table, torch.float32, False)
