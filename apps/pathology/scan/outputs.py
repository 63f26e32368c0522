"""What a scan leaves of a slide: the map as TIFF, what was detected as CSV and GeoJSON, and a picture.

Files are written atomically; OSError says that the folder cannot be written, or that the disk is full.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tifffile
from matplotlib.figure import Figure
from scipy.ndimage import find_objects, label

from apps.pathology.scan.froc import DETECTION_BOX, DETECTION_THRESHOLD, Detections, detect
from apps.pathology.scan.scan import ProbabilityMap
from apps.pathology.slides.masks import low_power
from apps.pathology.slides.reader import Slide
from common.files import atomic_path, write_text
from common.observe.plots import one_line, save_png

Ring = list[tuple[int, int]]
"""Corners (x, y) in cells, the first not repeated; along x the inside lies below (y runs down)."""
_Step = tuple[int, int]
_Side = tuple[tuple[int, int], _Step]

REGION_THRESHOLD = 0.5
BOX_UM = DETECTION_BOX * 64 * 0.243  # MONAI's box is in pixels of level 6 of Camelyon16's slides of 0.243 um
_TUMOUR = {"name": "Tumor", "color": [200, 0, 0]}  # QuPath's own colour for the class
_DPI = 100
_LONGEST = 1600  # pixels of the slide in the picture, which with title and colour bar stays below 2000
_LEAST, _MOST = 0.1, 0.85  # opacity at probability 0 and 1: tissue shows through, and where was looked is seen
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.15, 1.1, 0.45, 0.15  # inches around the slide


def write_probability_tif(path: Path, found: ProbabilityMap, mpp: float | None, slide: str) -> None:
    """Write the map as a tiled TIFF of uint8 (255: probability 1), one pixel a cell.

    Its upper left corner is the slide's, and its resolution tags say the size of a cell, so that QuPath and OpenSlide
    lay it over the slide. Stride, offset and scale stand as JSON in its description.

    Args:
        path: the file.
        found: the map.
        mpp: um per pixel of the slide's level 0; None leaves the resolution open.
        slide: the slide's name.
    """
    place = {"slide": slide, "stride_px": found.stride, "offset_px": found.offset, "mpp": mpp}
    density = None if mpp is None else 1e4 / (mpp * found.stride)
    with atomic_path(path) as part:
        tifffile.imwrite(
            part,
            np.rint(found.values * 255).astype(np.uint8),
            tile=(256, 256),
            photometric="minisblack",
            compression="zlib",  # deflate by its official number
            resolution=None if density is None else (density, density),
            resolutionunit="NONE" if density is None else "CENTIMETER",
            description=json.dumps({**place, "probability_of_255": 1.0}),
            software="medspeed",
            metadata=None,
        )


def find_detections(found: ProbabilityMap, base_mpp: float) -> Detections:
    """Return the peaks of a map in pixels of level 0, the surest first.

    A peak suppresses others in a box of 746 um around it, which on Camelyon16's slides scanned every 64 pixels is
    MONAI's box of 48 cells; of a finer map the box takes more cells.

    Args:
        found: the map.
        base_mpp: um per pixel of level 0.
    """
    box = max(1, round(BOX_UM / (found.stride * base_mpp)))
    peaks = detect(found.values, DETECTION_THRESHOLD, box)
    x, y = (np.floor(found.offset + found.stride * cells).astype(np.int64) for cells in (peaks.x, peaks.y))
    return Detections(x, y, peaks.scores)


def write_detections_csv(path: Path, detections: Detections) -> None:
    """Write detections as Camelyon16 asks for them: rows `score,x,y` in pixels of level 0, no header."""
    rows = zip(detections.scores.tolist(), detections.x.tolist(), detections.y.tolist(), strict=True)
    write_text(path, "".join(f"{score:.6f},{x},{y}\n" for score, x, y in rows))


def read_detections_csv(path: Path) -> Detections:
    """Read what `write_detections_csv` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a row is not `score,x,y`.
    """
    rows = [line.split(",") for line in path.read_text(encoding="utf-8").splitlines()]
    try:
        values = [(float(score), int(x), int(y)) for score, x, y in rows]
    except ValueError as error:
        raise ValueError(f"{path}: rows must be score,x,y ({error}): scan the slide again") from error
    scores, x, y = zip(*values, strict=True) if values else ((), (), ())
    return Detections(np.array(x, np.int64), np.array(y, np.int64), np.array(scores, np.float32))


def write_geojson(path: Path, found: ProbabilityMap, size: tuple[int, int]) -> int:
    """Write the regions of probability 0.5 and more as QuPath's GeoJSON; return how many there are.

    Polygons run along the borders of cells, in pixels of level 0. Cells that touch only at a corner are apart.

    Args:
        path: the file.
        found: the map.
        size: (width, height) of level 0, which cells at the right and lower edge reach beyond.
    """
    labels, count = label(found.values >= REGION_THRESHOLD)
    borders = outline(labels)
    features = []
    for number, place in enumerate(find_objects(labels), 1):
        inside = found.values[place][labels[place] == number]
        rings = [_level_0(ring, found, size) for ring in borders[number]]
        measured = {"max probability": float(inside.max()), "mean probability": float(inside.mean())}
        measured = {name: round(value, 6) for name, value in measured.items()}
        properties = {"objectType": "annotation", "classification": _TUMOUR, "measurements": measured}
        geometry = {"type": "Polygon", "coordinates": rings}
        features.append({"type": "Feature", "geometry": geometry, "properties": properties})
    write_text(path, json.dumps({"type": "FeatureCollection", "features": features}, allow_nan=False) + "\n")
    return int(count)


def draw_heatmap(path: Path, slide: Slide, found: ProbabilityMap) -> None:
    """Draw the slide at low power, the scanned cells over it in the colours of their probability, as a PNG."""
    level = slide.levels[0]
    longest = max(level.width, level.height)
    image, downsample = low_power(slide, max(1.0, longest / _LONGEST))
    scale = min(1.0, _LONGEST / max(image.shape))  # a level between may be larger than asked for
    width, height = (max(side * scale / _DPI, 2.0) for side in (image.shape[1], image.shape[0]))
    total = (width + _LEFT + _RIGHT, height + _TOP + _BOTTOM)
    figure = Figure(figsize=total, dpi=_DPI)
    axes = figure.add_axes((_LEFT / total[0], _BOTTOM / total[1], width / total[0], height / total[1]))
    axes.imshow(image, extent=(0, image.shape[1] * downsample, image.shape[0] * downsample, 0))
    rows, columns = found.values.shape
    extent = (0, columns * found.stride, rows * found.stride, 0)
    opacity = np.where(found.scanned, _LEAST + (_MOST - _LEAST) * found.values, 0)
    drawn = axes.imshow(
        found.values, extent=extent, cmap="viridis", vmin=0, vmax=1, alpha=opacity, interpolation="nearest"
    )
    axes.set_xlim(0, level.width)
    axes.set_ylim(level.height, 0)
    axes.set_axis_off()
    bar_axes = figure.add_axes((1 - 0.9 / total[0], _BOTTOM / total[1], 0.2 / total[0], height / total[1]))
    bar = figure.colorbar(drawn, cax=bar_axes)
    if bar.solids is not None:
        bar.solids.set_alpha(1)
    bar.set_label("probability of tumour", fontsize=9)
    title = f"{one_line(slide.name, 60)}   greatest {found.values.max(initial=0):.3f}"
    figure.text(_LEFT / total[0], 1 - 0.3 / total[1], title, fontsize=10, weight="bold", parse_math=False)
    save_png(path, figure, full_colour=True)


def outline(labels: np.ndarray) -> dict[int, list[Ring]]:
    """Return the borders of each region, along its cells: the outer one, then those of its holes.

    Args:
        labels: [H, W], 0 outside; regions are numbered from 1, and their cells share sides.
    """
    borders: dict[int, list[Ring]] = {}
    for ring, cell in _rings(labels > 0):
        of_region = borders.setdefault(int(labels[cell]), [])
        x, y = np.array(ring).T
        outer = (x * np.roll(y, -1) - y * np.roll(x, -1)).sum() > 0
        of_region.insert(0 if outer else len(of_region), ring)
    return borders


def _rings(mask: np.ndarray) -> Iterator[tuple[Ring, tuple[int, int]]]:
    """Yield each closed border, and one cell (row, column) inside it."""
    sides = _sides(mask)
    done: set[_Side] = set()
    for start, cell in sides.items():
        if start in done:
            continue
        corner, step = start
        ring: Ring = []
        before: _Step | None = None
        while (corner, step) not in done:
            done.add((corner, step))
            if step != before:
                ring.append(corner)
            before, corner = step, (corner[0] + step[0], corner[1] + step[1])
            # Right first: where two cells meet corner to corner, the border stays with its own.
            turns = ((-step[1], step[0]), step, (step[1], -step[0]))
            step = next(turn for turn in turns if (corner, turn) in sides)
        if before == start[1]:
            ring.pop(0)  # it began in the middle of a straight line
        yield ring, cell


def _sides(mask: np.ndarray) -> dict[_Side, tuple[int, int]]:
    """Return the sides of cells between inside and outside: start (x, y) and step, and the cell (row, column)."""
    padded = np.pad(mask, 1)
    sides = {}
    for (down, right), start, step in (
        ((-1, 0), (0, 0), (1, 0)),  # above: along x, from the upper left corner
        ((0, 1), (1, 0), (0, 1)),
        ((1, 0), (1, 1), (-1, 0)),
        ((0, -1), (0, 1), (0, -1)),
    ):
        beside = padded[1 + down : padded.shape[0] - 1 + down, 1 + right : padded.shape[1] - 1 + right]
        for row, column in np.argwhere(mask & ~beside).tolist():
            sides[(column + start[0], row + start[1]), step] = (row, column)
    return sides


def _level_0(ring: Ring, found: ProbabilityMap, size: tuple[int, int]) -> list[list[float]]:
    """Return a ring as GeoJSON has it: in pixels of level 0, within the slide, the first point again as the last."""
    places = np.minimum(np.array([*ring, ring[0]]) * found.stride, size)
    return [[round(float(x), 2), round(float(y), 2)] for x, y in places]
