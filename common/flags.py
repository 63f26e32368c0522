"""The command line of every program here: argparse, with the grammar that people expect and errors of one line."""

import argparse
import difflib
import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import MISSING
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

import msgspec

from medspeed.common.console import set_verbosity
from medspeed.common.files import printable

_PLAIN = {  # what argparse says, and what we do
    r"unrecognized arguments: (-\S+).*": r"\1: no such flag",
    r"unrecognized arguments: (\S+).*": r"\1: belongs to no flag",
    r"argument (-[^\s:]+): expected .*argument.*": r"\1: needs a value; write \1=VALUE for one that starts with a dash",
    r"argument ([^\s:]+): ignored explicit argument '(.*)'": r"\1 \2: takes no value",
    r"argument ([^\s:]+): invalid int value: '(.*)'": r"\1 \2: expected a whole number",
    r"argument ([^\s:]+): invalid choice: '([^']*)' \(choose from (.*)\)": r"\1 \2: expected one of \3",
    r"argument ([^\s:]+): (.*)": r"\1: \2",
    r"the following arguments are required: (.*)": r"\1: required",
}
_WORDS = {int: "whole number", float: "number", Path: "path", str: "word"}
_EXAMPLES = {int: "64 64 48", float: "1.5 1.5 2", Path: "train.csv validate.csv", str: "background spleen"}
_VALUES: dict[Any, str] = {int: "N", float: "NUMBER", Path: "PATH", str: "TEXT", bool: ""}
_SWITCH = {"yes": True, "on": True, "no": False, "off": False}
_VERBOSITIES = {
    "quiet": "print only errors, warnings and the final result",
    "verbose": "print every choice in a line of its own, and tracebacks of errors",
}
_WIDEST = 28  # letters of choices that stand beside their flag
SHOWN = 60  # letters of a value in an error


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help with flags as people type them."""

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return str(_VALUES.get(action.type, "TEXT"))

    def _get_help_string(self, action: argparse.Action) -> str:
        known = action.default is argparse.SUPPRESS or "(default" in (action.help or "")
        return f"{action.help or ''} {'' if known else shown_default(action.default)}".strip()

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        field = action.default is argparse.SUPPRESS
        return str(action.metavar) if field else super()._format_args(action, default_metavar)


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` in which `--crop-size` and `--crop_size` are one flag, and `~` is the user's home folder.

    A word such as -57 or -57,164 is a value. An error is one line, which suggests the nearest flag.
    """

    def __init__(self, **keywords: Any) -> None:  # noqa: ANN401 - those of an ArgumentParser
        width = min(120, shutil.get_terminal_size((120, 24)).columns)
        helper = partial(_Help, max_help_position=30, width=width)
        super().__init__(formatter_class=helper, allow_abbrev=False, **keywords)
        self._negative_number_matcher = re.compile(r"-\.?\d")
        for word, told in _VERBOSITIES.items():
            how: dict[str, Any] = {"action": "store_const", "const": word, "dest": "verbosity"}
            self.add_argument(f"--{word}", help=told, default=argparse.SUPPRESS, **how)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse words, those after `--` as they are; `--quiet` and `--verbose` take effect."""
        for name in ("stdout", "stderr"):  # which may have been closed
            setattr(sys, name, getattr(sys, name) or Path(os.devnull).open("w"))  # noqa: SIM115
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)
        found, others = super().parse_known_args([*map(_spelled, words[:end]), *words[end:]], namespace)
        if verbosity := vars(found).pop("verbosity", None):
            set_verbosity(verbosity)
        return found, others

    def add_field(self, section: argparse._ActionsContainer, name: str, expected: Any, text: str) -> None:  # noqa: ANN401
        """Add the flag of a field of a type to this parser or a group of it; `value_of` reads what it was given."""
        core, flag, hidden = _core(expected), flag_of(name), argparse.SUPPRESS
        how: dict[str, Any] = {"metavar": placeholder(core), "nargs": "+" if get_origin(core) is tuple else None}
        if core is bool:
            off = f"--no-{flag[2:]}"
            section.add_argument(off, action="store_const", const="false", dest=name, default=hidden, help=hidden)
            how = {"metavar": f"or {off}", "nargs": "?", "const": "true"}
        section.add_argument(flag, dest=name, default=hidden, help=text.replace("%", "%%"), **how)

    def error(self, message: str) -> NoReturn:
        """End the program with status 2 and a line on stderr."""
        message = " ".join(message.split())
        theirs = next((each for each in _PLAIN if re.fullmatch(each, message)), None)
        message = message if theirs is None else re.sub(theirs, _PLAIN[theirs], message)
        if message.endswith(": no such flag"):
            message += near(message.split(":")[0].split("=")[0], self._option_string_actions)
        self.exit(2, printable(f"{self.prog}: {message}; --help lists every flag") + "\n")


def near(word: str, known: Iterable[str]) -> str:
    """Return a question that names the nearest of the known words; "" where none is near."""
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return f" (did you mean {found[0]}?)" if found else ""


def flag_of(name: str) -> str:
    """Return the flag of a field: "--crops.per-case"; of the field `name` of a group that of the group: "--network"."""
    return f"--{name.removesuffix('.name').replace('_', '-')}"


def placeholder(core: Any) -> str:  # noqa: ANN401 - a type
    """Return what stands for a value of a type in the help: "X Y Z"."""
    parts = get_args(core)
    if get_origin(core) is Literal:
        choices = "|".join(parts)
        return choices if len(choices) <= _WIDEST else "NAME"
    if len(parts) == 3:
        return "X Y Z"
    return " ".join(_VALUES.get(part, "..." if part is ... else "NAME") for part in parts or [core])


def shown_default(default: Any) -> str:  # noqa: ANN401 - a value of a field
    """Return a default as the help shows it; "" for one that is null, off or empty."""
    if default is MISSING:
        return "(required)"
    if default is False or default in (None, "", (), []):
        return ""
    parts = default if isinstance(default, tuple | list) else ("on" if default is True else default,)
    return f"(default: {' '.join(f'{part:g}' if isinstance(part, float) else str(part) for part in parts)})"


def value_of(name: str, expected: Any, words: str | list[str]) -> Any:  # noqa: ANN401 - a type and its value
    """Return the value of a field from the words of its flag: several, or one such as "64,64,48" or "[64,64,48]"."""
    core, given = _core(expected), [words] if isinstance(words, str) else words
    if float in (core, *get_args(core)):
        given = [re.sub(r"(?<!\d)\.(?=\d)", "0.", word) for word in given]  # of .5
        given = [re.sub(r"(?<=\d)\.(?!\d)", ".0", word).lstrip("+") for word in given]  # of 1.
    value: Any = " ".join(given)
    told = f"{flag_of(name)} {value[:SHOWN]}"
    if value == "null" and core is not expected:
        value = None
    elif core is bool:
        value = _SWITCH.get(value.lower(), value)
    elif isinstance(words, list) and len(words) > 1 and not value.startswith("["):
        value = [part.strip("'\", ") for part in given if part]
    return as_type(told, expected, value)


def as_type(told: str, expected: Any, value: Any) -> Any:  # noqa: ANN401 - a type and its value
    """Return a value as a type, a path or list from its text and a number too; a ValueError begins with `told`."""
    core, whole = _core(expected), isinstance(value, Path)  # whose name may have a comma
    value = msgspec.to_builtins(value, enc_hook=lambda each: getattr(each, "tolist", each.__str__)())  # NumPy's, paths
    if isinstance(value, str) and get_origin(core) is tuple:
        gap = r"[,\s]+" if get_args(core)[0] in (int, float) else ","
        whole = whole or (get_args(core)[0] is Path and Path(_at_home(value)).exists())
        parts = [value] if whole else re.split(gap, value.strip("[] "))
        value = [part.strip("'\", ") for part in parts if part]
    try:
        return msgspec.convert(value, expected, strict=False, dec_hook=lambda kind, text: kind(_at_home(text)))
    except msgspec.ValidationError as error:
        raise ValueError(f"{told}: expected {_type_words(expected)}") from error


def _type_words(expected: Any) -> str:  # noqa: ANN401 - a type
    """Return a type in words: "3 whole numbers, such as 64 64 48, or null"."""
    core = _core(expected)
    parts = get_args(core)
    words = "true or false" if core is bool else f"a {_WORDS.get(core)}"
    if get_origin(core) is Literal:
        words = f"one of {', '.join(parts)}"
    elif parts and get_origin(parts[0]) is Literal:
        words = f"some of {', '.join(get_args(parts[0]))}"
    elif parts:
        several = "some" if parts[-1] is ... else len(parts)
        words = f"{several} {_WORDS[parts[0]]}s, such as {' '.join(_EXAMPLES[parts[0]].split()[: len(parts)])}"
    return words if core is expected else f"{words}, or null"


def _core(expected: Any) -> Any:  # noqa: ANN401 - a type
    """Return X of "X or null"."""
    return get_args(expected)[0] if get_origin(expected) in (UnionType, Union) else expected


def _spelled(word: str) -> str:
    """Return a word with dashes in its flag, and the home folder for a tilde, which a shell leaves in `--to=~/a`."""
    flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return f"{flag.replace('_', '-')}{equals}{_at_home(value)}"


def _at_home(path: str) -> str:
    return os.path.expanduser(path)  # noqa: PTH111 - pathlib's raises where there is no such user
