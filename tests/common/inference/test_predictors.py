"""Each predictor computes what its network does; exact norms are against torch."""

import copy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from medspeed.common.console import say_once
from medspeed.common.export.onnx_model import export_onnx
from medspeed.common.inference import Precision
from medspeed.common.inference.open_predictor import channels_last_predictor
from medspeed.common.inference.predictors import (
    as_fits,
    autocast,
    computes_bf16,
    ieee_fp32,
    onnxruntime_predictor,
    torch_predictor,
    with_exact_norms,
    with_room,
)
from medspeed.common.training.setup import choose_precision
from medspeed.models.segresnet3d import segresnet3d
from medspeed.models.unet3d import unet3d

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
def windows() -> torch.Tensor:
    return torch.rand(3, *WINDOW, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("predictor", [torch_predictor, channels_last_predictor])
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-5), ("bf16", 5e-2), ("fp16", 5e-3)])
def test_torch_predictor(network: nn.Module, windows: torch.Tensor, precision: Precision, bound: float, predictor: Any):
    with torch.no_grad():
        expected = network(windows)
    logits = predictor(copy.deepcopy(network), precision)(windows)
    assert (logits.dtype, logits.shape, logits.requires_grad) == (torch.float32, (3, 2, 16, 16, 16), False)
    difference = float((logits - expected).abs().max())
    assert difference <= bound
    assert (difference > 1e-5) == (precision != "fp32")
    logits += 1  # the caller may change it in place


@pytest.mark.parametrize("more", [{}, {"bias": False}, {"padding": "same", "stride": 1}, {"padding_mode": "circular"}])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_single_volume_gets_the_logits_that_it_gets_among_others(more: dict[str, Any], channels_last: bool):
    torch.manual_seed(0)
    sides: dict[str, Any] = {"stride": (1, 2, 1), "padding": (2, 1, 0), "dilation": (1, 1, 2), "groups": 2}
    layers = nn.Sequential(nn.Conv3d(2, 4, 3, **{**sides, **more}), nn.ConvTranspose3d(4, 2, 2, 2), nn.Conv3d(2, 1, 1))
    if channels_last:
        layers = layers.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    windows = torch.rand(2, 2, 9, 10, 11)
    with torch.no_grad():
        expected = layers(windows)
    assert torch.allclose(torch_predictor(layers.eval())(windows[:1]), expected[:1], atol=1e-6)


def test_torch_predictor_computes_in_the_asked_precision_and_lays_out_windows_and_weights(windows: torch.Tensor):
    """The layout of what comes out of a convolution is the processor's kernels' to choose, not ours."""
    network = nn.Conv3d(1, 4, 3).eval()
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    network.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0], output)))
    torch_predictor(network)(windows)
    channels_last_predictor(network, "bf16")(windows)
    assert [output.dtype for _, output in seen] == [torch.float32, torch.bfloat16]
    assert seen[1][0].stride() == (16**3, 1, 16**2, 16, 1)  # of one channel too, where no value moves
    assert network.weight.is_contiguous(memory_format=torch.channels_last_3d)


def _told() -> list[str]:
    settings: tuple[Any, ...] = (torch.backends.cudnn.conv, torch.backends.cuda.matmul)  # type: ignore[attr-defined]
    return [each.fp32_precision for each in settings]


def test_of_threads_that_compute_exactly_the_last_gives_the_settings_back():
    """The first to begin is the first to end, while the other still computes."""
    before, first, second = _told(), ieee_fp32(), ieee_fp32()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert _told() == ["ieee", "ieee"] != before
    second.__exit__(None, None, None)
    assert _told() == before


@pytest.mark.parametrize("tf32", [False, True])
def test_fp32_on_cuda_is_ieee_s_unless_tf32_is_asked_for_and_only_inside(windows: torch.Tensor, tf32: bool):
    """What cuDNN and cuBLAS are told, which a build without CUDA keeps too."""

    class Asks(nn.Module):
        def forward(self, windows: torch.Tensor) -> torch.Tensor:
            self.found = _told()
            if windows.sum() > 1e6:
                raise ValueError("too bright")
            return windows

    before, network = _told(), Asks().eval()
    assert before != ["ieee", "ieee"]  # else this test could not fail
    predict = torch_predictor(network, tf32=tf32)
    predict(windows)
    assert network.found == (before if tf32 else ["ieee", "ieee"])
    with pytest.raises(ValueError, match="too bright"):
        predict(windows + 1e6)
    assert _told() == before
    assert torch.backends.cudnn.allow_tf32 in (True, False)  # it does not raise: the settings agree again


def test_torch_predictor_refuses_a_network_in_training(network: nn.Module):
    with pytest.raises(AssertionError, match=r"network\.eval\(\)"):
        torch_predictor(copy.deepcopy(network).train())


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_onnxruntime_predictor(exported: Path, network: nn.Module, windows: torch.Tensor, batch: int):
    predict = onnxruntime_predictor(exported / "exports" / "model_fp32.onnx")
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
    with pytest.raises(FileNotFoundError, match=r"no\.onnx is missing: export it with --to onnx$"):
        onnxruntime_predictor(tmp_path / "no.onnx")
    predict = onnxruntime_predictor(exported / "exports" / "model_fp32.onnx")
    with pytest.raises(ValueError, match=r"invalid dimensions for input.* Got: 8 Expected: 16"):
        predict(torch.zeros(1, 1, 16, 16, 8))


@pytest.mark.parametrize(
    ("variables", "capability", "computes"),
    [
        ({}, "AVX512", True),
        ({}, "AVX2", False),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}, "AVX512", True),
        ({"ONEDNN_MAX_CPU_ISA": "avx2"}, "AVX512", False),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}, "AVX512", False),
        ({"DNNL_MAX_CPU_ISA": "AVX2"}, "AVX512", False),
    ],
)
def test_a_cpu_kept_from_its_instructions_computes_no_bf16(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], capability: str, computes: bool
):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert computes_bf16(CPU) == computes
    assert choose_precision("auto", CPU) == ("bf16" if computes else "fp32")


@pytest.fixture(scope="module")
def normed():
    torch.manual_seed(0)
    network = segresnet3d(2, 3, 8, (1, 1)).eval()
    for name, value in network.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(value, 1.0, 0.3)
    return network


@pytest.fixture(scope="module")
def normed_file(normed, tmp_path_factory):
    return export_onnx(normed, tmp_path_factory.mktemp("normed") / "model.onnx", (2, 64, 64, 64), "fp32", {})


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_logits_are_torchs_in_large_windows(normed, normed_file, tmp_path, precision):
    path = normed_file
    if precision == "fp16":
        path = export_onnx(normed, tmp_path / "model.onnx", (2, 64, 64, 64), "fp16", {})
    generator = torch.Generator().manual_seed(1)
    image = 3 * torch.randn(1, 2, 64, 64, 64, generator=generator) + 2
    with torch.no_grad():
        expected = normed(image).numpy()
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


def test_instance_normalisations_of_large_windows_are_exact(tmp_path):
    network = torch.nn.Sequential(torch.nn.Conv3d(1, 4, 1), torch.nn.InstanceNorm3d(4, affine=True)).eval()
    torch.nn.init.normal_(list(network.parameters())[2], 1.0, 0.3)
    path = export_onnx(network, tmp_path / "model.onnx", (1, 96, 96, 96), "fp32", {})
    assert "InstanceNormalization" in [node.op_type for node in onnx.load(str(path)).graph.node]
    image = torch.randn(2, 1, 96, 96, 96, generator=torch.Generator().manual_seed(1)) + 10
    with torch.no_grad():
        expected = network.double()(image.double()).numpy()
    found = onnxruntime_predictor(path)(image).numpy()
    assert np.abs(found - expected).max() < 1e-5


def test_the_file_keeps_the_operator_and_other_models_their_bytes(normed, normed_file, exported):
    kept = [node.op_type for node in onnx.load(str(normed_file)).graph.node]
    assert kept.count("GroupNormalization") == sum(isinstance(m, torch.nn.GroupNorm) for m in normed.modules())
    written_out = onnx.load_from_string(with_exact_norms(normed_file))
    assert "GroupNormalization" not in [node.op_type for node in written_out.graph.node]
    onnx.checker.check_model(written_out, full_check=True)
    other = exported / "exports" / "model_fp32.onnx"
    assert with_exact_norms(other) == other.read_bytes()


@pytest.mark.parametrize("sides", [(2, 8, 8), (1, 8, 8), (8, 8, 2), (8, 8, 1), (8, 1, 8), (3, 5, 1), (8, 1), (7, 2)])
@pytest.mark.parametrize("channels", [1, 64])
@pytest.mark.parametrize(
    ("kernel", "stride", "transposed"), [(3, 1, False), (3, 2, False), (3, 2, True), (1, 2, False)]
)
def test_thin_images_are_convolved_rightly_in_half_precision(sides, channels, kernel, stride, transposed):
    """By itself torch 2.13 differs by 1 or infinity on CPUs with AVX-512 BF16 or AMX, or corrupts its memory.

    Of kernels of one voxel with a stride of 2, 1 to 3 gradients in 60 had NaNs, for images of 3 x 5 x 1 voxels.
    """
    kind = getattr(nn, f"Conv{'Transpose' * transposed}{len(sides)}d")
    layer, bits = kind(channels, 64, kernel, stride, kernel // 2), torch.Generator().manual_seed(1)
    image = torch.randn(8, channels, *sides, generator=bits).bfloat16().float().requires_grad_()
    found = []
    for precision in ("fp32", "bf16"):
        _leave_nans_behind()
        with autocast(precision, CPU):
            result = layer(image)
        _leave_nans_behind()
        gradients = torch.autograd.grad(result.float().cos().sum(), (image, layer.weight))
        found.append([each.float() for each in (result, *gradients)])
    assert result.dtype == torch.bfloat16
    for exact, rounded in zip(*found, strict=True):
        assert (exact - rounded).norm() < 0.02 * exact.norm()


def test_a_convolution_of_named_arguments_is_the_same():
    image, weight = torch.rand(2, 3, 8, 8, 1), torch.rand(4, 3, 3, 3, 3)
    with autocast("bf16", CPU):
        bias = torch.rand(4).bfloat16()
        due = nn.functional.conv3d(image, weight, bias, padding=1)
        named: dict[str, Any] = {"input": image, "weight": weight, "bias": bias, "padding": 1}
        assert torch.equal(nn.functional.conv3d(**named), due)
        assert torch.equal(nn.functional.conv3d(image[0], weight, bias, padding=1), due[0])


def _leave_nans_behind() -> None:
    for size in (64, 256, 1024, 4096, 16384, 65536, 262144):
        del [torch.full((size,), np.nan) for _ in range(6)][:]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize("network", [unet3d(1, 2, (4, 8)), segresnet3d(1, 2, 8, (1, 1))], ids=["unet", "segresnet"])
def test_single_windows_in_fp32_take_onednn_in_our_networks_too(network, monkeypatch):
    calls, convolution = [], torch.mkldnn_convolution

    def counted(*given):
        calls.append(given[0].shape)
        return convolution(*given)

    monkeypatch.setattr(torch, "mkldnn_convolution", counted)
    windows = torch.rand(1, 1, 16, 16, 16)
    expected = network.eval()(windows)
    assert torch.allclose(torch_predictor(network)(windows), expected, atol=1e-4)
    assert len(calls) == sum(isinstance(each, nn.Conv3d) for each in network.modules())


def test_what_fits_into_memory_is_found_once_and_told_once(capsys):
    say_once.cache_clear()
    calls = []

    def short(windows):
        calls.append(len(windows))
        if len(windows) > 2:
            raise torch.OutOfMemoryError("tried to allocate 9 GiB")
        return 2 * windows

    parts, windows = as_fits(short), torch.arange(5.0)[:, None, None, None].expand(5, 1, 2, 3)
    assert all(torch.equal(torch.cat([*parts(windows)]), 2 * windows) for _ in range(2))
    assert calls == [5, 2, 2, 1, 2, 2, 1]
    list(as_fits(short)(windows))  # of another scan
    said = "a batch of 5 windows of 2 x 3 pixels does not fit into the device's memory: trying 2"
    assert capsys.readouterr().out.splitlines() == [said]


def test_a_volume_that_does_not_fit_on_the_device_is_kept_on_the_host(capsys):
    say_once.cache_clear()
    device, held = torch.device("meta"), []  # stands for a GPU: what lies there has no values

    def predictor(windows):
        assert windows.device == device
        return torch.full(windows.shape, 7.0)  # as if they came from there

    def work(place, predict):
        volume = torch.ones(2, 3, device=place)
        held.append((place, weakref.ref(volume)))
        if place == device:
            raise torch.OutOfMemoryError("tried to allocate 9 GiB")
        assert held[0][1]() is None  # nothing of the first try is left on the device
        return predict(volume)

    logits = with_room(work, predictor, device)
    assert [place.type for place, _ in held] == ["meta", "cpu"]
    assert torch.equal(logits, torch.full((2, 3), 7.0))
    assert "it stays in the host's" in capsys.readouterr().out
    assert with_room(lambda *given: given, predictor, device) == (device, predictor)  # where it fits
    assert not capsys.readouterr().out


def test_what_fits_nowhere_is_raised():
    def work(place, predict):
        raise torch.OutOfMemoryError(f"one window on {place.type}")

    with pytest.raises(torch.OutOfMemoryError, match="one window on cpu"):
        with_room(work, lambda windows: windows, torch.device("meta"))


@pytest.mark.parametrize(("sides", "flag"), [((8, 9), "--tile-size"), ((8, 9, 4), "--windows.size")])
def test_without_memory_for_one_window_it_is_said_what_to_do(sides, flag):
    def none(windows):
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    with pytest.raises(torch.OutOfMemoryError, match=r"one window of 8 x 9.* use half precision") as caught:
        list(as_fits(none)(torch.zeros(3, 1, *sides)))
    assert str(caught.value).endswith(flag)
    assert "9 GiB" in str(caught.value.__cause__)
