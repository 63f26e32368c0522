"""Curves: how a training run goes, in one picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from common.observe.figures import save_png

_LOSS, _METRIC, _TIME = "#0072B2", "#D55E00", "#555555"


def draw_progress(path: Path, records: Sequence[Mapping[str, Any]], metric: str = "Dice") -> None:
    """Draw loss, validation metric and epoch time over the epochs as a PNG.

    The loss is drawn light as it was and dark smoothed; the metric, on its own axis, with a mark for each validation
    and a star for the best one. No records give empty axes; a value that is missing or not finite leaves a gap.

    Args:
        path: PNG file to write.
        records: one for each epoch, in order: "epoch" (from 1), "loss" (mean over the epoch), "seconds", and the
            metric in [0, 1], by its name in small letters, where the epoch was validated.
        metric: name of what the validations measured.

    Raises:
        OSError: the folder cannot be written or the disk is full.
    """
    names = ("epoch", "loss", metric.lower(), "seconds")
    epochs, loss, values, seconds = (_column(records, name) for name in names)
    figure = Figure(figsize=(8, 6), dpi=120, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    _draw_loss_and_metric(upper, epochs, loss, values, metric)
    _style(lower, "epoch time (s)", _TIME)
    lower.plot(epochs, seconds, color=_TIME, linewidth=1, **_marked(epochs))
    lower.set_ylim(bottom=0, top=1.15 * max(seconds[np.isfinite(seconds)], default=1.0))
    lower.set_xlabel("epoch")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    lower.set_xlim(0.5, max(epochs, default=1) + 0.5)
    save_png(path, figure)


def smoothed(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a curve's Gaussian moving mean, sigma a 40th of its length but at least 1; gaps (NaN) stay gaps.

    The mean is centred, so that it does not lag behind a falling loss, and at the ends it is over what there is.
    """
    if not len(values):
        return values
    sigma = max(1.0, len(values) / 40)
    reach = int(np.ceil(3 * sigma))
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    present = np.isfinite(values)
    total, weight = (
        np.convolve(part, kernel)[reach : reach + len(values)] for part in (np.where(present, values, 0.0), present)
    )
    smooth = np.full(len(values), np.nan)
    smooth[present] = total[present] / weight[present]
    return smooth


def _draw_loss_and_metric(
    axes: Axes, epochs: NDArray[np.float64], loss: NDArray[np.float64], values: NDArray[np.float64], metric: str
) -> None:
    _style(axes, "loss", _LOSS)
    axes.plot(epochs, loss, color=_LOSS, alpha=0.35, linewidth=1, label="loss", **_marked(epochs))
    axes.plot(epochs, smoothed(loss), color=_LOSS, linewidth=1.8, label="loss, smoothed", **_marked(epochs))
    handles = axes.get_lines()
    validated = np.isfinite(values)
    if validated.any():
        right = axes.twinx()
        _style(right, f"validation {metric}", _METRIC)
        right.grid(visible=False)
        right.set_ylim(0, 1.02)
        size = 4 if validated.sum() <= 60 else 1.5
        line = right.plot(epochs[validated], values[validated], color=_METRIC, linewidth=1, marker="o", markersize=size)
        best = int(np.nanargmax(values))
        label = f"best {metric} {values[best]:.4f} (epoch {epochs[best]:.0f})"
        star = right.plot(epochs[best], values[best], "*", color=_METRIC, markersize=12, markeredgecolor="black")
        line[0].set_label(metric)
        star[0].set_label(label)
        handles = [*handles, *line, *star]
    # Above the axes, where the curves cannot run under it.
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False, fontsize=9)


def _column(records: Sequence[Mapping[str, Any]], name: str) -> NDArray[np.float64]:
    """Return one value of each record as float64; NaN where it is missing, None or not finite."""
    values = np.array([np.nan if record.get(name) is None else record[name] for record in records], dtype=np.float64)
    values[~np.isfinite(values)] = np.nan
    return values


def _marked(epochs: NDArray[np.float64]) -> dict[str, Any]:
    """Return the style that marks single points while there are few: a line of one point cannot be seen."""
    return {"marker": "o", "markersize": 3} if len(epochs) <= 10 else {}


def _style(axes: Axes, label: str, colour: str) -> None:
    axes.set_ylabel(label, color=colour)
    axes.tick_params(axis="y", colors=colour)
    axes.grid(color="0.9")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
