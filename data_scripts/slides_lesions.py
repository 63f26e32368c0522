"""Metastases: outlines as a pathologist would draw them, the mask they enclose, and their kinds by size."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from data_scripts.slides_lattice import MPP, PITCH, Places, grid, pixels, values_at

Outline = npt.NDArray[np.float64]  # [N, 2] x, y in pixels of level 0; pixel (0, 0) covers 0 to 1
Mask = npt.NDArray[np.bool_]

# The phantom's macro-metastases are scaled down to its slides of 2 mm: Camelyon16's begin at 2 mm.
MACRO_UM = 300.0
ISOLATED_UM = 200.0  # below: isolated tumour cells. Source: AJCC staging manual, as used in Camelyon16
_LARGEST_UM = (380.0, 800.0)  # long axis of a slide's first lesion
_OTHERS_UM = ((70.0, 170.0), (210.0, 300.0), (300.0, 600.0))
_SHARES = (0.4, 0.35, 0.25)  # of the other lesions
_GAP = 8  # nodes left between lesions
_TRIES = 12
_GROUPS = ("Tumor", "_0", "_1")


@dataclass(frozen=True)
class Lesion:
    """One metastasis: its outline, the islands of normal tissue in it, and the annotator's group."""

    outline: Outline
    islands: tuple[Outline, ...]
    group: str

    @property
    def long_axis(self) -> float:
        """Return the greatest distance between two points of the outline, um."""
        gaps = self.outline[:, None] - self.outline[None]
        return float(np.hypot(gaps[..., 0], gaps[..., 1]).max()) * MPP


def draw_lesions(room: Mask, size: int, rng: np.random.Generator) -> list[Lesion]:
    """Draw one to five lesions within `room`, a field of nodes; the first has a long axis above MACRO_UM if it fits."""
    room = room & inside_slide(room.shape[0], size)
    limit = 0.8 * size * MPP
    lengths = [min(rng.uniform(*_LARGEST_UM), limit)]
    for _ in range(rng.integers(0, 5)):
        lengths.append(min(rng.uniform(*_OTHERS_UM[rng.choice(3, p=_SHARES)]), limit / 2))
    group = str(rng.choice(_GROUPS))
    lesions: list[Lesion] = []
    for length in lengths:
        outline = _place(room, length, rng)
        if outline is None:
            continue
        islands = _islands(outline, rng) if length > MACRO_UM and rng.random() < 0.4 else ()
        lesions.append(Lesion(outline, islands, group))
        taken = rasterise([outline / PITCH + 5], room.shape)
        room = room & ~ndimage.binary_dilation(taken, iterations=_GAP)
    return lesions


def inside_slide(nodes: int, size: int) -> Mask:
    """Return which nodes lie on the slide, well off its edge."""
    rows, columns = grid(nodes)
    edge = pixels(10)
    return (rows > edge) & (rows < size - edge) & (columns > edge) & (columns < size - edge)


def _place(room: Mask, length: float, rng: np.random.Generator) -> Outline | None:
    """Return the outline of a lesion `length` um long somewhere in the room; None where it has no room at all."""
    deep = ndimage.distance_transform_edt(room) * PITCH * MPP
    best: Outline | None = None
    reached = 0.0
    for _ in range(_TRIES):
        rows, columns = np.nonzero(deep > rng.uniform(0.15, 0.4) * length)
        if not len(rows):
            continue
        pick = rng.integers(len(rows))
        lines = grid(room.shape[0])
        centre = np.array([lines[1][0, columns[pick]], lines[0][rows[pick], 0]], np.float64)
        outline = _outline(room, centre, length, rng)
        axis = Lesion(outline, (), "").long_axis
        if axis > reached:
            best, reached = outline, axis
        if reached > 0.85 * length:
            break
    return best if reached > 40 else None


def _outline(room: Mask, centre: npt.NDArray[np.float64], length: float, rng: np.random.Generator) -> Outline:
    """Return a lumpy ellipse around `centre` (x, y px), cut where a ray from there leaves the room."""
    corners = int(np.clip(pixels(length) * 3 / 14, 40, 360))
    theta = np.arange(corners) * 2 * math.pi / corners
    turn, slim = rng.uniform(0, math.pi), rng.uniform(0.55, 0.9)
    radius = pixels(length) / 2 * slim / np.sqrt((slim * np.cos(theta - turn)) ** 2 + np.sin(theta - turn) ** 2)
    for order in (2, 3, 4, 5, 7, 9, 12):
        radius *= 1 + 0.16 / order**0.6 * rng.normal() * np.cos(order * theta + rng.uniform(0, 2 * math.pi))
    direction = np.stack([np.cos(theta), np.sin(theta)], axis=1)
    steps = np.arange(0, radius.max() + PITCH, PITCH / 2)
    ray = (centre + direction[:, None] * steps[:, None]).reshape(-1, 2)
    open_way = values_at(room, ray[:, ::-1].astype(np.float32)).reshape(corners, -1)
    free = np.where(open_way.all(axis=1), steps[-1], steps[np.argmin(open_way, axis=1)])
    radius = np.minimum(np.maximum(radius, 3 * PITCH), np.maximum(free - PITCH / 2, PITCH))
    outline: Outline = np.round(centre + direction * radius[:, None], 2)
    return outline


def _islands(outline: Outline, rng: np.random.Generator) -> tuple[Outline, ...]:
    """Return one island of normal tissue within a lesion; none where it would not lie well inside."""
    middle = outline.mean(axis=0)
    radius = np.hypot(*(outline - middle).T).min() * rng.uniform(0.3, 0.5)
    if radius < pixels(25):
        return ()
    theta = np.arange(48) * 2 * math.pi / 48
    wavy = radius * (1 + 0.15 * np.cos(2 * theta + rng.uniform(0, 6)) + 0.08 * np.cos(5 * theta + rng.uniform(0, 6)))
    return (np.round(middle + wavy[:, None] * np.stack([np.cos(theta), np.sin(theta)], axis=1), 2),)


def mask_of(lesions: list[Lesion], size: int) -> npt.NDArray[np.uint8]:
    """Return the mask [H, W] uint8 of a slide: 1 in the lesions, 0 in their islands and elsewhere."""
    mask = rasterise([lesion.outline for lesion in lesions], (size, size))
    mask &= ~rasterise([island for lesion in lesions for island in lesion.islands], (size, size))
    return mask.view(np.uint8)


def rasterise(outlines: list[Outline], shape: tuple[int, ...]) -> Mask:
    """Return the pixels [H, W] whose centres lie in any of the outlines."""
    mask = np.zeros(shape, np.bool_)
    for outline in outlines:
        first = np.clip(np.floor(outline.min(axis=0)).astype(np.intp), 0, None)
        last = np.minimum(np.ceil(outline.max(axis=0)).astype(np.intp), shape[::-1])
        if (last > first).all():
            part = mask[first[1] : last[1], first[0] : last[0]]
            part |= _filled(outline - first, part.shape)
    return mask


def _filled(outline: Outline, shape: tuple[int, ...]) -> Mask:
    """Fill one outline: a pixel is inside if a line from its left edge crosses the outline an odd number of times."""
    (x, y), (x_next, y_next) = outline.T, np.roll(outline, -1, axis=0).T
    height = np.arange(shape[0])[:, None] + 0.5
    crosses = (y <= height) != (y_next <= height)
    rows, edges = np.nonzero(crosses)
    share = (rows + 0.5 - y[edges]) / (y_next - y)[edges]
    at = x[edges] + share * (x_next - x)[edges]
    turns = np.zeros((shape[0], shape[1] + 1), np.uint8)
    np.add.at(turns, (rows, np.clip(np.ceil(at - 0.5), 0, shape[1]).astype(np.intp)), 1)
    parity: Mask = np.cumsum(turns, axis=1, dtype=np.uint8)[:, :-1] % 2 == 1
    return parity


def places_inside(mask: npt.NDArray[np.uint8], places: Places) -> Mask:
    """Return which places [N, 2] (row, column) lie in the mask."""
    index = np.floor(places).astype(np.intp)
    inside = ((index >= 0) & (index < mask.shape)).all(axis=1)
    index = np.clip(index, 0, np.asarray(mask.shape) - 1)
    found: Mask = inside & (mask[index[:, 0], index[:, 1]] > 0)
    return found
