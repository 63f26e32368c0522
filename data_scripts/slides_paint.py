"""One synthetic slide of a lymph node, with or without metastases: its cells, its dyes, and the scanner's eye.

Tumour is told by its cells, not by its colour.
"""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import yaml
from scipy import ndimage

from medspeed.data_scripts import slides_tissue
from medspeed.data_scripts.slides_tissue import MARGIN, MPP, NODE, Bytes, Fields, Floats, Lesions, ramp, values_at

ISOLATED_UM = 200.0  # below: isolated tumour cells. Source: AJCC staging manual, as used in Camelyon16
VARIANTS = 64  # pictures of each kind of cell; spindles lie at these many angles
_TILE, _HALO = 1024, 16  # px drawn at a time, and around them, since focus and outlines reach across
_TEXTURE = 1024  # px, side of the periodic noise that cytoplasm takes its grain from
_TRIES = 40  # tissues drawn until one has room for a lesion

TABLES = yaml.safe_load(Path(__file__).with_name("slides.yaml").read_text(encoding="utf-8"))
LOOKS = {kind: SimpleNamespace(**row) for kind, row in TABLES["looks"].items()}  # how cells of a kind look and lie
INKS: dict[str, list[float]] = TABLES["inks"]


class Cells(NamedTuple):
    """Cells of one kind: their pictures ("stamps"), which and how strongly stained each is, and where it lies."""

    haematoxylin: Floats  # [VARIANTS, S, S], S odd
    eosin: Floats  # likewise
    places: Floats  # [N, 2] um
    variants: npt.NDArray[np.intp]  # [N]
    strength: Floats  # [N], of the nucleus


def draw_stamps(look: SimpleNamespace, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Draw the pictures of a kind of cell, haematoxylin and eosin [VARIANTS, S, S], turned evenly; no two alike."""
    longest = math.sqrt(look.elongation[1]) * (1 + 3 * look.lumps) * look.reach
    half = math.ceil(look.diameter[1] / MPP / 2 * longest) + 2
    y, x = np.mgrid[-half : half + 1, -half : half + 1].astype(np.float32)

    def each(low: float, high: float) -> Floats:
        return rng.uniform(low, high, (VARIANTS, 1, 1)).astype(np.float32)

    angle = (np.arange(VARIANTS, dtype=np.float32) * np.float32(math.pi / VARIANTS))[:, None, None]
    radius, stretch = each(*look.diameter) / np.float32(2 * MPP), np.sqrt(each(*look.elongation))
    along, across = (x * np.cos(angle) + y * np.sin(angle)) / stretch, (y * np.cos(angle) - x * np.sin(angle)) * stretch
    theta, off_centre = np.arctan2(across, along), np.hypot(along, across)
    outline = np.broadcast_to(radius, theta.shape).copy()
    for order in (2, 3, 4, 5, 6):
        lump = rng.standard_normal((VARIANTS, 1, 1), np.float32) * np.float32(1.6 * look.lumps / order)
        outline += radius * lump * np.cos(order * theta + each(0, 6.3))
    depth = outline - off_centre  # px below the membrane, about
    grain = ndimage.gaussian_filter(rng.standard_normal(theta.shape, np.float32), 0.6 / MPP, axes=(1, 2))
    dye = look.chromatin * (1 + look.clumps * grain / grain.std()) + look.rim * np.exp(-((depth / 1.6) ** 2))
    number = rng.integers(1, look.nucleoli + 1, (VARIANTS, 1, 1)) if look.nucleoli else 0
    for nucleolus in range(look.nucleoli):
        at, turn, width = each(0, 0.5) * radius, each(0, 2 * math.pi), each(0.8, 1.3) / np.float32(MPP)
        distance = np.hypot(along - at * np.cos(turn), across - at * np.sin(turn))
        dye += (nucleolus < number) * each(0.5, 0.9) * np.exp(-((distance / width) ** 2))
    cell = np.clip((outline * np.float32(look.reach) - off_centre) / 5 + 0.5, 0, 1)
    return np.clip(depth + 0.5, 0, 1) * np.maximum(dye, 0), cell * np.float32(look.cytoplasm)


def sow(kind: str, share: npt.NDArray[np.floating[Any]], fields: Fields, along: Floats | None = None) -> Cells:
    """Return cells of a kind all over a slide: `share` of the places, 0 to 1; long axes point `along`, radians."""
    rng, places = fields.rng, fields.scatter(share, LOOKS[kind].spacing)
    variants = rng.integers(0, VARIANTS, len(places))
    if along is not None:
        angles = values_at(along, places) + rng.normal(0, 0.15, len(places))
        variants = np.rint(angles / math.pi * VARIANTS).astype(np.intp) % VARIANTS
    strength = rng.normal(1, 0.12, len(places)) * values_at(1 + 0.14 * fields.waves(300), places)
    return Cells(*draw_stamps(LOOKS[kind], rng), places, variants, np.clip(strength, 0.5, 1.6).astype(np.float32))


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


class Stain(NamedTuple):
    """How one slide was stained, marked and scanned."""

    haematoxylin: Floats  # optical density [3] in R, G, B
    eosin: Floats  # likewise
    ink: Floats  # likewise
    white: Floats  # grey levels [3], 0 to 255
    blur: float  # px, a standard deviation
    noise: float  # grey levels, likewise


def draw_stain(rng: np.random.Generator) -> Stain:
    """Draw the stain of a slide: hue and strength of both dyes, the lamp, focus and noise differ as between labs."""

    def dye(name: str, strength: float) -> Floats:
        hue = np.asarray(TABLES[name]) + rng.normal(0, 0.045, 3)
        return (strength * hue / np.linalg.norm(hue)).astype(np.float32)

    return Stain(
        haematoxylin=dye("haematoxylin", rng.uniform(0.85, 1.4)),
        eosin=dye("eosin", rng.uniform(0.6, 1.2)),
        ink=np.asarray(INKS[str(rng.choice(list(INKS)))], np.float32),
        white=(rng.uniform(236, 249) + rng.normal(0, 1.5, 3)).clip(0, 252).astype(np.float32),
        blur=float(rng.uniform(0.5, 0.9)),
        noise=float(rng.uniform(1.2, 3.0)),
    )


def develop(haematoxylin: Floats, eosin: Floats, ink: Floats, stain: Stain, rng: np.random.Generator) -> Bytes:
    """Return the bytes [H, W, 3] that the scanner makes of dyes and ink [H, W] (Beer and Lambert), focus and noise too.

    One unit of haematoxylin is about a dark nucleus, of eosin a red blood cell; ink is 0 for none to 1 for a stroke.
    """
    dyes = [ndimage.gaussian_filter(dye, stain.blur, truncate=3.0) for dye in (haematoxylin, eosin)]
    light = rng.standard_normal((*ink.shape, 3), dtype=np.float32) * np.float32(stain.noise)
    for channel in range(3):
        density = dyes[0] * stain.haematoxylin[channel] + dyes[1] * stain.eosin[channel] + ink * stain.ink[channel]
        light[..., channel] += np.exp(-density, out=density) * stain.white[channel]
    return np.asarray(np.clip(light + np.float32(0.5), 0, 255), np.uint8)


def draw_slide(size: int, tumour: bool, rng: np.random.Generator) -> tuple[Bytes, Bytes, Lesions]:
    """Draw a slide of `size` x `size` px at MPP; with tumour it has a lesion that is more than isolated tumour cells.

    Returns the image [H, W, 3] uint8, the mask [H, W] uint8 (1 = tumour) and the lesions, none in a normal slide.
    """
    fields = Fields(size * MPP, rng)
    least = min(ISOLATED_UM, fields.extent / 2.5)  # small slides have no room for more
    for _ in range(_TRIES):
        depth, node_depth = slides_tissue.draw_node(fields)
        lesions = slides_tissue.draw_lesions(node_depth, fields) if tumour else []
        if not tumour or max((slides_tissue.long_axis(outline) for _, outline in lesions), default=0.0) > least:
            break
    else:
        raise ValueError(f"slides of {size} px: no room for a lesion in {_TRIES} attempts; use a larger --size")
    mask = slides_tissue.mask_of(lesions, size)
    haze, eosin, cells = _fill(node_depth, mask, fields)
    section, ink = ramp(depth, -1, 1), slides_tissue.draw_ink(depth, fields)
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
            part[...] = develop(blue, pink, enlarge(ink, y, x), stain, rng)[_HALO:-_HALO, _HALO:-_HALO]
    return image, mask, lesions


def enlarge(field: Floats, rows: npt.NDArray[np.intp], columns: npt.NDArray[np.intp]) -> Floats:
    """Return the values of a field at rows and columns of pixels [H, W], linear between the nodes."""
    for axis, line in enumerate((rows, columns)):
        node, share = np.divmod(line * (MPP / NODE) + MARGIN, 1)
        share = np.expand_dims(share.astype(np.float32), 1 - axis)
        below = field.take(node.astype(np.intp), axis)
        field = below + share * (field.take(node.astype(np.intp) + 1, axis) - below)
    return field


def _fill(depth: Floats, mask: Bytes, fields: Fields) -> tuple[Floats, Floats, list[Cells]]:
    """Return the fields of haematoxylin between the nuclei and of eosin, and the cells, each where its tissue is.

    Lymphoid density, germinal centres, sinuses and stroma vary as much as tumour differs from them in mean colour.
    `depth` is that in the lymph node, um.
    """
    rng, waves, step = fields.rng, fields.waves, round(NODE / MPP)
    seen = mask[::step, ::step]
    tumour = np.zeros_like(depth)
    tumour[MARGIN : MARGIN + len(seen), MARGIN : MARGIN + len(seen)] = seen
    normal, fat = ramp(depth, -4, 0) * (1 - tumour), ramp(depth, -3, -9)
    # the stroma that a tumour has around its nests, narrow or broad, scarred in places, and the lumina of its glands
    width = rng.uniform(0.05, 0.15) + 0.05 * waves(300)
    scars = ramp(waves(240) + 0.3 * waves(60), 1.3, 1.5)
    septa = np.maximum(ramp(np.abs(waves(130)) - width, 0.07, 0), scars) * tumour
    lumina = ramp(waves(75) - rng.uniform(0.9, 1.8), 0, 0.15) * (tumour - septa)
    nests = tumour - septa - lumina
    # the node's own: its capsule with septa and scars, sinuses, and follicles with germinal centres
    walls = np.maximum(ramp(depth + 8 * waves(200), 36, 24), ramp(np.abs(waves(420)) - 0.05 * waves(150), 0.08, 0.05))
    walls = np.maximum(walls, ramp(waves(380) + 0.3 * waves(70), 0.95, 1.1)) * ramp(depth, -14, -8)
    channels = np.abs(waves(180) + 0.15 * waves(40)) + ramp(waves(500), 0.1, -0.3)
    sinus = ramp(channels, 0.16, 0.10) * ramp(depth, 0, 8) * (1 - walls) * normal
    follicle = ramp(waves(260) + 0.08 * waves(60), 0.95, 1.05) * ramp(depth, 60, 90) * (normal - sinus) * (1 - walls)
    stroma = np.maximum(walls * (1 - tumour), septa)
    lymphoid = normal * (1 - stroma) * (1 - sinus) * (1 - follicle)
    density = np.clip(0.8 + rng.normal(0, 0.06) + 0.22 * waves(350) + 0.08 * waves(90), 0.2, 0.98)
    pink = (rng.uniform(0.26, 0.42) + 0.09 * waves(260)) * (1 - stroma)
    eosin = pink * (1 - 0.65 * sinus - 0.9 * lumina - 0.4 * nests) + stroma * (0.62 + 0.1 * waves(200))
    eosin = np.maximum(eosin, 0.03) * (1 - fat) + 0.4 * ramp(np.abs(waves(75)), 0.12, 0.04) * fat
    haze = 0.10 + 0.05 * waves(200) + 0.06 * follicle - 0.08 * sinus - 0.05 * stroma - 0.08 * lumina
    along: Floats = np.float32(math.pi) * waves(400)
    packed = lymphoid * density + 0.22 * (sinus + follicle) + 0.06 * stroma + 0.35 * septa + 0.04 * nests
    cells = [
        sow("histiocyte", 0.7 * sinus + 0.06 * lymphoid, fields),
        sow("centre", 0.92 * follicle, fields),
        sow("spindle", 0.75 * stroma + 0.12 * lymphoid, fields, along),
        sow("lymphocyte", packed, fields),
        sow("tumour", nests * ramp(waves(250), -4, 1.1), fields),
    ]
    return np.maximum(haze, 0.02) * (1 - fat), eosin, cells
