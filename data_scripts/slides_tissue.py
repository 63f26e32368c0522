"""The tissue of a slide: lymph node with capsule, follicles, sinuses and septa, fat around it, folds, and pen marks.

Everything is a field of nodes (see slides_lattice); cells come later. Lymphoid density, germinal centres, sinuses and
stroma vary from place to place as much as tumour differs from them in mean colour.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from data_scripts.slides_lattice import MARGIN, MPP, PITCH, Places, grid, nodes_for, pixels, ramp, scatter, waves
from data_scripts.slides_lesions import Mask
from data_scripts.slides_stain import Floats


@dataclass(frozen=True)
class Tissue:
    """Fields [nodes, nodes] float32 of one slide.

    `depth` and `node_depth`: um below the edge of the tissue and of the lymph node, negative outside; `stroma`,
    `sinus`, `follicle` (germinal centre), `mantle`: shares, 0 to 1; `density`: of lymphocytes, 0 to 1; `grain`: px
    across the collagen fibres; `fold` and `ink`: 0 to 1. `vacuoles`: [N, 3] row, column, radius of fat cells in px.
    """

    depth: Floats
    node_depth: Floats
    stroma: Floats
    sinus: Floats
    follicle: Floats
    mantle: Floats
    density: Floats
    grain: Floats
    fold: Floats
    ink: Floats
    vacuoles: Places

    @property
    def lymphoid(self) -> Floats:
        """Return the share of tissue packed with lymphocytes."""
        share: Floats = ramp(self.node_depth, 0, 6) * (1 - self.stroma) * (1 - self.sinus) * (1 - self.follicle)
        return share

    def room(self) -> Mask:
        """Return where metastases can grow: in the node, below its capsule."""
        return self.node_depth > 25


def draw_tissue(size: int, rng: np.random.Generator) -> Tissue:
    """Draw the tissue of a slide of `size` px."""
    nodes = nodes_for(size)
    depth = _depth(_pieces(nodes, size, rng))
    fat = np.maximum(110 * waves(nodes, 900, rng) + rng.uniform(-60, 50), 0) * ramp(depth, 400, 200)
    node_depth = _depth(depth > fat)
    stroma, sinus = _stroma_and_sinus(node_depth, rng)
    follicle, mantle = _follicles(node_depth, rng)
    loose = 0.78 + rng.normal(0, 0.06) + 0.22 * waves(nodes, 350, rng) + 0.08 * waves(nodes, 90, rng)
    grain = (depth + 40 * waves(nodes, 300, rng) + 12 * waves(nodes, 80, rng)) / np.float32(MPP)
    vacuoles = _vacuoles(size, (depth > 0) & (node_depth < -5), rng)
    fold = _fold(nodes, size, rng)
    return Tissue(
        depth,
        node_depth,
        stroma,
        sinus * (1 - stroma),
        follicle * (1 - stroma) * (1 - sinus),
        mantle * (1 - follicle),
        np.clip(loose, 0.2, 0.98),
        grain,
        fold,
        _ink(depth, size, rng),
        vacuoles,
    )


def _pieces(nodes: int, size: int, rng: np.random.Generator) -> Mask:
    """Return where one or two lumpy pieces of tissue lie."""
    y, x = (line / size - 0.5 for line in grid(nodes))
    lumps = 0.10 * waves(nodes, size * MPP * 0.35, rng) + 0.02 * waves(nodes, 120, rng)
    if rng.random() < 0.3:
        gap, turn = rng.uniform(0.02, 0.06), rng.uniform(-0.5, 0.5)
        aside = x * math.cos(turn) + y * math.sin(turn) + rng.uniform(-0.12, 0.12)
        lumps = lumps - np.maximum(0.5 - np.abs(aside + 0.006 * waves(nodes, 250, rng)) / gap * 0.5, 0) * 2
    shift = rng.uniform(-0.06, 0.06, 2)
    a, b = rng.uniform(0.42, 0.54, 2)
    inside: Mask = 1 - np.hypot((x - shift[0]) / a, (y - shift[1]) / b) + 1.6 * lumps > 0
    return inside


def _depth(inside: Mask) -> Floats:
    """Return how deep each node lies inside, um; negative outside."""
    within, without = (ndimage.distance_transform_edt(part) for part in (inside, ~inside))
    signed = ndimage.gaussian_filter((within - without).astype(np.float32), 1.0)
    return signed * np.float32(PITCH * MPP)


def _stroma_and_sinus(node_depth: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Return the shares of connective tissue (capsule, septa, scars) and of sinuses (below the capsule, inside)."""
    nodes = node_depth.shape[0]
    capsule = 30 + 8 * waves(nodes, 200, rng)
    septa = np.abs(waves(nodes, 420, rng)) - 0.05 * waves(nodes, 150, rng)
    scars = waves(nodes, 380, rng) + 0.3 * waves(nodes, 70, rng)
    stroma = np.maximum(ramp(node_depth - capsule, 6, -6), ramp(septa, 0.08, 0.05))
    stroma = np.maximum(stroma, ramp(scars, 0.95, 1.1))
    stroma *= ramp(node_depth, -14, -8)
    below = np.abs(node_depth - capsule - 12 + 4 * waves(nodes, 60, rng))
    channels = np.abs(waves(nodes, 180, rng) + 0.15 * waves(nodes, 40, rng)) + ramp(waves(nodes, 500, rng), 0.1, -0.3)
    sinus = np.maximum(ramp(below, 13, 8), ramp(channels, 0.16, 0.10))
    return stroma, sinus * ramp(node_depth, 0, 8)


def _follicles(node_depth: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Return the shares of germinal centres and of the mantles around them."""
    nodes = node_depth.shape[0]
    rows, columns = grid(nodes)
    nearest = np.full((nodes, nodes), 1e3, np.float32)  # um outside the nearest centre
    for y, x in scatter(nodes * PITCH, 340, rng):
        radius = rng.uniform(55, 130)
        if rng.random() < 0.35:
            continue
        reach = math.ceil(pixels(radius + 60) / PITCH)
        i, j = int(y // PITCH) + MARGIN, int(x // PITCH) + MARGIN
        part = slice(max(i - reach, 0), max(i + reach, 0)), slice(max(j - reach, 0), max(j + reach, 0))
        squeeze = rng.uniform(0.8, 1.25)
        away = np.hypot((rows[part[0]] - y) * squeeze, (columns[:, part[1]] - x) / squeeze) * MPP - radius
        nearest[part] = np.minimum(nearest[part], away)
    nearest += 9 * waves(nodes, 60, rng)
    deep = ramp(node_depth, 60, 90)
    return ramp(nearest, 4, -4) * deep, ramp(nearest, 34, 26) * deep


def _vacuoles(size: int, fat: Mask, rng: np.random.Generator) -> Places:
    """Return the fat cells [N, 3]: row, column and radius in px."""
    centres = scatter(size, 62, rng)
    index = np.clip(np.rint(centres / PITCH).astype(np.intp) + MARGIN, 0, fat.shape[0] - 1)
    centres = centres[fat[index[:, 0], index[:, 1]]]
    radius = pixels(37) * rng.uniform(0.8, 1.15, (len(centres), 1))
    return np.concatenate([centres, radius], axis=1).astype(np.float32)


def _fold(nodes: int, size: int, rng: np.random.Generator) -> Floats:
    """Return folds, 0 to 1: in half of the slides one or two bent bands where the section lies double."""
    y, x = grid(nodes)
    fold = np.zeros((nodes, nodes), np.float32)
    for _ in range(rng.integers(0, 3)):
        turn = rng.uniform(0, math.pi)
        across = ((x - size / 2) * math.cos(turn) + (y - size / 2) * math.sin(turn)) * MPP
        along = ((y - size / 2) * math.cos(turn) - (x - size / 2) * math.sin(turn)) * MPP
        across = across - rng.uniform(-0.3, 0.3) * size * MPP + 60 * waves(nodes, 700, rng)
        ends = ramp(np.abs(along - rng.uniform(-0.3, 0.3) * size * MPP), 0.25 * size * MPP, 0.2 * size * MPP)
        width = rng.uniform(9, 22) * ends * (1 + 0.2 * waves(nodes, 100, rng))
        fold = np.maximum(fold, ramp(np.abs(across) - width, 1, -3) * (ends > 0) * np.float32(rng.uniform(0.6, 1)))
    return fold


def _ink(depth: Floats, size: int, rng: np.random.Generator) -> Floats:
    """Return pen marks, 0 to 1: in two slides of five one or two strokes on the glass, some over tissue."""
    nodes = depth.shape[0]
    y, x = grid(nodes)
    ink = np.zeros((nodes, nodes), np.float32)
    for _ in range(rng.integers(1, 3) if rng.random() < 0.4 else 0):
        spots: npt.NDArray[np.intp] = np.argwhere(np.abs(depth + rng.choice([90.0, 60.0, 0.0])) < 10)
        if not len(spots):
            continue
        at = (spots[rng.integers(len(spots))] - MARGIN) * PITCH
        turn, bend = rng.uniform(0, math.pi), rng.normal(0, 0.6)
        along = ((x - at[1]) * math.cos(turn) + (y - at[0]) * math.sin(turn)) * MPP
        across = ((y - at[0]) * math.cos(turn) - (x - at[1]) * math.sin(turn)) * MPP
        across = across + bend * along**2 / (size * MPP) + 4 * waves(nodes, 90, rng)
        length, width = rng.uniform(0.12, 0.3) * size * MPP, rng.uniform(30, 55)
        stroke = ramp(np.abs(across), width, width - 5) * ramp(np.abs(along), length, length - 6)
        ink = np.maximum(ink, stroke * np.float32(rng.uniform(0.6, 1.0)))
    return np.asarray(ink * (1 + 0.12 * waves(nodes, 50, rng)), np.float32)
