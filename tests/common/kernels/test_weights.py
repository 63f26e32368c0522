"""Weights that are cast at once: autocast's numbers, with fewer operators."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from medspeed.common.kernels import folding, trust, weights
from medspeed.common.kernels.folding import FOLDED
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


@pytest.mark.parametrize(
    ("network", "channels"),
    [(unet3d(1, 2, (16, 32), 2), 1), (segresnet3d(4, 3, 16, (1, 1)), 4)],
    ids=["unet", "segresnet"],
)
def test_folded_weights_are_laid_out_at_once_as_each_layer_would(network, channels, everywhere, monkeypatch):
    lay, laid = folding._Folding.lay, []

    def counted(layer, weight):
        laid.append(layer)
        return lay(layer, weight)

    monkeypatch.setattr(folding._Folding, "lay", counted)
    image = torch.randn(1, channels, 8, 8, 32, generator=torch.Generator().manual_seed(0))
    image = image.contiguous(memory_format=torch.channels_last_3d)

    def learned():
        changed = copy.deepcopy(network).train().to(memory_format=torch.channels_last_3d)
        with trust.trusting(FOLDED), torch.autocast("cpu", torch.bfloat16):
            for _ in range(2):
                laid.clear()
                with half_weights(changed, "cpu"):
                    logits = changed(image)
        logits.float().square().mean().backward()
        return logits, [each.grad for each in changed.parameters()], len(laid)

    logits, gradients, few = learned()
    monkeypatch.setattr(weights, "lay_out", lambda _: {})
    expected, others, many = learned()
    foldable = sum(isinstance(each, folding._Folding) and each.count > 1 for each in network.modules())
    assert (few, many) == (0, foldable)  # places are made in the first step
    assert torch.equal(logits, expected)
    for one, other in zip(gradients, others, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.stride() == other.stride()
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * float(other.abs().max()))


def test_joined_weights_are_laid_out_with_each_part_of_the_gradient(everywhere):
    network: Any = copy.deepcopy(unet3d(1, 2, (16, 32), 2)).train()
    first, second = network.model[0].conv.unit0.conv, network.model[0].residual
    with trust.trusting(FOLDED), torch.autocast("cpu", torch.bfloat16), half_weights(network, "cpu", join=True):
        laid = first.laid
        assert second.laid is None
        assert torch.equal(laid, first.lay(first.weight))
        ramp = torch.arange(laid.numel(), dtype=torch.float32).remainder(97).view(laid.shape)
        (laid * ramp).sum().backward()
    assert first.laid is None
    for layer, part in ((first, slice(16)), (second, slice(16, 32))):
        expected = torch.zeros(32, *layer.weight.shape[1:]).requires_grad_()
        (first.lay(expected) * ramp).sum().backward()
        assert expected.grad is not None
        torch.testing.assert_close(layer.weight.grad, expected.grad[part], rtol=2e-2, atol=0)


@pytest.mark.parametrize("network", NETWORKS, ids=["unet", "segresnet"])
def test_a_compiler_gets_one_graph(network):
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(network).train(), backend="eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(torch.randn(1, 1, 8, 8, 8)).shape == (1, 2, 8, 8, 8)
    torch._dynamo.reset()
