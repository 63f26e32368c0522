import ast
import hashlib
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import medspeed.common.export.tensorrt_engine
import medspeed.common.inference.tensorrt_runtime
from medspeed.common.export.onnx_model import export_onnx
from medspeed.common.export.tensorrt_engine import (
    RTX_TARGETS,
    RTX_TURING,
    EngineChoice,
    build_engine,
    choose_flavour,
)
from medspeed.common.inference.tensorrt_runtime import (
    EngineError,
    EnginePredictor,
    EngineUnavailableError,
    deserialize,
    read_manifest,
)

InstallFake = Callable[..., Any]
Names = dict[str, dict[str, list[str]]]

SOURCES = (medspeed.common.export.tensorrt_engine, medspeed.common.inference.tensorrt_runtime)
CLASS_OF = {  # how the sources call their objects
    "builder": "Builder",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "config": "IBuilderConfig",
    "profile": "IOptimizationProfile",
    "runtime": "Runtime",
    "engine": "ICudaEngine",
    "_engine": "ICudaEngine",
    "context": "IExecutionContext",
    "_context": "IExecutionContext",
}
ONLY_IN_RTX = {  # behind the check for a GPU of compute capability 7.5
    ("ComputeCapability", ""),
    ("ComputeCapability", "SM75"),
    ("IBuilderConfig", "num_compute_capabilities"),
    ("IBuilderConfig", "set_compute_capability"),
}


@pytest.fixture
def folder(tmp_path: Path, exported: Path) -> Path:
    """A copy of the exports that a test may spoil."""
    return Path(shutil.copytree(exported, tmp_path / "exports"))


@pytest.fixture(scope="module")
def rtx_folder(tmp_path_factory: pytest.TempPathFactory, exported: Path) -> Path:
    """A folder with engines really built; read only."""
    pytest.importorskip("tensorrt_rtx")
    folder = tmp_path_factory.mktemp("rtx") / "exports"
    shutil.copytree(exported, folder)
    for precision in ("fp32", "fp16"):
        onnx = folder / f"model_{precision}.onnx"
        build_engine(onnx, "tensorrt_rtx")
    return folder


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_rtx_builds_an_engine_with_its_manifest(rtx_folder: Path, precision: str):
    plan = rtx_folder / f"model_{precision}.plan"
    manifest = read_manifest(plan)
    assert manifest.plan_sha256 == hashlib.sha256(plan.read_bytes()).hexdigest()
    assert manifest.onnx_sha256 == hashlib.sha256(plan.with_suffix(".onnx").read_bytes()).hexdigest()
    assert (manifest.flavour, manifest.version) == ("tensorrt_rtx", sys.modules["tensorrt_rtx"].__version__)
    assert manifest.targets == RTX_TARGETS
    assert (manifest.precision, manifest.window, manifest.batch) == (precision, (1, 16, 16, 16), (1, 2, 4))
    assert manifest.torch == torch.__version__
    assert plan.stat().st_size > 100_000


def test_the_precision_is_in_the_plan(rtx_folder: Path):
    sizes = {p: (rtx_folder / f"model_{p}.plan").stat().st_size for p in ("fp32", "fp16")}
    assert sizes["fp16"] < sizes["fp32"]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_real_plan_without_a_gpu_says_so(rtx_folder: Path, precision: str):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    trt = pytest.importorskip("tensorrt_rtx")
    plan = rtx_folder / f"model_{precision}.plan"
    with pytest.raises(EngineError, match=r"(?s)could not be loaded; TensorRT says: .*cudaError 35"):
        deserialize(trt, plan.read_bytes(), plan)
    with pytest.raises(EngineUnavailableError, match="no CUDA device in use"):
        EnginePredictor(plan, torch.device("cpu"))


@pytest.mark.parametrize("suffix", [".plan", ".onnx"])
def test_a_changed_byte_never_reaches_the_real_library(
    tmp_path: Path, rtx_folder: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
):
    trt = pytest.importorskip("tensorrt_rtx")
    folder = Path(shutil.copytree(rtx_folder, tmp_path / "exports"))
    changed = folder / f"model_fp16{suffix}"
    content = bytearray(changed.read_bytes())
    content[len(content) // 2] ^= 0x10
    changed.write_bytes(bytes(content))
    monkeypatch.setattr(trt, "Runtime", lambda log: pytest.fail("the plan was about to be loaded"))
    with pytest.raises(ValueError, match=rf"model_fp16\{suffix}: sha256"):
        EnginePredictor(folder / "model_fp16.plan", torch.device("cpu"))


def test_rtx_targets_a_turing_gpu_alone(folder: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("tensorrt_rtx")
    monkeypatch.setattr("medspeed.common.inference.tensorrt_runtime.host_gpu", lambda device=None: "7.5")
    built = build_engine(folder / "model_fp16.onnx", "tensorrt_rtx")
    assert built.targets == ("7.5",)


def test_an_engine_is_built_for_the_gpu_of_the_day(folder: Path, fake_tensorrt: InstallFake):
    plan = folder / "model_fp32.plan"
    for version, gpu in (("11.4.0", "9.0"), ("11.5.0", "8.0")):
        fake_tensorrt(version, gpu=gpu)
        built = build_engine(folder / "model_fp32.onnx", "tensorrt")
        assert built == read_manifest(plan)
        assert (built.version, built.targets) == (version, (gpu,))
        assert built.plan_sha256 == hashlib.sha256(plan.read_bytes()).hexdigest()


@pytest.mark.parametrize("version", ["10.16.1", "11.4.0"])
def test_full_tensorrt_is_called_the_same_way(folder: Path, fake_tensorrt: InstallFake, version: str):
    trt = fake_tensorrt(version)
    built = build_engine(folder / "model_fp16.onnx", "tensorrt")
    assert trt.calls == [
        ("create_network", 1 << 1),  # strongly typed
        ("clear_flag", 7),  # no TensorFloat-32
        ("set_shape", "image", (1, 1, 16, 16, 16), (2, 1, 16, 16, 16), (4, 1, 16, 16, 16)),
        ("add_optimization_profile",),
        ("build_serialized_network",),
    ]
    assert (built.flavour, built.version, built.targets) == ("tensorrt", version, ("9.0",))
    predict = EnginePredictor(folder / "model_fp16.plan", torch.device("cpu"))
    assert predict(torch.zeros(3, 1, 16, 16, 16)).shape == (3, 2, 16, 16, 16)


def test_free_sides_are_in_the_profile(tmp_path: Path, fake_tensorrt: InstallFake):
    trt = fake_tensorrt()
    network = torch.nn.Conv2d(3, 1, 3)
    export_onnx(network, tmp_path / "model_fp32.onnx", (3, 40, 40), "fp32", {}, (3, 8, 8), batch=2)
    build_engine(tmp_path / "model_fp32.onnx", "tensorrt")
    assert ("set_shape", "image", (1, 3, 8, 8), (2, 3, 40, 40), (4, 3, 40, 40)) in trt.calls
    assert read_manifest(tmp_path / "model_fp32.plan").smallest == (3, 8, 8)


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        ("parse", r"model_fp32\.onnx: TensorRT cannot read the model \(unknown operator Frobnicate\); TensorRT says"),
        ("build", r"model_fp32\.onnx: TensorRT built no engine; TensorRT says: no kernel for this layer"),
    ],
)
def test_what_cannot_be_built_is_an_error_with_the_log(
    folder: Path, fake_tensorrt: InstallFake, fail: str, message: str
):
    fake_tensorrt().fail = fail
    with pytest.raises(EngineError, match=message):
        build_engine(folder / "model_fp32.onnx", "tensorrt")
    assert not list(folder.glob("*plan*"))


def test_the_real_parser_names_what_it_does_not_know(tmp_path: Path):
    pytest.importorskip("tensorrt_rtx")
    import onnx

    ends = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["b", 1, 8, 8, 8]) for n in ("image", "out")]
    node = onnx.helper.make_node("Frobnicate", ["image"], ["out"], domain="nobody")
    model: Any = onnx.helper.make_model(onnx.helper.make_graph([node], "odd", ends[:1], ends[1:]))
    onnx.helper.set_model_props(
        model, {"precision": "fp32", "window": "1 8 8 8", "smallest": "1 8 8 8", "batch": "1 1 4"}
    )
    onnx.save(model, str(tmp_path / "odd.onnx"))
    with pytest.raises(EngineError, match=r"odd\.onnx: TensorRT cannot read the model \(.*Frobnicate"):
        build_engine(tmp_path / "odd.onnx", "tensorrt_rtx")


def test_a_plan_of_another_host_is_built_anew_by_the_export(folder: Path, fake_tensorrt: InstallFake):
    fake_tensorrt(gpu="9.0")
    build_engine(folder / "model_fp16.onnx", "tensorrt")
    fake_tensorrt("10.16.1", gpu="8.0")
    with pytest.raises(EngineUnavailableError, match=rf"medspeed export APP --model {folder.parent} --to engine\Z"):
        EnginePredictor(folder / "model_fp16.plan", torch.device("cpu"))
    build_engine(folder / "model_fp16.onnx", "tensorrt")
    assert read_manifest(folder / "model_fp16.plan").batch == (1, 2, 4)  # as the ONNX model says
    EnginePredictor(folder / "model_fp16.plan", torch.device("cpu"))


def test_a_model_without_a_batch_is_none_of_ours(tmp_path: Path, folder: Path, fake_tensorrt: InstallFake):
    import onnx

    fake_tensorrt()
    model: Any = onnx.load(folder / "model_fp32.onnx")
    onnx.helper.set_model_props(model, {"precision": "fp32", "window": "1 16 16 16", "smallest": "1 16 16 16"})
    onnx.save(model, str(tmp_path / "old.onnx"))
    with pytest.raises(ValueError, match=r"old\.onnx: no `batch`"):
        build_engine(tmp_path / "old.onnx", "tensorrt")


def used_names() -> Iterator[tuple[str, str]]:
    """Yield (class, member) for each name of a TensorRT module that the sources use."""
    for module in SOURCES:
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Attribute) or node.attr.startswith("__"):
                continue
            owner = node.value
            if isinstance(owner, ast.Attribute) and isinstance(owner.value, ast.Name) and owner.value.id == "trt":
                yield owner.attr, node.attr
            elif isinstance(owner, ast.Name) and owner.id == "trt":
                yield node.attr, ""
            elif isinstance(owner, (ast.Name, ast.Attribute)):
                called = owner.id if isinstance(owner, ast.Name) else owner.attr
                if called in CLASS_OF:
                    yield CLASS_OF[called], node.attr


def test_every_name_used_exists_in_every_version(tensorrt_names: Names):
    used = set(used_names())
    assert {name for name, _ in used} >= {*CLASS_OF.values(), "ILogger", "TensorIOMode", "BuilderFlag"}
    for name, member in used - ONLY_IN_RTX:
        for version, classes in tensorrt_names.items():
            assert name in classes, f"{name} is not in {version}"
            assert not member or member in classes[name], f"{name}.{member} is not in {version}"
    assert used >= ONLY_IN_RTX
    rtx = tensorrt_names["tensorrt_rtx 1.7"]
    assert all(not member or member in rtx[name] for name, member in ONLY_IN_RTX)


def test_the_stand_in_offers_nothing_that_a_version_lacks(tensorrt_names: Names, fake_members: dict[str, set[str]]):
    for version, classes in tensorrt_names.items():
        for name, members in fake_members.items():
            assert members <= set(classes[name]), f"{name} of {version}"


def test_the_names_of_the_installed_library_are_those_of_the_list(tensorrt_names: Names):
    trt = pytest.importorskip("tensorrt_rtx")
    listed = tensorrt_names["tensorrt_rtx 1.7"]
    for name, member in set(used_names()):
        if trt.__version__.startswith("1.7."):
            assert name in listed
        assert hasattr(trt, name)
        assert not member or hasattr(getattr(trt, name), member), f"{name}.{member}"


@pytest.mark.parametrize(
    ("gpu", "here", "choice", "expected"),
    [
        ("9.0", {"tensorrt", "tensorrt_rtx"}, "auto", "tensorrt"),
        ("8.9", {"tensorrt", "tensorrt_rtx"}, "auto", "tensorrt"),
        ("8.9", {"tensorrt", "tensorrt_rtx"}, "tensorrt_rtx", "tensorrt_rtx"),
        ("8.9", {"tensorrt_rtx"}, "auto", "tensorrt_rtx"),
        ("7.5", {"tensorrt_rtx"}, "auto", "tensorrt_rtx"),
        (None, {"tensorrt", "tensorrt_rtx"}, "auto", "tensorrt_rtx"),
        (None, set(), "auto", "tensorrt_rtx is not installed: pip install -e '.[rtx]'"),
        ("8.6", set(), "auto", "tensorrt_rtx is not installed: pip install -e '.[rtx]'"),
        ("9.0", set(), "auto", "capability 9.0), TensorRT does: pip install -e '.[trt]'"),
        ("9.0", {"tensorrt_rtx"}, "auto", "capability 9.0), TensorRT does: pip install -e '.[trt]'"),
        ("9.0", {"tensorrt_rtx"}, "tensorrt_rtx", "pip install -e '.[trt]'"),
        ("8.0", {"tensorrt_rtx"}, "tensorrt", "tensorrt is not installed: pip install -e '.[trt]'"),
        (None, {"tensorrt"}, "tensorrt", "TensorRT builds an engine only on the GPU that will run it"),
    ],
)
def test_flavour(
    monkeypatch: pytest.MonkeyPatch,
    fake_tensorrt: InstallFake,
    gpu: str | None,
    here: set[str],
    choice: EngineChoice,
    expected: str,
):
    for flavour in ("tensorrt", "tensorrt_rtx"):
        fake_tensorrt(flavour=flavour, gpu=gpu)
        if flavour not in here:
            monkeypatch.setitem(sys.modules, flavour, None)
    if expected in ("tensorrt", "tensorrt_rtx"):
        assert choose_flavour(choice) == expected
    else:
        with pytest.raises(EngineUnavailableError, match=re.escape(expected)) as refusal:
            choose_flavour(choice)
        assert "\n" not in str(refusal.value)


def test_the_gpus_that_rtx_serves_are_those_it_names():
    trt = pytest.importorskip("tensorrt_rtx")
    named = {name[2:-1] + "." + name[-1] for name in trt.ComputeCapability.__members__ if name.startswith("SM")}
    assert named == {*RTX_TARGETS, RTX_TURING}
