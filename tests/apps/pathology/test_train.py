import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from medspeed.apps.pathology import infer
from medspeed.apps.pathology.config import RECIPES, PathologyConfig, ScanConfig
from medspeed.apps.pathology.export import PathologyExport
from medspeed.apps.pathology.export import main as export_pathology
from medspeed.apps.pathology.slides.camelyon import read_slide_set
from medspeed.apps.pathology.train import main
from medspeed.common.training.fit import train_step
from medspeed.data_scripts.make_slides import make_slides
from tests.support import last_weights

SIZE = 1024
TINY: dict[str, Any] = {
    "held_out": 0.5,
    "patches_per_slide": 12,
    "patch_size": 64,
    "tile_size": 1024,
    "batch_size": 8,
    "epochs": 2,
    "precision": "fp32",
    "device": "cpu",
    "engine": "none",
}


@pytest.fixture(scope="module")
def slides(tmp_path_factory) -> Path:
    return make_slides(tmp_path_factory.mktemp("data") / "slides", 4, 2, SIZE)


@pytest.fixture(scope="module")
def run(slides, store, tmp_path_factory, any_quality) -> Path:
    """One tiny run of the fast recipe, exported to ONNX and, where it is installed, TensorRT-RTX."""
    folder: Path = tmp_path_factory.mktemp("runs") / "tiny"
    main(PathologyConfig(data=slides, store=store, run=folder, **{**TINY, "engine": "auto"}))
    return folder


def test_a_run_leaves_all_that_it_promises(run):
    names = {path.relative_to(run).as_posix() for path in run.rglob("*")}
    for name in (
        "summary.json", "config.yaml", "plan.json", "model.json", "environment.json", "metrics.jsonl", "progress.png",
        "best.safetensors", "run.log", "checkpoints/last", "exports/model_fp32.onnx", "exports/model_fp16.onnx",
    ):  # fmt: skip
        assert name in names
    assert "--tile-size" not in (run / "run.log").read_text()  # nothing to say of 1024


def test_the_summary_holds_what_it_promises(run):
    summary = json.loads((run / "summary.json").read_text())
    assert summary["data"]["synthetic"] is True
    assert summary["cases"] == {"training": 24, "validation": 24}
    assert summary["steps"] == 6
    quality = summary["quality"]
    assert quality["name"] == "patch AUC, testing patches, best weights"
    assert quality["value"] == quality["per_case"]["testing AUC"]
    assert set(quality["per_case"]) == {
        f"{part} {figure}" for part in ("validation", "testing") for figure in ("AUC", "accuracy")
    }
    assert summary["onnx"]["max_abs_diff"] <= 1e-3
    assert summary["onnx"]["fp16"]["precision"] == "fp16"


@pytest.mark.slow
@pytest.mark.usefixtures("no_export")
def test_the_same_seed_gives_the_same_weights_and_an_interrupted_run_too(run, slides, store, tmp_path, monkeypatch):
    config = PathologyConfig(data=slides, store=store, **TINY)
    monkeypatch.setattr("medspeed.common.training.fit.train_step", _fails_after(4))  # within the second epoch
    with pytest.raises(RuntimeError, match="power cut"):
        main(replace(config, run=tmp_path / "cut"))
    monkeypatch.undo()
    main(replace(config, resume=tmp_path / "cut"))
    assert_equal_weights(run, tmp_path / "cut")


@pytest.mark.slow
@pytest.mark.usefixtures("no_export")
def test_the_guide_runs_and_resumes_at_epoch_boundaries(slides, store, tmp_path, monkeypatch):
    config = replace(RECIPES["guide"], data=slides, store=store, **TINY)
    whole = main(replace(config, run=tmp_path / "whole"))
    assert whole is not None
    assert whole["recipe"] == "guide"
    assert "patch by patch on the CPU (the device is cpu)" in (tmp_path / "whole" / "run.log").read_text()
    monkeypatch.setattr("medspeed.common.training.fit.train_step", _fails_after(4))
    with pytest.raises(RuntimeError, match="power cut"):
        main(replace(config, run=tmp_path / "cut"))
    monkeypatch.undo()
    main(replace(config, resume=tmp_path / "cut"))
    assert_equal_weights(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.slow
@pytest.mark.usefixtures("no_export")
def test_a_folder_of_patches_trains_with_the_same_program(store, tmp_path):
    from PIL import Image

    draw = np.random.default_rng(0)
    rows = ["image,label,split"]
    for number in range(32):
        label = number % 2
        pixels = draw.integers(0, 120, (64, 64, 3)) + 120 * label
        Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / f"{number}.png")
        rows.append(f"{number}.png,{label},{'train' if number < 24 else 'val'}")
    (tmp_path / "labels.csv").write_text("\n".join(rows) + "\n")
    config = PathologyConfig(data=tmp_path, store=store, run=tmp_path / "run", **TINY)
    config = replace(config, patch_size=None, patches_per_slide=None, epochs=6, tile_size=512)
    summary = main(config)
    assert summary is not None
    assert summary["quality"]["name"] == "patch AUC, validation patches, best weights"
    assert summary["quality"]["value"] == 1.0
    said = "--tile-size 512: dense scans compute each pixel 256 times"  # 32 of 512 pixels lie in no halo
    assert said in (tmp_path / "run" / "run.log").read_text()


def test_the_run_scans_slides(run, slides, tmp_path):
    found = {}
    for mode in ("dense", "patches"):
        config = ScanConfig(
            run, slides / "testing" / "images", tmp_path / mode, mode=mode, device="cpu", overlays=False
        )
        assert infer.main(config).status == 0
        found[mode] = sorted(path.parent.name for path in (tmp_path / mode).glob("*/slide.json"))
    assert found["dense"] == found["patches"] == ["test_001", "test_002"]


def test_an_export_divides_other_data_anew_and_without_any_takes_synthetic_ones(run, slides, tmp_path, monkeypatch):
    """With the fold of the run it would write the other data's division over the run's."""
    copied = shutil.copytree(run, tmp_path / "run", symlinks=True)
    plan = json.loads((copied / "plan.json").read_text())
    plan |= {"data": str(tmp_path / "gone"), "fold": 0, "folds": 2, "held_out": 0.25}
    (copied / "plan.json").write_text(json.dumps(plan))
    judged: list[PathologyConfig] = []

    def noting(config: PathologyConfig, run: object) -> None:
        judged.append(config)
        raise FileNotFoundError("that is enough")

    monkeypatch.setattr("medspeed.apps.pathology.export.find_tables", noting)
    for data in (slides, None):
        with pytest.raises(FileNotFoundError, match="that is enough"):
            export_pathology(PathologyExport((copied,), "onnx", data=data, device="cpu"))
    assert [(each.data, each.fold, each.lists) for each in judged] == [(slides, None, None), (None, None, None)]


@pytest.mark.slow
def test_the_real_program_says_a_users_mistake_in_one_line(tmp_path, start):
    with start("apps/pathology/train.py", "--data", tmp_path, "--run", tmp_path / "run") as program:
        text = program.stdout.read()
    assert program.returncode == 1
    assert str(tmp_path) in text
    assert "Traceback" not in text


def assert_equal_weights(one: Path, other: Path) -> None:
    first, second = (last_weights(each) for each in (one, other))
    assert all(torch.equal(first[name], second[name]) for name in first)


def _fails_after(steps: int) -> Callable[..., Any]:
    def step(*arguments: Any) -> Any:
        nonlocal steps
        steps -= 1
        if steps < 0:
            raise RuntimeError("power cut")
        return train_step(*arguments)

    return step


@pytest.mark.slow
@pytest.mark.usefixtures("no_export")
def test_initial_weights_are_taken_and_do_not_judge_themselves(run, slides, store, tmp_path):
    """At a rate of next to nothing a run ends with the weights that it began with."""
    known = tmp_path / "known"
    shutil.copytree(run, known)
    names = [entry.name for entry in read_slide_set(slides).training]
    (known / "split.json").write_text(json.dumps({"training": [*names, "test_002"]}))  # what validates was seen, too
    given = {**TINY, "epochs": 1, "learning_rate": 1e-12, "data": slides, "store": store}
    for init in (known, run):
        summary = main(PathologyConfig(run=tmp_path / init.name / "next", init=init / "best.safetensors", **given))
        assert summary is not None
        assert summary["held_out"]  # the testing slides, which the figure is of
        kept = json.loads((tmp_path / init.name / "next" / "split.json").read_text())
        assert kept["held_out"] == (init == run)
        assert (summary["working_grid"]["best_epoch"] == 1) or init == run  # else those of --init may stay the best
        said = (tmp_path / init.name / "next" / "run.log").read_text()
        assert ("NOT HELD OUT: the weights of --init were trained on" in said) == (init == known)
        assert ("auc of the weights of --init" in said) == (init == run)
        warned = "testing: NOT HELD OUT: the weights of --init were trained on test_002"
        assert (warned in said) == (init == known)
    before, after = (load_file(each / "best.safetensors") for each in (run, tmp_path / "known" / "next"))
    for name in (each for each in before if each.endswith("conv1.weight")):
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-9)
