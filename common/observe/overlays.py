"""Overlays: a segmentation drawn over its image, the way a radiologist looks at it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from nibabel.affines import voxel_sizes
from nibabel.orientations import apply_orientation, inv_ornt_aff, io_orientation
from numpy.typing import NDArray
from PIL import Image, ImageColor, ImageDraw, ImageFilter, ImageFont, ImageOps

from medspeed.common.files import atomic_path, printable

Array = NDArray[Any]
Floats = NDArray[np.float64]
Box = tuple[slice, ...]

LABEL_COLOURS = ("#E69F00", "#56B4E9", "#F0E442", "#009E73", "#CC79A7", "#D55E00", "#0072B2", "#999933", "#882255")
"""Of labels 1, 2, ..., in turn: Okabe and Ito's, then Tol's, for colour-blind readers; the best on grey come first."""
_OPACITY = 0.45  # of the prediction's fill
_EXTREMES = ImageFilter.MinFilter, ImageFilter.MaxFilter
_PLANES = ("sagittal, x", "coronal, y", "axial, z")  # by the axis they cut
_EDGES = ("APSI", "RLSI", "RLAP")  # which side of the patient is at the left, right, top and bottom of each
_EDGE_PLACES = ((0.02, 0.5, "lm"), (0.98, 0.5, "rm"), (0.5, 0.02, "mt"), (0.5, 0.98, "mb"))
# Pixels, at 130 to an inch: of the page, and the heights of title, caption and legend's row; a caption's least width.
_WIDTH, _MOST_HEIGHT, _MARGIN, _GAP = 1170, 4000, 16, 10
_TITLE, _CAPTION, _LEGEND_ROW, _NARROWEST = 42, 25, 26, 169
_PLANES_HEIGHT, _CLOSE_UPS_HEIGHT = 429, 208  # at most
_CLOSE_UPS = 6
_CLOSE_UP_MARGIN = 25.0  # mm around the foreground


@dataclass(frozen=True)
class Scan:
    """What is drawn, its axes turned to R, A, S."""

    image: Array  # [X, Y, Z]
    labels: Array
    truth: Array | None
    affine: Floats
    spacing: Floats  # mm
    window: tuple[float, float]
    extent: tuple[tuple[int, int], ...]  # first and last voxel of the foreground (labels or truth) along each axis
    largest: tuple[int, ...]  # slice with the largest foreground across each axis

    def caption(self, box: Box, plane: int, index: int) -> str:
        """Name a slice of a box and where it lies: the RAS coordinate of its middle."""
        voxel = np.array([*((side.start + side.stop - 1) / 2 for side in box), 1.0])
        voxel[plane] = index
        return f"{_PLANES[plane]} = {(self.affine @ voxel)[plane]:.0f} mm"


@cache
def font(pixels: float) -> ImageFont.FreeTypeFont:
    """Return DejaVu Sans of a size, which matplotlib brings along; matplotlib itself is not loaded."""
    (folder,) = find_spec("matplotlib").submodule_search_locations  # type: ignore[union-attr, misc]
    file = Path(folder) / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"
    return ImageFont.truetype(file, pixels, layout_engine=ImageFont.Layout.BASIC)


def picture(volume: Array, box: Box, plane: int, index: int) -> Array:
    """Return a slice of a box across an axis as rows from the top: R (or A) on the left, A (or S) at the top."""
    part: Array = np.moveaxis(volume, plane, 0)[index][box[:plane] + box[plane + 1 :]]
    return part.T[::-1, ::-1]


def draw_overlay(path: Path, scan: Scan, names: Sequence[str] = (), title: str = "") -> None:
    """Draw a segmentation over its image as a PNG: three orthogonal planes above, axial close-ups below.

    The planes cut the foreground where it is largest (else the image's middle), all at one scale. The prediction is
    filled, the truth outlined. The patient's right is on the left, and anterior or superior is up. `names` are those of
    the labels, by number; they and the title are drawn as they are, without markup.
    """
    # Not the ends of the foreground, where there is next to nothing to see.
    slices = sorted({round(each) for each in np.linspace(*scan.extent[2], _CLOSE_UPS + 2)[1:-1]})
    planes = [(plane, scan.largest[plane]) for plane in (2, 1, 0)]
    page = Image.new("RGB", (_WIDTH, _MOST_HEIGHT), "white")
    heading = printable(title)[:75] + ("" if scan.labels.any() else "   (no foreground predicted)")
    _write(page, (_MARGIN, _TITLE // 2 + 5), heading, 10, "lm")
    top = _draw_row(page, scan, tuple(slice(0, side) for side in scan.image.shape), planes, _PLANES_HEIGHT, _TITLE)
    top = _draw_row(page, scan, close_up_of(scan), [(2, index) for index in slices], _CLOSE_UPS_HEIGHT, top)
    page = page.crop((0, 0, _WIDTH, _draw_legend(page, scan, names, top) + _MARGIN))
    # In 192 colours, for a quarter of the size. Maximum coverage keeps rare ones (a small structure); the median cut
    # gives nearly all of them to the greys.
    page = page.quantize(192, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    with atomic_path(path) as part:
        page.save(part, format="PNG")  # zlib's best level takes eight times as long for 3 percent


def oriented_scan(
    image: Array, labels: Array, affine: Floats, truth: Array | None = None, window: tuple[float, float] | None = None
) -> Scan:
    """Turn the axes to the nearest of R, A, S (views, no copies) and find the foreground, of labels and truth.

    Args:
        image: intensities [X, Y, Z], any real dtype.
        labels: predicted labels [X, Y, Z], integers; 0 is background.
        affine: voxel index to RAS mm, [4, 4], any orientation; `np.diag([*spacing, 1])` for arrays in R, A, S.
        truth: true labels [X, Y, Z], where known.
        window: intensities drawn black and white; by default percentiles 0.5 and 99.5 of what is not darkest.
    """
    assert all(volume.shape == image.shape for volume in (labels, truth) if volume is not None), image.shape
    turn = io_orientation(affine)
    affine = affine @ inv_ornt_aff(turn, image.shape)
    image, labels = apply_orientation(image, turn), apply_orientation(labels, turn)
    truth = None if truth is None else apply_orientation(truth, turn)
    foreground = labels != 0 if truth is None else (labels != 0) | (truth != 0)
    extent, largest = [], []
    for axis in range(3):
        area = np.count_nonzero(foreground, axis=tuple({0, 1, 2} - {axis}))
        filled = np.flatnonzero(area)
        extent.append((int(filled[0]), int(filled[-1])) if len(filled) else (0, len(area) - 1))
        largest.append(int(area.argmax()) if len(filled) else len(area) // 2)
    spacing = np.asarray(voxel_sizes(affine), dtype=np.float64)
    return Scan(image, labels, truth, affine, spacing, window or _window(image), tuple(extent), tuple(largest))


def _window(image: Array) -> tuple[float, float]:
    """Return the percentiles 0.5 and 99.5 of about a million voxels above the minimum."""
    step = max(1, round((image.size / 1e6) ** (1 / 3)))
    sample = image[::step, ::step, ::step].astype(np.float32)
    tissue = sample[sample > sample.min()]
    low, high = np.percentile(tissue, [0.5, 99.5]) if len(tissue) else (sample.min(), sample.min())
    return float(low), float(high) if high > low else float(low) + max(1.0, abs(float(low)) / 1e6)


def close_up_of(scan: Scan) -> Box:
    """Return the columns about the foreground, as wide as high."""
    side = max((last + 1 - first) * mm for (first, last), mm in zip(scan.extent[:2], scan.spacing, strict=False))
    box = []
    for axis, (first, last) in enumerate(scan.extent[:2]):
        voxels = min(scan.image.shape[axis], round((side + 2 * _CLOSE_UP_MARGIN) / scan.spacing[axis]))
        low = int(np.clip((first + last + 1) // 2 - voxels // 2, 0, scan.image.shape[axis] - voxels))
        box.append(slice(low, low + voxels))
    return *box, slice(0, scan.image.shape[2])


def _write(page: Image.Image, at: tuple[float, float], text: str, points: float, anchor: str, stroke: int = 0) -> None:
    """Write a text at a place: black, or white with a black stroke of so many pixels."""
    face, colour = font(points * 130 / 72), "white" if stroke else "black"
    ImageDraw.Draw(page).text(at, text, colour, face, anchor, stroke_width=stroke, stroke_fill="black")


def _draw_row(page: Image.Image, scan: Scan, box: Box, shown: Sequence[tuple[int, int]], tallest: int, top: int) -> int:
    """Draw slices (plane, index) side by side below captions, as large as the page is wide; return where they end."""
    sides = [side.stop - side.start for side in box] * scan.spacing  # mm
    widths, heights = np.array([np.delete(sides, plane) for plane, _ in shown]).T.tolist()
    free = _WIDTH - 2 * _MARGIN - _GAP * (len(shown) - 1)
    scale = min(free / sum(widths), tallest / max(heights))  # pixels of a mm
    left, upper = float(_MARGIN), top + _CAPTION
    for number, (plane, index) in enumerate(shown):
        across, up = scale * widths[number], scale * heights[number]
        page.paste(_slice(scan, box, plane, index, (max(1, round(across)), max(1, round(up)))), (round(left), upper))
        _write(page, (min(left, _WIDTH - _MARGIN - _NARROWEST), upper - 4), scan.caption(box, plane, index), 7.5, "ls")
        if number == 0:
            _draw_scale_bar(page, left + 0.97 * across, upper + 0.97 * up, widths[0], scale)
        if number == 0 or plane != 2:
            letters = _EDGES[plane][: 4 if up > 78 else 2]  # a low slice has room for two
            for letter, (x, y, anchor) in zip(letters, _EDGE_PLACES, strict=False):
                _write(page, (left + x * across, upper + y * up), letter, 8, anchor, stroke=2)
        left += max(across, _NARROWEST) + _GAP
    return int(upper + scale * max(heights)) + _GAP


def _slice(scan: Scan, box: Box, plane: int, index: int, size: tuple[int, int]) -> Image.Image:
    """Return one slice in grey, of a size in pixels, the prediction filled and the truth outlined."""
    low, high = scan.window
    shades = (picture(scan.image, box, plane, index).astype(np.float32) - low) * (255 / (high - low))
    grey = Image.fromarray(shades.clip(0, 255).astype(np.uint8)).resize(size, Image.Resampling.BILINEAR)
    drawn, colours = np.array(grey.convert("RGB")), np.array([*map(ImageColor.getrgb, LABEL_COLOURS)])
    labels = Image.fromarray(picture(scan.labels, box, plane, index).astype(np.uint8))
    filled = np.asarray(labels.resize(size, Image.Resampling.NEAREST))
    fill = colours[(filled[filled > 0] - 1) % len(colours)]
    drawn[filled > 0] = (1 - _OPACITY) * drawn[filled > 0] + _OPACITY * fill
    if scan.truth is not None:
        truth = Image.fromarray(picture(scan.truth, box, plane, index).astype(np.uint8))
        truth = truth.resize([*map(max, size, truth.size)], Image.Resampling.NEAREST)  # thick slices are not widened
        thin = truth.filter(ImageFilter.MaxFilter(3)) if truth.size != size else truth  # else lost between pixels
        outlined = ImageOps.expand(thin.resize(size, Image.Resampling.NEAREST), 1)  # closed at the panel's edge
        least, most = (np.asarray(outlined.filter(each(3)))[1:-1, 1:-1] for each in _EXTREMES)
        drawn[least < most] = colours[(most[least < most] - 1) % len(colours)]
    return Image.fromarray(drawn)


def _draw_scale_bar(page: Image.Image, right: float, foot: float, width: float, scale: float) -> None:
    """Draw a bar that ends there and has a round length, at most a fifth of the panel's width in mm."""
    length = max((mm for mm in (1, 2, 5, 10, 20, 50, 100) if mm <= 0.2 * width), default=1)
    bar = tuple(map(round, (right - scale * length - 1, foot - 2, right + 1, foot + 2)))
    ImageDraw.Draw(page).rectangle(bar, "white", "black")
    _write(page, (right, foot - 5), f"{length} mm", 8, "rs", stroke=2)


def _draw_legend(page: Image.Image, scan: Scan, names: Sequence[str], top: int) -> int:
    """Draw a key for each label that occurs, and for filled and outlined; return where they end."""
    pen, face, left = ImageDraw.Draw(page), font(8 * 130 / 72), _MARGIN
    volumes = [scan.labels] if scan.truth is None else [scan.labels, scan.truth]
    box = tuple(slice(first, last + 1) for first, last in scan.extent)
    keys = []
    for label in sorted({int(each) for volume in volumes for each in np.unique(volume[box].ravel(order="K")) if each}):
        name = names[label] if label < len(names) else f"label {label}"
        keys.append((5, LABEL_COLOURS[(label - 1) % len(LABEL_COLOURS)], f"{label}: {printable(name)[:20]}"))
    keys += [(5, "#C6C6C6", "filled: prediction"), (1, "#808080", "outlined: reference")][: len(volumes)]
    for half, colour, text in keys:
        width = 65 + round(face.getlength(text))
        if left > _MARGIN and left + width > _WIDTH:
            left, top = _MARGIN, top + _LEGEND_ROW
        middle = top + _LEGEND_ROW // 2
        pen.rectangle((left, middle - half, left + 30, middle + half), colour)
        _write(page, (left + 39, middle), text, 8, "lm")
        left += width
    return top + _LEGEND_ROW
