"""The command `medspeed`, in processes of its own as a shell starts it."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from medspeed import __version__
from medspeed.cli import main, programs

ROOT = Path(__file__).parents[2]


def ask(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    command = [sys.executable, "-m", "medspeed.cli", *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def complete(line: str) -> list[str]:
    return ask(COMP_LINE=line, COMP_POINT=str(len(line))).stdout.split()


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"medspeed {__version__}\n"
    assert main([]) == main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(name[0] in told for name in programs())


def test_every_app_and_data_script_has_its_words():
    known = programs()
    apps = {path.parent.name for path in (ROOT / "apps").glob("*/train.py")}
    assert {(verb, app) for verb in ("train", "infer", "export", "evaluate", "folds") for app in apps} <= set(known)
    scripts = ("to-msd", "make-phantoms", "make-slides", "fetch-msd", "fetch-camelyon16")
    assert {("data", script) for script in scripts} <= set(known)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "medspeed: unknown word 'trian'; expected one of train, infer"),
        (["train"], "medspeed train: expected one of brats, pathology, spleen"),
        (["train", "--epochs"], "medspeed train: unknown word '--epochs'; expected one of brats"),
        (["data", "make_phantoms"], "unknown word 'make_phantoms'; expected one of fetch-camelyon16"),
    ],
)
def test_a_wrong_word_is_named_with_the_right_ones(words, said, capsys):
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_help_of_a_word_lists_what_may_follow(capsys):
    assert main(["train", "--help"]) == main(["data", "-h"]) == 0
    assert capsys.readouterr().out.startswith("medspeed train brats|pathology|spleen [flags]\nmedspeed data fetch-")


def test_completion_runs_nothing_of_the_folder_one_is_in(tmp_path, monkeypatch):
    (tmp_path / "medspeed").mkdir()
    (tmp_path / "medspeed" / "__init__.py").write_text("")
    (tmp_path / "medspeed" / "cli.py").write_text("print('--stolen')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdout", found := io.StringIO())
    monkeypatch.setenv("COMP_LINE", "medspeed train spleen --")
    monkeypatch.setenv("COMP_POINT", "24")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert main(["medspeed", "--", "spleen"]) == 0
    assert "--epochs" in found.getvalue()
    assert "--stolen" not in found.getvalue()


def test_a_program_runs_under_the_words_that_were_typed():
    found = ask("train", "spleen", "--help")
    assert found.returncode == 0
    assert found.stdout.startswith("usage: medspeed train spleen ")
    wrong = ask("train", "spleen", "--epochs", "none")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("medspeed train spleen: ")
    assert wrong.stderr.count("\n") == 1


def test_words_and_flags_are_completed():
    assert complete("medspeed in") == ["infer"]
    assert complete("medspeed train ") == ["brats", "pathology", "spleen"]
    assert "--crop" in " ".join(complete("medspeed train spleen --cr"))
    assert complete("medspeed train spleen --epochs 5 --lear") != []
    assert complete("medspeed train spleen --data /tm") == []  # the shell's file names
    assert "--app" in complete("medspeed doctor --")
