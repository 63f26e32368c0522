"""`model.json` of a run: what inference must know of the network besides its weights."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from common.files import write_json

Model = TypeVar("Model")


def write_model(run: Path, app: str, model: Any) -> None:  # noqa: ANN401 - a dataclass of the app
    """Write `model.json` into the folder of a run."""
    write_json(run / "model.json", {"app": app, **asdict(model)})


def read_model(run: Path, app: str, from_json: Callable[[dict[str, Any]], Model]) -> Model:
    """Read `model.json` from the folder of a run.

    Raises:
        FileNotFoundError: the folder holds no run.
        ValueError: the file is damaged or belongs to another app.
    """
    path = run / "model.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; --model takes the folder of a training run")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("app") != app:
            raise ValueError("it belongs to another app")
        return from_json(content)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not the model file of a {app} run ({error})") from error


def with_tuples(content: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with JSON's lists as tuples again."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
