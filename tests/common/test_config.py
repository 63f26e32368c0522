from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import pytest

from medspeed.common.config import config_from_yaml, config_to_yaml, flat, parse_config, replaced


@dataclass(frozen=True)
class Window:
    """A group of flags.

    Args:
        side: of a window.
        batch: windows at once.
    """

    side: int = 6
    batch: int = 1


@dataclass(frozen=True)
class ToyConfig:
    """A small config.

    Args:
        recipe: which values.
        epochs: passes over the data.
        spacing: mm along R, A, S.
        data: a folder.
        resume: an earlier run.
        window: windows
    """

    recipe: Literal["fast", "slow"] = "fast"
    epochs: int = 3
    spacing: tuple[float, float, float] | None = None
    data: Path | None = None
    resume: Path | None = None
    window: Window = field(default_factory=Window)

    def __post_init__(self):
        if self.epochs < 1:
            raise ValueError(f"epochs {self.epochs}: must be at least 1")


RECIPES = {"fast": ToyConfig(), "slow": ToyConfig(recipe="slow", epochs=9)}


def parse(*arguments):
    return parse_config(ToyConfig, RECIPES, list(arguments))


def test_defaults_are_the_first_recipe():
    assert parse() == ToyConfig()


def test_flags_beat_the_file_and_the_file_beats_the_recipe(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("recipe: slow\nspacing: [1, 2, 3]\n")
    assert parse("--config", str(file)) == ToyConfig("slow", 9, (1.0, 2.0, 3.0))
    assert parse("--config", str(file), "--epochs", "4") == ToyConfig("slow", 4, (1.0, 2.0, 3.0))
    assert parse("--config", str(file), "--recipe", "fast").epochs == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--epohcs", "5"], ["--epohcs", "did you mean --epochs"]),
        (["--epoch", "5"], ["--epoch", "did you mean --epochs"]),
        (["--epochs", "many"], ["--epochs many: expected a whole number;"]),
        (["--spacing", "[1,2]"], ["--spacing [1, 2]: expected 3 numbers in brackets, such as [1.5,1.5,2.0] or null;"]),
        (["--spacing", ""], ["--spacing : expected 3 numbers"]),
        (["--window.side", "x"], ["--window.side x: expected a whole number;"]),
        (["--epochs", "0"], ["epochs 0", "at least 1"]),
        (["--recipe", "medium"], ["--recipe medium", "fast, slow"]),
        (["--config", "/nowhere/c.yaml"], ["/nowhere/c.yaml"]),
    ],
)
def test_a_mistake_ends_with_status_2_and_one_line_that_names_it(arguments, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(*arguments)
    text = capsys.readouterr().err
    assert stopped.value.code == 2
    assert text.count("\n") == 1
    for word in words:
        assert word in text


def test_an_unknown_key_in_the_file_is_named(tmp_path, capsys):
    file = tmp_path / "c.yaml"
    file.write_text("epohcs: 4\n")
    with pytest.raises(SystemExit, match="2"):
        parse("--config", str(file))
    assert "epohcs" in capsys.readouterr().err


def test_a_broken_yaml_file_is_a_users_mistake(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("epochs: [1,")
    with pytest.raises(SystemExit, match="2"):
        parse("--config", str(tmp_path / "c.yaml"))
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("epochs: " + "[" * 100_000, "8 levels at most"),
        ("epochs: &a [1]\ndata: *a\n", "no aliases"),
        ("# " + "x" * 1_000_000, "1000000 at most"),
        ("root:x:0:0:root:/root:/bin/bash\n", "is no configuration"),
        ("config: /etc/passwd\n", "--config is no field"),
        ("5: 6\n", "--5 is no field"),
    ],
)
def test_a_hostile_file_is_refused_in_one_line_that_does_not_show_it(content, words, tmp_path, capsys):
    file = tmp_path / "config.yaml"
    file.write_text(content)
    for flags in (["--config", str(file)], ["--resume", str(tmp_path)]):
        with pytest.raises(SystemExit, match="2"):
            parse_config(ToyConfig, RECIPES, flags, resumable=("resume",))
        text = capsys.readouterr().err
        assert words in text
        assert str(file) in text
        assert "root" not in text.replace("pytest-of-root", "")
        assert len(text) < 400


def test_a_tilde_is_the_users_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.yaml").write_text("data: ~/scans\n")
    for flags in (["--data=~/scans"], ["--data", "~/scans"], ["--config=~/c.yaml"]):
        assert parse(*flags).data == tmp_path / "scans"
    assert parse("--data=~").data == tmp_path  # in YAML that is null


def test_printed_config_fed_back_is_the_same(tmp_path, capsys):
    given = ["--recipe", "slow", "--spacing", "[0.5,1,2]", "--data", "/scans"]
    with pytest.raises(SystemExit, match="0"):
        parse(*given, "--print_config")
    file = tmp_path / "c.yaml"
    file.write_text(capsys.readouterr().out)
    assert parse("--config", str(file)) == parse(*given)


def test_yaml_round_trip(tmp_path):
    config = ToyConfig("slow", 5, (1.0, 1.5, 2.0), Path("/scans"))
    (tmp_path / "c.yaml").write_text(config_to_yaml(config))
    assert config_from_yaml(ToyConfig, tmp_path / "c.yaml") == config


def test_a_resumed_run_keeps_its_own_values(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(config_to_yaml(ToyConfig(epochs=7, data=Path("/there"), window=Window(4))))

    def resumed(*arguments):
        given = ["--resume", str(tmp_path), *arguments]
        return parse_config(ToyConfig, RECIPES, given, resumable=("resume", "data", "window.batch"))

    stored = ToyConfig(epochs=7, data=Path("/there"), resume=tmp_path, window=Window(4))
    assert resumed() == stored
    assert resumed("--data", "/new", "--window.batch", "2", "--epochs", "7") == replace(
        stored, data=Path("/new"), window=Window(4, 2)
    )
    for flags, words in (
        (("--epochs", "5"), "--epochs 5: a resumed run keeps its own epochs (7)"),
        (("--epochs", "3"), "--epochs 3: a resumed run keeps its own epochs (7)"),  # the default, and given
        (("--window.side", "8"), "--window.side 8: a resumed run keeps its own window.side (4)"),
    ):
        with pytest.raises(SystemExit, match="2"):
            resumed(*flags)
        assert words in capsys.readouterr().err


def test_groups_by_their_flags():
    config = parse("--window.side", "8")
    assert config.window == Window(8)
    assert flat(config)["window.side"] == 8
    assert replaced(config, {"window.batch": 2, "epochs": 4}) == replace(config, window=Window(8, 2), epochs=4)
