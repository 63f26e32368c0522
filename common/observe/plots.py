"""Plots, as small PNG files: how a training goes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from medspeed.common.files import atomic_path

Values = NDArray[np.float64]
_LOSS, _METRIC, _GREY = "#0072B2", "#D55E00", "#555555"


def save_png(path: Path, figure: Figure) -> None:
    """Draw a figure and write it atomically as a PNG."""
    with atomic_path(path) as part:
        figure.savefig(part, format="png")


def draw_progress(path: Path, records: Sequence[Mapping[str, Any]], metric: str = "Dice") -> None:
    """Draw loss, validation metric and epoch time over the epochs as a PNG.

    The metric, in [0, 1], has its own axis, a mark for each validation and a star for the best one. No records give
    empty axes; a value that is missing or not finite leaves a gap. Each of the records has "epoch" (from 1, in order),
    "loss" (mean over the epoch), "seconds" and, where it was validated, the metric by its name in small letters.
    """
    names = ("epoch", "loss", metric.lower(), "seconds")
    table = np.array([[record.get(name) for record in records] for name in names], np.float64)  # None becomes NaN
    epochs, loss, values, seconds = np.where(np.isfinite(table), table, np.nan)
    figure = Figure(figsize=(8, 6), dpi=120, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    style(upper, "loss", _LOSS)
    handles = draw_curve(upper, epochs, loss, color=_LOSS, label="loss")
    validated = np.isfinite(values)
    if validated.any():
        right, best = upper.twinx(), len(values) - 1 - int(np.nanargmax(values[::-1]))  # the last of equals, as kept
        style(right, f"validation {metric}", _METRIC)
        right.grid(visible=False)
        # The nearer to 1, the wider apart: so the last epochs can be told from each other.
        stretched = (lambda value: -np.log(np.maximum(1.05 - value, 1e-3)), lambda place: 1.05 - np.exp(-place))
        right.set_yscale("function", functions=stretched)
        right.set(ylim=(0, 1), yticks=(0, 0.5, 0.7, 0.8, 0.9, 0.95, 1))
        line = {"linewidth": 1, "markersize": 4 if validated.sum() <= 60 else 1.5, "label": metric}
        handles += right.plot(epochs[validated], values[validated], "o-", color=_METRIC, **line)
        named = f"best {metric} {values[best]:.4f} (epoch {epochs[best]:.0f})"
        star = {"markersize": 12, "markeredgecolor": "black", "label": named}
        handles += right.plot(epochs[best], values[best], "*", color=_METRIC, **star)
    # Above the axes, where the curves cannot run under it.
    upper.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False, fontsize=9)
    style(lower, "epoch time (s)", _GREY)
    draw_curve(lower, epochs, seconds, color=_GREY)
    lower.set_ylim(bottom=0, top=1.15 * max(seconds[np.isfinite(seconds)], default=1.0))
    spent = (0, *epochs), (0, *np.nancumsum(seconds))
    unit, length = ("minutes", 60) if spent[1][-1] > 600 else ("seconds", 1)
    lower.set_xlabel(f"epoch; below it, {unit} of training")
    lower.xaxis.set_major_formatter(lambda at, _: f"{at:.0f}\n{float(f'{np.interp(at, *spent) / length:.3g}'):g}")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    lower.set_xlim(0.5, max(epochs, default=1) + 0.5)
    save_png(path, figure)


def style(axes: Axes, label: str = "", colour: str = _GREY) -> None:
    """Give axes a grey grid, no frame, and their label in the colour of their curve."""
    axes.set_ylabel(label, color=colour)
    axes.tick_params(axis="y", colors=colour)
    axes.grid(color="0.9")
    axes.spines[["top", "right", "left"]].set_visible(False)


def draw_curve(axes: Axes, x: Values, y: Values, **options: Any) -> list[Any]:  # noqa: ANN401 - matplotlib's
    """Draw a thin line, with marks where it is of few points (one of a single point cannot be seen); return it."""
    return list(axes.plot(x, y, linewidth=1, marker="o" if len(x) <= 10 else "", markersize=3, **options))
