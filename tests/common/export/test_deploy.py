import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from tritonclient.grpc import model_config_pb2  # type: ignore[import-untyped]

from medspeed.common.export.bundle import write_triton
from medspeed.common.export.onnx_model import export_onnx
from medspeed.common.inference.predictors import onnxruntime_predictor
from tests.common.export.stand_in import StandIn, configuration, serving


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, exported: Path) -> Path:
    return write_triton(tmp_path_factory.mktemp("repository"), "spleen", exported / "model_fp32.onnx", "# Card", 0.5)


def test_the_configuration_says_what_triton_must_know(served: Path):
    found = configuration(served)
    assert (found.name, found.backend, found.max_batch_size) == ("spleen", "onnxruntime", 4)
    assert list(found.dynamic_batching.preferred_batch_size) == [2]
    assert found.dynamic_batching.max_queue_delay_microseconds == 2000
    assert [*found.input, *found.output, *found.instance_group] == []  # the server completes them from the model
    (warmup,) = found.model_warmup
    zeros = warmup.inputs["image"]
    assert (warmup.batch_size, zeros.data_type, list(zeros.dims), zeros.zero_data) == (
        2, model_config_pb2.TYPE_FP32, [1, 16, 16, 16], True
    )  # fmt: skip


def test_the_layout_is_that_of_a_model_repository(served: Path):
    files = sorted(file.relative_to(served).as_posix() for file in served.rglob("*") if file.is_file())
    assert files == ["1/model.onnx", "MODEL_CARD.md", "README.md", "SHA256SUMS", "client.py", "config.pbtxt"]
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=served, check=True)
    assert (served / "MODEL_CARD.md").read_text() == "# Card"


@pytest.mark.parametrize(("batch", "most", "preferred"), [(1, 4, []), (4, 4, []), (3, 4, [3]), (6, 6, [])])
def test_a_size_is_preferred_only_between_one_window_and_the_most(tmp_path, tiny, batch, most, preferred):
    onnx = export_onnx(tiny, tmp_path / "model.onnx", (1, 8, 8, 8), "fp32", {}, batch=batch)
    found = configuration(write_triton(tmp_path, "m", onnx, "card"))
    assert found.max_batch_size == most
    assert list(found.dynamic_batching.preferred_batch_size) == preferred
    assert found.model_warmup[0].batch_size == batch


def test_the_readme_tells_the_models_own_metadata(tmp_path: Path, tiny: nn.Module):
    metadata = {"weights_sha256": "0" * 64, "labels": "background lung", "name": "not kept", "regions": "a b"}
    export_onnx(tiny, tmp_path / "model_fp32.onnx", (1, 8, 8, 8), "fp32", metadata)
    folder = write_triton(tmp_path / "repository", "tiny-1.2", tmp_path / "model_fp32.onnx", "card")
    assert (folder / "1" / "model.onnx").read_bytes() == (tmp_path / "model_fp32.onnx").read_bytes()
    found = dict(re.findall(r"^- (\w+): (.*)$", (folder / "README.md").read_text(), re.MULTILINE))
    assert found == {
        "weights_sha256": "0" * 64, "labels": "background lung", "regions": "a b", "precision": "fp32",
        "window": "1 8 8 8", "smallest": "1 8 8 8",
    }  # fmt: skip
    assert configuration(folder).name == "tiny-1.2"


def test_labels_cannot_forge_the_readme(tmp_path: Path, tiny: nn.Module):
    labels = "a`\n# Title\n<script>x</script> [link](javascript:x)"
    export_onnx(tiny, tmp_path / "m.onnx", (1, 8, 8, 8), "fp32", {"labels": labels})
    readme = (write_triton(tmp_path / "repository", "m", tmp_path / "m.onnx", "card") / "README.md").read_text()
    assert r"- labels: a\` \# Title \<script\>x\</script\> \[link\](javascript:x)" in readme.splitlines()


def test_the_warmup_takes_the_largest_window(tmp_path: Path):
    pooled = nn.Sequential(nn.Conv2d(3, 1, 3, stride=2), nn.AvgPool2d(4, stride=1)).eval()
    export_onnx(pooled, tmp_path / "m.onnx", (3, 128, 128), "fp32", {}, smallest=(3, 64, 64))
    found = configuration(write_triton(tmp_path, "patches", tmp_path / "m.onnx", "card"))
    assert list(found.model_warmup[0].inputs["image"].dims) == [3, 128, 128]
    readme = (tmp_path / "patches" / "README.md").read_text()
    assert "logits = predict(torch.zeros(1, 3, 128, 128))" in readme  # MONAI's inferer wants logits of a window's size
    assert "sliding_window_inference" not in readme


def test_group_normalisation_is_served_exactly(tmp_path: Path):
    """On so many voxels of such a mean ONNX Runtime's own operator is far off."""
    network = nn.Sequential(nn.Identity(), nn.GroupNorm(1, 2))
    onnx = export_onnx(network, tmp_path / "m.onnx", (2, 80, 80, 80), "fp32", {})
    folder = write_triton(tmp_path, "brats", onnx, "card")
    window = torch.rand(1, 2, 80, 80, 80, generator=torch.Generator().manual_seed(0)) + 30
    session = onnxruntime.InferenceSession(folder / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    with torch.no_grad():
        due = network(window)
    found = torch.from_numpy(session.run(["logits"], {"image": window.numpy()})[0])
    assert torch.equal(found, onnxruntime_predictor(onnx)(window))
    assert (found - due).abs().max() < 1e-3  # float32 at a mean of 30 of a deviation of 0.3
    own = onnxruntime.InferenceSession(onnx, providers=["CPUExecutionProvider"])
    assert np.abs(own.run(["logits"], {"image": window.numpy()})[0] - due.numpy()).max() > 1e-2


def test_models_that_cannot_be_served_are_refused(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="gate rejected it, serve another --precision"):
        write_triton(tmp_path, "m", tmp_path / "model_fp32.onnx", "card")
    (tmp_path / "model.onnx").write_bytes(b"no model")
    with pytest.raises(ValueError, match="not a usable ONNX model"):
        write_triton(tmp_path, "m", tmp_path / "model.onnx", "card")
    assert not (tmp_path / "m").exists()


def external(model: Any) -> None:
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = 1
    tensor.external_data.add(key="location", value="../../../etc/passwd")


def operator_of_others(model: Any) -> None:
    model.graph.node[0].domain = "others"


def no_output(model: Any) -> None:
    model.graph.output[0].name = "nowhere"


def no_graph(model: Any) -> None:
    model.ClearField("graph")


def two_inputs(model: Any) -> None:
    model.graph.input.append(onnx.helper.make_tensor_value_info("second", 1, [1]))


def no_numbers(model: Any) -> None:
    onnx.helper.set_model_props(model, {"precision": "fp32", "window": "x", "smallest": "1 8 8 8", "batch": "1 1 1"})


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (external, {"serve", "run"}), (operator_of_others, {"run"}), (no_output, {"run"}), (two_inputs, {"run"}),
        (no_graph, {"run"}), (no_numbers, {"serve"}),
    ],
)  # fmt: skip
def test_what_the_runtimes_say_of_a_hostile_model_is_one_line(tmp_path: Path, exported: Path, change, refused):
    model, path = onnx.load(str(exported / "model_fp32.onnx")), tmp_path / "model_fp32.onnx"
    change(model)
    path.write_bytes(model.SerializeToString())
    uses = {
        "serve": lambda: write_triton(tmp_path / "repository", "m", path, "card"),
        "run": lambda: onnxruntime_predictor(path)(torch.zeros(1, 1, 16, 16, 16)),
    }
    for name in refused:
        with pytest.raises(ValueError, match=rf"\A{re.escape(str(path))}: .*\Z"):
            uses[name]()


def test_a_folder_that_holds_something_is_left_alone(served: Path, exported: Path):
    with pytest.raises(FileExistsError, match="not empty"):
        write_triton(served.parent, "spleen", exported / "model_fp16.onnx", "card")
    (served.parent / "begun" / "1").mkdir(parents=True)  # as a full disk leaves it
    write_triton(served.parent, "begun", exported / "model_fp16.onnx", "card")
    assert (served / "1" / "model.onnx").read_bytes() != (exported / "model_fp16.onnx").read_bytes()


@pytest.fixture
def server(served: Path) -> Iterator[tuple[StandIn, str]]:
    with serving(served) as found:
        yield found


def test_the_client_is_a_predictor(served: Path, server: tuple[StandIn, str], windows: torch.Tensor, exported: Path):
    client: dict[str, Any] = {}
    exec((served / "client.py").read_text(), client)
    predict = client["triton_predictor"](server[1])
    due = onnxruntime_predictor(exported / "model_fp32.onnx")(windows)
    assert torch.allclose(predict(windows), due, atol=1e-6)
    turned = windows.transpose(2, 4)  # not contiguous: the bytes must be sent in the order of the shape
    assert torch.allclose(predict(turned), onnxruntime_predictor(exported / "model_fp32.onnx")(turned), atol=1e-6)
    assert server[0].calls == 2


def test_whole_scans_are_for_models_of_volumes(served: Path, tmp_path: Path, exported: Path):
    readme = (served / "README.md").read_text()
    folder = write_triton(tmp_path, "spleen", exported / "model_fp32.onnx", "# Card", 0.5, pipeline="{}\n")
    assert (folder / "inference.json").read_text() == "{}\n"
    assert "inference.json" in (folder / "SHA256SUMS").read_text()
    command = "python -m monai.bundle run --config_file inference.json --bundle_root . --url localhost:8001 \\\n"
    assert command in (folder / "README.md").read_text()
    assert "inference.json" not in readme


def test_the_readme_shows_a_scan_that_runs(served: Path, server: tuple[StandIn, str], monkeypatch: pytest.MonkeyPatch):
    (program,) = re.findall(r"```python\n(.*?)```", (served / "README.md").read_text(), re.DOTALL)
    assert "localhost:8001" in program
    assert "predictor=predict, overlap=0.5)" in program
    monkeypatch.syspath_prepend(served)
    monkeypatch.delitem(sys.modules, "client", raising=False)
    found: dict[str, Any] = {}
    exec(program.replace("localhost:8001", server[1]), found)
    sys.modules.pop("client")
    assert found["logits"].shape == (1, 2, 16, 16, 16)
    assert server[0].calls == 1
