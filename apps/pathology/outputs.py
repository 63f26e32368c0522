"""What a scan leaves of a slide: the probability map as TIFF, and what was detected as CSV and GeoJSON."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import tifffile

from apps.pathology.froc import DETECTION_BOX, DETECTION_THRESHOLD, Detections, detect
from apps.pathology.outlines import Ring, find_regions
from apps.pathology.scan import ProbabilityMap
from common.files import atomic_path, write_text

REGION_THRESHOLD = 0.5
BOX_UM = DETECTION_BOX * 64 * 0.243  # MONAI's box is in pixels of level 6 of Camelyon16's slides of 0.243 um
_TILE = 256
_COLOUR = [200, 0, 0]  # QuPath's own for the class "Tumor"


def write_probability_tif(path: Path, found: ProbabilityMap, mpp: float | None, slide: str) -> None:
    """Write the map as a tiled TIFF of uint8 (255: probability 1), one pixel a cell.

    Its upper left corner is the slide's, and its resolution tags say the size of a cell, so that QuPath and OpenSlide
    lay it over the slide. Stride, offset and scale stand as JSON in its description.

    Args:
        path: the file.
        found: the map.
        mpp: um per pixel of the slide's level 0; None leaves the resolution open.
        slide: the slide's name.

    Raises:
        OSError: the folder cannot be written or the disk is full.
    """
    about = {
        "slide": slide,
        "stride_px": found.stride,
        "offset_px": found.offset,
        "mpp": mpp,
        "probability_of_255": 1.0,
    }
    density = None if mpp is None else 1e4 / (mpp * found.stride)
    with atomic_path(path) as part:
        tifffile.imwrite(
            part,
            np.rint(found.values * 255).astype(np.uint8),
            tile=(_TILE, _TILE),
            photometric="minisblack",
            compression="zlib",  # deflate by its official number
            resolution=None if density is None else (density, density),
            resolutionunit="NONE" if density is None else "CENTIMETER",
            description=json.dumps(about),
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
    """Write detections as Camelyon16 asks for them: rows `score,x,y` in pixels of level 0, no header.

    Raises:
        OSError: the folder cannot be written or the disk is full.
    """
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

    Raises:
        OSError: the folder cannot be written or the disk is full.
    """
    features = []
    flat = found.values.ravel()
    for region in find_regions(found.values >= REGION_THRESHOLD):
        inside = flat[region.cells]
        rings = [_level_0(ring, found, size) for ring in (region.outline, *region.holes)]
        features.append(_feature(rings, float(inside.max()), float(inside.mean())))
    write_text(path, json.dumps({"type": "FeatureCollection", "features": features}, allow_nan=False) + "\n")
    return len(features)


def _level_0(ring: Ring, found: ProbabilityMap, size: tuple[int, int]) -> list[list[float]]:
    """Return a ring as GeoJSON has it: in pixels of level 0, within the slide, the first point again as the last."""
    places = np.minimum(found.offset + (np.array([*ring, ring[0]]) - 0.5) * found.stride, size)
    return [[round(float(x), 2), round(float(y), 2)] for x, y in places]


def _feature(rings: list[list[list[float]]], greatest: float, mean: float) -> dict[str, Any]:
    return {
        "type": "Feature",
        "geometry": {"type": "Polygon", "coordinates": rings},
        "properties": {
            "objectType": "annotation",
            "classification": {"name": "Tumor", "color": _COLOUR},
            "measurements": {"max probability": round(greatest, 6), "mean probability": round(mean, 6)},
        },
    }
