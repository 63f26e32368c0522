"""One synthetic slide of a lymph node, with or without metastases: fields, cells and pixels put together."""

from dataclasses import dataclass

import numpy as np
from scipy import ndimage

from data_scripts.slides_cells import LOOKS, Cells, settle, stamp
from data_scripts.slides_lattice import MARGIN, MPP, PITCH, Places, enlarge, pixels, ramp, scatter, values_at, waves
from data_scripts.slides_lesions import ISOLATED_UM, Lesion, draw_lesions, mask_of, places_inside
from data_scripts.slides_stain import INK_COLOURS, Bytes, Floats, Stain, develop, draw_stain, scan
from data_scripts.slides_tissue import Tissue, draw_tissue

TILE = 1024  # px drawn at a time
_HALO = 16  # px around them, since focus and outlines reach across
_TRIES = 40  # scenes drawn until one has room for a lesion
_TEXTURE = 1024  # px, side of the periodic noise that fibres and cytoplasm take their grain from


@dataclass(frozen=True)
class Slide:
    """A slide: image [H, W, 3] uint8, mask [H, W] uint8 (1 = tumour) and the lesions, none in a normal slide."""

    image: Bytes
    mask: Bytes
    lesions: list[Lesion]


@dataclass(frozen=True)
class _Scene:
    """All that the pixels of a slide are made from; dyes are fields of nodes."""

    tissue: Tissue
    haze: Floats  # haematoxylin between the nuclei
    eosin: Floats
    fibre: Floats  # how much of the eosin lies in fibres, 0 to 1
    cells: list[Cells]
    stain: Stain
    lamp: Floats
    colour: str
    mottle: Floats  # [_TEXTURE, _TEXTURE] periodic, deviation 1
    fibres: Floats  # likewise, drawn out along the second axis


def draw_slide(size: int, tumour: bool, rng: np.random.Generator) -> Slide:
    """Draw a slide of `size` x `size` px at MPP; with tumour it has a lesion that is more than isolated tumour cells.

    Takes about 4 bytes a pixel for what it returns, and 2 more for fields and cells while it draws.
    """
    least = min(ISOLATED_UM, size * MPP / 2.5)  # small slides have no room for more
    for _ in range(_TRIES):
        tissue = draw_tissue(size, rng)
        lesions = draw_lesions(tissue.room(), size, rng) if tumour else []
        if not tumour or max((lesion.long_axis for lesion in lesions), default=0.0) > least:
            break
    else:
        raise ValueError(f"slides of {size} px: {_TRIES} drawn ones had no room for a lesion; take a larger --size")
    mask = mask_of(lesions, size)
    scene = _set(size, tissue, mask, rng)
    image = np.empty((size, size, 3), np.uint8)
    for top in range(0, size, TILE):
        for left in range(0, size, TILE):
            part = image[top : top + TILE, left : left + TILE]
            part[...] = _draw_tile(scene, top, left, part.shape[0], part.shape[1], rng)
    return Slide(image, mask, lesions)


def _set(size: int, tissue: Tissue, mask: Bytes, rng: np.random.Generator) -> _Scene:
    """Stain the tissue and fill it with cells."""
    nodes = tissue.depth.shape[0]
    tumour = _share(mask, nodes)
    septa = _septa(nodes, rng) * tumour
    lumina = ramp(waves(nodes, 75, rng), *(rng.uniform(0.9, 1.8) + np.array([0, 0.15]))) * (tumour - septa)
    normal = 1 - tumour
    stroma = np.maximum(tissue.stroma * normal, septa)
    follicle, sinus = tissue.follicle * normal, tissue.sinus * normal
    pink = rng.uniform(0.26, 0.42) + 0.09 * waves(nodes, 260, rng)
    eosin = pink * (1 - 0.65 * sinus - 0.9 * lumina - 0.4 * (tumour - septa - lumina)) * (1 - stroma) + stroma * (
        0.62 + 0.1 * waves(nodes, 200, rng)
    )
    haze = 0.10 + 0.05 * waves(nodes, 200, rng) + 0.06 * follicle - 0.08 * sinus - 0.05 * stroma - 0.08 * lumina
    return _Scene(
        tissue=tissue,
        haze=np.maximum(haze, 0.02),
        eosin=np.maximum(eosin, 0.03),
        fibre=np.maximum(stroma, 0.35 * sinus),
        cells=_fill(size, tissue, tumour, septa, lumina, mask, rng),
        stain=draw_stain(rng),
        lamp=1 + np.float32(0.006) * waves(nodes, 1500, rng),
        colour=str(rng.choice(INK_COLOURS)),
        mottle=_texture((2.2, 2.2), rng) * np.float32(0.7) + _texture((8, 8), rng) * np.float32(0.7),
        fibres=_texture((1.8, 30), rng),
    )


def _share(mask: Bytes, nodes: int) -> Floats:
    """Return a mask as a field of nodes, 0 to 1, soft over a few nodes."""
    coarse = np.zeros((nodes, nodes), np.float32)
    seen = mask[::PITCH, ::PITCH]
    coarse[MARGIN : MARGIN + seen.shape[0], MARGIN : MARGIN + seen.shape[1]] = seen
    return ndimage.gaussian_filter(coarse, 0.7)


def _texture(sigma: tuple[float, float], rng: np.random.Generator) -> Floats:
    noise = rng.standard_normal((_TEXTURE, _TEXTURE), dtype=np.float32)
    smooth: Floats = ndimage.gaussian_filter(noise, sigma, mode="wrap")
    return smooth * np.float32((4 * np.pi * sigma[0] * sigma[1]) ** 0.5)  # deviation 1 again


def _fill(
    size: int, tissue: Tissue, tumour: Floats, septa: Floats, lumina: Floats, mask: Bytes, rng: np.random.Generator
) -> list[Cells]:
    """Return the cells of all kinds, each where its tissue is."""
    normal = 1 - tumour
    packed = np.maximum(tissue.density, tissue.mantle * 0.97) * tissue.lymphoid
    lymphocytes = packed * normal + 0.22 * normal * (tissue.sinus + tissue.follicle + 0.3 * tissue.stroma)
    lymphocytes = lymphocytes * ramp(tissue.node_depth, -4, 0) + tumour * (1 - lumina) * (0.04 + 0.4 * septa)
    inside = ramp(tissue.depth, 3, 8)
    spindles = np.maximum(tissue.stroma * normal, septa) * 0.75 + 0.12 * tissue.lymphoid * normal
    cells = [
        _sown("histiocyte", 13, inside * normal * (0.7 * tissue.sinus + 0.06 * tissue.lymphoid), size, rng),
        _sown("centre", 10.5, inside * normal * tissue.follicle * 0.92, size, rng),
        _sown("spindle", 16, inside * spindles, size, rng, _along(tissue.grain)),
        _sown("lymphocyte", 7.7, inside * lymphocytes, size, rng),
        _sown("red", 7, _blood(tissue, rng) * inside * normal, size, rng),
    ]
    return [*cells, _nests(size, np.maximum(septa, lumina), mask, rng)]


def _septa(nodes: int, rng: np.random.Generator) -> Floats:
    """Return the stroma that a tumour would have around its nests, 0 to 1: narrow or broad, scarred in places."""
    width = rng.uniform(0.05, 0.15) + 0.05 * waves(nodes, 300, rng)
    scars = ramp(waves(nodes, 240, rng) + 0.3 * waves(nodes, 60, rng), 1.3, 1.5)
    return np.maximum(ramp(np.abs(waves(nodes, 130, rng)) - width, 0.07, 0), scars)


def _nests(size: int, septa: Floats, mask: Bytes, rng: np.random.Generator) -> Cells:
    """Return the tumour's cells: closer or looser, darker or paler from place to place."""
    nodes = septa.shape[0]
    places = scatter(size, rng.uniform(14.5, 17), rng)
    packed = np.clip(0.78 + 0.2 * waves(nodes, 250, rng), 0.45, 1) * (1 - 0.92 * septa)
    places = places[places_inside(mask, places) & (rng.random(len(places)) < values_at(packed, places))]
    return settle(LOOKS["tumour"], places, rng, dark=np.clip(1 + 0.18 * waves(nodes, 300, rng), 0.65, 1.3))


def _sown(
    kind: str, spacing: float, share: Floats, size: int, rng: np.random.Generator, angles: Floats | None = None
) -> Cells:
    """Return cells of a kind, `spacing` um apart where their share is 1, fewer where it is less."""
    places = scatter(size, spacing, rng)
    places = places[rng.random(len(places)) < values_at(share, places)]
    dark = 1 + 0.1 * waves(share.shape[0], 300, rng)
    return settle(LOOKS[kind], places, rng, dark, None if angles is None else values_at(angles, places))


def _along(grain: Floats) -> Floats:
    """Return the angle of the fibres at each node, radians: they run where `grain` stays the same."""
    down, right = np.gradient(grain)
    angle: Floats = np.arctan2(down, right) + np.float32(np.pi / 2)
    return angle


def _blood(tissue: Tissue, rng: np.random.Generator) -> Floats:
    """Return where red cells lie: in vessels here and there."""
    vessels = waves(tissue.depth.shape[0], 60, rng)
    return ramp(vessels, 1.7, 1.8) * ramp(tissue.depth, 20, 30) * np.float32(0.9)


def _draw_tile(scene: _Scene, top: int, left: int, height: int, width: int, rng: np.random.Generator) -> Bytes:
    """Return the pixels [height, width, 3] of a part of the slide."""
    y, x = top - _HALO, left - _HALO
    tall, wide = (-(-side // PITCH) * PITCH + 2 * _HALO for side in (height, width))

    def field(nodes: Floats) -> Floats:
        return enlarge(nodes, y, x, tall, wide)

    rows, columns = np.arange(y, y + tall) % _TEXTURE, np.arange(x, x + wide) % _TEXTURE
    mottle = scene.mottle[np.ix_(rows, columns)]
    across = field(scene.tissue.grain) + 3 * mottle
    threads = scene.fibres[across.astype(np.intp) % _TEXTURE, columns[None] + 0 * rows[:, None]]
    fibre = field(scene.fibre)
    eosin = field(scene.eosin) * (1 + 0.16 * mottle + fibre * (0.34 * threads - 0.02))
    haematoxylin = field(scene.haze) * (1 + 0.5 * mottle)
    for cells in scene.cells:
        stamp(cells, haematoxylin, eosin, y, x)
    section = ramp(field(scene.tissue.depth) + 1.2 * mottle, -0.7, 0.7)
    section *= 1 - _lumen(scene.tissue.vacuoles, y, x, tall, wide)
    section *= 1 + 0.9 * field(scene.tissue.fold)
    ink = field(scene.tissue.ink)
    light = develop(
        np.maximum(haematoxylin, 0) * section,
        np.maximum(eosin, 0) * section,
        ink * (1 + 0.05 * threads) if ink.any() else ink,
        scene.colour,
        scene.stain,
        field(scene.lamp),
    )
    part = light[_HALO : _HALO + height, _HALO : _HALO + width]
    return scan(part, scene.stain.noise, rng)


def _lumen(vacuoles: Places, top: int, left: int, height: int, width: int) -> Floats:
    """Return how much of each pixel [H, W] is dissolved fat: round cells that flatten where they meet."""
    first = np.full((height, width), -1e3, np.float32)  # px inside the cell that reaches deepest, and the next one
    second = first.copy()
    wall = pixels(1.1)
    for row, column, radius in (vacuoles - (top, left, 0)).tolist():
        low, high = int(row - radius) - 2, int(row + radius) + 3
        near, far = int(column - radius) - 2, int(column + radius) + 3
        if high <= 0 or far <= 0 or low >= height or near >= width:
            continue
        part = slice(max(low, 0), high), slice(max(near, 0), far)
        rows, columns = np.ogrid[part[0].start : min(high, height), part[1].start : min(far, width)]
        inside = np.float32(radius) - np.hypot(rows - np.float32(row), columns - np.float32(column))
        second[part] = np.maximum(second[part], np.minimum(first[part], inside))
        first[part] = np.maximum(first[part], inside)
    return ramp(first, 0, 1.5) * ramp(first - second, 2 * wall - 1, 2 * wall + 1)
