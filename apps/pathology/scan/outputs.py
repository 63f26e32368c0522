"""What a scan leaves of a slide: the map as TIFF, what was detected as CSV and GeoJSON, and a picture."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from contourpy import FillType, contour_generator
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from scipy.ndimage import label
from skimage.measure import regionprops

from medspeed.apps.pathology.scan.froc import DETECTION_BOX, detect
from medspeed.apps.pathology.scan.scan import ProbabilityMap
from medspeed.apps.pathology.slides.masks import low_power
from medspeed.apps.pathology.slides.reader import Slide
from medspeed.common.files import atomic_path, write_text
from medspeed.common.observe.images import one_line
from medspeed.common.observe.plots import save_png

REGION_THRESHOLD = 0.5
BOX_UM = DETECTION_BOX * 64 * 0.243  # MONAI's box is in pixels of level 6 of Camelyon16's slides of 0.243 um
_TUMOUR = {"name": "Tumor", "color": [200, 0, 0]}  # QuPath's own colour for the class
_DPI = 100
_LONGEST = 1600  # pixels of the slide in the picture, which with title and colour bar stays below 2000
_LEAST, _MOST = 0.1, 0.85  # opacity at probability 0 and 1: tissue shows through, and where was looked is seen


def write_probability_tif(path: Path, found: ProbabilityMap, mpp: float | None, slide: str) -> None:
    """Write the map as a tiled TIFF of uint8 (255: probability 1), one pixel a cell.

    Its resolution tags say the size of a cell, so that QuPath and OpenSlide lay it over the slide; where `mpp`, um per
    pixel of level 0, is unknown they are left open. Stride, offset and scale stand as JSON in its description.
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
    slides scanned every 64 pixels is MONAI's box of 48 cells.
    """
    peaks = detect(found.values, max(1, round(BOX_UM / (found.stride * base_mpp))))
    peaks[:, 1:] = np.floor((peaks[:, 1:] + 0.5) * found.stride)
    return peaks


def write_detections_csv(path: Path, detections: np.ndarray) -> None:
    """Write detections as Camelyon16 asks for them: rows `score,x,y` in pixels of level 0, no header."""
    write_text(path, "".join(f"{score:.6f},{x:.0f},{y:.0f}\n" for score, x, y in detections))


def read_detections_csv(path: Path) -> np.ndarray:
    """Read what `write_detections_csv` wrote; a ValueError says that a row is not `score,x,y`."""
    try:
        rows = [line.split(",") for line in path.read_text(encoding="utf-8").splitlines()]
        found = np.array([(float(score), int(x), int(y)) for score, x, y in rows], np.float64).reshape(-1, 3)
        if not ((found >= 0) & (found <= (1, np.inf, np.inf))).all():
            raise ValueError("a score outside 0 to 1, or a negative position")
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path}: rows must be score,x,y ({error}): scan the slide again") from error
    return found


def write_geojson(path: Path, found: ProbabilityMap, size: tuple[int, int]) -> None:
    """Write the regions of probability 0.5 and more as QuPath's GeoJSON.

    Polygons run along the borders of cells, in pixels of level 0, and end at its `size` (width, height).
    """
    features = []
    for region in regionprops(label(found.values >= REGION_THRESHOLD)[0], found.values):
        corner = region.bbox[1::-1]
        # In pixels of level 0, within the slide, the first point again as the last.
        closed = ((np.append(ring, ring[:1], 0) + corner) * found.stride for ring in outline(region.image))
        rings = [np.minimum(ring, size).round(2).tolist() for ring in closed]
        values = {"max probability": region.intensity_max, "mean probability": region.intensity_mean}
        measured = {name: round(float(value), 6) for name, value in values.items()}
        properties = {"objectType": "annotation", "classification": _TUMOUR, "measurements": measured}
        polygon = {"type": "Polygon", "coordinates": rings}
        features.append({"type": "Feature", "geometry": polygon, "properties": properties})
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


def outline(region: np.ndarray) -> list[np.ndarray]:
    """Return the borders of a region [H, W] bool whose cells hang together: the outer one, then those of its holes.

    Of each its corners [K, 2] (x, y) in cells, the first not repeated; along x the inside lies below (y runs down).
    """
    # Both sides of a border between cells lie at one place: there a contour can only run along the cells.
    inside = np.pad(region, 1).repeat(2, 0).repeat(2, 1)[1:-1, 1:-1]
    y, x = (np.arange(side + 1).repeat(2) for side in region.shape)
    contours: Any = contour_generator(x, y, inside, fill_type=FillType.OuterOffset)
    (points,), (ends,) = contours.filled(0.75, np.inf)  # not 0.5: cells that meet corner to corner are apart
    rings = []
    for start, end in pairwise(ends):
        ring = points[start : end - 1].astype(int)
        ring = ring[(ring != np.roll(ring, 1, 0)).any(1)]
        along_x = ring[:, 1] == np.roll(ring[:, 1], -1)
        rings.append(ring[along_x != np.roll(along_x, 1)])
    return rings
