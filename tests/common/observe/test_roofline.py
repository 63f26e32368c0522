import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from medspeed.common.observe import roofline
from medspeed.common.observe.roofline import (
    Work,
    count_work,
    distance_to_limit,
    floor,
    measure_bandwidth,
    measure_ceiling,
)
from medspeed.common.run import open_run
from medspeed.models.resnet18_fcn import resnet18_fcn
from medspeed.models.segresnet3d import segresnet3d
from medspeed.models.unet3d import unet3d

NETWORKS = {
    "unet3d": (lambda: unet3d(1, 2, (8, 16), 1), (2, 1, 16, 16, 16)),
    "segresnet3d": (lambda: segresnet3d(2, 3, 8, (1, 1)), (1, 2, 16, 16, 16)),
    "resnet18_fcn": (lambda: resnet18_fcn(32), (2, 3, 32, 32)),
}


def count_flops(network: nn.Module, shape: tuple[int, ...]) -> int:
    return sum(each.flops for each in count_work(network, shape))


def test_convolutions_by_hand():
    network = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1, bias=False), nn.Conv2d(5, 5, 1))
    wide = 2 * (2 * 8 * 8) * 5 * (3 * 3 * 3)  # multiply and add, for each output, over its 3 x 3 x 3 inputs
    first = Work(wide, 2 * 64 * 3 + 5 * 27 + 2 * 64 * 5)
    second = Work(2 * (2 * 8 * 8) * 5 * 5, 2 * 64 * 5 + 25 + 2 * 64 * 5)
    # Backward: of the first the weights' gradient alone, since no image needs one.
    assert count_work(network, (2, 3, 8, 8)) == [first, second, second, second, first]
    network.requires_grad_(False)[-1].bias.requires_grad_(True)  # of what is frozen, no gradients are computed
    assert count_work(network, (2, 3, 8, 8)) == [first, second]


@pytest.mark.parametrize("norm", [nn.BatchNorm3d(4), nn.GroupNorm(2, 4)])
def test_normalisations_by_hand(norm):
    network = nn.Sequential(nn.Conv3d(1, 4, 1, bias=False), norm, nn.ReLU())
    image, outcome = 2 * 8, 2 * 4 * 8
    convolution = Work(2 * outcome, image + 4 + outcome)
    expected = [convolution, Work(0, 3 * outcome), Work(0, 5 * outcome), convolution]
    assert count_work(network, (2, 1, 2, 2, 2)) == expected


def test_an_interpolation_by_hand():
    work = count_work(nn.Sequential(nn.Conv3d(1, 1, 1), nn.Upsample(scale_factor=2, mode="trilinear")), (1, 1, 2, 2, 2))
    assert [each.elements for each in work if not each.flops] == [8 + 64, 64 + 8]


def test_the_floor_by_hand():
    """The first is bound by products, the second by memory, at two bytes an element."""
    assert floor([Work(400, 10), Work(10, 300)], 2, flops=100.0, bandwidth=50.0) == 400 / 100 + 2 * 300 / 50


@pytest.mark.parametrize(
    ("make", "shape", "milliseconds"),
    [
        (lambda: unet3d(1, 2), (16, 1, 96, 96, 96), 1.61),
        (lambda: segresnet3d(4, 3), (1, 4, 224, 224, 144), 7.46),
        (resnet18_fcn, (256, 3, 224, 224), 6.04),
    ],
)
def test_the_floors_of_the_apps_on_an_h200(make, shape, milliseconds):
    """At 790 TFLOP/s in bf16 and 4.3 TB/s; each was counted once by another program, from the modules' sizes."""
    with torch.device("meta"):
        network = make()
    assert 1000 * floor(count_work(network, shape), 2, 790e12, 4.3e12) == pytest.approx(milliseconds, rel=0.02)


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
    assert 1e8 < measure_bandwidth(torch.device("cpu")) < 1e13


@pytest.fixture
def run(tmp_path):
    return open_run(tmp_path, None, None, "cpu", "", 0)


def test_the_distance_by_hand(run, monkeypatch):
    monkeypatch.setattr(roofline, "count_work", lambda network, shape: [Work(4 * 10**12, 0), Work(0, 10**9)])
    monkeypatch.setattr(roofline, "measure_ceiling", lambda device, dtype: 8e12)
    monkeypatch.setattr(roofline, "measure_bandwidth", lambda device: 8e9)
    found = distance_to_limit(nn.Identity(), (1, 1, 8), 2.0, torch.float32, run)
    assert found is not None
    assert (found["tflops"], found["percent"], found["flops_per_step"]) == (2.0, 25.0, 4 * 10**12)
    # In fp32 a thousand million elements take half a second, as the products do; in half precision a quarter.
    assert (found["floor_seconds"], found["floor_percent"]) == (1.0, 50.0)
    half = distance_to_limit(nn.Identity(), (1, 1, 8), 2.0, torch.bfloat16, run)
    assert half is not None
    assert half["floor_seconds"] == 0.75
    log = (run.directory / "run.log").read_text()
    assert log.startswith("limit (torch.float32): flops_per_step 4e+12, seconds_per_step 2, tflops 2, ")
    assert "limit" in run.clock.seconds()
    assert distance_to_limit(nn.Identity(), (1, 1, 8), None, torch.float32, run) is None


def test_an_operator_that_cannot_be_counted_costs_no_run(run):
    assert distance_to_limit(nn.Linear(3, 2), (1, 5), 1.0, torch.float32, run) is None
    assert "limit: not measured: " in (run.directory / "run.log").read_text()
