"""One way to configure: a frozen dataclass, read from flags and a YAML file.

Precedence, lowest first: the defaults of the dataclass, the recipe (or of a resumed run its own configuration), the
file of `--config`, the flags. A field that is a dataclass itself is a group of flags: `--windows.size`.
"""

import argparse
import difflib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ActionConfigFile, ArgumentError, ArgumentParser, DefaultHelpFormatter

from medspeed.common.files import from_json

Config = TypeVar("Config")

_MOST_YAML, _DEEPEST_YAML = 1_000_000, 8
_WORDS = {int: "whole number", float: "number", Path: "path", str: "word"}
_EXAMPLES = {int: "[64,64,48]", float: "[1.5,1.5,2.0]"}
_SHOWN = 60  # letters of a foreign word in an error


def parse_config(
    kind: type[Config],
    recipes: Mapping[str, Config],
    arguments: Sequence[str] | None = None,
    description: str = "",
    resumable: Sequence[str] = (),
) -> Config:
    """Parse the command line into a `kind`, a frozen dataclass.

    A mistyped or unknown flag, a value of the wrong type and a `ValueError` from the dataclass end the program with
    status 2 and one line that names the field; `--help` and `--print_config` end it with status 0.

    Args:
        kind: the dataclass; its docstring's `Args` become the help.
        recipes: values of `kind` by name, chosen with `--recipe`; empty where the app has none.
        arguments: the words of the command line, by default those of the process.
        description: the first lines of the help.
        resumable: with `--resume FOLDER` the defaults are those of FOLDER/config.yaml, and only these may differ.
    """
    arguments = [_at_home(word) for word in (sys.argv[1:] if arguments is None else arguments)]
    parser = _parser(kind, description)
    try:
        early = _early(arguments, kind)
        start, stored = None, None
        if resumable and early["resume"] is not None:
            start = stored = config_from_yaml(kind, Path(early["resume"]) / "config.yaml")
        elif recipes:
            name = early["recipe"] or next(iter(recipes))
            if name not in recipes:
                raise ValueError(f"--recipe {name}: must be one of {', '.join(recipes)}")
            start = recipes[name]
        if start is not None:
            parser.set_defaults(asdict(start))  # type: ignore[call-overload]
        config = from_json(kind, _values(kind, parser.parse_args(arguments).as_dict()))
        if stored is not None:
            _check_resumed(flat(config), flat(stored), resumable)
    except (ArgumentError, yaml.YAMLError, ValueError, OSError) as error:
        _fail(parser.prog, _hint(_plain_words(str(error), kind), list(_flags(kind))))
    return config


def config_to_yaml(config: object) -> str:
    """Return a config dataclass as YAML that `--config` reads back to an equal value."""
    return str(yaml.safe_dump(config_content(config), sort_keys=False))


def config_content(config: object) -> dict[str, Any]:
    """Return a config dataclass as JSON and YAML take it; `from_json` reads it back."""
    return {name: _plain(value) for name, value in asdict(config).items()}  # type: ignore[call-overload]


def config_from_yaml(kind: type[Config], path: Path) -> Config:
    """Read what `config_to_yaml` wrote.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file holds another set of fields, or values out of bounds.
    """
    _read_yaml(path, kind)
    try:
        return from_json(kind, _values(kind, _parser(kind, "").parse_path(path).as_dict()))
    except ArgumentError as error:
        raise ValueError(f"{path}: {_plain_words(str(error), kind)}") from error


def flat(config: object, prefix: str = "") -> dict[str, Any]:
    """Return the value of each flag: those of a group under names such as "windows.size"."""
    values: dict[str, Any] = {}
    for field in fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        name = prefix + field.name
        values |= flat(value, f"{name}.") if is_dataclass(value) else {name: value}
    return values


def replaced(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a config with other values, by the names of `flat`."""
    for name, value in values.items():
        group, _, inner = name.partition(".")
        new = replaced(getattr(config, group), {inner: value}) if inner else value
        config = replace(config, **{group: new})  # type: ignore[type-var]
    return config


class _Help(DefaultHelpFormatter):  # type: ignore[misc] # jsonargparse has no types
    """Flags in wide lines, with their defaults; what the choices are is in the help already."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=120)

    def _get_type_str(self, action: argparse.Action) -> None:
        return None


def _parser(kind: type, description: str) -> ArgumentParser:
    parser = ArgumentParser(
        description=description,
        usage="%(prog)s [--FLAG VALUE ...]",
        formatter_class=_Help,
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        action=ActionConfigFile,
        help="YAML file with any of these fields (there and here a list is [1,2,3])",
    )
    parser.add_class_arguments(kind, as_group=False)
    return parser


def _at_home(word: str) -> str:
    """Return a word of the command line with the user's home for a tilde, which a shell leaves in `--data=~/scans`."""
    flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return f"{flag}{equals}{Path(value).expanduser()}" if value.startswith("~") else word


def _values(kind: type, parsed: Mapping[str, Any]) -> dict[str, Any]:
    values = {field.name: parsed[field.name] for field in fields(kind)}
    return {name: value.expanduser() if isinstance(value, Path) else value for name, value in values.items()}


def _read_yaml(path: Path, kind: type) -> dict[str, Any]:
    """Return the content of a configuration file, which is small and flat, as a hostile one is not."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such configuration file")
    if path.stat().st_size > _MOST_YAML:
        raise ValueError(f"{path}: takes {path.stat().st_size} bytes; a configuration takes {_MOST_YAML} at most")
    try:
        text, depth = path.read_text(encoding="utf-8"), 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST_YAML or isinstance(event, yaml.AliasEvent):
                raise ValueError(f"a configuration has no aliases, and {_DEEPEST_YAML} levels at most")
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: is no configuration; it has lines such as `epochs: 5`")
    known = {field.name for field in fields(kind)}
    if unknown := [str(name) for name in content if str(name).split(".")[0] not in known]:
        raise ValueError(f"{path}: --{unknown[0][:_SHOWN]} is no field of a configuration")
    return content


def _early(arguments: Sequence[str], kind: type) -> dict[str, str | None]:
    """Return the recipe and the run to resume that the flags name, else the config file; None where none does."""
    scan = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in ("--recipe", "--resume", "--config"):
        scan.add_argument(flag)
    found = vars(scan.parse_known_args(list(arguments))[0])
    file = found.pop("config")
    given = _read_yaml(Path(file), kind) if file is not None else {}
    return {name: value if value is not None else given.get(name) for name, value in found.items()}


def _check_resumed(given: Mapping[str, Any], stored: Mapping[str, Any], resumable: Sequence[str]) -> None:
    for name, value in given.items():
        if name not in resumable and value != stored[name]:
            raise ValueError(
                f"--{name} {value}: a resumed run keeps its own {name} ({stored[name]}); "
                "drop the flag, or start a new run from its weights with --init"
            )


def _flags(kind: type, prefix: str = "--") -> Iterator[str]:
    for field in fields(kind):
        group = isinstance(field.type, type) and is_dataclass(field.type)
        yield from _flags(field.type, f"{prefix}{field.name}.") if group else (prefix + field.name,)  # type: ignore[arg-type]


def _plain_words(message: str, kind: type) -> str:
    """Return what jsonargparse says of a value of the wrong type as a line that a user understands."""
    found = re.search(r'Parser key "([\w.]+)".*(?:Given|Got) value:\s*(.*)', " ".join(message.split()))
    if found is None:
        return message
    name, value = found.groups()
    expected: Any = kind
    for part in name.split("."):
        expected = get_type_hints(expected)[part]
    return f"--{name} {value[:_SHOWN]}: expected {_type_words(expected)}"


def _type_words(expected: Any) -> str:  # noqa: ANN401 - the type of a field
    """Return a type in words: "3 whole numbers in brackets, such as [1,2,3], or null"."""
    parts = get_args(expected)
    if get_origin(expected) is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if get_origin(expected) in (UnionType, Union):
        return " or ".join(map(_type_words, parts))
    if parts:
        several = "" if parts[-1] is ... else f"{len(parts)} "
        return f"{several}{_WORDS.get(parts[0], 'value')}s in brackets, such as {_EXAMPLES.get(parts[0], '[a,b,c]')}"
    return {bool: "true or false", NoneType: "null"}.get(expected, f"a {_WORDS.get(expected, 'value')}")


def _hint(message: str, flags: Sequence[str]) -> str:
    words = [word.split("=")[0].rstrip(":") for word in message.split() if word.startswith("--")]
    near = [match for word in words if word not in flags for match in difflib.get_close_matches(word, flags, n=1)]
    return " ".join(message.split()) + (f" (did you mean {near[0]}?)" if near else "")


def _fail(program: str, message: str) -> NoReturn:
    sys.stderr.write(f"{program}: {message}; --help lists every flag\n")
    sys.exit(2)


def _plain(value: Any) -> Any:  # noqa: ANN401 - any field of a config
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
