"""Outlines of the regions of a mask: polygons along the borders of its cells, with holes."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.ndimage import label

Ring = list[tuple[int, int]]
"""Corners (x, y) in cells, the first not repeated; along x the inside lies below (y runs down)."""
_Step = tuple[int, int]


@dataclass(frozen=True)
class Region:
    """A connected region.

    Attributes:
        cells: [N] int64, its cells in the flattened mask.
        outline: its outer border.
        holes: its inner borders.
    """

    cells: np.ndarray
    outline: Ring
    holes: list[Ring]


def find_regions(mask: np.ndarray) -> list[Region]:
    """Return the regions of a mask [H, W] bool, those whose cells share sides, in the order of their first cells."""
    labels, count = label(mask)
    outlines: dict[int, Ring] = {}
    holes: dict[int, list[Ring]] = {}
    for ring, (row, column) in _rings(mask):
        if _area(ring) > 0:
            outlines[labels[row, column]] = ring
        else:
            holes.setdefault(labels[row, column], []).append(ring)
    places = np.flatnonzero(labels)
    owners = labels.ravel()[places]
    order = np.argsort(owners, kind="stable")
    bounds = np.searchsorted(owners[order], np.arange(1, count + 2))
    return [
        Region(places[order[bounds[number - 1] : bounds[number]]], outlines[number], holes.get(number, []))
        for number in range(1, count + 1)
    ]


def _rings(mask: np.ndarray) -> Iterator[tuple[Ring, tuple[int, int]]]:
    """Yield each closed border, and one cell (row, column) inside it."""
    steps = _steps(mask)
    done: set[tuple[tuple[int, int], _Step]] = set()
    for start, cell in steps.items():
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
            step = next(turn for turn in turns if (corner, turn) in steps)
        if before == start[1]:
            ring.pop(0)  # it began in the middle of a straight line
        yield ring, cell


def _steps(mask: np.ndarray) -> dict[tuple[tuple[int, int], _Step], tuple[int, int]]:
    """Return the sides of cells between inside and outside: start (x, y) and step, and the cell (row, column)."""
    padded = np.pad(mask, 1)
    steps = {}
    for (down, right), start, step in (
        ((-1, 0), (0, 0), (1, 0)),  # above: along x, from the upper left corner
        ((0, 1), (1, 0), (0, 1)),
        ((1, 0), (1, 1), (-1, 0)),
        ((0, -1), (0, 1), (0, -1)),
    ):
        beside = padded[1 + down : padded.shape[0] - 1 + down, 1 + right : padded.shape[1] - 1 + right]
        for row, column in np.argwhere(mask & ~beside).tolist():
            steps[(column + start[0], row + start[1]), step] = (row, column)
    return steps


def _area(ring: Ring) -> float:
    x, y = np.array(ring).T
    return float((x * np.roll(y, -1) - y * np.roll(x, -1)).sum() / 2)
