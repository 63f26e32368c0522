from pathlib import Path

import pytest

from medspeed.apps.pathology.config import RECIPES, PathologyConfig, parse
from medspeed.common.config import config_to_yaml


def test_recipes_differ_as_the_guides_script_does():
    fast, guide, baseline = (RECIPES[name] for name in ("fast", "guide", "baseline"))
    assert (guide.optimizer, guide.schedule, guide.source, guide.batch_size) == (
        "monai_novograd",
        "cosine",
        "uncached",
        576,  # 64 regions of 9 patches
    )
    assert (baseline.optimizer, baseline.schedule, baseline.precision) == ("sgd", "constant", "fp32")
    assert (fast.source, fast.optimized().optimizer) == ("resident", "novograd")
    for recipe in (guide, baseline):
        assert recipe.augmentation.jitter == pytest.approx((64 / 255, 0.75, 0.25, 0.04))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--patch_size", "100"], "--patch-size 100: must be a multiple of 32"),
        (
            ["--augmentation.jitter", "[0.2,0.7,0.2,0.6]"],
            "augmentation.jitter (0.2, 0.7, 0.2, 0.6): must be",
        ),
        (["--augmentation.jitter", "[0.2,-0.7,0.2,0.04]"], "augmentation.jitter (0.2, -0.7, 0.2, 0.04): must be"),
        (["--held_out", "1"], "--held-out 1.0: must be above 0, below 1"),
        (["--lists", "[a.csv,b.csv]"], "must be given together with data"),
        (["--batchsize", "3"], "did you mean --batch-size?"),
        (["--augmentation.zoom", "[1.1, 0.9]"], "augmentation.zoom"),
    ],
)
def test_mistakes_end_with_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        parse(words)
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert message in error
    assert error.count("\n") == 1


def test_a_resumed_run_keeps_its_configuration(tmp_path: Path):
    stored = PathologyConfig(batch_size=16, run=tmp_path)
    (tmp_path / "config.yaml").write_text(config_to_yaml(stored))
    found = parse(["--resume", str(tmp_path), "--workers", "3"])
    assert (found.batch_size, found.workers) == (16, 3)
