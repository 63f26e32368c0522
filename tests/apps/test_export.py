"""The hand-over of imported weights, by each app's own main: what a team does that has a network and no training."""

import json
from dataclasses import replace
from typing import Literal
from unittest import mock

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image

from medspeed.apps.brats.export import BratsExport
from medspeed.apps.brats.export import imported_model as imported_brats
from medspeed.apps.brats.export import main as export_brats
from medspeed.apps.pathology.export import PathologyExport, our_name
from medspeed.apps.pathology.export import main as export_pathology
from medspeed.apps.pathology.model import PathologyModel
from medspeed.apps.pathology.model import load_model as load_pathology
from medspeed.apps.spleen.export import SpleenExport, imported_model
from medspeed.apps.spleen.export import main as export_spleen
from medspeed.apps.spleen.infer import main as infer_spleen
from medspeed.common.export.deploy import _find_cases, hand_over
from medspeed.common.export.onnx_model import export_onnx
from medspeed.common.files import record_digests, sha256_of
from medspeed.common.inference.model import save_weights
from medspeed.common.inference.open_predictor import open_predictor
from medspeed.common.inference.options import InferConfig
from medspeed.common.inference.runs import import_weights
from medspeed.common.inference.tensorrt_runtime import EngineUnavailableError
from medspeed.data_scripts.make_phantoms import make_phantoms
from medspeed.data_scripts.make_slides import make_slides
from medspeed.models.resnet18_fcn import resnet18_fcn

TINY = {"channels": (4, 8), "window_size": (32, 32, 32), "spacing": (4.0, 4.0, 4.0)}


def bundle_weights(folder, network):
    """Write weights as MONAI's model zoo does: a state dict in a .pt."""
    torch.save(network.state_dict(), folder / "model.pt")
    return folder / "model.pt"


def spleen(folder, **more):
    return SpleenExport(folder / "run", device="cpu", **{"to": "onnx", **(TINY if "init" in more else {}), **more})


@pytest.fixture
def weights(tmp_path):
    torch.manual_seed(0)
    return bundle_weights(tmp_path, imported_model(spleen(tmp_path, init=tmp_path / "model.pt")).build())


def test_weights_of_a_bundle_become_models_that_infer_takes(tmp_path, weights, capsys):
    exports = export_spleen(spleen(tmp_path, init=weights))
    assert exports == tmp_path / "run" / "exports"
    said = capsys.readouterr().out
    assert "gate: agreement with PyTorch on 3 cases (synthetic scans" in said
    assert "| onnx fp32 |" in said
    record = json.loads((exports / "exports.json").read_text())
    assert [model["precision"] for model in record["onnx"]] == ["fp32", "fp16"]
    assert all(model["quality_delta"] <= 0.005 for model in record["onnx"])
    assert set(record["seconds per window in ONNX Runtime"]) == {"fp32", "fp16"}
    digests = json.loads((tmp_path / "run" / "digests.json").read_text())
    assert set(digests) == {"exports/model_fp32.onnx", "exports/model_fp16.onnx"}
    scans = make_phantoms("ct", tmp_path / "data", 2) / "imagesTr"
    sides: tuple[tuple[Literal["onnxruntime", "torch"], str], ...] = (("onnxruntime", "a"), ("torch", "b"))
    for backend, output in sides:
        config = InferConfig(tmp_path / "run", scans, tmp_path / output, backend=backend, overlays=False)
        assert infer_spleen(config).status == 0
    rows = [(tmp_path / name / "measurements.csv").read_text().splitlines()[1].split(",") for name in "ab"]
    assert float(rows[0][2]) == pytest.approx(float(rows[1][2]), rel=0.01)


def test_an_engine_that_cannot_be_built_is_an_error(tmp_path, weights, monkeypatch, capsys):
    monkeypatch.setattr("medspeed.common.export.export.choose_flavour", _no_tensorrt)
    with pytest.raises(ValueError, match="run: no engine could be built: see the table"):
        export_spleen(replace(spleen(tmp_path, init=weights), to="engine"))
    assert "| no TensorRT |" in capsys.readouterr().out
    assert (tmp_path / "run" / "exports" / "model_fp32.onnx").is_file()


def _no_tensorrt(wish):
    raise EngineUnavailableError("no TensorRT")


def test_int8_is_made_where_it_is_asked_for_and_labels_judge_it(tmp_path, weights, capsys):
    data = make_phantoms("ct", tmp_path / "data", 3)
    # 32 by 32 by 32 random weights judge nothing: the gate's verdict may be either, but it must be told.
    repository = export_spleen(spleen(tmp_path, init=weights, to="triton", int8=True, data=data, overlap=0.5))
    assert (repository / "config.pbtxt").is_file()
    assert "predictor=predict, overlap=0.5)" in (repository / "README.md").read_text()
    assert "MODEL_CARD.md" in (repository / "SHA256SUMS").read_text()
    record = json.loads((tmp_path / "run" / "exports" / "exports.json").read_text())
    assert record["gate"].startswith("Dice on 3 cases")
    int8 = record["onnx"][2]
    assert int8["precision"] == "int8"
    assert bool(int8["path"]) != bool(int8["reason"])
    assert "| onnx int8 |" in capsys.readouterr().out


def test_a_bundle_is_made_of_the_same_run(tmp_path, weights):
    folder = export_spleen(spleen(tmp_path, init=weights, to="bundle", output=tmp_path / "bundle"))
    config = json.loads((folder / "configs" / "inference.json").read_text())
    assert (
        config["network_def"] | {"_target_": "UNet"}
        == imported_model(spleen(tmp_path, init=tmp_path / "model.pt")).build().monai
    )
    assert "not evaluated" in (folder / "docs" / "README.md").read_text().lower()


@pytest.mark.slow
def test_exports_of_other_weights_are_not_used(tmp_path, weights):
    """As a training that went on leaves them: best.safetensors is new, the models beside it are not."""
    export_spleen(spleen(tmp_path, init=weights))
    run = tmp_path / "run"
    torch.manual_seed(1)
    other = imported_model(spleen(tmp_path, init=tmp_path / "model.pt"))
    save_weights(run / "best.safetensors", other.build().state_dict(), {})

    def opened(backend):
        return open_predictor(run, other, backend=backend, device=torch.device("cpu"))

    with pytest.raises(ValueError, match="exported from other weights than best"):
        opened("onnxruntime")
    assert opened("auto").backend == "torch"
    assert "other weights" in opened("auto").reason
    before = (run / "exports" / "model_fp32.onnx").read_bytes()
    export_spleen(spleen(tmp_path, to="triton"))
    assert (run / "exports" / "model_fp32.onnx").read_bytes() != before
    assert opened("onnxruntime").backend == "onnxruntime"


def test_what_changed_behind_the_record_of_a_run_is_neither_used_nor_handed_over(tmp_path, weights):
    run = tmp_path / "run"
    model = imported_model(spleen(tmp_path, init=tmp_path / "model.pt"))
    import_weights(run, "spleen", model, weights)
    metadata = {"weights_sha256": sha256_of(run / "best.safetensors")}
    exported = export_onnx(model.build(), run / "exports" / "model_fp32.onnx", (1, 32, 32, 32), "fp32", metadata)
    record_digests(run, [exported])

    def flip(path):
        content = bytearray(path.read_bytes())
        content[-5] ^= 0x40
        path.write_bytes(content)

    flip(exported)
    with pytest.raises(ValueError, match=r"model_fp32\.onnx: SHA-256 .* does not match digests\.json"):
        export_spleen(spleen(tmp_path, to="triton"))
    with pytest.raises(ValueError, match=r"model_fp32\.onnx: SHA-256"):
        open_predictor(run, model, backend="onnxruntime", device=torch.device("cpu"))
    assert open_predictor(run, model, backend="torch", device=torch.device("cpu")).backend == "torch"
    exported.unlink()
    flip(run / "best.safetensors")
    for to in ("bundle", "onnx", "triton"):
        with pytest.raises(ValueError, match=r"best\.safetensors: the file has changed"):
            export_spleen(spleen(tmp_path, to=to))
    with pytest.raises(ValueError, match=r"best\.safetensors: the file has changed"):
        open_predictor(run, model, device=torch.device("cpu"))


def test_triton_gets_no_model_that_no_gate_has_passed(tmp_path, weights):
    run, gate = tmp_path / "run", mock.Mock(side_effect=InterruptedError("the gate"))
    model = imported_model(spleen(tmp_path, init=tmp_path / "model.pt"))
    import_weights(run, "spleen", model, weights)

    def serve():
        return hand_over("spleen", "a task", spleen(tmp_path, to="triton"), model, gate)

    metadata = {"weights_sha256": sha256_of(run / "best.safetensors")}
    path = export_onnx(model.build(), run / "exports" / "model_fp32.onnx", (1, 32, 32, 32), "fp32", metadata)
    with pytest.raises(InterruptedError):  # as a process that was killed before its gate leaves it
        serve()
    record_digests(run, [path])
    assert (serve() / "1" / "model.onnx").is_file()
    (run / "best.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"best\.safetensors"):
        serve()


def test_a_summary_that_says_nothing_is_no_data(tmp_path, weights):
    import_weights(tmp_path / "run", "spleen", imported_model(spleen(tmp_path, init=tmp_path / "model.pt")), weights)
    (tmp_path / "run" / "summary.json").write_text("{}")
    (tmp_path / "run" / "split.json").write_text('{"validation": []}')
    assert _find_cases(spleen(tmp_path), "ct", tmp_path / "made")[2].startswith("(synthetic scans")


def test_a_run_is_never_overwritten_and_weights_that_do_not_fit_leave_nothing(tmp_path, weights):
    with pytest.raises(ValueError, match=r"does not fit; .*channels \(4, 8, 16\)"):
        export_spleen(spleen(tmp_path, init=weights, channels=(4, 8, 16)))
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="not empty"):
        export_spleen(spleen(tmp_path, init=weights))
    assert (tmp_path / "run" / "mine.txt").read_text() == "mine"


def test_data_without_a_dataset_is_an_error(tmp_path, weights):
    with pytest.raises(FileNotFoundError, match=r"dataset\.json: not found; a dataset folder contains"):
        export_spleen(spleen(tmp_path, init=weights, data=tmp_path))


def test_windows_that_the_network_does_not_take_leave_no_run(tmp_path, weights):
    with pytest.raises(ValueError, match=r"window_size \(30, 30, 31\): the network does not take such windows \("):
        export_spleen(spleen(tmp_path, init=weights, window_size=(30, 30, 31)))
    assert not (tmp_path / "run").exists()


def test_a_network_of_the_users_own_need_not_run_without_numbers(tmp_path):
    class Own(torch.nn.Conv3d):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return super().forward(image * torch.tensor([2.0]))  # of which "meta" has no number

    def own(*_: int) -> Own:
        return Own(1, 2, 1)

    own.__name__ = "mine:own"
    torch.save(own().state_dict(), tmp_path / "model.pt")
    model = replace(imported_model(spleen(tmp_path, init=tmp_path / "model.pt")), network=own, arguments={})
    import_weights(tmp_path / "run", "spleen", model, tmp_path / "model.pt")
    assert (tmp_path / "run" / "best.safetensors").is_file()


@pytest.mark.slow
def test_brats_imports_three_regions_of_four_channels(tmp_path):
    config = BratsExport(
        tmp_path / "run", "onnx", device="cpu", filters=8, blocks_down=(1, 1), window_size=(32, 32, 32),
        spacing=(4.0, 4.0, 4.0), init=tmp_path / "model.pt",
    )  # fmt: skip
    torch.manual_seed(0)
    model = imported_brats(config)
    assert [region.name for region in model.labelling.regions] == ["TC", "WT", "ET"]
    assert [region.members for region in model.labelling.regions] == [(2, 3), (1, 2, 3), (3,)]
    bundle_weights(tmp_path, model.build())
    exports = export_brats(config)
    session = onnxruntime.InferenceSession(exports / "model_fp32.onnx")
    assert session.get_inputs()[0].shape[1:] == [4, 32, 32, 32]
    assert session.run(None, {"image": np.zeros((1, 4, 32, 32, 32), np.float32)})[0].shape == (1, 3, 32, 32, 32)


def test_pathology_imports_monai_s_numbered_features(tmp_path):
    """MONAI's bundle numbers the parts of TorchVision's ResNet, and keeps its last layer as a convolution `fc`."""
    torch.manual_seed(0)
    network = resnet18_fcn(96)
    numbers = {"conv1": "0", "bn1": "1", "layer1": "4", "layer2": "5", "layer3": "6", "layer4": "7"}
    theirs = {}
    for name, value in network.state_dict().items():
        part, _, rest = name.partition(".")
        first, _, last = rest.partition(".")
        theirs[f"fc.{rest}" if part == "head" else f"features.{numbers[first]}.{last}"] = value
    torch.save({"model": theirs}, tmp_path / "model.pt")
    model = PathologyModel(96, 0.5, 608, 1, "fp32")
    import_weights(tmp_path / "run", "pathology", model, tmp_path / "model.pt", our_name)
    model = load_pathology(tmp_path / "run")
    image = torch.randn(2, 3, 96, 96, generator=torch.Generator().manual_seed(1))
    built = model.build(tmp_path / "run" / "best.safetensors").eval()
    assert torch.equal(built(image), network.eval()(image))


@pytest.mark.slow
def test_pathology_hands_imported_weights_over(tmp_path, monkeypatch):
    slides = make_slides(tmp_path / "slides", 4, 2, 1024)  # smaller than those that are made where none are given
    monkeypatch.setattr("medspeed.apps.pathology.patches.tables.make_synthetic", lambda *_: slides)
    monkeypatch.setattr("medspeed.apps.pathology.quality._GATE_PATCHES", 32)
    torch.manual_seed(0)
    torch.save(resnet18_fcn(96).state_dict(), tmp_path / "model.pt")
    config = PathologyExport(
        tmp_path / "run", "triton", device="cpu", patch_size=96, tile_size=544, init=tmp_path / "model.pt", int8=True
    )
    repository = export_pathology(config)
    assert "dims: [ 3, 544, 544 ]" in (repository / "config.pbtxt").read_text()
    record = json.loads((tmp_path / "run" / "exports" / "exports.json").read_text())
    assert [model["precision"] for model in record["onnx"]] == ["fp32", "fp16", "int8"]
    assert not (tmp_path / "run" / "split.json").exists()  # how the gate divides patches is not what trained weights
    for name in "abcd":
        Image.new("RGB", (128, 128)).save(tmp_path / f"{name}.png")
    (tmp_path / "labels.csv").write_text("image,label,split\na.png,1,train\nb.png,0,train\nc.png,1,val\nd.png,0,val\n")
    other = PathologyExport(tmp_path / "run", "onnx", device="cpu", data=tmp_path)
    with pytest.raises(ValueError, match="patches of 128 pixels; the model takes 96"):
        export_pathology(other)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"to": "onnx", "output": "x"}, "output x: only for --to triton"),
        ({"to": "onnx", "precision": "int8"}, "precision int8: only for --to triton"),
        ({"to": "onnx", "engine": "tensorrt"}, "engine tensorrt: only for --to engine"),
        ({"to": "onnx", "overlap": 0.5}, "overlap 0.5: only with --init; a run keeps its own"),
        ({"to": "triton", "labels": ("background", "liver")}, "labels .*: only with --init"),
        ({"to": "bundle", "data": "x"}, "data x: a bundle is not judged on data"),
        ({"to": "bundle", "int8": True}, "int8 true: a bundle contains PyTorch weights"),
    ],
)
def test_fields_that_do_not_fit_are_named(tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        SpleenExport(tmp_path, **given)
