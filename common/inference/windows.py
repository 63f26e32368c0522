"""Sliding windows: a network made for windows of one size is applied to a whole image, overlapping logits averaged."""

import warnings
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from types import EllipsisType

import torch
import torch.nn.functional as F

from medspeed.common.data.geometry import Shape
from medspeed.common.inference.predictors import Predictor


@torch.no_grad()
def sliding_windows(
    image: torch.Tensor,
    predictor: Predictor,
    roi: Shape,
    *,
    overlap: float = 0.25,
    batch_size: int = 4,
    difference: bool = True,
) -> torch.Tensor:
    """Return the logits [K, X, Y, Z] float32 of a whole image [C, X, Y, Z], as means over overlapping windows.

    Every call of the predictor gets exactly `batch_size` contiguous windows, since an engine has a fixed profile: the
    last batch is filled up with its last window. Where a call runs out of memory, the batch is halved with a warning
    and the work goes on from there. The host waits for the device once, at the end.

    Args:
        image: any float dtype. An axis shorter than the window is padded with zeros on both sides.
        predictor: on the image's device; it must neither write into its input nor keep it.
        roi: window shape in voxels.
        overlap: part of a window that its neighbour also covers, in [0, 1).
        batch_size: windows in one call of the predictor.
        difference: of two classes, sum only the difference foreground - background, which halves memory and all
            later work: K == 1, and the foreground is where it is > 0.

    Raises:
        ValueError: window or overlap is out of its bounds, or the logits are not finite.
        torch.OutOfMemoryError: a single window is too large for the device.

    Source:
        Equal to `monai.inferers.sliding_window_inference` with its constant weights.
    """
    assert image.ndim == 4, image.shape
    assert 0 not in image.shape, image.shape
    assert image.is_floating_point(), image.dtype
    if len(roi) != 3 or min(roi) < 1 or not 0 <= overlap < 1:
        raise ValueError(f"window {roi}, overlap {overlap}: expected sides of 1 or more and an overlap in [0, 1)")
    missing = [max(side - length, 0) for length, side in zip(image.shape[1:], roi, strict=True)]
    padding = [voxels for each in reversed(missing) for voxels in (each // 2, each - each // 2)]  # Z first, for F.pad
    padded = F.pad(image, padding) if any(padding) else image
    starts, scales = window_plan((padded.shape[1], padded.shape[2], padded.shape[3]), roi, overlap, image.device)
    total = _sum_windows(padded, predictor, roi, starts, batch_size, difference)
    for scale in scales:
        total *= scale
    # The extremes carry NaN and infinity along; they take one pass and no memory, isfinite().all() 40 times as long.
    if not torch.stack(total.aminmax()).isfinite().all():
        bad, bad_input = int((~total.isfinite()).any(dim=0).sum()), int((~image.isfinite()).sum())
        raise ValueError(
            f"{bad} of {total[0].numel()} voxels have non-finite logits, {bad_input} voxels of the image are not "
            "finite. Where the image is finite, the network overflows: use bfloat16 or float32, or check its weights"
        )
    return total[_box([each // 2 for each in missing], image.shape[1:])]


@lru_cache(maxsize=4)
def window_plan(
    shape: Shape, roi: Shape, overlap: float, device: torch.device
) -> tuple[tuple[Shape, ...], tuple[torch.Tensor, ...]]:
    """Return where the windows lie in an image that is no smaller than one; kept and shared, so change nothing in it.

    That is the first voxel of each, X slowest; and float32 factors [X, 1, 1] and [Y, Z] whose product turns a sum over
    windows into their mean, 1 / (windows that cover a voxel); () for one window.
    """
    along = [window_starts(length, side, overlap) for length, side in zip(shape, roi, strict=True)]
    starts = tuple((x, y, z) for x, y, z in product(*along))
    if len(starts) == 1:
        return starts, ()
    counts = [torch.zeros(length) for length in shape]
    for count, firsts, side in zip(counts, along, roi, strict=True):
        for first in firsts:
            count[first : first + side] += 1
    x, y, z = (1 / count for count in counts)
    return starts, (x[:, None, None].to(device), (y[:, None] * z).to(device))


def window_starts(length: int, side: int, overlap: float) -> tuple[int, ...]:
    """Return the first voxels of the windows of `side` voxels along one axis; the last window ends with the axis."""
    interval = max(int(side * (1 - overlap)), 1)
    last = max(length - side, 0)
    return (*range(0, last, interval), last)


def _box(start: Sequence[int], sides: Sequence[int]) -> tuple[EllipsisType | slice, ...]:
    """Return the index of a box in [C, X, Y, Z] or [X, Y, Z]: `...` leaves the axes before X alone."""
    return (..., *(slice(first, first + side) for first, side in zip(start, sides, strict=True)))


def _sum_windows(
    image: torch.Tensor, predictor: Predictor, roi: Shape, starts: Sequence[Shape], batch_size: int, difference: bool
) -> torch.Tensor:
    """Return the sum over all windows of their logits, [K, X, Y, Z] float32 on the padded image's grid."""
    total, done = torch.empty(0), 0
    windows = torch.empty((batch_size, image.shape[0], *roi), dtype=torch.float32, device=image.device)
    while done < len(starts):
        batch = starts[done : done + len(windows)]
        try:
            logits = predictor(_cut(image, batch, windows))
        except torch.OutOfMemoryError as error:
            windows = windows[: _halved(len(windows), roi, error)]
            continue
        assert (len(logits), *logits.shape[2:]) == (len(windows), *roi), tuple(logits.shape)
        assert logits.device == image.device, logits.device
        subtract = difference and logits.shape[1] == 2
        if not done:
            channels = 1 if subtract else logits.shape[1]
            total = torch.zeros((channels, *image.shape[1:]), dtype=torch.float32, device=image.device)
        for window, start in zip(logits, batch, strict=False):  # those that fill up the last batch are left out
            place = total[_box(start, roi)]
            if subtract:  # two passes in place are faster than one over a difference that needs memory first
                place.add_(window[1:])
                place.sub_(window[:1])
            else:
                place.add_(window)
        done += len(batch)
    return total


def _cut(image: torch.Tensor, starts: Sequence[Shape], windows: torch.Tensor) -> torch.Tensor:
    """Copy the windows at `starts` into `windows` [B, C, *roi]; the last one is repeated to fill the batch."""
    only = image[_box(starts[0], windows.shape[2:])]
    if len(windows) == 1 and only.dtype == windows.dtype and only.is_contiguous():
        return only[None]  # the window is the whole image, or a slab of it: nothing to copy
    for index, window in enumerate(windows):
        window.copy_(image[_box(starts[min(index, len(starts) - 1)], windows.shape[2:])])
    return windows


def _halved(batch_size: int, roi: Shape, error: torch.OutOfMemoryError) -> int:
    if batch_size == 1:
        said = f"one window of {roi} voxels (batch_size 1) does not fit into the device's memory: lower the window size"
        raise torch.OutOfMemoryError(f"{said} (roi), use half precision, or free device memory") from error
    half = batch_size // 2
    said = f"a batch of {batch_size} windows of {roi} voxels does not fit into the device's memory: trying {half}"
    warnings.warn(f"{said}; batch_size={half} avoids this", stacklevel=5)
    return half
