"""Overlays: a segmentation drawn over its image, the way a radiologist looks at it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray

from common.observe.figures import one_line, save_png
from common.observe.planes import Array, Panel, Scan, oriented_scan, panel_columns

# Okabe and Ito's colours, which colour-blind readers can tell apart; those that show best on grey come first.
LABEL_COLOURS = ("#E69F00", "#56B4E9", "#F0E442", "#009E73", "#CC79A7", "#D55E00", "#0072B2")
"""Of the labels 1, 2, ..., in turn (Okabe and Ito)."""
_EDGES = (("A", "P", "S", "I"), ("R", "L", "S", "I"), ("R", "L", "A", "P"))  # left, right, top, bottom
_LETTER_PLACES = (
    (0.02, 0.5, "left", "center"),
    (0.98, 0.5, "right", "center"),
    (0.5, 0.98, "center", "top"),
    (0.5, 0.02, "center", "bottom"),
)
_STROKE = [withStroke(linewidth=2, foreground="black")]
_ON_IMAGE: dict[str, Any] = {"color": "white", "fontsize": 8, "path_effects": _STROKE}
_WIDTH, _MARGIN, _GAP = 9.0, 0.12, 0.08  # inches
_TITLE, _CAPTION, _LEGEND_ROW = 0.32, 0.19, 0.20  # heights in inches
_ROW_HEIGHTS = (3.3, 1.6)  # at most, in inches: the planes, the close-ups
_NARROWEST = 1.3  # inches of width that a caption needs
_LEGEND_COLUMNS = 6


def draw_overlay(
    path: Path,
    image: Array,
    labels: Array,
    affine: NDArray[np.float64],
    *,
    truth: Array | None = None,
    names: Sequence[str] = (),
    window: tuple[float, float] | None = None,
    title: str = "",
) -> None:
    """Draw a segmentation over its image as a PNG: three orthogonal planes above, axial close-ups below.

    The planes cut the foreground where it is largest (the middle of the image where there is none), all at one scale.
    The prediction is filled, the truth outlined. As radiologists are used to, the patient's right is on the left, and
    anterior or superior is up.

    Args:
        path: PNG file to write.
        image: intensities [X, Y, Z], any real dtype.
        labels: predicted labels [X, Y, Z]; 0 is background.
        affine: voxel index to RAS mm, [4, 4], any orientation; `np.diag([*spacing, 1])` for arrays in R, A, S.
        truth: true labels [X, Y, Z], where known.
        names: name of each label, by its number; drawn as they are, without markup.
        window: intensities that are drawn black and white; by default the percentiles 0.5 and 99.5 of what is not
            darkest.
        title: one line above.

    Raises:
        OSError: the folder cannot be written or the disk is full.
    """
    assert image.ndim == 3, image.shape
    assert all(volume.shape == image.shape for volume in (labels, truth) if volume is not None), image.shape
    scan = oriented_scan(image, labels, truth, affine, window)
    handles = _legend_handles(scan, names)
    rows = [_Row(scan, columns, tallest) for columns, tallest in zip(panel_columns(scan), _ROW_HEIGHTS, strict=True)]
    legend_rows = -(-len(handles) // _LEGEND_COLUMNS)
    total = _TITLE + sum(row.height + _GAP for row in rows) + _LEGEND_ROW * legend_rows + _MARGIN
    figure = Figure(figsize=(_WIDTH, total), dpi=130)
    heading = one_line(title, 75) + ("" if labels.any() else "   (no foreground predicted)")
    figure.text(_MARGIN / _WIDTH, 1 - 0.2 / total, heading, fontsize=10, weight="bold", va="center", parse_math=False)
    top = total - _TITLE
    for row in rows:
        _draw_row(figure, scan, row, top)
        top -= row.height + _GAP
    legend = figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, 0), ncols=_LEGEND_COLUMNS, frameon=False, fontsize=8
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    save_png(path, figure)


class _Row:
    """Columns of panels side by side, at one scale."""

    def __init__(self, scan: Scan, columns: list[list[Panel]], tallest: float) -> None:
        """Choose the scale that fills the width, unless a column of images would then exceed `tallest` inches."""
        sizes = [[panel.millimetres(scan) for panel in column] for column in columns]
        widths = [max(width for width, _ in column) for column in sizes]
        heights = [sum(height for _, height in column) for column in sizes]
        free = _WIDTH - 2 * _MARGIN - _GAP * (len(columns) - 1)
        self.columns, self.scale = columns, min(free / sum(widths), tallest / max(heights))  # inches per mm
        self.widths = [max(self.scale * width, _NARROWEST) for width in widths]
        self.height = max(
            self.scale * height + _CAPTION * len(column) + _GAP * (len(column) - 1)
            for height, column in zip(heights, columns, strict=True)
        )


def _draw_row(figure: Figure, scan: Scan, row: _Row, top: float) -> None:
    """Draw the panels of a row whose captions begin `top` inches above the figure's foot."""
    width, total = figure.get_size_inches()
    left = _MARGIN
    for column, column_width in zip(row.columns, row.widths, strict=True):
        foot = top
        for panel in column:
            across, up = (row.scale * side for side in panel.millimetres(scan))
            foot -= _CAPTION + up
            axes = figure.add_axes((left / width, foot / total, across / width, up / total))
            _draw_panel(axes, scan, panel)
            axes.set_title(panel.caption(scan), fontsize=7.5, loc="left", pad=2)
            if column is row.columns[0]:
                _draw_scale_bar(axes, panel.millimetres(scan)[0])
            if column is row.columns[0] or panel.plane != 2:
                _draw_letters(axes, _EDGES[panel.plane][: 4 if up > 0.6 else 2])
            foot -= _GAP
        left += column_width + _GAP


def _draw_panel(axes: Axes, scan: Scan, panel: Panel) -> None:
    """Draw one slice in grey, the prediction filled and the truth outlined; the axes are in mm, y up."""
    width, height = panel.millimetres(scan)
    place: dict[str, Any] = {"extent": (0, width, 0, height), "aspect": "auto"}
    grey = panel.picture(scan.image).astype(np.float32)
    axes.imshow(grey, cmap="gray", vmin=scan.window[0], vmax=scan.window[1], interpolation="bilinear", **place)
    labels = panel.picture(scan.labels)
    fill = np.zeros((*labels.shape, 4))
    for label in _labels_in(labels):
        fill[labels == label] = (*to_rgb(_colour(label)), 0.45)
    axes.imshow(fill, interpolation="nearest", **place)
    if scan.truth is not None:
        truth = panel.picture(scan.truth)
        # A frame of background closes the outlines at the panel's edge.
        rows, columns = (np.arange(-1, side + 1) + 0.5 for side in truth.shape)
        x, y = columns * width / truth.shape[1], height - rows * height / truth.shape[0]
        for label in _labels_in(truth):
            axes.contour(x, y, np.pad(truth == label, 1), levels=[0.5], colors=[_colour(label)], linewidths=1.2)
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.set_axis_off()


def _draw_letters(axes: Axes, letters: Sequence[str]) -> None:
    """Write which side of the patient the left, right, top and bottom edges are; a low panel has letters for two."""
    for letter, (x, y, horizontal, vertical) in zip(letters, _LETTER_PLACES, strict=False):
        axes.text(x, y, letter, ha=horizontal, va=vertical, transform=axes.transAxes, **_ON_IMAGE)


def _draw_scale_bar(axes: Axes, width: float) -> None:
    """Draw a bar of a round length, at most a fifth of the panel's width in mm, at the lower right."""
    length = max((mm for mm in (1, 2, 5, 10, 20, 50, 100) if mm <= 0.2 * width), default=1)
    end = 0.97 * width
    foot = 0.03 * width
    axes.plot([end - length, end], [foot, foot], color="white", linewidth=1.5, path_effects=_STROKE)
    axes.text(end, foot * 1.5, f"{length} mm", ha="right", va="bottom", **_ON_IMAGE)


def _legend_handles(scan: Scan, names: Sequence[str]) -> list[Patch | Line2D]:
    """Return one colour patch for each label that occurs, and what filled and outlined mean."""
    inside = tuple(slice(first, last + 1) for first, last in scan.extent)
    occurring = set(_labels_in(scan.labels[inside]))
    if scan.truth is not None:
        occurring |= set(_labels_in(scan.truth[inside]))
    handles: list[Patch | Line2D] = []
    for label in sorted(occurring):
        name = names[label] if label < len(names) else f"label {label}"
        handles.append(Patch(color=_colour(label), label=f"{label}: {one_line(name, 20)}"))
    handles.append(Patch(color="grey", alpha=0.45, linewidth=0, label="filled: prediction"))
    if scan.truth is not None:
        handles.append(Line2D([], [], color="grey", linewidth=1.2, label="outlined: truth"))
    return handles


def _labels_in(labels: Array) -> list[int]:
    """Return the labels above background that occur."""
    return [int(label) for label in np.unique(labels) if label > 0]


def _colour(label: int) -> str:
    return LABEL_COLOURS[(label - 1) % len(LABEL_COLOURS)]
