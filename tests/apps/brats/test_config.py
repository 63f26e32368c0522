"""The command line of the brats app."""

import pytest

from apps.brats.config import RECIPES, BratsConfig, parse_brats_config
from apps.brats.plan import _window_side
from common.config import config_to_yaml
from common.inference.windows import window_starts


def test_the_guides_figures():
    guide = RECIPES["guide"]
    assert (guide.crop_size, guide.batch_size, guide.learning_rate, guide.epochs) == ((224, 224, 144), None, 1e-4, 300)
    assert (guide.filters, guide.blocks_down, guide.dropout) == (16, (1, 2, 2, 4), 0.0)
    assert (guide.loss, guide.optimizer, guide.schedule) == ("monai_dice_focal", "monai_novograd", "cosine")
    assert (guide.window_size, guide.window_batch, guide.overlap, guide.validate_every) == ((240, 240, 160), 4, 0.6, 20)
    baseline = RECIPES["baseline"]
    assert (baseline.source, baseline.precision, baseline.optimizer, baseline.dropout) == (
        "uncached", "fp32", "adam", 0.2,
    )  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_printed_configuration_fed_back_is_equal(recipe, tmp_path):
    given = ["--recipe", recipe, "--spacing", "[2,2,3]", "--seed", "4", "--store", str(tmp_path)]
    config = parse_brats_config(given)
    (tmp_path / "config.yaml").write_text(config_to_yaml(config))
    assert parse_brats_config(["--config", str(tmp_path / "config.yaml")]) == config


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("filters", 12, "multiple of 8"),
        ("blocks_down", (3,), "2 or more levels"),
        ("overlap", 1.0, r"in \[0, 1\)"),
        ("replace_share", 0.0, "above 0"),
        ("cache_cases", 4, "unless --cache is smart"),
        ("accumulate", 0, "at least 1"),
        ("partitions", 0, "at least 1"),
        ("learning_rate", 0.0, "above 0"),
        ("flip_axes", "q", "letters of xyz"),
    ],
)
def test_bounds_name_the_field_and_the_value(field, value, words):
    with pytest.raises(ValueError, match=words) as error:
        BratsConfig(**{field: value})
    assert str(error.value).startswith(field)


def test_sides_divide_by_the_levels():
    with pytest.raises(ValueError, match=r"crop_size \(48, 48, 50\): each side must divide by 4"):
        BratsConfig(crop_size=(48, 48, 50), blocks_down=(1, 2, 2))


def test_a_reshuffle_needs_cases_that_are_kept():
    with pytest.raises(ValueError, match="reshuffle_every 2: must be null"):
        BratsConfig(reshuffle_every=2, cache="smart")


def test_monais_sources_have_caches_of_their_own():
    with pytest.raises(ValueError, match="cache disk: must be auto"):
        BratsConfig(source="cached", cache="disk")


def test_a_mistyped_flag_exits_2(capsys):
    with pytest.raises(SystemExit) as exit_:
        parse_brats_config(["--chache", "gpu"])
    assert exit_.value.code == 2
    assert "cache" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extent", "limit", "side", "windows"),
    [(140, 160, 144, 1), (175, 160, 104, 2), (400, 160, 160, 3), (8, 160, 8, 1)],
)
def test_windows_fit_the_brain(extent, limit, side, windows):
    # 175 voxels in two windows that overlap by a quarter: 1.75 sides, 100 voxels, rounded up to 104.
    assert _window_side(extent, limit, 8, 0.25) == side
    assert len(window_starts(extent, side, 0.25)) == windows
