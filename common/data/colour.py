"""Colour jitter of RGB images, batched on the device: brightness, contrast, saturation and hue, in random order."""

from dataclasses import dataclass

import numpy as np
import torch

from common.data.cache import upload
from common.data.draws import keyed_uniforms

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
# The shares of red, green and blue in a grey. Source: torchvision's rgb_to_grayscale (ITU-R BT.601, rounded).
GREY = (0.2989, 0.587, 0.114)
_NO_HUE = 4  # the place of the hue among the operations where it is not turned
_STREAM = 1  # what sets these draws apart from others for the same sample
# Red, green and blue at hue h, in sextants, are high + start * chroma + sign * chroma * clamp(|h - centre|, 1, 2).
_HEXCONE = ((3, -2, 1), (2, 1, -1), (4, 1, -1))


@dataclass(frozen=True)
class JitterDraw:
    """What is done to each of N images.

    Args:
        factors: [N, 4] float32 of brightness, contrast, saturation (each >= 0; 1 changes nothing) and hue (turns of
            the colour circle, -0.5 to 0.5; 0 changes nothing).
        order: [N, 4] int8, the operations (places in `factors`), the first one first.
        applied: [N] bool, whether anything is done to the image at all.
    """

    factors: np.ndarray
    order: np.ndarray
    applied: np.ndarray


@dataclass(frozen=True)
class JitterPlan:
    """A draw in the form that the device works by; see `jitter_`.

    Args:
        weights: [N, 10] float32: three weights for each of three blends (see `_blend_`), and the turn in sextants.
        places: [N] int, before which blend (0 to 2) or behind them (3) the hue is turned; 4 where it is not.
    """

    weights: np.ndarray
    places: np.ndarray

    def take(self, rows: np.ndarray) -> "JitterPlan":
        """Return the plan of some of the images ([M] int)."""
        return JitterPlan(self.weights[rows], self.places[rows])


@dataclass(frozen=True)
class ColourJitter:
    """How far the colours of an image are jittered.

    Args:
        brightness: its factor is uniform in [max(0, 1 - brightness), 1 + brightness].
        contrast: likewise.
        saturation: likewise.
        hue: it turns uniformly within [-hue, hue] of the colour circle; at most 0.5.
        p: probability, for each image, that it is jittered at all.
        whole_batch: all images of one draw get the first one's factors, order and chance.

    Raises:
        ValueError: a value is out of its range.

    Source: the parameters and the operations are those of torchvision.transforms.ColorJitter.
    """

    brightness: float
    contrast: float
    saturation: float
    hue: float
    p: float = 1.0
    whole_batch: bool = False

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        for name, most in (
            ("brightness", np.inf),
            ("contrast", np.inf),
            ("saturation", np.inf),
            ("hue", 0.5),
            ("p", 1),
        ):
            value = getattr(self, name)
            if not (0 <= value <= most and np.isfinite(value)):
                bound = "0 or more, and finite" if most == np.inf else f"between 0 and {most}"
                raise ValueError(f"{name} {value}: must be {bound}")

    def draw(self, seed: int, epoch: int, samples: np.ndarray) -> JitterDraw:
        """Draw what is done to each sample ([N] int): a pure function of seed, epoch and the sample's number."""
        uniforms = keyed_uniforms(seed, epoch, samples, np.full(len(samples), _STREAM), 9)
        if self.whole_batch:
            uniforms = np.broadcast_to(uniforms[:1], uniforms.shape)
        spread = np.array([self.brightness, self.contrast, self.saturation, self.hue])
        neutral = np.array([1, 1, 1, 0])
        low, high = np.maximum(neutral - spread, [0, 0, 0, -0.5]), neutral + spread
        factors = (low + uniforms[:, :4] * (high - low)).astype(np.float32)
        order = np.argsort(uniforms[:, 4:8], axis=1, kind="stable").astype(np.int8)
        return JitterDraw(factors, order, uniforms[:, 8] < self.p)


def jitter(images: torch.Tensor, draw: JitterDraw) -> torch.Tensor:
    """Return a copy of images [N, 3, H, W] float32 in [0, 1], each jittered as drawn for it; see `jitter_`."""
    result = images.clone(memory_format=torch.contiguous_format)
    jitter_(result, plan_jitter(draw))
    return result


def plan_jitter(draw: JitterDraw) -> JitterPlan:
    """Return how to jitter images as drawn; images that are not `applied` get factors that change nothing."""
    neutral = np.array([1, 1, 1, 0], np.float32)
    factors = np.where(draw.applied[:, None], draw.factors, neutral)
    places = np.where(factors[:, HUE] != 0, np.argmax(draw.order == HUE, axis=1), _NO_HUE)
    blends = draw.order[draw.order != HUE].reshape(-1, 3)
    own = np.take_along_axis(factors, blends.astype(np.int64), axis=1)
    grey, mean = (np.where(blends == kind, 1 - own, 0) for kind in (SATURATION, CONTRAST))
    weights = np.stack([own, grey, mean], axis=2).reshape(-1, 9)
    return JitterPlan(np.concatenate([weights, 6 * factors[:, HUE:]], axis=1).astype(np.float32), places)


def jitter_(images: torch.Tensor, plan: JitterPlan) -> None:
    """Jitter images in place; the host does not wait for the device.

    Each operation is torchvision's on floating-point images: brightness blends with black, contrast with the mean of
    the image's grey, saturation with its grey, and hue turns in HSV space; after each, values are clamped to [0, 1].
    Nothing is rounded between the operations, where torchvision on uint8 images and cuCIM's color_jitter round to
    1/255 after each. Images that are not `applied` stay exactly as they are.

    All images go through the same three blends, which `_blend_` makes one formula; before, between and behind them
    the hue is turned of those images for which it comes there. So few, large kernels do every order.

    Args:
        images: [N, 3, H, W] float32 in [0, 1], red, green, blue; contiguous.
        plan: of the N images.
    """
    weights = upload(plan.weights, images.device).view(-1, 10, 1, 1, 1)
    for place in range(4):
        _turn_some_(images, np.flatnonzero(plan.places == place), weights[:, 9, 0])
        if place < 3:
            columns = slice(3 * place, 3 * place + 3)
            _, needs_grey, needs_mean = np.count_nonzero(plan.weights[:, columns], axis=0).tolist()
            _blend_(images, weights[:, columns], needs_grey > 0, needs_mean > 0)


def _blend_(images: torch.Tensor, weights: torch.Tensor, needs_grey: bool, needs_mean: bool) -> None:
    """Make each image w0 * image + w1 * its grey + w2 * the grey's mean, clamped to [0, 1]; weights [N, 3, ...]."""
    own, grey, mean = weights.unbind(1)
    parts = []
    if needs_grey:
        parts.append(_grey(images).mul_(grey))
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
