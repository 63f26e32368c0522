"""Abdominal CT phantoms: how a patient lies in a scan of a given size, or around a given label volume."""

from collections.abc import Sequence
from dataclasses import replace

import nibabel as nib
import numpy as np
import numpy.typing as npt
from nibabel.affines import from_matvec
from scipy import ndimage

from medspeed.data_scripts.painting import (
    Floats,
    Labels,
    Matrix,
    Organ,
    Part,
    Scan,
    Size,
    ValueNoise,
    draw,
    paint,
    read_anatomy,
    rotation,
    slabs,
)

CAVITY = np.array([135.0, 88.0])  # mm: half axes of the reference patient's abdominal cavity
WALL = 13.0  # mm of muscle and ribs around it
SPLEEN_CENTRE = (-97.0, -33.0, 8.0)  # mm: about where the reference spleen's centre of mass lies
AIR, NOISE, TEXTURE, BOUNDS = -1000.0, 24.0, 5.0, (-1024.0, 3071.0)  # HU; noise and texture are standard deviations
_TEXTURE_PITCH, _RELIEF_PITCH = 7.0, 30.0  # mm between the bumps of texture, and of lumpy surfaces


def draw_tissues(rng: np.random.Generator) -> dict[str, tuple[float, float]]:
    """Draw the HU of a patient, from and to: liver within 6 of the spleen, kidneys 25 over it, stomach 25 under it."""
    tissues = read_anatomy("abdomen.yaml")["tissues"]
    spleen = rng.uniform(*tissues["spleen"])
    beside = {name: spleen + rng.uniform(*bounds) for name, bounds in tissues["beside_spleen"].items()}
    return {**tissues["fixed"], **{name: (value, value) for name, value in beside.items()}}


def abdomen(fat: float) -> list[Organ]:
    """Return the organs in the order they are painted, with `fat` mm of fat under the skin; the spleen comes last."""
    couch, skin, *organs = read_anatomy("abdomen.yaml")["organs"]
    skin = replace(skin, layers={tissue: by + fat for tissue, by in skin.layers.items()})
    return [replace(couch, repeat=((0,), (-fat,), (0,))), skin, *organs]


def draw_scan(size: Size, rng: np.random.Generator) -> Scan:
    """Draw a patient and a scan: body, organs, contrast, field of view, spacing, shape and orientation all vary."""
    fat, wide = rng.uniform((8, 0.92), (30, 1.07))
    scale = wide * rng.uniform((1, 0.95, 0.95), (1, 1.05, 1.05))
    shape, affine = _field_of_view(size, fat, scale, rng)
    to_voxels = np.linalg.inv(affine) @ from_matvec(rotation((0, 0, rng.uniform(-7, 7))) * scale)
    parts = draw(abdomen(fat), draw_tissues(rng), {"spleen": 1}, to_voxels, rng)
    image, label = _image(shape, affine, parts, [], rng)
    affine[:3, 3] += rng.uniform(-60, 60, 3)
    # scans of MSD size keep slices last, as the real ones do
    codes = ["RAS", "LAS", "LPS", "RPI", "LPI", "PSR", "ASL", "SRA", "IPL"]
    return Scan(image, label, affine).turned(str(rng.choice(codes[:5] if size == "msd" else codes)))


def scan_around(label: npt.NDArray[np.generic], affine: Matrix, rng: np.random.Generator) -> Scan:
    """Draw a patient around a label volume: its own grid, its foreground as the spleen, the other organs around it.

    The side of the spleen is where the label lies, seen along the affine's axes; a label on the patient's right gives
    a mirrored patient. Label numbers above 1 are painted a little darker than the spleen.
    """
    given = Scan(np.zeros(label.shape, np.int16), label.astype(np.uint8), affine)
    upright = given.turned("RAS")
    spacing = np.linalg.norm(upright.affine[:3, :3], axis=0)
    straight = from_matvec(np.diag(spacing), (1 - np.array(upright.label.shape)) / 2 * spacing)
    points = nib.affines.apply_affine(straight, np.argwhere(upright.label))
    tissues, to_voxels = draw_tissues(rng), np.linalg.inv(straight) @ _fit(points, rng)
    organs = draw(abdomen(rng.uniform(8, 30))[:-1], tissues, {}, to_voxels, rng)
    shapes = _shapes(upright.label, tissues["spleen"][0])
    image, _ = _image(upright.label.shape, straight, organs, shapes, rng)
    codes = "".join(nib.aff2axcodes(affine))
    return Scan(Scan(image, upright.label, upright.affine).turned(codes).image, given.label, affine)


def _image(
    shape: Sequence[int],
    affine: Matrix,
    parts: Sequence[Part],
    given: Sequence[tuple[float, Floats]],
    rng: np.random.Generator,
) -> tuple[npt.NDArray[np.int16], Labels]:
    """Return the noisy image [X, Y, Z] of a patient's parts, and their labels.

    `given`: organs of given shapes, painted last: HU, and the share [X, Y, Z] that they cover of each voxel.
    """
    image, label = np.empty(shape, np.int16), np.empty(shape, np.uint8)
    relief, texture = (ValueNoise(shape, affine.diagonal()[:3], p, rng) for p in (_RELIEF_PITCH, _TEXTURE_PITCH))
    for slab in slabs(shape):
        values = np.full(image[slab].shape, AIR, np.float32)
        label[slab] = paint(values, slab, parts, relief.sample(slab))
        for hounsfield, share in given:
            values += share[slab] * (np.float32(hounsfield) - values)
        values += np.float32(TEXTURE) * texture.sample(slab)
        values += np.float32(NOISE) * rng.standard_normal(values.shape, dtype=np.float32)
        image[slab] = np.rint(np.clip(values, *BOUNDS))
    return image, label


def _field_of_view(
    size: Size, fat: float, scale: Matrix, rng: np.random.Generator
) -> tuple[tuple[int, int, int], Matrix]:
    """Draw shape and affine of a scan: the body in the middle, the spleen inside, in a seventh of them cut by an end.

    "small": 80 to 112 voxels of 3 to 4 mm across, 48 to 72 slices of 3 to 4.5 mm. "msd": as in MSD Task09, 512 x 512 of
    0.6 to 0.98 mm, 50 to 168 slices of 2.5 to 8 mm.
    """
    body = 2 * (CAVITY + WALL + fat) * scale[:2] * rng.uniform(1.03, 1.2)
    if size == "small":
        pixel, thick = rng.uniform((3, 3), (4, 4.5)).tolist()
        nx, ny = np.clip(np.rint(body / pixel), 80, 112).astype(int).tolist()
        nz = int(rng.integers(48, 73))
    else:
        nx, ny, pixel = 512, 512, float(np.clip(body[0] / 512, 0.6, 0.98))
        thick = float(rng.choice([2.5, 2.5, 3.0, 4.0, 5.0, 5.0, 5.0, 8.0]))
        nz = int(np.clip(rng.uniform(210, 500) / thick, 50, 168))
    length, reach = (nz - 1) * thick, 60 * scale[2]
    below = rng.uniform(reach, length - reach)
    if rng.random() < 0.15:
        below = rng.choice([0, length]) + rng.uniform(-20, 20)
    x, y = ((1 - np.array([nx, ny])) / 2 * pixel + rng.uniform(-6, 6, 2)).tolist()
    return (nx, ny, nz), from_matvec(np.diag([pixel, pixel, thick]), (x, y, SPLEEN_CENTRE[2] * scale[2] - below))


def _fit(points: Matrix, rng: np.random.Generator) -> Matrix:
    """Return the affine map [4, 4] that lays the reference patient around a label's points [N, 3] mm, in its cavity."""
    scale = np.array([1.0, rng.uniform(0.92, 1.06), rng.uniform(0.9, 1.1)])
    if not len(points):
        return np.asarray(from_matvec(np.diag(scale)), np.float64)
    middle = points.mean(axis=0)
    mirror = -1.0 if middle[0] > 0 else 1.0
    scale[:2] *= np.clip(abs(middle[0] / SPLEEN_CENTRE[0]), 0.75, 1.1)
    offset = (middle - scale * SPLEEN_CENTRE) * (0, 1, 1)
    beyond = np.linalg.norm((points - offset)[:, :2] / (scale[:2] * CAVITY), axis=1).max()
    scale[:2] *= max(1.0, beyond * 1.02)
    return np.asarray(from_matvec(np.diag(scale * (mirror, 1, 1)), offset), np.float64)


def _shapes(label: Labels, spleen: float) -> list[tuple[float, Floats]]:
    """Return the foreground of a label as a soft-edged organ of the spleen's HU, and each number above 1 within it."""
    shapes: list[tuple[float, Floats]] = []
    for number in np.unique(label[label > 0]).tolist():
        mask = label == number if shapes else label > 0
        found = np.argwhere(mask)
        box = tuple(map(slice, np.maximum(found.min(axis=0) - 3, 0), found.max(axis=0) + 4))
        share = np.zeros(label.shape, np.float32)
        share[box] = ndimage.gaussian_filter(mask[box].astype(np.float32), 0.6, truncate=3)
        # at most 45 HU darker: with many numbers, high ones still look like soft tissue
        shapes.append((spleen - 15.0 * min(number - 1, 3), share))
    return shapes
