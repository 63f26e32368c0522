"""The ladder's figures as Markdown, and the guides' figures drawn again from them."""

import statistics
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from common.observe.plots import save_png

Record = dict[str, Any]
_METRICS = ("Dice", "AUC")
_TARGET = 0.9  # of the quality that fast has in the end: what "epochs to" counts to
_FIRST, _LATER = "first epoch, filling included, s", "later epochs, s"  # of a dataset


def markdown(record: Record) -> str:
    """Return all tables of a ladder, most important first."""
    parts = [
        f"## The climb ({record['app']}, {record['epochs']} epochs)",
        _climb(record),
        "## Single changes of fast",
        _beside(record),
    ]
    for title in ("datasets", "loaders", "networks and steps"):
        parts += [f"## {title.capitalize()}", _rows(record[title])]
    parts += ["## Not here", "\n".join(f"- {name}: {why}" for name, why in record["absent"].items())]
    return "\n\n".join(parts)


def _climb(record: Record) -> str:
    metric = _metric(record["climb"])
    first, last = record["climb"][0], record["climb"][-1]
    target = _TARGET * last[metric] if metric in last else 1.0
    lines = [
        "| rung | s per step | to the rung before | to the baseline | waited | prepare, cache | first epoch | "
        f"{metric} | epochs, seconds to {target:.2f} | memory |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for rung in record["climb"]:
        if "failed" in rung:
            lines.append(f"| {rung['rung']} | failed: {rung['failed']} | | | | | | | | |")
            continue
        before = rung.get("times as fast as the rung before")
        so_far = first["s per step"] / rung["s per step"] if "s per step" in first else None
        lines.append(
            f"| {rung['rung']} | {rung['s per step']:.3g} | {_times(before)} | {_times(so_far)} "
            f"| {rung['waited, percent']:.0f}% | {rung['prepare and cache, s']:.3g} s "
            f"| {rung['first epoch, s']:.3g} s | {rung[metric]:.3f} | {_reached(rung, target)} "
            f"| {rung['peak memory, MiB']} MiB |"
        )
    return "\n".join(lines)


def _reached(rung: Record, target: float) -> str:
    """Return the median epoch and second, preparation included, of the first validation that has the target."""
    firsts = [
        next(((epoch, point[0]) for epoch, point in enumerate(curve, 1) if point[1] >= target), None)
        for curve in rung["curves"]
    ]
    found = [each for each in firsts if each is not None]
    if not found:
        return "not reached"
    some = "" if len(found) == len(firsts) else f" ({len(found)} of {len(firsts)} rounds)"
    epochs, seconds = (statistics.median(values) for values in zip(*found, strict=True))
    return f"{epochs:g}, {seconds:.3g} s{some}"


def _beside(record: Record) -> str:
    fast = record["fast, short"]
    lines = [
        "One epoch each, not repeated: differences of a few percent are noise.",
        "",
        "| change | s per step | samples per s, this / fast | s per validation | compile | memory |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in {"fast itself": fast, **record["beside"], "fast again": record["fast, short, again"]}.items():
        if isinstance(found, str) or "failed" in found:
            why = found if isinstance(found, str) else f"failed: {found['failed']}"
            lines.append(f"| {name} | {why} | | | | |")
            continue
        # By samples, since some changes make the batch larger.
        ratio = found["samples per s"] / fast["samples per s"] if "samples per s" in fast else None
        lines.append(
            f"| {name} | {found['s per step']:.3g} | {_times(ratio)} | {found['s per validation']:.3g} "
            f"| {found['compile, s']:.3g} s | {found['peak memory, MiB']} MiB |"
        )
    return "\n".join(lines)


def _rows(part: dict[str, Any]) -> str:
    """Return a part's rows: named figures, or the reason why there are none."""
    if "failed" in part:
        return f"Failed: {part['failed']}"
    named = dict.fromkeys(name for each in part.values() if isinstance(each, dict) for name in each)
    names = list(named) or ["why not"]
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for name, found in part.items():
        cells = [str(found.get(each, "")) for each in names] if isinstance(found, dict) else [str(found)]
        lines.append(f"| {name} | " + " | ".join(cells + [""] * (len(names) - len(cells))) + " |")
    return "\n".join(lines)


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def _metric(rungs: list[Record]) -> str:
    return next((name for rung in rungs for name in _METRICS if name in rung), _METRICS[0])


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
