"""Weights that are cast at once: autocast's numbers, with fewer operators."""

import copy

import pytest
import torch
from torch import nn

from medspeed.common.kernels.weights import half_weights
from medspeed.models.segresnet3d import segresnet3d
from medspeed.models.unet3d import unet3d
from tests.support import count_operators

NETWORKS = [unet3d(1, 2, (4, 8, 8), 2), segresnet3d(1, 2, 8, (1, 2))]


def step(network, at_once):
    """Do a step in bfloat16; return the logits, and how often each operator ran."""
    image = torch.randn(2, 1, 8, 8, 8, generator=torch.Generator().manual_seed(0))
    device = "cpu" if at_once else "cuda"  # whose autocast is off
    with count_operators() as counted, torch.autocast("cpu", torch.bfloat16):
        with half_weights(network, device):
            logits = network(image)
        logits.float().square().mean().backward()
    return logits, counted


@pytest.mark.parametrize("network", NETWORKS, ids=["unet", "segresnet"])
def test_numbers_are_autocasts_and_weights_stay_themselves(network):
    plain, changed = copy.deepcopy(network).train(), copy.deepcopy(network).train()
    before = dict(changed.named_parameters())
    (expected, many), (found, few) = step(plain, at_once=False), step(changed, at_once=True)
    assert torch.equal(found, expected)
    for (name, one), other in zip(changed.named_parameters(), plain.parameters(), strict=True):
        assert before[name] is one
        assert one.dtype == torch.float32
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None and other.grad is not None:
            assert one.grad.stride() == other.grad.stride()
            assert torch.equal(one.grad, other.grad), name
    convolutions = sum(isinstance(each, nn.Conv3d | nn.ConvTranspose3d) for each in network.modules())
    assert few["aten::_foreach_copy_"] == 2
    assert few["aten::_to_copy"] <= many["aten::_to_copy"] - 2 * convolutions


def test_nothing_changes_without_autocast_or_in_evaluation():
    network = copy.deepcopy(NETWORKS[0])
    weight = network.model[0].residual.weight  # type: ignore[index,union-attr]
    with half_weights(network.train(), "cpu"):
        assert network.model[0].residual.weight is weight  # type: ignore[index,union-attr]
    with torch.autocast("cpu", torch.bfloat16), half_weights(network.eval(), "cpu"):
        assert network.model[0].residual.weight is weight  # type: ignore[index,union-attr]


def test_two_weights_are_joined_where_a_module_names_them():
    """One behind the other, in place of the first; each gets its own part of the gradient."""
    network = copy.deepcopy(NETWORKS[0]).train()
    unit = network.model[0]  # type: ignore[index]
    weights = unit.conv.unit0.conv.weight, unit.residual.weight  # type: ignore[union-attr]
    with torch.autocast("cpu", torch.bfloat16), half_weights(network, "cpu", join=True):
        both = unit.conv.unit0.conv.weight  # type: ignore[union-attr]
        assert torch.equal(both, torch.cat(weights).bfloat16())
        assert both.stride() == weights[0].stride()
        (both * torch.arange(8).view(8, 1, 1, 1, 1)).sum().backward()
    assert [each.grad[:, 0, 0, 0, 0].tolist() for each in weights] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert unit.conv.unit0.conv.weight is weights[0]  # type: ignore[union-attr]


@pytest.mark.parametrize("network", NETWORKS, ids=["unet", "segresnet"])
def test_a_compiler_gets_one_graph(network):
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(network).train(), backend="eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(torch.randn(1, 1, 8, 8, 8)).shape == (1, 2, 8, 8, 8)
    torch._dynamo.reset()
