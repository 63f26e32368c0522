import copy
import logging
import signal
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from medspeed.common.export.onnx_model import export_onnx, in_half, read_metadata
from medspeed.common.inference.predictors import onnx_errors
from medspeed.common.run import STOP_SIGNALS, exit_by_signal, take_signals

WINDOW = (1, 16, 16, 16)


def run(path: Path, windows: torch.Tensor) -> torch.Tensor:
    session: Any = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["logits"], {"image": windows.numpy()})[0])


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-5), ("fp16", 2e-2)])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_any_batch_gives_the_logits_of_torch(
    exported: Path, network: nn.Module, windows: torch.Tensor, precision: str, bound: float, batch: int
):
    with torch.no_grad():
        expected = copy.deepcopy(network).eval()(windows[:batch])
    found = run(exported / f"model_{precision}.onnx", windows[:batch])
    assert found.dtype == torch.float32
    assert found.shape == (batch, 2, 16, 16, 16)
    assert (found - expected).abs().max() <= bound
    assert expected.abs().max() > 0.3  # so that the bound says something


def test_precision_is_in_the_graph_and_float32_at_its_ends(exported: Path):
    kinds = {}
    for precision in ("fp32", "fp16"):
        model: Any = onnx.load(exported / f"model_{precision}.onnx")
        ends = [model.graph.input[0], model.graph.output[0]]
        assert [end.name for end in ends] == ["image", "logits"]
        assert {end.type.tensor_type.elem_type for end in ends} == {onnx.TensorProto.FLOAT}
        assert [entry.version for entry in model.opset_import if not entry.domain] == [21]
        kinds[precision] = {item.data_type for item in model.graph.initializer} - {onnx.TensorProto.INT64}
    assert kinds == {"fp32": {onnx.TensorProto.FLOAT}, "fp16": {onnx.TensorProto.FLOAT16}}
    sizes = {name: (exported / f"model_{name}.onnx").stat().st_size for name in kinds}
    assert sizes["fp16"] < 0.7 * sizes["fp32"]
    assert {path.name for path in exported.iterdir()} == {"model_fp32.onnx", "model_fp16.onnx"}  # nothing beside them


def test_free_sides_take_images_of_any_size_between(tmp_path: Path):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.AvgPool2d(4, 1), nn.Conv2d(4, 1, 1)).eval()
    path = export_onnx(network, tmp_path / "free.onnx", (3, 40, 40), "fp32", {}, smallest=(3, 8, 8))
    assert [read_metadata(path)[name] for name in ("window", "smallest")] == ["3 40 40", "3 8 8"]
    for shape in ((1, 3, 8, 8), (3, 3, 40, 24)):
        image = torch.rand(shape)
        with torch.no_grad():
            expected = network(image)
        assert (run(path, image) - expected).abs().max() < 1e-6


def test_metadata_comes_back(exported: Path):
    assert read_metadata(exported / "model_fp16.onnx") == {
        "name": "small",
        "classes": "background spleen",
        "batch": "1 2 4",
        "precision": "fp16",
        "window": "1 16 16 16",
        "smallest": "1 16 16 16",
    }


def test_the_same_weights_give_the_same_bytes_silently_and_are_left_alone(
    tmp_path: Path,
    exported: Path,
    network: nn.Module,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.WARNING, logger="torch.onnx")  # lower, and what torch set up for its own logs prints
    training = copy.deepcopy(network)
    for weight in training.parameters():
        if weight.ndim == 5:
            weight.data = weight.data.contiguous(memory_format=torch.channels_last_3d)
    before, learned = copy.deepcopy(training.state_dict()), [weight.requires_grad for weight in training.parameters()]
    metadata = {"name": "small", "classes": "background spleen"}
    path = export_onnx(training, tmp_path / "new" / "model.onnx", WINDOW, "fp32", metadata, batch=2)
    content = path.read_bytes()
    assert content == (exported / "model_fp32.onnx").read_bytes()
    assert b"site-packages" not in content
    assert str(Path(__file__).parents[3]).encode() not in content
    assert training.training
    assert all(weight.dtype == torch.float32 for weight in training.parameters())
    assert [weight.requires_grad for weight in training.parameters()] == learned
    assert all(torch.equal(before[name], value) for name, value in training.state_dict().items())
    assert capfd.readouterr() == ("", "")
    assert [record.getMessage() for record in caplog.records if "torchvision" in record.getMessage()] == []
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "model.onnx"]


def test_a_model_that_the_checker_refuses_replaces_nothing(
    tmp_path: Path, tiny: nn.Module, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"the old one")

    def refuse(part: str, full_check: bool) -> None:
        assert full_check
        assert Path(part).stat().st_size > 0
        raise onnx.checker.ValidationError("not valid")

    monkeypatch.setattr(onnx.checker, "check_model", refuse)
    with pytest.raises(ValueError, match="not valid"):
        export_onnx(tiny, path, (1, 8, 8, 8), "fp32", {})
    assert path.read_bytes() == b"the old one"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_program_behind_the_trace(
    tiny: nn.Sequential, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
):
    """Within, torch's callbacks would lose what a handler raises."""
    exported: list[Any] = []
    plain = torch.onnx.export

    class Callback:
        def __del__(self) -> None:
            signal.raise_signal(number)

    def export(*given: Any, **named: Any) -> Any:
        Callback()
        exported.append(plain(*given, **named))
        return exported[0]

    monkeypatch.setattr(torch.onnx, "export", export)
    ends = (SystemExit, KeyboardInterrupt)
    with take_signals(STOP_SIGNALS, exit_by_signal), pytest.raises(ends):
        export_onnx(tiny, tmp_path / "a.onnx", WINDOW, "fp32", {})
    assert exported
    assert not [*tmp_path.iterdir()]


def test_half_network_computes_in_half(tiny: nn.Sequential):
    dtypes = []
    half = in_half(tiny)
    tiny[1].register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    with torch.no_grad():
        assert half(torch.zeros(1, 1, 8, 8, 8)).dtype == torch.float32
    assert dtypes == [torch.float16]


def test_other_files_have_no_metadata(tmp_path: Path):
    path = tmp_path / "model.onnx"
    with pytest.raises(ValueError, match=r"model\.onnx: out of memory: use a machine with more"), onnx_errors(path):
        raise RuntimeError("[ONNXRuntimeError] : 6 : Failed to allocate memory for requested buffer")
    path.write_bytes(b"this is not a usable ONNX model at all")
    with pytest.raises(ValueError, match=r"model\.onnx: not a usable ONNX model"):
        read_metadata(path)
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([], "empty", [], [])), str(path))
    with pytest.raises(ValueError, match=r"model\.onnx: no `precision` in its metadata"):
        read_metadata(path)
