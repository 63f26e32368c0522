"""What a run's folder says of the run: its files, as far as they are there and can be read."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from common.observe.figures import one_line
from common.observe.run import read_json_lines

_NEEDED_FOR = {
    "summary.json": "the run has not finished: no quality, time budget or exports",
    "metrics.jsonl": "no curves",
    "environment.json": "no date, versions or hardware",
    "config.yaml": "no configuration",
    "plan.json": "nothing of what was chosen for this device and these cases",
}


@dataclass(frozen=True)
class RunFiles:
    """The content of a run folder; what is missing is empty, and named in `problems`.

    Args:
        directory: the folder.
        summary: `summary.json`.
        epochs: the records of `metrics.jsonl`.
        environment: `environment.json`.
        config: `config.yaml`.
        plan: `plan.json`.
        label_names: name of each label by its number, of `model.json`.
        log: the end of `run.log`.
        problems: a line for each file that is missing or damaged, and what the report lacks therefore.
    """

    directory: Path
    summary: dict[str, Any]
    epochs: list[dict[str, Any]]
    environment: dict[str, Any]
    config: dict[str, Any]
    plan: dict[str, Any]
    label_names: list[str]
    log: str
    problems: tuple[str, ...]


def read_run(directory: Path) -> RunFiles:
    """Read what a run folder holds.

    Raises:
        FileNotFoundError: it is no run folder.
    """
    if not any((directory / name).is_file() for name in _NEEDED_FOR):
        raise FileNotFoundError(f"{directory}: no run folder (none of {', '.join(_NEEDED_FOR)} is there)")
    problems: list[str] = []

    def read(name: str, parse: Callable[[Path], Any]) -> dict[str, Any]:
        return _read(directory / name, parse, problems)

    model = _read(directory / "model.json", _json, [])  # without it labels have numbers instead of names
    log = directory / "run.log"
    return RunFiles(
        directory=directory,
        summary=read("summary.json", _json),
        epochs=[each for each in read("metrics.jsonl", _lines).get("epochs", []) if isinstance(each, dict)],
        environment=read("environment.json", _json),
        config=read("config.yaml", _yaml),
        plan=read("plan.json", _json),
        label_names=[str(name) for name in mapping(model.get("labelling")).get("labels") or []],
        log=log.read_text(encoding="utf-8", errors="replace") if log.is_file() else "",
        problems=tuple(problems),
    )


def mapping(value: object) -> dict[str, Any]:
    """Return the value if it is a mapping, else an empty one: older and cut runs lack parts."""
    return value if isinstance(value, dict) else {}


def number(value: object) -> float | None:
    """Return a finite number, or None for whatever else a record may hold."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def flat(content: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return the values of nested mappings by their names with dots between, lists as they would be written."""
    rows: list[tuple[str, str]] = []
    for name, value in content.items():
        if isinstance(value, dict) and value:
            rows += flat(value, f"{prefix}{name}.")
        elif name == "command" and isinstance(value, list):
            rows.append((f"{prefix}{name}", " ".join(map(str, value))))
        else:
            rows.append((f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value, default=str)))
    return rows


def _read(path: Path, parse: Callable[[Path], Any], problems: list[str]) -> dict[str, Any]:
    loss = _NEEDED_FOR.get(path.name, "")
    if not path.is_file():
        problems.append(f"{path.name} is missing: {loss}")
        return {}
    try:
        content = parse(path)
    except (ValueError, yaml.YAMLError) as error:
        problems.append(f"{path.name} is damaged ({one_line(str(error), 120)}): {loss}")
        return {}
    if not isinstance(content, dict):
        problems.append(f"{path.name} is damaged (no mapping): {loss}")
        return {}
    return content


def _json(path: Path) -> Any:  # noqa: ANN401 - whatever the file holds
    return json.loads(path.read_text(encoding="utf-8"))


def _yaml(path: Path) -> Any:  # noqa: ANN401 - whatever the file holds
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _lines(path: Path) -> dict[str, Any]:
    return {"epochs": read_json_lines(path)}
