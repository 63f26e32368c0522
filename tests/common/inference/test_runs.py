"""Several runs as one model: the mean of their logits, what they must share, and that scans are read once."""

import csv
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch

import medspeed
from medspeed.common.config import parse_config
from medspeed.common.data.preparation import prepare_volume
from medspeed.common.data.volumes import read_volume
from medspeed.common.inference import scans as scans_module
from medspeed.common.inference.evaluation import evaluate_folders
from medspeed.common.inference.model import VolumeModel, load_weights, save_weights, write_model
from medspeed.common.inference.open_predictor import Ensemble, OpenedPredictor, open_predictor
from medspeed.common.inference.options import InferConfig, model_folders
from medspeed.common.inference.postprocessing import Postprocessing
from medspeed.common.inference.predict import predict_labels
from medspeed.common.inference.predictors import torch_predictor
from medspeed.common.inference.runs import compared_mean, load_models, open_models
from medspeed.data_scripts.make_phantoms import make_phantoms
from medspeed.models import find_network
from tests.support import unet_model

MODEL = unet_model((4.0, 4.0, 4.0), (4, 8), (24, 24, 16), window_batch=2)
CPU = torch.device("cpu")


def write_run(folder: Path, seed: int, model: VolumeModel = MODEL) -> Path:
    """Write a run of random weights."""
    torch.manual_seed(seed)
    save_weights(folder / "best.safetensors", model.build().state_dict(), {})
    write_model(folder, "spleen", model)
    return folder


@pytest.fixture
def runs(tmp_path):
    return tuple(write_run(tmp_path / "cv" / f"fold-{number}", seed) for number, seed in enumerate((3, 5, 7)))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_phantoms("ct", tmp_path_factory.mktemp("scans") / "data", 2) / "imagesTr"


def test_a_run_that_still_trains_is_said(runs, capsys):
    (runs[0] / "checkpoints").mkdir()
    for finished in (False, True):
        if finished:
            (runs[0] / "summary.json").write_text("{}")
        load_models(runs[:1], "spleen", find_network)
        assert (f"{runs[0]}: its training has not ended" in capsys.readouterr().out) != finished


def infer(runs, images, output, model=None, **more):
    config = InferConfig(runs, images, output, device="cpu", backend="torch", **{"overlays": False, **more})
    return scans_module.segment_scans(config, model or load_models(config.model, "spleen", find_network))


class Adds(torch.nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image + self.by


def test_the_mean_is_that_of_all_members_in_float32():
    assert Ensemble([Adds(by) for by in (1.0, 2.0, 6.0)])(torch.tensor([0.0, 10.0])).tolist() == [3.0, 13.0]
    found = Ensemble([Adds(by) for by in (256.0, 1.0)])(torch.zeros(1, dtype=torch.bfloat16))  # which has no 257
    assert (found.dtype, found.tolist()) == (torch.float32, [128.5])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_opened_runs_compute_the_mean_of_what_each_computes(runs, count):
    runs = runs[:count]
    windows = torch.rand((2, 1, *MODEL.window_size), generator=torch.Generator().manual_seed(0))
    alone = [open_predictor(run, MODEL, backend="torch", device=CPU).predict(windows) for run in runs]
    opened = open_models(runs, load_models(runs, "spleen", find_network), backend="torch", device=CPU)
    assert (opened.backend, opened.precision, len(opened.files)) == ("torch", "fp32", count)
    torch.testing.assert_close(opened.predict(windows), torch.stack(alone).mean(dim=0))


def test_networks_may_differ_where_all_else_is_shared(runs, tmp_path):
    wide = write_run(tmp_path / "wide", 1, replace(MODEL, arguments={"channels": (4, 12), "residual_units": 1}))
    both = (runs[0], wide)
    model = load_models(both, "spleen", find_network)
    network = model.build()
    assert isinstance(network, Ensemble)
    assert [tuple(each.arguments["channels"]) for each in model.members] == [(4, 8), (4, 12)]
    opened = open_models(both, model, backend="torch", device=CPU)
    windows = torch.rand((2, 1, *MODEL.window_size), generator=torch.Generator().manual_seed(0))
    alone = [
        open_predictor(run, load_models([run], "spleen", find_network), backend="torch", device=CPU) for run in both
    ]
    torch.testing.assert_close(opened.predict(windows), sum(each.predict(windows) for each in alone) / 2)


def test_the_agreement_of_models_is_counted_in_their_windows():
    """Voxels are labelled where they pass the model's threshold."""
    model = unet_model((1.0, 1.0, 1.0), (4, 8), (8, 8, 8), ("background", "organ"))
    found = torch.zeros(3, 2, 2, 1, 1, 4)  # [member, B, K, X, Y, Z]
    found[:, 0, 1, 0, 0] = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, -1], [1, -1, -1, -1]])
    found[:, 1, 1] = -1
    found = found.repeat_interleave(2, dim=-1)  # every second voxel is compared
    members, pairs = [lambda windows, each=each: each for each in found], list[torch.Tensor]()
    mean = compared_mean(members, model, pairs, torch.zeros(2, 1, 1, 1, 8))
    assert torch.equal(mean, found.sum(dim=0) / 3)
    assert [each.tolist() for each in pairs] == [[[4, 12]]]  # of 3, 2 and 1 voxels the pairs share 2, 1 and 1
    strict = replace(model, postprocessing=(Postprocessing(("organ",), threshold=0.8),))
    found[0, 0, 1, 0, 0, :2], pairs[:] = 1.5, []  # a logit of 1.5 is a probability of 0.82, one of 1 is 0.73
    compared_mean(members, strict, pairs, torch.zeros(2, 1, 1, 1, 8))
    assert [each.tolist() for each in pairs] == [[[0, 2]]]  # the first alone has a voxel, which no pair shares


def test_models_that_disagree_on_a_scan_are_said_and_models_that_agree_are_not(runs, images, tmp_path, capsys):
    near = tmp_path / "near"
    shutil.copytree(runs[0], near)
    weights = {name: value * 1.0001 for name, value in load_weights(near / "best.safetensors").items()}
    save_weights(near / "best.safetensors", weights, {})
    for pair, low in (((runs[0], runs[1]), True), ((runs[0], near), False)):
        done = infer(pair, images, tmp_path / str(low)).done
        said = [" ".join(each.record["uncertain"]) for each in done.values()]
        assert [("between flips or models" in each) for each in said] == [low, low], said
        assert ("UNCERTAIN: spleen: Dice 0." in capsys.readouterr().out) == low


def test_precision_and_post_processing_are_the_models_where_they_agree(tmp_path, capsys):
    cleaned = replace(MODEL, precision="bf16", postprocessing=(Postprocessing(("spleen",), largest=True),))
    alike = [write_run(tmp_path / f"alike-{seed}", seed, cleaned) for seed in (1, 2)]
    model = load_models(alike, "spleen", find_network)
    assert (model.precision, model.postprocessing) == (cleaned.precision, cleaned.postprocessing)
    model = load_models(
        [*alike, write_run(tmp_path / "plain", 3, replace(MODEL, window_batch=1))], "spleen", find_network
    )
    assert model.window_batch == 1  # the most that the engine of each takes
    assert (model.precision, model.postprocessing) == ("fp32", ())
    assert "no post-processing, since the models' own differ" in capsys.readouterr().out


def test_channels_of_another_order_are_refused_where_models_name_them(tmp_path):
    model = replace(MODEL, preparation=replace(MODEL.preparation, channels=2))
    orders = enumerate([(), ("FLAIR", "T1"), ("FLAIR", "T1"), ("T1", "FLAIR")])
    runs = [write_run(tmp_path / str(seed), seed, replace(model, modality=order)) for seed, order in orders]
    assert load_models(runs[:3], "spleen", find_network).modality == ("FLAIR", "T1")
    with pytest.raises(ValueError, match=r"3: modality \('T1', 'FLAIR'\), but \('FLAIR', 'T1'\) in .*1: models must"):
        load_models(runs, "spleen", find_network)


@pytest.mark.parametrize("exported", [False, True])
def test_each_network_on_a_gpu_has_a_verdict_of_its_own(exported, tmp_path, monkeypatch):
    wide = write_run(tmp_path / "wide", 1, replace(MODEL, arguments={"channels": (4, 12), "residual_units": 1}))
    both = write_run(tmp_path / "narrow", 2), wide
    model = load_models(both, "spleen", find_network)
    found: list[str] = []
    opened = OpenedPredictor(lambda windows: windows, "torch", "fp32", "", both[:1])
    monkeypatch.setattr("medspeed.common.inference.runs.open_predictor", lambda *_, **__: opened)

    def repeating(predict, about, _):
        found.append(about)
        return predict

    monkeypatch.setattr("medspeed.common.inference.runs.repeating_predictor", repeating)
    open_models(both[:1] if exported else both, model, device=torch.device("cuda"))
    names = [f"unet3d {member.arguments}" for member in model.members]
    assert names[0] != names[1]
    assert found == [f"{each} in fp32" for each in ([" + ".join(names)] if exported else names)]


def test_scans_are_read_prepared_and_written_once_and_labelled_by_the_mean(runs, images, tmp_path, monkeypatch):
    counts = dict.fromkeys(("read_scan", "prepare_volume", "restore_labels", "write_label", "draw_overlay"), 0)
    for name in counts:
        inner = getattr(scans_module, name)

        def counted(*given: Any, name: str = name, inner: Any = inner, **more: Any) -> Any:
            counts[name] += 1
            return inner(*given, **more)

        monkeypatch.setattr(scans_module, name, counted)
    done = infer(runs, images, tmp_path / "masks", overlays=True).done
    assert counts == dict.fromkeys(counts, 2)
    networks = [MODEL.build(run / "best.safetensors").eval() for run in runs]
    predict = torch_predictor(Ensemble(networks).eval())
    for name, prediction in done.items():
        case = prepare_volume(name, read_volume(images / name), MODEL.preparation, CPU, torch.float32)
        due = predict_labels(case, predict, MODEL, CPU)
        found = np.asarray(nibabel.load(prediction.files[0]).dataobj)
        assert 0.001 < due.mean() < 0.999
        assert (found != due).mean() < 1e-4  # rounding: batch normalisation is folded into what is compared


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("preparation.spacing", replace(MODEL, preparation=replace(MODEL.preparation, spacing=(4.0, 4.0, 5.0)))),
        ("preparation.window", replace(MODEL, preparation=replace(MODEL.preparation, window=(-57.0, 99.0)))),
        ("labelling.labels", unet_model((4.0, 4.0, 4.0), (4, 8), (24, 24, 16), ("background", "liver"))),
        ("window_size", replace(MODEL, window_size=(24, 24, 24))),
        ("overlap", replace(MODEL, overlap=0.5)),
    ],
)
def test_models_that_share_too_little_are_refused_by_name(runs, tmp_path, name, other):
    odd = write_run(tmp_path / "odd", 1, other)
    with pytest.raises(ValueError, match=rf"{odd}: {name} .*, but .* in {runs[0]}: models must share .* leave it out"):
        load_models([*runs, odd], "spleen", find_network)


def test_a_model_is_given_once_has_weights_and_is_no_ensemble_itself(runs, tmp_path):
    shutil.copytree(runs[0], tmp_path / "copy")
    with pytest.raises(ValueError, match=r"copy: its weights are given twice"):
        load_models([*runs, tmp_path / "copy"], "spleen", find_network)
    write_model(tmp_path / "whole", "spleen", load_models(runs, "spleen", find_network))
    with pytest.raises(ValueError, match=r"whole: is an ensemble itself; name its models instead \(fold-0, fold-1, "):
        load_models([runs[0], tmp_path / "whole"], "spleen", find_network)
    (runs[1] / "best.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"fold-1/best.safetensors: no such weights file"):
        load_models(runs, "spleen", find_network)


def test_a_folder_of_folds_means_all_of_them_in_order(tmp_path, runs):
    for number in (10, 9):
        write_run(tmp_path / "cv" / f"fold-{number}", number)
    folds = sorted((tmp_path / "cv").iterdir())
    for fold in folds:
        (fold / "summary.json").write_text("{}")
    assert [path.name for path in model_folders(tmp_path / "cv")] == ["fold-0", "fold-1", "fold-2", "fold-9", "fold-10"]
    assert model_folders([tmp_path / "cv", tmp_path / "other"])[-1] == tmp_path / "other"
    (tmp_path / "cv" / "fold-9" / "summary.json").unlink()
    with pytest.raises(ValueError, match=r"model .*fold-9: not finished; repeat `medspeed folds`, or name"):
        model_folders([tmp_path / "cv"])
    (tmp_path / "cv" / "config.yaml").write_text("fold: 0\nfolds: 3\n")
    assert [path.name for path in model_folders([tmp_path / "cv"])] == ["fold-0", "fold-1", "fold-2"]
    (tmp_path / "cv" / "config.yaml").write_text("fold: 0\nfolds: 5\n")
    with pytest.raises(ValueError, match=r"model .*fold-3: not finished"):  # not begun
        model_folders([tmp_path / "cv"])
    (tmp_path / "cv" / "environment.json").touch()  # a fold of its own, which is not finished
    assert model_folders([tmp_path / "cv"]) == (tmp_path / "cv",)
    (tmp_path / "latest").symlink_to(tmp_path / "other")
    assert model_folders([tmp_path / "latest"]) == (tmp_path / "other",)  # wherever the link is moved
    with pytest.raises(ValueError, match=r"model: needs a run folder"):
        InferConfig((), tmp_path, tmp_path / "out")


def test_runs_are_listed_and_a_single_one_may_have_a_comma_in_its_name(tmp_path):
    def parsed(*model: object) -> tuple[Path, ...]:
        words = ["--model", *map(str, model), "--input", "in", "--output", "out"]
        return parse_config(InferConfig, {}, words).model

    run = tmp_path / "rate=0.1,batch=4"
    run.mkdir()
    assert parsed(run) == (run,)
    assert parsed(run, "b") == (run, Path("b"))
    assert parsed("a", "b") == parsed("a,b") == (Path("a"), Path("b"))
    written = tmp_path / "infer.yaml"
    written.write_text("model: runs/a\ninput: in\noutput: out\n")  # as before there could be several
    assert parse_config(InferConfig, {}, ["--config", str(written)]).model == (Path("runs/a"),)


def test_a_folder_of_scans_resumes_only_with_the_same_members_and_names_them(runs, images, tmp_path, capsys):
    output, files = tmp_path / "masks", ("best.safetensors",)
    infer(runs, images, output)
    capsys.readouterr()
    infer(runs, images, output)
    assert "2 scans already finished" in capsys.readouterr().out
    rows = list(csv.DictReader((output / "measurements.csv").read_text().splitlines()))
    members = load_models(runs, "spleen", find_network).members
    assert {row["model"] for row in rows} == {" ".join(f"{each.run}:{each.sha256[:12]}" for each in members)}
    assert [each.run for each in members] == ["fold-0", "fold-1", "fold-2"]
    mark = json.loads(next((output / "records").iterdir()).read_text())["mark"]
    assert [each["sha256"] for each in mark["model"]["members"]] == [each.sha256 for each in members]
    shutil.copy(write_run(tmp_path / "new", 11) / files[0], runs[2] / files[0])
    capsys.readouterr()
    infer(runs, images, output)
    infer(runs[:2], images, output)
    assert "already finished" not in capsys.readouterr().out


def test_runs_without_the_same_exports_are_all_run_by_torch(runs, monkeypatch):
    """As where one of them has an engine."""
    chosen: Iterator[Any] = iter(["onnxruntime", "torch", "torch"])

    def opened(run: Path, model: VolumeModel, *, backend: Any, **given: Any) -> Any:
        found = open_predictor(run, model, backend="torch", **given)
        return replace(found, backend=next(chosen) if backend == "auto" else backend)

    monkeypatch.setattr("medspeed.common.inference.runs.open_predictor", opened)
    found = open_models(runs, load_models(runs, "spleen", find_network), device=CPU)
    assert (found.backend, found.reason) == ("torch", "the models have not the same exports")
    assert next(chosen, None) is None


def test_a_single_model_is_stored_as_before(tmp_path):
    write_model(tmp_path, "spleen", MODEL)
    assert "members" not in json.loads((tmp_path / "model.json").read_text())


def test_the_mean_of_models_with_errors_of_their_own_finds_more_than_they_do(tmp_path):
    """The shipped network, its weights disturbed at random, three times."""
    data = make_phantoms("ct", tmp_path / "data", 2, seed=5)
    demo = Path(medspeed.__file__).parent / "demo"
    runs = []
    for seed in range(3):
        weights, generator = load_weights(demo / "best.safetensors"), torch.Generator().manual_seed(seed)
        for value in [each for each in weights.values() if each.ndim > 1]:
            value += 0.4 * value.std() * torch.randn(value.shape, generator=generator)
        runs.append(tmp_path / str(seed))
        save_weights(runs[-1] / "best.safetensors", weights, {})
        shutil.copy(demo / "model.json", runs[-1])

    def dice(some: list[Path], output: Path) -> float:
        infer(some, data / "imagesTr", output)
        return evaluate_folders(output, data / "labelsTr").summary["1"]["dice"]["mean"]

    alone = [dice([run], tmp_path / "masks" / run.name) for run in runs]
    assert dice(runs, tmp_path / "masks" / "all") > sum(alone) / 3 + 0.01, alone
