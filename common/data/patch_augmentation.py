"""Augmentation of RGB patches, batched on the device: colour jitter, flip, quarter turns, zoom, each patch its own."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import grid_sample

from common.data.cache import upload
from common.data.colour import ColourJitter, JitterDraw, jitter_, plan_jitter
from common.data.draws import keyed_uniforms

# A CPU works on so many pixels at a time, so that they stay in its caches: 3 patches of 224 or 21 of 96.
_CHUNK_PIXELS = 3 * 2**16
_STREAM = 2  # what sets these draws apart from the jitter's for the same sample


@dataclass(frozen=True)
class PatchDraw:
    """What is done to each of N patches.

    Args:
        jitter: of the colours.
        flips: [N] bool, whether the patch is mirrored, left to right.
        turns: [N] int8, 0 to 3, quarter turns from the first axis towards the second (numpy.rot90's k is the same).
        zooms: [N] float64, how much larger things become; 1 where there is no zoom.
    """

    jitter: JitterDraw
    flips: np.ndarray
    turns: np.ndarray
    zooms: np.ndarray


@dataclass(frozen=True)
class PatchAugmentation:
    """How patches are augmented: jittered, flipped, turned (k uniform in 0 to 3) and zoomed.

    Args:
        jitter: of the colours.
        flip: probability of a flip.
        zoom: smallest and greatest zoom, between which it is uniform.
        zoom_share: probability of a zoom.

    Raises:
        ValueError: a value is out of its range.
    """

    jitter: ColourJitter
    flip: float = 0.5
    zoom: tuple[float, float] = (0.9, 1.1)
    zoom_share: float = 0.5

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        for name, value in (("flip", self.flip), ("zoom_share", self.zoom_share)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} {value}: a probability, between 0 and 1")
        if not 0.1 <= self.zoom[0] <= self.zoom[1] <= 10:
            raise ValueError(f"zoom {self.zoom}: smallest and greatest, in this order and both between 0.1 and 10")

    def draw(self, seed: int, epoch: int, samples: np.ndarray) -> PatchDraw:
        """Draw what is done to each sample ([N] int): a pure function of seed, epoch and the sample's number."""
        uniforms = keyed_uniforms(seed, epoch, samples, np.full(len(samples), _STREAM), 4)
        zooms = self.zoom[0] + uniforms[:, 3] * (self.zoom[1] - self.zoom[0])
        return PatchDraw(
            self.jitter.draw(seed, epoch, samples),
            uniforms[:, 0] < self.flip,
            (uniforms[:, 1] * 4).astype(np.int8),
            np.where(uniforms[:, 2] < self.zoom_share, zooms, 1.0),
        )


def augment(patches: torch.Tensor, draw: PatchDraw) -> torch.Tensor:
    """Return patches as drawn for each: jittered, flipped, turned and zoomed, in this order; the host does not wait.

    A patch that is not zoomed is exactly the flipped and turned one. The size stays: a zoom by z resamples all S
    pixels of a side to T = floor(S z), bilinear and without smoothing, then crops S of them from T // 2 - S // 2 on, or
    repeats the edge, (S - T) // 2 pixels before the first and the rest behind the last.
    This is MONAI's Zoom(z, mode="bilinear"); its RandZoom's own default is mode="area".

    Args:
        patches: [N, S, S, 3] or [N, 3, S, S] uint8, red, green, blue; S is not 3.
        draw: of the N patches.

    Returns:
        [N, 3, S, S] float32, contiguous; 0 to 255 lie at -1 to 1.

    Raises:
        ValueError: the patches are not of such a shape or dtype.
    """
    planes = _channels_first(patches)
    plan, elements = plan_jitter(draw.jitter), 4 * draw.flips + draw.turns
    result = torch.empty(planes.shape, device=planes.device)
    for rows in _chunks(plan.places, planes):
        images = _oriented(planes, rows, elements[rows])
        jitter_(images, plan.take(rows))
        _zoom_some_(images, draw.zooms[rows])
        result.index_copy_(0, upload(rows, planes.device), images.mul_(2).sub_(1))
    return result


def _channels_first(patches: torch.Tensor) -> torch.Tensor:
    planes = patches.permute(0, 3, 1, 2) if patches.ndim == 4 and patches.shape[3] == 3 else patches
    if patches.dtype != torch.uint8 or planes.ndim != 4 or planes.shape[1] != 3 or planes.shape[2] != planes.shape[3]:
        raise ValueError(
            f"patches {list(patches.shape)} {patches.dtype}: must be [N, S, S, 3] or [N, 3, S, S] uint8, square"
        )
    return planes


def _chunks(places: np.ndarray, planes: torch.Tensor) -> Iterator[np.ndarray]:
    """Yield the rows of what is worked on at a time: all, or on a CPU a few whose hue is turned in one place."""
    rows = np.argsort(places, kind="stable")
    size = len(rows) if planes.is_cuda else max(1, _CHUNK_PIXELS // planes[0, 0].numel())
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _oriented(planes: torch.Tensor, rows: np.ndarray, elements: np.ndarray) -> torch.Tensor:
    """Return some of the patches flipped and turned, [M, 3, S, S] float32 in [0, 1]."""
    images = torch.empty((len(rows), *planes.shape[1:]), device=planes.device)
    for element in np.unique(elements):
        places = np.flatnonzero(elements == element)
        flip, turns = divmod(int(element), 4)
        picked = planes.index_select(0, upload(rows[places], planes.device))
        if flip:
            picked = picked.flip(3)
        images.index_copy_(0, upload(places, planes.device), torch.rot90(picked, turns, (2, 3)).float())
    return images.mul_(1 / 255)


def _zoom_some_(images: torch.Tensor, zooms: np.ndarray) -> None:
    """Zoom, in place, those images whose size a zoom changes by a pixel or more."""
    size = images.shape[2]
    resized = np.floor(size * zooms)
    rows = np.flatnonzero(resized != size)
    if not len(rows):
        return
    places = upload(rows, images.device)
    along = upload(_sources(size, resized[rows]), images.device)
    grid = torch.stack([along[:, None, :].expand(-1, size, -1), along[:, :, None].expand(-1, -1, size)], dim=3)
    picked = grid_sample(images.index_select(0, places), grid, "bilinear", "border", align_corners=False)
    images.index_copy_(0, places, picked)


def _sources(size: int, resized: np.ndarray) -> np.ndarray:
    """Return where along a side each pixel comes from when it is resized to `resized` [M], cropped or padded.

    Returns:
        [M, size] float32; -1 and 1 are the outer edges of the first and the last pixel.
    """
    first = np.where(resized > size, resized // 2 - size // 2, -((size - resized) // 2))
    pixels = np.clip(np.arange(size) + first[:, None], 0, resized[:, None] - 1)
    return np.asarray((2 * pixels + 1) / resized[:, None] - 1, np.float32)
