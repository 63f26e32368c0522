"""The painter of all phantom scans: it reads an anatomy, varies it into a patient, and lays that on a voxel grid.

An anatomy (`abdomen.yaml`, `head.yaml`) is a table of organs, painted in turn, in the patient's frame: millimetres
along right, anterior and superior. Organs are ellipsoids with anti-aliased borders (partial volume).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, reduce
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import nibabel as nib
import numpy as np
import numpy.typing as npt
import yaml
from nibabel.affines import from_matvec
from scipy.linalg import null_space
from scipy.spatial.transform import Rotation

Size = Literal["small", "msd"]
Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.uint8]
Matrix = npt.NDArray[np.float64]
Box = tuple[slice, slice, slice]  # voxels, each side with start and stop
Amount = float | Sequence[float]  # a number, or from and to
Random = np.random.Generator

FLAT = 1e3  # mm: the radius of what has a flat side in the field of view
_MIRROR = np.diag([-1.0, 1, 1, 1])
_SLAB_VOXELS = 400_000  # painted at a time: the intermediate arrays then stay in the processor's cache


class Scan(NamedTuple):
    """An image int16 [X, Y, Z] or [X, Y, Z, C] and its label uint8 [X, Y, Z], with the affine [4, 4] to RAS mm."""

    image: npt.NDArray[np.int16]
    label: Labels
    affine: Matrix

    def turned(self, codes: str) -> "Scan":
        """Return the scan with its voxel axes permuted and flipped to run along the directions given (such as LPS)."""
        turn = nib.orientations.ornt_transform(nib.io_orientation(self.affine), nib.orientations.axcodes2ornt(codes))
        image, label = (nib.orientations.apply_orientation(a, turn) for a in (self.image, self.label))
        return Scan(image, label, self.affine @ nib.orientations.inv_ornt_aff(turn, self.label.shape))


@dataclass(frozen=True)
class Solid:
    """An ellipsoid: what the affine map `frame` [4, 4] makes of the unit ball.

    `lumps`: how far the surface strays, as a share of the half axes, with the bumps of the case's relief.
    `hollow`: all but the ellipsoid.
    """

    frame: Matrix
    lumps: float = 0.0
    hollow: bool = False

    def moved(self, affine: Matrix) -> "Solid":
        """Return the solid under an affine map [4, 4]."""
        return replace(self, frame=affine.dot(self.frame))

    def grown(self, length: float) -> "Solid":
        """Return the solid with each half axis longer by so much (shorter where negative)."""
        half = np.linalg.norm(self.frame[:3, :3], axis=0)
        return replace(self, frame=self.frame * np.append(np.maximum(0.1, (half + length) / half), 1))

    def bounds(self) -> Matrix:
        """Return the lowest and the highest corner [2, 3] that the lumpy ellipsoid can reach."""
        half = np.linalg.norm(self.frame[:3, :3], axis=1) * (1 + 4 * self.lumps)
        return np.stack([self.frame[:3, 3] - half, self.frame[:3, 3] + half])

    def distance(self, box: Box, bumps: Floats | float = 0.0) -> Floats:
        """Return the signed distance of voxels to the surface along its normal, negative inside, to first order.

        float32, in voxels, of a shape that broadcasts to the box's (a cylinder needs no [X, Y, Z] array).
        """
        bend = np.linalg.inv(self.frame[:3, :3] @ self.frame[:3, :3].T)
        bend[np.abs(bend) < 1e-9] = 0  # flat along that direction: the axis drops out of the sums
        lines = [(line - c).astype(np.float32) for line, c in zip(np.ogrid[box], self.frame[:3, 3], strict=True)]
        slopes: list[Any] = [sum(b * line for b, line in zip(row, lines, strict=True) if b) for row in bend.tolist()]
        square: Any = sum(line * slope for line, slope in zip(lines, slopes, strict=True) if np.ndim(slope))
        steep: Any = sum(slope**2 for slope in slopes)
        radius = np.sqrt(np.maximum(square, np.float32(1e-6)))
        level = radius - np.float32(1) + np.float32(self.lumps) * bumps if self.lumps else radius - np.float32(1)
        gap: Floats = level * radius / np.sqrt(np.maximum(steep, np.float32(1e-12)))
        return -gap if self.hollow else gap


def rotation(degrees: Sequence[float] | Matrix) -> Matrix:
    """Return the rotation [3, 3] by three angles about right, anterior and superior, in that order."""
    return Rotation.from_euler("xyz", np.asarray(degrees, np.float64), degrees=True).as_matrix()


def ball(centre: npt.ArrayLike, radii: npt.ArrayLike, turn: Sequence[float] = (0, 0, 0)) -> Solid:
    """Return an ellipsoid with half axes `radii`, mm, along the patient's axes, then turned as by `rotation`."""
    return Solid(from_matvec(rotation(turn) * np.asarray(radii, np.float64), centre))


def tube(start: npt.ArrayLike, stop: npt.ArrayLike, radius: float) -> Solid:
    """Return an ellipsoid of thickness `radius`, mm, stretched from one point to another."""
    middle, along = np.add(start, stop) / 2, np.subtract(stop, start) / 2
    return Solid(from_matvec(np.column_stack([along, radius * null_space(along[None])]), middle))


@dataclass(frozen=True)
class Organ:
    """A row of an anatomy: where an organ lies in the reference patient, of what it is made, and how it varies."""

    name: str
    layers: Mapping[str, float] = field(default_factory=dict)  # tissues painted in turn, and by how many mm grown
    balls: Sequence[Sequence[float]] = ()  # solids whose union it is: the arguments of `ball` in a row
    tubes: Sequence[Sequence[float]] = ()  # likewise
    turn: Sequence[float] = (0, 0, 0)  # of the balls
    lumps: float = 0.0  # as in `Solid`
    mirrored: bool = False  # the solids are repeated on the other side
    repeat: Sequence[Sequence[float]] = ((0,), (0,), (0,))  # offsets along each axis, mm: an organ for each combination
    shift: float = 0.0  # how far each solid may move, mm
    sized: float = 0.0  # how much its half axes may change, a share
    tilt: float = 0.0  # how far it may turn, degrees
    inside: Mapping[str, Amount] = field(default_factory=dict)  # former organs that it lies in, grown by so many mm
    carved: Mapping[str, Amount] = field(default_factory=dict)  # former organs that it leaves free, likewise
    gas: float = 0.0  # chance of a bubble in the innermost layer

    def solids(self, rng: Random, offset: Sequence[float] = (0, 0, 0)) -> list[Solid]:
        """Return the solids as a patient has them."""
        solids = [ball(row[:3], row[3:], self.turn) for row in self.balls]
        solids += [tube(row[:3], row[3:6], row[6]) for row in self.tubes]
        solids += [solid.moved(_MIRROR) for solid in solids if self.mirrored]
        for number, solid in enumerate(solids):
            axes = solid.frame[:3, :3] * rng.uniform(1 - self.sized, 1 + self.sized, 3)
            axes = rotation(rng.uniform(-self.tilt, self.tilt, 3)) @ axes
            centre = solid.frame[:3, 3] + offset + rng.uniform(-self.shift, self.shift, 3)
            solids[number] = Solid(from_matvec(axes, centre), self.lumps)
        return solids


@cache
def read_anatomy(name: str) -> dict[str, Any]:
    """Return the tables of an anatomy file beside this one: "tissues", "organs" as they are painted, and what it is."""
    tables = yaml.safe_load((Path(__file__).parent / name).read_text(encoding="utf-8"))
    return {**tables, "organs": [Organ(name, **row) for name, row in tables["organs"].items()]}


@dataclass(frozen=True)
class Part:
    """What several solids have in common: its value, an array [C] where there are channels, and its label.

    The voxels that are at least half covered get the label; parts painted later take voxels back.
    """

    value: Any
    label: int
    solids: Sequence[Solid]

    @cached_property
    def reach(self) -> npt.NDArray[np.intp]:
        """The first voxel and the end [2, 3] of what the part can cover, with a voxel to spare."""
        bounds = np.array([solid.bounds() for solid in self.solids if not solid.hollow])
        return np.stack([bounds[:, 0].max(axis=0) - 1, bounds[:, 1].min(axis=0) + 2]).astype(np.intp)


def draw(
    organs: Iterable[Organ], tissues: Mapping[str, Any], labels: Mapping[str, int], to_voxels: Matrix, rng: Random
) -> list[Part]:
    """Draw one patient's parts from an anatomy, in the order they are painted.

    `tissues`: lowest and highest value of each, drawn anew for each organ; `labels`: those of the tissues that have
    one; `to_voxels`: affine map [4, 4] from the reference patient's mm to voxel indices.
    """
    parts: list[Part] = []
    drawn: dict[str, list[Solid]] = {}

    def grown(others: Mapping[str, Amount]) -> list[Solid]:
        lengths = {name: rng.uniform(*np.broadcast_to(by, 2)) for name, by in others.items()}
        return [solid.grown(by).moved(to_voxels) for name, by in lengths.items() for solid in drawn[name]]

    for organ, offset in ((row, offset) for row in organs for offset in product(*row.repeat)):
        drawn[organ.name] = organ.solids(rng, offset)
        cuts = grown(organ.inside) + [replace(solid, hollow=True) for solid in grown(organ.carved)]
        layers = [(tissue, by, cuts) for tissue, by in organ.layers.items()]
        if rng.random() < organ.gas:
            # over the fluid of a patient on the back: in a solid so large that it is flat there
            above = drawn[organ.name][0].frame[:3, 3] + (0, FLAT + rng.uniform(-12, 18), 0)
            layers.append(("gas", layers[-1][1], [*cuts, ball(above, [FLAT] * 3).moved(to_voxels)]))
        for tissue, by, within in layers:
            value, label = rng.uniform(*tissues[tissue]), labels.get(tissue, 0)
            parts += [Part(value, label, [solid, *within]) for solid in grown({organ.name: by})]
    return parts


def slabs(shape: Sequence[int]) -> Iterator[Box]:
    """Yield the boxes that a volume [X, Y, Z] is painted in, one after another along X."""
    thick = max(1, _SLAB_VOXELS // (shape[1] * shape[2]))
    for start in range(0, shape[0], thick):
        yield slice(start, min(start + thick, shape[0])), slice(0, shape[1]), slice(0, shape[2])


def paint(values: Floats, slab: Box, parts: Iterable[Part], bumps: Floats) -> Labels:
    """Paint the parts over a slab's values [X, Y, Z] or [C, X, Y, Z]; return its labels [X, Y, Z].

    `bumps` [X, Y, Z] are those of lumpy surfaces.
    """
    labels = np.zeros(bumps.shape, np.uint8)
    corner, end = np.array([[side.start for side in slab], [side.stop for side in slab]])
    for part in parts:
        low, high = np.maximum(part.reach[0], corner), np.minimum(part.reach[1], end)
        if (low < high).all():
            (x, y, z), (i, j, k) = map(slice, low, high), map(slice, low - corner, high - corner)
            near = bumps[i, j, k]
            gap: Floats = reduce(np.maximum, (solid.distance((x, y, z), near) for solid in part.solids))
            cover = np.broadcast_to(np.clip(np.float32(0.5) - gap, 0, 1), near.shape)
            np.putmask(labels[i, j, k], cover >= 0.5, part.label)
            beneath = values[..., i, j, k]
            beneath += cover * (np.asarray(part.value, np.float32)[..., None, None, None] - beneath)
    return labels


def value_noise(shape: Sequence[int], spacing: npt.ArrayLike, pitch: float, rng: Random) -> Callable[[Box], Floats]:
    """Return what gives the voxels of a box, [X, Y, Z] float32, smooth random bumps.

    They are C1, and of unit standard deviation at their knots, which lie `pitch` mm apart.
    """
    step = np.asarray(spacing) / pitch  # knots per voxel
    counts = [int((n - 1) * each) + 2 for n, each in zip(shape, step, strict=True)]
    knots = rng.standard_normal(counts, dtype=np.float32)

    def sample(box: Box) -> Floats:
        out = knots
        for axis in (0, 2, 1):  # a slab is thin in x, and the last step copies whole lines along z
            knot, share = np.divmod(np.arange(box[axis].start, box[axis].stop) * step[axis], 1.0)
            low = knot.astype(np.intp)
            weight = (share * share * (3 - 2 * share)).astype(np.float32)
            weight = weight.reshape([-1 if a == axis else 1 for a in range(3)])
            below = out.take(low, axis)
            out = below + weight * (out.take(low + 1, axis) - below)
        return out

    return sample
