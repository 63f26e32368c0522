"""What a run is opened with, and that what is computed in another way equals what the network computes."""

import copy
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from medspeed.common.export.onnx_model import export_onnx
from medspeed.common.export.tensorrt_engine import build_engine, choose_flavour
from medspeed.common.files import record_digests, write_text
from medspeed.common.inference import Backend, Precision
from medspeed.common.inference.model import save_weights
from medspeed.common.inference.open_predictor import check_digest, fold_norms, open_predictor
from medspeed.common.inference.predictors import torch_predictor
from medspeed.common.inference.tensorrt_runtime import EngineError, EnginePredictor, EngineUnavailableError
from medspeed.models.resnet18_fcn import resnet18_fcn
from medspeed.models.segresnet3d import segresnet3d
from medspeed.models.unet3d import unet3d

CPU = torch.device("cpu")
WINDOW = (1, 16, 16, 16)
InstallFake = Callable[..., Any]
NORMS = (nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass
class Model:
    """What a run keeps of a network; without one, torch is not to be used."""

    network: nn.Module | None = None
    precision: Precision = "fp32"

    def build(self, weights: Path | None = None) -> nn.Module:
        assert self.network is not None, "torch was not to be used"
        return copy.deepcopy(self.network)


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

    monkeypatch.setattr("medspeed.common.inference.open_predictor.torch_predictor", seen)
    opened = open_predictor(tmp_path, Model(network), precision=precision, device=CPU)
    with torch.no_grad():
        expected = network(windows)
    assert float((opened.predict(windows) - expected).abs().max()) <= bound * float(expected.abs().max())
    assert not any(isinstance(each, nn.BatchNorm3d) for each in run_by[0].modules())


def build(run: Path, precision: str) -> None:
    onnx = run / "exports" / f"model_{precision}.onnx"
    build_engine(onnx, choose_flavour())


def test_engine_predictor(run: Path, network: nn.Module, windows: torch.Tensor, fake_tensorrt: InstallFake):
    fake_tensorrt()
    build(run, "fp32")
    with torch.no_grad():
        expected = network(windows)
    logits = EnginePredictor(run / "exports" / "model_fp32.plan", CPU)(windows)
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
        Model(copy.deepcopy(network).train()),
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
    opened = open_predictor(run, Model(), precision="fp16", device=CPU)
    assert (opened.backend, opened.reason) == ("tensorrt", "there is an engine for this GPU")


@pytest.mark.parametrize(
    ("precision", "backend"), [("fp32", "onnxruntime"), ("fp16", "onnxruntime"), ("bf16", "torch")]
)
def test_auto_says_why_it_takes_no_engine(
    run: Path, network: nn.Module, fake_tensorrt: InstallFake, precision: Precision, backend: Backend
):
    opened = open_predictor(run, Model(network), precision=precision, device=CPU)
    assert (opened.backend, opened.reason) == (backend, "no engine in this run")
    if precision != "bf16":
        fake_tensorrt(gpu="9.0")
        build(run, precision)
        fake_tensorrt(gpu="8.9")
        opened = open_predictor(run, Model(), precision=precision, device=CPU)
        assert opened.backend == backend
        assert "built for GPUs of compute capability 9.0, this one has 8.9" in opened.reason


@pytest.mark.parametrize(
    ("in_hardware", "torch_precision", "backend"),
    [
        (True, "bf16", "torch"),
        (False, "bf16", "onnxruntime"),
        (True, "fp32", "onnxruntime"),
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
    monkeypatch.setattr("medspeed.common.inference.open_predictor.computes_bf16", lambda device: in_hardware)
    opened = open_predictor(run, Model(network, torch_precision), device=CPU)
    assert (opened.backend, opened.precision) == (backend, "bf16" if backend == "torch" else "fp32")


def test_auto_off_the_cpu_takes_torch(run: Path, network: nn.Module):
    meta = torch.device("meta")  # stands for a GPU without TensorRT
    assert open_predictor(run, Model(network), device=meta).backend == "torch"


def test_auto_without_exports_takes_torch(tmp_path: Path, network: nn.Module):
    assert open_predictor(tmp_path, Model(network), device=CPU).backend == "torch"


def test_auto_does_not_pass_over_a_damaged_engine(run: Path, fake_tensorrt: InstallFake):
    fake_tensorrt()
    build(run, "fp32")
    plan = run / "exports" / "model_fp32.plan"
    plan.write_bytes(plan.read_bytes() + b"\0")
    with pytest.raises(ValueError, match=r"model_fp32\.plan: sha256 .* does not match the engine's manifest"):
        open_predictor(run, Model(), device=CPU)


def test_auto_passes_over_what_cannot_be_loaded_and_says_why(
    run: Path, network: nn.Module, monkeypatch: pytest.MonkeyPatch, fake_tensorrt: InstallFake
):
    fake_tensorrt()
    build(run, "fp32")

    def refuses(*given: Any) -> None:
        raise EngineError("the engine could not be loaded; TensorRT says: no\nno")

    monkeypatch.setattr("medspeed.common.inference.tensorrt_runtime.EnginePredictor", refuses)
    opened = open_predictor(run, Model(), device=CPU)
    assert (opened.backend, opened.reason) == ("onnxruntime", "the engine could not be loaded; TensorRT says: no no")
    with pytest.raises(EngineError):
        open_predictor(run, Model(), backend="tensorrt", device=CPU)

    def damaged(path: Path) -> None:
        raise ValueError(f"{path}: not a usable ONNX model")

    monkeypatch.setattr("medspeed.common.inference.open_predictor.onnxruntime_predictor", damaged)
    opened = open_predictor(run, Model(network), device=CPU)
    assert opened.backend == "torch"
    assert opened.reason.endswith("model_fp32.onnx: not a usable ONNX model")
    with pytest.raises(ValueError, match="not a usable ONNX model"):
        open_predictor(run, Model(), backend="onnxruntime", device=CPU)


def test_auto_passes_over_an_onnx_model_that_cannot_be_read(run: Path, network: nn.Module):
    save_weights(run / "best.safetensors", network.state_dict(), {})
    (run / "exports" / "model_fp32.onnx").write_bytes(b"\xff" * 99)
    opened = open_predictor(run, Model(network), device=CPU)
    assert opened.backend == "torch"
    assert "model_fp32.onnx: not a usable ONNX model" in opened.reason


@pytest.mark.parametrize("file", ["model_fp32.plan", "model_fp32.plan.json"])
@pytest.mark.parametrize("how", ["writable", "another's"])
def test_auto_takes_no_engine_that_others_may_have_written(
    run: Path, fake_tensorrt: InstallFake, monkeypatch: pytest.MonkeyPatch, file: str, how: str
):
    fake_tensorrt()
    build(run, "fp32")
    path = run / "exports" / file
    if how == "writable":
        path.chmod(0o666)
    else:
        if os.geteuid():
            pytest.skip("only root gives files away")
        os.chown(path, 12345, -1)
    opened = open_predictor(run, Model(), device=CPU)
    assert opened.backend == "onnxruntime"
    assert opened.reason.startswith(f"{file} is native code that others may have written")
    assert open_predictor(run, Model(), backend="tensorrt", device=CPU).backend == "tensorrt"


def test_without_a_gpu_auto_does_not_care_what_an_engine_lacks(run: Path, fake_tensorrt: InstallFake):
    """As where a run is copied in part."""
    fake_tensorrt()
    build(run, "fp32")
    (run / "exports" / "model_fp32.plan.json").unlink()
    with pytest.raises(FileNotFoundError, match="build the engine with"):
        open_predictor(run, Model(), device=CPU)
    fake_tensorrt(gpu=None)
    opened = open_predictor(run, Model(), device=CPU)
    assert (opened.backend, opened.reason) == ("onnxruntime", "no CUDA device in use")


def test_an_asked_backend_that_is_not_there_is_an_error(run: Path, exported: Path, fake_tensorrt: InstallFake):
    with pytest.raises(FileNotFoundError, match=r"model_fp32\.plan is missing; build the engine with: medspeed"):
        open_predictor(run, Model(), backend="tensorrt", device=CPU)
    fake_tensorrt(gpu="9.0")
    build(run, "fp32")
    fake_tensorrt(gpu="8.6")
    with pytest.raises(EngineUnavailableError, match=r"this one has 8\.6; build it for this host with: medspeed"):
        open_predictor(run, Model(), backend="tensorrt", device=CPU)
    for backend in ("tensorrt", "onnxruntime"):
        with pytest.raises(ValueError, match=f"precision bf16: backend {backend} takes fp32, fp16, int8"):
            open_predictor(run, Model(), backend=backend, precision="bf16", device=CPU)


@pytest.mark.gpu
def test_a_real_engine_equals_torch(run: Path, network: nn.Module, windows: torch.Tensor):
    try:
        choose_flavour()
    except EngineUnavailableError as error:
        pytest.skip(str(error))
    cuda = torch.device("cuda")
    with torch.no_grad():
        expected = network(windows)
    for precision, bound in (("fp32", 1e-3), ("fp16", 2e-2)):
        build(run, precision)
        predict = EnginePredictor(run / "exports" / f"model_{precision}.plan", cuda)
        first, second = predict(windows.to(cuda)), predict(windows[:1].to(cuda) + 1)
        assert (first.cpu() - expected).abs().max() <= bound
        with torch.no_grad():
            assert (second.cpu() - network(windows[:1] + 1)).abs().max() <= bound


def with_statistics(network: nn.Module) -> nn.Module:
    """Give batch normalisations scales, shifts and statistics by which they change something."""
    generator = torch.Generator().manual_seed(1)
    for module in network.modules():
        if isinstance(module, NORMS):
            state = module.state_dict()
            for name in ("weight", "running_var"):
                state[name].uniform_(0.5, 2, generator=generator)
            for name in ("bias", "running_mean"):
                state[name].normal_(generator=generator)
    return network.eval()


@pytest.mark.parametrize(
    ("network", "shape"), [(unet3d(1, 2, (4, 8, 16)), (1, 16, 16, 16)), (resnet18_fcn(96), (3, 96, 96))]
)
def test_no_normalisation_is_left_and_the_logits_differ_by_rounding_only(network: nn.Module, shape: Any):
    with_statistics(network)
    network = copy.deepcopy(network).double()
    found = fold_norms(copy.deepcopy(network))
    windows = torch.rand(2, *shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with torch.no_grad():
        expected, logits = network(windows), found(windows)
    assert torch.allclose(logits, expected, atol=1e-12 * float(expected.abs().max()))
    assert not any(isinstance(module, NORMS) or module.training for module in found.modules())  # the latter would fuse


def test_a_network_without_batch_normalisation_is_returned_as_it_is():
    network = segresnet3d(1, 2, 8).eval()
    assert fold_norms(network) is network


def test_statistics_that_still_change_are_a_programmers_error():
    with pytest.raises(AssertionError, match=r"network\.eval\(\)"):
        fold_norms(unet3d(1, 2, (4, 8)).train())


def test_a_file_that_changed_behind_its_record_is_refused(tmp_path):
    weights, model = tmp_path / "best.safetensors", tmp_path / "exports" / "model.onnx"
    check_digest(tmp_path, weights)  # neither is there
    for file in (weights, model):
        write_text(file, file.name)
        record_digests(tmp_path, [file])
    for file in (weights, model):
        check_digest(tmp_path, file)
    model.write_text("rotten")
    check_digest(tmp_path, weights)
    with pytest.raises(ValueError, match=r"model\.onnx: SHA-256 .* does not match digests\.json .*restore it"):
        check_digest(tmp_path, model)
