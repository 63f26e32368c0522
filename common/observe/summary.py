"""The summary of a run: what ran, on what, how well, how long; one JSON file that other programs read."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.files import write_json


@dataclass(frozen=True)
class Quality:
    """The figure a run is judged by.

    Args:
        name: what it is, and on which grid.
        value: mean over the cases.
        per_case: value by case name.
        selected_on: the cases on which the best weights were chosen.
        per_region: mean over the cases of each region's own Dice; null for one that no case holds.
    """

    name: str
    value: float
    per_case: dict[str, float]
    selected_on: str
    per_region: dict[str, float | None]


@dataclass(frozen=True)
class RunSummary:
    """The content of `summary.json`.

    Args:
        app: name of the app.
        recipe: recipe of the run.
        data: folder of the dataset, and whether it is synthetic.
        held_out: whether no validation case was trained on.
        device: what computed.
        ranks: processes that trained together.
        precision: of the training steps.
        seed: of the run.
        cases: number of training and validation cases.
        steps: training steps done.
        target: what `until` asked for, whether it held, on the working grid and in `quality`, and the seconds until the
            training ended; None where nothing was asked for.
        limit: how far a training step is from what the device can do; None where none was done.
        quality: the figure, on the native grid, by the best weights.
        working_grid: Dice on the working grid of the best and of the last validation.
        seconds: per stage, and in all since the process started.
        onnx: the fp32 model (path, sha256, max_abs_diff, quality_delta) and, under "fp16", the same of the other.
        engine: the fp32 engine (flavour, version, precision, path, sha256, ran, reason) and, under "fp16", the other;
            where there is none, `reason` says why.
    """

    app: str
    recipe: str
    data: dict[str, Any]
    held_out: bool
    device: str
    ranks: int
    precision: str
    seed: int
    cases: dict[str, int]
    steps: int
    target: dict[str, Any] | None
    limit: dict[str, Any] | None
    quality: Quality
    working_grid: dict[str, float]
    seconds: dict[str, float]
    onnx: dict[str, Any]
    engine: dict[str, Any]


def write_summary(directory: Path, summary: RunSummary) -> None:
    """Write `summary.json`."""
    write_json(directory / "summary.json", asdict(summary))
