import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from medspeed.common.observe import roofline
from medspeed.common.observe.roofline import count_flops, distance_to_limit, measure_ceiling
from medspeed.common.run import open_run
from medspeed.models.resnet18_fcn import resnet18_fcn
from medspeed.models.segresnet3d import segresnet3d
from medspeed.models.unet3d import unet3d

NETWORKS = {
    "unet3d": (lambda: unet3d(1, 2, (8, 16), 1), (2, 1, 16, 16, 16)),
    "segresnet3d": (lambda: segresnet3d(2, 3, 8, (1, 1)), (1, 2, 16, 16, 16)),
    "resnet18_fcn": (lambda: resnet18_fcn(32), (2, 3, 32, 32)),
}


def test_convolutions_by_hand():
    network = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1, bias=False), nn.Conv2d(5, 5, 1))
    first = 2 * (2 * 8 * 8) * 5 * (3 * 3 * 3)  # multiply and add, for each output, over its 3 x 3 x 3 inputs
    second = 2 * (2 * 8 * 8) * 5 * 5
    # Backward: of the first the weights' gradient alone, since no image needs one.
    assert count_flops(network, (2, 3, 8, 8)) == 2 * first + 3 * second
    network.requires_grad_(False)[-1].bias.requires_grad_(True)  # of what is frozen, no gradients are computed
    assert count_flops(network, (2, 3, 8, 8)) == first + second


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


def test_the_distance_by_hand(run, monkeypatch):
    monkeypatch.setattr(roofline, "count_flops", lambda network, shape: 4 * 10**12)
    monkeypatch.setattr(roofline, "measure_ceiling", lambda device, dtype: 8e12)
    found = distance_to_limit(nn.Identity(), (1, 1, 8), 2.0, torch.float32, run)
    assert found is not None
    assert (found["tflops"], found["percent"], found["flops_per_step"]) == (2.0, 25.0, 4 * 10**12)
    log = (run.directory / "run.log").read_text()
    assert log.startswith("limit: a step takes 2 s for 4000.0 GFLOP: 2 of the 8 TFLOP/s ")
    assert log.endswith("(torch.float32), 25 percent\n")
    assert "limit" in run.clock.seconds()
    assert distance_to_limit(nn.Identity(), (1, 1, 8), None, torch.float32, run) is None


def test_an_operator_that_cannot_be_counted_costs_no_run(run):
    assert distance_to_limit(nn.Linear(3, 2), (1, 5), 1.0, torch.float32, run) is None
    assert "limit: not measured: " in (run.directory / "run.log").read_text()
