"""TorchVision's ColorJitter for one image at a time, on the CPU: what the guide's loader workers run on each patch.

TorchVision is no dependency (it has no build for every torch that we serve); these are its tensor formulas. The fast
recipe's jitter, batched and several times as fast, is `common.data.colour`.
"""

from collections.abc import Callable

import torch

_GREY = torch.tensor([0.2989, 0.587, 0.114])[:, None, None]


def adjust_brightness(image: torch.Tensor, factor: float) -> torch.Tensor:
    """Return an image [3, Y, X] in [0, 1], blended with black."""
    return _blend(image, torch.zeros_like(image), factor)


def adjust_contrast(image: torch.Tensor, factor: float) -> torch.Tensor:
    """Return an image [3, Y, X] in [0, 1], blended with the mean of its grey."""
    return _blend(image, (image * _GREY).sum(0, keepdim=True).mean(), factor)


def adjust_saturation(image: torch.Tensor, factor: float) -> torch.Tensor:
    """Return an image [3, Y, X] in [0, 1], blended with its grey."""
    return _blend(image, (image * _GREY).sum(0, keepdim=True), factor)


def adjust_hue(image: torch.Tensor, turn: float) -> torch.Tensor:
    """Return an image [3, Y, X] in [0, 1] whose hue is turned, in full turns, by way of HSV."""
    hue, saturation, value = _to_hsv(image)
    return _from_hsv((hue + turn) % 1.0, saturation, value)


ADJUST: tuple[Callable[[torch.Tensor, float], torch.Tensor], ...] = (
    adjust_brightness,
    adjust_contrast,
    adjust_saturation,
    adjust_hue,
)
"""The four parts in the order of TorchVision's arguments."""


def _blend(image: torch.Tensor, other: torch.Tensor, factor: float) -> torch.Tensor:
    return (factor * image + (1.0 - factor) * other).clamp(0, 1)


def _to_hsv(image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    red, green, blue = image.unbind(0)
    high, low = image.max(0).values, image.min(0).values
    grey = high == low
    spread = high - low
    saturation = spread / torch.where(grey, torch.ones_like(high), high)
    divisor = torch.where(grey, torch.ones_like(high), spread)
    from_red, from_green, from_blue = ((high - channel) / divisor for channel in (red, green, blue))
    is_red = high == red
    is_green = (high == green) & ~is_red
    is_blue = ~is_red & ~is_green
    hue = is_red * (from_blue - from_green)
    hue = hue + is_green * (2.0 + from_red - from_blue) + is_blue * (4.0 + from_green - from_red)
    return torch.fmod(hue / 6.0 + 1.0, 1.0), saturation, high


def _from_hsv(hue: torch.Tensor, saturation: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    sector = torch.floor(hue * 6.0)
    rest = hue * 6.0 - sector
    low = (value * (1.0 - saturation)).clamp(0, 1)
    falling = (value * (1.0 - saturation * rest)).clamp(0, 1)
    rising = (value * (1.0 - saturation * (1.0 - rest))).clamp(0, 1)
    number = sector.to(torch.int64) % 6
    mask = number[None] == torch.arange(6)[:, None, None]
    red = torch.stack([value, falling, low, low, rising, value])
    green = torch.stack([rising, value, value, falling, low, low])
    blue = torch.stack([low, low, rising, value, value, falling])
    return torch.einsum("iyx,ciyx->cyx", mask.to(value.dtype), torch.stack([red, green, blue]))
