import copy
import json
import shutil
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from medspeed.apps.spleen import evaluate, infer
from medspeed.apps.spleen.config import RECIPES, SpleenConfig
from medspeed.apps.spleen.train import main, read_data, resolve
from medspeed.common.data.volumes import read_volume
from medspeed.common.inference import postprocessing, scores
from medspeed.common.inference.labels import dice_counts, dice_of_counts, one_region_per_label
from medspeed.common.inference.model import load_weights
from medspeed.common.inference.options import EvaluateConfig, InferConfig
from medspeed.common.training import fit
from medspeed.common.training.fit import train_step
from medspeed.common.training.setup import start_run
from medspeed.common.training.volume_config import Crops, Windows
from medspeed.data_scripts.make_phantoms import make_phantoms
from tests.support import last_weights

TINY: dict[str, Any] = {
    "split": "0.25",
    "spacing": (6.0, 6.0, 6.0),
    "channels": (4, 8),
    "crop_size": (16, 16, 16),
    "crops": Crops(per_case=4),
    "windows": Windows(size=(32, 32, 32)),
    "batch_size": 4,
    "epochs": 2,
    "precision": "fp32",
}


@pytest.fixture(scope="module")
def run(phantoms, store, tmp_path_factory, any_quality):
    """One tiny run of the fast recipe, exported to ONNX and, where it is installed, TensorRT-RTX."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    main(SpleenConfig(data=phantoms, store=store, run=folder, **TINY))
    return folder


def test_a_run_leaves_all_that_it_promises(run):
    names = {path.relative_to(run).as_posix() for path in run.rglob("*")}
    for name in (
        "summary.json", "config.yaml", "plan.json", "split.json", "fingerprint.json", "model.json", "environment.json",
        "metrics.jsonl", "progress.png", "best.safetensors", "run.log", "checkpoints/last", "tensorboard",
        "exports/model_fp32.onnx", "exports/model_fp16.onnx",
    ):  # fmt: skip
        assert name in names
    assert len(list((run / "overlays").glob("*.png"))) == 1


@pytest.mark.parametrize(
    ("capability", "asked", "last"), [("AVX2", None, False), ("AVX512", None, True), ("AVX2", True, True)]
)
def test_in_float32_channels_are_outermost_on_a_cpu_with_avx2_unless_asked_for(
    capability, asked, last, phantoms, store, tmp_path, monkeypatch
):
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    given = {**TINY, "device": "cpu", "precision": "fp32", "channels_last": asked, "engine": "none"}
    config = SpleenConfig(data=phantoms, store=store, run=tmp_path / "run", **given)
    with start_run(config) as run:
        data = read_data(config, run)
        assert resolve(config, data, run)[0].channels_last is last


def test_the_reports_viewer_names_the_labels(run):
    (case,) = json.loads((run / "split.json").read_text())["validation"]
    assert json.loads((run / "report_cases" / f"{case}.json").read_text())["labels"] == {"1": "spleen"}
    page = (run / "report.html").read_text()
    assert "1: spleen</span>" in page
    assert f"<title>{run.name} · spleen fast</title>" in page


def test_the_summary_holds_what_it_promises(run):
    summary = json.loads((run / "summary.json").read_text())
    none = "none: 1 validation case; a choice needs 4"
    assert summary["quality"]["postprocessing"]["words"] == none
    assert f"post-processing: {none}" in (run / "run.log").read_text()
    assert "postprocessing" not in json.loads((run / "model.json").read_text())
    assert summary["held_out"] is True
    assert summary["data"]["synthetic"] is True
    assert summary["cases"] == {"training": 3, "validation": 1}
    assert summary["steps"] == 6
    assert summary["quality"]["value"] == pytest.approx(np.mean(list(summary["quality"]["per_case"].values())))
    for name in ("start", "prepare", "cache", "train", "validate", "export", "total"):
        assert summary["seconds"][name] >= 0
    parts = sum(value for name, value in summary["seconds"].items() if name != "total")
    assert parts <= summary["seconds"]["total"]
    assert summary["onnx"]["max_abs_diff"] <= 1e-3
    assert summary["onnx"]["fp16"]["precision"] == "fp16"
    assert {"flavour", "version", "precision", "path", "sha256", "ran", "reason"} <= summary["engine"].keys()


def test_a_run_is_evaluated_on_the_cases_that_it_held_out(run, phantoms, tmp_path, capsys):
    """The run has told the same of itself, in its summary and in tables of its own."""
    quality = json.loads((run / "summary.json").read_text())["quality"]
    output = tmp_path / "tables"
    assert evaluate.main(EvaluateConfig(model=run, data=phantoms, output=output)).status == 0
    assert "the 1 validation cases of the run" in capsys.readouterr().out
    ours, again = (json.loads((each / "evaluation.json").read_text()) for each in (run, output))
    assert (
        list(again["cases"]) == list(quality["per_case"]) == json.loads((run / "split.json").read_text())["validation"]
    )
    for found in (ours, again):
        (metrics,) = found["cases"].values()
        assert metrics[0]["label"] == "spleen"
        assert metrics[0]["dice"] == pytest.approx(quality["per_region"]["spleen"], abs=0.005)
        assert metrics[0]["hd95_mm"] == pytest.approx(quality["metrics"]["spleen"]["hd95_mm"]["mean"], rel=0.1)
    assert ours["cases"][next(iter(quality["per_case"]))][0]["nsd"] == quality["metrics"]["spleen"]["nsd"]["mean"]
    assert (run / "evaluation.csv").is_file()


@pytest.mark.slow
def test_inference_has_the_dice_that_the_choice_of_post_processing_promised(store, tmp_path, monkeypatch, any_quality):
    """With a bound that any candidate passes, so that there is something to promise."""
    monkeypatch.setattr(postprocessing, "BOUND", -1.0)
    data, run = make_phantoms("ct", tmp_path / "data", 6), tmp_path / "run"
    main(SpleenConfig(data=data, store=store, run=run, engine="none", **{**TINY, "split": "0.7", "epochs": 12}))
    quality = json.loads((run / "summary.json").read_text())["quality"]
    chosen, model = quality["postprocessing"], json.loads((run / "model.json").read_text())
    assert model["postprocessing"] == chosen["steps"] != []
    assert chosen["before"] == pytest.approx(quality["value"])
    for name in ("run.log", "report.html"):
        assert f"post-processing: {chosen['words'].split(' (')[0]}" in (run / name).read_text()
    assert evaluate.main(EvaluateConfig(model=run, data=data, output=tmp_path / "tables")).status == 0
    cases = json.loads((tmp_path / "tables" / "evaluation.json").read_text())["cases"]
    assert len(cases) == 4
    assert np.mean([rows[0]["dice"] for rows in cases.values()]) == pytest.approx(chosen["after"], abs=1e-3)


def test_infer_returns_labels_on_the_files_own_grid(run, phantoms, tmp_path, capsys):
    images = phantoms / "imagesTr"
    assert infer.main(InferConfig(run, images, tmp_path / "out", device="cpu")).status == 0
    assert "onnxruntime fp32" in capsys.readouterr().out
    for file in sorted(images.glob("*.nii.gz")):
        scan, labels = read_volume(file), read_volume(tmp_path / "out" / file.name)
        assert labels.voxels.shape == scan.voxels.shape
        assert np.array_equal(labels.affine, scan.affine)
        assert labels.voxels.dtype == np.uint8
        assert (tmp_path / "out" / f"{file.name.removesuffix('.nii.gz')}.png").is_file()
    timings = json.loads((tmp_path / "out" / "timings.json").read_text())
    stages = timings["seconds"]["phantom_000.nii.gz"]
    due = ["decode", "prepare", "windows", "restore", "clean", "write", "measure", "overlay"]
    assert list(stages) == due


def test_torch_and_onnxruntime_give_the_same_masks(run, phantoms, tmp_path):
    image = phantoms / "imagesTr" / "phantom_000.nii.gz"
    for backend in ("torch", "onnxruntime"):
        config = InferConfig(run, image, tmp_path / backend, backend, "fp32", "cpu", overlays=False)
        assert infer.main(config).status == 0
    masks = [torch.from_numpy(read_volume(tmp_path / name / image.name).voxels.astype(np.uint8))
             for name in ("torch", "onnxruntime")]  # fmt: skip
    regions = one_region_per_label(["background", "spleen"]).regions
    assert dice_of_counts(dice_counts(masks[0], masks[1], regions)).item() > 0.999


def test_a_bad_scan_in_a_folder_is_set_aside_by_name_and_the_others_are_done(run, phantoms, tmp_path, capsys):
    scans = tmp_path / "scans"
    scans.mkdir()
    (scans / "a_bad.nii.gz").write_bytes(b"no scan")
    (scans / "good.nii.gz").symlink_to(phantoms / "imagesTr" / "phantom_001.nii.gz")
    assert infer.main(InferConfig(run, scans, tmp_path / "out", device="cpu", overlays=False)).status == 1
    assert "1 of 2 scans failed: a_bad.nii.gz" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "out").glob("*.nii.gz")) == ["good.nii.gz"]


def test_the_output_may_not_be_the_input_folder(tmp_path):
    with pytest.raises(ValueError, match="must not be the input folder"):
        InferConfig(tmp_path, tmp_path, tmp_path)


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"model\.json: no such file; --model takes a run folder"):
        infer.main(InferConfig(tmp_path, tmp_path / "a.nii.gz", tmp_path / "out", device="cpu"))


@pytest.mark.usefixtures("no_export")
def test_fine_tuning_starts_from_given_weights(run, phantoms, store, tmp_path):
    weights = run / "best.safetensors"
    config = {**TINY, "epochs": 1, "learning_rate": 1e-12, "engine": "none"}
    shutil.copytree(run, tmp_path / "other")
    model = json.loads((run / "model.json").read_text())
    wide = {**model, "preparation": {**model["preparation"], "window": [-100.0, 200.0]}}
    (tmp_path / "other" / "model.json").write_text(json.dumps(wide))
    weights = tmp_path / "other" / "best.safetensors"
    main(SpleenConfig(data=phantoms, store=store, run=tmp_path / "tuned", init=weights, **config))
    assert json.loads((tmp_path / "tuned" / "model.json").read_text())["preparation"] == wide["preparation"]
    before, after = load_weights(weights), load_weights(tmp_path / "tuned" / "best.safetensors")
    assert torch.allclose(before["model.0.conv.unit0.conv.weight"], after["model.0.conv.unit0.conv.weight"], atol=1e-9)


@pytest.mark.usefixtures("no_export")
def test_fine_tuning_that_does_harm_ends_with_the_weights_it_began_with(run, phantoms, store, tmp_path, capsys):
    config = {**TINY, "epochs": 2, "learning_rate": 10.0, "engine": "none", "init": run / "best.safetensors"}
    summary = main(SpleenConfig(data=phantoms, store=store, run=tmp_path / "tuned", **config))
    before, after = load_weights(run / "best.safetensors"), load_weights(tmp_path / "tuned" / "best.safetensors")
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    grid = (summary or {})["working_grid"]
    assert (grid["best_epoch"], grid["last"] < grid["best"]) == (0, True)
    said = capsys.readouterr().out
    assert f"dice of the weights of --init: {grid['best']:.4f}" in said
    assert "no epoch was better than the weights of --init, which are kept" in said
    (tmp_path / "tuned" / "best.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"best\.safetensors"):
        main(SpleenConfig(data=phantoms, store=store, run=None, resume=tmp_path / "tuned", **config))


@pytest.mark.usefixtures("no_export")
def test_cases_that_the_initial_weights_know_are_not_held_out(run, phantoms, store, tmp_path, capsys):
    """One case moves from training to validation; the same names in another dataset may be other scans."""
    known = json.loads((run / "split.json").read_text())
    split = {"training": [*known["validation"], *known["training"][1:]], "validation": known["training"][:1]}
    (tmp_path / "split.json").write_text(json.dumps(split))
    given = {**TINY, "epochs": 1, "learning_rate": 1e-12, "engine": "none", "split": str(tmp_path / "split.json")}
    other = shutil.copytree(run, tmp_path / "other")
    about = json.loads((run / "summary.json").read_text())
    (other / "summary.json").write_text(json.dumps({**about, "data": {**about["data"], "name": "Other"}}))
    for weights, held_out in ((run, False), (other, True)):
        init = weights / "best.safetensors"
        summary = main(SpleenConfig(data=phantoms, store=store, run=tmp_path / f"run-{held_out}", init=init, **given))
        assert summary is not None
        assert summary["held_out"] == held_out
        said = f"NOT HELD OUT{', if these are the same scans' if held_out else ''}: the weights of --init were trained"
        told = capsys.readouterr().out
        assert f"{said} on {known['training'][0]}\n" in told
        assert ": is that meant?" not in told
        assert ("dice of the weights of --init" in told) == held_out  # else they know what judges them
        kept = json.loads((tmp_path / f"run-{held_out}" / "split.json").read_text())
        assert kept["trained_before"] == sorted(known["training"])  # for what goes on from there
    model = json.loads((other / "model.json").read_text())
    renamed = copy.deepcopy(model["labelling"])
    renamed["regions"][0]["name"] = "liver"
    other_window = {**model["preparation"], "window": [0.0, 300.0]}
    for number, changed in enumerate(({"labelling": renamed}, {"modality": ["MRI"]}, {"preparation": other_window})):
        (other / "model.json").write_text(json.dumps(model | changed))
        run, window = tmp_path / f"other-{number}", (0.0, 299.0) if number == 2 else None
        config = SpleenConfig(
            data=phantoms, store=store, run=run, init=other / "best.safetensors", window=window, **given
        )
        main(config)
        ((name, was),) = changed.items()
        said = f"{other / 'best.safetensors'}: {name}: {was}, but this run has "
        assert said in capsys.readouterr().out


@pytest.mark.usefixtures("no_export")
def test_a_run_is_the_latest_once_it_trains(phantoms, store, tmp_path, monkeypatch):
    """Not one whose initial weights are refused, but one that is resumed after it was stopped before its first step."""
    monkeypatch.chdir(tmp_path)
    config = SpleenConfig(**{**TINY, "epochs": 1, "data": phantoms, "store": store, "engine": "none"})
    latest = tmp_path / "runs/spleen/latest"
    with pytest.raises(KeyboardInterrupt), mock.patch.object(fit, "Log", side_effect=KeyboardInterrupt):
        main(config)
    (stopped,) = (tmp_path / "runs/spleen").iterdir()
    main(replace(config, resume=stopped))
    assert latest.resolve() == stopped
    with pytest.raises(OSError, match="no such weights file"):
        main(replace(config, init=tmp_path / "absent.safetensors", run=tmp_path / "mistyped"))
    assert latest.resolve() == stopped
    assert not (tmp_path / "mistyped").exists()  # or it would keep the wrong name


def test_surfaces_that_memory_does_not_hold_do_not_cost_the_export(phantoms, store, tmp_path, monkeypatch, any_quality):
    def compare(*given):
        raise MemoryError

    monkeypatch.setattr(scores, "score", compare)
    config = {**TINY, "epochs": 1, "engine": "none"}
    summary = main(SpleenConfig(data=phantoms, store=store, run=tmp_path / "run", **config))
    assert (tmp_path / "run" / "exports" / "model_fp32.onnx").is_file()
    assert summary is not None
    (case,) = summary["quality"]["per_case"]
    assert f"{case}: not in evaluation.csv: out of memory" in (tmp_path / "run" / "run.log").read_text()
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["baseline", "guide"])
@pytest.mark.usefixtures("no_export")
def test_the_monai_recipes_run_and_resume_at_epoch_boundaries(recipe, phantoms, store, tmp_path, monkeypatch):
    tiny = TINY | {"batch_size": 8, "workers": 1, "engine": "none", "validate_every": 1, "crops": RECIPES[recipe].crops}
    config = replace(RECIPES[recipe], data=phantoms, store=store, **tiny)
    whole = main(replace(config, run=tmp_path / "whole"))
    assert whole is not None
    assert whole["recipe"] == recipe
    monkeypatch.setattr("medspeed.common.training.fit.train_step", _fails_after(3))
    with pytest.raises(RuntimeError, match="power cut"):
        main(replace(config, run=tmp_path / "cut"))
    monkeypatch.undo()
    main(replace(config, resume=tmp_path / "cut"))
    one, other = (last_weights(tmp_path / name)
                  for name in ("whole", "cut"))  # fmt: skip
    assert all(torch.equal(one[name], other[name]) for name in one)


def _fails_after(steps):
    def step(*arguments):
        nonlocal steps
        steps -= 1
        if steps < 0:
            raise RuntimeError("power cut")
        return train_step(*arguments)

    return step


def test_a_non_finite_loss_stops_with_step_and_case_and_keeps_the_checkpoint(phantoms, store, tmp_path, monkeypatch):
    calls = []

    def step(*arguments):
        calls.append(arguments[1].cases)
        return train_step(*arguments) * (float("nan") if len(calls) == 5 else 1.0)

    monkeypatch.setattr("medspeed.common.training.fit.train_step", step)
    with pytest.raises(FloatingPointError, match=r"loss nan at step 5 \(epoch 2\), cases phantom_"):
        main(SpleenConfig(data=phantoms, store=store, run=tmp_path / "run", **TINY))
    last = (tmp_path / "run" / "checkpoints" / "last").resolve()
    assert last.name == "epoch-000001-step-000001.safetensors"  # one in every step: the step before


def test_a_run_folder_in_use_is_refused(run, phantoms):
    with pytest.raises(FileExistsError, match="the run folder is not empty"):
        main(SpleenConfig(data=phantoms, run=run))


def test_the_real_program_says_a_users_mistake_in_one_line(tmp_path, start):
    with start("apps/spleen/train.py", "--data", tmp_path, "--run", tmp_path / "run") as program:
        text = program.stdout.read()
    assert program.returncode == 1
    assert "dataset.json" in text
    assert "Traceback" not in text
