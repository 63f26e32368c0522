"""Synthetic head MRI: how a phantom head lies in a scan, and how its four channels are imaged."""

import numpy as np
from nibabel.affines import from_matvec

from data_scripts.painting import Floats, Grid, Matrix, ValueNoise, boxes_of, lay, posed, rotation, slabs
from data_scripts.phantom_sets import Scan
from data_scripts.phantoms_mr import CHANNELS, CORTEX, FOLD_PITCHES, MENINGES, Depths, Head, depths, draw_head
from data_scripts.scans_ct import Size

MIDDLE = (0.0, -4.0, 5.0)  # mm: the middle of the field of view; the stem leaves it below
_RELIEF_PITCH = 15.0  # mm between the bumps of lumpy lesions
_BIAS_PITCH, _BIAS = 80.0, 0.12  # mm between knots; standard deviation of the logarithm at them
_TEXTURE_PITCH, _TEXTURE = 5.0, 0.03  # mm; share of the signal
_NOISE = (0.025, 0.05)  # standard deviation, of the signal of white matter in T1w
_SHARE = np.float32(0.7)  # of each of two fields, for a sum of unit deviation
_MOST = 32767  # int16


def draw_scan(size: Size, rng: np.random.Generator) -> Scan:
    """Draw a head and its scan [X, Y, Z, 4]: anatomy, tumour, pose, contrast, gain, bias and noise all vary.

    The brain is skull-stripped: all channels are 0 outside it, and above 0 inside.
    """
    head = draw_head(rng)
    scale = rng.uniform(0.95, (1.04, 1.04, 1.01))
    most = 9 if size == "small" else 5
    turn = rotation(0, rng.uniform(-most, most)) @ rotation(1, rng.uniform(-most, most))
    matrix = turn @ rotation(2, rng.uniform(-most, most)) @ np.diag(scale)
    grid = _small_grid(rng) if size == "small" else _msd_grid(rng)
    scan = _image(head, grid, matrix, rng)
    return _flipped(scan) if size == "small" and rng.random() < 0.5 else scan


def _small_grid(rng: np.random.Generator) -> Grid:
    """A coarse scan: about 72 x 88 x 64 voxels of 2.2 to 2.4 mm, the brain near the middle."""
    spacing = float(rng.uniform(2.2, 2.4))
    nx, ny, nz = (int(n) for n in rng.integers((68, 84, 64), (77, 93, 71)))
    return _grid((nx, ny, nz), spacing, rng)


def _msd_grid(rng: np.random.Generator) -> Grid:
    """A scan as in MSD Task01: 240 x 240 x 155 voxels of 1 mm."""
    return _grid((240, 240, 155), 1.0, rng)


def _grid(shape: tuple[int, int, int], spacing: float, rng: np.random.Generator) -> Grid:
    x, y, z = (float(m - (n - 1) / 2 * spacing + rng.uniform(-2, 2)) for n, m in zip(shape, MIDDLE, strict=True))
    return Grid(shape, (spacing, spacing, spacing), (x, y, z))


def _image(head: Head, grid: Grid, matrix: Matrix, rng: np.random.Generator) -> Scan:
    """Paint the head, turned and scaled by `matrix`, on the grid, slab by slab."""
    parts = [posed(part, matrix, np.zeros(3)) for part in head.parts]
    inverse: Matrix = np.linalg.inv(matrix).astype(np.float64)
    boxes = boxes_of(parts, grid)
    folds = [ValueNoise(grid, pitch, rng) for pitch in FOLD_PITCHES]
    relief = ValueNoise(grid, _RELIEF_PITCH, rng)
    camera = Camera(grid, rng)
    image = np.zeros((*grid.shape, len(CHANNELS)), dtype=np.int16)
    label = np.zeros(grid.shape, dtype=np.uint8)
    for slab in slabs(grid):
        here = grid.part(slab)
        x, y, z = _points(here, inverse)
        deep = depths(x, y, z, _SHARE * (folds[0].sample(here) + folds[1].sample(here)))
        values = _matter(deep, head, grid.spacing[0])
        lay(values, label[slab], here, slab[0], list(zip(parts, boxes, strict=True)), relief.sample(here))
        outside = deep.brain < -MENINGES
        label[slab][outside] = 0
        for channel in range(len(CHANNELS)):
            taken = camera.take(values[channel], channel, here, rng)
            taken[outside] = 0
            image[slab][..., channel] = taken
    return Scan(image, label, from_matvec(np.diag(grid.spacing), grid.start))


def _points(here: Grid, inverse: Matrix) -> list[Floats]:
    """Return where the voxels lie in the reference head, mm, as three arrays [X, Y, Z] float32."""
    x, y, z = here.axes()
    return [np.float32(a) * x + np.float32(b) * y + np.float32(c) * z for a, b, c in inverse]


def _matter(deep: Depths, head: Head, spacing: float) -> Floats:
    """Return the signals [4, X, Y, Z] float32 of fluid, and of grey and white matter over it, with soft borders."""
    values = np.empty((len(CHANNELS), *deep.brain.shape), dtype=np.float32)
    matter = np.clip(0.5 + deep.matter / np.float32(spacing), 0, 1)
    white = np.clip(0.5 + (deep.matter - np.float32(CORTEX)) / np.float32(spacing), 0, 1)
    for channel, plane in enumerate(values):
        fluid, grey, pale = (
            np.float32(head.signals[name][channel]) for name in ("fluid", "grey matter", "white matter")
        )
        np.add(fluid + (grey - fluid) * matter, (pale - grey) * white, out=plane)
    return values


class Camera:
    """The scanner: what it does to each channel's signals of one scan."""

    def __init__(self, grid: Grid, rng: np.random.Generator) -> None:
        self._bias = [ValueNoise(grid, _BIAS_PITCH, rng) for _ in CHANNELS]
        self._texture = [ValueNoise(grid, _TEXTURE_PITCH, rng) for _ in CHANNELS]
        self._noise = rng.uniform(*_NOISE, len(CHANNELS))
        self._gain = np.exp(rng.uniform(np.log(150), np.log(1200), len(CHANNELS)))

    def take(self, signal: Floats, channel: int, here: Grid, rng: np.random.Generator) -> Floats:
        """Return whole numbers from 1 for the signals [X, Y, Z] of a channel: texture, coil bias, noise and gain."""
        values = signal * (1 + np.float32(_TEXTURE) * self._texture[channel].sample(here))
        values *= np.exp(np.float32(_BIAS) * self._bias[channel].sample(here))
        values += np.float32(self._noise[channel]) * rng.standard_normal(here.shape, dtype=np.float32)
        return np.rint(np.clip(np.float32(self._gain[channel]) * values, 1, _MOST))


def _flipped(scan: Scan) -> Scan:
    """Return the scan with its first two voxel axes running left and posterior (LPS), as many tools write them."""
    nx, ny, _ = scan.label.shape
    flip = np.diag([-1.0, -1.0, 1.0, 1.0])
    flip[:2, 3] = nx - 1, ny - 1
    return Scan(scan.image[::-1, ::-1], scan.label[::-1, ::-1], scan.affine @ flip)
