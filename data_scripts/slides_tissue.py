"""The tissue of a synthetic slide: lymph node, fat, pen marks and metastases, as smooth fields and outlines.

Lengths are in um, places are (row, column) in um from the slide's corner. A field is a float32 square [N, N] with a
node every NODE um, the first ones MARGIN nodes beyond the slide's edge. Everything is added and multiplied element by
element: no product of matrices, whose last digits depend on the threads.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import ndimage

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
Outline = npt.NDArray[np.float64]  # [N, 2] x, y in pixels of level 0; pixel (0, 0) covers 0 to 1
Lesions = list[tuple[str, Outline]]  # the annotator's group of each outline; ISLAND is no tumour within tumour

MPP = 0.5  # um per pixel of level 0: about the 20x of a scanner
NODE, MARGIN = 4.0, 5
ISLAND = "_2"  # Camelyon16's group of what is not tumour within tumour
# The phantom's macro-metastases are scaled down to its slides of 2 mm: Camelyon16's begin at 2 mm.
MACRO_UM = 300.0
ISOLATED_UM = 200.0  # below: isolated tumour cells. Source: AJCC staging manual, as used in Camelyon16
_LARGEST_UM = (380.0, 800.0)  # long axis of a slide's first lesion
_OTHERS_UM = ((70.0, 170.0), (210.0, 300.0), (300.0, 600.0))
_GAP_UM = 32.0  # left between lesions
_EDGE_UM = 12.0  # left between a lesion and the slide's edge


def nodes_for(extent: float) -> int:
    """Return how many nodes one side of a slide of `extent` um has."""
    return math.ceil(extent / NODE) + 1 + 2 * MARGIN


def grid(nodes: int) -> tuple[Floats, Floats]:
    """Return the rows [N, 1] and columns [1, N] of the nodes in um."""
    line = ((np.arange(nodes) - MARGIN) * NODE).astype(np.float32)
    return line[:, None], line[None, :]


def waves(nodes: int, length: float, rng: np.random.Generator) -> Floats:
    """Return smooth noise [N, N], mean 0 and deviation about 1, whose bumps are about `length` um apart."""
    zoom = max(length / 2 / NODE, 1.0)
    coarse = rng.standard_normal((math.ceil(nodes / zoom) + 3,) * 2).astype(np.float32)
    field: Floats = ndimage.zoom(coarse, zoom, order=3)[:nodes, :nodes]
    return field


def ramp(values: Floats, low: float, high: float) -> Floats:
    """Return 0 below `low`, 1 above `high` (or the other way round where low > high), a line between."""
    share: Floats = np.clip((values - np.float32(low)) * np.float32(1 / (high - low)), 0, 1)
    return share


def values_at(field: npt.NDArray[np.floating[Any]], places: Floats) -> Floats:
    """Return the values [N] of a field at the nodes next to places [N, 2]."""
    index = np.clip(np.rint(places / NODE).astype(np.intp) + MARGIN, 0, field.shape[0] - 1)
    found: Floats = field[index[:, 0], index[:, 1]]
    return found


def scatter(extent: float, spacing: float, rng: np.random.Generator) -> Floats:
    """Return places [N, 2] all over a slide, about `spacing` um apart: a shaken hexagonal lattice, turned."""
    count = math.ceil(extent / spacing) + 2
    row, column = np.mgrid[-count:count, -count:count]
    rows, columns = row.ravel() * spacing * math.sqrt(0.75), (column + 0.5 * (row % 2)).ravel() * spacing
    angle = rng.uniform(0, np.pi)
    y = rows * math.cos(angle) - columns * math.sin(angle) + extent / 2
    x = rows * math.sin(angle) + columns * math.cos(angle) + extent / 2
    inside = (y > -spacing) & (y < extent + spacing) & (x > -spacing) & (x < extent + spacing)
    places = np.stack([y[inside], x[inside]], axis=1)
    return (places + rng.normal(0, 0.16 * spacing, places.shape)).astype(np.float32)


@dataclass(frozen=True)
class Tissue:
    """Fields of one slide.

    `depth`, `node_depth`: um below the edge of the tissue and of the lymph node, negative outside; `stroma`, `sinus`,
    `follicle` (germinal centre): shares, 0 to 1; `density` of lymphocytes, `ink` of a pen on the glass: 0 to 1.
    """

    depth: Floats
    node_depth: Floats
    stroma: Floats
    sinus: Floats
    follicle: Floats
    density: Floats
    ink: Floats


def draw_tissue(extent: float, rng: np.random.Generator) -> Tissue:
    """Draw the tissue of a slide: a lumpy lymph node with capsule, septa, sinuses and follicles, fat beside it.

    Lymphoid density, germinal centres, sinuses and stroma vary as much as tumour differs from them in mean colour.
    """
    nodes = nodes_for(extent)
    y, x = grid(nodes)
    lumps = 0.16 * waves(nodes, extent * 0.35, rng) + 0.03 * waves(nodes, 120, rng)
    (top, left), (tall, wide) = extent * rng.uniform(0.44, 0.56, 2), extent * rng.uniform(0.42, 0.54, 2)
    depth = _depth(np.hypot((y - top) / tall, (x - left) / wide) < 1 + lumps)
    fat = np.maximum(110 * waves(nodes, 900, rng) + rng.uniform(-60, 50), 0) * ramp(depth, 400, 200)
    node_depth = _depth(depth > fat)
    capsule = ramp(node_depth + 8 * waves(nodes, 200, rng), 36, 24)
    septa = ramp(np.abs(waves(nodes, 420, rng)) - 0.05 * waves(nodes, 150, rng), 0.08, 0.05)
    scars = ramp(waves(nodes, 380, rng) + 0.3 * waves(nodes, 70, rng), 0.95, 1.1)
    stroma = np.maximum(np.maximum(capsule, septa), scars) * ramp(node_depth, -14, -8)
    channels = np.abs(waves(nodes, 180, rng) + 0.15 * waves(nodes, 40, rng)) + ramp(waves(nodes, 500, rng), 0.1, -0.3)
    sinus = ramp(channels, 0.16, 0.10) * ramp(node_depth, 0, 8) * (1 - stroma)
    follicle = ramp(waves(nodes, 260, rng) + 0.08 * waves(nodes, 60, rng), 0.95, 1.05) * ramp(node_depth, 60, 90)
    loose = 0.8 + rng.normal(0, 0.06) + 0.22 * waves(nodes, 350, rng) + 0.08 * waves(nodes, 90, rng)
    return Tissue(
        depth=depth,
        node_depth=node_depth,
        stroma=stroma,
        sinus=sinus,
        follicle=follicle * (1 - stroma - sinus),
        density=np.clip(loose, 0.2, 0.98),
        ink=_ink(depth, extent, rng),
    )


def _depth(inside: Mask) -> Floats:
    """Return how deep each node lies inside, um; negative outside."""
    within, without = (ndimage.distance_transform_edt(part) for part in (inside, ~inside))
    return ndimage.gaussian_filter((within - without).astype(np.float32), 1.0) * np.float32(NODE)


def _ink(depth: Floats, extent: float, rng: np.random.Generator) -> Floats:
    """Return pen marks, 0 to 1: in two slides of five one or two strokes on the glass, some over tissue."""
    y, x = grid(depth.shape[0])
    ink = np.zeros_like(depth)
    for _ in range(rng.integers(1, 3) if rng.random() < 0.4 else 0):
        spots = np.argwhere(np.abs(depth + rng.choice([90.0, 60.0, 0.0])) < 10)
        if not len(spots):
            continue
        top, left = (spots[rng.integers(len(spots))] - MARGIN) * NODE
        turn, length, width = rng.uniform(0, math.pi), rng.uniform(0.12, 0.3) * extent, rng.uniform(30, 55)
        along = (x - left) * math.cos(turn) + (y - top) * math.sin(turn)
        across = (y - top) * math.cos(turn) - (x - left) * math.sin(turn) + rng.normal(0, 0.6) * along**2 / extent
        stroke = ramp(np.abs(across), width, width - 5) * ramp(np.abs(along), length, length - 6)
        ink = np.maximum(ink, stroke * np.float32(rng.uniform(0.6, 1.0)))
    return np.asarray(ink * (1 + 0.12 * waves(len(ink), 50, rng)), np.float32)


def draw_lesions(node_depth: Floats, extent: float, rng: np.random.Generator) -> Lesions:
    """Draw the outlines of one to five metastases in the node, below its capsule, the first above MACRO_UM if it fits.

    They look as a pathologist would draw them; those above MACRO_UM may hold an island of normal tissue.
    """
    y, x = grid(len(node_depth))
    room = (node_depth > 25) & (np.minimum(y, x) > _EDGE_UM) & (np.maximum(y, x) < extent - _EDGE_UM)
    lengths = [rng.uniform(*_LARGEST_UM)]
    lengths += [rng.uniform(*_OTHERS_UM[rng.choice(3, p=(0.4, 0.35, 0.25))]) for _ in range(rng.integers(0, 5))]
    group = str(rng.choice(["Tumor", "_0", "_1"]))
    lesions: Lesions = []
    for length in lengths:
        free = ndimage.distance_transform_edt(room) * NODE
        spots = np.argwhere(free > min(0.45 * length, 0.9 * free.max()))
        if free.max() < 35:
            break
        row, column = spots[rng.integers(len(spots))]
        most = free[row, column] - NODE
        centre = np.array([x[0, column], y[row, 0]], np.float64)
        radius = np.clip(_lumpy(min(0.5 * length, 1.15 * most), rng), 12, most)
        lesions.append((group, _outline(centre, radius)))
        if radius.max() > MACRO_UM / 2 and radius.min() > 80 and rng.random() < 0.4:
            lesions.append((ISLAND, _outline(centre, _lumpy(radius.min() * rng.uniform(0.3, 0.5), rng))))
        room = room & (np.hypot(y - centre[1], x - centre[0]) > radius.max() + _GAP_UM)
    return lesions


def _lumpy(radius: float, rng: np.random.Generator) -> Outline:
    """Return the radii [N] of a lumpy ellipse with a long half axis of about `radius` um, at even angles."""
    theta = np.arange(int(np.clip(radius, 48, 360))) * 2 * math.pi / int(np.clip(radius, 48, 360))
    turn, slim = rng.uniform(0, math.pi), rng.uniform(0.55, 0.9)
    radii = radius * slim / np.sqrt((slim * np.cos(theta - turn)) ** 2 + np.sin(theta - turn) ** 2)
    for order in (2, 3, 4, 5, 7, 9, 12):
        radii *= 1 + 0.16 / order**0.6 * rng.normal() * np.cos(order * theta + rng.uniform(0, 2 * math.pi))
    return np.asarray(radii, np.float64)


def _outline(centre: npt.NDArray[np.float64], radii: Outline) -> Outline:
    """Return the outline in pixels around `centre` (x, y um)."""
    theta = np.arange(len(radii)) * 2 * math.pi / len(radii)
    points = centre + radii[:, None] * np.stack([np.cos(theta), np.sin(theta)], axis=1)
    return np.asarray(np.round(points / MPP, 2), np.float64)


def long_axis(outline: Outline) -> float:
    """Return the greatest distance between two points of an outline, um."""
    gaps = outline[:, None] - outline[None]
    return float(np.hypot(gaps[..., 0], gaps[..., 1]).max()) * MPP


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
