"""What a synthetic slide is drawn from: smooth fields, a lymph node in fat, pen marks, and outlines of metastases.

Lengths are in um, places are (row, column) in um from the slide's corner. A field is a float32 square [N, N] with a
node every NODE um, the first ones MARGIN nodes beyond the slide's edge. Everything is added and multiplied element by
element: no product of matrices, whose last digits depend on the threads.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import ndimage
from scipy.spatial.distance import pdist

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Outline = npt.NDArray[np.float64]  # [N, 2] x, y in pixels of level 0; pixel (0, 0) covers 0 to 1
Lesions = list[tuple[str, Outline]]  # the annotator's group of each outline; ISLAND is no tumour within tumour

MPP = 0.5  # um per pixel of level 0: about the 20x of a scanner
NODE, MARGIN = 4.0, 5
ISLAND = "_2"  # Camelyon16's group of what is not tumour within tumour
# The phantom's macro-metastases are scaled down to its slides of 2 mm: Camelyon16's begin at 2 mm.
MACRO_UM = 300.0
_LENGTHS_UM = (380, 800), ((70, 170), (210, 300), (300, 600))  # long axis of a slide's first lesion, of the others


def ramp(values: npt.NDArray[np.floating[Any]], low: float, high: float) -> Floats:
    """Return 0 below `low`, 1 above `high` (or the other way round where low > high), a line between."""
    share: Floats = np.clip((values - np.float32(low)) * np.float32(1 / (high - low)), 0, 1)
    return share


class Fields:
    """Draws the fields of one slide of `extent` um; `y` [N, 1] and `x` [1, N] are the nodes' places, um."""

    def __init__(self, extent: float, rng: np.random.Generator) -> None:
        line = ((np.arange(math.ceil(extent / NODE) + 1 + 2 * MARGIN) - MARGIN) * NODE).astype(np.float32)
        self.extent, self.rng, self.y, self.x = extent, rng, line[:, None], line[None]

    def waves(self, length: float) -> Floats:
        """Return smooth noise, mean 0 and deviation about 1, whose bumps are about `length` um apart."""
        nodes, zoom = len(self.y), max(length / 2 / NODE, 1.0)
        coarse = self.rng.standard_normal((math.ceil(nodes / zoom) + 3,) * 2).astype(np.float32)
        return ndimage.zoom(coarse, zoom, order=3)[:nodes, :nodes]

    def depth(self, inside: npt.NDArray[np.bool_]) -> Floats:
        """Return how deep each node lies inside, um; negative outside."""
        within, without = (ndimage.distance_transform_edt(part) for part in (inside, ~inside))
        return ndimage.gaussian_filter((within - without).astype(np.float32), 1.0) * np.float32(NODE)

    def scatter(self, share: npt.NDArray[np.floating[Any]], spacing: float) -> Floats:
        """Return places [N, 2], as many as the share, of a shaken hexagonal lattice of `spacing` um."""
        count = math.ceil(self.extent / spacing) + 2
        row, column = np.mgrid[-1 : count / math.sqrt(0.75), -1:count]
        places = spacing * np.stack([row * math.sqrt(0.75), column + 0.5 * (row % 2)], axis=-1).reshape(-1, 2)
        places += self.rng.normal(0, 0.16 * spacing, places.shape)
        return places[self.rng.random(len(places)) < values_at(share, places)].astype(np.float32)


def values_at(field: npt.NDArray[np.floating[Any]], places: npt.NDArray[np.floating[Any]]) -> Floats:
    """Return the values [N] of a field at the nodes next to places [N, 2]."""
    index = np.clip(np.rint(places / NODE).astype(np.intp) + MARGIN, 0, field.shape[0] - 1)
    found: Floats = field[index[:, 0], index[:, 1]]
    return found


def draw_node(fields: Fields) -> tuple[Floats, Floats]:
    """Return how deep each node lies in the tissue, and in a lumpy lymph node with fat beside it, um."""
    rng, waves, extent = fields.rng, fields.waves, fields.extent
    lumps = 0.16 * waves(extent * 0.35) + 0.03 * waves(120)
    (top, left), (tall, wide) = extent * rng.uniform(0.44, 0.56, 2), extent * rng.uniform(0.42, 0.54, 2)
    depth = fields.depth(np.hypot((fields.y - top) / tall, (fields.x - left) / wide) < 1 + lumps)
    fat = np.maximum(110 * waves(900) + rng.uniform(-60, 50), 0) * ramp(depth, 400, 200)
    return depth, fields.depth(depth > fat)


def draw_ink(depth: Floats, fields: Fields) -> Floats:
    """Return pen marks, 0 to 1: in two slides of five one or two strokes on the glass, some over tissue."""
    rng, ink = fields.rng, np.zeros_like(depth)
    for _ in range(rng.integers(1, 3) if rng.random() < 0.4 else 0):
        spots = np.argwhere(np.abs(depth + rng.choice([90.0, 60.0, 0.0])) < 10)
        if not len(spots):
            continue
        top, left = (spots[rng.integers(len(spots))] - MARGIN) * NODE
        turn, length, width = rng.uniform((0, 0.12 * fields.extent, 30), (math.pi, 0.3 * fields.extent, 55))
        along = (fields.x - left) * math.cos(turn) + (fields.y - top) * math.sin(turn)
        across = (fields.y - top) * math.cos(turn) - (fields.x - left) * math.sin(turn)
        across = across + rng.normal(0, 0.6) * along**2 / fields.extent
        stroke = ramp(np.abs(across), width, width - 5) * ramp(np.abs(along), length, length - 6)
        ink = np.maximum(ink, stroke * np.float32(rng.uniform(0.6, 1.0)))
    return np.asarray(ink * (1 + 0.12 * fields.waves(50)), np.float32)


def draw_lesions(node_depth: Floats, fields: Fields) -> Lesions:
    """Draw the outlines of one to five metastases in the node, below its capsule, the first above MACRO_UM if it fits.

    Those above MACRO_UM may hold an island of normal tissue.
    """
    rng, y, x = fields.rng, fields.y, fields.x
    room = (node_depth > 25) & (np.minimum(y, x) > 12) & (np.maximum(y, x) < fields.extent - 12)
    ranges = [_LENGTHS_UM[0], *rng.choice(_LENGTHS_UM[1], rng.integers(0, 5), p=(0.4, 0.35, 0.25))]
    group = str(rng.choice(["Tumor", "_0", "_1"]))
    lesions: Lesions = []
    for length in (rng.uniform(*bounds) for bounds in ranges):
        free = ndimage.distance_transform_edt(room) * NODE
        spots = np.argwhere(free > min(0.45 * length, 0.9 * free.max()))
        if free.max() < 35:
            break
        row, column = spots[rng.integers(len(spots))]
        most, centre = free[row, column] - NODE, np.array([x[0, column], y[row, 0]], np.float64)
        radii = np.clip(_lumpy(min(0.5 * length, 1.15 * most), rng), 12, most)
        lesions.append((group, _outline(centre, radii)))
        if radii.max() > MACRO_UM / 2 and radii.min() > 80 and rng.random() < 0.4:
            lesions.append((ISLAND, _outline(centre, _lumpy(radii.min() * rng.uniform(0.3, 0.5), rng))))
        room = room & (np.hypot(y - centre[1], x - centre[0]) > radii.max() + 32)
    return lesions


def _lumpy(radius: float, rng: np.random.Generator) -> Outline:
    """Return the radii [N] of a lumpy ellipse with a long half axis of about `radius` um, at even angles."""
    theta = np.linspace(0, 2 * math.pi, int(np.clip(radius, 48, 360)), endpoint=False)
    turn, slim = rng.uniform(0, math.pi), rng.uniform(0.55, 0.9)
    radii = radius * slim / np.hypot(slim * np.cos(theta - turn), np.sin(theta - turn))
    for order in (2, 3, 4, 5, 7, 9, 12):
        radii *= 1 + 0.16 / order**0.6 * rng.normal() * np.cos(order * theta + rng.uniform(0, 2 * math.pi))
    return np.asarray(radii, np.float64)


def _outline(centre: npt.NDArray[np.float64], radii: Outline) -> Outline:
    """Return the outline in pixels around `centre` (x, y um)."""
    theta = np.linspace(0, 2 * math.pi, len(radii), endpoint=False)
    points = centre + radii[:, None] * np.stack([np.cos(theta), np.sin(theta)], axis=1)
    return np.asarray(np.round(points / MPP, 2), np.float64)


def long_axis(outline: Outline) -> float:
    """Return the greatest distance between two points of an outline, um."""
    return float(pdist(outline).max()) * MPP


def mask_of(lesions: Lesions, size: int) -> Bytes:
    """Return the mask [H, W] uint8 of a slide: 1 where a pixel's centre lies in a lesion and in no island of it.

    A pixel is inside if a line from its left edge crosses the outlines an odd number of times.
    """
    turns = np.zeros((size, size + 1), np.uint8)
    for _, outline in lesions:
        (x, y), (x_next, y_next) = outline.T, np.roll(outline, -1, axis=0).T
        height = np.arange(size)[:, None] + 0.5
        rows, edges = np.nonzero((y <= height) != (y_next <= height))
        at = x[edges] + (rows + 0.5 - y[edges]) / (y_next - y)[edges] * (x_next - x)[edges]
        np.add.at(turns, (rows, np.clip(np.ceil(at - 0.5), 0, size).astype(np.intp)), 1)
    return np.asarray(np.cumsum(turns, axis=1, dtype=np.uint8)[:, :-1] & 1, np.uint8)
