"""Intensities as a network takes them, written once into contiguous memory of the dtype that is wanted.

On a CPU a plane at a time, which stays in its cache: all steps on it, and turning it out of the file's order of axes,
take little more than half the time of doing each step on the whole volume.
"""

from collections.abc import Iterator

import torch

from common.data.resample import SLAB_VOXELS

_ROUNDING = 1e-6  # a deviation below this share of the mean is float32's own


def contiguous(image: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return [C, X, Y, Z] in another dtype and with its last axis innermost."""
    result = torch.empty(image.shape, dtype=dtype, device=image.device)
    for plane, out in _planes(image, result):
        out.copy_(plane)
    return result


def windowed(image: torch.Tensor, window: tuple[float, float], dtype: torch.dtype) -> torch.Tensor:
    """Return [C, X, Y, Z] of any real dtype scaled from a window to [0, 1] and clipped; new and contiguous."""
    lowest, highest = window
    result = torch.empty(image.shape, dtype=dtype, device=image.device)
    for plane, out in _planes(image, result):
        out.copy_(plane.to(torch.float32, copy=True).sub_(lowest).div_(highest - lowest).clamp_(0, 1))
    return result


def standardised(image: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return [C, X, Y, Z] of any real dtype, each channel less the mean of its nonzero voxels, by their deviation.

    Zeros stay zero; a channel that does not vary becomes zero. The result is new and contiguous.
    """
    result = torch.empty(image.shape, dtype=dtype, device=image.device)
    for number in range(len(image)):
        channel, mine = image[number : number + 1], result[number : number + 1]
        mean, deviation = _moments(channel)
        for plane, out in _planes(channel, mine):
            values = plane.to(torch.float32, copy=True)
            nonzero = values.sign().abs_()  # 1 or 0: quicker than a mask
            out.copy_(values.addcmul_(nonzero, mean, value=-1).div_(deviation))
    return result


def _moments(channel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and deviation of the nonzero voxels, float32; the deviation is 1 where there is none."""
    count, total, squares = (torch.zeros((), dtype=torch.float64, device=channel.device) for _ in range(3))
    for plane, _ in _planes(channel, channel):
        values = plane.to(torch.float64)  # float32's squares could not tell a constant image from a flat one
        total += values.sum()
        squares += values.square_().sum()
        count += values.sign_().sum()  # of the squares; quicker than counting what is not zero
    count = count.clamp(min=1)
    mean = total / count
    deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
    return mean.float(), torch.where(deviation > _ROUNDING * mean.abs(), deviation, 1.0).float()


def _planes(image: torch.Tensor, result: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield planes of two images [C, X, Y, Z] that hold both their innermost axes; on a GPU the images as they are."""
    if image.device.type != "cpu":
        yield image, result
        return
    inner = {min((1, 2, 3), key=each.stride) for each in (image, result)}
    axis = max({1, 2, 3} - inner) - 1
    depth = max(1, SLAB_VOXELS * image.shape[axis + 1] // max(1, image[0].numel()))
    for channel, mine in zip(image, result, strict=True):
        yield from zip(torch.split(channel, depth, axis), torch.split(mine, depth, axis), strict=True)
