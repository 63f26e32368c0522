import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import nibabel
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.bundle import ConfigParser, verify_net_in_out
from monai.data import MetaTensor
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from medspeed.apps.pathology.export import write_patch_bundle
from medspeed.apps.pathology.model import PathologyModel, normalised
from medspeed.common.data.preparation import Preparation, prepare_volume
from medspeed.common.data.volumes import read_volume
from medspeed.common.export.bundle import LICENCE, painting, served_pipeline, write_triton, write_volume_bundle
from medspeed.common.export.onnx_model import export_onnx
from medspeed.common.inference.labels import LabelScheme, Region, one_region_per_label
from medspeed.common.inference.model import save_weights, write_model
from medspeed.common.inference.options import InferConfig
from medspeed.common.inference.postprocessing import Postprocessing, logit_bars
from medspeed.common.inference.predict import predict_labels, predict_logits
from medspeed.common.inference.predictors import torch_predictor
from medspeed.common.inference.runs import RunModel
from medspeed.common.inference.scans import clean_labels, segment_scans
from medspeed.data_scripts.make_phantoms import make_phantoms
from medspeed.models.resnet18_fcn import resnet18_fcn
from medspeed.models.segresnet3d import segresnet3d
from medspeed.models.unet3d import unet3d
from tests.common.export.stand_in import serving
from tests.support import unet_model

BRATS = LabelScheme(
    ("background", "edema", "core", "enhancing"),
    (Region("TC", (2, 3), 2), Region("WT", (1, 2, 3), 1), Region("ET", (3,), 3)),
    exclusive=False,
)
RIVALS = LabelScheme(
    ("background", "a", "", "b", "c"),
    (Region("a", (1,), 1), Region("b", (3,), 3), Region("all", (1, 3, 4), 4), Region("c", (4,), 4)),
    exclusive=False,
)
TASK = "Segmentation of something"


class Trained(NamedTuple):
    run: Path
    model: RunModel


def spleen_model(labels: tuple[str, ...] = ("background", "spleen")) -> RunModel:
    model = unet_model((4.1, 3.9, 5.3), (4, 8, 16), (48, 40, 32), labels, window_batch=2, residual_units=2)
    first = Postprocessing((labels[1],), largest=True), Postprocessing((labels[1],), threshold=0.7)
    steps = (*first, *(Postprocessing((name,), smallest_ml=0.2) for name in labels[2:]))
    return replace(model, postprocessing=steps)


def brats_model() -> RunModel:
    preparation = Preparation((2.27, 2.27, 2.27), "zscore", None, 4)
    arguments = {"filters": 8, "blocks_down": (1, 1, 1), "dropout": 0.0}
    steps = Postprocessing(("TC", "WT", "ET"), smallest_ml=0.1), Postprocessing(("ET",), threshold=0.7)
    return RunModel(segresnet3d, arguments, BRATS, preparation, (40, 48, 32), 1, 0.25, "fp32", steps)


def random_run(run: Path, app: str, model: RunModel) -> Trained:
    torch.manual_seed(0)
    run.mkdir()
    built = with_statistics(model.build(), (model.preparation.channels, *model.window_size))
    save_file(built.state_dict(), run / "best.safetensors")
    write_model(run, app, model)
    return Trained(run, model)


def with_statistics(network: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """Give batch normalisations running statistics that are not the initial ones, by which they change nothing."""
    for _ in range(3):
        network.train()(torch.rand(2, *shape))
    return network.eval()


def balance(trained: Trained, scan: Path) -> None:
    """Shift the last biases of random weights so that by its threshold each label has its share of this scan."""
    network = trained.model.build(trained.run / "best.safetensors").eval()
    volume = read_volume(scan, trained.model.preparation.channels)
    case = prepare_volume(scan.name, volume, trained.model.preparation, dtype=torch.float32)
    exclusive = trained.model.labelling.exclusive
    with torch.no_grad():
        channels = trained.model.labelling.channels
        bias = next(each for each in reversed(list(network.parameters())) if each.shape == (channels,))
        logits = predict_logits(case.image, torch_predictor(network), trained.model)
        for channel in range(exclusive, channels):
            if exclusive:
                over = logits[0] if len(logits) == 1 else logits[channel] - logits[:channel].amax(0)
                shift = over.flatten().quantile(0.7)
            else:
                share = {1: 0.85, 2: 0.7, 3: 0.5}[len(trained.model.labelling.regions[channel].members)]
                shift = logits[channel].flatten().quantile(share)
            bias[channel] -= shift
            logits[channel - (len(logits) == 1)] -= shift  # as the network has it from now on
        bias.add_(torch.tensor(logit_bars(trained.model.labelling, trained.model.postprocessing)))
    save_file(network.state_dict(), trained.run / "best.safetensors")


@pytest.fixture(scope="module")
def spleen(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    model = spleen_model()
    return random_run(tmp_path_factory.mktemp("spleen") / "run", "spleen", model)


@pytest.fixture(scope="module")
def spleen_bundle(tmp_path_factory: pytest.TempPathFactory, spleen: Trained) -> Path:
    return write_volume_bundle(tmp_path_factory.mktemp("bundles") / "spleen", spleen.run, TASK, spleen.model)


@pytest.fixture(scope="module")
def brats(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    model = brats_model()
    return random_run(tmp_path_factory.mktemp("brats") / "run", "brats", model)


def run_monai(bundle: Path, *command: str) -> str:
    """Run MONAI's own program in the bundle, on one thread; whatever of this project it imports makes it fail."""
    trap = bundle.parent / "trap"
    (trap / "medspeed").mkdir(parents=True, exist_ok=True)
    (trap / "medspeed" / "__init__.py").write_text("raise AssertionError('the bundle imports the project')")
    environment = os.environ | {"PYTHONPATH": str(trap), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    program = [sys.executable, "-m", "monai.bundle", *command]
    done = subprocess.run(program, cwd=bundle, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_bundle_holds_what_monai_asks_for(spleen: Trained, spleen_bundle: Path):
    files = sorted(file.relative_to(spleen_bundle).as_posix() for file in spleen_bundle.rglob("*") if file.is_file())
    assert files == [
        "LICENSE", "SHA256SUMS", "configs/inference.json", "configs/metadata.json", "docs/README.md", "models/model.pt",
    ]  # fmt: skip
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=spleen_bundle, check=True)
    assert (spleen_bundle / "LICENSE").read_text() == LICENCE.read_text()
    assert "Apache License" in LICENCE.read_text()
    readme = (spleen_bundle / "docs" / "README.md").read_text()
    assert readme.startswith("# Model card: medspeed spleen")
    assert "python -m monai.bundle run --config_file configs/inference.json" in readme
    written = "".join((spleen_bundle / "configs" / name).read_text() for name in ("inference.json", "metadata.json"))
    assert str(spleen.run.parent) not in written + readme


def test_the_metadata_describe_the_network(spleen_bundle: Path):
    found = json.loads((spleen_bundle / "configs" / "metadata.json").read_text())
    needed = {  # the fields that MONAI's schema requires
        "version", "changelog", "monai_version", "pytorch_version", "numpy_version", "required_packages_version",
        "task", "description", "authors", "copyright", "network_data_format",
    }  # fmt: skip
    assert needed <= set(found)
    assert found["version"] in found["changelog"]
    assert found["task"] == "Segmentation of spleen"
    image, pred = found["network_data_format"]["inputs"]["image"], found["network_data_format"]["outputs"]["pred"]
    assert (image["num_channels"], image["spatial_shape"], image["value_range"]) == (1, [48, 40, 32], [0, 1])
    assert (pred["num_channels"], pred["channel_def"]) == (2, {"0": "background", "1": "spleen"})


@pytest.mark.parametrize("name", ["$__import__('os').abort()", "@network", "%liver"])
def test_a_label_is_a_name_in_a_bundle_whatever_it_begins_with(tmp_path: Path, spleen: Trained, name: str):
    labelling = replace(spleen.model.labelling, labels=("background", name))
    bundle = write_volume_bundle(tmp_path / "bundle", spleen.run, TASK, replace(spleen.model, labelling=labelling))
    parser = ConfigParser()
    parser.read_config(bundle / "configs" / "metadata.json")
    outputs = parser.get_parsed_content("network_data_format::outputs::pred::channel_def")
    assert outputs == {"0": "background", "1": f"label {name}"}


def test_the_metadata_of_regions_name_each_channel(tmp_path: Path, brats: Trained):
    bundle = write_volume_bundle(tmp_path / "bundle", brats.run, TASK, brats.model)
    found = json.loads((bundle / "configs" / "metadata.json").read_text())["network_data_format"]
    assert found["inputs"]["image"]["num_channels"] == 4
    assert found["outputs"]["pred"]["channel_def"] == {"0": "TC", "1": "WT", "2": "ET"}


@pytest.mark.parametrize("name", ["spleen", "brats"])
def test_the_weights_are_the_runs(request: pytest.FixtureRequest, tmp_path: Path, name: str):
    trained: Trained = request.getfixturevalue(name)
    bundle = write_volume_bundle(tmp_path / "bundle", trained.run, TASK, trained.model)
    stored = torch.load(bundle / "models" / "model.pt", weights_only=True)
    due = trained.model.build(trained.run / "best.safetensors").state_dict()
    assert list(stored) == list(due)
    assert all(type(value) is torch.Tensor and torch.equal(value, due[key]) for key, value in stored.items())


def test_the_same_run_gives_the_same_bytes(tmp_path: Path, spleen: Trained, spleen_bundle: Path):
    again = write_volume_bundle(tmp_path / "another name", spleen.run, TASK, spleen.model)
    assert (again / "SHA256SUMS").read_bytes() == (spleen_bundle / "SHA256SUMS").read_bytes()


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"out_channels": 3}, RuntimeError, "size mismatch"),
        ({"num_res_units": 3}, RuntimeError, "Missing key"),
        ({"act": "RELU6"}, RuntimeError, "Unexpected key"),
        ({"adn_ordering": "AND"}, ValueError, "network .*adn_ordering.* but computes other results"),
    ],
)
def test_a_network_that_is_not_ours_is_refused(tmp_path: Path, spleen: Trained, changed, error, words):
    def other(*channels: Any, **arguments: Any) -> nn.Module:
        network = unet3d(*channels, **arguments)
        network.monai |= changed
        return network

    with pytest.raises(error, match=words):
        write_volume_bundle(tmp_path / "bundle", spleen.run, TASK, replace(spleen.model, network=other))
    assert not (tmp_path / "bundle").exists()


def test_a_network_that_monai_does_not_have_says_what_it_lacks(tmp_path: Path, spleen: Trained):
    def unknown(*channels: Any, **arguments: Any) -> nn.Module:
        network = unet3d(*channels, **arguments)
        del network.monai
        return network

    with pytest.raises(ValueError, match=r"network unknown: a bundle needs a class of MONAI's: .*attribute `monai`"):
        write_volume_bundle(tmp_path / "bundle", spleen.run, TASK, replace(spleen.model, network=unknown))


def test_a_folder_that_holds_something_is_left_alone(spleen: Trained, spleen_bundle: Path):
    before = (spleen_bundle / "SHA256SUMS").stat().st_mtime_ns
    with pytest.raises(FileExistsError, match="not empty"):
        write_volume_bundle(spleen_bundle, spleen.run, TASK, spleen.model)
    assert (spleen_bundle / "SHA256SUMS").stat().st_mtime_ns == before


@pytest.mark.parametrize("labelling", [BRATS, RIVALS], ids=["nested", "rivals"])
def test_the_expression_paints_as_our_labelling_does(labelling: LabelScheme):
    logits = torch.randn(labelling.channels, 9, 8, 7, generator=torch.Generator().manual_seed(0))
    logits[:, 0] = logits[:, 0].round()  # ties, and exact zeros
    paint: Callable[[torch.Tensor], torch.Tensor] = eval(f"lambda logits: {painting(labelling)}", {"torch": torch})
    found = paint(logits)
    assert found.shape == (1, 9, 8, 7)
    assert torch.equal(found[0].to(torch.uint8), labelling.labels_of(logits))
    assert set(found.unique().tolist()) == {0, *(region.value for region in labelling.regions)}


def test_the_expression_of_nested_regions_can_be_read():
    assert painting(BRATS) == (
        "torch.where(logits[2:3] > 0, 3.0, torch.where(logits[0:1] > 0, 2.0, "
        "torch.where(logits[1:2] > 0, 1.0, torch.zeros_like(logits[:1]))))"
    )


STEPS = (
    Postprocessing(("a",), largest=True),
    Postprocessing(("b",), smallest_ml=0.05),
    Postprocessing(("a", "b"), largest=True, smallest_ml=0.03),
)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> list[Callable[[dict[str, Any]], dict[str, Any]]]:
    """The transforms by which a bundle cleans label maps, one for each of the steps."""
    model = replace(spleen_model(("background", "a", "b")), postprocessing=STEPS)
    parser = ConfigParser(json.loads(served_pipeline(model)))
    transforms = parser.get("postprocessing")["transforms"][2:-2]
    for number, each in enumerate(transforms):
        parser[f"step{number}"] = each
    return [parser.get_parsed_content(f"step{number}") for number in range(len(STEPS))]


@given(seed=st.integers(0, 2**31), density=st.floats(0.0, 0.5), edge=st.sampled_from([1.7, 2.0, 2.15443469]))
@settings(deadline=None, max_examples=60)
def test_a_bundle_cleans_label_maps_as_infer_does(clean, seed: int, density: float, edge: float):
    """Ties among the largest, and volumes of a whole number of voxels (of 10 mm3 and 8 mm3) among them."""
    rng = np.random.default_rng(seed)
    labels = np.asfortranarray(np.where(rng.random((9, 8, 7)) < density, rng.integers(1, 3, (9, 8, 7)), 0), np.uint8)
    affine = np.diag([-edge, edge, edge, 1.0])
    affine[0, 1] = 0.1  # sheared: the lengths of the axes alone do not tell the volume
    for step, transform in zip(STEPS, clean, strict=True):
        due = clean_labels(labels, spleen_model(("background", "a", "b")).labelling, edge**3 / 1000, (step,))
        given_to = MetaTensor(torch.from_numpy(labels.astype(np.float32))[None], affine=torch.from_numpy(affine))
        found = transform({"pred": given_to})["pred"]
        assert isinstance(found, MetaTensor)
        assert np.array_equal(found[0].numpy(), due)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_bundle_refuses_voxels_that_are_no_numbers(value: float):
    """They made the whole scan 0, and its label map empty."""
    parser = ConfigParser(json.loads(served_pipeline(spleen_model())))
    parser["step"] = parser.get("preprocessing")["transforms"][2]
    step, voxels = parser.get_parsed_content("step"), torch.tensor([[[[0.0, 3.0, 5.0]]]])
    assert step({"image": MetaTensor(voxels)})["image"].flatten().tolist() == [0.0, 3.0, 5.0]
    voxels[..., 1] = value
    with pytest.raises(ValueError, match="must not contain infs or NaNs"):
        step({"image": MetaTensor(voxels)})


def test_a_bundle_keeps_a_channel_of_much_smaller_values():
    """Diffusion in m2/s beside an MRI of thousands; what a resampling leaves of zeros is zero in each."""
    parser = ConfigParser(json.loads(served_pipeline(spleen_model())))
    parser["step"] = parser.get("preprocessing")["transforms"][5]
    voxels = torch.tensor([[[[1000.0, 1e-8, 0.0]]], [[[1e-9, 1e-20, 2e-9]]]])
    found = parser.get_parsed_content("step")({"image": MetaTensor(voxels)})["image"]
    assert torch.equal(found.as_tensor(), torch.tensor([[[[1000.0, 0.0, 0.0]]], [[[1e-9, 0.0, 2e-9]]]]))


def test_a_bundle_never_gives_a_number_that_is_no_label():
    gap = one_region_per_label(("background", "a", "", "b"))
    step = Postprocessing(("a",), threshold=0.7)
    parser = ConfigParser(json.loads(served_pipeline(replace(spleen_model(), labelling=gap, postprocessing=(step,)))))
    assert "torch.tensor([0.0, 0.8472978603872034, 10000.0, 0]" in parser.get("postprocessing")["transforms"][0]["func"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["two classes", "three classes", "regions"])
def test_bundle_and_triton_client_give_the_label_maps_of_infer(tmp_path: Path, kind: str):
    """Voxel for voxel; on these scans none differed.

    The bound leaves room for voxels whose labels' logits are equal but for float32's rounding on another processor.
    The first plane of the MRI is one where MONAI's resampling leaves traces of its neighbour, 1e-12, in the background.
    """
    if kind == "regions":
        scans = make_phantoms("mri", tmp_path / "scans", 1) / "imagesTr"
        image = nibabel.load(next(scans.glob("*.nii.gz")))
        image.as_reoriented([[0, 1], [2, -1], [1, 1]]).to_filename(scans / "coronal.nii.gz")
        trained = random_run(tmp_path / "run", "brats", brats_model())
    else:
        scans = make_phantoms("ct", tmp_path / "scans", 2) / "imagesTr"
        model = spleen_model(("background", "spleen", "liver")[: 2 if kind == "two classes" else 3])
        trained = random_run(tmp_path / "run", "spleen", model)
    files = sorted(scans.glob("*.nii.gz"))
    names, packed = [file.name for file in files], files[0]
    files[0] = packed.with_suffix("")  # .nii in, .nii.gz out
    files[0].write_bytes(gzip.decompress(packed.read_bytes()))
    packed.unlink()
    balance(trained, files[0])
    bundle = write_volume_bundle(tmp_path / "bundle", trained.run, TASK, trained.model)
    scanned = ("--dataset_dir", str(scans), "--output_dir", str(tmp_path / "bundled"), "--bundle_root", ".")
    run_monai(bundle, "run", "--config_file", "configs/inference.json", *scanned)
    folders = [tmp_path / "bundled"]
    if kind != "two classes":
        folders.append(tmp_path / "served")
        with serving(served(tmp_path, trained)) as (server, url):
            asked = (*scanned[:3], str(folders[1]), *scanned[4:], "--url", url)
            run_monai(tmp_path / "models" / "volumes", "run", "--config_file", "inference.json", *asked)
            assert server.calls > 0
    predictor = torch_predictor(trained.model.build(trained.run / "best.safetensors").eval())
    segment_scans(InferConfig((trained.run,), scans, tmp_path / "ours", "torch", "fp32", "cpu"), trained.model)
    for file, name in zip(files, names, strict=True):
        volume = read_volume(file, trained.model.preparation.channels)
        case = prepare_volume(file.name, volume, trained.model.preparation, dtype=torch.float32)
        raw = predict_labels(case, predictor, trained.model, torch.device("cpu"))
        due = read_volume(tmp_path / "ours" / file.name).voxels
        plain = predict_labels(case, predictor, replace(trained.model, postprocessing=()), torch.device("cpu"))
        assert not np.array_equal(plain, raw), "the threshold had nothing to do"
        assert not np.array_equal(raw, due), "cleaning had nothing to do"
        assert len(np.unique(due)) == len(trained.model.labelling.labels)
        assert np.bincount(due.ravel()).min() > 500
        for folder in folders:
            assert sorted(each.name for each in folder.iterdir()) == names
            found = read_volume(folder / name)
            assert found.voxels.dtype == np.uint8
            assert np.allclose(found.affine, volume.affine, atol=1e-5)
            # A bundle convolves single volumes without oneDNN: voxels at a threshold may round to its other side.
            assert np.count_nonzero(found.voxels != due) <= 5e-5 * due.size


def served(folder: Path, trained: Trained) -> Path:
    """Return the folder of a run's model in a repository for Triton."""
    network = trained.model.build(trained.run / "best.safetensors").eval()
    window = (trained.model.preparation.channels, *trained.model.window_size)
    export_onnx(network, folder / "model_fp32.onnx", window, "fp32", {}, batch=trained.model.window_batch)
    pipeline = served_pipeline(trained.model)
    return write_triton(folder / "models", "volumes", folder / "model_fp32.onnx", "card", pipeline=pipeline)


def test_monai_verifies_the_networks_input_and_output(spleen_bundle: Path, caplog: pytest.LogCaptureFixture):
    configs = spleen_bundle / "configs"
    verify_net_in_out("network_def", meta_file=configs / "metadata.json", config_file=configs / "inference.json")
    assert "verified with no error" in caplog.text


@pytest.fixture(scope="module")
def patches(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    """A bundle of patches of 64 pixels, and the network that it is made of."""
    folder = tmp_path_factory.mktemp("patches")
    torch.manual_seed(0)
    network = with_statistics(resnet18_fcn(64), (3, 64, 64))
    (folder / "run").mkdir()
    model = PathologyModel(64, 0.243, 1024, 1, "fp32")
    write_model(folder / "run", "pathology", model)
    save_weights(folder / "run" / "best.safetensors", network.state_dict(), {})
    bundle = write_patch_bundle(folder / "bundle", folder / "run", model)
    return bundle, network


def test_a_patch_bundle_holds_the_weights_by_monais_names(patches: tuple[Path, nn.Module]):
    bundle, network = patches
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=bundle, check=True)
    stored = torch.load(bundle / "models" / "model.pt", weights_only=True)
    assert torch.equal(stored["fc.weight"].flatten(), network.get_parameter("head.weight").flatten())
    found = json.loads((bundle / "configs" / "metadata.json").read_text())["network_data_format"]
    assert found["inputs"]["image"]["spatial_shape"] == [64, 64]
    assert found["outputs"]["pred"]["channel_def"] == {"0": "tumour"}
    assert "RESULTS/probabilities.csv" in (bundle / "docs" / "README.md").read_text()


@pytest.mark.slow
def test_monai_alone_gives_our_probabilities(tmp_path: Path, patches: tuple[Path, nn.Module]):
    bundle, network = patches
    rng = np.random.default_rng(0)
    slope = np.linspace(0, 1, 64)[:, None, None]  # along Y alone: a transposed image is another one
    pixels = np.stack([np.rint(rng.uniform(0, 255, (64, 64, 3)) * slope**n).astype(np.uint8) for n in range(18)])
    (tmp_path / "scans").mkdir()
    for number, patch in enumerate(pixels):
        image = Image.fromarray(patch).convert("RGBA" if number == 1 else "RGB")
        image.save(tmp_path / "scans" / f"patch_{number:02}.png")
    run_monai(
        bundle, "run", "--config_file", "configs/inference.json", "--bundle_root", ".",
        "--dataset_dir", str(tmp_path / "scans"), "--output_dir", str(tmp_path / "results"),
    )  # fmt: skip
    rows = [line.split(",") for line in (tmp_path / "results" / "probabilities.csv").read_text().splitlines()]
    assert [Path(name).name for name, _ in rows] == [f"patch_{number:02}.png" for number in range(18)]
    with torch.no_grad():
        due = network(normalised(torch.from_numpy(pixels).permute(0, 3, 1, 2))).flatten().sigmoid().numpy()
    assert np.ptp(due) > 1e-3
    assert np.allclose([float(value) for _, value in rows], due, atol=1e-5)
