import numpy as np
import pytest
import torch

from medspeed.common.data.crops import crop_table, crops_of_table, place_together
from medspeed.common.data.preparation import PreparedCase
from medspeed.common.kernels.trust import trusting
from tests.kernels import run_compiled, run_interpreted


@pytest.mark.slow
def test_the_kernel_equals_its_twin():
    run_interpreted("tests/common/kernels/check_crops.py")


@pytest.mark.slow
def test_the_kernel_compiles_without_spilling():
    run_compiled("tests/common/kernels/compile_crops.py")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_the_kernel_equals_its_twin(dtype):
    device, size = torch.device("cuda"), (33, 34, 35)
    image = torch.randn(4, 40, 41, 42, generator=torch.Generator().manual_seed(0)).half()
    (case,) = place_together([PreparedCase("a", image, image[0].byte(), grid=None)], size, device)  # type: ignore[arg-type]
    flips, changes = np.array([[True, False, True], [False] * 3]), np.array([[1.1, 0.05], [0.9, 0]], np.float32)
    table = torch.from_numpy(crop_table([case] * 2, np.array([[1, 2, 3], [7, 7, 7]]), flips, changes, size)).to(device)
    arguments = table, case.image, case.label, size, (dtype, True)
    expected, expected_label = crops_of_table(*arguments)
    with trusting("crops"):
        found, label = crops_of_table(*arguments)
    assert torch.equal(label, expected_label)
    assert torch.allclose(found, expected.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
