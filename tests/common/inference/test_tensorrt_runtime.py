import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from medspeed.common.files import write_json
from medspeed.common.inference.tensorrt_runtime import (
    EngineError,
    EngineManifest,
    EnginePredictor,
    EngineUnavailableError,
    deserialize,
    host_problem,
    manifest_path,
    read_manifest,
    tensorrt_module,
)

CPU = torch.device("cpu")
InstallFake = Callable[..., Any]


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A plan for the stand-in, logits = (image, image), with its ONNX model and manifest."""
    shape = [1, 4, 4, 4]
    node = helper.make_node("Concat", ["image", "image"], ["logits"], axis=1)
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", *shape])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 2, *shape[1:]])
    model = helper.make_model(
        helper.make_graph([node], "twice", [image], [logits]),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=10,
    )
    path = tmp_path / "model_fp32.plan"
    onnx.save_model(model, str(tmp_path / "model_fp32.onnx"))
    path.write_bytes(model.SerializeToString())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest = EngineManifest(
        "model_fp32.onnx",
        digest,
        digest,
        "tensorrt",
        "11.4.0",
        ("9.0",),
        "fp32",
        (1, 4, 4, 4),
        (1, 4, 4, 4),
        (1, 2, 3),
        "2.13.0",
    )
    write_json(manifest_path(path), asdict(manifest))
    return path


def change_manifest(plan: Path, **changes: Any) -> EngineManifest:
    manifest = replace(read_manifest(plan), **changes)
    write_json(manifest_path(plan), asdict(manifest))
    return manifest


@pytest.mark.parametrize("version", ["10.16.1", "11.4.0"])
def test_engine_runs_and_its_outputs_are_its_callers(plan: Path, fake_tensorrt: InstallFake, version: str):
    trt = fake_tensorrt(version)
    change_manifest(plan, version=version)
    predict = EnginePredictor(plan, CPU)
    windows = torch.rand(3, 1, 4, 4, 4)
    first = predict(windows)
    kept = first.clone()
    second = predict(windows[:1] + 1)
    assert torch.equal(first, torch.cat([windows, windows], dim=1))
    assert torch.equal(second, torch.cat([windows[:1] + 1] * 2, dim=1))
    assert torch.equal(first, kept)
    assert trt.calls == [("deserialize_cuda_engine",), ("execute_async_v3", 0), ("execute_async_v3", 0)]


def test_engine_takes_windows_of_any_memory_layout(plan: Path, fake_tensorrt: InstallFake):
    fake_tensorrt()
    windows = torch.rand(2, 4, 4, 4, 1).permute(0, 4, 3, 2, 1)
    assert torch.equal(EnginePredictor(plan, CPU)(windows)[:, :1], windows)


def test_windows_that_begin_anywhere_in_an_image_are_moved_to_where_tensorrt_reads(
    plan: Path, fake_tensorrt: InstallFake
):
    """The stand-in refuses an address that is no multiple of 64 bytes, as TensorRT one that is none of 256."""
    fake_tensorrt()
    predict = EnginePredictor(plan, CPU)
    image, moved = torch.rand(128), []
    for first in range(32):  # in steps of 4 bytes
        window = image[first : first + 64].view(1, 1, 4, 4, 4)
        assert torch.equal(predict(window)[:, 1:], window)
        moved.append(predict._context._address["image"] != window.data_ptr())
    assert sum(moved) == 30  # every sixteenth is left where it is


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        (torch.zeros(4, 1, 4, 4, 4), r"accepts shapes from \(1, 1, 4, 4, 4\) to \(3, 1, 4, 4, 4\)"),
        (torch.zeros(0, 1, 4, 4, 4), "accepts shapes from"),
        (torch.zeros(2, 1, 4, 4, 5), "accepts shapes from"),
        (torch.zeros(2, 1, 4, 4, 4).half(), "float16: expected float32 on cpu"),
        (torch.zeros(2, 1, 4, 4, 4, device="meta"), "windows on meta"),
    ],
)
def test_engine_refuses_other_windows(plan: Path, fake_tensorrt: InstallFake, windows: torch.Tensor, message: str):
    trt = fake_tensorrt()
    predict = EnginePredictor(plan, CPU)
    with pytest.raises(ValueError, match=message):
        predict(windows)
    assert ("execute_async_v3", 0) not in trt.calls


def test_free_sides_have_bounds_of_their_own(plan: Path, fake_tensorrt: InstallFake):
    fake_tensorrt()
    change_manifest(plan, smallest=(1, 4, 2, 4))
    predict = EnginePredictor(plan, CPU)
    predict._check(torch.zeros(2, 1, 4, 3, 4))
    for sides in ((4, 1, 4), (4, 5, 4), (3, 4, 4)):
        with pytest.raises(ValueError, match=r"accepts shapes from \(1, 1, 4, 2, 4\) to \(3, 1, 4, 4, 4\)"):
            predict(torch.zeros(2, 1, *sides))


@pytest.mark.parametrize("which", ["plan", "onnx"])
@pytest.mark.parametrize("position", [0, 60, -1])
def test_one_changed_byte_is_refused_before_anything_is_loaded(
    plan: Path, fake_tensorrt: InstallFake, which: str, position: int
):
    trt = fake_tensorrt()
    path = plan.with_suffix("." + which)
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(ValueError, match=rf"{path.name}: sha256 .* does not match"):
        EnginePredictor(plan, CPU)
    assert trt.calls == []


def test_plan_without_its_onnx_runs(plan: Path, fake_tensorrt: InstallFake):
    fake_tensorrt()
    plan.with_suffix(".onnx").unlink()
    assert EnginePredictor(plan, CPU)(torch.zeros(1, 1, 4, 4, 4)).shape == (1, 2, 4, 4, 4)


@pytest.mark.parametrize(
    ("changes", "host", "message"),
    [
        ({}, {"gpu": None}, "no CUDA device in use$"),
        (
            {},
            {"gpu": "8.9"},
            r"this one has 8\.9; build it .*medspeed export APP --model .* --to engine$",
        ),
        (
            {},
            {"version": "10.16.1"},
            r"by tensorrt 11\.4\.0, but 10\.16\.1 is installed; build it for this host with: medspeed",
        ),
        (
            {"flavour": "tensorrt_rtx", "targets": ("8.0", "8.6")},
            {"gpu": "9.0", "flavour": "tensorrt_rtx"},
            r"8\.0, 8\.6, this one has 9\.0; build it",
        ),
    ],
)
def test_engine_of_another_host_is_refused_in_one_line(
    plan: Path, fake_tensorrt: InstallFake, changes: dict[str, Any], host: dict[str, Any], message: str
):
    trt = fake_tensorrt(**host)
    change_manifest(plan, **changes)
    with pytest.raises(EngineUnavailableError, match=message) as error:
        EnginePredictor(plan, CPU)
    assert "\n" not in str(error.value)
    assert trt.calls == []


def test_engine_of_a_missing_flavour_names_what_to_install(
    plan: Path, fake_tensorrt: InstallFake, monkeypatch: pytest.MonkeyPatch
):
    fake_tensorrt()
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    problem = host_problem(plan, read_manifest(plan))
    assert problem is not None
    assert "built by tensorrt 11.4.0, which is not installed: pip install -e '.[trt]'; or build it" in problem


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        ("deserialize", "could not be loaded; TensorRT says: driver too old$"),
        ("context", "cannot create an execution context"),
    ],
)
def test_what_tensorrt_logs_is_in_the_error(plan: Path, fake_tensorrt: InstallFake, fail: str, message: str):
    fake_tensorrt().fail = fail
    with pytest.raises(EngineError, match=message):
        EnginePredictor(plan, CPU)


@pytest.mark.parametrize("fail", ["shape", "execute"])
def test_a_call_that_tensorrt_refuses_is_an_error(plan: Path, fake_tensorrt: InstallFake, fail: str):
    trt = fake_tensorrt()
    predict = EnginePredictor(plan, CPU)
    trt.fail = fail
    with pytest.raises(EngineError, match=r"windows \(1, 1, 4, 4, 4\) could not be run; TensorRT says: nothing"):
        predict(torch.zeros(1, 1, 4, 4, 4))


def test_missing_and_damaged_manifests_are_named(plan: Path):
    path = manifest_path(plan)
    content = json.loads(path.read_text())
    for bad in ('{"onnx": 1}', "[]", "not json", json.dumps({**content, "flavour": "os"})):
        path.write_text(bad)
        with pytest.raises(ValueError, match=r"model_fp32\.plan\.json: .*; rebuild it with: medspeed"):
            read_manifest(plan)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"model_fp32\.plan\.json is missing; build the engine with"):
        read_manifest(plan)
    plan.unlink()
    with pytest.raises(FileNotFoundError, match=r"model_fp32\.plan is missing"):
        read_manifest(plan)


def test_a_half_installed_module_counts_as_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "tensorrt.py").write_text("raise OSError('libnvinfer.so.10: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    assert tensorrt_module("tensorrt") is None


def test_the_real_library_says_why_it_loads_nothing():
    trt = pytest.importorskip("tensorrt_rtx")
    with pytest.raises(
        EngineError, match=r"some\.plan: the engine could not be loaded; TensorRT says: .*Serialization"
    ):
        deserialize(trt, b"not a plan" * 100, Path("some.plan"))
