import pytest
import torch

from medspeed.common.kernels.moments_triton import second_moments
from tests.kernels import CAPABILITIES, compiled_not_launched


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_kernel_compiles_without_spilling(capability):
    norms, owner, second, scalar = torch.zeros(6), torch.zeros(6, dtype=torch.int64), torch.zeros(2), torch.ones(1)
    with compiled_not_launched(capability):
        second_moments(norms, owner, second, None, None, 0.02, 1e-8)
        second_moments(norms, owner, second, scalar, scalar, 0.02, 1e-8)
