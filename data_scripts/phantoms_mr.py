"""Head MRI phantoms: the brain, its look-alikes of tumour, and tumours, in four channels of relative signal.

Anatomy is that of one reference head (millimetres along right, anterior and superior, origin between the thalami); it
varies, then it is posed as a whole. What is no tumour but looks like one in a channel: vessels, sinuses and choroid
plexus after contrast, changed white matter around the ventricles in FLAIR, cerebrospinal fluid in T2.
"""

import numpy as np
from nibabel.affines import from_matvec

from medspeed.data_scripts.painting import (
    FLAT,
    Floats,
    Matrix,
    Organ,
    Scan,
    Size,
    ValueNoise,
    draw,
    paint,
    read_anatomy,
    rotation,
    slabs,
)

Tissues = dict[str, tuple[Matrix, Matrix]]  # signal per channel [4], from and to

_CHANNELS = 4  # FLAIR, T1w, t1gd, T2w
NUMBERS = {"edema": 1, "non-enhancing": 2, "enhancing": 3}
MIDDLE = (0.0, -4.0, 5.0)  # mm: the middle of the field of view; the stem leaves it below
CORTEX, MENINGES = 3.2, 1.5  # mm of grey matter, and of fluid kept around the brain by skull stripping
_FOLD_PITCHES = (10.0, 14.0)  # mm between the knots of the fields whose sum is zero in the sulci
_RELIEF_PITCH = 15.0  # mm between the bumps of lumpy lesions
_BIAS_PITCH, _BIAS = 80.0, 0.12  # mm between knots; standard deviation of the logarithm at them
_TEXTURE_PITCH, _TEXTURE = 5.0, 0.03  # mm; share of the signal
_NO_RIM, _OPEN_RIM = 0.12, 0.3  # shares of the lesions
_SITES = ((30, 36, 24), (32, -32, 32), (42, -4, -14), (28, -54, 12), (36, 8, 14))  # frontal, parietal, temporal, ...


def draw_tissues(rng: np.random.Generator) -> Tissues:
    """Draw the contrast of each channel of a head; within it each tissue varies a little, and their order stays."""
    contrast = rng.uniform(0.85, 1.2, _CHANNELS)
    signals = {name: np.array(signal) for name, signal in read_anatomy("head.yaml")["tissues"].items()}
    return {name: ((0.97 * signal) ** contrast, (1.03 * signal) ** contrast) for name, signal in signals.items()}


def head(rng: np.random.Generator) -> list[Organ]:
    """Return a head's organs in the order they are painted, over grey and white matter; the tumours come last."""
    organs = []
    for _ in range(int(rng.integers(2, 18))):
        side = rng.choice((-1, 1))
        ball = rng.uniform((24, -50, 22, 3, 3, 3), (36, 40, 38, 6, 6, 6)) * (side, 1, 1, 1, 1, 1)
        organs.append(Organ("spot", {"changed white matter": 0}, [ball.tolist()], lumps=0.1))
    organs += read_anatomy("head.yaml")["organs"]
    for _ in range(int(rng.integers(14, 24))):
        # a vein from the sagittal sinus down the surface
        (along, down), side = np.radians(rng.uniform((-50, 15), (60, 65))), rng.choice((-1, 1))
        down, along = down + np.array([-0.15, 0.15]), along + rng.normal(0, 0.05, 2)
        up = [66 * side * np.sin(down), 84 * np.cos(down) * np.sin(along) - 4, 64 * np.cos(down) * np.cos(along)]
        organs.append(Organ("vein", {"blood": 0}, tubes=[[*np.ravel(up, order="F"), rng.uniform(1.5, 2.6)]]))
    first, second = rng.permutation(np.array(_SITES, np.float64))[:2]
    organs += _lesion(first, rng.uniform(17, 21), rng)
    return organs + (_lesion(second, rng.uniform(14, 16), rng) if rng.random() < 0.15 else [])


def _lesion(site: Matrix, radius: float, rng: np.random.Generator) -> list[Organ]:
    """Edema around a core: dead or non-enhancing inside, with an enhancing rim, an open one, or none."""
    kind, side = rng.random(), rng.choice((-1.0, 1.0))
    centre = site * (side, 1, 1) + rng.uniform(-5, 5, 3)
    core = [
        [*centre, *radius * rng.uniform(0.85, 1.15, 3)],
        [*centre + rng.uniform(-0.4, 0.4, 3) * radius, *radius * rng.uniform(0.6, 0.85, 3)],
    ]
    layers = {"edema": rng.uniform(5, 11), "enhancing": 0.0, "non-enhancing": -radius * rng.uniform(0.42, 0.55)}
    if kind < _NO_RIM:
        layers = {"edema": layers["edema"], "non-enhancing": 0.0}
    # it keeps to its half of the head, out of what lies below the tentorium and of the ventricles, but for the thin
    # temporal horns, which it closes
    carved = {"lateral ventricles": 0, "third and fourth ventricle": 0, "cerebellum": 0}
    organs = [
        Organ("half", balls=[(side * (FLAT + 1), 0, 0, FLAT, FLAT, FLAT)]),
        Organ("lesion", layers, core, lumps=0.1, inside={"half": 0}, carved=carved),
    ]
    if _NO_RIM <= kind < _NO_RIM + _OPEN_RIM:
        away = rng.normal(size=3)
        gap = [*centre + away / np.linalg.norm(away) * radius, *[1.1 * radius] * 3]
        inside = {"half": 0, "gap": 0}
        organs.append(Organ("gap", balls=[gap]))
        organs.append(Organ("open rim", {"non-enhancing": 0}, core, lumps=0.1, inside=inside, carved=carved))
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
    sulci = 5.0 * np.abs(folds) + 0.8 * np.maximum(surface - 13, 0)  # they are 13 mm deep
    insula = np.maximum(np.maximum(38 - side, np.abs(y - 2) - 26), 0)
    sylvian = np.hypot(z + 4 - 0.25 * np.abs(y - 2), insula)
    cerebral = np.minimum(np.minimum(surface, sulci), sylvian) - 0.8  # half a sulcus
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
    spacing = float(rng.uniform(2.2, 2.4)) if small else 1.0
    shape = rng.integers((68, 84, 64), (77, 93, 71)) if small else np.array((240, 240, 155))
    affine = from_matvec(np.diag([spacing] * 3), MIDDLE + (1 - shape) / 2 * spacing + rng.uniform(-2, 2, 3))
    tilt = 9 if small else 5
    pose = from_matvec(rotation(rng.uniform(-tilt, tilt, 3)) * rng.uniform(0.95, (1.04, 1.04, 1.01)))
    to_voxels, tissues = np.linalg.inv(affine) @ pose, draw_tissues(rng)
    parts = draw(head(rng), tissues, NUMBERS, to_voxels, rng)

    def noise(pitch: float) -> ValueNoise:
        return ValueNoise(shape.tolist(), [spacing] * 3, pitch, rng)

    folds, relief = [noise(pitch) for pitch in _FOLD_PITCHES], noise(_RELIEF_PITCH)
    bias, texture = ([noise(pitch) for _ in range(_CHANNELS)] for pitch in (_BIAS_PITCH, _TEXTURE_PITCH))
    grain, gain = rng.uniform(0.025, 0.05, _CHANNELS), np.exp(rng.uniform(5.0, 7.1, _CHANNELS))
    image, label = np.empty((*shape, _CHANNELS), np.int16), np.empty(shape, np.uint8)
    for slab in slabs(shape.tolist()):
        i, j, k = (line.astype(np.float32) for line in np.ogrid[slab])
        x, y, z = (a * i + b * j + c * k + d for a, b, c, d in np.linalg.inv(to_voxels)[:3].astype(np.float32))
        fold = np.float32(0.7) * (folds[0].sample(slab) + folds[1].sample(slab))  # of unit deviation, as its two parts
        brain, solid = depths(x, y, z, fold)
        values = _matter(solid, spacing, tissues)
        label[slab] = paint(values, slab, parts, relief.sample(slab))
        for channel, plane in enumerate(values):
            plane *= 1 + np.float32(_TEXTURE) * texture[channel].sample(slab)
            plane *= np.exp(np.float32(_BIAS) * bias[channel].sample(slab))
            plane += np.float32(grain[channel]) * rng.standard_normal(plane.shape, dtype=np.float32)
            image[slab][..., channel] = np.rint(np.clip(np.float32(gain[channel]) * plane, 1, np.iinfo(np.int16).max))
        outside = brain < -MENINGES
        image[slab][outside], label[slab][outside] = 0, 0
    scan = Scan(image, label, affine)
    return scan.turned("LPS") if small and rng.random() < 0.5 else scan  # as many tools write them


def _matter(solid: Floats, spacing: float, tissues: Tissues) -> Floats:
    """Return the signals [4, X, Y, Z] of fluid, and of grey and white matter over it, at depths in what is no fluid."""
    names = ("fluid", "grey matter", "white matter")
    fluid, grey, white = (np.mean(tissues[name], axis=0).astype(np.float32)[:, None, None, None] for name in names)
    cover, deep = (np.clip((solid - np.float32(mm)) / np.float32(spacing) + 0.5, 0, 1) for mm in (0, CORTEX))
    values: Floats = fluid + cover * (grey - fluid) + deep * (white - grey)
    return values
