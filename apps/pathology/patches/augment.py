"""Augmentation of RGB patches, batched on the device: colour jitter, flip, quarter turns, zoom, each patch its own.

On a CUDA device two Triton kernels do what here takes some 270 launches; all that differs between patches stands in one
small table, so that every batch of a size launches the same.
"""

from functools import cache

import numpy as np
import torch
from torch.nn.functional import grid_sample

from medspeed.apps.pathology.config import Augmentation
from medspeed.common.data.batches import keyed_uniforms
from medspeed.common.data.crops import upload
from medspeed.common.training.config import decided

FUSED = "augmentation"
"""The name that `trusts` knows the kernels by."""
BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
# The shares of red, green and blue in a grey. Source: torchvision's rgb_to_grayscale (ITU-R BT.601, rounded).
GREY = (0.2989, 0.587, 0.114)
DRAW = np.dtype([  # what is done to a patch, in 16 numbers of 32 bits, as the kernels read it
    ("place", "i4"),  # of the patch among those on the device
    ("moves", "i4", 3),  # the pixel that comes to the upper left, and how far from each the next down and right lie
    ("side", "i4"),  # pixels that a side is resampled to
    ("first", "i4"),  # the first of them that is kept, negative where the edge is repeated
    ("before", "i4"),  # operations before the contrast
    ("order", "i4", 4),  # operations (places in `factors`), the first one first
    ("factors", "f4", 4),  # brightness, contrast, saturation (1 changes nothing); turns of the hue (0 changes nothing)
    ("element", "i4"),  # quarter turns from the first axis to the second, as of numpy.rot90, plus 4 if mirrored before
])  # fmt: skip
FLIP_SHARE = ZOOM_SHARE = 0.5  # of the patches. Source: MONAI tutorials, pathology/tumor_detection
_NEUTRAL = np.array([1, 1, 1, 0], np.float32)  # factors that change nothing
_JITTER, _MOVES = 1, 2  # what sets the draws of colours and of places apart for the same sample
# Red, green and blue at hue h, in sextants, are high + start * chroma + sign * chroma * clamp(|h - centre|, 1, 2).
_HEXCONE = ((3, -2, 1), (2, 1, -1), (4, 1, -1))
# A CPU works on so many pixels at a time, so that they stay in its caches: 3 patches of 224 or 21 of 96, of which most
# have their hue turned in one place.
_CHUNK_PIXELS = 3 * 2**16


def draw_patches(augmentation: Augmentation, seed: int, epoch: int, samples: np.ndarray, size: int) -> np.ndarray:
    """Draw what is done to each sample ([N] int) of so many pixels a side, [N] `DRAW`.

    It is a pure function of seed, epoch and the sample's number.
    """
    draw, spread, zoom = np.zeros(len(samples), DRAW), np.array(decided(augmentation.jitter)), augmentation.zoom
    colours = keyed_uniforms(seed, epoch, samples, np.full(len(samples), _JITTER), 8)
    low, high = np.maximum(_NEUTRAL - spread, [0, 0, 0, -0.5]), _NEUTRAL + spread
    moves = keyed_uniforms(seed, epoch, samples, np.full(len(samples), _MOVES), 4)
    draw["factors"] = low + colours[:, :4] * (high - low)
    draw["order"] = np.argsort(colours[:, 4:], axis=1, kind="stable")
    draw["before"] = np.argmax(draw["order"] == CONTRAST, axis=1)
    draw["element"] = 4 * (moves[:, 0] < FLIP_SHARE) + (moves[:, 1] * 4).astype(int)
    draw["moves"] = _moves(size)[draw["element"]]
    set_zooms(draw, np.where(moves[:, 2] < ZOOM_SHARE, zoom[0] + moves[:, 3] * (zoom[1] - zoom[0]), 1.0), size)
    return draw


def set_zooms(draw: np.ndarray, zooms: np.ndarray, size: int) -> None:
    """Let a draw say how much larger ([N] float) things become in patches of so many pixels a side."""
    side = np.floor(size * zooms)
    draw["side"] = side
    draw["first"] = np.where(side > size, side // 2 - size // 2, -((size - side) // 2))


def augment(patches: torch.Tensor, draw: np.ndarray) -> torch.Tensor:
    """Return patches as drawn for each: jittered, flipped, turned and zoomed, in this order; the host does not wait.

    A zoom by z is MONAI's Zoom(z, mode="bilinear"): it resamples all S pixels of a side to T = floor(S z), without
    smoothing, then crops S of them from T // 2 - S // 2 on, or repeats the edge.

    Patches are [N, 3, S, S] uint8, red, green, blue; the result is float32, contiguous, with 0 to 255 at -1 to 1.
    """
    result = torch.empty(patches.shape, device=patches.device)
    ordered = np.argsort(_hue_places(draw["factors"], draw["order"]), kind="stable")
    size = len(ordered) if patches.is_cuda else max(1, _CHUNK_PIXELS // patches[0, 0].numel())
    for rows in (ordered[start : start + size] for start in range(0, len(ordered), size)):
        some = draw[rows]
        images = _oriented(patches, rows, some["element"])
        jitter_(images, some["factors"], some["order"])
        _zoom_some_(images, some["side"], some["first"])
        result.index_copy_(0, upload(rows, patches.device), images.mul_(2).sub_(1))
    return result


def draw_table(draw: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return a draw of N patches at places [N] as the kernels read it, [N, 16] int32."""
    draw["place"] = places
    return draw.view(np.int32).reshape(len(draw), -1)


@cache
def _moves(size: int) -> np.ndarray:
    """Return of each of the 8 flips and turns which pixel comes first, and the steps from it down and right, [8, 3]."""
    pixels = np.arange(size**2).reshape(size, size)
    moved = [np.rot90(flipped, turns) for flipped in (pixels, pixels[:, ::-1]) for turns in range(4)]
    return np.array([(each[0, 0], each[1, 0] - each[0, 0], each[0, 1] - each[0, 0]) for each in moved])


def jitter_(images: torch.Tensor, factors: np.ndarray, order: np.ndarray) -> None:
    """Jitter the colours of images in place; the host does not wait for the device.

    Each operation is torchvision's on floating-point images: brightness blends with black, contrast with the mean of
    the image's grey, saturation with its grey, and hue turns in HSV space; after each, values are clamped to [0, 1].
    All images go through three blends of one formula, and before, between or behind them the hue is turned of those
    for which it comes there: so few, large kernels do every order.

    Images are [N, 3, H, W] float32 in [0, 1], red, green, blue, contiguous; factors and order are those of `DRAW`.
    """
    places = _hue_places(factors, order)
    blends = order[order != HUE].reshape(-1, 3)
    own = np.take_along_axis(factors, blends.astype(np.int64), axis=1)
    grey, mean = (np.where(blends == kind, 1 - own, 0) for kind in (SATURATION, CONTRAST))
    shares = np.concatenate([np.stack([own, grey, mean], axis=2).reshape(-1, 9), 6 * factors[:, HUE:]], axis=1)
    weights = upload(shares.astype(np.float32), images.device).view(-1, 10, 1, 1, 1)
    for place in range(4):
        _turn_some_(images, np.flatnonzero(places == place), weights[:, 9, 0])
        if place < 3 and (own[:, place] != 1).any():
            needed = bool(grey[:, place].any()), bool(mean[:, place].any())
            _blend_(images, weights[:, 3 * place : 3 * place + 3], *needed)


def _hue_places(factors: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return before which blend (0 to 2) or behind them (3) the hue of each image is turned, 4 where it is not."""
    return np.where(factors[:, HUE] != 0, np.argmax(order == HUE, axis=1), 4)


def _blend_(images: torch.Tensor, weights: torch.Tensor, needs_grey: bool, needs_mean: bool) -> None:
    """Make each image w0 * image + w1 * its grey + w2 * the grey's mean, clamped to [0, 1]; weights [N, 3, ...]."""
    own, grey, mean = weights.unbind(1)
    parts = [_grey(images).mul_(grey)] if needs_grey else []
    if needs_mean:
        parts.append(_grey(images.mean((2, 3), keepdim=True)).mul_(mean))
    images.mul_(own)
    for part in parts:
        images.add_(part)
    images.clamp_(0, 1)


def _grey(images: torch.Tensor) -> torch.Tensor:
    """Return the grey [N, 1, H, W] of images [N, 3, H, W]."""
    red, green, blue = (images[:, channel : channel + 1] for channel in range(3))
    return (red * GREY[0]).add_(green, alpha=GREY[1]).add_(blue, alpha=GREY[2])


def _turn_some_(images: torch.Tensor, rows: np.ndarray, turns: torch.Tensor) -> None:
    """Turn the hue of some of the images ([M] int) by their turns [N, 1, 1], in sextants."""
    if len(rows) == len(images):
        _turn_hue_(images, turns)
    elif len(rows):
        places = upload(rows, images.device)
        picked = images.index_select(0, places)
        _turn_hue_(picked, turns.index_select(0, places))
        images.index_copy_(0, places, picked)


def _turn_hue_(images: torch.Tensor, turns: torch.Tensor) -> None:
    """Turn the hue of all the images by their turns [N, 1, 1], in sextants.

    The round trip by way of HSV, without its branches: comparing and choosing costs a CPU four times a subtraction.
    With the colour scaled to [0, 1] between its smallest and its greatest channel, q = 1 - red and e = |green - blue|,
    the hue is e + q (3 - 2 e) sextants away from red, towards green where green > blue. Value and chroma stay.
    """
    red, green, blue = images.unbind(1)
    high = torch.maximum(red, green)
    chroma = torch.minimum(red, green)
    torch.maximum(high, blue, out=high)
    torch.minimum(chroma, blue, out=chroma)
    torch.sub(high, chroma, out=chroma)
    scale = chroma.clamp(min=torch.finfo(torch.float32).tiny).reciprocal_()
    lean = (green - blue).mul_(scale)
    lack = (high - red).mul_(scale)
    hue = lean.abs()
    torch.mul(hue, -2, out=scale)
    hue.addcmul_(lack, scale.add_(3)).copysign_(lean).add_(turns)
    torch.mul(hue, 1 / 6, out=scale)
    hue.sub_(scale.floor_(), alpha=6)
    for channel, (centre, start, sign) in zip((red, green, blue), _HEXCONE, strict=True):
        torch.sub(hue, centre, out=lack)
        torch.add(high, chroma, alpha=start, out=channel)
        channel.addcmul_(chroma, lack.abs_().clamp_(1, 2), value=sign)
    images.clamp_(0, 1)


def _oriented(patches: torch.Tensor, rows: np.ndarray, elements: np.ndarray) -> torch.Tensor:
    """Return some of the patches flipped and turned, [M, 3, S, S] float32 in [0, 1]."""
    images = torch.empty((len(rows), *patches.shape[1:]), device=patches.device)
    for element in np.unique(elements):
        places = np.flatnonzero(elements == element)
        flip, turns = divmod(int(element), 4)
        picked = patches.index_select(0, upload(rows[places], patches.device))
        if flip:
            picked = picked.flip(3)
        images.index_copy_(0, upload(places, patches.device), torch.rot90(picked, turns, (2, 3)).float())
    return images.mul_(1 / 255)


def _zoom_some_(images: torch.Tensor, sides: np.ndarray, firsts: np.ndarray) -> None:
    """Zoom, in place, those images whose size a zoom changes by a pixel or more."""
    size = images.shape[2]
    rows = np.flatnonzero(sides != size)
    if not len(rows):
        return
    places, resized = upload(rows, images.device), sides[rows, None]
    # Where along a side each pixel comes from, [M, S]; -1 and 1 are the outer edges of the first and the last pixel.
    pixels = np.clip(np.arange(size) + firsts[rows, None], 0, resized - 1)
    along = upload(np.asarray((2 * pixels + 1) / resized - 1, np.float32), images.device)
    grid = torch.stack([along[:, None, :].expand(-1, size, -1), along[:, :, None].expand(-1, -1, size)], dim=3)
    picked = grid_sample(images.index_select(0, places), grid, "bilinear", "border", align_corners=False)
    images.index_copy_(0, places, picked)
