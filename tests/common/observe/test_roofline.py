import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from common.observe import roofline
from common.observe.roofline import count_flops, distance_to_limit, measure_ceiling
from common.run import open_run
from models.resnet18_fcn import resnet18_fcn
from models.segresnet3d import segresnet3d
from models.unet3d import unet3d

NETWORKS = {
    "unet3d": (lambda: unet3d(1, 2, (8, 16), 1), (2, 1, 16, 16, 16)),
    "segresnet3d": (lambda: segresnet3d(2, 3, 8, (1, 1)), (1, 2, 16, 16, 16)),
    "resnet18_fcn": (lambda: resnet18_fcn(32), (2, 3, 32, 32)),
}


def test_a_convolution_by_hand():
    network = nn.Conv2d(3, 5, 3, padding=1, bias=False)
    forward = 2 * (2 * 8 * 8) * 5 * (3 * 3 * 3)  # multiply and add, for each output, over its 3 x 3 x 3 inputs
    # Backward: the weights' gradient alone, since no image needs one.
    assert count_flops(network, (2, 3, 8, 8)) == 2 * forward


@pytest.mark.parametrize("name", NETWORKS)
def test_the_count_is_torchs_own_of_a_step_that_is_computed(name):
    make, shape = NETWORKS[name]
    network = make()
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(network(torch.randn(shape)).sum())
    before = {key: value.clone() for key, value in network.state_dict().items()}
    assert count_flops(network, shape) == counter.get_total_flops() > 0
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    assert next(network.parameters()).device.type == "cpu"


def test_a_compiled_network_is_counted_as_it_was():
    network = nn.Conv2d(3, 5, 3)
    expected = count_flops(network, (1, 3, 8, 8))
    network._compiled_call_impl = compiled = lambda image: 1 / 0  # what `compile` sets, which must not run
    assert count_flops(network, (1, 3, 8, 8)) == expected
    assert network._compiled_call_impl is compiled


def test_the_ceiling_is_within_reason():
    assert 1e9 < measure_ceiling(torch.device("cpu"), torch.float32) < 1e14


@pytest.fixture
def run(tmp_path):
    return open_run(tmp_path, None, None, "cpu", "", 0)


def test_the_distance_by_hand(run, monkeypatch, capsys):
    monkeypatch.setattr(roofline, "count_flops", lambda network, shape: 4 * 10**12)
    monkeypatch.setattr(roofline, "measure_ceiling", lambda device, dtype: 8e12)
    found = distance_to_limit(nn.Identity(), (1, 1, 8), 2.0, "fp32", run)
    assert found is not None
    assert (found["tflops"], found["percent"], found["flops_per_step"]) == (2.0, 25.0, 4 * 10**12)
    assert "limit: 4000.0 GFLOP in 2 s a step, 2 TFLOP/s: 25 percent of what" in capsys.readouterr().out
    assert "limit" in run.clock.seconds()
    assert distance_to_limit(nn.Identity(), (1, 1, 8), None, "fp32", run) is None


def test_an_operator_that_cannot_be_counted_costs_no_run(run, capsys):
    assert distance_to_limit(nn.Linear(3, 2), (1, 5), 1.0, "fp32", run) is None
    assert "limit: not measured: " in capsys.readouterr().out
