"""Scenes of soft-edged ellipsoids, painted on a voxel grid: what every phantom is made with.

A scene is a list of parts, painted in turn, in the patient's frame: millimetres along right, anterior and superior.
Borders are anti-aliased (partial volume): how far a voxel lies from a surface says how much of it the part covers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Matrix = npt.NDArray[np.float64]
Box = tuple[slice, slice, slice]
Point = tuple[float, float, float] | Matrix  # mm along right, anterior, superior

LONG = 1e4  # mm: the half axis of a cylinder, far beyond any field of view
_NO_CURVATURE = 1e-7  # 1/mm^2: below this a surface is flat along that direction, and the axis drops out of the sums
_SLAB_VOXELS = 400_000  # painted at a time: the intermediate arrays then stay in the processor's cache
_RELIEF_PITCH = 30.0  # mm between the bumps of lumpy surfaces


@dataclass(frozen=True)
class Grid:
    """Voxel centres in the patient's frame: `shape` voxels, `spacing` mm apart, the first one at `start` mm."""

    shape: tuple[int, int, int]
    spacing: tuple[float, float, float]
    start: tuple[float, float, float]

    def part(self, box: Box) -> "Grid":
        """Return the grid of the voxels in a box."""
        first = [side.start for side in box]
        x, y, z = (s + f * h for s, f, h in zip(self.start, first, self.spacing, strict=True))
        i, j, k = (side.stop - side.start for side in box)
        return Grid((i, j, k), self.spacing, (x, y, z))

    def axes(self, origin: npt.ArrayLike = (0.0, 0.0, 0.0)) -> list[Floats]:
        """Return the coordinates from `origin`, mm, as three float32 arrays [X, 1, 1], [1, Y, 1], [1, 1, Z]."""
        lines = [
            (s - o + h * np.arange(n)).astype(np.float32)
            for n, h, s, o in zip(self.shape, self.spacing, self.start, np.asarray(origin), strict=True)
        ]
        return list(np.ix_(*lines))


@dataclass(frozen=True)
class Ellipsoid:
    """The points `centre + axes @ u` with |u| <= 1; `axes` [3, 3] holds the half axes in mm as its columns.

    `lumps` is how far the surface strays, as a share of the half axes, with the bumps of the case's relief.
    """

    centre: Matrix
    axes: Matrix
    lumps: float = 0.0


@dataclass(frozen=True)
class Part:
    """A union of solids of one value, cut to the `inside` solids, less the `carved` ones.

    `value`: a number or, for images of several channels, an array [C].
    `surface`: a point of a level; only what lies anterior of it is painted (gas over fluid in a patient on the back).
    `label`: the label of the voxels that are at least half covered; parts painted later take voxels back.
    """

    name: str
    value: Any
    solids: tuple[Ellipsoid, ...]
    inside: tuple[Ellipsoid, ...] = ()
    carved: tuple[Ellipsoid, ...] = ()
    surface: Matrix | None = None
    label: int = 0


@dataclass(frozen=True)
class Stencil:
    """A part given by its share of each voxel in a box of the grid: `cover` [X, Y, Z] float32 in [0, 1]."""

    value: float
    box: Box
    cover: Floats


@dataclass(frozen=True)
class Look:
    """How the scene is imaged: value of empty space, noise and texture (standard deviations), and the range kept."""

    empty: float
    noise: float
    texture: float
    bounds: tuple[float, float]
    texture_pitch: float = 7.0  # mm


def ellipsoid(centre: Point, radii: Point, lumps: float = 0.0, turn: Matrix | None = None) -> Ellipsoid:
    """Return an ellipsoid with half axes `radii`, mm, along the patient's axes or, with `turn`, along its columns."""
    axes = np.diag(np.asarray(radii, dtype=np.float64))
    return Ellipsoid(np.asarray(centre, dtype=np.float64), axes if turn is None else turn @ axes, lumps)


def tube(start: Point, stop: Point, radius: float, lumps: float = 0.0) -> Ellipsoid:
    """Return an ellipsoid of thickness `radius`, mm, stretched from one point to another."""
    first, last = np.asarray(start, dtype=np.float64), np.asarray(stop, dtype=np.float64)
    along = (last - first) / 2
    # any two directions across will do: the tube is round
    across = np.cross(along, np.eye(3)[np.argmin(np.abs(along))])
    across *= radius / np.linalg.norm(across)
    other = np.cross(along, across) / np.linalg.norm(along)
    return Ellipsoid((first + last) / 2, np.stack([along, across, other], axis=1), lumps)


def grown(solid: Ellipsoid, millimetres: float) -> Ellipsoid:
    """Return the ellipsoid with each half axis longer by so many millimetres (shorter where negative)."""
    length = np.linalg.norm(solid.axes, axis=0)
    return replace(solid, axes=solid.axes * np.maximum(0.1, (length + millimetres) / length))


def rotation(axis: int, degrees: float) -> Matrix:
    """Return the rotation [3, 3] about a patient axis (0 right, 1 anterior, 2 superior)."""
    turn = np.eye(3)
    i, j = [a for a in range(3) if a != axis]
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    turn[[i, i, j, j], [i, j, i, j]] = c, -s, s, c
    return turn


def posed(part: Part, matrix: Matrix, offset: Matrix) -> Part:
    """Return the part moved by the affine map `matrix @ point + offset` (scale, rotation, mirror image)."""

    def moved(solids: tuple[Ellipsoid, ...]) -> tuple[Ellipsoid, ...]:
        return tuple(replace(s, centre=matrix @ s.centre + offset, axes=matrix @ s.axes) for s in solids)

    surface = None if part.surface is None else matrix @ part.surface + offset
    return replace(
        part, solids=moved(part.solids), inside=moved(part.inside), carved=moved(part.carved), surface=surface
    )


def paint(
    grid: Grid, parts: Sequence[Part | Stencil], look: Look, rng: np.random.Generator
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.uint8]]:
    """Paint the parts in turn, add texture and noise, and return the image and the labels.

    Args:
        grid: the voxels to paint.
        parts: the scene, what is painted last on top.
        look: empty space, texture, noise and range.
        rng: draws the relief of lumpy surfaces, the texture and the noise.

    Returns:
        The image [X, Y, Z] int16 and the labels [X, Y, Z] uint8, axes right, anterior, superior.
    """
    image = np.empty(grid.shape, dtype=np.int16)
    labels = np.zeros(grid.shape, dtype=np.uint8)
    relief = ValueNoise(grid, _RELIEF_PITCH, rng)
    texture = ValueNoise(grid, look.texture_pitch, rng)
    boxes = boxes_of(parts, grid)
    for slab in slabs(grid):
        here = grid.part(slab)
        values = np.full(here.shape, look.empty, dtype=np.float32)
        bumps = relief.sample(here)
        lay(values, labels[slab], here, slab[0], list(zip(parts, boxes, strict=True)), bumps)
        values += np.float32(look.texture) * texture.sample(here)
        values += np.float32(look.noise) * rng.standard_normal(here.shape, dtype=np.float32)
        image[slab] = np.rint(np.clip(values, *look.bounds))
    return image, labels


def boxes_of(parts: Sequence[Part | Stencil], grid: Grid) -> list[Box]:
    """Return the voxels of the grid that each part can touch."""
    return [part.box if isinstance(part, Stencil) else _box(part, grid) for part in parts]


def lay(
    values: Floats,
    labels: npt.NDArray[np.uint8],
    here: Grid,
    side: slice,
    scene: Sequence[tuple[Part | Stencil, Box]],
    bumps: Floats,
) -> None:
    """Lay the parts in turn over the values and labels of one slab, in place.

    Args:
        values: [X, Y, Z] or, for parts with one value for each channel, [C, X, Y, Z] float32.
        labels: [X, Y, Z] uint8.
        here: the voxels of the slab.
        side: where the slab lies along the first axis of the whole grid.
        scene: the parts with their boxes in the whole grid, what is painted last on top.
        bumps: the relief of lumpy surfaces, [X, Y, Z] float32.
    """
    for part, box in scene:
        if (local := _within(box, side)) is None:
            continue
        if isinstance(part, Stencil):
            cover = part.cover[side.start + local[0].start - box[0].start :][: local[0].stop - local[0].start]
        else:
            cover = _cover(part, here.part(local), bumps[local])
            np.putmask(labels[local], cover >= 0.5, part.label)
        value = np.asarray(part.value, dtype=np.float32)[..., None, None, None]
        under = values[..., *local]
        under += cover * (value - under)


class ValueNoise:
    """Smooth random bumps of unit standard deviation at the knots: normal values, `pitch` mm apart, and C1 between."""

    def __init__(self, grid: Grid, pitch: float, rng: np.random.Generator) -> None:
        knots = [int((n - 1) * h / pitch) + 2 for n, h in zip(grid.shape, grid.spacing, strict=True)]
        self._knots = rng.standard_normal(knots, dtype=np.float32)
        self._start, self._pitch = grid.start, pitch

    def sample(self, grid: Grid) -> Floats:
        """Return the bumps at the voxels of a part of the grid that this was made for, [X, Y, Z] float32."""
        out = self._knots
        for axis in (0, 2, 1):  # a slab is thin in x, and the last step copies whole lines along z
            place = grid.start[axis] - self._start[axis] + grid.spacing[axis] * np.arange(grid.shape[axis])
            knot, share = np.divmod(place / self._pitch, 1.0)
            # rounding may put the first or last voxel a hair outside
            low = np.clip(knot.astype(np.intp), 0, out.shape[axis] - 2)
            weight = (share * share * (3 - 2 * share)).astype(np.float32)
            weight = weight.reshape([-1 if a == axis else 1 for a in range(3)])
            below = out.take(low, axis)
            out = below + weight * (out.take(low + 1, axis) - below)
        return out


def distance(solid: Ellipsoid, grid: Grid, bumps: Floats | float = 0.0) -> Floats:
    """Return the signed distance to the surface in voxels along its normal, negative inside, to first order.

    float32, of a shape that broadcasts to the grid's (a cylinder needs no [X, Y, Z] array).
    """
    bend = np.linalg.inv(solid.axes @ solid.axes.T)
    axes = grid.axes(solid.centre)
    curved = [[j for j in range(3) if abs(bend[i, j]) > _NO_CURVATURE] for i in range(3)]
    slopes: list[Any] = [sum(float(bend[i, j]) * axes[j] for j in curved[i]) for i in range(3)]
    square: Any = sum(axes[i] * slopes[i] for i in range(3) if curved[i])
    steep: Any = sum((grid.spacing[i] * slopes[i]) ** 2 for i in range(3) if curved[i])
    radius = np.sqrt(np.maximum(square, np.float32(1e-6)))
    level = radius - np.float32(1.0)
    if solid.lumps:
        level = level + np.float32(solid.lumps) * bumps
    result: Floats = level * radius / np.sqrt(np.maximum(steep, np.float32(1e-12)))
    return result


def _cover(part: Part, grid: Grid, bumps: Floats) -> Floats:
    """Return the share of each voxel that the part covers, [X, Y, Z] float32 in [0, 1]."""
    gap = distance(part.solids[0], grid, bumps)
    for solid in part.solids[1:]:
        gap = np.minimum(gap, distance(solid, grid, bumps))
    for solid in part.inside:
        gap = np.maximum(gap, distance(solid, grid, bumps))
    for solid in part.carved:
        gap = np.maximum(gap, -distance(solid, grid, bumps))
    if part.surface is not None:
        gap = np.maximum(gap, -grid.axes(part.surface)[1] / np.float32(grid.spacing[1]))
    return np.broadcast_to(np.clip(np.float32(0.5) - gap, 0, 1), grid.shape)


def _box(part: Part, grid: Grid) -> Box:
    """Return the voxels that a part can touch; its sides may be empty."""
    lows, highs = zip(*(_reach(solid, grid) for solid in part.solids), strict=True)
    low, high = np.min(lows, axis=0), np.max(highs, axis=0)
    for solid in part.inside:
        bounds = _reach(solid, grid)
        low, high = np.maximum(low, bounds[0]), np.minimum(high, bounds[1])
    low = np.clip(np.floor(low), 0, grid.shape).astype(int)
    high = np.clip(np.ceil(high) + 1, low, grid.shape).astype(int)
    x, y, z = (slice(int(a), int(b)) for a, b in zip(low, high, strict=True))
    return x, y, z


def _reach(solid: Ellipsoid, grid: Grid) -> tuple[Matrix, Matrix]:
    """Return the first and last voxel index, as fractions, that a solid with its soft edge and lumps can touch."""
    half = np.linalg.norm(solid.axes, axis=1) * (1 + 4 * solid.lumps)
    centre = (solid.centre - grid.start) / grid.spacing
    half = half / grid.spacing + 1
    return centre - half, centre + half


def slabs(grid: Grid) -> Iterator[Box]:
    """Cut the grid along its first axis into boxes of about `_SLAB_VOXELS`."""
    nx, ny, nz = grid.shape
    thick = max(1, _SLAB_VOXELS // (ny * nz))
    for first in range(0, nx, thick):
        yield slice(first, min(first + thick, nx)), slice(0, ny), slice(0, nz)


def _within(box: Box, side: slice) -> Box | None:
    """Return the box in the slab's own indices; None where they do not meet."""
    first, last = max(box[0].start, side.start), min(box[0].stop, side.stop)
    if first >= last or box[1].start >= box[1].stop or box[2].start >= box[2].stop:
        return None
    return slice(first - side.start, last - side.start), box[1], box[2]
