"""The command `medspeed`: every program of this package by one name.

  medspeed train|infer|export|evaluate APP [flags]    APP: spleen, brats, pathology
  medspeed doctor [flags]                             check this machine, find the bottleneck of a training
  medspeed data PROGRAM [flags]                       datasets: download, convert, synthesize
  medspeed completion                                 print the shell completion line for ~/.bashrc or ~/.zshrc

`--help` after any of them lists its flags.
"""

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from medspeed import __version__

_HOME = Path(__file__).parent
_VERBS = ("train", "infer", "export", "evaluate")
_COMPLETION = """\
# bash and zsh: eval "$(medspeed completion)"
[ -z "${ZSH_VERSION-}" ] || { autoload -U +X compinit && compinit && autoload -U +X bashcompinit && bashcompinit; }
complete -o default -C medspeed medspeed"""


def programs() -> dict[str, Mapping[str, str]]:
    """Return the modules behind each first word, by the second word; "" stands for no second word."""
    found: dict[str, Mapping[str, str]] = {}
    for verb in _VERBS:
        apps = sorted(path.parent.name for path in (_HOME / "apps").glob(f"*/{verb}.py"))
        found[verb] = {app: f"medspeed.apps.{app}.{verb}" for app in apps}
    scripts = sorted(path for path in (_HOME / "data_scripts").glob("*.py") if "__main__" in path.read_text("utf-8"))
    data = {path.stem.replace("_", "-"): f"medspeed.data_scripts.{path.stem}" for path in scripts}
    return {**found, "doctor": {"": "medspeed.apps.doctor"}, "data": data}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program that the first words name with the rest; return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "COMP_LINE" in os.environ:
        return _print(*_candidates(os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])].split(" ")[1:]))
    if not words or words[0] in ("-h", "--help"):
        return _print(__doc__.strip())
    if words[0] == "--version":
        return _print(f"medspeed {__version__}")
    if words == ["completion"]:
        return _print(_COMPLETION)
    known = programs()
    if words[0] not in known:
        return _fail("medspeed", words[0], (*known, "completion"))
    modules, second = known[words[0]], (words[1:2] or [""])[0]
    if "" in modules:
        return _run(modules[""], words[:1], words[1:])
    if second not in modules:
        return _fail(f"medspeed {words[0]}", second, tuple(modules))
    return _run(modules[second], words[:2], words[2:])


def _run(module: str, name: Sequence[str], flags: Sequence[str]) -> int:
    sys.argv = [" ".join(("medspeed", *name)), *flags]
    runpy.run_module(module, run_name="__main__")
    return 0


def _candidates(words: Sequence[str]) -> list[str]:
    """Return what may stand for the last of the words; nothing leaves it to the shell's file names."""
    *before, last = words
    known = programs()
    if not before:
        choices = [*known, "completion", "--help", "--version"]
    elif len(before) == 1 and before[0] in known and "" not in known[before[0]]:
        choices = [*known[before[0]]]
    elif last.startswith("-") and before[0] in known:
        choices = _flags([*before, ""])
    else:
        choices = []
    return [word for word in choices if word.startswith(last)]


def _flags(words: Sequence[str]) -> list[str]:
    import re
    import subprocess

    environ = {name: value for name, value in os.environ.items() if not name.startswith("COMP_")}
    command = [sys.executable, "-m", "medspeed.cli", *words[: 1 if words[0] == "doctor" else 2], "--help"]
    text = subprocess.run(command, env=environ, capture_output=True, text=True, check=False).stdout
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][\w.-]*", text)))


def _fail(program: str, word: str, choices: Sequence[str]) -> int:
    found = f"unknown word {word!r}; " if word else ""
    sys.stderr.write(f"{program}: {found}expected one of {', '.join(choices)}; see medspeed --help\n")
    return 2


def _print(*lines: str) -> int:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
