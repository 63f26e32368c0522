import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from medspeed.common.config import config_from_yaml, config_to_yaml, flat, parse_config, replaced
from medspeed.common.flags import as_type


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
        epochs: passes over the data,
            at 100% of it.
        spacing: mm along R, A, S.
        data: a folder.
        resume: an earlier run.
        window: windows
        compile: whether it is compiled.
        layout: the order in memory.
        labels: of the classes.
        bounds: lower and upper.
        batch_size: at once.
    """

    recipe: Literal["fast", "slow"] = "fast"
    epochs: int = 3
    spacing: tuple[float, float, float] | None = None
    data: Path | None = None
    resume: Path | None = None
    window: Window = field(default_factory=Window)
    compile: bool = False
    layout: bool | None = True
    labels: tuple[str, ...] = ("background", "spleen")
    bounds: tuple[float, float] | None = None
    batch_size: int = 2

    RESUMABLE: ClassVar[tuple[str, ...]] = ("resume", "data", "window.batch")
    GROUPS: ClassVar[dict[str, str]] = {"the data": "data spacing labels", "the rest": "*"}

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
        (["--spacing", "[1,2]"], ["--spacing [1,2]: expected 3 numbers, such as 1.5 1.5 2, or null;"]),
        (["--spacing", "1", "2"], ["--spacing 1 2: expected 3 numbers"]),
        (["--spacing", "[1,2"], ["--spacing [1,2: expected 3 numbers"]),
        (["--spacing", ""], ["--spacing : expected 3 numbers"]),
        (["--labels"], ["--labels: needs a value;"]),
        (["--data", "--epochs", "5"], ["--data: needs a value; write --data=VALUE for one that starts with a dash;"]),
        (["--compile", "maybe"], ["--compile maybe: expected true or false;"]),
        (["--layout", "2"], ["--layout 2: expected true or false, or null;"]),
        (["--no-compile", "true"], ["true: belongs to no flag;"]),
        (["--no-epochs"], ["--no-epochs: no such flag"]),
        (["--batch_sise=4"], ["--batch-sise=4: no such flag (did you mean --batch-size?);"]),
        (["--nothing-like-it"], ["--nothing-like-it: no such flag;"]),
        (["--nope"], ["--nope: no such flag;"]),
        (["spleen"], ["spleen: belongs to no flag;"]),
        (["--epochs", "\x1b[2J"], ["--epochs \\x1b[2J: expected a whole number;"]),
        (["--window.side", "x"], ["--window.side x: expected a whole number;"]),
        (["--epochs", "0"], ["--epochs 0: must be at least 1;"]),
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


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("epohcs: 4\n", "c.yaml: epohcs: no such field (did you mean epochs?);"),
        ("window: {sid: 4}\n", "c.yaml: window.sid: no such field (did you mean window.side?);"),
        ("epochs: many\n", "c.yaml: epochs many: expected a whole number;"),
        ("epochs: {a: 1}\n", "c.yaml: epochs.a: no such field"),
        ("data: 5\n", "c.yaml: data 5: expected a path, or null;"),
        ("labels: 5\n", "c.yaml: labels 5: expected some words, such as background spleen;"),
    ],
)
def test_a_mistake_in_the_file_is_named(content, words, tmp_path, capsys):
    (tmp_path / "c.yaml").write_text(content)
    with pytest.raises(SystemExit, match="2"):
        parse("--config", str(tmp_path / "c.yaml"))
    text = capsys.readouterr().err
    assert words in text
    assert text.count("\n") == 1


def test_a_file_has_numbers_as_yaml_and_groups_as_mappings_or_with_dots(tmp_path):
    (tmp_path / "c.yaml").write_text("spacing: [1, 1e-1, 2.5]\nwindow: {side: 8}\nwindow.batch: 4\nbatch-size: 9\n")
    found = parse("--config", str(tmp_path / "c.yaml"))
    assert (found.spacing, found.window, found.batch_size) == ((1.0, 0.1, 2.5), Window(8, 4), 9)


@pytest.mark.parametrize("path", ["runs/a,b", "runs/a[1]"])
def test_a_path_of_a_list_stays_whole(path):
    assert as_type("model", tuple[Path, ...], Path(path)) == (Path(path),)
    assert as_type("model", tuple[Path, ...], "a,b") == (Path("a"), Path("b"))


def test_a_file_may_write_lists_as_flags_do_and_a_group_is_named(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("spacing: 1 0.5 2\nlabels: background,liver\nbounds: '[-57, 164]'\n")
    found = parse("--config", str(tmp_path / "c.yaml"))
    assert (found.spacing, found.labels, found.bounds) == ((1.0, 0.5, 2.0), ("background", "liver"), (-57.0, 164.0))
    (tmp_path / "c.yaml").write_text("window: 8\n")
    with pytest.raises(SystemExit, match="2"):
        parse("--config", str(tmp_path / "c.yaml"))
    assert "window: a group: give its fields, such as window.side;" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("--batch-size 5", {"batch_size": 5}),
        ("--batch_size 5", {"batch_size": 5}),
        ("--batch_size=5", {"batch_size": 5}),
        ("--compile", {"compile": True}),
        ("--compile --no-compile", {"compile": False}),
        ("--compile --epochs 5", {"compile": True, "epochs": 5}),
        ("--compile true", {"compile": True}),
        ("--compile=Yes", {"compile": True}),
        ("--compile False", {"compile": False}),
        ("--compile no", {"compile": False}),
        ("--no-layout", {"layout": False}),
        ("--layout null", {"layout": None}),
        ("--layout false", {"layout": False}),
        ("--spacing 1 1.5 2e0", {"spacing": (1.0, 1.5, 2.0)}),
        ("--spacing 1,1.5,2", {"spacing": (1.0, 1.5, 2.0)}),
        ("--spacing [1,1.5,2]", {"spacing": (1.0, 1.5, 2.0)}),
        ("--spacing=[1,1.5,2]", {"spacing": (1.0, 1.5, 2.0)}),
        ("--spacing [1, 1.5, 2]", {"spacing": (1.0, 1.5, 2.0)}),
        ("--spacing 1, 1.5, 2", {"spacing": (1.0, 1.5, 2.0)}),
        ("--bounds -57 164", {"bounds": (-57.0, 164.0)}),
        ("--bounds -57,164", {"bounds": (-57.0, 164.0)}),
        ("--bounds [-57,-1e1]", {"bounds": (-57.0, -10.0)}),
        ("--bounds .5,-.5", {"bounds": (0.5, -0.5)}),
        ("--bounds -.5 -1e-3 --epochs 4", {"bounds": (-0.5, -0.001), "epochs": 4}),
        ("--bounds null", {"bounds": None}),
        ("--bounds -1. +.5", {"bounds": (-1.0, 0.5)}),
        ("--labels none liver no", {"labels": ("none", "liver", "no")}),
        ("--labels none,liver", {"labels": ("none", "liver")}),
        ("--data null", {"data": None}),
        ("--data=--odd", {"data": Path("--odd")}),
        ("--data a_b", {"data": Path("a_b")}),
    ],
)
def test_flags_are_taken_as_people_type_them(words, values):
    assert parse(*words.split(" ")) == replaced(ToyConfig(), values)


def test_a_list_may_come_in_one_word():
    assert parse("--spacing", "1 1.5 2").spacing == (1.0, 1.5, 2.0)


def test_names_with_spaces_stay_whole():
    for words in (["none", "left kidney"], ["none,left kidney"], ['[none, "left kidney"]']):
        assert parse("--labels", *words).labels == ("none", "left kidney")


def test_help_has_groups_types_and_defaults(capsys):
    for word in ("--help", "-h"):
        with pytest.raises(SystemExit, match="0"):
            parse("--unknown", "5", word)
        text = capsys.readouterr().out
        data, rest = text.split("\nthe data:\n")[1].split("\nthe rest:\n")
        assert "--data PATH " in data
        assert "--spacing X Y Z  " in data
        assert "--labels TEXT ... " in data
        assert "(default: background spleen)" in data
        assert "--compile or --no-compile " in rest
        assert "--bounds NUMBER NUMBER" in rest
        assert "--window.side N" in rest
        assert "passes over the data, at 100% of it (default: 3)" in rest
        assert "--recipe fast|slow" in rest
        assert not {"Optional", "CONFIG", "None", "true"} & set(text.replace(",", " ").split())
        assert text.count("null") == 1


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
        ("config: /etc/passwd\n", "config: no such field"),
        ("5: 6\n", "5: no such field"),
        ("epochs: 3\ndata: a\nepochs: 5\n", "epochs: given twice"),
        ("crop-size: 3\ncrop_size: 5\n", "crop_size: given twice"),
        ("window: {side: 3, side: 5}\n", "side: given twice"),
        ("window: {side: 3}\nwindow.side: 5\n", "window.side: given twice"),
    ],
)
def test_a_hostile_file_is_refused_in_one_line_that_does_not_show_it(content, words, tmp_path, capsys):
    file = tmp_path / "config.yaml"
    file.write_text(content)
    for flags in (["--config", str(file)], ["--resume", str(tmp_path)]):
        with pytest.raises(SystemExit, match="2"):
            parse_config(ToyConfig, RECIPES, flags)
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
    assert parse("--data=~nobody-of-this-name/a").data == Path("~nobody-of-this-name/a")


@pytest.mark.parametrize(
    ("given", "due"),
    [((), ("ACTIVE", "300000")), (("OMP_WAIT_POLICY",), ("users", None)), (("GOMP_SPINCOUNT",), (None, "users"))],
)
def test_a_program_lets_threads_wait_unless_the_user_says_how(given, due, monkeypatch):
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    for name in names:
        monkeypatch.setenv(name, "users")
        if name not in given:
            monkeypatch.delenv(name)
    parse()  # a test's or a notebook's own words: nothing is changed
    assert [os.environ.get(name) for name in names] == ["users" if name in given else None for name in names]
    monkeypatch.setattr("sys.argv", ["train.py"])
    parse_config(ToyConfig, RECIPES)
    assert tuple(map(os.environ.get, names)) == due


@pytest.mark.parametrize("printing", ["--print-config", "--print_config"])
def test_printed_config_fed_back_is_the_same(printing, tmp_path, capsys):
    given = ["--recipe", "slow", "--spacing", "[0.5,1,2]", "--data", "/scans"]
    with pytest.raises(SystemExit, match="0"):
        parse(*given, printing)
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
        return parse_config(ToyConfig, RECIPES, given)

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


@dataclass(frozen=True)
class Needing:
    """What has fields without a default.

    Args:
        model: a run.
        output: a folder.
    """

    model: Path
    output: Path


def test_what_is_required_is_asked_for(capsys):
    with pytest.raises(SystemExit, match="2"):
        parse_config(Needing, {}, ["--model", "run"])
    assert ": --output: required;" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        parse_config(Needing, {}, ["--help"])
    assert "--model PATH --output PATH [--FLAG VALUE ...]\n" in capsys.readouterr().out
    assert parse_config(Needing, {}, ["--model", "a", "--output", "b"]) == Needing(Path("a"), Path("b"))
