"""The brats app's own main, end to end, with every source and cache."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from monai.data import CacheDataset

from medspeed.apps.brats import infer
from medspeed.apps.brats.config import RECIPES, BratsConfig
from medspeed.apps.brats.guide import transforms
from medspeed.apps.brats.train import main, read_data, resolve
from medspeed.common.clock import Clock
from medspeed.common.data.dataset import read_dataset
from medspeed.common.data.preparation import Preparation
from medspeed.common.data.volumes import read_volume
from medspeed.common.inference.options import InferConfig
from medspeed.common.ranks import SINGLE
from medspeed.common.training import monai_batches
from medspeed.common.training.config import Parallel
from medspeed.common.training.monai_batches import guide_batches
from medspeed.common.training.setup import start_run
from medspeed.common.training.volume_config import Crops, Network, Windows
from medspeed.data_scripts.make_phantoms import make_phantoms
from tests.support import last_weights

TINY: dict[str, Any] = {
    "split": "0.2",
    "spacing": (5.0, 5.0, 5.0),
    "network": Network(filters=8, blocks_down=(1, 1)),
    "crop_size": (16, 16, 16),
    "crops": Crops(per_case=2),
    "windows": Windows(size=(24, 24, 24)),
    "batch_size": 4,
    "epochs": 2,
    "precision": "fp32",
    "seed": 3,
}


@pytest.fixture(scope="module")
def run(heads, store, tmp_path_factory, any_quality):
    """One tiny run of the fast recipe, exported to ONNX and, where it is installed, TensorRT-RTX."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    main(BratsConfig(data=heads, store=store, run=folder, **TINY))
    return folder


def losses(folder):
    return [json.loads(line)["losses"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def equal_weights(one, other):
    return all(torch.equal(value, last_weights(other)[name]) for name, value in last_weights(one).items())


@pytest.mark.parametrize(
    ("amx", "filters", "asked", "taken"),
    [
        (False, 8, "auto", "fp32"), (True, 8, "auto", "bf16"), (False, 16, "auto", "bf16"), (False, 8, "bf16", "bf16"),
        (False, None, "auto", "fp32"),
    ],
)  # fmt: skip
def test_few_filters_are_trained_in_bf16_by_themselves_only_on_a_cpu_with_amx(
    amx, filters, asked, taken, heads, store, tmp_path, monkeypatch
):
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr("medspeed.common.training.setup.computes_bf16", lambda device: True)
    network = Network(filters=filters, blocks_down=(1, 1))
    given = {**TINY, "device": "cpu", "precision": asked, "network": network, "engine": "none"}
    config = BratsConfig(data=heads, store=store, run=tmp_path / "run", **given)
    with start_run(config) as run:
        assert resolve(config, read_data(config, run), run)[0].precision == taken


def test_the_reports_viewer_has_every_validation_case_and_names_the_labels(run):
    cases = json.loads((run / "split.json").read_text())["validation"]
    assert sorted(path.stem for path in (run / "report_cases").iterdir()) == sorted(cases)
    page = (run / "report.html").read_text()
    assert page.count('class="case"') == len(cases)
    assert "label 1" not in page
    for label in ("1: edema", "2: non-enhancing tumor", "3: enhancing tumour"):
        assert f"{label}</span>" in page


def test_the_summary_holds_the_regions(run):
    summary = json.loads((run / "summary.json").read_text())
    assert summary["app"] == "brats"
    assert list(summary["quality"]["per_region"]) == ["TC", "WT", "ET"]
    assert summary["cases"] == {"training": 4, "validation": 1}
    assert summary["steps"] == 4
    assert summary["ranks"] == 1
    assert summary["onnx"]["max_abs_diff"] <= 1e-3
    assert summary["onnx"]["fp16"]["path"] is not None  # GroupNorm and trilinear upsampling hold in half precision
    assert len(list((run / "overlays").glob("*.png"))) == 1
    log = (run / "run.log").read_text()
    assert "regions: TC = labels 2+3, WT = labels 1+2+3, ET = labels 3" in log
    assert "cache auto: 4 cases, up to" in log


def test_infer_returns_label_maps_on_the_files_own_grid(run, heads, tmp_path):
    images = heads / "imagesTr"
    assert infer.main(InferConfig(run, images, tmp_path / "out", device="cpu", overlays=False)).status == 0
    for file in sorted(images.glob("*.nii.gz")):
        scan, labels = nib.load(file), read_volume(tmp_path / "out" / file.name)
        assert labels.voxels.shape == scan.shape[:3]
        assert np.array_equal(labels.affine, scan.affine)
        assert set(np.unique(labels.voxels)) <= {0, 1, 2, 3}


def test_a_run_of_another_app_is_refused(run, tmp_path):
    content = json.loads((run / "model.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps({**content, "app": "spleen"}))
    with pytest.raises(ValueError, match="not the model file of a run of brats"):
        infer.main(InferConfig(tmp_path, tmp_path / "a.nii.gz", tmp_path / "out", device="cpu"))


@pytest.mark.parametrize(
    "cache", [pytest.param("ram", marks=pytest.mark.slow), pytest.param("disk", marks=pytest.mark.slow), "none"]
)
@pytest.mark.usefixtures("no_export")
def test_where_the_cases_lie_changes_nothing(cache, run, heads, store, tmp_path):
    config = {**TINY, "cache": cache, "engine": "none"}
    main(BratsConfig(data=heads, store=store, run=tmp_path / "run", **config))
    assert losses(tmp_path / "run") == losses(run)
    assert equal_weights(tmp_path / "run", run)


@pytest.mark.slow
@pytest.mark.usefixtures("no_export")
def test_a_smart_cache_trains_resumes_and_keeps_its_number(heads, store, tmp_path, monkeypatch):
    config = BratsConfig(
        data=heads, store=store, **{**TINY, "epochs": 3, "engine": "none"}, cache="smart:2:0.5",
    )  # fmt: skip
    main(replace(config, run=tmp_path / "whole"))
    assert [len(epoch) for epoch in losses(tmp_path / "whole")] == [1, 1, 1]  # two cases of two crops are one batch
    _fail_after(1, monkeypatch)
    with pytest.raises(RuntimeError, match="power cut"):
        main(replace(config, run=tmp_path / "cut"))
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"cache smart:1: the run began with smart:2:0\.5"):
        main(replace(config, resume=tmp_path / "cut", cache="smart:1"))
    main(replace(config, resume=tmp_path / "cut"))
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert equal_weights(tmp_path / "cut", tmp_path / "whole")
    assert json.loads((tmp_path / "cut" / "smart_cache.json").read_text()) == {"cases": 2}


@pytest.mark.slow
@pytest.mark.usefixtures("no_export")
def test_partitions_that_are_dealt_anew_train_on_all_cases(heads, store, tmp_path):
    config = BratsConfig(
        data=heads, store=store, run=tmp_path / "run", **{**TINY, "epochs": 4, "engine": "none"},
        parallel=Parallel(partitions=2), cache="auto:1",
    )  # fmt: skip
    main(config)
    assert len(losses(tmp_path / "run")) == 4
    main(replace(config, run=tmp_path / "fixed", cache="auto"))
    assert losses(tmp_path / "run")[0] == losses(tmp_path / "fixed")[0]  # round 0 deals in turn, as without
    assert losses(tmp_path / "run")[1:] != losses(tmp_path / "fixed")[1:]


def test_a_case_that_cannot_be_prepared_in_the_background_ends_the_run_by_name(heads, tmp_path):
    data = make_phantoms("mri", tmp_path / "data", 3)
    broken = sorted((data / "imagesTr").iterdir())[1]
    whole = broken.read_bytes()
    config = BratsConfig(
        data=data, store=tmp_path / "store", run=tmp_path / "run", **{**TINY, "split": "all", "engine": "none"},
        cache="smart:1:1.0",
    )  # fmt: skip
    cut = whole[: len(whole) // 2]

    def cut_the_file(*_: object) -> None:
        broken.write_bytes(cut)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("medspeed.common.training.sources.say_inexact", cut_the_file)  # after all checks, before step 1
        patch.setattr("medspeed.common.training.sources.stored_cases", _prepares_again)
        with pytest.raises(ValueError, match=broken.name):
            main(config)


@pytest.mark.parametrize("recipe", [pytest.param("baseline", marks=pytest.mark.slow), "guide"])
@pytest.mark.usefixtures("no_export")
def test_the_monai_recipes_run(recipe, heads, store, tmp_path):
    tiny = {
        **TINY,
        "epochs": 1,
        "batch_size": 2,
        "crops": Crops(per_case=1, flips="xyz"),
        "workers": 1,
        "engine": "none",
    }
    summary = main(replace(RECIPES[recipe], data=heads, store=store, run=tmp_path / "run", **tiny))
    assert summary is not None
    assert summary["recipe"] == recipe
    assert summary["steps"] == 2


def test_the_guides_cache_stays_as_it_was(heads, monkeypatch):
    cases = read_dataset(heads).cases[:2]
    preparation = Preparation((5.0, 5.0, 5.0), "zscore", None, 4)
    config = BratsConfig(crop_size=(8, 8, 8), crops=Crops(per_case=1, flips="", intensity=0.1))
    chain = transforms(config, preparation, torch.device("cpu"))
    made: list[CacheDataset] = []

    def cache_dataset(*given, **named):
        made.append(CacheDataset(*given, **named))
        return made[0]

    monkeypatch.setattr(monai_batches, "CacheDataset", cache_dataset)
    run: Any = SimpleNamespace(device=torch.device("cpu"), ranks=SINGLE, clock=Clock())
    model: Any = SimpleNamespace(preparation=preparation, labelling=SimpleNamespace(numbers=range(4)))
    batches = guide_batches(chain, cases, model, replace(config, cache="monai", batch_size=2, workers=1), run)
    cached = [torch.as_tensor(item["image"]) for item in made[0]._cache]
    before = [image.clone() for image in cached]
    for epoch in range(4):
        assert [batch.image.shape for batch in batches.epoch(epoch)] == [(2, 4, 8, 8, 8)]
    assert all(torch.equal(image, kept) for image, kept in zip(cached, before, strict=True))


@pytest.mark.usefixtures("no_export")
def test_labels_with_a_gap_train_by_the_challenges_numbers(heads, tmp_path):
    """BraTS 2018: 1 core, 2 edema, 4 enhancing; from phantoms numbered 1 edema, 2 core, 3 enhancing."""
    data = make_phantoms("mri", tmp_path / "data", 2)
    for file in (data / "labelsTr").iterdir():
        label = nib.load(file)
        renumbered = np.array([0, 2, 1, 4], np.uint8)[np.asarray(label.dataobj)]
        nib.save(nib.Nifti1Image(renumbered, label.affine), file)
    content = json.loads((data / "dataset.json").read_text())
    content["labels"] = {"0": "background", "1": "label1", "2": "label2", "4": "label4"}
    (data / "dataset.json").write_text(json.dumps(content))
    tiny = {**TINY, "split": "all", "epochs": 1, "engine": "none"}
    with pytest.raises(ValueError, match="does not know the labels 1 'label1'"):
        main(BratsConfig(data=data, store=tmp_path / "store", run=tmp_path / "refused", **tiny))
    assert not (tmp_path / "refused").exists()
    stray = sorted((data / "labelsTr").iterdir())[0]
    whole, label = stray.read_bytes(), nib.load(stray)
    nib.save(nib.Nifti1Image(np.where(np.asarray(label.dataobj) == 2, 3, 0).astype(np.uint8), label.affine), stray)
    with pytest.raises(ValueError, match=rf"{stray.name}.*3"):  # 3 is in the gap
        main(BratsConfig(data=data, store=tmp_path / "store", run=tmp_path / "gap", regions="brats2018", **tiny))
    stray.write_bytes(whole)
    config = BratsConfig(data=data, store=tmp_path / "store", run=tmp_path / "run", regions="brats2018", **tiny)
    assert main(config) is not None
    assert "TC = labels 1+4, WT = labels 1+2+4, ET = labels 4" in (tmp_path / "run" / "run.log").read_text()


@pytest.mark.real_data
def test_real_brains_go_from_file_to_file(real_data, tmp_path):
    data = real_data / "brain_tumour_real"
    tiny = {**TINY, "split": "all", "epochs": 1, "engine": "none"}
    summary = main(BratsConfig(data=data, store=tmp_path / "store", run=tmp_path / "run", **tiny))
    assert summary is not None
    assert summary["held_out"] is False
    image = sorted((data / "imagesTr").iterdir())[0]
    assert infer.main(InferConfig(tmp_path / "run", image, tmp_path / "out", device="cpu", overlays=False)).status == 0
    assert read_volume(tmp_path / "out" / image.name).voxels.shape == nib.load(image).shape[:3]


def _fail_after(steps, monkeypatch):
    from medspeed.common.training.fit import train_step

    calls = []

    def step(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) > steps:
            raise RuntimeError("power cut")
        return train_step(*arguments)

    monkeypatch.setattr("medspeed.common.training.fit.train_step", step)


def _prepares_again(cases, model, config, progress=False):
    from medspeed.common.data.preparation import prepare_case

    return [prepare_case(case, model.preparation, range(4)) for case in cases]
