"""What a network by flag is built of, and what it needs: its arguments, and the sides of images that it takes."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from medspeed.common.config import flat
from medspeed.common.inference.model import BROKEN, first_line
from medspeed.common.training.volume_config import SegmentationConfig, Size

Build = Callable[..., nn.Module]
# By flag, where the user says nothing: those of MONAI's guides on a GPU, small ones on a CPU. Not of a user's network.
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"channels": (16, 32, 64, 128, 256), "network.filters": 16, "network.blocks_down": (1, 2, 2, 4)},
    "cpu": {"channels": (8, 16, 32, 64), "network.filters": 8, "network.blocks_down": (1, 2, 2)},
}
_FIELDS = {"channels": "channels"} | {name: f"network.{name}" for name in ("filters", "blocks_down", "dropout")}
_DIVISORS = (1, 2, 4, 8, 16, 32, 64)
_ODD = 5  # times a divisor: a side that no larger one divides


def arguments_of(build: Build, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a network's function: those given that are not None, and its own defaults where JSON can.

    Raises:
        ValueError: the function does not take one of those given.
    """
    takes = {name: each.default for name, each in [*inspect.signature(build).parameters.items()][2:]}
    chosen = {name: value for name, value in given.items() if value is not None}
    for name in chosen.keys() - takes.keys():
        only = f"network {build.__name__} takes {', '.join(takes) or 'no sizes'} only"
        raise ValueError(f"{_FIELDS[name]} {chosen[name]}: {only}; drop the flag, or pass null where a recipe sets it")
    return {name: value for name, value in takes.items() if isinstance(value, int | float | str | tuple)} | chosen


def network_arguments(config: SegmentationConfig, build: Build) -> dict[str, Any]:
    """Return the arguments of a configuration's network; see `arguments_of`."""
    values = flat(config)
    return arguments_of(build, {name: values[field] for name, field in _FIELDS.items()})


def choose_sizes(config: SegmentationConfig, build: Build, device: str) -> dict[str, Any]:
    """Return, by flag, what a network gets on a kind of device where the user says nothing: of `models`, its sizes."""
    takes = [] if ":" in build.__name__ else [_FIELDS.get(name) for name in inspect.signature(build).parameters]
    chosen = {"network.name": build.__name__} | {name: each for name, each in SIZES[device].items() if name in takes}
    return chosen if build.__name__ == config.NETWORK else {**chosen, "channels_last": False}


def choose_divisor(config: SegmentationConfig, build: Build, channels: int) -> tuple[int, nn.Module | None]:
    """Return the power of 2 that must divide the sides of crops and windows; if found by trial, the network on "meta".

    Raises:
        ValueError: the network takes no images of `channels`; or a crop or window of the configuration is no multiple.
    """
    if (levels := config.halvings()) is not None:
        return 2**levels, None  # the configuration has checked them
    arguments = network_arguments(config, build)
    try:
        with torch.random.fork_rng(devices=[]):
            network = build(channels, 2, **arguments).to("meta")
    except BROKEN as error:
        raise ValueError(f"network {build.__name__}: invalid arguments {arguments} ({first_line(error)})") from error
    for divisor in _DIVISORS:
        with suppress(*([ValueError] if divisor < _DIVISORS[-1] else [])):
            coarsest_planes(network, channels, (_ODD * divisor,) * 3, f"network {build.__name__}: an image of")
            break
    config.check_sides(divisor, f"for the network {build.__name__}")
    return divisor, network


def coarsest_planes(network: nn.Module, channels: int, size: Size, told: str = "crop_size") -> int:
    """Return the fewest voxels along X that a convolution of a network on "meta" reads from images of a size X, Y, Z.

    Raises:
        ValueError: the network does not take them, does not return logits of their size, or does not use a weight.
    """
    planes = [size[0]]
    kernels = (each for each in network.modules() if isinstance(each, nn.Conv3d) and max(each.kernel_size) > 1)
    hooks = [each.register_forward_pre_hook(lambda _, given: planes.append(given[0].shape[2])) for each in kernels]
    try:
        logits = network(torch.empty(1, channels, *size, device="meta"))
        found = tuple(logits.shape) if isinstance(logits, torch.Tensor) else f"a {type(logits).__name__}"
        if found != (1, 2, *size):
            raise ValueError(f"{found} is returned instead of logits {(1, 2, *size)}")
        torch.autograd.backward(logits.sum())
        if idle := [name for name, each in network.named_parameters() if each.requires_grad and each.grad is None]:
            raise ValueError(f"the logits do not depend on the weight {idle[0]}: freeze it (requires_grad = False)")
    except BROKEN as error:
        raise ValueError(f"{told} {size}: {type(network).__name__} does not take it ({first_line(error)})") from error
    finally:
        for hook in hooks:
            hook.remove()
    return min(planes)
