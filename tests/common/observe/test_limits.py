import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from common.observe.limits import Ceilings, Work, count_work, distance_to_limit, measure_ceilings
from models.prelu import use_fast_prelu
from models.resnet18_fcn import resnet18_fcn
from models.segresnet3d import segresnet3d
from models.unet3d import unet3d

NETWORKS = {
    "unet3d": (lambda: use_fast_prelu(unet3d(1, 2, (8, 16), 1)), (2, 1, 16, 16, 16)),
    "segresnet3d": (lambda: segresnet3d(2, 3, 8, (1, 1)), (1, 2, 16, 16, 16)),
    "resnet18_fcn": (lambda: resnet18_fcn(32), (2, 3, 32, 32)),
}


def test_a_convolution_by_hand():
    network = nn.Conv2d(3, 5, 3, padding=1, bias=False)
    work = count_work(network, (2, 3, 8, 8))
    forward = 2 * (2 * 8 * 8) * 5 * (3 * 3 * 3)  # multiply and add, for each output, over its 3 x 3 x 3 inputs
    assert work.flops == 2 * forward  # backward: the weights' gradient alone, since no image needs one
    image, weight, output = 2 * 3 * 64 * 4, 5 * 27 * 4, 2 * 5 * 64 * 4
    assert work.bytes >= 2 * (image + weight + output)
    assert work.bytes <= 4 * (image + weight + output)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_count_is_torchs_own_of_a_step_that_is_computed(name):
    make, shape = NETWORKS[name]
    network = make()
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(network(torch.randn(shape)).sum())
    before = {key: value.clone() for key, value in network.state_dict().items()}
    assert count_work(network, shape).flops == counter.get_total_flops() > 0
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    assert next(network.parameters()).device.type == "cpu"


def test_twice_the_batch_is_twice_the_work_and_more_than_the_weights_traffic():
    network = unet3d(1, 2, (8, 16), 1)
    one, two = count_work(network, (1, 1, 16, 16, 16)), count_work(network, (2, 1, 16, 16, 16))
    assert two.flops == 2 * one.flops
    assert one.bytes < two.bytes < 2 * one.bytes  # the weights are read once either way


def test_a_compiled_network_is_counted_as_it_was():
    network = nn.Conv2d(3, 5, 3)
    expected = count_work(network, (1, 3, 8, 8))
    network._compiled_call_impl = compiled = lambda image: 1 / 0  # what `compile` sets, which must not run
    assert count_work(network, (1, 3, 8, 8)) == expected
    assert network._compiled_call_impl is compiled


def test_ceilings_are_above_what_the_same_product_reaches_alone():
    ceilings = measure_ceilings(torch.device("cpu"), torch.float32)
    assert 1e9 < ceilings.flops_per_second < 1e14
    assert 1e8 < ceilings.bytes_per_second < 1e13


def test_the_distance_by_hand():
    found = distance_to_limit(Work(flops=4 * 10**12, bytes=10**10), 2.0, Ceilings(8e12, 2e10))
    assert found["tflops"] == 2.0
    assert found["percent"] == 25.0
    assert found["memory_percent"] == 25.0
    assert (found["flops_per_step"], found["bytes_per_step"]) == (4 * 10**12, 10**10)
