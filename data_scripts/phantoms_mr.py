"""Head MRI phantoms: the brain, its look-alikes of tumour, and tumours, in four channels of relative signal.

Anatomy is drawn for one reference head (millimetres along right, anterior and superior, origin between the thalami),
then posed as a whole. What is no tumour but looks like one in a channel: vessels, sinuses and choroid plexus after
contrast, changed white matter around the ventricles in FLAIR, cerebrospinal fluid in T2.
"""

from dataclasses import dataclass

import numpy as np

from data_scripts.painting import Ellipsoid, Floats, Matrix, Part, Point, ellipsoid, grown, rotation, tube

CHANNELS = ("FLAIR", "T1w", "t1gd", "T2w")  # MSD Task01's own order and spelling
LABELS = ("background", "edema", "non-enhancing tumor", "enhancing tumour")  # likewise, spelling included
EDEMA, NON_ENHANCING, ENHANCING = 1, 2, 3
# Relative signal per channel in the order above; white matter in T1w is 1
SIGNALS = {
    "white matter": (0.62, 1.00, 1.00, 0.46),
    "grey matter": (0.74, 0.76, 0.79, 0.64),
    "fluid": (0.24, 0.30, 0.32, 1.12),
    "changed white matter": (1.14, 0.93, 0.93, 0.60),
    "choroid plexus": (0.45, 0.40, 1.60, 1.05),
    "blood": (0.26, 0.38, 1.70, 0.22),
    "edema": (1.10, 0.68, 0.69, 0.94),
    "non-enhancing": (0.58, 0.38, 0.41, 1.12),
    "enhancing": (0.86, 0.66, 1.55, 0.84),
}
FOLD_PITCHES = (10.0, 14.0)  # mm between the knots of the fields whose sum is zero in the sulci
SULCUS = 0.8  # mm: half width of a sulcus
CORTEX = 3.2  # mm
MENINGES = 1.5  # mm of fluid kept around the brain by skull stripping
_SULCUS_DEPTH = 13.0  # mm
_NO_RIM, _OPEN_RIM, _TWO_LESIONS = 0.15, 0.3, 0.15  # shares of the lesions, and of the cases
_SITES: dict[str, Point] = {
    "frontal": (30, 36, 24),
    "parietal": (32, -32, 32),
    "temporal": (42, -4, -14),
    "occipital": (28, -54, 12),
    "insular": (36, 8, 14),
}


@dataclass(frozen=True)
class Head:
    """What is drawn of a head before it is posed: parts over the brain, and each tissue's signal per channel [4]."""

    parts: tuple[Part, ...]
    signals: dict[str, Matrix]


@dataclass(frozen=True)
class Depths:
    """Millimetres inside a surface at each voxel [X, Y, Z] float32, negative outside.

    `brain`: the brain without its sulci; `matter`: what is no fluid, so that `matter` - CORTEX is white matter.
    """

    brain: Floats
    matter: Floats


def draw_head(rng: np.random.Generator) -> Head:
    """Draw the reference head's parts in the order they are painted, the tumours, labelled 1 to 3, last."""
    signals = _draw_signals(rng)
    ventricles = _ventricles(rng)
    parts = [
        *_changed_white_matter(signals, ventricles, rng),
        *_nuclei(signals, rng),
        Part("ventricles", signals["fluid"], ventricles),
        *_choroid_plexus(signals, rng),
        *_vessels(signals, rng),
    ]
    sites = rng.permutation(list(_SITES))
    for site in sites[: 1 + int(rng.random() < _TWO_LESIONS)]:
        radius = rng.uniform(17, 21) if site == sites[0] else rng.uniform(14, 16)
        parts += _lesion(signals, _SITES[str(site)], float(radius), ventricles, rng)
    return Head(tuple(parts), signals)


def depths(x: Floats, y: Floats, z: Floats, folds: Floats) -> Depths:
    """Return how deep points of the reference head lie in the brain and in its grey and white matter.

    Args:
        x: mm to the right of the middle, [X, Y, Z] float32.
        y: mm to the front, likewise.
        z: mm upwards, likewise.
        folds: random field of unit deviation; the sulci of the cerebrum are its zeros.
    """
    side = np.abs(x)
    top = np.where(z > 0, np.float32(65.0), np.float32(37.0))
    hemispheres = _depth(x, y + 4, z, (67.0, 86.0, top))
    temporal = _depth(side - 44, y - 6, z + 19 - 0.1 * y, (21.0, 42.0, 21.0))
    # the surface of a head is lumpy, and its halves differ
    cerebrum = np.maximum(hemispheres, temporal) + 1.5 * folds
    callosum = np.maximum(_depth(y + 6, z - 4, 0 * z, (46.0, 27.0, 30.0)), 0)
    surface = np.minimum(cerebrum, np.hypot(x - 0.6 * folds, callosum))
    sulci = 5.0 * np.abs(folds) + 0.8 * np.maximum(surface - _SULCUS_DEPTH, 0)
    insula = np.maximum(np.maximum(38 - side, np.abs(y - 2) - 26), 0)
    sylvian = np.hypot(z + 4 - 0.25 * np.abs(y - 2), insula)
    cerebral = np.minimum(np.minimum(surface, sulci), sylvian) - SULCUS
    cerebellum = _depth(x, y + 51, z + 36, (53.0, 36.0, 25.0))
    folia = 2.6 * np.abs(np.sin((z + 0.3 * y) * np.float32(np.pi / 7) + folds)) + np.maximum(cerebellum - 10, 0)
    # the tentorium keeps the two apart
    cerebellar = np.minimum(np.minimum(cerebellum, folia), -1 - cerebrum) - 0.3
    stem = _depth(x, y + 24 - 0.2 * (z + 40), z + 40, (14.0, 13.0, 50.0))
    brain = np.maximum(np.maximum(cerebrum, cerebellum), stem)
    matter = np.maximum(np.maximum(cerebral, cerebellar), np.where(stem > 0, stem + CORTEX, stem))
    return Depths(brain, matter)


def _depth(x: Floats, y: Floats, z: Floats, radii: tuple[float, float, float | Floats]) -> Floats:
    """Return how deep points, mm from its centre, lie in an ellipsoid, mm to first order."""
    a, b, c = radii
    x, y, z = x / np.float32(a), y / np.float32(b), z / np.float32(c)
    square = x * x + y * y + z * z
    steep = (x / np.float32(a)) ** 2 + (y / np.float32(b)) ** 2 + (z / np.float32(c)) ** 2
    result: Floats = (np.sqrt(square) - square) / np.sqrt(np.maximum(steep, np.float32(1e-9)))
    return result


def _draw_signals(rng: np.random.Generator) -> dict[str, Matrix]:
    """Vary each tissue a little, then the contrast of each channel; the order of the normal tissues stays."""
    contrast = rng.uniform(0.85, 1.2, len(CHANNELS))
    return {
        name: (np.array(mean) * rng.uniform(0.95, 1.05, len(CHANNELS))) ** contrast for name, mean in SIGNALS.items()
    }


def _about(rng: np.random.Generator, point: Point, reach: float) -> Matrix:
    return np.asarray(point) + rng.uniform(-reach, reach, 3)


def _sided(side: int, point: Point) -> Matrix:
    return np.asarray(point, dtype=np.float64) * (side, 1, 1)


def _ventricles(rng: np.random.Generator) -> tuple[Ellipsoid, ...]:
    """The fourth and third ventricle, horns, bodies and atria of the lateral ones, the temporal horns last."""
    wide = rng.uniform(0.75, 1.5)
    solids = [ellipsoid((0, -4, 0), (1.6 * wide, 14, 10)), ellipsoid((0, -42, -36), (6 * wide, 5, 10))]
    horns: list[tuple[Point, Point, float]] = [
        ((11, 34, 8), (8, -4, 21), 5.5),
        ((8, 14, 20), (21, -36, 15), 5.0),
        ((18, -26, 16), (25, -46, 4), 6.0),
        ((25, -36, 8), (21, -62, 2), 4.0),
    ]
    for side in (-1, 1):
        tilt = rng.uniform(0.85, 1.15)
        solids += [tube(_sided(side, a), _sided(side, b), r * wide * tilt, 0.04) for a, b, r in horns]
    temporal = (tube(_sided(side, (28, -36, 4)), _sided(side, (33, 2, -20)), 3.0 * wide, 0.04) for side in (-1, 1))
    return (*solids, *temporal)


def _changed_white_matter(
    signals: dict[str, Matrix], ventricles: tuple[Ellipsoid, ...], rng: np.random.Generator
) -> list[Part]:
    """Caps around the lateral ventricles, thin or thick, and small spots: bright in FLAIR as edema is."""
    value = signals["changed white matter"]
    caps = tuple(grown(solid, rng.uniform(3.0, 7.5)) for solid in ventricles[2:])
    spots = []
    for _ in range(int(rng.integers(2, 18))):
        x, y, z = rng.choice((-1, 1)) * rng.uniform(24, 36), rng.uniform(-50, 40), rng.uniform(22, 38)
        spots.append(ellipsoid((x, y, z), rng.uniform(3, 6, 3), 0.1))
    return [Part("changed white matter", value, solids) for solids in (caps, tuple(spots)) if solids]


def _nuclei(signals: dict[str, Matrix], rng: np.random.Generator) -> list[Part]:
    """Thalamus, caudate and lentiform nuclei on both sides."""
    grey, pale = signals["grey matter"], 0.6 * signals["grey matter"] + 0.4 * signals["white matter"]
    size = rng.uniform(0.9, 1.1)
    parts = []
    for side in (-1, 1):
        parts += [
            Part("thalamus", pale, (ellipsoid(_sided(side, (11, -16, 3)), np.array([9, 15, 10]) * size, 0.03),)),
            Part("lentiform", grey, (ellipsoid(_sided(side, (27, 4, 1)), np.array([6, 17, 10]) * size, 0.03),)),
            Part("caudate", grey, (tube(_sided(side, (14, 30, 8)), _sided(side, (20, -14, 20)), 6 * size, 0.03),)),
        ]
    return parts


def _choroid_plexus(signals: dict[str, Matrix], rng: np.random.Generator) -> list[Part]:
    """In both atria, of varying thickness."""
    thick = rng.uniform(3.0, 5.0)
    ends = ((18, -26, 15), (27, -44, 2))
    solids = tuple(tube(_sided(side, ends[0]), _sided(side, ends[1]), thick, 0.15) for side in (-1, 1))
    return [Part("choroid plexus", signals["choroid plexus"], solids)]


def _vessels(signals: dict[str, Matrix], rng: np.random.Generator) -> list[Part]:
    """The sinuses, falx and tentorium that skull stripping left, arteries at the base, veins."""
    radius = rng.uniform(4.0, 5.5)
    turn = np.radians(np.arange(35, 221, 15))
    arc = np.stack([0 * turn, 83.0 * np.cos(turn) - 4, 62.0 * np.sin(turn) * np.where(turn > np.pi, 0.5, 1)], axis=1)
    solids = [tube(a, b, radius) for a, b in zip(arc[:-2], arc[2:], strict=True)]
    solids += [ellipsoid((0, 4, 40), (rng.uniform(1.3, 2.6), 68, 23)), ellipsoid((0, 8, -26), (9, 7, 5))]
    solids += [tube((0, -82, -10), (0, -34, 8), 3.0), tube((0, -14, -22), (0, -22, -62), 2.0)]
    for side in (-1, 1):
        roof = rotation(1, side * 14)
        solids.append(ellipsoid(_sided(side, (25, -52, -13)), (24, 28, rng.uniform(1.3, 2.5)), 0.0, roof))
        for a, b, r in (
            ((2, -84, -14), (48, -58, -22), radius),
            ((4, 4, -18), (34, 6, -8), 2.0),
            ((30, 6, -8), (60, -14, 4), 1.8),
            ((2, 6, -16), (2, 44, 6), 1.6),
            ((2, 42, 2), (2, 20, 36), 1.6),
            ((3, -30, 11), (6, 4, 15), 1.5),
        ):
            solids.append(tube(_sided(side, a), _sided(side, b), r))
    for _ in range(int(rng.integers(14, 24))):
        # a vein from the sagittal sinus down the surface
        along, down = np.radians(rng.uniform(-50, 60)), np.radians(rng.uniform(15, 65))
        up = np.array([np.sin(down) * rng.choice((-1, 1)), np.cos(down) * np.sin(along), np.cos(down) * np.cos(along)])
        place = up * (66, 84, 64) + (0, -4, 0)
        beside = np.cross(np.cross(up, (0, 0, 1)), up) + rng.normal(0, 0.3, 3)
        solids.append(tube(place - 11 * beside, place + 11 * beside, rng.uniform(1.5, 2.6)))
    return [Part("blood", signals["blood"], (solid,)) for solid in solids]


def _lesion(
    signals: dict[str, Matrix], site: Point, radius: float, ventricles: tuple[Ellipsoid, ...], rng: np.random.Generator
) -> list[Part]:
    """Edema around a core: dead or non-enhancing inside, with an enhancing rim, an open one, or none."""
    side = int(rng.choice((-1, 1)))
    centre = _about(rng, _sided(side, site), 5)
    core = (
        ellipsoid(centre, radius * rng.uniform(0.85, 1.15, 3), 0.1),
        ellipsoid(centre + rng.uniform(-0.4, 0.4, 3) * radius, radius * rng.uniform(0.6, 0.85, 3), 0.1),
    )
    reach = rng.uniform(5, 11)
    whole = tuple(grown(solid, reach * share) for solid, share in zip(core, (1.0, rng.uniform(1.0, 1.3)), strict=True))
    # it keeps to its half of the head, out of what lies below the tentorium and of the ventricles, but for the thin
    # temporal horns, which it closes
    half = (ellipsoid((side * 1001, 0, 0), (1000, 1000, 1000)),)
    carved = (*ventricles[:-2], ellipsoid((0, -51, -36), (54, 37, 26)))

    def part(name: str, solids: tuple[Ellipsoid, ...], label: int, inside: tuple[Ellipsoid, ...] = half) -> Part:
        return Part(name, signals[name], solids, inside, carved, label=label)

    parts = [part("edema", whole, EDEMA)]
    kind = rng.random()
    if kind < _NO_RIM:
        return [*parts, part("non-enhancing", core, NON_ENHANCING)]
    thick = radius * rng.uniform(0.42, 0.55)
    parts.append(part("enhancing", core, ENHANCING))
    parts.append(part("non-enhancing", tuple(grown(solid, -thick) for solid in core), NON_ENHANCING))
    if kind < _NO_RIM + _OPEN_RIM:
        gap = ellipsoid(centre + _direction(rng) * radius, np.full(3, 1.1 * radius))
        parts += [part("non-enhancing", (solid,), NON_ENHANCING, (*half, gap)) for solid in core]
    return parts


def _direction(rng: np.random.Generator) -> Matrix:
    """Return a unit vector, all directions alike."""
    vector = rng.normal(size=3)
    return vector / np.linalg.norm(vector)
