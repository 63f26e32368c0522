"""The command `medspeed`: every program of this package by one name.

  medspeed train|infer|export|evaluate APP [flags]    APP: spleen, brats, pathology
  medspeed folds APP [flags]                          cross-validate: train every fold, tabulate them
  medspeed doctor [flags]                             check this machine, find the bottleneck of a training
  medspeed data PROGRAM [flags]                       datasets: download, convert, synthesize
  medspeed completion                                 print the shell completion line for ~/.bashrc or ~/.zshrc

`--help` after any of them lists its flags.
"""

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from medspeed import __version__
from medspeed.apps import APPS

_COMPLETION = """\
# bash and zsh: eval "$(medspeed completion)"
[ -z "${ZSH_VERSION-}" ] || { autoload -U +X compinit && compinit && autoload -U +X bashcompinit && bashcompinit; }
complete -o default -C medspeed medspeed"""


def programs() -> dict[tuple[str, ...], str]:
    """Return the module behind each program's words, such as ("train", "spleen")."""
    verbs = ("train", "infer", "export", "evaluate")
    found: dict[tuple[str, ...], str] = {(verb, app): f"medspeed.apps.{app}.{verb}" for verb in verbs for app in APPS}
    found |= {("folds", app): "medspeed.apps.folds" for app in APPS} | {("doctor",): "medspeed.apps.doctor"}
    for path in sorted(Path(__file__).parent.glob("data_scripts/*.py")):
        if "__main__" in path.read_text(encoding="utf-8"):
            found["data", path.stem.replace("_", "-")] = f"medspeed.data_scripts.{path.stem}"
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program that the first words name with the rest; return its exit status."""
    words, known = list(sys.argv[1:] if arguments is None else arguments), programs()
    answers = dict.fromkeys([(), ("-h",), ("--help",)], __doc__.strip())
    answers |= {("--version",): f"medspeed {__version__}", ("completion",): _COMPLETION}
    if {"COMP_LINE", "COMP_POINT"} <= os.environ.keys():
        typed = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])].split(" ")
        answers[tuple(words)] = "\n".join(_candidates(typed[1:-1], typed[-1]))
    if tuple(words) in answers:
        sys.stdout.write(f"{answers[tuple(words)]}\n")
        return 0
    for name in (tuple(words[:1]), tuple(words[:2])):
        if name in known:
            sys.argv = [" ".join(("medspeed", *name)), *words[len(name) :]]
            runpy.run_module(known[name], run_name="__main__")
            return 0
    right = [each for each in words[:1] if _next([each])]  # the words that were understood
    called, choices, rest = " ".join(["medspeed", *right]), _next(right), words[len(right) :]
    if rest in (["-h"], ["--help"]):
        sys.stdout.write(f"{called} {'|'.join(choices)} [flags]\n")
        return 0
    unknown = "".join(f"unknown word {word!r}; " for word in rest[:1])
    sys.stderr.write(f"{called}: {unknown}expected one of {', '.join(choices)}; medspeed --help says more\n")
    return 2


def _next(before: Sequence[str]) -> list[str]:
    """Return the words that may follow some."""
    found = [name[len(before)] for name in programs() if name[: len(before)] == (*before,) and len(name) > len(before)]
    return list(dict.fromkeys(found)) + ["completion"] * (not before)


def _candidates(before: Sequence[str], last: str) -> list[str]:
    """Return what may stand for the last word of a line; nothing leaves it to the shell's file names."""
    choices = [*_next(before), *(["--help", "--version"] * (not before))]
    if last.startswith("-") and not choices:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("COMP_")}
        command = [sys.executable, "-P", "-m", "medspeed.cli", *before[: 2 - (before[0] == "doctor")], "--help"]
        text = subprocess.run(command, env=environ, capture_output=True, text=True, check=False).stdout
        choices = sorted(set(re.findall(r"(?<![\w-])--[a-z][\w.-]*", text)))
    return [word for word in choices if word.startswith(last)]


if __name__ == "__main__":
    sys.exit(main())
