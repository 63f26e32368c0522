from pathlib import Path

import pytest
import torch

from apps.pathology.weights import initialise_from
from common.inference.model import save_weights
from models.resnet18_fcn import resnet18_fcn


def torchvision_like(path: Path, **changes: torch.Tensor) -> Path:
    torch.manual_seed(1)
    weights = {name: torch.rand_like(value.float()) for name, value in resnet18_fcn(32).features.state_dict().items()}
    weights = {name: value for name, value in weights.items() if not name.endswith("num_batches_tracked")}
    torch.save({**weights, "fc.weight": torch.zeros(1000, 512), "fc.bias": torch.zeros(1000), **changes}, path)
    return path


def test_imagenet_weights_become_the_features(tmp_path: Path):
    network = resnet18_fcn(96)
    head = network.head.weight.clone()
    path = torchvision_like(tmp_path / "resnet18.pth")
    assert "the features from" in initialise_from(network, path)
    stored = torch.load(path, weights_only=True)
    for name, value in network.features.state_dict().items():
        assert name.endswith("num_batches_tracked") or torch.equal(value, stored[name])
    assert torch.equal(network.head.weight, head)


def test_our_own_weights_are_taken_whole(tmp_path: Path):
    torch.manual_seed(2)
    other, network = resnet18_fcn(96), resnet18_fcn(96)
    save_weights(tmp_path / "best.safetensors", other.state_dict(), {})
    assert "all from" in initialise_from(network, tmp_path / "best.safetensors")
    assert torch.equal(network.head.weight, other.head.weight)


def test_other_weights_are_refused(tmp_path: Path):
    network = resnet18_fcn(96)
    with pytest.raises(FileNotFoundError, match=r"none\.pth: no such weights file"):
        initialise_from(network, tmp_path / "none.pth")
    path = torchvision_like(tmp_path / "wide.pth", **{"conv1.weight": torch.zeros(64, 4, 7, 7)})
    with pytest.raises(ValueError, match=r"wide\.pth: not the weights .* another shape \['conv1.weight'\]"):
        initialise_from(network, path)
    torch.save({"conv1.weight": torch.zeros(64, 3, 7, 7)}, tmp_path / "part.pth")
    with pytest.raises(ValueError, match="missing"):
        initialise_from(network, tmp_path / "part.pth")


def test_a_damaged_file_is_named(tmp_path: Path):
    (tmp_path / "resnet18.pth").write_bytes(b"no weights at all")
    with pytest.raises(ValueError, match=r"resnet18\.pth: not a state dict that can be loaded safely"):
        initialise_from(resnet18_fcn(64), tmp_path / "resnet18.pth")
