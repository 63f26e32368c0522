import pytest
import torch

from medspeed.common.kernels.dice_triton import loss_gradient, loss_of_parts, loss_parts
from tests.kernels import CAPABILITIES, compiled_not_launched

MEMBERS = (2, 3, 257, 258, 259, 515)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("classes", "members"), [(1, MEMBERS[:2]), (2, ()), (3, MEMBERS), (21, ())])
def test_the_kernels_compile_without_spilling(classes, members, capability):
    logits = torch.zeros(2, classes, 5, 6, 7, dtype=torch.bfloat16)
    label = torch.zeros(2, 1, 5, 6, 7, dtype=torch.uint8)
    with compiled_not_launched(capability):
        for layout in (torch.contiguous_format, torch.channels_last_3d):
            loss_parts(logits.contiguous(memory_format=layout), label, members)
            given = torch.zeros(4, 1, classes), torch.ones(()), members
            loss_gradient(logits.contiguous(memory_format=layout), label, *given)
        loss_of_parts(torch.zeros(4, 2, 1700, classes), True, 0.1, 1e-5)
        loss_of_parts(torch.zeros(4, 2, 1, classes), False, 0.1, 1e-5)
