"""At which level, and how much resized, a network sees a slide; and how the cells of its answer lie on the slide."""

import math
from dataclasses import dataclass

import numpy as np

from apps.pathology.tissue import TissueMask
from common.data.slides import Slide
from models.resnet18_fcn import STRIDE

MPP_TOLERANCE = 0.2  # by which a level's pixel may differ from the network's before it is resized
ASSUMED_MPP = 0.25  # um, where neither slide nor network knows: an objective of 40x, as most of Camelyon16


@dataclass(frozen=True)
class View:
    """How a network sees a slide.

    Attributes:
        level: what is read, an index into `Slide.levels`.
        downsample: pixels of level 0 per pixel of that level.
        pitch: pixels of that level that become 32 of the network's; 32 where nothing is resized.
        base_mpp: um per pixel of level 0, known or assumed.
        reason: in one line, why.
    """

    level: int
    downsample: float
    pitch: int
    base_mpp: float
    reason: str

    @property
    def seen_mpp(self) -> float:
        """Return um per pixel as the network sees them."""
        return self.base_mpp * self.downsample * self.pitch / STRIDE


@dataclass(frozen=True)
class CellGrid:
    """Square cells over a slide from its upper left corner on; each gets the probability of the patch around it.

    Attributes:
        view: how the slide is seen.
        patch: side of a patch in pixels of the view's level.
        cell: side of a cell, likewise.
        rows, columns: how many cells cover the slide.
    """

    view: View
    patch: int
    cell: int
    rows: int
    columns: int

    @property
    def stride(self) -> float:
        """Return the side of a cell in pixels of level 0."""
        return self.cell * self.view.downsample

    def corners(self, cells: np.ndarray) -> np.ndarray:
        """Return the upper left corners, [N, 2] int64 (x, y) in the level, of the patches of cells (row, column).

        A patch is centred on its cell; where their sides differ by an odd number, half a pixel up and left of it.
        """
        return np.asarray(cells[:, ::-1] * self.cell - -(-(self.patch - self.cell) // 2))

    def centred(self, tissue: TissueMask) -> np.ndarray:
        """Return the cells whose centre lies on tissue, [rows, columns] bool."""
        places = [
            np.floor((np.arange(count) + 0.5) * self.stride / tissue.downsample).astype(np.int64)
            for count in (self.rows, self.columns)
        ]
        height, width = tissue.mask.shape
        row, column = (np.minimum(place, side - 1) for place, side in zip(places, (height, width), strict=True))
        outside = (places[0] >= height)[:, None] | (places[1] >= width)[None]
        return np.asarray(tissue.mask[row[:, None], column[None]] & ~outside)


def choose_view(slide: Slide, mpp: float | None) -> View:
    """Return the level whose pixel is nearest to the network's, resized where it is more than 20 percent off.

    The resized side of 32 pixels is a whole number of the level's pixels, so that tiles fit together exactly; the
    network's own pixel size is met to half a pixel in 32.

    Args:
        slide: to be scanned.
        mpp: um per pixel that the network was trained on; None where its data did not say.
    """
    if slide.mpp is None or mpp is None:
        who = "slide and network give" if slide.mpp is mpp else ("slide gives" if slide.mpp is None else "network has")
        reason = f"level 0 as it is, since the {who} no pixel size"
        return View(0, 1.0, STRIDE, slide.mpp or mpp or ASSUMED_MPP, reason)
    base, wanted = slide.mpp, mpp
    sizes = [base * level.downsample for level in slide.levels]
    index = min(range(len(sizes)), key=lambda each: abs(math.log(sizes[each] / wanted)))
    ratio = wanted / sizes[index]
    far = abs(sizes[index] - wanted) > MPP_TOLERANCE * wanted
    pitch = max(1, round(STRIDE * ratio)) if far else STRIDE
    reason = f"level {index} of {sizes[index]:.4g} um for a network of {wanted:.4g} um" + (", resized" if far else "")
    return View(index, slide.levels[index].downsample, pitch, base, reason)


def cell_grid(slide: Slide, view: View, patch_size: int, stride: int) -> CellGrid:
    """Return the cells, `stride` pixels of the network wide, that cover a slide.

    Args:
        slide: to be scanned.
        view: how it is seen.
        patch_size: side of the network's patches, a multiple of 32.
        stride: a multiple of 32.
    """
    assert patch_size % STRIDE == stride % STRIDE == 0, (patch_size, stride)
    level, cell = slide.levels[view.level], stride // STRIDE * view.pitch
    rows, columns = math.ceil(level.height / cell), math.ceil(level.width / cell)
    return CellGrid(view, patch_size // STRIDE * view.pitch, cell, rows, columns)
