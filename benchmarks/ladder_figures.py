"""The guides' figures drawn again from own data: quality against time per rung, steps per rung, kinds of datasets."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from common.observe.figures import save_png

_METRICS = ("Dice", "AUC")


def draw_ladder(folder: Path, record: dict[str, Any]) -> None:
    """Write `ladder.png` (time of a step and quality per rung), `time.png` (quality against time) and `datasets.png`.

    Args:
        folder: where they go.
        record: what `ladder.py` measured.
    """
    rungs = [rung for rung in record["climb"] if "failed" not in rung]
    metric = next(name for name in _METRICS if name in rungs[0])
    _draw_steps(folder / "ladder.png", rungs, metric)
    _draw_curves(folder / "time.png", rungs, metric)
    measured = {name: each for name, each in record["datasets"].items() if isinstance(each, dict)}
    if measured:
        _draw_datasets(folder / "datasets.png", measured)


def _draw_steps(path: Path, rungs: list[dict[str, Any]], metric: str) -> None:
    figure = Figure(figsize=(10, 0.5 + 0.45 * len(rungs)), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    places = np.arange(len(rungs))[::-1]
    computing = [rung["s per step"] * (1 - rung["waited, percent"] / 100) for rung in rungs]
    waiting = [rung["s per step"] * rung["waited, percent"] / 100 for rung in rungs]
    left.barh(places, computing, color="#0072B2", label="computing")
    left.barh(places, waiting, left=computing, color="#E69F00", label="waiting for batches")
    for place, rung in zip(places, rungs, strict=True):
        left.text(rung["s per step"], place, f" {rung['s per step']:.3g} s", va="center", fontsize=8)
    left.set_yticks(places, [rung["rung"] for rung in rungs], fontsize=8)
    left.set_xlabel("seconds per step")
    left.margins(x=0.15)
    left.legend(fontsize=8, loc="lower right")
    right.plot([rung[metric] for rung in rungs], places, "o", color="#D55E00")
    right.set_xlabel(f"{metric} at the end")
    right.grid(axis="x", alpha=0.3)
    save_png(path, figure)


def _draw_curves(path: Path, rungs: list[dict[str, Any]], metric: str) -> None:
    figure = Figure(figsize=(10, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(rungs)))
    for rung, colour in zip(rungs, colours, strict=True):
        seconds, values = np.array(rung["curves"][0]).T
        axes.plot(seconds, values, marker="o", markersize=3, color=colour, label=rung["rung"])
    axes.set_xscale("log")
    axes.set_xlabel("seconds of preparation and training (log)")
    axes.set_ylabel(f"validation {metric}")
    axes.legend(fontsize=6, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.grid(alpha=0.3)
    save_png(path, figure)


def _draw_datasets(path: Path, datasets: dict[str, dict[str, float]]) -> None:
    figure = Figure(figsize=(8, 3.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(datasets))
    for shift, (key, colour) in enumerate(
        (("first epoch, filling included, s", "#E69F00"), ("later epochs, s", "#0072B2"))
    ):
        values = [each[key] for each in datasets.values()]
        bars = axes.bar(places + 0.4 * shift - 0.2, values, 0.4, color=colour, label=key)
        axes.bar_label(bars, fmt="%.2g", fontsize=7)
    axes.set_xticks(places, list(datasets), fontsize=8)
    axes.set_ylabel("seconds per epoch")
    axes.legend(fontsize=8)
    save_png(path, figure)
