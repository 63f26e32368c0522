"""Phantoms: abdominal CT, in a scan of a given size or around a given label volume, and head MRI.

What is no tumour of the head but looks like one in a channel: vessels, sinuses and choroid plexus after contrast,
changed white matter around the ventricles in FLAIR, cerebrospinal fluid in T2.
"""

from collections.abc import Sequence
from dataclasses import replace

import nibabel as nib
import numpy as np
import numpy.typing as npt
from nibabel.affines import from_matvec
from scipy import ndimage

from medspeed.data_scripts import painting
from medspeed.data_scripts.painting import FLAT, Floats, Labels, Matrix, Organ, Part, Random, Scan, Size, rotation

_Shapes = list[tuple[float, Floats]]  # organs' HU, and the share [X, Y, Z] that they cover of each voxel

CAVITY = np.array([135.0, 88.0])  # mm: half axes of the reference patient's abdominal cavity
WALL = 13.0  # mm of muscle and ribs around it
SPLEEN_CENTRE = (-97.0, -33.0, 8.0)  # mm: about where the reference spleen's centre of mass lies
_AIR, _NOISE, _TEXTURE, _BOUNDS = -1000.0, 24.0, 5.0, (-1024.0, 3071.0)  # HU; noise and texture are deviations
_TEXTURE_PITCH, _RELIEF_PITCH = 7.0, 30.0  # mm between the bumps of texture, and of lumpy surfaces

NUMBERS = {"edema": 1, "non-enhancing": 2, "enhancing": 3}
MIDDLE = (0.0, -4.0, 5.0)  # mm: the middle of the field of view of a head; the stem leaves it below
CORTEX, MENINGES = 3.2, 1.5  # mm of grey matter, and of fluid kept around the brain by skull stripping
_CHANNELS = 4  # FLAIR, T1w, t1gd, T2w
_PITCHES = (10.0, 14.0, 15.0, *[80.0] * 4, *[5.0] * 4)  # mm: folds, which are zero in the sulci, relief, bias, texture
_BIAS, _TEXTURED = 0.12, 0.03  # deviations: of the logarithm of the coil's bias, and of the texture as a share
_NO_RIM, _OPEN_RIM = 0.12, 0.3  # shares of the lesions
_SITES = ((30, 36, 24), (32, -32, 32), (42, -4, -14), (28, -54, 12), (36, 8, 14))  # frontal, parietal, temporal, ...


def abdomen_tissues(rng: Random) -> dict[str, tuple[float, float]]:
    """Draw the HU of a patient, from and to: liver within 6 of the spleen, kidneys 25 over it, stomach 25 under it."""
    tissues = painting.read_anatomy("abdomen.yaml")["tissues"]
    spleen = rng.uniform(*tissues["spleen"])
    beside = {name: spleen + rng.uniform(*bounds) for name, bounds in tissues["beside_spleen"].items()}
    return {**tissues["fixed"], **{name: (value, value) for name, value in beside.items()}}


def abdomen(fat: float) -> list[Organ]:
    """Return the organs in the order they are painted, with `fat` mm of fat under the skin; the spleen comes last."""
    couch, skin, *organs = painting.read_anatomy("abdomen.yaml")["organs"]
    skin = replace(skin, layers={tissue: by + fat for tissue, by in skin.layers.items()})
    return [replace(couch, repeat=((0,), (-fat,), (0,))), skin, *organs]


def draw_abdomen(size: Size, rng: Random) -> Scan:
    """Draw a patient and a CT: body, organs, contrast, field of view, spacing, shape and orientation all vary.

    "small": 80 to 112 voxels of 3 to 4 mm across, 48 to 72 slices of 3 to 4.5 mm. "msd": as in MSD Task09, 512 x 512 of
    0.6 to 0.98 mm, 50 to 168 slices of 2.5 to 8 mm.
    """
    fat, wide = rng.uniform((8, 0.92), (30, 1.07))
    scale = wide * rng.uniform((1, 0.95, 0.95), (1, 1.05, 1.05))
    body = 2 * (CAVITY + WALL + fat) * scale[:2] * rng.uniform(1.03, 1.2)
    if size == "small":
        pixel, thick = rng.uniform((3, 3), (4, 4.5)).tolist()
        nx, ny = np.clip(np.rint(body / pixel), 80, 112).astype(int).tolist()
        nz = int(rng.integers(48, 73))
    else:
        nx, ny, pixel = 512, 512, float(np.clip(body[0] / 512, 0.6, 0.98))
        thick = float(rng.choice([2.5, 2.5, 3.0, 4.0, 5.0, 5.0, 5.0, 8.0]))
        nz = int(np.clip(rng.uniform(210, 500) / thick, 50, 168))
    # the body in the middle, the spleen inside, in a seventh of the scans cut by an end
    length, reach = (nz - 1) * thick, 60 * scale[2]
    below = rng.uniform(reach, length - reach)
    if rng.random() < 0.15:
        below = rng.choice([0, length]) + rng.uniform(-20, 20)
    x, y = ((1 - np.array([nx, ny])) / 2 * pixel + rng.uniform(-6, 6, 2)).tolist()
    affine = from_matvec(np.diag([pixel, pixel, thick]), (x, y, SPLEEN_CENTRE[2] * scale[2] - below))
    to_voxels = np.linalg.inv(affine) @ from_matvec(rotation((0, 0, rng.uniform(-7, 7))) * scale)
    parts = painting.draw(abdomen(fat), abdomen_tissues(rng), {"spleen": 1}, to_voxels, rng)
    scan = _computed((nx, ny, nz), affine, parts, [], rng)
    affine[:3, 3] += rng.uniform(-60, 60, 3)  # the scan's
    # scans of MSD size keep slices last, as the real ones do
    codes = ["RAS", "LAS", "LPS", "RPI", "LPI", "PSR", "ASL", "SRA", "IPL"]
    return scan.turned(str(rng.choice(codes[:5] if size == "msd" else codes)))


def scan_around(label: npt.NDArray[np.generic], affine: Matrix, rng: Random) -> Scan:
    """Draw a CT around a label volume: its own grid, its foreground as the spleen, the other organs around it.

    The side of the spleen is where the label lies, seen along the affine's axes; a label on the patient's right gives
    a mirrored patient. Label numbers above 1 are painted a little darker than the spleen.
    """
    given = Scan(np.zeros(label.shape, np.int16), label.astype(np.uint8), affine)
    upright = given.turned("RAS")
    spacing = np.linalg.norm(upright.affine[:3, :3], axis=0)
    straight = from_matvec(np.diag(spacing), (1 - np.array(upright.label.shape)) / 2 * spacing)
    points = nib.affines.apply_affine(straight, np.argwhere(upright.label))
    tissues, to_voxels = abdomen_tissues(rng), np.linalg.inv(straight) @ _fit(points, rng)
    organs = painting.draw(abdomen(rng.uniform(8, 30))[:-1], tissues, {}, to_voxels, rng)
    drawn = _computed(upright.label.shape, straight, organs, _shapes(upright.label, tissues["spleen"][0]), rng)
    return given._replace(image=upright._replace(image=drawn.image).turned("".join(nib.aff2axcodes(affine))).image)


def _computed(shape: Sequence[int], affine: Matrix, parts: Sequence[Part], given: _Shapes, rng: Random) -> Scan:
    """Return the noisy CT of a patient's parts, and over them of organs of given shapes, which have no label."""
    image, label = np.empty(shape, np.int16), np.empty(shape, np.uint8)
    pitches = _RELIEF_PITCH, _TEXTURE_PITCH
    relief, texture = (painting.value_noise(shape, affine.diagonal()[:3], pitch, rng) for pitch in pitches)
    for slab in painting.slabs(shape):
        values = np.full(image[slab].shape, _AIR, np.float32)
        label[slab] = painting.paint(values, slab, parts, relief(slab))
        for hounsfield, share in given:
            values += share[slab] * (np.float32(hounsfield) - values)
        values += np.float32(_TEXTURE) * texture(slab)
        values += np.float32(_NOISE) * rng.standard_normal(values.shape, dtype=np.float32)
        image[slab] = np.rint(np.clip(values, *_BOUNDS))
    return Scan(image, label, affine)


def _fit(points: Matrix, rng: Random) -> Matrix:
    """Return the affine map [4, 4] that lays the reference patient around a label's points [N, 3] mm, in its cavity."""
    scale, offset = np.array([1.0, rng.uniform(0.92, 1.06), rng.uniform(0.9, 1.1)]), np.zeros(3)
    mirror = 1.0
    if len(points):
        middle = points.mean(axis=0)
        mirror = -1.0 if middle[0] > 0 else 1.0
        scale[:2] *= np.clip(abs(middle[0] / SPLEEN_CENTRE[0]), 0.75, 1.1)
        offset = (middle - scale * SPLEEN_CENTRE) * (0, 1, 1)
        beyond = np.linalg.norm((points - offset)[:, :2] / (scale[:2] * CAVITY), axis=1).max()
        scale[:2] *= max(1.0, beyond * 1.02)
    return np.asarray(from_matvec(np.diag(scale * (mirror, 1, 1)), offset), np.float64)


def _shapes(label: Labels, spleen: float) -> _Shapes:
    """Return the foreground of a label as a soft-edged organ of the spleen's HU, and each number above 1 within it."""
    shapes: _Shapes = []
    for number in np.unique(label[label > 0]).tolist():
        mask = label == number if shapes else label > 0
        found = np.argwhere(mask)
        box = tuple(map(slice, np.maximum(found.min(axis=0) - 3, 0), found.max(axis=0) + 4))
        share = np.zeros(label.shape, np.float32)
        share[box] = ndimage.gaussian_filter(mask[box].astype(np.float32), 0.6, truncate=3)
        # at most 45 HU darker: with many numbers, high ones still look like soft tissue
        shapes.append((spleen - 15.0 * min(number - 1, 3), share))
    return shapes


def head_tissues(rng: Random) -> dict[str, tuple[Matrix, Matrix]]:
    """Draw the signal of a head's tissues per channel [4], from and to: it varies a little, and their order stays."""
    contrast = rng.uniform(0.85, 1.2, _CHANNELS)
    signals = {name: np.array(signal) for name, signal in painting.read_anatomy("head.yaml")["tissues"].items()}
    return {name: ((0.97 * signal) ** contrast, (1.03 * signal) ** contrast) for name, signal in signals.items()}


def head(rng: Random) -> list[Organ]:
    """Return a head's organs in the order they are painted, over grey and white matter; the tumours come last."""
    organs = []
    for _ in range(int(rng.integers(2, 18))):
        side = rng.choice((-1, 1))
        spot = rng.uniform((24, -50, 22, 3, 3, 3), (36, 40, 38, 6, 6, 6)) * (side, 1, 1, 1, 1, 1)
        organs.append(Organ("spot", {"changed white matter": 0}, [spot.tolist()], lumps=0.1))
    organs += painting.read_anatomy("head.yaml")["organs"]
    for _ in range(int(rng.integers(14, 24))):
        # a vein from the sagittal sinus down the surface
        (along, down), side = np.radians(rng.uniform((-50, 15), (60, 65))), rng.choice((-1, 1))
        down, along = down + np.array([-0.15, 0.15]), along + rng.normal(0, 0.05, 2)
        up = [66 * side * np.sin(down), 84 * np.cos(down) * np.sin(along) - 4, 64 * np.cos(down) * np.cos(along)]
        organs.append(Organ("vein", {"blood": 0}, tubes=[[*np.ravel(up, order="F"), rng.uniform(1.5, 2.6)]]))
    first, second = rng.permutation(np.array(_SITES, np.float64))[:2]
    organs += _lesion(first, rng.uniform(17, 21), rng)
    return organs + (_lesion(second, rng.uniform(14, 16), rng) if rng.random() < 0.15 else [])


def _lesion(site: Matrix, radius: float, rng: Random) -> list[Organ]:
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
        organs.append(Organ("gap", balls=[[*centre + away / np.linalg.norm(away) * radius, *[1.1 * radius] * 3]]))
        inside = {"half": 0, "gap": 0}
        organs.append(Organ("open rim", {"non-enhancing": 0}, core, lumps=0.1, inside=inside, carved=carved))
    return organs


def depths(x: Floats, y: Floats, z: Floats, folds: Floats) -> tuple[Floats, Floats]:
    """Return how many mm points lie inside the brain (without its sulci) and inside what is no fluid, negative outside.

    What lies deeper than CORTEX in the second is white matter. The points [X, Y, Z] are mm to the right, front and top
    of the reference head's middle; `folds` is a random field of unit deviation: the cerebrum's sulci are its zeros.
    """
    side = np.abs(x)
    hemispheres = _depth(x, y + 4, z, (67.0, 86.0, np.where(z > 0, np.float32(65.0), np.float32(37.0))))
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
    a, b, c = map(np.float32, radii)
    x, y, z = x / a, y / b, z / c
    square, steep = x * x + y * y + z * z, (x / a) ** 2 + (y / b) ** 2 + (z / c) ** 2
    depth: Floats = (np.sqrt(square) - square) / np.sqrt(np.maximum(steep, np.float32(1e-9)))
    return depth


def draw_head(size: Size, rng: Random) -> Scan:
    """Draw a head and its MRI [X, Y, Z, 4]: anatomy, tumour, pose, contrast, gain, bias and noise all vary.

    "small": about 72 x 88 x 64 voxels of 2.2 to 2.4 mm. "msd": as in MSD Task01, 240 x 240 x 155 voxels of 1 mm. The
    brain is skull-stripped: all channels are 0 outside it, and above 0 inside.
    """
    small = size == "small"
    spacing = float(rng.uniform(2.2, 2.4)) if small else 1.0
    shape = rng.integers((68, 84, 64), (77, 93, 71)).tolist() if small else [240, 240, 155]
    affine = from_matvec(np.diag([spacing] * 3), MIDDLE + (1 - np.array(shape)) / 2 * spacing + rng.uniform(-2, 2, 3))
    tilt = 9 if small else 5
    pose = from_matvec(rotation(rng.uniform(-tilt, tilt, 3)) * rng.uniform(0.95, (1.04, 1.04, 1.01)))
    to_voxels, tissues = np.linalg.inv(affine) @ pose, head_tissues(rng)
    parts = painting.draw(head(rng), tissues, NUMBERS, to_voxels, rng)
    noises = [painting.value_noise(shape, [spacing] * 3, pitch, rng) for pitch in _PITCHES]
    bias, texture = noises[3:7], noises[7:]
    names = ("fluid", "grey matter", "white matter")
    fluid, grey, white = (np.mean(tissues[name], axis=0).astype(np.float32)[:, None, None, None] for name in names)
    grain, gain = rng.uniform(0.025, 0.05, _CHANNELS), np.exp(rng.uniform(5.0, 7.1, _CHANNELS))
    image, label = np.empty((*shape, _CHANNELS), np.int16), np.empty(shape, np.uint8)
    for slab in painting.slabs(shape):
        i, j, k = (line.astype(np.float32) for line in np.ogrid[slab])
        x, y, z = (a * i + b * j + c * k + d for a, b, c, d in np.linalg.inv(to_voxels)[:3].astype(np.float32))
        brain, solid = depths(x, y, z, np.float32(0.7) * (noises[0](slab) + noises[1](slab)))  # of unit deviation
        cover, deep = (np.clip((solid - np.float32(mm)) / np.float32(spacing) + 0.5, 0, 1) for mm in (0, CORTEX))
        values = fluid + cover * (grey - fluid) + deep * (white - grey)
        label[slab] = painting.paint(values, slab, parts, noises[2](slab))
        for channel, plane in enumerate(values):
            plane *= 1 + np.float32(_TEXTURED) * texture[channel](slab)
            plane *= np.exp(np.float32(_BIAS) * bias[channel](slab))
            plane += np.float32(grain[channel]) * rng.standard_normal(plane.shape, dtype=np.float32)
            image[slab][..., channel] = np.rint(np.clip(np.float32(gain[channel]) * plane, 1, np.iinfo(np.int16).max))
        outside = brain < -MENINGES
        image[slab][outside], label[slab][outside] = 0, 0
    scan = Scan(image, label, affine)
    return scan.turned("LPS") if small and rng.random() < 0.5 else scan  # as many tools write them
