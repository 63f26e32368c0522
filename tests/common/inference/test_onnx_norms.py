"""Exact group normalisation in ONNX Runtime, against torch in float64."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from common.export.onnx_model import export_onnx
from common.inference.onnx_norms import with_exact_norms
from models.segresnet3d import segresnet3d
from models.unet3d import unet3d


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    network = segresnet3d(2, 3, 8, (1, 1)).eval()
    for name, value in network.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(value, 1.0, 0.3)
    return network


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_logits_are_torchs_in_large_windows(network, tmp_path, precision):
    path = export_onnx(network, tmp_path / "model.onnx", (2, 96, 96, 96), precision, {})
    generator = torch.Generator().manual_seed(1)
    image = 3 * torch.randn(1, 2, 96, 96, 96, generator=generator) + 2
    with torch.no_grad():
        expected = network(image).numpy()
    exact = onnxruntime.InferenceSession(with_exact_norms(path)).run(None, {"image": image.numpy()})[0]
    plain = onnxruntime.InferenceSession(path.read_bytes()).run(None, {"image": image.numpy()})[0]
    differences = [float(np.abs(found - expected).max()) for found in (exact, plain)]
    if precision == "fp32":
        assert differences[0] < 1e-5
        assert (
            differences[0] < differences[1] / 10
        )  # why this module is there; when it fails, ONNX Runtime has learnt it
    else:
        assert differences[0] < 0.02


def test_the_file_keeps_the_operator_and_other_models_their_bytes(network, tmp_path):
    path = export_onnx(network, tmp_path / "model.onnx", (2, 16, 16, 16), "fp32", {})
    kept = [node.op_type for node in onnx.load(str(path)).graph.node]
    assert kept.count("GroupNormalization") == sum(isinstance(m, torch.nn.GroupNorm) for m in network.modules())
    written_out = onnx.load_from_string(with_exact_norms(path))
    assert "GroupNormalization" not in [node.op_type for node in written_out.graph.node]
    onnx.checker.check_model(written_out, full_check=True)
    other = export_onnx(unet3d(1, 2, (4, 8)).eval(), tmp_path / "unet.onnx", (1, 16, 16, 16), "fp32", {})
    assert with_exact_norms(other) == other.read_bytes()
