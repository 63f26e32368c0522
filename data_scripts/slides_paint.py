"""One synthetic slide of a lymph node, with or without metastases: its cells, its dyes, and the scanner's eye.

Tumour is told by its cells, not by its colour. Sizes are those of textbooks: a lymphocyte's nucleus 6 to 7.5 um across,
a germinal centre's 8 to 9.5 um, a carcinoma's 11 to 16 um, vesicular (pale, with a dark rim) and with nucleoli.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from data_scripts.slides_tissue import (
    ISOLATED_UM,
    MARGIN,
    MPP,
    NODE,
    Bytes,
    Floats,
    Lesions,
    Tissue,
    draw_lesions,
    draw_tissue,
    long_axis,
    mask_of,
    ramp,
    scatter,
    values_at,
    waves,
)

# Optical density per unit of stain in R, G, B. Source: Ruifrok and Johnston, Quantification of histochemical staining
# by colour deconvolution, Anal Quant Cytol Histol 2001
_HAEMATOXYLIN, _EOSIN = (0.65, 0.70, 0.29), (0.07, 0.99, 0.11)
INKS = {"blue": (1.5, 0.9, 0.2), "green": (1.5, 0.35, 0.9), "black": (1.7, 1.6, 1.4)}  # densities seen on slides
VARIANTS = 64  # pictures of each kind of cell; spindles lie at these many angles
_TILE, _HALO = 1024, 16  # px drawn at a time, and around them, since focus and outlines reach across
_TEXTURE = 1024  # px, side of the periodic noise that cytoplasm takes its grain from
_TRIES = 40  # tissues drawn until one has room for a lesion


@dataclass(frozen=True)
class Look:
    """How the cells of a kind look and lie; lengths in um, dyes in units of the stain."""

    spacing: float  # between cells where their share is 1
    diameter: tuple[float, float]  # of a disc as large as the nucleus, from and to
    elongation: tuple[float, float]
    lumps: float  # how far the outline strays, as a share of the radius
    chromatin: float  # haematoxylin inside
    rim: float  # and more of it along the membrane
    clumps: float  # deviation of the chromatin's grain
    nucleoli: int = 0  # at most
    cytoplasm: float = 0.0  # eosin around the nucleus
    reach: float = 1.0  # radius of the cell over that of the nucleus


LOOKS = {
    "lymphocyte": Look(7.7, (6.2, 7.6), (1.0, 1.25), 0.03, 0.88, 0.15, 0.22, 0, 0.3, 1.2),
    "centre": Look(10.5, (7.6, 9.4), (1.0, 1.35), 0.06, 0.5, 0.25, 0.14, 1, 0.32, 1.4),
    "histiocyte": Look(13.0, (7.5, 9.0), (1.2, 1.8), 0.06, 0.45, 0.2, 0.12, 0, 0.4, 1.7),
    "spindle": Look(16.0, (4.6, 6.2), (3.2, 5.5), 0.05, 0.85, 0.1, 0.12),
    "tumour": Look(15.5, (11.0, 16.0), (1.0, 1.55), 0.12, 0.55, 0.45, 0.28, 3, 0.4, 1.6),
}


@dataclass(frozen=True)
class Cells:
    """Cells of one kind: their pictures ("stamps"), and where each lies.

    `haematoxylin`, `eosin`: [VARIANTS, S, S] float32, S odd; `places` [N, 2] um; the picture of each cell [N], and how
    strongly its nucleus is stained [N].
    """

    haematoxylin: Floats
    eosin: Floats
    places: Floats
    variants: npt.NDArray[np.intp]
    strength: Floats


def draw_stamps(look: Look, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Draw the pictures of a kind of cell, haematoxylin and eosin [VARIANTS, S, S], turned evenly; no two alike."""
    longest = math.sqrt(look.elongation[1]) * (1 + 3 * look.lumps) * look.reach
    half = math.ceil(look.diameter[1] / MPP / 2 * longest) + 2
    radii = rng.uniform(*look.diameter, VARIANTS) / MPP / 2
    angles = np.arange(VARIANTS) * math.pi / VARIANTS
    pictures = [_picture(look, half, radius, angle, rng) for radius, angle in zip(radii, angles, strict=True)]
    haematoxylin, eosin = (np.stack(dye) for dye in zip(*pictures, strict=True))
    return haematoxylin, eosin


def _picture(look: Look, half: int, radius: float, angle: float, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Draw one cell of `radius` px: its dyes [2 half + 1, 2 half + 1]."""
    y, x = np.mgrid[-half : half + 1, -half : half + 1].astype(np.float32)
    stretch = math.sqrt(rng.uniform(*look.elongation))
    along = (x * math.cos(angle) + y * math.sin(angle)) / stretch
    across = (y * math.cos(angle) - x * math.sin(angle)) * stretch
    theta, off_centre = np.arctan2(across, along), np.hypot(along, across)
    outline = np.full_like(x, radius)
    for order in (2, 3, 4, 5, 6):
        outline += radius * look.lumps * rng.normal() / order * 1.6 * np.cos(order * theta + rng.uniform(0, 6.3))
    depth = outline - off_centre  # px below the membrane, about
    grain = ndimage.gaussian_filter(rng.standard_normal(x.shape), 0.6 / MPP)
    dye = look.chromatin * (1 + look.clumps * grain / grain.std()) + look.rim * np.exp(-((depth / 1.6) ** 2))
    for _ in range(rng.integers(1, look.nucleoli + 1) if look.nucleoli else 0):
        at, turn = rng.uniform(0, 0.5) * radius, rng.uniform(0, 2 * np.pi)
        distance = np.hypot(along - at * math.cos(turn), across - at * math.sin(turn))
        dye += rng.uniform(0.5, 0.9) * np.exp(-((distance * MPP / rng.uniform(0.8, 1.3)) ** 2))
    cell = np.clip((outline * look.reach - off_centre) / 5 + 0.5, 0, 1)
    nucleus = np.clip(depth + 0.5, 0, 1) * np.maximum(dye, 0)
    return nucleus.astype(np.float32), (cell * look.cytoplasm).astype(np.float32)


def sow(
    kind: str,
    share: npt.NDArray[np.floating[Any]],
    extent: float,
    rng: np.random.Generator,
    along: Floats | None = None,
) -> Cells:
    """Return cells of a kind all over a slide, as many as their share, darker or paler from place to place.

    Args:
        kind: one of LOOKS.
        share: a field from 0 to 1: of the places that are taken.
        extent: side of the slide, um.
        rng: draws the pictures too.
        along: a field of radians: where the long axes point; anywhere if not given.
    """
    places = scatter(extent, LOOKS[kind].spacing, rng)
    places = places[rng.random(len(places)) < values_at(share, places)]
    variants = rng.integers(0, VARIANTS, len(places))
    if along is not None:
        angles = values_at(along, places) + rng.normal(0, 0.15, len(places))
        variants = np.rint(angles / math.pi * VARIANTS).astype(np.intp) % VARIANTS
    strength = rng.normal(1, 0.12, len(places)) * values_at(1 + 0.14 * waves(len(share), 300, rng), places)
    stamps = draw_stamps(LOOKS[kind], rng)
    return Cells(*stamps, places, variants, np.clip(strength, 0.5, 1.6).astype(np.float32))


def stamp(cells: Cells, haematoxylin: Floats, eosin: Floats, top: int, left: int) -> None:
    """Draw the cells that fall on a part of the slide into its dyes [H, W], whose first pixel is (top, left)."""
    side = cells.eosin.shape[1]
    corner = np.rint(cells.places / MPP).astype(np.intp) - side // 2 - (top, left)
    height, width = eosin.shape
    seen = ((corner > -side) & (corner < (height, width))).all(axis=1)
    each = zip(corner[seen].tolist(), cells.variants[seen].tolist(), cells.strength[seen], strict=True)
    for (row, column), variant, strength in each:
        part = slice(max(row, 0), min(row + side, height)), slice(max(column, 0), min(column + side, width))
        own = variant, slice(max(-row, 0), height - row), slice(max(-column, 0), width - column)
        np.maximum(haematoxylin[part], cells.haematoxylin[own] * strength, out=haematoxylin[part])
        np.maximum(eosin[part], cells.eosin[own], out=eosin[part])


@dataclass(frozen=True)
class Stain:
    """How one slide was stained, marked and scanned: densities [3] of both dyes and the ink, the white [3], and more.

    `blur` is a standard deviation in px, `noise` one in grey levels of 0 to 255.
    """

    haematoxylin: Floats
    eosin: Floats
    ink: Floats
    white: Floats
    blur: float
    noise: float


def draw_stain(rng: np.random.Generator) -> Stain:
    """Draw the stain of a slide: hue and strength of both dyes, the lamp, focus and noise differ as between labs."""

    def dye(density: tuple[float, float, float], strength: float) -> Floats:
        hue = np.asarray(density) + rng.normal(0, 0.045, 3)
        return (strength * hue / np.linalg.norm(hue)).astype(np.float32)

    return Stain(
        haematoxylin=dye(_HAEMATOXYLIN, rng.uniform(0.85, 1.4)),
        eosin=dye(_EOSIN, rng.uniform(0.6, 1.2)),
        ink=np.asarray(INKS[str(rng.choice(list(INKS)))], np.float32),
        white=(rng.uniform(236, 249) + rng.normal(0, 1.5, 3)).clip(0, 252).astype(np.float32),
        blur=float(rng.uniform(0.5, 0.9)),
        noise=float(rng.uniform(1.2, 3.0)),
    )


def develop(haematoxylin: Floats, eosin: Floats, ink: Floats, stain: Stain, rng: np.random.Generator) -> Bytes:
    """Return the bytes [H, W, 3] that the scanner makes of dyes and ink [H, W] (Beer and Lambert), focus and noise too.

    Args:
        haematoxylin: units of the dye, 1 about a dark nucleus.
        eosin: units of the dye, 1 about a red blood cell.
        ink: 0 none to 1 a full stroke.
        stain: the slide's.
        rng: draws the noise.
    """
    dyes = [ndimage.gaussian_filter(dye, stain.blur, truncate=3.0) for dye in (haematoxylin, eosin)]
    light = rng.standard_normal((*ink.shape, 3), dtype=np.float32) * np.float32(stain.noise)
    for channel in range(3):
        density = dyes[0] * stain.haematoxylin[channel] + dyes[1] * stain.eosin[channel] + ink * stain.ink[channel]
        light[..., channel] += np.exp(-density, out=density) * stain.white[channel]
    return np.asarray(np.clip(light + np.float32(0.5), 0, 255), np.uint8)


@dataclass(frozen=True)
class Slide:
    """A slide: image [H, W, 3] uint8, mask [H, W] uint8 (1 = tumour) and the lesions, none in a normal slide."""

    image: Bytes
    mask: Bytes
    lesions: Lesions


def draw_slide(size: int, tumour: bool, rng: np.random.Generator) -> Slide:
    """Draw a slide of `size` x `size` px at MPP; with tumour it has a lesion that is more than isolated tumour cells.

    Takes about 4 bytes a pixel for what it returns, and 2 more for fields and cells while it draws.
    """
    extent = size * MPP
    least = min(ISOLATED_UM, extent / 2.5)  # small slides have no room for more
    for _ in range(_TRIES):
        tissue = draw_tissue(extent, rng)
        lesions = draw_lesions(tissue.node_depth, extent, rng) if tumour else []
        if not tumour or max((long_axis(outline) for _, outline in lesions), default=0.0) > least:
            break
    else:
        raise ValueError(f"slides of {size} px: {_TRIES} drawn ones had no room for a lesion; take a larger --size")
    mask = mask_of(lesions, size)
    haze, eosin, cells = _fill(tissue, mask, extent, rng)
    section = ramp(tissue.depth, -1, 1)
    noise = ndimage.gaussian_filter(rng.standard_normal((_TEXTURE, _TEXTURE), dtype=np.float32), 3, mode="wrap")
    mottle, stain = noise / noise.std(), draw_stain(rng)
    image = np.empty((size, size, 3), np.uint8)
    for top in range(0, size, _TILE):
        for left in range(0, size, _TILE):
            part = image[top : top + _TILE, left : left + _TILE]
            y = np.arange(top - _HALO, top + part.shape[0] + _HALO)
            x = np.arange(left - _HALO, left + part.shape[1] + _HALO)
            grain = mottle[np.ix_(y % _TEXTURE, x % _TEXTURE)]
            dyes = enlarge(haze, y, x) * (1 + 0.5 * grain), enlarge(eosin, y, x) * (1 + 0.16 * grain)
            for kind in cells:
                stamp(kind, *dyes, int(y[0]), int(x[0]))
            blue, pink = (np.maximum(dye, 0) * enlarge(section, y, x) for dye in dyes)
            part[...] = develop(blue, pink, enlarge(tissue.ink, y, x), stain, rng)[_HALO:-_HALO, _HALO:-_HALO]
    return Slide(image, mask, lesions)


def enlarge(field: Floats, rows: npt.NDArray[np.intp], columns: npt.NDArray[np.intp]) -> Floats:
    """Return the values of a field at rows and columns of pixels [H, W], linear between the nodes."""
    for axis, line in enumerate((rows, columns)):
        node, share = np.divmod(line * (MPP / NODE) + MARGIN, 1)
        share = np.expand_dims(share.astype(np.float32), 1 - axis)
        below = field.take(node.astype(np.intp), axis)
        field = below + share * (field.take(node.astype(np.intp) + 1, axis) - below)
    return field


def _fill(tissue: Tissue, mask: Bytes, extent: float, rng: np.random.Generator) -> tuple[Floats, Floats, list[Cells]]:
    """Return the fields of haematoxylin between the nuclei and of eosin, and the cells, each where its tissue is."""
    nodes, step = len(tissue.depth), round(NODE / MPP)
    tumour = np.zeros((nodes, nodes), np.float32)
    seen = mask[::step, ::step]
    tumour[MARGIN : MARGIN + len(seen), MARGIN : MARGIN + len(seen)] = seen
    # the stroma that a tumour has around its nests, narrow or broad, scarred in places, and the lumina of its glands
    width = rng.uniform(0.05, 0.15) + 0.05 * waves(nodes, 300, rng)
    scars = ramp(waves(nodes, 240, rng) + 0.3 * waves(nodes, 60, rng), 1.3, 1.5)
    septa = np.maximum(ramp(np.abs(waves(nodes, 130, rng)) - width, 0.07, 0), scars) * tumour
    lumina = ramp(waves(nodes, 75, rng) - rng.uniform(0.9, 1.8), 0, 0.15) * (tumour - septa)
    nests, normal = tumour - septa - lumina, ramp(tissue.node_depth, -4, 0) * (1 - tumour)
    stroma = np.maximum(tissue.stroma * (1 - tumour), septa)
    follicle, sinus = tissue.follicle * normal, tissue.sinus * normal
    lymphoid = normal * (1 - stroma) * (1 - sinus) * (1 - follicle)
    fat = ramp(tissue.node_depth, -3, -9)
    pink = (rng.uniform(0.26, 0.42) + 0.09 * waves(nodes, 260, rng)) * (1 - stroma)
    eosin = pink * (1 - 0.65 * sinus - 0.9 * lumina - 0.4 * nests) + stroma * (0.62 + 0.1 * waves(nodes, 200, rng))
    walls = 0.4 * ramp(np.abs(waves(nodes, 75, rng)), 0.12, 0.04)
    haze = 0.10 + 0.05 * waves(nodes, 200, rng) + 0.06 * follicle - 0.08 * sinus - 0.05 * stroma - 0.08 * lumina
    along: Floats = np.float32(math.pi) * waves(nodes, 400, rng)
    packed = lymphoid * tissue.density + 0.22 * (sinus + follicle) + 0.06 * stroma + 0.35 * septa + 0.04 * nests
    cells = [
        sow("histiocyte", 0.7 * sinus + 0.06 * lymphoid, extent, rng),
        sow("centre", 0.92 * follicle, extent, rng),
        sow("spindle", 0.75 * stroma + 0.12 * lymphoid, extent, rng, along),
        sow("lymphocyte", packed, extent, rng),
        sow("tumour", nests * ramp(waves(nodes, 250, rng), -4, 1.1), extent, rng),
    ]
    return np.maximum(haze, 0.02) * (1 - fat), np.maximum(eosin, 0.03) * (1 - fat) + walls * fat, cells
