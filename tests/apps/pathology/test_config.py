from pathlib import Path

import pytest

from apps.pathology.config import RECIPES, PathologyConfig, parse_pathology_config
from common.config import config_to_yaml


def test_recipes_differ_as_the_guides_script_does():
    fast, guide, baseline = (RECIPES[name] for name in ("fast", "guide", "baseline"))
    assert (guide.optimizer, guide.schedule, guide.source, guide.batch_size) == (
        "monai_novograd",
        "cosine",
        "uncached",
        576,  # 64 regions of 9 patches
    )
    assert (baseline.optimizer, baseline.schedule, baseline.precision) == ("sgd", "constant", "fp32")
    assert (fast.source, fast.optimizer) == ("resident", "novograd")
    for recipe in (fast, guide, baseline):
        jitter = (recipe.brightness, recipe.contrast, recipe.saturation, recipe.hue)
        assert jitter == pytest.approx((64 / 255, 0.75, 0.25, 0.04))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--patch_size", "100"], "patch_size 100: must be a multiple of 32"),
        (["--hue", "0.6"], "hue 0.6: must be in"),
        (["--held_out", "1"], "held_out 1.0: must be above 0, below 1"),
        (
            ["--training_list", "a.csv", "--data", "d"],
            "validation_list None: must be given together with training_list",
        ),
        (["--recipe", "guide", "--partitions", "2"], "partitions 2: must be null with MONAI's source"),
        (["--batchsize", "3"], "did you mean --batch_size?"),
        (["--zoom", "[1.1, 0.9]"], "zoom"),
    ],
)
def test_mistakes_end_with_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        parse_pathology_config(words)
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert message in error
    assert error.count("\n") == 1


def test_a_resumed_run_keeps_its_configuration(tmp_path: Path):
    stored = PathologyConfig(batch_size=16, run=tmp_path)
    (tmp_path / "config.yaml").write_text(config_to_yaml(stored))
    found = parse_pathology_config(["--resume", str(tmp_path), "--workers", "3"])
    assert (found.batch_size, found.workers) == (16, 3)
