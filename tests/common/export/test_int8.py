import importlib.util
import logging
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from medspeed.common.clock import Clock
from medspeed.common.export.deploy import quantise
from medspeed.common.export.export import (
    LOGIT_SHARES,
    Exported,
    Gate,
    ParityError,
    check_predictor,
    export,
    take_reference,
)
from medspeed.common.export.onnx_model import export_onnx, read_metadata
from medspeed.common.export.tensorrt_engine import build_engine
from medspeed.common.inference.predictors import Predictor, onnxruntime_predictor, with_exact_norms
from medspeed.common.inference.tensorrt_runtime import read_manifest
from medspeed.common.run import Run
from medspeed.models.resnet18_fcn import resnet18_fcn
from medspeed.models.segresnet3d import segresnet3d

UNET_TAKEN = {"Conv": 11, "ConvTranspose": 2}


def values(model: Any) -> dict[str, np.ndarray]:
    return {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}


def makers(model: Any) -> dict[str, Any]:
    return {node.output[0]: node for node in model.graph.node}


@pytest.fixture(scope="module")
def int8(exported: Path, windows: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The U-Net's INT8 model in a folder of its own, read only."""
    path = tmp_path_factory.mktemp("int8") / "model_int8.onnx"
    quantise(exported / "model_fp32.onnx", path, windows)
    return path


def test_only_the_inputs_and_weights_of_convolutions_are_quantised(int8: Path, exported: Path):
    model: Any = onnx.load(int8)
    made, known = makers(model), values(model)
    before = Counter(node.op_type for node in onnx.load(exported / "model_fp32.onnx").graph.node)
    after = Counter(node.op_type for node in model.graph.node)
    restored = {name: node for name, node in made.items() if node.op_type == "DequantizeLinear"}
    inputs = {node.input[0] for node in model.graph.node if node.op_type in UNET_TAKEN}
    weights = {node.input[1] for node in model.graph.node if node.op_type in UNET_TAKEN}
    assert inputs | weights == set(restored)
    assert {made[restored[name].input[0]].op_type for name in inputs} == {"QuantizeLinear"}
    assert {known[restored[name].input[0]].dtype for name in weights} == {np.dtype(np.int8)}
    biases = [known[node.input[2]] for node in model.graph.node if node.op_type in UNET_TAKEN]
    assert {bias.dtype for bias in biases} == {np.dtype(np.float32)}  # TensorRT-RTX refuses int32
    assert after.pop("QuantizeLinear") == len(inputs)
    assert after.pop("DequantizeLinear") == len(inputs) + sum(UNET_TAKEN.values())
    assert after == before
    assert {name: before[name] for name in UNET_TAKEN} == UNET_TAKEN


def test_scales_are_those_made_by_hand(tmp_path: Path):
    convolution = nn.Conv3d(1, 2, 1)
    transposed = nn.ConvTranspose3d(2, 3, 1)
    with torch.no_grad():
        convolution.weight.copy_(torch.tensor([1.27, -0.0254]).view(2, 1, 1, 1, 1))
        assert convolution.bias is not None
        convolution.bias.copy_(torch.tensor([0.5, 0.25]))
        transposed.weight.copy_(torch.tensor([[1.0, -2.0, 0.0], [-0.5, 4.0, 0.0]]).view(2, 3, 1, 1, 1))
    export_onnx(nn.Sequential(convolution, transposed), tmp_path / "fp32.onnx", (1, 2, 2, 2), "fp32", {})
    windows = torch.zeros(3, 1, 2, 2, 2)
    windows[1, 0, 0, 0, 0], windows[2, 0, 1, 1, 1] = -2.54, 1.0  # the largest is in one window alone, and negative
    quantise(tmp_path / "fp32.onnx", tmp_path / "int8.onnx", windows)
    model: Any = onnx.load(tmp_path / "int8.onnx")
    known, made = values(model), makers(model)
    first, second = (node for node in model.graph.node if node.op_type.startswith("Conv"))
    image, weight = (made[name] for name in first.input[:2])
    assert known[image.input[1]] == pytest.approx(0.02)
    assert known[image.input[2]] == known[weight.input[2]].max() == known[weight.input[2]].min() == 0
    np.testing.assert_allclose(known[weight.input[1]], [0.01, 0.0002], rtol=1e-6)
    assert known[weight.input[0]].ravel().tolist() == [127, -127]
    hidden, weight = (made[name] for name in second.input[:2])
    assert known[hidden.input[1]] == pytest.approx((1.27 * 2.54 - 0.5) / 127, rel=1e-5)
    assert {each.name: each.i for each in weight.attribute}["axis"] == 1  # its channels of output
    np.testing.assert_allclose(known[weight.input[1]][:2], [1 / 127, 4 / 127], rtol=1e-6)
    assert known[weight.input[0]].reshape(2, 3).tolist() == [[127, -64, 0], [-64, 127, 0]]


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_any_batch_gives_nearly_the_logits_of_fp32(int8: Path, exported: Path, windows: torch.Tensor, batch: int):
    expected = onnxruntime_predictor(exported / "model_fp32.onnx")(windows[:batch])
    found = onnxruntime_predictor(int8)(windows[:batch])
    assert 1e-4 < (found - expected).abs().max() < 0.1 * expected.abs().max()


def test_metadata_is_kept_and_the_file_is_one_and_small(int8: Path, exported: Path):
    fp32 = exported / "model_fp32.onnx"
    assert read_metadata(int8) == {**read_metadata(fp32), "precision": "int8"}
    assert [path.name for path in int8.parent.iterdir()] == ["model_int8.onnx"]
    assert int8.stat().st_size < 0.5 * fp32.stat().st_size


def test_the_same_bytes_silently(
    int8: Path,
    exported: Path,
    windows: torch.Tensor,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
):
    before = (exported / "model_fp32.onnx").read_bytes()
    quantise(exported / "model_fp32.onnx", tmp_path / "model_int8.onnx", windows)
    content = (tmp_path / "model_int8.onnx").read_bytes()
    assert content == int8.read_bytes()
    assert (exported / "model_fp32.onnx").read_bytes() == before
    for folder in (tmp_path, Path(__file__).parents[3], Path(sys.prefix)):
        assert str(folder).encode() not in content
    assert b"ort.quant" not in content
    assert capfd.readouterr() == ("", "")
    assert [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING] == []


@pytest.mark.slow
def test_the_same_bytes_whatever_the_order_of_sets(int8: Path, exported: Path, windows: torch.Tensor, tmp_path: Path):
    np.save(tmp_path / "windows.npy", windows.numpy())
    script = (
        "import sys, numpy, torch; from pathlib import Path; from medspeed.common.export.deploy import quantise; "
        "a, b, c = map(Path, sys.argv[1:]); quantise(a, b, torch.from_numpy(numpy.load(c)))"
    )
    for seed in ("1", "2"):
        other = tmp_path / f"{seed}.onnx"
        paths = (exported / "model_fp32.onnx", other, tmp_path / "windows.npy")
        env = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run(
            [sys.executable, "-c", script, *map(str, paths)], env=env, cwd=Path(__file__).parents[3], check=True
        )
        assert other.read_bytes() == int8.read_bytes()


def test_windows_go_through_one_at_a_time(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import onnxruntime
    from onnxruntime.quantization import calibrate

    shapes: list[tuple[int, ...]] = []
    returned: list[int] = []

    class Session(onnxruntime.InferenceSession):  # type: ignore[misc]
        def run(self, names: Any, feed: dict[str, np.ndarray]) -> Any:
            result = super().run(names, feed)
            shapes.append(feed["image"].shape)
            returned.append(max(value.size for value in result[1:]))  # the first are the logits, which are dropped
            return result

    monkeypatch.setattr(calibrate.onnxruntime, "InferenceSession", Session)
    quantise(exported / "model_fp32.onnx", tmp_path / "int8.onnx", torch.rand(3, 1, 16, 16, 16))
    assert shapes == [(1, 1, 16, 16, 16)] * 3
    assert returned == [1, 1, 1]  # ranges, not activations


def test_an_invalid_result_replaces_nothing(
    exported: Path, tmp_path: Path, windows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
):
    def refuse(part: str, full_check: bool) -> None:
        raise onnx.checker.ValidationError("not valid")

    path = tmp_path / "model_int8.onnx"
    path.write_bytes(b"the old one")
    monkeypatch.setattr(onnx.checker, "check_model", refuse)
    with pytest.raises(ValueError, match=r"model_fp32\.onnx: .*not valid"):
        quantise(exported / "model_fp32.onnx", path, windows)
    assert path.read_bytes() == b"the old one"
    assert list(tmp_path.iterdir()) == [path]


def check_made(network: nn.Module, folder: Path, window: tuple[int, ...], smallest: tuple[int, ...] | None) -> Path:
    """Check an INT8 model's operators, its logits and, where it is installed, TensorRT-RTX; return its path."""
    fp32, path = folder / "model_fp32.onnx", folder / "model_int8.onnx"
    export_onnx(network, fp32, window, "fp32", {}, smallest, batch=2)
    windows = torch.randn(3, *window, generator=torch.Generator().manual_seed(3))
    quantise(fp32, path, windows)
    model: Any = onnx.load(path)
    restored = {node.output[0] for node in model.graph.node if node.op_type == "DequantizeLinear"}
    for node in model.graph.node:
        weighted = node.op_type in UNET_TAKEN
        assert not weighted or restored.issuperset(node.input[:2]), node.name
    expected = onnxruntime_predictor(fp32)(windows)
    assert 1e-4 < (onnxruntime_predictor(path)(windows) - expected).abs().max() < 0.2 * expected.abs().max()
    if importlib.util.find_spec("tensorrt_rtx"):
        assert build_engine(path, "tensorrt_rtx").precision == "int8"
    return path


def test_images_with_free_sides(tmp_path: Path):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.AvgPool2d(4, 1), nn.Conv2d(4, 1, 1))
    path = check_made(network, tmp_path, (3, 40, 40), (3, 8, 8))
    assert onnxruntime_predictor(path)(torch.rand(2, 3, 8, 24)).shape == (2, 1, 1, 9)


def test_group_norms_are_written_out_in_int8_too(tmp_path: Path):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv3d(2, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv3d(8, 3, 1))
    path = check_made(network, tmp_path, (2, 8, 8, 8), None)
    kinds = Counter(node.op_type for node in onnx.load_from_string(with_exact_norms(path)).graph.node)
    assert (kinds["GroupNormalization"], kinds["ReduceMean"], kinds["Conv"]) == (0, 4, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "window", "smallest"),
    [
        (partial(segresnet3d, 2, 3, 8, (1, 1)), (2, 8, 8, 8), None),
        (partial(resnet18_fcn, 32), (3, 64, 64), (3, 32, 32)),
    ],
    ids=["segresnet3d", "resnet18_fcn"],
)
def test_networks_of_the_other_apps(
    tmp_path: Path, network: Callable[[], nn.Module], window: tuple[int, ...], smallest: tuple[int, ...] | None
):
    torch.manual_seed(0)
    check_made(network(), tmp_path, window, smallest)


def test_rtx_builds_the_unet(int8: Path, exported: Path, tmp_path: Path):
    pytest.importorskip("tensorrt_rtx")
    if torch.cuda.is_available():
        pytest.skip("with a GPU another flavour may build it anew")
    sizes = {}
    for precision, model in (("fp32", exported / "model_fp32.onnx"), ("int8", int8)):
        plan = tmp_path / f"model_{precision}.plan"
        plan.with_suffix(".onnx").write_bytes(model.read_bytes())
        built = build_engine(plan.with_suffix(".onnx"), "tensorrt_rtx")
        assert built == read_manifest(plan)
        sizes[precision] = plan.stat().st_size
    assert sizes["int8"] != sizes["fp32"]
    assert (built.precision, built.batch) == ("int8", (1, 2, 4))


class Threshold(nn.Module):
    """Foreground where a voxel is above 0.3: its Dice against that rule is 1, and only the range can break it."""

    def __init__(self) -> None:
        super().__init__()
        self.judge = nn.Conv3d(1, 2, 1)
        with torch.no_grad():
            self.judge.weight.copy_(torch.tensor([0.0, 1.0]).view(2, 1, 1, 1, 1))
            assert self.judge.bias is not None
            self.judge.bias.copy_(torch.tensor([0.3, 0.0]))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.judge(image)
        return logits


IMAGES = torch.rand(4, 1, 8, 8, 8, generator=torch.Generator().manual_seed(2))
"""Values in [0, 1]; those between 0.3 and 0.5 are a fifth."""


def dice(predict: Predictor) -> float:
    logits, truth = predict(IMAGES), IMAGES[:, 0] > 0.3
    found = logits[:, 1] > logits[:, 0]
    return float(2 * (found & truth).sum() / (found.sum() + truth.sum()))


@pytest.fixture(scope="module")
def threshold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fp32 model of `Threshold`; read only."""
    return export_onnx(Threshold(), tmp_path_factory.mktemp("t") / "model_fp32.onnx", (1, 8, 8, 8), "fp32", {})


def int8_record(folder: Path, calibration: torch.Tensor) -> Exported:
    (folder / "best.safetensors").write_bytes(b"weights")
    run = Run(folder, torch.device("cpu"), Clock(), resumed=True)
    gate = Gate(IMAGES[:2], dice, "Dice on images", batch=2)
    record = export(Threshold(), gate, run, "none", partial(quantise, windows=calibration))
    assert [model.precision for model in record] == ["fp32", "fp16", "int8", ""]
    assert [model.reason for model in record] == [None, None, record[2].reason, "disabled"]
    return record[2]


def test_good_calibration_passes(tmp_path: Path):
    record = int8_record(tmp_path, IMAGES[2:])
    assert record.reason is None
    assert record.quality_delta is not None
    assert record.quality_delta < 0.01
    assert record.bytes == (tmp_path / "exports" / "model_int8.onnx").stat().st_size


def test_bad_calibration_is_refused_and_leaves_nothing(tmp_path: Path):
    (tmp_path / "exports").mkdir()
    for old in ("model_int8.onnx", "model_int8.plan", "model_int8.plan.json"):
        (tmp_path / "exports" / old).write_bytes(b"of an earlier export")
    record = int8_record(tmp_path, IMAGES * 1e-3)
    assert (record.path, record.sha256, record.bytes) == (None, None, None)
    assert record.reason is not None
    assert "a logit differs" in record.reason
    assert {path.name for path in (tmp_path / "exports").iterdir()} == {"model_fp32.onnx", "model_fp16.onnx"}


@pytest.mark.parametrize(("bad", "least"), [(IMAGES * 1e-3, 0.0), (IMAGES * 0, 0.8)], ids=["scaled", "zeros"])
def test_the_quality_alone_refuses_it_too(
    threshold: Path, tmp_path: Path, bad: torch.Tensor, least: float, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(LOGIT_SHARES, "int8", math.inf)
    reference = take_reference(Threshold(), Gate(IMAGES[:2], dice, ""))
    assert reference.quality == 1
    path = tmp_path / "int8.onnx"
    quantise(threshold, path, bad)
    with pytest.raises(ParityError, match=r"int8\.onnx: validation quality 0\..*, 1\.0000 in PyTorch .*bound 0\.01\)"):
        check_predictor(reference, onnxruntime_predictor(path), "int8", str(path))
    assert least <= dice(onnxruntime_predictor(path)) < 0.98


def test_calibration_too_wide_is_refused_by_the_quality(tmp_path: Path):
    record = int8_record(tmp_path, IMAGES * 60)  # spans the images, in steps of half their range
    assert record.reason is not None
    assert "validation quality" in record.reason
    assert not (tmp_path / "exports" / "model_int8.onnx").exists()
