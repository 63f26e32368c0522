import pytest
import torch

from common.training.precision import autocast, choose_precision

CPU = torch.device("cpu")
_BF16_AND_FP32 = (torch.bfloat16, torch.float32)


def test_auto_takes_bf16_where_the_processor_computes_it(monkeypatch):
    for there in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda there=there: there)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        assert choose_precision("auto", CPU) == ("bf16" if there else "fp32")


def test_a_wish_is_kept():
    assert choose_precision("fp32", CPU) == "fp32"
    assert choose_precision("bf16", CPU) == "bf16"


def test_fp16_on_a_cpu_is_refused():
    with pytest.raises(ValueError, match="precision fp16: needs a CUDA device"):
        choose_precision("fp16", CPU)


@pytest.mark.parametrize(("planes", "precision"), [(1, "fp32"), (2, "fp32"), (3, "bf16")])
def test_auto_avoids_bf16_on_a_cpu_where_two_planes_are_left_of_a_crop(monkeypatch, planes, precision):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert choose_precision("auto", CPU, (planes, 4, 4)) == precision


def test_bf16_on_a_cpu_is_refused_where_two_planes_are_left_of_a_crop():
    with pytest.raises(ValueError, match="precision bf16: the network leaves 2 planes"):
        choose_precision("bf16", CPU, (2, 6, 6))


@pytest.mark.parametrize("planes", [3, 4, 6, 8])
def test_bf16_gradients_of_a_convolution_are_right_with_more_planes(planes):
    """With two planes, which are avoided, the difference is infinite or about 1 on a CPU with AVX-512 BF16."""
    image = torch.randn(2, 32, planes, 4, 4, generator=torch.Generator().manual_seed(planes)).bfloat16()
    weights = [torch.full((32, 32, 3, 3, 3), 0.05, dtype=dtype, requires_grad=True) for dtype in _BF16_AND_FP32]
    for weight in weights:
        torch.nn.functional.conv3d(image.to(weight.dtype), weight, padding=1).square().sum().backward()
    half, full = (torch.as_tensor(weight.grad, dtype=torch.float64) for weight in weights)
    assert (half - full).norm() < 0.02 * full.norm()


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_autocast_computes_in_that_precision(precision, dtype):
    with autocast(precision, CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
