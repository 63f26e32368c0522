import pytest
import torch

from common.training.precision import autocast, choose_precision

CPU = torch.device("cpu")


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


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_autocast_computes_in_that_precision(precision, dtype):
    with autocast(precision, CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
