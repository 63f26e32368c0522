"""The command line of the brats app."""

import pytest

from medspeed.apps.brats.config import RECIPES, BratsConfig, parse
from medspeed.apps.brats.train import window_side
from medspeed.common.config import config_to_yaml, replaced
from medspeed.common.inference.predict import window_starts
from medspeed.common.training.volume_config import Network


def test_the_guides_figures():
    guide = RECIPES["guide"]
    assert (guide.crop_size, guide.batch_size, guide.learning_rate, guide.epochs) == ((224, 224, 144), None, 1e-4, 300)
    assert (guide.network.filters, guide.network.blocks_down, guide.network.dropout) == (16, (1, 2, 2, 4), None)
    assert (guide.loss, guide.optimizer, guide.schedule) == ("monai_dice_focal", "monai_novograd", "cosine")
    assert (guide.windows.size, guide.windows.overlap, guide.validate_every) == ((240, 240, 160), 0.6, 20)
    baseline = RECIPES["baseline"]
    assert (baseline.cache, baseline.precision, baseline.optimizer, baseline.network.dropout) == (
        "uncached", "fp32", "adam", 0.2,
    )  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_printed_configuration_fed_back_is_equal(recipe, tmp_path):
    given = ["--recipe", recipe, "--spacing", "[2,2,3]", "--seed", "4", "--store", str(tmp_path)]
    config = parse(given)
    (tmp_path / "config.yaml").write_text(config_to_yaml(config))
    assert parse(["--config", str(tmp_path / "config.yaml")]) == config


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("network.filters", 12, "multiple of 8"),
        ("network.blocks_down", (3,), "at least 2 levels"),
        ("windows.overlap", 1.0, r"in \[0, 1\)"),
        ("cache", "smart:4:0.0", "above 0"),
        ("cache", "smart:4:0.5:2", "smart"),
        ("cache", "none:2", "none"),
        ("parallel.accumulate", 0, "at least 1"),
        ("parallel.partitions", 0, "at least 1"),
        ("learning_rate", 0.0, "above 0"),
        ("crops.flips", "q", "some of the letters x, y and z"),
    ],
)
def test_bounds_name_the_field_and_the_value(field, value, words):
    with pytest.raises(ValueError, match=words) as error:
        replaced(BratsConfig(), {field: value})
    assert str(error.value).startswith(field)


def test_sides_divide_by_the_levels():
    with pytest.raises(ValueError, match=r"crop_size \(48, 48, 50\): sides must be multiples of 4"):
        BratsConfig(crop_size=(48, 48, 50), network=Network(blocks_down=(1, 2, 2)))


def test_a_mistyped_flag_exits_2(capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(["--chache", "gpu"])
    assert exit_.value.code == 2
    assert "cache" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extent", "limit", "side", "windows"),
    [(140, 160, 144, 1), (175, 160, 104, 2), (400, 160, 160, 3), (8, 160, 8, 1)],
)
def test_windows_fit_the_brain(extent, limit, side, windows):
    # 175 voxels in two windows that overlap by a quarter: 1.75 sides, 100 voxels, rounded up to 104.
    assert -(-window_side(extent, limit, 0.25) // 8) * 8 == side
    assert len(window_starts(extent, side, 0.25)) == windows
