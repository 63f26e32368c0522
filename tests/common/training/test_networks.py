"""What a network by flag is built of, and what sides of images it takes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from medspeed.common.inference.model import arguments_of
from medspeed.common.training.resolve import check_size, choose_divisor, choose_sizes, network_arguments
from medspeed.common.training.volume_config import Network, SegmentationConfig, Windows
from medspeed.models import find_network

DYNUNET = SegmentationConfig(network=Network("dynunet"), channels=(4, 8, 8))


class Own(nn.Module):
    """Halves an image once; is wrong in one way if told."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.down, self.up = nn.Conv3d(1, 4, 2, 2), nn.ConvTranspose3d(4, 2, 2, 2)
        self.idle = nn.Conv3d(1, 1, 1) if wrong == "idle" else None
        self.wrong = wrong

    def forward(self, image: torch.Tensor) -> Any:
        logits = self.up(self.down(image))
        if self.wrong == "reads":
            logits = logits * float(logits.sum())
        return [logits] if self.wrong == "list" else logits[:, :1] if self.wrong == "channels" else logits


def own(in_channels: int, out_channels: int, *, wrong: str = "", layer: type = nn.ReLU) -> nn.Module:
    return Own(wrong)


def test_arguments_are_those_given_and_the_defaults():
    unet = find_network("unet3d")
    assert arguments_of(unet, {"channels": (4, 8)}) == {"channels": (4, 8), "residual_units": 2}
    assert arguments_of(unet, {"channels": None})["channels"] == (16, 32, 64, 128, 256)
    assert arguments_of(own, {}) == {"wrong": ""}  # model.json cannot hold a class


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            replace(DYNUNET, network=Network("dynunet", filters=8)),
            "network.filters 8: network dynunet takes channels",
        ),
        (
            SegmentationConfig(network=Network("own", dropout=0.0)),
            "network.dropout 0.0: network own takes wrong",
        ),
    ],
)
def test_a_size_that_the_network_does_not_take_is_named(config, words):
    build = own if config.network.name == "own" else find_network("dynunet")
    with pytest.raises(ValueError, match=rf"^{words}.*; drop the flag, or pass null"):
        network_arguments(config, build)


def test_devices_give_sizes_to_networks_of_this_project_only():
    plain = SegmentationConfig()
    unet = choose_sizes(plain, find_network("unet3d"), "cpu")
    assert unet == {"network.name": "unet3d", "channels": (8, 16, 32, 64)}  # the layout is the app's
    found = choose_sizes(plain, find_network("mednext"), "cuda")
    assert found == {
        "network.name": "mednext", "network.filters": 16, "network.blocks_down": (1, 2, 2, 4), "channels_last": False,
    }  # fmt: skip

    def mine(in_channels: int, out_channels: int, channels: tuple[int, ...] = (2, 4)) -> None: ...

    mine.__name__ = "my.module:mine"
    assert choose_sizes(plain, mine, "cpu").keys() == {"network.name", "channels_last"}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "changes", "divisor"),
    [
        ("unet3d", {"channels": (4, 8, 8)}, 4),
        ("unet3d", {"channels": (4, 8, 8, 8, 8)}, 16),
        ("dynunet", {"channels": (4, 8, 8, 8)}, 8),
        ("segresnet", {"network": Network("segresnet", 8, (1, 1))}, 2),
        ("mednext", {"network": Network("mednext", 4, (1, 1))}, 4),
    ],
)
def test_the_divisor_is_that_of_the_levels(name, changes, divisor):
    config = SegmentationConfig(**{"network": Network(name), **changes})
    before = torch.get_rng_state()
    assert choose_divisor(config, find_network(name), 1)[0] == divisor
    assert torch.equal(torch.get_rng_state(), before)  # what a run draws does not depend on it


def test_what_a_network_with_known_levels_does_not_take_is_found_with_its_divisor():
    """So it is found before the plan of a run is kept, which would then be resumed with it."""
    config = SegmentationConfig(network=Network("segresnet3d", 8, (1, 2)), channels=(8, 16))
    with pytest.raises(ValueError, match=r"^channels \(8, 16\): network segresnet3d takes "):
        choose_divisor(config, find_network("segresnet3d"), 1)


def test_sides_that_do_not_divide_are_named_with_flag_and_bound():
    build = find_network("dynunet")
    for field, config in (
        ("crop_size", replace(DYNUNET, crop_size=(18, 16, 16))),
        ("windows.size", replace(DYNUNET, windows=Windows((16, 16, 30)))),
    ):
        with pytest.raises(ValueError, match=rf"^{field} \(.*\): sides must be multiples of 4 for the .*dynunet$"):
            choose_divisor(config, build, 1)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("reads", "meta tensors"),
        ("list", r"a list is returned instead of logits \(2, 2, 320, 320, 320\)"),
        ("channels", r"\(2, 1, 320, 320, 320\) is returned instead of logits"),
        ("idle", "the logits do not depend on the weight idle.weight: freeze it"),
    ],
)
def test_a_network_that_cannot_be_trained_says_why(wrong, words):
    def build(*channels: int) -> nn.Module:
        return own(*channels, wrong=wrong)

    with pytest.raises(ValueError, match=rf"^network build: an image of \(320, .*: Own does not take it \(.*{words}"):
        choose_divisor(SegmentationConfig(network=Network("a:build")), build, 1)


def test_a_network_may_normalize_what_it_pools():
    """As DeepLab's does: from a batch of one, whose mean is one value per channel, batch normalization cannot learn."""

    class Pooled(Own):
        def __init__(self) -> None:
            super().__init__()
            self.pooled = nn.Sequential(nn.AdaptiveAvgPool3d(1), nn.Conv3d(1, 2, 1), nn.BatchNorm3d(2))

        def forward(self, image: torch.Tensor) -> Any:
            return super().forward(image) + self.pooled(image)

    config = SegmentationConfig(network=Network("a:build"))
    assert choose_divisor(config, lambda *channels: Pooled(), 1)[0] == 2


def test_arguments_that_build_nothing_are_named():
    config = replace(DYNUNET, channels=(4, 8))
    with pytest.raises(ValueError, match=r"^network dynunet: invalid arguments .*\(4, 8\).* no less than 3"):
        choose_divisor(config, find_network("dynunet"), 1)


def test_a_size_that_a_network_does_not_take_is_refused():
    divisor, network = choose_divisor(DYNUNET, find_network("dynunet"), 1)
    assert network is not None
    assert divisor == 4
    check_size(network, 1, (16, 32, 32), "crop_size")
    with pytest.raises(ValueError, match=r"^crop_size \(4, 4, 4\): DynUNet does not take it \(.*spatial element"):
        check_size(network, 1, (4, 4, 4), "crop_size")


def test_a_network_that_normalizes_what_it_pools_needs_more_than_one_image():
    class Pooled(nn.Sequential):
        def forward(self, image: torch.Tensor) -> Any:
            return image[:, :1].expand(-1, 2, -1, -1, -1) + super().forward(image)

    network = Pooled(nn.AdaptiveAvgPool3d(1), nn.Conv3d(1, 2, 1), nn.BatchNorm3d(2)).to("meta")
    check_size(network, 1, (8, 8, 8), "crop_size")
    with pytest.raises(ValueError, match=r"^batch_size 1, crop_size \(8, 8, 8\): .*more than 1 value per channel"):
        check_size(network, 1, (8, 8, 8), "batch_size 1, crop_size", 1)
