"""Slides through the network: maps of tumour probabilities, from overlapping tiles or single patches; their files."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
import torch
import torch.nn.functional as F
from contourpy import FillType, contour_generator
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from scipy.ndimage import label
from skimage.measure import block_reduce, regionprops
from tqdm import tqdm

from medspeed.apps.pathology.model import HALO, PathologyModel, normalised
from medspeed.apps.pathology.scan.froc import DETECTION_BOX, MAP_MPP, detect
from medspeed.apps.pathology.slides.masks import ASSUMED_MPP, MPP_TOLERANCE, SlideMask, low_power
from medspeed.apps.pathology.slides.reader import Slide
from medspeed.common.console import hides_bar
from medspeed.common.data.threads import prefetch
from medspeed.common.files import atomic_path, printable, write_text
from medspeed.common.inference.predictors import Predictor, as_fits
from medspeed.common.observe.plots import save_png
from medspeed.models.resnet18_fcn import STRIDE

MOST_COARSE = 4.0  # times the network's pixel that a slide's finest may have: beyond, nuclei are not seen
_MOST_FINE = 5.0  # times: levels lie a factor of 4 apart at most, or a tile of so many pixels fills the memory
REGION_THRESHOLD = 0.5
_TUMOUR = {"name": "Tumor", "color": [200, 0, 0]}  # QuPath's own colour for the class
_DPI = 100
_LONGEST = 1600  # pixels of the slide in the picture, which with title and colour bar stays below 2000
_LEAST, _MOST = 0.1, 0.85  # opacity at probability 0 and 1: tissue shows through, and where was looked is seen


@dataclass(frozen=True)
class View:
    """How a network sees a slide, and how the square cells of its answer lie on it, from the upper left corner on."""

    level: int  # what is read, an index into `Slide.levels`
    size: tuple[int, int]  # of that level: width, height
    downsample: float  # pixels of level 0 per pixel of that level
    pitch: int  # pixels of that level that become 32 of the network's; 32 where nothing is resized
    base_mpp: float  # um per pixel of level 0, known or assumed; `reason` says in one line why
    reason: str

    def span(self, pixels: int) -> int:
        """Return how many pixels of the level become so many of the network's, a multiple of 32."""
        return pixels // STRIDE * self.pitch

    def on_tissue(self, tissue: SlideMask, stride: int) -> np.ndarray:
        """Return the cells, `stride` pixels of the network wide, whose centre lies on tissue, [rows, columns] bool."""
        cell = self.span(stride)
        side = cell * self.downsample  # in pixels of level 0
        row, column = (
            np.minimum(((np.arange(math.ceil(length / cell)) + 0.5) * side / tissue.downsample).astype(np.int64), most)
            for length, most in zip(self.size[::-1], tissue.mask.shape, strict=True)
        )
        return np.asarray(np.pad(tissue.mask, ((0, 1), (0, 1)))[row[:, None], column])  # beyond the mask is no tissue


@dataclass(frozen=True)
class ProbabilityMap:
    """Probabilities of tumour over a whole slide, cell by cell from its upper left corner on."""

    values: np.ndarray  # [H, W] float32 in [0, 1], of the patch around each cell's centre; 0 where not scanned
    stride: float  # side of a cell in pixels of level 0, need not be whole
    scanned: np.ndarray  # [H, W] bool
    tiles: int  # regions of the slide that the network was given


def choose_view(slide: Slide, mpp: float | None) -> View:
    """Return the coarsest level whose pixel is at most 20 percent above the network's of `mpp` um, or else level 0.

    It is resized where it is over 20 percent off: averaged, since what a finer level shows can be had. Where that is
    over 5 times finer, the nearest level is taken.
    The resized side of 32 pixels is a whole number of the level's pixels, so that tiles fit together exactly; the
    network's own pixel size is met to half a pixel in 32. A ValueError says that pixels are over 4 times too large.
    """
    level, pitch = 0, STRIDE
    unknown = [name for name, size in (("slide", slide.mpp), ("network", mpp)) if size is None]
    reason = f"level 0 unscaled, unknown pixel size of {' and '.join(unknown)}"
    if slide.mpp is not None and mpp is not None:
        sizes = [slide.mpp * level.downsample for level in slide.levels]
        if sizes[0] > MOST_COARSE * mpp:
            said = f"too coarse for a network of {mpp:.4g} um (at most {MOST_COARSE:g} times as large)"
            remedy = "scan the slide at a higher magnification, or correct its pixel size"
            raise ValueError(f"{slide.path}: pixels of {sizes[0]:.4g} um are {said}: {remedy}")
        level = max((each for each, size in enumerate(sizes) if size <= (1 + MPP_TOLERANCE) * mpp), default=0)
        if mpp > _MOST_FINE * sizes[level]:
            level = min(range(len(sizes)), key=lambda each: abs(math.log(sizes[each] / mpp)))
        far = abs(sizes[level] - mpp) > MPP_TOLERANCE * mpp
        pitch = max(1, round(STRIDE * mpp / sizes[level])) if far else STRIDE
        reason = f"level {level} of {sizes[level]:.4g} um for a network of {mpp:.4g} um" + (", resized" if far else "")
    place = slide.levels[level]
    base_mpp = slide.mpp or mpp or ASSUMED_MPP
    return View(level, (place.width, place.height), place.downsample, pitch, base_mpp, reason)


def scan_slide(
    slide: Slide,
    model: PathologyModel,
    predictor: Predictor,
    device: torch.device,
    tissue: SlideMask,
    view: View,
    stride: int | None = None,
    batch: int | None = None,
) -> ProbabilityMap:
    """Scan the patches whose centre lies on tissue, under a bar of tiles on a terminal.

    A dense scan takes one patch every 32 pixels, many at a time, whose shared features are made once: a tile gives the
    logits that the whole slide in white surroundings would give, those that its own border changes are thrown away.
    With a stride (pixels of the network, a multiple of 32) the network is called for each patch by itself, as MONAI's
    bundle does (MONAI model zoo, pathology_tumor_detection, configs/inference.json). `batch` tiles or patches are in
    one call, by default the model's tiles, or fewer where the device lacks memory; twice as many are in memory.
    """
    # Cells of a tile along its side, cells around them, and the tile's side in pixels of the network.
    side, halo, pixels = model.core // STRIDE, HALO // STRIDE, model.tile_size
    if stride is not None:
        side, halo, pixels = 1, 0, model.patch_size
    batch, stride = batch or model.tile_batch, stride or STRIDE
    scanned = view.on_tissue(tissue, stride)
    tiles = np.argwhere(block_reduce(scanned, side, np.any)) * side
    patch, cell = view.span(model.patch_size), view.span(stride)
    corners = ((tiles - halo)[:, ::-1] * cell - -(-(patch - cell) // 2)) * view.downsample  # patches lie around cells
    base = np.ceil(corners).astype(np.int64)  # reading takes the level's pixel to the left
    size = (view.span(pixels), view.span(pixels))
    parts = (slice(start, start + batch) for start in range(0, len(tiles), batch))
    batches = ((tiles[part], slide.read_many(base[part], size, view.level)) for part in parts)
    values, logits_of = np.zeros(scanned.shape, np.float32), as_fits(predictor)
    with tqdm(total=len(tiles), desc=repr(slide.name), unit="tile", leave=False, disable=hides_bar()) as bar:
        for places, regions in prefetch(batches, device):
            images = torch.from_numpy(regions).to(device).permute(0, 3, 1, 2)
            if size[0] != pixels:  # averaged where they become fewer
                images = F.interpolate(images.float(), (pixels, pixels), mode="bilinear", antialias=True)
                images = images.round_().clamp_(0, 255).byte()
            found = torch.sigmoid(torch.cat([*logits_of(normalised(images))])[:, 0]).cpu().numpy()
            for (row, column), probabilities in zip(places.tolist(), found, strict=True):
                cells = values[row : row + side, column : column + side]
                cells[...] = probabilities[halo : halo + cells.shape[0], halo : halo + cells.shape[1]]
            bar.update(len(places))
    return ProbabilityMap(values * scanned, view.span(stride) * view.downsample, scanned, len(tiles))


def write_probability_tif(path: Path, found: ProbabilityMap, mpp: float | None, slide: str) -> None:
    """Write the map as a tiled TIFF of uint8 (255: probability 1), one pixel a cell.

    Its resolution tags say the size of a cell, so that QuPath and OpenSlide lay it over the slide; where `mpp`, um per
    pixel of level 0, is unknown they are left open. Stride, offset and scale stand as JSON in its description.
    """
    place = {"slide": slide, "stride_px": found.stride, "offset_px": found.stride / 2, "mpp": mpp}
    density = mpp and 1e4 / (mpp * found.stride)
    with atomic_path(path) as part:
        tifffile.imwrite(
            part,
            np.rint(found.values * 255).astype(np.uint8),
            tile=(256, 256),
            photometric="minisblack",
            compression="zlib",  # deflate by its official number
            resolution=None if density is None else (density, density),
            resolutionunit="NONE" if density is None else "CENTIMETER",
            description=json.dumps({**place, "probability_of_255": 1.0}),
            software="medspeed",
            metadata=None,
        )


def find_detections(found: ProbabilityMap, base_mpp: float) -> np.ndarray:
    """Return the peaks of a map, the surest first: [D, 3] float64 rows (score, x, y) in pixels of level 0.

    A peak suppresses others in a box of 746 um around it (`base_mpp`: um per pixel of level 0).
    """
    peaks = detect(found.values, max(1, round(DETECTION_BOX * MAP_MPP / (found.stride * base_mpp))))
    peaks[:, 1:] = np.floor((peaks[:, 1:] + 0.5) * found.stride)
    return peaks


def write_detections_csv(path: Path, detections: np.ndarray) -> None:
    """Write detections as Camelyon16 asks for them: rows `score,x,y` in pixels of level 0, no header.

    Nine digits hold float32: confident scores keep their order.
    """
    write_text(path, "".join(f"{score:.9g},{x:.0f},{y:.0f}\n" for score, x, y in detections))


def write_found(files: Sequence[Path], slide: Slide, found: ProbabilityMap, base_mpp: float) -> int:
    """Write a map, its detections and its regions; return how many detections there are."""
    tif, csv, geojson = files
    detections = find_detections(found, base_mpp)
    write_probability_tif(tif, found, slide.mpp, slide.name)
    write_detections_csv(csv, detections)
    write_geojson(geojson, found, slide.levels[0].base)
    return len(detections)


def read_detections_csv(path: Path) -> np.ndarray:
    """Read what `write_detections_csv` wrote; a ValueError says that a row is not `score,x,y`."""
    try:
        rows = [line.split(",") for line in path.read_text(encoding="utf-8").splitlines()]
        found = np.array([(float(score), int(x), int(y)) for score, x, y in rows], np.float64).reshape(-1, 3)
        if not ((found >= 0) & (found <= (1, np.inf, np.inf))).all():
            raise ValueError("a score outside 0 to 1, or a negative position")
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path}: rows must be score,x,y ({error}): scan the slide again") from error
    return found


def write_geojson(path: Path, found: ProbabilityMap, size: tuple[int, int]) -> None:
    """Write the regions of probability 0.5 and more as QuPath's GeoJSON, along the borders of cells in the slide."""
    features = []
    for region in regionprops(label(found.values >= REGION_THRESHOLD)[0], found.values):
        # In pixels of level 0, within the slide, the first point again as the last.
        closed = ((np.append(ring, ring[:1], 0) + region.bbox[1::-1]) * found.stride for ring in outline(region.image))
        polygon = {"type": "Polygon", "coordinates": [np.minimum(ring, size).round(2).tolist() for ring in closed]}
        values = {"max probability": region.intensity_max, "mean probability": region.intensity_mean}
        measured = {name: round(float(value), 6) for name, value in values.items()}
        properties = {"objectType": "annotation", "classification": _TUMOUR, "measurements": measured}
        features.append({"type": "Feature", "geometry": polygon, "properties": properties})
    write_text(path, json.dumps({"type": "FeatureCollection", "features": features}, allow_nan=False) + "\n")


def draw_heatmap(path: Path, slide: Slide, found: ProbabilityMap) -> None:
    """Draw the slide at low power, the scanned cells over it in the colours of their probability, as a PNG."""
    level = slide.levels[0]
    longest = max(level.width, level.height)
    image, downsample = low_power(slide, max(1.0, longest / _LONGEST))
    scale = min(1 / downsample, _LONGEST / longest) / _DPI  # a level between may be larger than asked for
    width, height = max(level.width * scale, 2.0), max(level.height * scale, 2.0)  # inches
    figure = Figure(figsize=(width + 1.5, height + 0.5), dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    axes.imshow(image, extent=(0, image.shape[1] * downsample, image.shape[0] * downsample, 0))
    rows, columns = found.values.shape
    extent = (0, columns * found.stride, rows * found.stride, 0)
    alpha = np.where(found.scanned, _LEAST + (_MOST - _LEAST) * found.values, 0)
    drawn = axes.imshow(found.values, "viridis", extent=extent, alpha=alpha, vmin=0, vmax=1, interpolation="nearest")
    axes.set(xlim=(0, level.width), ylim=(level.height, 0))
    axes.set_axis_off()
    opaque = ScalarMappable(drawn.norm, drawn.cmap)
    figure.colorbar(opaque, ax=axes, label="probability of tumour", fraction=0.2 / width, pad=0.1 / width, aspect=30)
    title = f"greatest {found.values.max(initial=0):.3f}   {printable(slide.name)[:60]}"
    axes.set_title(title, loc="left", fontsize=10, parse_math=False)
    save_png(path, figure)


def outline(region: np.ndarray) -> list[np.ndarray]:
    """Return the borders of a region [H, W] bool whose cells hang together: the outer one, then those of its holes.

    Of each its corners [K, 2] (x, y) in cells; along x the inside lies below (y runs down).
    """
    # Both sides of a border between cells lie at one place: there a contour can only run along the cells.
    inside = np.pad(region, 1).repeat(2, 0).repeat(2, 1)[1:-1, 1:-1]
    y, x = (np.arange(side + 1).repeat(2) for side in region.shape)
    contours: Any = contour_generator(x, y, inside, fill_type=FillType.OuterOffset)
    (points,), (ends,) = contours.filled(0.75, np.inf)  # not 0.5: cells that meet corner to corner are apart
    rings = []
    for start, end in pairwise(ends):
        ring = points[start : end - 1].astype(int)
        ring = ring[(ring != np.roll(ring, 1, 0)).any(1)]
        along_x = ring[:, 1] == np.roll(ring[:, 1], -1)
        rings.append(ring[along_x != np.roll(along_x, 1)])
    return rings
