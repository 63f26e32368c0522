"""Synthetic CT scans: how a phantom patient lies in a scan of a given size, or around a given label volume."""

from typing import Literal

import nibabel as nib
import numpy as np
import numpy.typing as npt
from nibabel.affines import from_matvec
from scipy import ndimage

from data_scripts.painting import Box, Grid, Matrix, Stencil, paint, posed, rotation
from data_scripts.phantom_sets import Scan
from data_scripts.phantoms_ct import CAVITY, LOOK, SPLEEN_CENTRE, WALL, Patient, abdomen, draw_patient

Size = Literal["small", "msd"]
Labels = npt.NDArray[np.uint8]


def draw_scan(size: Size, rng: np.random.Generator) -> Scan:
    """Draw a patient and a scan: body, organs, contrast, field of view, spacing, shape and orientation all vary."""
    patient = draw_patient(rng)
    wide = rng.uniform(0.92, 1.07)
    scale = np.array([wide, wide * rng.uniform(0.95, 1.05), rng.uniform(0.94, 1.06)])
    matrix = rotation(2, rng.uniform(-7, 7)) @ np.diag(scale)
    grid = _small_grid(patient, scale, rng) if size == "small" else _msd_grid(patient, scale, rng)
    parts = [posed(part, matrix, np.zeros(3)) for part in abdomen(patient, rng)]
    image, label = paint(grid, parts, LOOK, rng)
    affine = from_matvec(np.diag(grid.spacing), np.asarray(grid.start) + rng.uniform(-60, 60, 3))
    return _turned(Scan(image, label, affine), _orientation(size, rng))


def scan_around(label: npt.NDArray[np.generic], affine: Matrix, rng: np.random.Generator) -> Scan:
    """Draw a patient around a label volume: its own grid, its foreground as the spleen, the other organs around it.

    The side of the spleen is where the label lies, seen along the affine's axes; a label on the patient's right gives
    a mirrored patient. Label numbers above 1 are painted a little darker than the spleen.
    """
    given = Scan(np.zeros(label.shape, np.int16), label.astype(np.uint8), affine)
    upright = _turned(given, "RAS")
    spacing = np.linalg.norm(upright.affine[:3, :3], axis=0)
    hx, hy, hz = (float(h) for h in spacing)
    x, y, z = (float(-(n - 1) / 2 * h) for n, h in zip(upright.label.shape, spacing, strict=True))
    nx, ny, nz = upright.label.shape
    grid = Grid((nx, ny, nz), (hx, hy, hz), (x, y, z))
    patient = draw_patient(rng)
    box = _bounding_box(upright.label)
    matrix, offset = _fit(upright.label[box] > 0, grid.part(box), grid, patient, rng)
    organs = [posed(part, matrix, offset) for part in abdomen(patient, rng) if not part.label]
    image, _ = paint(grid, [*organs, *_stencils(upright.label[box], box, patient)], LOOK, rng)
    codes = "".join(nib.aff2axcodes(affine))
    return Scan(_turned(Scan(image, upright.label, upright.affine), codes).image, given.label, affine)


def _small_grid(patient: Patient, scale: Matrix, rng: np.random.Generator) -> Grid:
    """A coarse scan: 80 to 112 voxels of 3 to 4 mm across, 48 to 72 slices of 3 to 5 mm."""
    pixel, slice_ = rng.uniform(3, 4), rng.uniform(3, 4.5)
    width, depth = _body(patient, scale) * rng.uniform(1.04, 1.2) / pixel
    nx, ny = (int(np.clip(round(n), 80, 112)) for n in (width, depth))
    return _grid((nx, ny, int(rng.integers(48, 73))), (pixel, pixel, slice_), scale, rng)


def _msd_grid(patient: Patient, scale: Matrix, rng: np.random.Generator) -> Grid:
    """A scan like those of MSD Task09: 512 x 512 of 0.6 to 0.98 mm, 50 to 168 slices of 2.5 to 8 mm."""
    pixel = float(np.clip(_body(patient, scale)[0] * rng.uniform(1.02, 1.2) / 512, 0.6, 0.98))
    slice_ = float(rng.choice([2.5, 2.5, 3.0, 4.0, 5.0, 5.0, 5.0, 8.0]))
    slices = int(np.clip(rng.uniform(210, 500) / slice_, 50, 168))
    return _grid((512, 512, slices), (pixel, pixel, slice_), scale, rng)


def _body(patient: Patient, scale: Matrix) -> Matrix:
    """Return the width and depth of the body in mm."""
    rim = np.array([patient.fat, 0.8 * patient.fat]) + WALL
    return 2 * (np.asarray(CAVITY) + rim) * scale[:2]


def _grid(
    shape: tuple[int, int, int], spacing: tuple[float, float, float], scale: Matrix, rng: np.random.Generator
) -> Grid:
    """Lay the field of view: the body in the middle, the spleen inside, in a seventh of the scans cut by an end."""
    length = (shape[2] - 1) * spacing[2]
    centre, reach = SPLEEN_CENTRE[2] * scale[2], 60 * scale[2]
    below = rng.uniform(reach, length - reach)
    if rng.random() < 0.15:
        cut = rng.uniform(0, 45)
        below = cut if rng.random() < 0.5 else length - cut
    x, y = (-(n - 1) / 2 * h + rng.uniform(-6, 6) for n, h in zip(shape[:2], spacing[:2], strict=True))
    return Grid(shape, spacing, (float(x), float(y), float(centre - below)))


def _orientation(size: Size, rng: np.random.Generator) -> str:
    """Draw the directions of the voxel axes; scans of MSD size keep slices last, as the real ones do."""
    codes = ["RAS", "LAS", "LPS", "RAS", "LAS", "LPS", "RPI", "LPI"]
    return str(rng.choice(codes if size == "msd" else [*codes, "PSR", "ASL", "SRA", "IPL"]))


def _turned(scan: Scan, codes: str) -> Scan:
    """Return the scan with its voxel axes permuted and flipped to run along the directions given (such as LPS)."""
    turn = nib.orientations.ornt_transform(nib.io_orientation(scan.affine), nib.orientations.axcodes2ornt(codes))
    affine = scan.affine @ nib.orientations.inv_ornt_aff(turn, scan.label.shape)
    image, label = (nib.orientations.apply_orientation(a, turn) for a in (scan.image, scan.label))
    return Scan(image, label, affine)


def _bounding_box(label: Labels) -> Box:
    """Return the box of the foreground with a rim of three voxels; the first voxels where there is none."""
    sides = []
    for axis in range(3):
        found = np.flatnonzero(label.any(axis=tuple(a for a in range(3) if a != axis)))
        first, last = (int(found[0]), int(found[-1])) if found.size else (0, 0)
        sides.append(slice(max(0, first - 3), min(label.shape[axis], last + 4)))
    x, y, z = sides
    return x, y, z


def _fit(
    foreground: npt.NDArray[np.bool_], here: Grid, grid: Grid, patient: Patient, rng: np.random.Generator
) -> tuple[Matrix, Matrix]:
    """Return the affine map that lays the reference patient around a label so that its cavity encloses the label.

    `foreground` [X, Y, Z] is the label within its box, `here` the voxels of that box, `grid` those of the scan.
    """
    scale = np.array([1.0, rng.uniform(0.92, 1.06), rng.uniform(0.9, 1.1)])
    if not foreground.any():
        return np.diag(scale), np.zeros(3)
    points = np.argwhere(foreground & ~ndimage.binary_erosion(foreground)) * here.spacing + here.start
    middle = points.mean(axis=0)
    mirror = -1.0 if middle[0] > 0 else 1.0
    fits = grid.shape[0] * grid.spacing[0] / _body(patient, np.ones(2))[0]
    scale[:2] *= np.clip(abs(middle[0] / SPLEEN_CENTRE[0]), 0.75, max(0.75, fits))
    offset = middle - scale * SPLEEN_CENTRE
    offset[0] = 0.0
    beyond = np.linalg.norm((points[:, :2] - offset[:2]) / (scale[:2] * np.asarray(CAVITY)), axis=1).max()
    scale[:2] *= max(1.0, beyond * 1.02)
    return np.diag(scale * (mirror, 1, 1)), offset


def _stencils(label: Labels, box: Box, patient: Patient) -> list[Stencil]:
    """Return the foreground of a label in its box as a soft-edged organ, and each label number above 1 within it."""
    stencils: list[Stencil] = []
    for number in np.unique(label[label > 0]):
        mask = label > 0 if not stencils else label == number
        cover = ndimage.gaussian_filter(mask.astype(np.float32), 0.6, truncate=3)
        # at most 45 HU darker: with many numbers, high ones still look like soft tissue
        stencils.append(Stencil(patient.spleen - 15.0 * min(int(number) - 1, 3), box, cover))
    return stencils
