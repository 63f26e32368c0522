"""Overlays: a segmentation drawn over its image, the way a radiologist looks at it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba_array
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from nibabel.affines import from_matvec, voxel_sizes
from nibabel.orientations import apply_orientation, inv_ornt_aff, io_orientation
from numpy.typing import NDArray

from common.observe.plots import one_line, save_png

Array = NDArray[Any]

# Okabe and Ito's colours, which colour-blind readers can tell apart; those that show best on grey come first.
LABEL_COLOURS = ("#E69F00", "#56B4E9", "#F0E442", "#009E73", "#CC79A7", "#D55E00", "#0072B2")
"""Of the labels 1, 2, ..., in turn (Okabe and Ito)."""
_PLANES = ("sagittal, x", "coronal, y", "axial, z")  # by the axis they cut
_EDGES = ("APSI", "RLSI", "RLAP")  # which side of the patient is at the left, right, top and bottom of each
_EDGE_PLACES = (
    (0.02, 0.5, "left", "center"), (0.98, 0.5, "right", "center"), (0.5, 0.98, "center", "top"),
    (0.5, 0.02, "center", "bottom"),
)  # fmt: skip
_STROKE = [withStroke(linewidth=2, foreground="black")]
_ON_IMAGE: dict[str, Any] = {"color": "white", "fontsize": 8, "path_effects": _STROKE}
_WIDTH, _MARGIN, _GAP = 9.0, 0.12, 0.08  # inches
_TITLE, _CAPTION, _LEGEND_ROW = 0.32, 0.19, 0.20  # heights in inches
_NARROWEST = 1.3  # inches of width that a caption needs
_LEGEND_COLUMNS, _CLOSE_UPS = 6, 6
_CLOSE_UP_MARGIN = 25.0  # mm around the foreground


@dataclass(frozen=True)
class Scan:
    """What is drawn, its axes turned to R, A, S."""

    image: Array  # [X, Y, Z]
    labels: Array
    truth: Array | None
    affine: NDArray[np.float64]
    window: tuple[float, float]
    extent: tuple[tuple[int, int], ...]  # first and last voxel of the foreground (labels or truth) along each axis
    largest: tuple[int, ...]  # slice with the largest foreground across each axis

    @property
    def spacing(self) -> NDArray[np.float64]:
        """Return the voxel's sides in mm."""
        return np.asarray(voxel_sizes(self.affine), dtype=np.float64)

    def cropped(self, low: Sequence[int], high: Sequence[int]) -> "Scan":
        """Return the box from `low` up to, and without, `high`; the foreground lies in it."""
        box = tuple(slice(first, last) for first, last in zip(low, high, strict=True))
        truth = None if self.truth is None else self.truth[box]
        affine = self.affine @ from_matvec(np.eye(3), low)
        extent = tuple((first - start, last - start) for (first, last), start in zip(self.extent, low, strict=True))
        largest = tuple(place - start for place, start in zip(self.largest, low, strict=True))
        return Scan(self.image[box], self.labels[box], truth, affine, self.window, extent, largest)

    def size(self, plane: int) -> tuple[float, float]:
        """Return width and height in mm of a slice across the axis `plane`."""
        across, up = np.delete(self.image.shape * self.spacing, plane)
        return float(across), float(up)

    def caption(self, plane: int, index: int) -> str:
        """Name a slice and where it lies: the RAS coordinate of its middle."""
        voxel = np.array([*((side - 1) / 2 for side in self.image.shape), 1.0])
        voxel[plane] = index
        return f"{_PLANES[plane]} = {(self.affine @ voxel)[plane]:.0f} mm"


def picture(volume: Array, plane: int, index: int) -> Array:
    """Return a slice across an axis as rows from the top: R (or A) on the left, A (or S) at the top."""
    part: Array = np.moveaxis(volume, plane, 0)[index]
    return part.T[::-1, ::-1]


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
    assert all(volume.shape == image.shape for volume in (labels, truth) if volume is not None), image.shape
    scan = oriented_scan(image, labels, truth, affine, window)
    body, close = body_of(scan), close_up_of(scan)
    planes = [(plane, body.largest[plane]) for plane in (2, 1, 0)]
    # Not the ends of the foreground, where there is next to nothing to see.
    slices = np.linspace(*close.extent[2], _CLOSE_UPS + 2)[1:-1]
    close_ups = [(2, index) for index in sorted({round(each) for each in slices})]
    rows = ((body, planes, *_fitted(body, planes, 3.3)), (close, close_ups, *_fitted(close, close_ups, 1.6)))
    handles = _legend_handles(scan, names)
    legend = _LEGEND_ROW * -(-len(handles) // _LEGEND_COLUMNS)
    total = _TITLE + sum(height + _GAP for *_, height in rows) + legend + _MARGIN
    figure = Figure(figsize=(_WIDTH, total), dpi=130)
    heading = one_line(title, 75) + ("" if labels.any() else "   (no foreground predicted)")
    figure.text(_MARGIN / _WIDTH, 1 - 0.2 / total, heading, fontsize=10, weight="bold", va="center", parse_math=False)
    top = total - _TITLE
    for part, shown, scale, height in rows:
        _draw_row(figure, part, shown, scale, top)
        top -= height + _GAP
    drawn = figure.legend(handles=handles, loc="lower left", ncols=_LEGEND_COLUMNS, frameon=False, fontsize=8)
    for text in drawn.get_texts():
        text.set_parse_math(False)
    save_png(path, figure)


def oriented_scan(
    image: Array, labels: Array, truth: Array | None, affine: NDArray[np.float64], window: tuple[float, float] | None
) -> Scan:
    """Turn the axes to the nearest of R, A, S (views, no copies) and find the foreground; see `draw_overlay`."""
    turn = io_orientation(affine)
    affine = affine @ inv_ornt_aff(turn, image.shape)
    image, labels = apply_orientation(image, turn), apply_orientation(labels, turn)
    truth = None if truth is None else apply_orientation(truth, turn)
    foreground = labels != 0 if truth is None else (labels != 0) | (truth != 0)
    extent, largest = [], []
    for axis in range(3):
        area = np.count_nonzero(foreground, axis=tuple(other for other in range(3) if other != axis))
        filled = np.flatnonzero(area)
        extent.append((int(filled[0]), int(filled[-1])) if len(filled) else (0, len(area) - 1))
        largest.append(int(area.argmax()) if len(filled) else len(area) // 2)
    return Scan(image, labels, truth, affine, window or _window(image), tuple(extent), tuple(largest))


def _sampled(image: Array) -> tuple[Array, int]:
    """Return about a million voxels of an image, and how far apart they are."""
    step = max(1, round((image.size / 1e6) ** (1 / 3)))
    return image[::step, ::step, ::step].astype(np.float32), step


def _window(image: Array) -> tuple[float, float]:
    """Return the percentiles 0.5 and 99.5 of the voxels above the minimum."""
    sample, _ = _sampled(image)
    tissue = sample[sample > sample.min()]
    low, high = np.percentile(tissue, [0.5, 99.5]) if len(tissue) else (sample.min(), sample.min())
    return float(low), float(high) if high > low else float(low) + 1


def body_of(scan: Scan) -> Scan:
    """Return the box that holds the foreground and whatever is brighter than black: no air around a patient."""
    sample, step = _sampled(scan.image)
    low, high = [], []
    for axis, (first, last) in enumerate(scan.extent):
        others = tuple(other for other in range(3) if other != axis)
        filled = step * np.flatnonzero((sample > scan.window[0]).any(axis=others))
        low.append(min(first, int(filled.min(initial=first))))
        high.append(min(max(last, int(filled.max(initial=last)) + step - 1) + 1, scan.image.shape[axis]))
    return scan.cropped(low, high)


def close_up_of(scan: Scan) -> Scan:
    """Return the columns about the foreground, as wide as high."""
    side = max((last + 1 - first) * mm for (first, last), mm in zip(scan.extent[:2], scan.spacing, strict=False))
    low, high = [0, 0, 0], list(scan.image.shape)
    for axis, (first, last) in enumerate(scan.extent[:2]):
        voxels = min(high[axis], round((side + 2 * _CLOSE_UP_MARGIN) / scan.spacing[axis]))
        low[axis] = int(np.clip((first + last + 1) // 2 - voxels // 2, 0, high[axis] - voxels))
        high[axis] = low[axis] + voxels
    return scan.cropped(low, high)


def _fitted(scan: Scan, shown: Sequence[tuple[int, int]], tallest: float) -> tuple[float, float]:
    """Return the inches of a mm that fill the width, unless a panel were then too tall, and the row's height."""
    widths, heights = zip(*(scan.size(plane) for plane, _ in shown), strict=True)
    free = _WIDTH - 2 * _MARGIN - _GAP * (len(shown) - 1)
    scale = min(free / sum(widths), tallest / max(heights))
    return scale, scale * max(heights) + _CAPTION


def _draw_row(figure: Figure, scan: Scan, shown: Sequence[tuple[int, int]], scale: float, top: float) -> None:
    """Draw slices side by side whose captions begin `top` inches above the figure's foot."""
    width, total = figure.get_size_inches()
    left = _MARGIN
    for number, (plane, index) in enumerate(shown):
        across, up = (scale * side for side in scan.size(plane))
        axes = figure.add_axes((left / width, (top - _CAPTION - up) / total, across / width, up / total))
        _draw_slice(axes, scan, plane, index)
        axes.set_title(scan.caption(plane, index), fontsize=7.5, loc="left", pad=2)
        if number == 0:
            _draw_scale_bar(axes, scan.size(plane)[0])
        if number == 0 or plane != 2:
            letters = _EDGES[plane][: 4 if up > 0.6 else 2]  # a low slice has room for two
            for letter, (x, y, horizontal, vertical) in zip(letters, _EDGE_PLACES, strict=False):
                axes.text(x, y, letter, ha=horizontal, va=vertical, transform=axes.transAxes, **_ON_IMAGE)
        left += max(across, _NARROWEST) + _GAP


def _draw_slice(axes: Axes, scan: Scan, plane: int, index: int) -> None:
    """Draw one slice in grey, the prediction filled and the truth outlined; the axes are in mm, y up."""
    width, height = scan.size(plane)
    place: dict[str, Any] = {"extent": (0, width, 0, height), "aspect": "auto"}
    grey = picture(scan.image, plane, index).astype(np.float32)
    axes.imshow(grey, cmap="gray", vmin=scan.window[0], vmax=scan.window[1], interpolation="bilinear", **place)
    labels = picture(scan.labels, plane, index)
    fill = to_rgba_array(LABEL_COLOURS, 0.45)[(labels.astype(int) - 1) % len(LABEL_COLOURS)]
    axes.imshow(np.where(labels[..., None] > 0, fill, 0), interpolation="nearest", **place)
    if scan.truth is not None:
        truth = picture(scan.truth, plane, index)
        # A frame of background closes the outlines at the panel's edge.
        rows, columns = (np.arange(-1, side + 1) + 0.5 for side in truth.shape)
        x, y = columns * width / truth.shape[1], height - rows * height / truth.shape[0]
        for label in _labels_in(truth):
            axes.contour(x, y, np.pad(truth == label, 1), levels=[0.5], colors=[_colour(label)], linewidths=1.2)
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.set_axis_off()


def _draw_scale_bar(axes: Axes, width: float) -> None:
    """Draw a bar of a round length, at most a fifth of the panel's width in mm, at the lower right."""
    length = max((mm for mm in (1, 2, 5, 10, 20, 50, 100) if mm <= 0.2 * width), default=1)
    end, foot = 0.97 * width, 0.03 * width
    axes.plot([end - length, end], [foot, foot], color="white", linewidth=1.5, path_effects=_STROKE)
    axes.text(end, foot * 1.5, f"{length} mm", ha="right", va="bottom", **_ON_IMAGE)


def _legend_handles(scan: Scan, names: Sequence[str]) -> list[Patch | Line2D]:
    """Return one colour patch for each label that occurs, and what filled and outlined mean."""
    occurring = {*_labels_in(scan.labels), *([] if scan.truth is None else _labels_in(scan.truth))}
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
    return [int(label) for label in np.unique(labels[labels > 0])]


def _colour(label: int) -> str:
    return LABEL_COLOURS[(label - 1) % len(LABEL_COLOURS)]
