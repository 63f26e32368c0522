import copy
from typing import Any

import pytest
import torch
from torch import nn

from common.inference.folding import folded
from models.resnet18_fcn import resnet18_fcn
from models.segresnet3d import segresnet3d
from models.unet3d import unet3d

NORMS = (nn.BatchNorm2d, nn.BatchNorm3d)


def with_statistics(network: nn.Module) -> nn.Module:
    """Give batch normalisations scales, shifts and statistics by which they change something."""
    generator = torch.Generator().manual_seed(1)
    for module in network.modules():
        if isinstance(module, NORMS):
            state = module.state_dict()
            for name in ("weight", "running_var"):
                state[name].uniform_(0.5, 2, generator=generator)
            for name in ("bias", "running_mean"):
                state[name].normal_(generator=generator)
    return network.eval()


@pytest.mark.parametrize(
    ("network", "shape"), [(unet3d(1, 2, (4, 8, 16)), (1, 16, 16, 16)), (resnet18_fcn(96), (3, 96, 96))]
)
def test_no_normalisation_is_left_and_the_logits_differ_by_rounding_only(network: nn.Module, shape: Any):
    with_statistics(network)
    before = copy.deepcopy(network.state_dict())
    found = folded(network)
    windows = torch.rand(2, *shape, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected, logits = network(windows), found(windows)
    assert torch.allclose(logits, expected, atol=1e-5 * float(expected.abs().max()))
    assert not any(isinstance(module, NORMS) for module in found.modules())
    after = network.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_a_convolution_that_is_read_twice_stays():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.norm = nn.Conv3d(1, 2, 3), nn.BatchNorm3d(2)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.convolution(image)
            normalised: torch.Tensor = self.norm(found)
            return normalised + found

    network = with_statistics(Twice())
    windows = torch.rand(1, 1, 4, 4, 4)
    assert torch.equal(folded(network)(windows), network(windows))


def test_a_convolution_that_is_called_twice_stays():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.one, self.other = nn.Conv3d(1, 2, 3), nn.BatchNorm3d(2), nn.BatchNorm3d(2)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            first: torch.Tensor = self.one(self.convolution(image))
            second: torch.Tensor = self.other(self.convolution(2 * image))
            return first + second

    network = with_statistics(Shared())
    windows = torch.rand(1, 1, 4, 4, 4)
    assert torch.equal(folded(network)(windows), network(windows))


def test_a_network_without_batch_normalisation_is_returned_as_it_is():
    network = segresnet3d(1, 2, 8).eval()
    assert folded(network) is network


def test_statistics_that_still_change_are_a_programmers_error():
    with pytest.raises(AssertionError, match=r"network\.eval\(\)"):
        folded(unet3d(1, 2, (4, 8)).train())
