import numpy as np
import pytest
import torch

from common.data.crops import cut_and_change, place_cases
from common.data.preparation import PreparedCase
from common.kernels.trust import trusting
from tests.kernels import CAPABILITIES, check_compiled, run_interpreted


@pytest.mark.slow
def test_the_kernel_equals_its_twin():
    run_interpreted("tests/common/kernels/check_crops.py")


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("channels", [1, 4])
def test_the_kernel_compiles_without_spilling(channels, capability):
    kernels = pytest.importorskip("common.kernels.crops_triton", reason="no Triton", exc_type=ImportError)
    tensors = {"image": "*fp16", "label": "*u8", "table": "*i64", "bits": "*fp32", "images": "*bf16", "labels": "*u8"}
    sizes = dict.fromkeys(("size_x", "size_y", "size_z", "channel_stride", "voxel_stride"), "i32")
    constants = {"channels": channels, "block": 1024}
    check_compiled(kernels.crop_kernel, {**tensors, **sizes, "case_voxels": "i64"}, constants, capability)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_the_kernel_equals_its_twin(dtype):
    device, size = torch.device("cuda"), (33, 34, 35)
    image = torch.randn(4, 40, 41, 42, generator=torch.Generator().manual_seed(0)).half()
    (case,) = place_cases([PreparedCase("a", image, image[0].byte(), grid=None)], "gpu", size, device)  # type: ignore[arg-type]
    flips, changes = np.array([[True, False, True], [False] * 3]), np.array([[1.1, 0.05], [0.9, 0]], np.float32)
    arguments = [case] * 2, np.array([[1, 2, 3], [7, 7, 7]]), flips, changes, size, device, dtype, True
    expected, expected_label = cut_and_change(*arguments)
    with trusting("crops"):
        found, label = cut_and_change(*arguments)
    assert torch.equal(label, expected_label)
    assert torch.allclose(found, expected.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
