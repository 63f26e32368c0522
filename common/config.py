"""One way to configure: a frozen dataclass, read from flags and a YAML file.

Precedence, lowest first: the dataclass, the recipe (or the run that is resumed), the file of `--config`, the flags. A
field that is a dataclass is a group of flags: `--windows.size`; its field `name` has the group's own: `--network`.
"""

import inspect
import json
import os
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

import yaml

from medspeed.common.files import from_json
from medspeed.common.flags import SHOWN, Parser, as_type, flag_of, near, placeholder, shown_default, value_of

Config = TypeVar("Config")

_MOST_YAML, _DEEPEST_YAML = 1_000_000, 8
_OPEN = "A flag without a default is chosen from the data and the device, or not used; the value null means the same.\n"
_NOTE = "A list is written 64 64 48 or 64,64,48. Flags may have underscores instead of dashes."


def wait_longer() -> None:
    """Let OpenMP threads spin for longer before they sleep, unless the user says how; torch must not be loaded yet.

    GNU's OpenMP spins 300,000 times, but 100 times where a process has more threads than cores, as a training has,
    whose batches are made beside it: that costs 10 to 20 percent of a step on two cores. The first variable makes the
    100 1,000, the second keeps the 300,000.
    """
    waits = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "300000"}
    if not waits.keys() & os.environ.keys():
        os.environ |= waits


def parse_config(
    kind: type[Config], recipes: Mapping[str, Config], arguments: Sequence[str] | None = None, description: str = ""
) -> Config:
    """Parse the words of a command line, by default of the process's, into a frozen dataclass.

    The `Args` of its docstring become the help, which its `GROUPS` (fields by title, "*" for all others) order. With
    `--resume FOLDER` the defaults are those of FOLDER/config.yaml, and only its `RESUMABLE` fields may differ.

    A mistyped or unknown flag, a value of the wrong type and a `ValueError` from the dataclass end the program with
    status 2 and one line that names the flag; `--help` and `--print-config` end it with status 0.
    """
    if arguments is None:
        wait_longer()
    leaves = _leaves(kind)
    parser = _parser(kind, leaves, description)
    words = vars(parser.parse_args(arguments))
    file, prints = words.pop("config"), words.pop("print_config")
    try:
        given = {} if file is None else _typed(f"{file}: ", read_yaml(file), leaves)
        given |= {name: value_of(name, leaves[name].type, each) for name, each in words.items()}
        config = _complete(kind, recipes, given)
    except (ValueError, OSError) as error:
        name, *rest = str(error).split(" ", 1)
        parser.error(" ".join([flag_of(name) if name in leaves else name, *rest]))
    if prints:
        sys.stdout.write(config_to_yaml(config))
        parser.exit()
    return config


def config_from_values(kind: type[Config], recipes: Mapping[str, Config], values: Mapping[str, Any]) -> Config:
    """Return the configuration of values by field, a group's as a mapping; a ValueError names one that is wrong."""
    return _complete(kind, recipes, _typed("", values, _leaves(kind)))


def config_to_yaml(config: object) -> str:
    """Return a config dataclass as YAML that `--config` reads back to an equal value."""
    return str(yaml.safe_dump(config_content(config), sort_keys=False))


def config_content(config: object) -> dict[str, Any]:
    """Return a config dataclass as JSON and YAML take it; `from_json` reads it back."""
    return dict(json.loads(json.dumps(asdict(config), default=os.fspath)))  # type: ignore[call-overload]


def config_from_yaml(kind: type[Config], path: Path) -> Config:
    """Read what `config_to_yaml` wrote; errors name the file."""
    values = _typed(f"{path}: ", read_yaml(path), _leaves(kind))
    try:
        return _complete(kind, {}, values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def flat(config: object, prefix: str = "") -> dict[str, Any]:
    """Return the value of each flag: those of a group under names such as "windows.size"."""
    values: dict[str, Any] = {}
    for field in fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        name = prefix + field.name
        values |= flat(value, f"{name}.") if is_dataclass(value) else {name: value}
    return values


def replaced(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a config with other values, by the names of `flat`; a list, as YAML has it, becomes a tuple."""
    for name, value in values.items():
        group, _, inner = name.partition(".")
        new = replaced(getattr(config, group), {inner: value}) if inner else value
        config = replace(config, **{group: tuple(new) if isinstance(new, list) else new})  # type: ignore[type-var]
    return config


class _Leaf(NamedTuple):
    """A field that is no group: its type, its text in the help and its default, MISSING where one must be given."""

    type: Any
    text: str
    default: Any


def _leaves(kind: type, prefix: str = "") -> dict[str, _Leaf]:
    """Return the fields by the names of `flat`; their texts are from the docstrings of the dataclass and its bases."""
    docs = "\n".join(inspect.cleandoc(each.__doc__ or "").partition("\nArgs:\n")[2] for each in reversed(kind.__mro__))
    texts = dict(re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", docs, re.MULTILINE))
    types, leaves = get_type_hints(kind), dict[str, _Leaf]()
    for field in fields(kind):
        name, expected, text = prefix + field.name, types[field.name], " ".join(texts.get(field.name, "").split())
        group = is_dataclass(expected)
        leaves |= _leaves(expected, f"{name}.") if group else {name: _Leaf(expected, text, field.default)}
    return leaves


def _parser(kind: type, leaves: Mapping[str, _Leaf], description: str) -> Parser:
    needed = [f"{flag_of(name)} {placeholder(leaf.type)}" for name, leaf in leaves.items() if leaf.default is MISSING]
    note = _OPEN * any(leaf.default is None for leaf in leaves.values()) + _NOTE
    usage = " ".join(["%(prog)s", *needed, "[--FLAG VALUE ...]"])
    parser = Parser(description=f"{textwrap.fill(description, 118)}\n\n{note}", usage=usage)
    parser.add_argument("--config", type=Path, metavar="PATH", help="YAML file with any of the fields below")
    parser.add_argument("--print-config", action="store_true", help="print the configuration as YAML and exit")
    sections: dict[str, Any] = {}
    for title, names in getattr(kind, "GROUPS", {}).items():
        sections |= dict.fromkeys(names.split(), parser.add_argument_group(title))
    for name, (expected, text, default) in leaves.items():
        section = sections.get(name.partition(".")[0], sections.get("*", parser))
        parser.add_field(section, name, expected, f"{text.removesuffix('.')} {shown_default(default)}".strip())
    return parser


def _complete(kind: type[Config], recipes: Mapping[str, Config], given: Mapping[str, Any]) -> Config:
    """Return the configuration of what is given, and for the rest of the run to resume, the recipe, or the defaults."""
    start = {name: leaf.default for name, leaf in _leaves(kind).items()}
    resumable = getattr(kind, "RESUMABLE", ())
    resumed = bool(resumable) and given.get("resume") is not None
    if resumed:
        start = flat(config_from_yaml(kind, given["resume"] / "config.yaml"))
    elif recipes:
        start = flat(recipes[given.get("recipe") or next(iter(recipes))])
    values, content = {**start, **given}, dict[str, Any]()
    if missing := [flag_of(name) for name, value in values.items() if value is MISSING]:
        raise ValueError(f"{', '.join(missing)}: required")
    for name, value in values.items():
        group, _, inner = name.partition(".")
        content |= {group: content.get(group, {}) | {inner: value}} if inner else {name: value}
    config = from_json(kind, content)
    for name, value in flat(config).items() if resumed else ():
        if name not in resumable and value != start[name]:
            own = "see plan.json" if start[name] is None else start[name]
            said = f"{flag_of(name)} {value}: a resumed run keeps its own {name} ({own}); drop the flag"
            raise ValueError(f"{said}, or start a new run from its weights with --init")
    return config


def _typed(where: str, content: Mapping[Any, Any], leaves: Mapping[str, _Leaf], prefix: str = "") -> dict[str, Any]:
    """Return the values of a mapping by the names of `flat`; an error says `where` it is from."""
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = prefix + str(key).replace("-", "_")
        if isinstance(value, dict):
            found = _typed(where, value, leaves, f"{name}.")
        else:
            name = f"{name}.name" if f"{name}.name" in leaves else name
            if name not in leaves:
                inner = [f"a group: give its fields, such as {each}" for each in leaves if each.startswith(f"{name}.")]
                raise ValueError(f"{where}{name[:SHOWN]}: {[*inner, f'no such field{near(name[:SHOWN], leaves)}'][0]}")
            found = {name: as_type(f"{where}{name} {str(value)[:SHOWN]}", leaves[name].type, value)}
        if twice := sorted(values.keys() & found):
            raise ValueError(f"{where}{twice[0]}: given twice")
        values |= found
    return values


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping, in which a key that is given twice, of which PyYAML takes the last, is a ValueError."""
        keys = sorted(str(key.value).replace("-", "_") for key, _ in node.value)
        if twice := [key for key, following in pairwise(keys) if key == following]:
            raise ValueError(f"{twice[0]}: given twice")
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[Any, Any]:
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
        content = yaml.load(text, Loader=_Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: is no configuration; expected lines such as `epochs: 5`")
    return content
