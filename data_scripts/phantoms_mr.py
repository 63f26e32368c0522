"""Head MRI phantoms: the brain, its look-alikes of tumour, and tumours, in four channels of relative signal.

Anatomy is that of one reference head (millimetres along right, anterior and superior, origin between the thalami); it
varies, then it is posed as a whole. What is no tumour but looks like one in a channel: vessels, sinuses and choroid
plexus after contrast, changed white matter around the ventricles in FLAIR, cerebrospinal fluid in T2.
"""

from math import cos, sin

import numpy as np
import numpy.typing as npt
from nibabel.affines import from_matvec

from data_scripts.painting import (
    FLAT,
    Box,
    Floats,
    Labels,
    Matrix,
    Organ,
    Part,
    Scan,
    ValueNoise,
    ball,
    both,
    chain,
    draw,
    painted,
    rotation,
    tube,
)
from data_scripts.phantoms_ct import Size

Tissues = dict[str, tuple[Matrix, Matrix]]  # signal per channel [4], from and to

CHANNELS = ("FLAIR", "T1w", "t1gd", "T2w")  # MSD Task01's own order and spelling
LABELS = ("background", "edema", "non-enhancing tumor", "enhancing tumour")  # likewise, spelling included
NUMBERS = {"edema": 1, "non-enhancing": 2, "enhancing": 3}
MIDDLE = (0.0, -4.0, 5.0)  # mm: the middle of the field of view; the stem leaves it below
CORTEX, MENINGES = 3.2, 1.5  # mm of grey matter, and of fluid kept around the brain by skull stripping
_SULCUS, _SULCUS_DEPTH = 0.8, 13.0  # mm: half width and depth
_FOLD_PITCHES = (10.0, 14.0)  # mm between the knots of the fields whose sum is zero in the sulci
_RELIEF_PITCH = 15.0  # mm between the bumps of lumpy lesions
_BIAS_PITCH, _BIAS = 80.0, 0.12  # mm between knots; standard deviation of the logarithm at them
_TEXTURE_PITCH, _TEXTURE = 5.0, 0.03  # mm; share of the signal
_NOISE, _GAIN = (0.025, 0.05), (5.0, 7.1)  # standard deviation, of the signal; and the logarithm of what is 1
_NO_RIM, _OPEN_RIM, _TWO_LESIONS = 0.12, 0.3, 0.15  # shares of the lesions, and of the cases

# fmt: off
# Relative signal per channel in the order above; white matter in T1w is 1
SIGNALS = {
    "white matter": (0.62, 1.00, 1.00, 0.46), "grey matter": (0.74, 0.76, 0.79, 0.64),
    "pale nucleus": (0.69, 0.86, 0.87, 0.57), "changed white matter": (1.14, 0.93, 0.93, 0.60),
    "fluid": (0.24, 0.30, 0.32, 1.12), "choroid plexus": (0.45, 0.40, 1.60, 1.05), "blood": (0.26, 0.38, 1.70, 0.22),
    "edema": (1.10, 0.68, 0.69, 0.94), "non-enhancing": (0.58, 0.38, 0.41, 1.12), "enhancing": (0.86, 0.66, 1.55, 0.84),
}
_SITES = ((30, 36, 24), (32, -32, 32), (42, -4, -14), (28, -54, 12), (36, 8, 14))  # frontal, parietal, temporal, ...

_BRAIN = (
    Organ("third and fourth ventricle", {"fluid": 0}, (
        ball((0, -4, 0), (1.8, 14, 10)), ball((0, -42, -36), (6.5, 5, 10))), sized=0.25),
    Organ("lateral ventricles", {"changed white matter": 5, "fluid": 0}, both(
        tube((11, 34, 8), (8, -4, 21), 6), tube((8, 14, 20), (21, -36, 15), 5.5),
        tube((18, -26, 16), (25, -46, 4), 6.5), tube((25, -36, 8), (21, -62, 2), 4.5)), sized=0.25, lumps=0.04),
    Organ("temporal horns", {"changed white matter": 4, "fluid": 0}, both(tube((28, -36, 4), (33, 2, -20), 3.3)),
          sized=0.25, lumps=0.04),
    Organ("thalamus", {"pale nucleus": 0}, both(ball((11, -16, 3), (9, 15, 10))), sized=0.1, lumps=0.03,
          carved={"lateral ventricles": 0, "third and fourth ventricle": 0}),
    Organ("lentiform", {"grey matter": 0}, both(ball((27, 4, 1), (6, 17, 10))), sized=0.1, lumps=0.03),
    Organ("caudate", {"grey matter": 0}, both(tube((14, 30, 8), (20, -14, 20), 6)), sized=0.1, lumps=0.03,
          carved={"lateral ventricles": 0}),
    Organ("choroid plexus", {"choroid plexus": 0}, both(tube((18, -26, 15), (27, -44, 2), 4)), sized=0.2, lumps=0.15),
    # the sinuses, falx and tentorium that skull stripping left, and the arteries at the base
    Organ("sagittal sinus", {"blood": 0}, chain(
        [(0, 83 * cos(turn) - 4, 62 * sin(turn)) for turn in np.arange(0.6, 3.6, 0.26).tolist()], 4.7)),
    Organ("falx", {"blood": 0}, (ball((0, 4, 40), (2, 68, 23)),), sized=0.3),
    Organ("midline vessels", {"blood": 0}, (
        ball((0, 8, -26), (9, 7, 5)), tube((0, -82, -10), (0, -34, 8), 3), tube((0, -14, -22), (0, -22, -62), 2))),
    Organ("tentorium", {"blood": 0}, both(ball((25, -52, -13), (24, 28, 1.9), rotation(1, 14))), sized=0.3),
    Organ("vessels", {"blood": 0}, both(
        tube((2, -84, -14), (48, -58, -22), 4.7), tube((4, 4, -18), (34, 6, -8), 2),
        tube((30, 6, -8), (60, -14, 4), 1.8), tube((2, 6, -16), (2, 44, 6), 1.6),
        tube((2, 42, 2), (2, 20, 36), 1.6), tube((3, -30, 11), (6, 4, 15), 1.5))),
    # for the shape of lesions only: what lies below the tentorium
    Organ("cerebellum", {}, (ball((0, -51, -36), (54, 37, 26)),)),
)
# fmt: on


def draw_tissues(rng: np.random.Generator) -> Tissues:
    """Draw the contrast of each channel of a head; within it each tissue varies a little, and their order stays."""
    contrast = rng.uniform(0.85, 1.2, len(CHANNELS))
    return {name: ((0.97 * np.array(s)) ** contrast, (1.03 * np.array(s)) ** contrast) for name, s in SIGNALS.items()}


def head(rng: np.random.Generator) -> list[Organ]:
    """Return a head's organs in the order they are painted, over grey and white matter; the tumours come last."""
    organs = [*_BRAIN]
    for _ in range(int(rng.integers(2, 18))):
        spot = (rng.choice((-1, 1)) * rng.uniform(24, 36), rng.uniform(-50, 40), rng.uniform(22, 38))
        organs.insert(0, Organ("spot", {"changed white matter": 0}, (ball(spot, rng.uniform(3, 6, 3)),), lumps=0.1))
    for _ in range(int(rng.integers(14, 24))):
        # a vein from the sagittal sinus down the surface
        along, down = np.radians(rng.uniform((-50, 15), (60, 65)))
        up = np.array([np.sin(down) * rng.choice((-1, 1)), np.cos(down) * np.sin(along), np.cos(down) * np.cos(along)])
        place = up * (66, 84, 64) + (0, -4, 0)
        beside = 11 * (np.cross(np.cross(up, (0, 0, 1)), up) + rng.normal(0, 0.3, 3))
        organs.append(Organ("vein", {"blood": 0}, (tube(place - beside, place + beside, rng.uniform(1.5, 2.6)),)))
    first, second = rng.permutation(np.array(_SITES, np.float64))[:2]
    organs += _lesion(first, rng.uniform(17, 21), rng)
    if rng.random() < _TWO_LESIONS:
        organs += _lesion(second, rng.uniform(14, 16), rng)
    return organs


def _lesion(site: Matrix, radius: float, rng: np.random.Generator) -> list[Organ]:
    """Edema around a core: dead or non-enhancing inside, with an enhancing rim, an open one, or none."""
    kind, side = rng.random(), rng.choice((-1.0, 1.0))
    centre = site * (side, 1, 1) + rng.uniform(-5, 5, 3)
    core = (
        ball(centre, radius * rng.uniform(0.85, 1.15, 3)),
        ball(centre + rng.uniform(-0.4, 0.4, 3) * radius, radius * rng.uniform(0.6, 0.85, 3)),
    )
    layers = {"edema": rng.uniform(5, 11), "enhancing": 0.0, "non-enhancing": -radius * rng.uniform(0.42, 0.55)}
    if kind < _NO_RIM:
        layers = {"edema": layers["edema"], "non-enhancing": 0.0}
    # it keeps to its half of the head, out of what lies below the tentorium and of the ventricles, but for the thin
    # temporal horns, which it closes
    carved = {"lateral ventricles": 0, "third and fourth ventricle": 0, "cerebellum": 0}
    half = Organ("half", {}, (ball((side * (FLAT + 1), 0, 0), (FLAT, FLAT, FLAT)),))
    organs = [half, Organ("lesion", layers, core, lumps=0.1, inside={"half": 0}, carved=carved)]
    if _NO_RIM <= kind < _NO_RIM + _OPEN_RIM:
        away = rng.normal(size=3)
        gap = ball(centre + away / np.linalg.norm(away) * radius, np.full(3, 1.1 * radius))
        inside = {"half": 0, "gap": 0}
        organs += [
            Organ("gap", {}, (gap,)),
            Organ("open rim", {"non-enhancing": 0}, core, 0, 0, 0.1, 0, inside, carved),
        ]
    return organs


def depths(x: Floats, y: Floats, z: Floats, folds: Floats) -> tuple[Floats, Floats]:
    """Return how many mm points lie inside the brain (without its sulci) and inside what is no fluid, negative outside.

    What lies deeper than CORTEX in the second is white matter.

    Args:
        x: mm to the right of the middle of the reference head, [X, Y, Z] float32.
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
    cerebral = np.minimum(np.minimum(surface, sulci), sylvian) - _SULCUS
    cerebellum = _depth(x, y + 51, z + 36, (53.0, 36.0, 25.0))
    folia = 2.6 * np.abs(np.sin((z + 0.3 * y) * np.float32(np.pi / 7) + folds)) + np.maximum(cerebellum - 10, 0)
    # the tentorium keeps the two apart
    cerebellar = np.minimum(np.minimum(cerebellum, folia), -1 - cerebrum) - 0.3
    stem = _depth(x, y + 24 - 0.2 * (z + 40), z + 40, (14.0, 13.0, 50.0))
    brain = np.maximum(np.maximum(cerebrum, cerebellum), stem)
    return brain, np.maximum(np.maximum(cerebral, cerebellar), np.where(stem > 0, stem + CORTEX, stem))


def _depth(x: Floats, y: Floats, z: Floats, radii: tuple[float, float, float | Floats]) -> Floats:
    """Return how deep points, mm from its centre, lie in an ellipsoid, mm to first order."""
    a, b, c = radii
    x, y, z = x / np.float32(a), y / np.float32(b), z / np.float32(c)
    square = x * x + y * y + z * z
    steep = (x / np.float32(a)) ** 2 + (y / np.float32(b)) ** 2 + (z / np.float32(c)) ** 2
    result: Floats = (np.sqrt(square) - square) / np.sqrt(np.maximum(steep, np.float32(1e-9)))
    return result


def draw_scan(size: Size, rng: np.random.Generator) -> Scan:
    """Draw a head and its scan [X, Y, Z, 4]: anatomy, tumour, pose, contrast, gain, bias and noise all vary.

    "small": about 72 x 88 x 64 voxels of 2.2 to 2.4 mm. "msd": as in MSD Task01, 240 x 240 x 155 voxels of 1 mm. The
    brain is skull-stripped: all channels are 0 outside it, and above 0 inside.
    """
    small = size == "small"
    pose = np.diag(rng.uniform(0.95, (1.04, 1.04, 1.01)))
    for axis in (2, 1, 0):
        pose = rotation(axis, rng.uniform(-9, 9) if small else rng.uniform(-5, 5)) @ pose
    spacing = float(rng.uniform(2.2, 2.4)) if small else 1.0
    nx, ny, nz = rng.integers((68, 84, 64), (77, 93, 71)).tolist() if small else (240, 240, 155)
    start = np.array(MIDDLE) + (1 - np.array([nx, ny, nz])) / 2 * spacing + rng.uniform(-2, 2, 3)
    affine = from_matvec(np.diag([spacing] * 3), start)
    to_voxels = np.linalg.inv(affine) @ from_matvec(pose)
    tissues = draw_tissues(rng)
    parts = draw(head(rng), tissues, NUMBERS, to_voxels, rng)
    scan = Scan(*_image((nx, ny, nz), spacing, parts, tissues, np.linalg.inv(to_voxels), rng), affine)
    return scan.turned("LPS") if small and rng.random() < 0.5 else scan  # as many tools write them


def _image(
    shape: tuple[int, int, int],
    spacing: float,
    parts: list[Part],
    tissues: Tissues,
    to_head: Matrix,
    rng: np.random.Generator,
) -> tuple[npt.NDArray[np.int16], Labels]:
    """Return the image [X, Y, Z, C] of a head, and its labels; `to_head` [4, 4] maps voxels to the reference head."""

    def noise(pitch: float) -> ValueNoise:
        return ValueNoise(shape, [spacing] * 3, pitch, rng)

    folds = [noise(pitch) for pitch in _FOLD_PITCHES]
    bias, texture = ([noise(pitch) for _ in CHANNELS] for pitch in (_BIAS_PITCH, _TEXTURE_PITCH))
    grain = rng.uniform(*_NOISE, len(CHANNELS))
    gain = np.exp(rng.uniform(*_GAIN, len(CHANNELS)))
    image, label = np.empty((*shape, len(CHANNELS)), np.int16), np.empty(shape, np.uint8)
    outside = np.empty(shape, np.bool_)

    def matter(slab: Box) -> Floats:
        i, j, k = (line.astype(np.float32) for line in np.ogrid[slab])
        x, y, z = (a * i + b * j + c * k + d for a, b, c, d in to_head[:3].astype(np.float32))
        fold = np.float32(0.7) * (folds[0].sample(slab) + folds[1].sample(slab))  # of unit deviation, as its two parts
        brain, solid = depths(x, y, z, fold)
        outside[slab] = brain < -MENINGES
        return _fluid_grey_and_white(solid / np.float32(spacing), CORTEX / spacing, tissues)

    for slab, values, labels in painted(shape, parts, matter, noise(_RELIEF_PITCH)):
        label[slab] = np.where(outside[slab], 0, labels)
        for channel, plane in enumerate(values):
            plane *= 1 + np.float32(_TEXTURE) * texture[channel].sample(slab)
            plane *= np.exp(np.float32(_BIAS) * bias[channel].sample(slab))
            plane += np.float32(grain[channel]) * rng.standard_normal(plane.shape, dtype=np.float32)
            image[slab][..., channel] = np.rint(np.clip(np.float32(gain[channel]) * plane, 1, np.iinfo(np.int16).max))
    image[outside] = 0
    return image, label


def _fluid_grey_and_white(solid: Floats, cortex: float, tissues: Tissues) -> Floats:
    """Return the signals [4, X, Y, Z] float32 of fluid, and of grey and white matter over it, with soft borders.

    `solid` [X, Y, Z] is the depth in what is no fluid, and `cortex` that of white matter, in voxels.
    """
    matter, white = np.clip(0.5 + solid, 0, 1), np.clip(0.5 + solid - np.float32(cortex), 0, 1)
    values = np.empty((len(CHANNELS), *solid.shape), np.float32)
    fluid, grey, pale = (np.mean(tissues[name], axis=0) for name in ("fluid", "grey matter", "white matter"))
    for channel, plane in enumerate(values):
        np.multiply(matter, np.float32(grey[channel] - fluid[channel]), out=plane)
        plane += np.float32(pale[channel] - grey[channel]) * white
        plane += np.float32(fluid[channel])
    return values
