from dataclasses import replace

import pytest

from medspeed.apps.spleen.config import RECIPES, SpleenConfig, parse
from medspeed.common.config import config_to_yaml
from medspeed.common.training.volume_config import Cache, Crops


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "0"], "--epochs 0: must be at least 1"),
        (["--learning_rate", "-1"], "--learning-rate -1.0: must be above 0"),
        (["--spacing", "[1,0,2]"], r"spacing (1.0, 0.0, 2.0): must be 0.01 to 100 mm on each axis"),
        (["--spacing", "[1e-320,1,1]"], "must be 0.01 to 100 mm on each axis"),
        (["--window", "[100,-100]"], "window (100.0, -100.0): must be two HU values, lower first"),
        (["--crops.flips", "xq"], "crops.flips xq: must be some of the letters x, y and z"),
        (["--recipe", "guide", "--crop_size", "[90,96,96]"],
         "--crop-size (90, 96, 96): sides must be multiples of 16 (4 stride-2 levels)"),
        (["--recipe", "guide", "--crops.flips", "x"], "crops.flips x: must be empty with --cache monai or uncached"),
        (["--recipe", "guide", "--crops.intensity", "0.1"], "crops.intensity 0.1: must be 0 with --cache monai"),
        (["--windows.overlap", "1"], "windows.overlap 1.0: must be in [0, 1)"),
        (["--cache", "smart:0"], "cache smart:0: must be auto, gpu, ram or disk"),
        (["--cache", "chache"], "cache chache: must be auto, gpu, ram or disk"),
        (["--seed", "-1"], "seed -1: must be 0 or more"),
        (["--fold", "0", "--folds", "0"], "--folds 0: must be 2 or more, with --fold"),
        (["--epohcs", "5"], "--epohcs"),
        (["--epoch", "5"], "--epoch"),
        (["--resume", "/nowhere"], "/nowhere/config.yaml"),
    ],
)  # fmt: skip
def test_a_mistake_ends_with_status_2_and_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(arguments)
    text = capsys.readouterr().err
    assert message in text
    assert text.count("\n") == 1


def test_the_recipes_hold_the_guides_figures():
    """The Novograd revision of MONAI's fast training tutorial (see the project's notes on the recipes)."""
    guide = parse(["--recipe", "guide"])
    assert (guide.channels, guide.windows.size, guide.crop_size) == (
        (16, 32, 64, 128, 256), (160, 160, 160), (96, 96, 96))  # fmt: skip
    assert (guide.batch_size, guide.crops.per_case, guide.epochs) == (16, 4, 300)
    assert (guide.loss, guide.optimizer, guide.learning_rate, guide.cache) == (
        "monai_dice_ce", "monai_novograd", 2e-3, "monai")  # fmt: skip
    baseline = parse(["--recipe", "baseline"])
    assert (baseline.loss, baseline.optimizer, baseline.learning_rate) == ("monai_dice", "adam", 2e-4)
    assert (baseline.cache, baseline.precision, baseline.batch_size, baseline.workers) == ("uncached", "fp32", 8, 8)
    assert parse([]).recipe == "fast"


@pytest.mark.parametrize("recipe", RECIPES)
def test_printed_config_fed_back_gives_the_same_run(recipe, tmp_path, capsys):
    given = ["--recipe", recipe, "--spacing", "[2,2,3]", "--seed", "4", "--store", str(tmp_path)]
    with pytest.raises(SystemExit, match="0"):
        parse([*given, "--print_config"])
    (tmp_path / "c.yaml").write_text(capsys.readouterr().out)
    assert parse(["--config", str(tmp_path / "c.yaml")]) == parse(given)


def test_resume_takes_the_runs_own_config(tmp_path, capsys):
    stored = SpleenConfig(epochs=7, seed=3)
    (tmp_path / "config.yaml").write_text(config_to_yaml(stored))
    assert parse(["--resume", str(tmp_path)]) == replace(stored, resume=tmp_path)
    with pytest.raises(SystemExit, match="2"):
        parse(["--resume", str(tmp_path), "--epochs", "9"])
    assert "--epochs 9: a resumed run keeps its own epochs (7)" in capsys.readouterr().err


def test_a_flag_of_a_resumed_run_counts_where_it_is_the_default(tmp_path, capsys):
    stored = SpleenConfig(engine="none", learning_rate=0.001)
    (tmp_path / "config.yaml").write_text(config_to_yaml(stored))
    assert parse(["--resume", str(tmp_path), "--engine", "auto"]).engine == "auto"
    with pytest.raises(SystemExit, match="2"):
        parse(["--resume", str(tmp_path), "--learning_rate", "0.01"])
    assert "--learning-rate 0.01: a resumed run keeps its own learning_rate (0.001)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "cache"),
    [
        ("auto", Cache("auto")),
        ("ram:5", Cache("ram", reshuffle=5)),
        ("smart", Cache("smart")),
        ("smart:8", Cache("smart", 8)),
        ("smart:8:0.5", Cache("smart", 8, 0.5)),
        ("uncached", Cache("uncached")),
    ],
)
def test_the_cache_in_words(text, cache):
    assert replace(SpleenConfig(crops=Crops(intensity=0.0)), cache=text).caching() == cache


@pytest.mark.parametrize("text", ["smart:0", "smart:8:0", "smart:8:1.1", "smart:x", "none:2", "gpu:0", "", "monai:1"])
def test_what_is_no_cache_is_refused(text):
    with pytest.raises(ValueError, match="must be auto, gpu, ram or disk"):
        SpleenConfig(cache=text)


@pytest.mark.parametrize("flag", ["--epohcs", "--epoch"])
def test_a_mistyped_flag_of_the_real_program(flag, start):
    with start("apps/spleen/train.py", flag, "5") as program:
        text = program.stdout.read()
    assert program.returncode == 2
    assert flag in text
