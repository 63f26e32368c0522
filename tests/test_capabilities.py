"""What users were promised: every command and its flags, and every file that a run, a scan or an export leaves.

The lists are written by hand, from README, the apps' READMEs, docs and CHANGELOG. What goes from here goes from the
product: the changelog must then say so. The help shows dashes; underscores are taken too.
"""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import medspeed
from medspeed.apps.pathology.evaluate import SlideScores
from medspeed.common.inference import folder_job
from medspeed.common.inference.scores import Evaluation

ROOT = Path(__file__).parents[1]
_TRAIN = (
    "recipe data run resume init store seed device workers batch_size parallel.partitions parallel.accumulate "
    "optimizer learning_rate schedule epochs precision compile kernels validate_every until engine fast_dev_run "
    "profile graph log config print_config fold folds groups"
)
_VOLUMES = (
    "cache split spacing crop_size crops.per_case crops.flips crops.intensity windows.size windows.overlap loss "
    "channels_last network channels network.filters network.blocks_down network.dropout"
)
_INFER = "model input output backend precision device overlays"
_EXPORT = "model to output precision int8 data init engine device"
_EVALUATE = "predictions references network model data labels output tolerance config print-config"
_SEEDS = "data seeds output"

FLAGS = {
    "apps/spleen/train.py": f"{_TRAIN} {_VOLUMES} window",
    "apps/brats/train.py": f"{_TRAIN} {_VOLUMES} regions",
    "apps/pathology/train.py": f"{_TRAIN} source lists mpp held_out reader patches_per_slide patch_size "
    "patches_per_epoch "
    "augmentation.jitter augmentation.zoom augmentation.label_smoothing channels_last tile_size",
    "apps/spleen/infer.py": f"{_INFER} network flips fit_windows largest_component smallest_ml keep_patient",
    "apps/brats/infer.py": f"{_INFER} network flips fit_windows largest_component smallest_ml keep_patient",
    "apps/pathology/infer.py": f"{_INFER} mode stride reader",
    "apps/spleen/evaluate.py": _EVALUATE,
    "apps/brats/evaluate.py": _EVALUATE,
    "apps/pathology/evaluate.py": "scans data",
    "apps/spleen/export.py": f"{_EXPORT} network labels channels spacing window window_size overlap",
    "apps/brats/export.py": f"{_EXPORT} network filters blocks_down spacing window_size overlap",
    "apps/pathology/export.py": f"{_EXPORT} patch_size mpp tile_size",
    "apps/folds.py spleen": f"{_TRAIN} {_VOLUMES} window channels",
    "apps/doctor.py": "app json",
    "data_scripts/fetch_msd.py": "to base-url keep-archive",
    "data_scripts/fetch_camelyon16.py": "slides to base-url",
    "data_scripts/make_phantoms.py ct": "to cases size labels seed",
    "data_scripts/make_phantoms.py mri": "to cases size seed",
    "data_scripts/make_slides.py": "to training testing size seed",
    "data_scripts/to_msd.py": "images labels nnunet check names modality values skip_bad link to",
    "benchmarks/compare.py": "data part cases rounds device output",
    "benchmarks/ladder.py": f"{_SEEDS} device epochs",
    "benchmarks/speedrun.py": f"{_SEEDS} labels sides target warm",
    "benchmarks/floor.py": "gpu write",
    "benchmarks/visit_parts.py": "part to ways",
}
for _command in [each for each in FLAGS if not each.startswith(("benchmarks/", "data_scripts/make_phantoms.py"))]:
    FLAGS[_command] += " quiet verbose"
# Gone, or under another name: each must be told in the changelog.
GONE = """
    source fast_prelu monitor checkpoint_seconds window_batch residual_units cache_cases replace_share reshuffle_every
    crops_per_case flip_axes intensity window_size overlap partitions accumulate filters blocks_down dropout
    training_list validation_list brightness zoom label_smoothing
"""

PYTHON = {  # from medspeed import ...
    "train": "app quiet flags",
    "predict": "model inputs output quiet flags",
    "evaluate": "predictions references app quiet flags",
}
RESULTS = {
    folder_job.Prediction: "files record volumes_ml",
    folder_job.Predictions: "done failed status",
    Evaluation: "cases missing refused summary status",
    SlideScores: "froc slide_auc slides left_out refused status",
}

# Behind `--model demo`:
DEMO = ("best.safetensors", "model.json", "fingerprint.json", "plan.json", "summary.json", "README.md")

MAKE = ("train", "test", "test-all", "doctor", "ladder", "record", "image-test")

RUN_FILES = (
    "summary.json", "progress.png", "metrics.jsonl", "tensorboard", "report.html", "overlays", "best.safetensors",
    "checkpoints/last", "exports/model_fp32.onnx", "exports/model_fp16.onnx", "config.yaml", "plan.json",
    "fingerprint.json", "split.json", "environment.json", "digests.json", "model.json", "run.log", "monitor.csv",
    "monitor.png", "profile/operations.txt", "evaluation.csv", "evaluation.json",
)  # fmt: skip
MEASURES = (
    "scan,structure,voxels,volume_ml,parts,longest_axial_mm,short_axial_mm,extent_rl_mm,extent_pa_mm,extent_is_mm,"
    "uncertain"
)
SCAN_FILES = ("phantom_000.nii.gz", "phantom_000.png", "measurements.csv", "timings.json", "records")


# Runs a script as the interpreter does, then tells what was loaded of what takes seconds.
_LOADED = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    print("loaded:", *sorted({"torch", "monai", "matplotlib"} & set(sys.modules)))
    sys.exit(end.code)
"""


def test_every_program_is_listed():
    """But the guides of the benchmarks, which import nothing of ours, and what takes no flags."""
    code = [path for room in ("apps", "data_scripts", "benchmarks") for path in (ROOT / room).rglob("*.py")]
    programs = {path for path in code if re.search(r"Parser\(|parse_config\(|    CONFIG = parse\(", path.read_text())}
    programs = {path for path in programs if {"peers", "records"}.isdisjoint(path.parts) and path.name != "config.py"}
    assert {path.relative_to(ROOT).as_posix() for path in programs} == {command.split()[0] for command in FLAGS}


@pytest.mark.parametrize("command", FLAGS)
def test_a_command_has_every_flag_that_was_promised_and_says_so_at_once(command):
    script, *words = command.split()
    done = subprocess.run(
        [sys.executable, "-c", _LOADED, ROOT / script, *words, "--help"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = set(re.findall(r"--([a-z][a-z0-9_.-]+)", done.stdout))
    assert set(FLAGS[command].replace("_", "-").split()) <= found
    assert done.stdout.count("\n") <= 100  # two screens
    assert done.stdout.endswith("loaded:\n")


def test_the_changelog_names_every_flag_that_went():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert [flag for flag in GONE.split() if f"--{flag}" not in changelog] == []


@pytest.mark.parametrize("function", PYTHON)
def test_python_has_every_function_that_was_promised(function):
    words = list(inspect.signature(getattr(medspeed, function)).parameters)
    assert words == PYTHON[function].split()


@pytest.mark.parametrize("result", RESULTS)
def test_results_have_every_attribute_that_was_promised(result):
    assert {*RESULTS[result].split()} <= {*result.__annotations__, *vars(result)}


@pytest.mark.parametrize("name", DEMO)
def test_demo_weights_come_with_the_package(name):
    assert (ROOT / "medspeed" / "demo" / name).is_file()
    assert '"demo/*"' in (ROOT / "pyproject.toml").read_text()  # and so into a wheel


@pytest.mark.parametrize("target", MAKE)
def test_make_has_every_target(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.slow
def test_a_run_and_its_scans_leave_every_file(tmp_path):
    """The commands of the README, as a user types them."""
    make = "data_scripts/make_phantoms.py ct --cases 4 --size small --to data"
    train = "apps/spleen/train.py --data data --run run --store store --device cpu --fast_dev_run true --profile torch"
    infer = "apps/spleen/infer.py --model run --input data/imagesTr --output masks --device cpu"
    for command in (make, train, infer):
        script, *words = command.split()
        done = subprocess.run(
            [sys.executable, ROOT / script, *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert [name for name in RUN_FILES if not (tmp_path / "run" / name).exists()] == []
    assert [name for name in SCAN_FILES if not (tmp_path / "masks" / name).exists()] == []
    header = (tmp_path / "masks" / "measurements.csv").read_text().splitlines()[0]
    assert header.startswith(MEASURES)
