"""What a scan leaves of a slide: the map as TIFF, what was detected as CSV and GeoJSON, and a picture."""

import json
from pathlib import Path

import numpy as np
import tifffile
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from scipy.ndimage import label
from skimage.measure import regionprops

from apps.pathology.scan.froc import DETECTION_BOX, detect
from apps.pathology.scan.scan import ProbabilityMap
from apps.pathology.slides.masks import low_power
from apps.pathology.slides.reader import Slide
from common.files import atomic_path, write_text
from common.observe.plots import one_line, save_png

Ring = list[tuple[int, int]]
"""Corners (x, y) in cells, the first not repeated; along x the inside lies below (y runs down)."""

REGION_THRESHOLD = 0.5
BOX_UM = DETECTION_BOX * 64 * 0.243  # MONAI's box is in pixels of level 6 of Camelyon16's slides of 0.243 um
_TUMOUR = {"name": "Tumor", "color": [200, 0, 0]}  # QuPath's own colour for the class
_DPI = 100
_LONGEST = 1600  # pixels of the slide in the picture, which with title and colour bar stays below 2000
_LEAST, _MOST = 0.1, 0.85  # opacity at probability 0 and 1: tissue shows through, and where was looked is seen


def write_probability_tif(path: Path, found: ProbabilityMap, mpp: float | None, slide: str) -> None:
    """Write the map as a tiled TIFF of uint8 (255: probability 1), one pixel a cell.

    Its upper left corner is the slide's, and its resolution tags say the size of a cell, so that QuPath and OpenSlide
    lay it over the slide; where `mpp`, um per pixel of level 0, is unknown they are left open. Stride, offset and scale
    stand as JSON in its description.
    """
    place = {"slide": slide, "stride_px": found.stride, "offset_px": found.stride / 2, "mpp": mpp}
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


def find_detections(found: ProbabilityMap, base_mpp: float) -> np.ndarray:
    """Return the peaks of a map, the surest first: [D, 3] float64 rows (score, x, y) in pixels of level 0.

    A peak suppresses others in a box of 746 um around it (`base_mpp`: um per pixel of level 0), which on Camelyon16's
    slides scanned every 64 pixels is MONAI's box of 48 cells; of a finer map the box takes more cells.
    """
    peaks = detect(found.values, max(1, round(BOX_UM / (found.stride * base_mpp))))
    peaks[:, 1:] = np.floor((peaks[:, 1:] + 0.5) * found.stride)
    return peaks


def write_detections_csv(path: Path, detections: np.ndarray) -> None:
    """Write detections as Camelyon16 asks for them: rows `score,x,y` in pixels of level 0, no header."""
    write_text(path, "".join(f"{score:.6f},{x:.0f},{y:.0f}\n" for score, x, y in detections))


def read_detections_csv(path: Path) -> np.ndarray:
    """Read what `write_detections_csv` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a row is not `score,x,y`.
    """
    try:
        rows = [line.split(",") for line in path.read_text(encoding="utf-8").splitlines()]
        found = np.array([(float(score), int(x), int(y)) for score, x, y in rows], np.float64).reshape(-1, 3)
        if not ((found >= 0) & (found <= (1, np.inf, np.inf))).all():
            raise ValueError("a score outside 0 to 1, or a place below 0")
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path}: rows must be score,x,y ({error}): scan the slide again") from error
    return found


def write_geojson(path: Path, found: ProbabilityMap, size: tuple[int, int]) -> None:
    """Write the regions of probability 0.5 and more as QuPath's GeoJSON.

    Polygons run along the borders of cells, in pixels of level 0, and end at its `size` (width, height). Cells that
    touch only at a corner are apart.
    """
    labels, _ = label(found.values >= REGION_THRESHOLD)
    borders = outline(labels)
    features = []
    for region in regionprops(labels, found.values):
        # In pixels of level 0, within the slide, the first point again as the last.
        closed = [np.array([*ring, ring[0]]) * found.stride for ring in borders[region.label]]
        rings = [np.minimum(ring, size).round(2).tolist() for ring in closed]
        values = {"max probability": region.intensity_max, "mean probability": region.intensity_mean}
        measured = {name: round(float(value), 6) for name, value in values.items()}
        properties = {"objectType": "annotation", "classification": _TUMOUR, "measurements": measured}
        geometry = {"type": "Polygon", "coordinates": rings}
        features.append({"type": "Feature", "geometry": geometry, "properties": properties})
    write_text(path, json.dumps({"type": "FeatureCollection", "features": features}, allow_nan=False) + "\n")


def draw_heatmap(path: Path, slide: Slide, found: ProbabilityMap) -> None:
    """Draw the slide at low power, the scanned cells over it in the colours of their probability, as a PNG."""
    level = slide.levels[0]
    longest = max(level.width, level.height)
    image, downsample = low_power(slide, max(1.0, longest / _LONGEST))
    scale = min(1 / downsample, _LONGEST / longest) / _DPI  # a level between may be larger than asked for
    width, height = max(level.width * scale, 2.0), max(level.height * scale, 2.0)  # inches
    figure = Figure(figsize=(width + 1.5, height + 0.5), dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    axes.imshow(image, extent=(0, image.shape[1] * downsample, image.shape[0] * downsample, 0))
    rows, columns = found.values.shape
    drawn = axes.imshow(
        found.values,
        extent=(0, columns * found.stride, rows * found.stride, 0),
        cmap="viridis",
        vmin=0,
        vmax=1,
        alpha=np.where(found.scanned, _LEAST + (_MOST - _LEAST) * found.values, 0),
        interpolation="nearest",
    )
    axes.set(xlim=(0, level.width), ylim=(level.height, 0))
    axes.set_axis_off()
    opaque = ScalarMappable(drawn.norm, drawn.cmap)
    figure.colorbar(opaque, ax=axes, label="probability of tumour", fraction=0.2 / width, pad=0.1 / width, aspect=30)
    title = f"{one_line(slide.name, 60)}   greatest {found.values.max(initial=0):.3f}"
    axes.set_title(title, loc="left", fontsize=10, parse_math=False)
    save_png(path, figure, full_colour=True)


def outline(labels: np.ndarray) -> dict[int, list[Ring]]:
    """Return the borders of each region of labels [H, W] (0: outside): the outer one, then those of its holes."""
    sides = _sides(labels > 0)
    left = set(sides)
    borders: dict[int, list[Ring]] = {}
    # Each border has a side along x: its first begins a straight line, and of a region's borders the outer's is first.
    for corner, step in sides:
        if (corner, step) not in left:
            continue
        of_region = borders.setdefault(int(labels[int(corner.imag), int(corner.real)]), [])
        ring: Ring = []
        before = 0j
        while (corner, step) in left:
            left.remove((corner, step))
            if step != before:
                ring.append((int(corner.real), int(corner.imag)))
            before, corner = step, corner + step
            # Right first: where two cells meet corner to corner, the border stays with its own.
            step = next(turn for turn in (step * 1j, step, step * -1j) if (corner, turn) in sides)
        of_region.append(ring)
    return borders


def _sides(mask: np.ndarray) -> dict[tuple[complex, complex], None]:
    """Return the sides of cells between inside and outside, as start and step (x + yi), those along x first."""
    padded = np.pad(mask, 1)
    sides: dict[tuple[complex, complex], None] = {}
    for step in (1 + 0j, 1j, -1 + 0j, -1j):
        out = step * -1j  # the inside lies right of the step
        beside = np.roll(padded, (-int(out.imag), -int(out.real)), (0, 1))
        rows, columns = np.nonzero(padded & ~beside)
        starts = columns - 1 + 1j * (rows - 1) + (1 + 1j + out - step) / 2
        sides.update(dict.fromkeys((start, step) for start in starts.tolist()))
    return sides
