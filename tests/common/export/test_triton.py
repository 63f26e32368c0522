import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
import onnxruntime
import pytest
import torch
from google.protobuf import text_format  # type: ignore[import-untyped]
from torch import nn
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc  # type: ignore[import-untyped]

import common.export.triton
from common.export.onnx_model import export_onnx
from common.export.triton import write_triton
from common.files import sha256_of, write_json
from common.inference.predictors import onnxruntime_predictor
from common.inference.tensorrt_runtime import EngineManifest, manifest_path
from tests.common.export.conftest import WINDOW

BATCH = (1, 2, 4)


def configuration(folder: Path) -> Any:
    """Return what Triton itself would read: the published protobuf, which refuses an unknown field."""
    return text_format.Parse((folder / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())


def parameters(folder: Path) -> dict[str, str]:
    return {name: each.string_value for name, each in configuration(folder).parameters.items()}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, exported: Path) -> Path:
    return write_triton(
        tmp_path_factory.mktemp("repository"), "spleen", exported / "model_fp32.onnx", batch=BATCH, instances=2
    )


@pytest.fixture
def plan(tmp_path: Path, exported: Path) -> Path:
    """Stand-in for an engine: its manifest and its ONNX model are real, its bytes are not."""
    folder = Path(shutil.copytree(exported, tmp_path / "exports"))
    path = folder / "model_fp16.plan"
    path.write_bytes(b"an engine")
    describe(path)
    return path


def describe(plan: Path, **changed: Any) -> None:
    onnx = plan.with_suffix(".onnx")
    manifest = EngineManifest(
        onnx.name, sha256_of(onnx), sha256_of(plan), "tensorrt", "10.13.2", ("9.0",), "fp16", WINDOW, WINDOW, BATCH, "2"
    )
    write_json(manifest_path(plan), asdict(manifest) | changed)


def test_the_configuration_says_what_triton_must_know(served: Path):
    found = configuration(served)
    assert (found.name, found.backend, found.max_batch_size) == ("spleen", "onnxruntime", 4)
    assert [(each.name, each.data_type, list(each.dims)) for each in [*found.input, *found.output]] == [
        ("image", model_config_pb2.TYPE_FP32, [1, 16, 16, 16]),
        ("logits", model_config_pb2.TYPE_FP32, [2, 16, 16, 16]),
    ]
    (group,) = found.instance_group
    assert (group.kind, group.count) == (model_config_pb2.ModelInstanceGroup.KIND_AUTO, 2)
    assert list(found.dynamic_batching.preferred_batch_size) == [2]
    assert found.dynamic_batching.max_queue_delay_microseconds == 2000
    assert found.version_policy.latest.num_versions == 1
    (warmup,) = found.model_warmup
    zeros = warmup.inputs["image"]
    assert (warmup.batch_size, zeros.data_type, list(zeros.dims), zeros.zero_data) == (
        2, model_config_pb2.TYPE_FP32, [1, 16, 16, 16], True
    )  # fmt: skip


def test_the_layout_is_that_of_a_model_repository(served: Path):
    files = sorted(file.relative_to(served).as_posix() for file in served.rglob("*") if file.is_file())
    assert files == ["1/model.onnx", "README.md", "SHA256SUMS", "client.py", "config.pbtxt"]
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=served, check=True)
    assert parameters(served)["model_sha256"] == sha256_of(served / "1" / "model.onnx")


@pytest.mark.parametrize(("batch", "preferred"), [((1, 1, 4), []), ((1, 4, 4), []), ((1, 3, 4), [3])])
def test_a_size_is_preferred_only_between_one_window_and_the_most(tmp_path, exported, batch, preferred):
    folder = write_triton(tmp_path, "m", exported / "model_fp16.onnx", batch=batch)
    assert list(configuration(folder).dynamic_batching.preferred_batch_size) == preferred


def test_the_parameters_are_the_models_own_metadata(tmp_path: Path, tiny: nn.Module):
    labels = 'background "left" lung\\none ä\t'
    metadata = {"weights_sha256": "0" * 64, "labels": labels, "name": "not kept", "regions": "a b"}
    export_onnx(tiny, tmp_path / "model_fp32.onnx", (1, 8, 8, 8), "fp32", metadata)
    folder = write_triton(tmp_path / "repository", "tiny-1.2", tmp_path / "model_fp32.onnx", batch=BATCH)
    found = parameters(folder)
    digest = found.pop("model_sha256")
    assert digest == sha256_of(tmp_path / "model_fp32.onnx")  # nothing to write out: the bytes are the same
    assert found == {
        "weights_sha256": "0" * 64, "labels": labels, "regions": "a b", "precision": "fp32",
        "window": "1 8 8 8", "smallest": "1 8 8 8",
    }  # fmt: skip


def test_free_sides_are_minus_one_and_the_warmup_takes_the_largest(tmp_path: Path):
    pooled = nn.Sequential(nn.Conv2d(3, 1, 3, stride=2), nn.AvgPool2d(4, stride=1)).eval()
    export_onnx(pooled, tmp_path / "m.onnx", (3, 128, 128), "fp32", {}, smallest=(3, 64, 64))
    found = configuration(write_triton(tmp_path, "patches", tmp_path / "m.onnx", batch=BATCH))
    assert list(found.input[0].dims) == [3, -1, -1]
    assert list(found.output[0].dims) == [1, -1, -1]
    assert list(found.model_warmup[0].inputs["image"].dims) == [3, 128, 128]


def test_group_normalisation_is_served_exactly(tmp_path: Path):
    """On so many voxels of such a mean ONNX Runtime's own operator is far off."""
    network = nn.Sequential(nn.Identity(), nn.GroupNorm(1, 2))
    onnx = export_onnx(network, tmp_path / "m.onnx", (2, 80, 80, 80), "fp32", {})
    folder = write_triton(tmp_path, "brats", onnx, batch=BATCH)
    window = torch.rand(1, 2, 80, 80, 80, generator=torch.Generator().manual_seed(0)) + 30
    session = onnxruntime.InferenceSession(folder / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    with torch.no_grad():
        due = network(window)
    found = torch.from_numpy(session.run(["logits"], {"image": window.numpy()})[0])
    assert torch.equal(found, onnxruntime_predictor(onnx)(window))
    assert (found - due).abs().max() < 1e-3  # float32 at a mean of 30 of a deviation of 0.3
    own = onnxruntime.InferenceSession(onnx, providers=["CPUExecutionProvider"])
    assert np.abs(own.run(["logits"], {"image": window.numpy()})[0] - due.numpy()).max() > 1e-2


def test_a_plan_is_served_by_tensorrt(tmp_path: Path, plan: Path):
    folder = write_triton(tmp_path / "repository", "fast", plan, batch=(1, 2, 3))
    found = configuration(folder)
    assert (folder / "1" / "model.plan").read_bytes() == b"an engine"
    assert (found.backend, found.max_batch_size) == ("tensorrt", 3)
    assert found.instance_group[0].kind == model_config_pb2.ModelInstanceGroup.KIND_GPU
    assert (list(found.input[0].dims), list(found.output[0].dims)) == ([1, 16, 16, 16], [2, 16, 16, 16])
    assert parameters(folder)["precision"] == "fp16"
    readme = (folder / "README.md").read_text()
    assert "TensorRT 10.13.2" in readme
    assert "compute capability 9.0" in readme


def test_a_plan_of_tensorrt_rtx_is_refused_with_the_remedy(tmp_path: Path, plan: Path):
    describe(plan, flavour="tensorrt_rtx")
    with pytest.raises(ValueError, match=r"cannot load; serve model_fp16\.onnx instead, or build .*--engine tensorrt"):
        write_triton(tmp_path / "repository", "fast", plan, batch=BATCH)
    assert not (tmp_path / "repository").exists()


def test_a_changed_plan_is_refused(tmp_path: Path, plan: Path):
    plan.write_bytes(b"another")
    with pytest.raises(ValueError, match="not that of its manifest"):
        write_triton(tmp_path / "repository", "fast", plan, batch=BATCH)


def test_a_plan_without_its_onnx_model_is_refused(tmp_path: Path, plan: Path):
    plan.with_suffix(".onnx").unlink()
    with pytest.raises(FileNotFoundError, match=r"names and shapes of model_fp16\.plan are read from it"):
        write_triton(tmp_path / "repository", "fast", plan, batch=BATCH)


@pytest.mark.parametrize(
    ("changed", "batch"), [({}, (1, 2, 5)), ({"batch": (2, 2, 4)}, BATCH)], ids=["more", "none for one window"]
)
def test_batches_that_a_plan_does_not_take_are_refused(tmp_path, plan, changed, batch):
    describe(plan, **changed)
    with pytest.raises(ValueError, match="windows in one call; choose within them"):
        write_triton(tmp_path / "repository", "fast", plan, batch=batch)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"name": "../up"}, "name '../up': letters"),
        ({"name": ""}, "name '': letters"),
        ({"batch": (1, 3, 2)}, "1 = fewest <= best <= most"),
        ({"batch": (2, 2, 4)}, "single windows"),
        ({"instances": 0}, "instances 0: at least 1"),
    ],
)
def test_arguments_out_of_bounds_are_refused(tmp_path, exported, given, words):
    arguments = {"name": "m", "batch": BATCH, "instances": 1} | given
    with pytest.raises(ValueError, match=re.escape(words)):
        write_triton(tmp_path, model=exported / "model_fp32.onnx", **arguments)


def test_models_that_cannot_be_served_are_refused(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="export the model first"):
        write_triton(tmp_path, "m", tmp_path / "model_fp32.onnx", batch=BATCH)
    (tmp_path / "model.onnx").write_bytes(b"no model")
    with pytest.raises(ValueError, match="no ONNX model"):
        write_triton(tmp_path, "m", tmp_path / "model.onnx", batch=BATCH)
    with pytest.raises(ValueError, match=r"an \.onnx or a \.plan"):
        write_triton(tmp_path, "m", tmp_path / "best.safetensors", batch=BATCH)


def test_a_folder_that_holds_something_is_left_alone(served: Path, exported: Path):
    with pytest.raises(FileExistsError, match="not empty"):
        write_triton(served.parent, "spleen", exported / "model_fp16.onnx", batch=BATCH)
    assert parameters(served)["precision"] == "fp32"


def test_the_export_itself_needs_no_client_of_triton():
    tree = ast.walk(ast.parse(Path(common.export.triton.__file__).read_text()))
    names = {ast.unparse(node) for node in tree if isinstance(node, ast.Import | ast.ImportFrom)}
    assert "from common.files import atomic_path, sha256_of, write_text" in names
    assert not [name for name in names if "tritonclient" in name or "grpc" in name]


class StandIn(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Triton's gRPC service as far as the client asks: it runs the repository's own model, by its own configuration."""

    def __init__(self, folder: Path) -> None:
        self.most, self.calls = configuration(folder).max_batch_size, 0
        self.session = onnxruntime.InferenceSession(folder / "1" / "model.onnx", providers=["CPUExecutionProvider"])

    def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's name
        self.calls += 1
        (given,), (wanted,) = request.inputs, request.outputs
        assert (request.model_name, given.datatype) == ("spleen", "FP32")
        assert given.shape[0] <= self.most
        windows = np.frombuffer(request.raw_input_contents[0], np.float32).reshape(given.shape)
        logits = self.session.run([wanted.name], {given.name: windows})[0]
        answer = service_pb2.ModelInferResponse(model_name="spleen", raw_output_contents=[logits.tobytes()])
        answer.outputs.add(name=wanted.name, datatype="FP32", shape=logits.shape)
        return answer


@pytest.fixture
def server(served: Path) -> Iterator[tuple[StandIn, str]]:
    stand_in = StandIn(served)
    running = grpc.server(ThreadPoolExecutor(1))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(stand_in, running)
    port = running.add_insecure_port("127.0.0.1:0")
    running.start()
    yield stand_in, f"127.0.0.1:{port}"
    running.stop(None).wait()


def test_the_client_is_a_predictor(served: Path, server: tuple[StandIn, str], windows: torch.Tensor, exported: Path):
    client: dict[str, Any] = {}
    exec((served / "client.py").read_text(), client)
    predict = client["triton_predictor"](server[1])
    due = onnxruntime_predictor(exported / "model_fp32.onnx")(windows)
    assert torch.allclose(predict(windows), due, atol=1e-6)
    turned = windows.transpose(2, 4)  # not contiguous: the bytes must be sent in the order of the shape
    assert torch.allclose(predict(turned), onnxruntime_predictor(exported / "model_fp32.onnx")(turned), atol=1e-6)
    assert server[0].calls == 2


def test_the_readme_shows_a_scan_that_runs(served: Path, server: tuple[StandIn, str], monkeypatch: pytest.MonkeyPatch):
    (program,) = re.findall(r"```python\n(.*?)```", (served / "README.md").read_text(), re.DOTALL)
    assert "localhost:8001" in program
    monkeypatch.syspath_prepend(served)
    monkeypatch.delitem(sys.modules, "client", raising=False)
    found: dict[str, Any] = {}
    exec(program.replace("localhost:8001", server[1]), found)
    sys.modules.pop("client")
    assert found["logits"].shape == (1, 2, 16, 16, 16)
    assert server[0].calls == 1
