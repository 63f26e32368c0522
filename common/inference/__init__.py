"""From trained networks to label maps. Here: the words for what computes in what, and the folders of trained runs."""

import os
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Literal

from medspeed.common.files import atomic_path

Precision = Literal["fp32", "bf16", "fp16"]
"""What torch trains and computes in."""
ModelPrecision = Literal["fp32", "fp16", "int8"]
"""What an ONNX model or an engine may be in: INT8 is made from the export in fp32."""
AnyPrecision = Literal[Precision, ModelPrecision]
Backend = Literal["tensorrt", "onnxruntime", "torch"]
TOLERANCE = 2.0
"""mm, of the normalised surface Dice."""


def model_folder(model: Path) -> Path:
    """Return the folder of a run; for "demo", unless it is there, a copy of the demo weights that takes exports."""
    folder = Path(os.path.expanduser(model))  # noqa: PTH111 - of an unknown user it raises nothing
    if model == Path("demo") and not model.exists():
        folder = Path("~/.cache/medspeed/demo").expanduser()
        for shipped in (files("medspeed") / "demo").iterdir():
            content, copy = shipped.read_bytes(), folder / shipped.name
            if not copy.is_file() or copy.read_bytes() != content:
                with atomic_path(copy) as part:
                    part.write_bytes(content)
    return folder


def model_folders(models: Path | Sequence[Path]) -> tuple[Path, ...]:
    """Return the folders of runs; a folder of folds (fold-0, ...) means all. A ValueError names an unfinished one."""
    found: list[Path] = []
    for folder in map(model_folder, [models] if isinstance(models, Path) else models):
        folds = [] if (folder / "model.json").exists() else _folds(folder)
        for fold in folds:
            if not (fold / "summary.json").is_file():
                raise ValueError(f"model {fold}: not finished; repeat `medspeed folds`, or name the folds to use")
        found += folds or [folder]
    if not found:
        raise ValueError("model: needs a run folder, or several")
    return tuple(found)


def _folds(folder: Path) -> list[Path]:
    """Return the runs of a cross-validation, also those that are still missing; none of another folder."""
    config = folder / "config.yaml"  # as `medspeed folds` wrote it
    given = re.search(r"^folds: (\d{1,3})$", config.read_text(encoding="utf-8"), re.M) if config.is_file() else None
    if given:
        return [folder / f"fold-{number}" for number in range(int(given[1]))]
    return sorted(folder.glob("fold-[0-9]*"), key=lambda fold: (len(fold.name), fold.name))
