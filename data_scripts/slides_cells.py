"""Cells: small pictures of each kind ("stamps"), and where they lie.

Sizes are those of textbooks: a lymphocyte's nucleus 6 to 7.5 um across, a germinal centre's 8 to 9.5 um, a carcinoma's
11 to 16 um, vesicular (pale, with a dark rim) and with nucleoli.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from data_scripts.slides_lattice import Places, pixels, values_at
from data_scripts.slides_stain import Floats

VARIANTS = 64  # pictures of each kind; spindles lie at these many angles
_SPINDLE = "spindle"


@dataclass(frozen=True)
class Look:
    """How the cells of a kind look; lengths in um, dyes in units of the stain."""

    diameter: tuple[float, float]  # of a disc as large as the nucleus, from and to
    elongation: tuple[float, float] = (1.0, 1.25)
    lumps: float = 0.03  # how far the outline strays, as a share of the radius
    chromatin: float = 1.0  # haematoxylin inside
    rim: float = 0.15  # and more of it along the membrane
    clumps: float = 0.15  # deviation of the chromatin's grain
    grain: float = 0.5  # size of the grain
    nucleoli: int = 0  # at most
    cytoplasm: float = 0.0  # eosin around the nucleus
    reach: float = 1.0  # radius of the cell over that of the nucleus


LOOKS = {
    "lymphocyte": Look((6.2, 7.6), chromatin=0.88, clumps=0.22, cytoplasm=0.3, reach=1.2),
    "centre": Look((7.6, 9.4), (1.0, 1.35), 0.06, 0.5, 0.25, 0.14, 0.6, 1, 0.32, 1.4),
    "histiocyte": Look((7.5, 9.0), (1.2, 1.8), 0.06, 0.45, 0.2, 0.12, 0.6, 0, 0.4, 1.7),
    _SPINDLE: Look((4.6, 6.2), (3.2, 5.5), 0.05, 0.85, 0.1, 0.12, 0.6),
    "red": Look((5.8, 7.0), (1.0, 1.2), 0.03, 0.0, 0.0, 0.0, 0.5, 0, 1.0, 1.0),
    "tumour": Look((11.0, 16.0), (1.0, 1.55), 0.12, 0.55, 0.45, 0.28, 0.7, 3, 0.4, 1.6),
}


@dataclass(frozen=True)
class Stamps:
    """The pictures of one kind of cell: haematoxylin and eosin, [VARIANTS, S, S] float32, S odd.

    `angles`: of the long axes, radians from the columns' axis; `diameters`: of discs as large as the nuclei, um.
    """

    haematoxylin: Floats
    eosin: Floats
    angles: npt.NDArray[np.float64]
    diameters: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Cells:
    """Cells of one kind: places [N, 2] px, the picture of each [N], and how strongly each is stained [N]."""

    stamps: Stamps
    places: Places
    variants: npt.NDArray[np.intp]
    strength: Floats


def draw_stamps(look: Look, rng: np.random.Generator) -> Stamps:
    """Draw the pictures of a kind of cell; no two alike."""
    diameters = rng.uniform(*look.diameter, VARIANTS)
    longest = math.sqrt(look.elongation[1]) * (1 + 3 * look.lumps) * look.reach
    half = math.ceil(pixels(look.diameter[1]) / 2 * longest) + 2
    angles = np.arange(VARIANTS) * math.pi / VARIANTS
    pictures = [_picture(look, half, pixels(d) / 2, a, rng) for d, a in zip(diameters, angles, strict=True)]
    haematoxylin, eosin = (np.stack(dye) for dye in zip(*pictures, strict=True))
    return Stamps(haematoxylin, eosin, angles, diameters)


def _picture(look: Look, half: int, radius: float, angle: float, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Draw one cell of `radius` px: its dyes [2 half + 1, 2 half + 1]."""
    y, x = np.mgrid[-half : half + 1, -half : half + 1].astype(np.float32)
    stretch = math.sqrt(rng.uniform(*look.elongation))
    along = (x * math.cos(angle) + y * math.sin(angle)) / stretch
    across = (y * math.cos(angle) - x * math.sin(angle)) * stretch
    theta = np.arctan2(across, along)
    outline = np.full_like(x, radius)
    for order in (2, 3, 4, 5, 6):
        outline += radius * look.lumps * rng.normal() / order * 1.6 * np.cos(order * theta + rng.uniform(0, 6.3))
    off_centre = np.hypot(along, across)
    depth = outline - off_centre  # px below the membrane, about
    inside = np.clip(depth + 0.5, 0, 1)
    grain = ndimage.gaussian_filter(rng.standard_normal(x.shape), pixels(look.grain))
    dye = look.chromatin * (1 + look.clumps * grain / grain.std()) + look.rim * np.exp(-((depth / 1.6) ** 2))
    for _ in range(rng.integers(1, look.nucleoli + 1) if look.nucleoli else 0):
        at, turn = rng.uniform(0, 0.5) * radius, rng.uniform(0, 2 * np.pi)
        distance = np.hypot(along - at * math.cos(turn), across - at * math.sin(turn))
        dye += rng.uniform(0.5, 0.9) * np.exp(-((distance / pixels(rng.uniform(0.8, 1.3))) ** 2))
    cell = np.clip((outline * look.reach - off_centre) / 5 + 0.5, 0, 1)
    return (inside * np.maximum(dye, 0)).astype(np.float32), (cell * look.cytoplasm).astype(np.float32)


def settle(
    look: Look,
    places: Places,
    rng: np.random.Generator,
    dark: Floats,
    angles: Floats | None = None,
) -> Cells:
    """Return cells at places, each with a picture and a strength of its own.

    Args:
        look: the kind of cell.
        places: [N, 2] px.
        rng: draws the pictures too.
        dark: field of nodes, about 1: how strongly nuclei are stained there.
        angles: [N] radians: where the long axes point; anywhere if not given.
    """
    stamps = draw_stamps(look, rng)
    variants = rng.integers(0, VARIANTS, len(places))
    if angles is not None:
        turned = angles.astype(np.float64) + rng.normal(0, 0.15, len(places))
        variants = np.rint(turned / math.pi * VARIANTS).astype(np.intp) % VARIANTS
    strength = np.clip(rng.normal(1, 0.12, len(places)) * values_at(dark, places), 0.5, 1.6).astype(np.float32)
    return Cells(stamps, places, variants, strength)


def stamp(cells: Cells, haematoxylin: Floats, eosin: Floats, top: int, left: int) -> None:
    """Draw the cells that fall on a part of the slide into its dyes [H, W], whose first pixel is (top, left)."""
    side = cells.stamps.eosin.shape[1]
    corner = np.rint(cells.places).astype(np.intp) - side // 2 - (top, left)
    height, width = eosin.shape
    seen = ((corner > -side) & (corner < (height, width))).all(axis=1)
    stained, pink = bool(cells.stamps.haematoxylin.any()), bool(cells.stamps.eosin.any())
    for (row, column), variant, strength in zip(
        corner[seen].tolist(), cells.variants[seen].tolist(), cells.strength[seen], strict=True
    ):
        part = slice(max(row, 0), min(row + side, height)), slice(max(column, 0), min(column + side, width))
        own = variant, slice(max(-row, 0), height - row), slice(max(-column, 0), width - column)
        if stained:
            under = haematoxylin[part]
            np.maximum(under, cells.stamps.haematoxylin[own] * strength, out=under)
        if pink:
            under = eosin[part]
            np.maximum(under, cells.stamps.eosin[own], out=under)
