"""Weights to start from: a run's own, or TorchVision's ResNet-18."""

from pathlib import Path

from torch import nn

from common.training.checkpoints import initialise, load_weights

_NO_PLACE = ("fc.weight", "fc.bias")  # ImageNet's thousand classes


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
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file of weights")
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
