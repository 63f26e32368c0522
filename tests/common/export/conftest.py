"""A small network and its exports, made once for all tests of the export."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from medspeed.common.export.onnx_model import export_onnx
from medspeed.common.inference.predictors import Predictor
from medspeed.models.unet3d import unet3d

WINDOW = (1, 16, 16, 16)


@pytest.fixture(scope="session")
def network() -> nn.Module:
    """A U-Net with weights and running statistics that are not the initial ones, in training mode."""
    torch.manual_seed(0)
    unet = unet3d(1, 2, (4, 8, 16))
    for _ in range(3):
        unet(torch.rand(2, *WINDOW))
    return unet.train()


@pytest.fixture(scope="session")
def windows() -> torch.Tensor:
    """Four windows [4, 1, 16, 16, 16]."""
    return torch.rand(4, *WINDOW, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, network: nn.Module) -> Path:
    """The folder of model_fp32.onnx and model_fp16.onnx; read only."""
    folder = tmp_path_factory.mktemp("exports")
    metadata = {"name": "small", "classes": "background spleen"}
    export_onnx(network, folder / "model_fp32.onnx", WINDOW, "fp32", metadata, batch=2)
    export_onnx(network, folder / "model_fp16.onnx", WINDOW, "fp16", metadata, batch=2)
    return folder


@pytest.fixture
def tiny() -> nn.Sequential:
    """The quickest network to export: [B, 1, 8, 8, 8] to two classes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.PReLU(), nn.Conv3d(4, 2, 1))


@pytest.fixture(scope="session")
def overflowing() -> nn.Module:
    """A network whose middle activations pass what half precision holds, and whose logits do not."""
    torch.manual_seed(0)
    first, last = nn.Conv3d(1, 4, 3, padding=1), nn.Conv3d(4, 2, 1)
    with torch.no_grad():
        first.weight *= 3e5
        last.weight *= 1e-5
    return nn.Sequential(first, nn.PReLU(), last)


@pytest.fixture
def dices() -> Callable[..., Callable[[Predictor], float]]:
    """Return a function that makes an `evaluate`: it calls its predictor and answers with the given numbers in turn."""

    def make(*answers: float, shape: tuple[int, ...] = (1, 1, 8, 8, 8)) -> Callable[[Predictor], float]:
        left = list(answers)

        def evaluate(predict: Predictor) -> float:
            assert predict(torch.zeros(shape)).shape[0] == shape[0]
            return left.pop(0) if len(left) > 1 else left[0]

        return evaluate

    return make
