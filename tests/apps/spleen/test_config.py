import time
from dataclasses import replace

import pytest

from apps.spleen.config import RECIPES, SpleenConfig, parse_spleen_config
from common.config import config_to_yaml


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "0"], "epochs 0: must be at least 1"),
        (["--learning_rate", "-1"], "learning_rate -1.0: must be above 0"),
        (["--spacing", "[1,0,2]"], r"spacing (1.0, 0.0, 2.0): must be above 0 mm on each axis"),
        (["--window", "[100,-100]"], "window (100.0, -100.0): must be lower bound first"),
        (["--flip_axes", "xq"], "flip_axes xq: must be letters of xyz"),
        (["--recipe", "guide", "--crop_size", "[90,96,96]"],
         "crop_size (90, 96, 96): each side must divide by 16 (4 stride-2 levels)"),
        (["--recipe", "guide", "--flip_axes", "x"], "flip_axes x: must be empty with MONAI's sources"),
        (["--recipe", "guide", "--intensity", "0.1"], "intensity 0.1: must be 0 with MONAI's sources"),
        (["--overlap", "1"], "overlap 1.0: must be in [0, 1)"),
        (["--seed", "-1"], "seed -1: must be 0 or more"),
        (["--epohcs", "5"], "--epohcs"),
        (["--epoch", "5"], "--epoch"),
        (["--resume", "/nowhere"], "/nowhere/config.yaml"),
    ],
)  # fmt: skip
def test_a_mistake_ends_with_status_2_and_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse_spleen_config(arguments)
    text = capsys.readouterr().err
    assert message in text
    assert text.count("\n") == 1


def test_the_recipes_hold_the_guides_figures():
    """The Novograd revision of MONAI's fast training tutorial (see the project's notes on the recipes)."""
    guide = parse_spleen_config(["--recipe", "guide"])
    assert (guide.channels, guide.residual_units, guide.crop_size) == ((16, 32, 64, 128, 256), 2, (96, 96, 96))
    assert (guide.batch_size, guide.crops_per_case, guide.epochs) == (16, 4, 300)
    assert (guide.loss, guide.optimizer, guide.learning_rate, guide.source) == (
        "monai_dice_ce", "monai_novograd", 2e-3, "cached")  # fmt: skip
    baseline = parse_spleen_config(["--recipe", "baseline"])
    assert (baseline.loss, baseline.optimizer, baseline.learning_rate) == ("monai_dice", "adam", 2e-4)
    assert (baseline.source, baseline.precision, baseline.batch_size, baseline.workers) == ("uncached", "fp32", 8, 8)
    assert parse_spleen_config([]).recipe == "fast"


@pytest.mark.parametrize("recipe", RECIPES)
def test_printed_config_fed_back_gives_the_same_run(recipe, tmp_path, capsys):
    given = ["--recipe", recipe, "--spacing", "[2,2,3]", "--seed", "4", "--store", str(tmp_path)]
    with pytest.raises(SystemExit, match="0"):
        parse_spleen_config([*given, "--print_config"])
    (tmp_path / "c.yaml").write_text(capsys.readouterr().out)
    assert parse_spleen_config(["--config", str(tmp_path / "c.yaml")]) == parse_spleen_config(given)


def test_resume_takes_the_runs_own_config(tmp_path, capsys):
    stored = SpleenConfig(epochs=7, seed=3)
    (tmp_path / "config.yaml").write_text(config_to_yaml(stored))
    assert parse_spleen_config(["--resume", str(tmp_path)]) == replace(stored, resume=tmp_path)
    with pytest.raises(SystemExit, match="2"):
        parse_spleen_config(["--resume", str(tmp_path), "--epochs", "9"])
    assert "--epochs 9: a resumed run keeps its own epochs (7)" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["apps/spleen/train.py", "apps/spleen/infer.py"])
def test_help_comes_without_torch(script, start):
    began = time.perf_counter()
    with start(script, "--help") as program:
        text = program.stdout.read()
    assert program.returncode == 0
    assert "--device" in text
    assert time.perf_counter() - began < 3


@pytest.mark.parametrize("flag", ["--epohcs", "--epoch"])
def test_a_mistyped_flag_of_the_real_program(flag, start):
    with start("apps/spleen/train.py", flag, "5") as program:
        text = program.stdout.read()
    assert program.returncode == 2
    assert flag in text
