"""Smooth fields over a slide: kept at one node per PITCH pixels, enlarged where they are drawn.

Node (i, j) lies at pixel ((i - MARGIN) * PITCH, (j - MARGIN) * PITCH), so that a field reaches beyond the slide's edge.
Everything is added and multiplied element by element: no product of matrices, whose last digits depend on the threads.
"""

import math
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from data_scripts.slides_stain import Floats

MPP = 0.5  # micrometres per pixel of level 0: about the 20x of a scanner
PITCH = 8  # px
MARGIN = 5  # nodes
_Value = TypeVar("_Value", np.float32, np.bool_)
Places = npt.NDArray[np.float32]  # [N, 2] row, column in pixels of level 0


def pixels(micrometres: float) -> float:
    """Return a length in pixels of level 0."""
    return micrometres / MPP


def nodes_for(size: int) -> int:
    """Return how many nodes one side of a slide of `size` px has."""
    return math.ceil(size / PITCH) + 1 + 2 * MARGIN


def waves(nodes: int, length: float, rng: np.random.Generator) -> Floats:
    """Return smooth noise [nodes, nodes], mean 0 and deviation about 1, whose bumps are about `length` um apart."""
    zoom = max(pixels(length) / 2 / PITCH, 1.0)
    coarse = rng.standard_normal((math.ceil(nodes / zoom) + 3,) * 2).astype(np.float32)
    field: Floats = ndimage.zoom(coarse, zoom, order=3)[:nodes, :nodes]
    return field


def ramp(values: Floats, low: float, high: float) -> Floats:
    """Return 0 below `low`, 1 above `high` (or the other way round where low > high), a line between."""
    share: Floats = np.clip((values - np.float32(low)) * np.float32(1 / (high - low)), 0, 1)
    return share


def grid(nodes: int) -> tuple[Floats, Floats]:
    """Return the rows [N, 1] and columns [1, N] of the nodes in pixels."""
    line = ((np.arange(nodes) - MARGIN) * PITCH).astype(np.float32)
    return line[:, None], line[None, :]


def values_at(field: npt.NDArray[_Value], places: Places) -> npt.NDArray[_Value]:
    """Return the values [N] of a field at the nodes next to places."""
    index = np.clip(np.rint(places / PITCH).astype(np.intp) + MARGIN, 0, field.shape[0] - 1)
    found: npt.NDArray[_Value] = field[index[:, 0], index[:, 1]]
    return found


def enlarge(field: Floats, top: int, left: int, height: int, width: int) -> Floats:
    """Return the pixels [height, width] from (top, left) of a field, linear between the nodes; all divide by PITCH."""
    row, column = top // PITCH + MARGIN, left // PITCH + MARGIN
    part = field[row : row + height // PITCH + 1, column : column + width // PITCH + 1]
    share = (np.arange(PITCH) / PITCH).astype(np.float32)
    rows = part[:-1, None] + (part[1:] - part[:-1])[:, None] * share[None, :, None]
    rows = rows.reshape(height, -1)
    both: Floats = rows[:, :-1, None] + (rows[:, 1:] - rows[:, :-1])[:, :, None] * share
    return both.reshape(height, width)


def scatter(size: int, spacing: float, rng: np.random.Generator) -> Places:
    """Return places [N, 2] px all over a slide, about `spacing` um apart: a shaken hexagonal lattice, turned."""
    step = pixels(spacing)
    count = math.ceil(size / step) + 2
    row, column = np.mgrid[-count:count, -count:count]
    rows = row.ravel() * step * math.sqrt(0.75)
    columns = (column + 0.5 * (row % 2)).ravel() * step
    angle = rng.uniform(0, np.pi)
    y = rows * math.cos(angle) - columns * math.sin(angle) + size / 2
    x = rows * math.sin(angle) + columns * math.cos(angle) + size / 2
    reach = step
    inside = (y > -reach) & (y < size + reach) & (x > -reach) & (x < size + reach)
    places = np.stack([y[inside], x[inside]], axis=1)
    return (places + rng.normal(0, 0.16 * step, places.shape)).astype(np.float32)
