from pathlib import Path

import pytest

from medspeed.common.flags import Parser


def parser() -> Parser:
    made = Parser(prog="tool")
    made.add_argument("app", choices=("spleen", "brats"))
    made.add_argument("--skip-bad", action="store_true")
    made.add_argument("--cases", type=int, default=1)
    made.add_argument("--values", nargs="+", default=[])
    made.add_argument("flags", nargs="*")
    return made


@pytest.mark.parametrize("flag", ["--skip-bad", "--skip_bad"])
def test_dashes_and_underscores_are_one(flag):
    assert parser().parse_args(["spleen", flag]).skip_bad


def test_words_that_begin_with_a_negative_number_are_values():
    assert parser().parse_args(["spleen", "--values", "-1=0", "-57,164", "--cases", "-2"]).values == ["-1=0", "-57,164"]


def test_what_follows_two_dashes_stays_as_it_is():
    assert parser().parse_args(["spleen", "--", "--batch_size", "~"]).flags == ["--batch_size", "~"]


def test_a_subcommand_has_the_same_grammar(capsys):
    made = Parser(prog="tool")
    made.add_subparsers(dest="kind").add_parser("ct").add_argument("--keep-all", action="store_true")
    assert made.parse_args(["ct", "--keep_all"]).keep_all
    with pytest.raises(SystemExit, match="2"):
        made.parse_args(["ct", "--keep-al"])
    assert "--keep-al: no such flag" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "tool: app, flags: required; --help lists every flag\n"),
        (["liver"], "tool: app liver: expected one of "),
        (["spleen", "--cases", "many"], "tool: --cases many: expected a whole number; "),
        (["spleen", "--cases"], "tool: --cases: needs a value; write --cases=VALUE for one that starts with a dash; "),
        (["spleen", "--values", "--cases", "1"], "tool: --values: needs a value; "),
        (["spleen", "--skip_bat"], "tool: --skip-bat: no such flag (did you mean --skip-bad?); "),
        (["spleen", "--skip-bad=3"], "tool: --skip-bad 3: takes no value; "),
        (["spleen", "-x"], "tool: -x: no such flag; "),
    ],
)
def test_an_error_is_one_plain_line(words, told, capsys):
    with pytest.raises(SystemExit, match="2"):
        parser().parse_args(words)
    text = capsys.readouterr().err
    assert text.startswith(told)
    assert text.count("\n") == 1


def test_help_shows_types_and_defaults(capsys):
    made = Parser(prog="tool", description="What it does.\n\nAnd a second paragraph.")
    made.add_argument("--cases", type=int, default=3, help="to take")
    made.add_argument("--to", type=Path, help="folder")
    made.add_argument("--link", action="store_true", help="no copies")
    made.add_argument("--sides", nargs="+", default=["a", "b"], help="of it")
    with pytest.raises(SystemExit, match="0"):
        made.parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "What it does. And a second paragraph." in text
    for line in ("--cases N to take (default: 3)", "--to PATH folder --link no copies --sides", "of it (default: a b)"):
        assert line in text
