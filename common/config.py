"""One way to configure: a frozen dataclass, read from flags and a YAML file.

Precedence, lowest first: the defaults of the dataclass, the recipe, the file of `--config`, the flags.
"""

import argparse
import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from jsonargparse import ActionConfigFile, ArgumentError, ArgumentParser

Config = TypeVar("Config")


def parse_config(
    kind: type[Config],
    recipes: Mapping[str, Config],
    arguments: Sequence[str] | None = None,
    description: str = "",
    then: Callable[[Config], Config] = lambda config: config,
) -> Config:
    """Parse the command line into a `kind`, a frozen dataclass.

    A mistyped or unknown flag, a value of the wrong type and a `ValueError` from the dataclass end the program with
    status 2 and one line that names the field; `--help` and `--print_config` end it with status 0.

    Args:
        kind: the dataclass; its docstring's `Args` become the help.
        recipes: values of `kind` by name, chosen with `--recipe`; empty where the app has none.
        arguments: the words of the command line, by default those of the process.
        description: the first lines of the help.
        then: a last step from config to config, whose `ValueError` and `OSError` count as the user's mistakes too.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser(kind, description)
    try:
        if recipes:
            parser.set_defaults(asdict(recipes[_recipe_name(arguments, recipes)]))  # type: ignore[call-overload]
        namespace = parser.parse_args(arguments)
        values = {field.name: namespace[field.name] for field in fields(kind)}  # type: ignore[arg-type]
        return then(kind(**values))
    except (ArgumentError, yaml.YAMLError, ValueError, OSError) as error:
        flags = [f"--{field.name}" for field in fields(kind)]  # type: ignore[arg-type]
        _fail(parser.prog, _hint(str(error), flags))


def config_to_yaml(config: object) -> str:
    """Return a config dataclass as YAML that `--config` reads back to an equal value."""
    return str(yaml.safe_dump(_plain(asdict(config)), sort_keys=False))  # type: ignore[call-overload]


def config_from_yaml(kind: type[Config], path: Path) -> Config:
    """Read what `config_to_yaml` wrote.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file holds another set of fields, or values out of bounds.
    """
    parser = _parser(kind, "")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such configuration file")
    try:
        namespace = parser.parse_path(path)
        return kind(**{field.name: namespace[field.name] for field in fields(kind)})  # type: ignore[arg-type]
    except ArgumentError as error:
        raise ValueError(f"{path}: {error}") from error


def resumed_config(given: Config, stored: Config, default: Config, keep: Sequence[str]) -> Config:
    """Return the config of a resumed run: the stored one, where the fields of `keep` may be given anew.

    A field counts as given where it is not `default`'s.

    Raises:
        ValueError: another field was given with a value that is not the stored one.
    """
    for field in fields(given):  # type: ignore[arg-type]
        now, then, usual = (getattr(config, field.name) for config in (given, stored, default))
        if field.name not in keep and now not in (then, usual):
            raise ValueError(
                f"--{field.name} {now}: a resumed run keeps its own {field.name} ({then}); "
                "drop the flag, or start a new run from its weights with --init"
            )
    new = {name: getattr(given, name) for name in keep if getattr(given, name) != getattr(default, name)}
    return replace(stored, **new)  # type: ignore[type-var]


def _parser(kind: type, description: str) -> ArgumentParser:
    parser = ArgumentParser(description=description, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file with any of these fields")
    parser.add_class_arguments(kind, as_group=False)
    return parser


def _recipe_name(arguments: Sequence[str], recipes: Mapping[str, Any]) -> str:
    """Return the recipe that the flags name, else the config file, else the first one."""
    scan = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    scan.add_argument("--recipe")
    scan.add_argument("--config", type=Path)
    found = scan.parse_known_args(list(arguments))[0]
    name = found.recipe
    if name is None and found.config is not None:
        content = yaml.safe_load(found.config.read_text(encoding="utf-8"))
        name = content.get("recipe") if isinstance(content, dict) else None
    name = next(iter(recipes)) if name is None else name
    if name not in recipes:
        raise ValueError(f"--recipe {name}: must be one of {', '.join(recipes)}")
    return str(name)


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
