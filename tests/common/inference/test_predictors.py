import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from common.export.onnx_model import export_onnx
from common.export.tensorrt_engine import build_engine
from common.inference.predictors import (
    Backend,
    Precision,
    engine_predictor,
    onnxruntime_predictor,
    open_predictor,
    torch_predictor,
)
from common.inference.tensorrt_host import EngineUnavailableError
from models.unet3d import unet3d

CPU = torch.device("cpu")
WINDOW = (1, 16, 16, 16)
InstallFake = Callable[..., Any]


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    return unet3d(1, 2, (4, 8, 16)).eval()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, network: nn.Module) -> Path:
    """A run folder with both ONNX models; read only."""
    run = tmp_path_factory.mktemp("run")
    export_onnx(network, run / "exports" / "model_fp32.onnx", WINDOW, "fp32", {"batch": "1 2 4"})
    export_onnx(network, run / "exports" / "model_fp16.onnx", WINDOW, "fp16", {"batch": "1 2 4"})
    return run


@pytest.fixture
def run(tmp_path: Path, exported: Path) -> Path:
    """A copy of the run folder that a test may change."""
    return Path(shutil.copytree(exported, tmp_path / "run"))


@pytest.fixture
def windows() -> torch.Tensor:
    return torch.rand(3, *WINDOW, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-5), ("bf16", 5e-2), ("fp16", 5e-3)])
def test_torch_predictor(
    network: nn.Module, windows: torch.Tensor, precision: Precision, bound: float, channels_last: bool
):
    with torch.no_grad():
        expected = network(windows)
    logits = torch_predictor(copy.deepcopy(network), precision, channels_last)(windows)
    assert (logits.dtype, logits.shape, logits.requires_grad) == (torch.float32, (3, 2, 16, 16, 16), False)
    difference = float((logits - expected).abs().max())
    assert difference <= bound
    assert (difference > 1e-5) == (precision != "fp32")
    logits += 1  # the caller may change it in place


def test_torch_predictor_computes_in_the_asked_precision_and_layout(network: nn.Module, windows: torch.Tensor):
    seen = []
    copied = copy.deepcopy(network)
    conv = next(module for module in copied.modules() if isinstance(module, nn.Conv3d))
    conv.register_forward_hook(lambda module, inputs, output: seen.append(output))
    torch_predictor(copied, "bf16", channels_last=True)(windows)
    assert seen[0].dtype == torch.bfloat16
    assert seen[0].is_contiguous(memory_format=torch.channels_last_3d)
    torch_predictor(copied)(windows)
    assert seen[1].dtype == torch.float32


def test_torch_predictor_refuses_a_network_in_training(network: nn.Module):
    with pytest.raises(AssertionError, match=r"network\.eval\(\)"):
        torch_predictor(copy.deepcopy(network).train())


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-5), ("bf16", 5e-2), ("fp16", 5e-3)])
def test_an_opened_network_is_folded_and_computes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, windows: torch.Tensor, precision: Precision, bound: float
):
    torch.manual_seed(1)
    network = unet3d(1, 2, (4, 8, 16))
    for _ in range(5):
        network(torch.rand(4, *WINDOW))  # running statistics that change something
    network.eval()
    run_by: list[nn.Module] = []

    def seen(each: nn.Module, *arguments: Any, **named: Any) -> Any:
        run_by.append(each)
        return torch_predictor(each, *arguments, **named)

    monkeypatch.setattr("common.inference.predictors.torch_predictor", seen)
    opened = open_predictor(tmp_path, lambda: copy.deepcopy(network), precision=precision, device=CPU)
    with torch.no_grad():
        expected = network(windows)
    assert float((opened.predict(windows) - expected).abs().max()) <= bound * float(expected.abs().max())
    assert not any(isinstance(each, nn.BatchNorm3d | nn.ConvTranspose3d) for each in run_by[0].modules())


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("threads", [None, 1])
def test_onnxruntime_predictor(
    exported: Path, network: nn.Module, windows: torch.Tensor, batch: int, threads: int | None
):
    predict = onnxruntime_predictor(exported / "exports" / "model_fp32.onnx", threads)
    logits = predict(windows[:batch])
    with torch.no_grad():
        expected = network(windows[:batch])
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    kept = logits.clone()
    predict(windows[:batch] + 1)
    assert torch.equal(logits, kept)


def test_onnxruntime_predictor_takes_any_layout_and_float(exported: Path, windows: torch.Tensor):
    predict = onnxruntime_predictor(exported / "exports" / "model_fp32.onnx")
    strange = windows.double().permute(0, 4, 3, 2, 1).contiguous().permute(0, 4, 3, 2, 1)
    assert torch.equal(predict(strange), predict(windows))


def test_onnxruntime_predictor_refuses_what_does_not_fit(exported: Path, tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"no\.onnx is missing: export the model first"):
        onnxruntime_predictor(tmp_path / "no.onnx")
    predict = onnxruntime_predictor(exported / "exports" / "model_fp32.onnx")
    with pytest.raises(ValueError, match=r"windows \(1, 1, 16, 16, 8\): .* takes windows of shape \(1, 16, 16, 16\)"):
        predict(torch.zeros(1, 1, 16, 16, 8))


def build(run: Path, precision: str) -> None:
    onnx = run / "exports" / f"model_{precision}.onnx"
    build_engine(onnx, onnx.with_suffix(".plan"), batch=(1, 2, 4))


def test_engine_predictor(run: Path, network: nn.Module, windows: torch.Tensor, fake_tensorrt: InstallFake):
    fake_tensorrt()
    build(run, "fp32")
    with torch.no_grad():
        expected = network(windows)
    logits = engine_predictor(run / "exports" / "model_fp32.plan", CPU)(windows)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("backend", ["tensorrt", "onnxruntime", "torch"])
def test_the_backend_that_was_asked_for_is_taken(
    run: Path, network: nn.Module, windows: torch.Tensor, fake_tensorrt: InstallFake, backend: Backend, precision: str
):
    fake_tensorrt()
    build(run, precision)
    opened = open_predictor(
        run,
        lambda: copy.deepcopy(network).train(),
        backend=backend,
        precision=precision,  # type: ignore[arg-type]
        device=CPU,
    )
    assert (opened.backend, opened.reason) == (backend, "as asked")
    with torch.no_grad():
        expected = network(windows)
    assert (opened.predict(windows) - expected).abs().max() <= (1e-5 if precision == "fp32" else 1e-2)


def test_auto_takes_the_engine_that_fits(run: Path, fake_tensorrt: InstallFake):
    fake_tensorrt(gpu="9.0")
    build(run, "fp16")
    opened = open_predictor(run, no_network, precision="fp16", device=CPU)
    assert (opened.backend, opened.reason) == ("tensorrt", "an engine fits this GPU")


def no_network() -> nn.Module:
    raise AssertionError("torch was not to be used")


@pytest.mark.parametrize(
    ("precision", "backend"), [("fp32", "onnxruntime"), ("fp16", "onnxruntime"), ("bf16", "torch")]
)
def test_auto_says_why_it_takes_no_engine(
    run: Path, network: nn.Module, fake_tensorrt: InstallFake, precision: Precision, backend: Backend
):
    opened = open_predictor(run, lambda: copy.deepcopy(network), precision=precision, device=CPU)
    assert (opened.backend, opened.reason) == (backend, "no engine in this run")
    if precision != "bf16":
        fake_tensorrt(gpu="9.0")
        build(run, precision)
        fake_tensorrt(gpu="8.9")
        opened = open_predictor(run, no_network, precision=precision, device=CPU)
        assert opened.backend == backend
        assert "built for GPUs of compute capability 9.0, this one has 8.9" in opened.reason


@pytest.mark.parametrize(
    ("in_hardware", "torch_precision", "backend"),
    [
        (True, "bf16", "torch"),
        (False, "bf16", "onnxruntime"),
        (True, "fp32", "onnxruntime"),
        (True, None, "onnxruntime"),
    ],
)
def test_auto_takes_torch_where_bf16_is_in_hardware_and_allowed(
    run: Path,
    network: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    in_hardware: bool,
    torch_precision: Any,
    backend: str,
):
    monkeypatch.setattr("common.inference.predictors.computes_bf16", lambda device: in_hardware)
    opened = open_predictor(run, lambda: network, device=CPU, torch_precision=torch_precision)
    assert (opened.backend, opened.precision) == (backend, "bf16" if backend == "torch" else "fp32")


def test_auto_off_the_cpu_takes_torch(run: Path, network: nn.Module):
    meta = torch.device("meta")  # stands for a GPU without TensorRT
    assert open_predictor(run, lambda: copy.deepcopy(network), device=meta).backend == "torch"


def test_auto_without_exports_takes_torch(tmp_path: Path, network: nn.Module):
    assert open_predictor(tmp_path, lambda: copy.deepcopy(network), device=CPU).backend == "torch"


def test_auto_does_not_pass_over_a_damaged_engine(run: Path, fake_tensorrt: InstallFake):
    fake_tensorrt()
    build(run, "fp32")
    plan = run / "exports" / "model_fp32.plan"
    plan.write_bytes(plan.read_bytes() + b"\0")
    with pytest.raises(ValueError, match=r"model_fp32\.plan: sha256 .* is not that of its manifest"):
        open_predictor(run, no_network, device=CPU)


def test_an_asked_backend_that_is_not_there_is_an_error(run: Path, exported: Path, fake_tensorrt: InstallFake):
    with pytest.raises(FileNotFoundError, match=r"model_fp32\.plan is missing; build the engine with: python"):
        open_predictor(run, no_network, backend="tensorrt", device=CPU)
    fake_tensorrt(gpu="9.0")
    build(run, "fp32")
    fake_tensorrt(gpu="8.6")
    with pytest.raises(EngineUnavailableError, match=r"this one has 8\.6; build it for this host with: python"):
        open_predictor(run, no_network, backend="tensorrt", device=CPU)
    for backend in ("tensorrt", "onnxruntime"):
        with pytest.raises(ValueError, match=f"precision bf16: backend {backend} takes fp32 or fp16"):
            open_predictor(run, no_network, backend=backend, precision="bf16", device=CPU)


@pytest.mark.gpu
def test_a_real_engine_equals_torch(run: Path, network: nn.Module, windows: torch.Tensor):
    from common.inference.tensorrt_host import why_no_engine

    if why_no_engine() is not None:
        pytest.skip(str(why_no_engine()))
    cuda = torch.device("cuda")
    with torch.no_grad():
        expected = network(windows)
    for precision, bound in (("fp32", 1e-3), ("fp16", 2e-2)):
        build(run, precision)
        predict = engine_predictor(run / "exports" / f"model_{precision}.plan", cuda)
        first, second = predict(windows.to(cuda)), predict(windows[:1].to(cuda) + 1)
        assert (first.cpu() - expected).abs().max() <= bound
        with torch.no_grad():
            assert (second.cpu() - network(windows[:1] + 1)).abs().max() <= bound
