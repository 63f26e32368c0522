"""Abdominal CT phantoms: how a patient lies in a scan of a given size, or around a given label volume."""

from collections.abc import Sequence
from typing import Literal

import nibabel as nib
import numpy as np
import numpy.typing as npt
from nibabel.affines import from_matvec
from scipy import ndimage

from data_scripts.anatomy_ct import CAVITY, SPLEEN_CENTRE, WALL, abdomen, draw_tissues
from data_scripts.painting import Box, Floats, Labels, Matrix, Part, Scan, ValueNoise, draw, painted, rotation

Size = Literal["small", "msd"]

AIR, NOISE, TEXTURE, BOUNDS = -1000.0, 24.0, 5.0, (-1024.0, 3071.0)  # HU; noise and texture are standard deviations
_TEXTURE_PITCH, _RELIEF_PITCH = 7.0, 30.0  # mm between the bumps of texture, and of lumpy surfaces


def draw_scan(size: Size, rng: np.random.Generator) -> Scan:
    """Draw a patient and a scan: body, organs, contrast, field of view, spacing, shape and orientation all vary."""
    fat = rng.uniform(8, 32)
    wide = rng.uniform(0.92, 1.07)
    scale = np.array([wide, wide * rng.uniform(0.95, 1.05), rng.uniform(0.94, 1.06)])
    shape, affine = _field_of_view(size, fat, scale, rng)
    to_voxels = np.linalg.inv(affine) @ from_matvec(rotation(2, rng.uniform(-7, 7)) @ np.diag(scale))
    parts = draw(abdomen(fat, rng), draw_tissues(rng), {"spleen": 1}, to_voxels, rng)
    image, label = _image(shape, affine, parts, [], (slice(0, 0),) * 3, rng)
    affine[:3, 3] += rng.uniform(-60, 60, 3)
    # scans of MSD size keep slices last, as the real ones do
    codes = ["RAS", "LAS", "LPS", "RAS", "LAS", "LPS", "RPI", "LPI", "PSR", "ASL", "SRA", "IPL"]
    return Scan(image, label, affine).turned(str(rng.choice(codes[:8] if size == "msd" else codes)))


def scan_around(label: npt.NDArray[np.generic], affine: Matrix, rng: np.random.Generator) -> Scan:
    """Draw a patient around a label volume: its own grid, its foreground as the spleen, the other organs around it.

    The side of the spleen is where the label lies, seen along the affine's axes; a label on the patient's right gives
    a mirrored patient. Label numbers above 1 are painted a little darker than the spleen.
    """
    given = Scan(np.zeros(label.shape, np.int16), label.astype(np.uint8), affine)
    upright = given.turned("RAS")
    nx, ny, nz = upright.label.shape
    spacing = np.linalg.norm(upright.affine[:3, :3], axis=0)
    straight = from_matvec(np.diag(spacing), (1 - np.array([nx, ny, nz])) / 2 * spacing)
    box = _bounding_box(upright.label)
    fat, tissues = rng.uniform(8, 32), draw_tissues(rng)
    points = np.argwhere(upright.label[box]) + [side.start for side in box]
    to_voxels = np.linalg.inv(straight) @ _fit(nib.affines.apply_affine(straight, points), rng)
    organs = draw(abdomen(fat, rng)[:-1], tissues, {}, to_voxels, rng)
    shapes = _shapes(upright.label[box], tissues["spleen"][0])
    image, _ = _image((nx, ny, nz), straight, organs, shapes, box, rng)
    codes = "".join(nib.aff2axcodes(affine))
    return Scan(Scan(image, upright.label, upright.affine).turned(codes).image, given.label, affine)


def _image(
    shape: tuple[int, int, int],
    affine: Matrix,
    parts: Sequence[Part],
    given: Sequence[tuple[float, Floats]],
    box: Box,
    rng: np.random.Generator,
) -> tuple[npt.NDArray[np.int16], Labels]:
    """Return the noisy image [X, Y, Z] of a patient's parts, and their labels.

    `given`: organs of given shapes, painted last: HU, and the share [X, Y, Z] that they cover of each voxel of `box`.
    """
    image, label = np.empty(shape, np.int16), np.empty(shape, np.uint8)
    relief, texture = (ValueNoise(shape, affine.diagonal()[:3], p, rng) for p in (_RELIEF_PITCH, _TEXTURE_PITCH))

    def air(slab: Box) -> Floats:
        return np.full([side.stop - side.start for side in slab], AIR, np.float32)

    for slab, values, label[slab] in painted(shape, parts, air, relief):
        first, last = (min(max(x, box[0].start), box[0].stop) for x in (slab[0].start, slab[0].stop))
        under = values[first - slab[0].start : last - slab[0].start, box[1], box[2]]
        for hounsfield, share in given:
            under += share[first - box[0].start : last - box[0].start] * (np.float32(hounsfield) - under)
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
    body = 2 * (np.asarray(CAVITY) + WALL + (fat, 0.8 * fat)) * scale[:2] * rng.uniform(1.03, 1.2)
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


def _bounding_box(label: Labels) -> Box:
    """Return the box of the foreground with a rim of three voxels; the first voxels where there is none."""
    found = np.argwhere(label) if label.any() else np.zeros((1, 3), int)
    low, high = np.maximum(found.min(axis=0) - 3, 0).tolist(), (found.max(axis=0) + 4).tolist()
    x, y, z = (slice(a, min(b, n)) for a, b, n in zip(low, high, label.shape, strict=True))
    return x, y, z


def _fit(points: Matrix, rng: np.random.Generator) -> Matrix:
    """Return the affine map [4, 4] that lays the reference patient around a label's points [N, 3] mm, in its cavity."""
    scale = np.array([1.0, rng.uniform(0.92, 1.06), rng.uniform(0.9, 1.1)])
    if not len(points):
        return np.asarray(from_matvec(np.diag(scale)), np.float64)
    middle = points.mean(axis=0)
    mirror = -1.0 if middle[0] > 0 else 1.0
    scale[:2] *= np.clip(abs(middle[0] / SPLEEN_CENTRE[0]), 0.75, 1.1)
    offset = (middle - scale * SPLEEN_CENTRE) * (0, 1, 1)
    beyond = np.linalg.norm((points - offset)[:, :2] / (scale[:2] * np.asarray(CAVITY)), axis=1).max()
    scale[:2] *= max(1.0, beyond * 1.02)
    return np.asarray(from_matvec(np.diag(scale * (mirror, 1, 1)), offset), np.float64)


def _shapes(label: Labels, spleen: float) -> list[tuple[float, Floats]]:
    """Return the foreground of a label as a soft-edged organ of the spleen's HU, and each number above 1 within it."""
    shapes: list[tuple[float, Floats]] = []
    for number in np.unique(label[label > 0]):
        mask = label == number if shapes else label > 0
        share = ndimage.gaussian_filter(mask.astype(np.float32), 0.6, truncate=3)
        # at most 45 HU darker: with many numbers, high ones still look like soft tissue
        shapes.append((spleen - 15.0 * min(int(number) - 1, 3), share))
    return shapes
