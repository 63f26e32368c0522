"""Weights to start from: a run's own, TorchVision's ResNet-18, or those of MONAI's bundle."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.inference.model import initialise, load_weights

_NO_PLACE = ("fc.weight", "fc.bias")  # ImageNet's thousand classes
# Places of the parts of TorchVision's ResNet in MONAI's `TorchVisionFCModel.features`.
_NUMBERED = {"0": "conv1", "1": "bn1", "4": "layer1", "5": "layer2", "6": "layer3", "7": "layer4"}

TWIN: dict[str, Any] = {
    "_target_": "ResNet",
    "block": "basic",
    "layers": [2, 2, 2, 2],
    "block_inplanes": [64, 128, 256, 512],
    "spatial_dims": 2,
    "n_input_channels": 3,
    "conv1_t_size": 7,
    "conv1_t_stride": 2,
    "num_classes": 1,
    "bias_downsample": False,
}
"""MONAI's class and arguments that compute on one patch what `resnet18_fcn` does, with `resnet_weights`."""


def initialise_from(network: nn.Module, path: Path) -> str:
    """Load weights into a `resnet18_fcn`, and say in a line which.

    Args:
        network: is changed in place.
        path: a .safetensors of ours, which must fit whole, or a .pth of TorchVision's ResNet-18, whose last layer has
            no place here. ImageNet's weights are for research: its licence forbids commercial use.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: names and shapes are not those of a ResNet-18.
    """
    if path.suffix == ".safetensors":
        initialise(network, path)
        return f"weights: all from {path}"
    stored = load_weights(path)
    features = network.features
    assert isinstance(features, nn.Module)
    own = features.state_dict()
    given = {name: value for name, value in stored.items() if name not in _NO_PLACE}
    counters = {name for name in own if name.endswith("num_batches_tracked")}  # old files have none
    wrong = sorted(name for name in own.keys() & given.keys() if own[name].shape != given[name].shape)
    missing, extra = sorted(own.keys() - given.keys() - counters), sorted(given.keys() - own.keys())
    if missing or extra or wrong:
        raise ValueError(
            f"{path}: not the weights of TorchVision's ResNet-18; missing {missing[:3]}, left over {extra[:3]}, of "
            f"another shape {wrong[:3]}"
        )
    features.load_state_dict({**{name: own[name] for name in counters}, **given})
    return f"weights: the features from {path}, the head drawn anew"


def our_name(name: str) -> str:
    """Return our name of a weight of MONAI's `TorchVisionFCModel`, whose features are numbered; others stay."""
    first, _, rest = name.partition(".")
    if first == "fc":
        return f"head.{rest}"
    number, _, rest = rest.partition(".")
    return f"features.{_NUMBERED[number]}.{rest}" if first == "features" and number in _NUMBERED else name


def resnet_weights(network: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of a `resnet18_fcn` by the names of `TWIN`, whose last layer is linear."""
    named = {
        name.removeprefix("features.").replace("head.", "fc."): value for name, value in network.state_dict().items()
    }
    return named | {"fc.weight": named["fc.weight"].flatten(1)}
