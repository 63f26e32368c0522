"""Anatomy as tables of organs, and the painter that lays them on a voxel grid: what every phantom scan is made with.

An anatomy is a list of organs, painted in turn, in the patient's frame: millimetres along right, anterior and superior.
Organs are ellipsoids, which vary from patient to patient and are then carried to voxel indices. Their borders are
anti-aliased (partial volume): how far a voxel lies from a surface says how much of it they cover.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.uint8]
Matrix = npt.NDArray[np.float64]
Box = tuple[slice, slice, slice]  # voxels, each side with start and stop
Point = tuple[float, float, float] | Matrix  # mm along right, anterior, superior

LONG = 1e6  # mm: the half axis of a cylinder, far beyond any field of view
FLAT = 1e3  # mm: the half axis of what has a flat side in the field of view
_NO_CURVATURE = 1e-9  # 1/voxel^2: below this a surface is flat along that direction, and the axis drops out of the sums
_SLAB_VOXELS = 400_000  # painted at a time: the intermediate arrays then stay in the processor's cache


@dataclass(frozen=True)
class Scan:
    """An image and its label [X, Y, Z] uint8 on one grid, with the affine [4, 4] to RAS mm.

    `image`: int16, [X, Y, Z] or, with several channels, [X, Y, Z, C].
    """

    image: npt.NDArray[np.int16]
    label: Labels
    affine: Matrix

    def turned(self, codes: str) -> "Scan":
        """Return the scan with its voxel axes permuted and flipped to run along the directions given (such as LPS)."""
        turn = nib.orientations.ornt_transform(nib.io_orientation(self.affine), nib.orientations.axcodes2ornt(codes))
        image, label = (nib.orientations.apply_orientation(a, turn) for a in (self.image, self.label))
        return Scan(image, label, self.affine @ nib.orientations.inv_ornt_aff(turn, self.label.shape))


@dataclass(frozen=True)
class Ellipsoid:
    """The points `centre + axes @ u` with |u| <= 1; `axes` [3, 3] holds the half axes as its columns.

    `lumps` is how far the surface strays, as a share of the half axes, with the bumps of the case's relief.
    """

    centre: Matrix
    axes: Matrix
    lumps: float = 0.0

    def moved(self, affine: Matrix) -> "Ellipsoid":
        """Return the ellipsoid under an affine map [4, 4]."""
        return replace(self, centre=affine[:3, :3] @ self.centre + affine[:3, 3], axes=affine[:3, :3] @ self.axes)

    def grown(self, length: float) -> "Ellipsoid":
        """Return the ellipsoid with each half axis longer by so much (shorter where negative)."""
        half = np.linalg.norm(self.axes, axis=0)
        return replace(self, axes=self.axes * np.maximum(0.1, (half + length) / half))

    def bounds(self) -> tuple[Matrix, Matrix]:
        """Return the lowest and the highest corner [3] that the lumpy solid can reach."""
        half = np.linalg.norm(self.axes, axis=1) * (1 + 4 * self.lumps)
        return self.centre - half, self.centre + half

    def distance(self, box: Box, bumps: Floats | float = 0.0) -> Floats:
        """Return the signed distance of voxels to the surface along its normal, negative inside, to first order.

        float32, in voxels, of a shape that broadcasts to the box's (a cylinder needs no [X, Y, Z] array).
        """
        bend = np.linalg.inv(self.axes @ self.axes.T)
        axes = [(line - c).astype(np.float32) for line, c in zip(np.ogrid[box], self.centre, strict=True)]
        curved = [[j for j in range(3) if abs(bend[i, j]) > _NO_CURVATURE] for i in range(3)]
        slopes: list[Any] = [sum(float(bend[i, j]) * axes[j] for j in curved[i]) for i in range(3)]
        square: Any = sum(axes[i] * slopes[i] for i in range(3) if curved[i])
        steep: Any = sum(slopes[i] ** 2 for i in range(3) if curved[i])
        radius = np.sqrt(np.maximum(square, np.float32(1e-6)))
        level = radius - np.float32(1.0)
        if self.lumps:
            level = level + np.float32(self.lumps) * bumps
        result: Floats = level * radius / np.sqrt(np.maximum(steep, np.float32(1e-12)))
        return result


def ball(centre: Point, radii: Point, turn: Matrix | None = None) -> Ellipsoid:
    """Return an ellipsoid with half axes `radii`, mm, along the patient's axes or, with `turn`, along its columns."""
    axes = np.diag(np.asarray(radii, dtype=np.float64))
    return Ellipsoid(np.asarray(centre, dtype=np.float64), axes if turn is None else turn @ axes)


def tube(start: Point, stop: Point, radius: float) -> Ellipsoid:
    """Return an ellipsoid of thickness `radius`, mm, stretched from one point to another."""
    first, last = np.asarray(start, dtype=np.float64), np.asarray(stop, dtype=np.float64)
    along = (last - first) / 2
    # any two directions across will do: the tube is round
    across = np.cross(along, np.eye(3)[np.argmin(np.abs(along))])
    across *= radius / np.linalg.norm(across)
    other = np.cross(along, across) / np.linalg.norm(along)
    return Ellipsoid((first + last) / 2, np.stack([along, across, other], axis=1))


def chain(points: Sequence[Point], radius: float) -> tuple[Ellipsoid, ...]:
    """Return overlapping tubes along a line of points, each from one point to the next but one."""
    return tuple(tube(start, stop, radius) for start, stop in zip(points[:-2], points[2:], strict=True))


def both(*solids: Ellipsoid) -> tuple[Ellipsoid, ...]:
    """Return solids of one side of the patient, and their mirror images."""
    return (*solids, *(solid.moved(np.diag([-1.0, 1.0, 1.0, 1.0])) for solid in solids))


def rotation(axis: int, degrees: float) -> Matrix:
    """Return the rotation [3, 3] about a patient axis (0 right, 1 anterior, 2 superior)."""
    turn = np.eye(3)
    i, j = [a for a in range(3) if a != axis]
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    turn[[i, i, j, j], [i, j, i, j]] = c, -s, s, c
    return turn


@dataclass(frozen=True)
class Organ:
    """A row of an anatomy: where an organ lies in the reference patient, of what it is made, and how it varies.

    `layers`: tissues painted in turn, each with how far (mm) the solids are grown first; without any, the organ is but
    a shape for others.
    `solids`: their union is the organ.
    `shift`, `sized`, `tilt`: how far each solid may move (mm), its half axes change (a share), and it turn (degrees).
    `lumps`: as in `Ellipsoid`.
    `inside`, `carved`: former organs of which this one lies in all solids, or leaves all free, grown by so many mm.
    `gas`: chance of a bubble in the innermost layer.
    """

    name: str
    layers: Mapping[str, float]
    solids: tuple[Ellipsoid, ...]
    shift: float = 0.0
    sized: float = 0.0
    lumps: float = 0.0
    tilt: float = 0.0
    inside: Mapping[str, float] = field(default_factory=dict)
    carved: Mapping[str, float] = field(default_factory=dict)
    gas: float = 0.0

    def varied(self, solid: Ellipsoid, rng: np.random.Generator) -> Ellipsoid:
        """Return one of the solids as a patient has it."""
        axes = solid.axes * rng.uniform(1 - self.sized, 1 + self.sized, 3)
        for axis in range(3) if self.tilt else ():
            axes = rotation(axis, rng.uniform(-self.tilt, self.tilt)) @ axes
        return Ellipsoid(solid.centre + rng.uniform(-self.shift, self.shift, 3), axes, self.lumps)


@dataclass(frozen=True)
class Part:
    """A solid of one value among the voxels, cut to all `inside` solids, less the `carved` ones.

    `value`: a number or, for images of several channels, an array [C].
    `label`: that of the voxels that are at least half covered; parts painted later take voxels back.
    """

    value: Any
    label: int
    solid: Ellipsoid
    inside: tuple[Ellipsoid, ...] = ()
    carved: tuple[Ellipsoid, ...] = ()

    def cover(self, box: Box, bumps: Floats) -> Floats:
        """Return the share of each voxel of a box that the part covers, [X, Y, Z] float32 in [0, 1]."""
        gap = self.solid.distance(box, bumps)
        for solid in self.inside:
            gap = np.maximum(gap, solid.distance(box, bumps))
        for solid in self.carved:
            gap = np.maximum(gap, -solid.distance(box, bumps))
        return np.broadcast_to(np.clip(np.float32(0.5) - gap, 0, 1), bumps.shape)


def draw(
    organs: Iterable[Organ],
    tissues: Mapping[str, tuple[Any, Any]],
    labels: Mapping[str, int],
    to_voxels: Matrix,
    rng: np.random.Generator,
) -> list[Part]:
    """Draw one patient's parts from an anatomy, in the order they are painted.

    Args:
        organs: the anatomy.
        tissues: lowest and highest value of each tissue, drawn anew for each organ.
        labels: the labels of tissues that have one.
        to_voxels: affine map [4, 4] from the reference patient's mm to voxel indices.
        rng: draws everything.
    """
    parts: list[Part] = []
    drawn: dict[str, list[Ellipsoid]] = {}

    def grown(others: Mapping[str, float]) -> tuple[Ellipsoid, ...]:
        return tuple(solid.grown(by).moved(to_voxels) for name, by in others.items() for solid in drawn[name])

    for organ in organs:
        drawn[organ.name] = [organ.varied(solid, rng) for solid in organ.solids]
        inside, carved = grown(organ.inside), grown(organ.carved)
        layers = [(tissue, by, inside) for tissue, by in organ.layers.items()]
        if rng.random() < organ.gas:
            # over the fluid of a patient on the back: in a solid so large that it is flat there
            half = drawn[organ.name][0].centre + np.array([0, FLAT + rng.uniform(-12, 18), 0])
            layers.append(("gas", layers[-1][1], (*inside, ball(half, (FLAT, FLAT, FLAT)).moved(to_voxels))))
        for tissue, by, within in layers:
            value, label = rng.uniform(*tissues[tissue]), labels.get(tissue, 0)
            parts += [Part(value, label, solid, within, carved) for solid in grown({organ.name: by})]
    return parts


def painted(
    shape: tuple[int, int, int],
    parts: Sequence[Part],
    under: Callable[[Box], Floats],
    relief: "ValueNoise",
) -> Iterator[tuple[Box, Floats, Labels]]:
    """Paint the parts in turn, slab after slab of the voxels.

    Args:
        shape: voxels along right, anterior and superior.
        parts: the scene, what is painted last on top.
        under: returns the values of a slab before anything is painted, [X, Y, Z] or, with channels, [C, X, Y, Z].
        relief: the bumps of lumpy surfaces.

    Yields:
        Each slab, its values float32 and its labels [X, Y, Z] uint8.
    """
    # what a part can reach: in all its `inside` solids, and a voxel more
    corners = [[solid.bounds() for solid in (part.solid, *part.inside)] for part in parts]
    lows = np.array([np.max([low for low, _ in each], axis=0) for each in corners]).reshape(-1, 3) - 1
    highs = np.array([np.min([high for _, high in each], axis=0) for each in corners]).reshape(-1, 3) + 2
    thick = max(1, _SLAB_VOXELS // (shape[1] * shape[2]))
    for start in range(0, shape[0], thick):
        stop = min(start + thick, shape[0])
        slab = slice(start, stop), slice(0, shape[1]), slice(0, shape[2])
        values, labels, bumps = under(slab), np.zeros((stop - start, *shape[1:]), np.uint8), relief.sample(slab)
        first = np.clip(lows, (start, 0, 0), (stop, *shape[1:])).astype(int)
        last = np.clip(highs, (start, 0, 0), (stop, *shape[1:])).astype(int)
        for number in np.flatnonzero((first < last).all(axis=1)).tolist():
            part, (x, y, z) = parts[number], map(slice, first[number].tolist(), last[number].tolist())
            local = slice(x.start - start, x.stop - start), y, z
            cover = part.cover((x, y, z), bumps[local])
            np.putmask(labels[local], cover >= 0.5, part.label)
            beneath = values[..., *local]
            beneath += cover * (np.asarray(part.value, dtype=np.float32)[..., None, None, None] - beneath)
        yield slab, values, labels


class ValueNoise:
    """Smooth random bumps over voxels, C1, of unit standard deviation at the knots, which lie `pitch` mm apart."""

    def __init__(self, shape: Sequence[int], spacing: npt.ArrayLike, pitch: float, rng: np.random.Generator) -> None:
        self._step = np.asarray(spacing) / pitch  # knots per voxel
        knots = [int((n - 1) * step) + 2 for n, step in zip(shape, self._step, strict=True)]
        self._knots = rng.standard_normal(knots, dtype=np.float32)

    def sample(self, box: Box) -> Floats:
        """Return the bumps at the voxels of a box, [X, Y, Z] float32."""
        out = self._knots
        for axis in (0, 2, 1):  # a slab is thin in x, and the last step copies whole lines along z
            knot, share = np.divmod(np.arange(box[axis].start, box[axis].stop) * self._step[axis], 1.0)
            low = knot.astype(np.intp)
            weight = (share * share * (3 - 2 * share)).astype(np.float32)
            weight = weight.reshape([-1 if a == axis else 1 for a in range(3)])
            below = out.take(low, axis)
            out = below + weight * (out.take(low + 1, axis) - below)
        return out
