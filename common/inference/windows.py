"""Sliding windows: a network made for windows of one size is applied to a whole image, overlapping logits averaged."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from types import EllipsisType

import torch
import torch.nn.functional as F

from common.data.geometry import Shape
from common.inference.predictors import Predictor


@dataclass(frozen=True, eq=False)
class WindowPlan:
    """Where the windows of one image shape lie and how many cover a voxel; made once and kept.

    Attributes:
        roi: shape [X, Y, Z] of a window.
        padding: voxels of zeros before and after each axis, in the order of `torch.nn.functional.pad` (Z first).
        shape: shape [X, Y, Z] of the padded image.
        starts: first voxel of each window in the padded image, X slowest.
        scales: float32 factors, broadcastable to `shape`, whose product turns a sum over windows into their mean.
    """

    roi: Shape
    padding: tuple[int, ...]
    shape: Shape
    starts: tuple[Shape, ...]
    scales: tuple[torch.Tensor, ...]


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
    """Return the logits of a whole image as the mean of the predictor's logits on overlapping windows.

    Every call of the predictor gets exactly `batch_size` contiguous windows, since an engine has a fixed profile: the
    last batch is filled up with its last window. Where a call runs out of memory, the batch is halved with a warning
    and the work goes on from there. The predictor must neither write into its input nor keep it. The host waits for
    the device once, at the end.

    Args:
        image: [C, X, Y, Z], any float dtype. An axis shorter than the window is padded with zeros on both sides.
        predictor: from windows [B, C, *roi] float32 to logits [B, K, *roi], on the image's device.
        roi: window shape in voxels.
        overlap: part of a window that its neighbour also covers, in [0, 1).
        batch_size: windows in one call of the predictor.
        difference: of two classes, sum only the difference foreground - background, which halves memory and all
            later work; the foreground is where it is > 0, and its sigmoid is the softmax of the two.

    Returns:
        Logits [K, X, Y, Z] float32 on the image's device; K == 1 where the network has two classes and `difference`
        is set, else the network's own K.

    Raises:
        ValueError: an argument is out of its bounds, or the predictor's logits have a wrong shape or are not finite.
        torch.OutOfMemoryError: a single window is too large for the device.

    Source:
        Equal to `monai.inferers.sliding_window_inference` with its constant weights.
    """
    _check_arguments(image, roi, overlap, batch_size)
    plan = window_plan((image.shape[1], image.shape[2], image.shape[3]), roi, overlap, image.device)
    padded = F.pad(image, plan.padding) if any(plan.padding) else image
    total = _sum_windows(padded, predictor, plan, batch_size, difference)
    for scale in plan.scales:
        total *= scale
    _check_finite(total, image)
    before_z, _, before_y, _, before_x, _ = plan.padding
    return total[_box((before_x, before_y, before_z), image.shape[1:])]


@lru_cache(maxsize=4)
def window_plan(shape: Shape, roi: Shape, overlap: float, device: torch.device) -> WindowPlan:
    """Return the plan for an image of `shape` voxels; it is kept and shared, so change nothing in it."""
    padded = (max(shape[0], roi[0]), max(shape[1], roi[1]), max(shape[2], roi[2]))
    padding: list[int] = []
    for length, full in zip(reversed(shape), reversed(padded), strict=True):
        before = (full - length) // 2
        padding += [before, full - length - before]
    along = [window_starts(length, side, overlap) for length, side in zip(padded, roi, strict=True)]
    starts = tuple((x, y, z) for x, y, z in product(*along))
    return WindowPlan(roi, tuple(padding), padded, starts, _scales(padded, along, roi, device))


def window_starts(length: int, side: int, overlap: float) -> tuple[int, ...]:
    """Return the first voxels of the windows of `side` voxels along one axis; the last window ends with the axis."""
    interval = max(int(side * (1 - overlap)), 1)
    last = max(length - side, 0)
    return (*range(0, last, interval), last)


def fitted_window(shape: Sequence[int], most: Shape, overlap: float) -> Shape:
    """Return the window that covers an image of `shape` with the least computed twice, no side above that of `most`.

    Per axis there are as few windows as with `most`, and they are as short as they can be. For a network that takes any
    sides which divide as those of `most` do (by the power of two that they have in common).

    Args:
        shape: X, Y, Z of the image.
        most: the largest window.
        overlap: part of a window that its neighbour also covers.
    """
    divisor = math.gcd(*most) & -math.gcd(*most)
    sides = []
    for length, side in zip(shape, most, strict=True):
        count = len(window_starts(length, side, overlap))
        fits = (short for short in range(divisor, side, divisor) if len(window_starts(length, short, overlap)) <= count)
        sides.append(next((short for short in fits if count > 1 or short >= length), side))
    return sides[0], sides[1], sides[2]


def _scales(shape: Shape, along: Sequence[Sequence[int]], roi: Shape, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return 1 / (windows that cover a voxel), which is a product over the axes: as [X, 1, 1] and [Y, Z]."""
    if all(len(starts) == 1 for starts in along):
        return ()
    inverse = []
    for length, starts, side in zip(shape, along, roi, strict=True):
        count = torch.zeros(length)
        for start in starts:
            count[start : start + side] += 1
        inverse.append(1 / count)
    return (inverse[0][:, None, None].to(device), (inverse[1][:, None] * inverse[2]).to(device))


def _box(start: Sequence[int], sides: Sequence[int]) -> tuple[EllipsisType | slice, ...]:
    """Return the index of a box in [C, X, Y, Z] or [X, Y, Z]: `...` leaves the axes before X alone."""
    return (..., *(slice(first, first + side) for first, side in zip(start, sides, strict=True)))


def _sum_windows(
    image: torch.Tensor, predictor: Predictor, plan: WindowPlan, batch_size: int, difference: bool
) -> torch.Tensor:
    """Return the sum over all windows of their logits, [K, X, Y, Z] float32 on the padded image's grid."""
    total: torch.Tensor | None = None
    done = 0
    windows = torch.empty((batch_size, image.shape[0], *plan.roi), dtype=torch.float32, device=image.device)
    while done < len(plan.starts):
        starts = plan.starts[done : done + len(windows)]
        try:
            logits = predictor(_cut(image, starts, windows))
        except torch.OutOfMemoryError as error:
            windows = windows[: _halved(len(windows), plan.roi, error)]
            continue
        _check_logits(logits, (len(windows), *plan.roi), image.device)
        subtract = difference and logits.shape[1] == 2
        if total is None:
            channels = 1 if subtract else logits.shape[1]
            total = torch.zeros((channels, *plan.shape), dtype=torch.float32, device=image.device)
        _add(total, logits[: len(starts)], starts, subtract)
        done += len(starts)
    assert total is not None  # a plan has at least one window
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
        raise torch.OutOfMemoryError(
            f"one window of {roi} voxels (batch_size 1) does not fit into the device's memory: "
            "lower the window size (roi), use half precision, or free memory on the device"
        ) from error
    half = batch_size // 2
    warnings.warn(
        f"a batch of {batch_size} windows of {roi} voxels does not fit into the device's memory: going on with {half}; "
        f"batch_size={half} saves the attempt",
        stacklevel=5,
    )
    return half


def _add(total: torch.Tensor, logits: torch.Tensor, starts: Sequence[Shape], subtract: bool) -> None:
    """Add each window's logits to its place in `total` [K, X, Y, Z], in place."""
    for window, start in zip(logits, starts, strict=True):
        place = total[_box(start, window.shape[1:])]
        if subtract:  # two passes in place are faster than one over a difference for which memory must first be found
            place.add_(window[1:])
            place.sub_(window[:1])
        else:
            place.add_(window)


def _check_arguments(image: torch.Tensor, roi: Shape, overlap: float, batch_size: int) -> None:
    if image.ndim != 4 or 0 in image.shape or not image.is_floating_point():
        raise ValueError(
            f"image {tuple(image.shape)} {image.dtype}: [C, X, Y, Z] of a float dtype is needed, no side 0"
        )
    if len(roi) != 3 or min(roi) < 1:
        raise ValueError(f"roi {roi}: three sides of at least one voxel are needed")
    if not 0 <= overlap < 1:
        raise ValueError(f"overlap {overlap}: it must lie in [0, 1)")
    if batch_size < 1:
        raise ValueError(f"batch_size {batch_size}: at least one window is needed")


def _check_logits(logits: torch.Tensor, due: Sequence[int], device: torch.device) -> None:
    batch, *roi = due
    shape = tuple(getattr(logits, "shape", ()))
    if len(shape) != 5 or shape[0] != batch or list(shape[2:]) != roi:
        raise ValueError(
            f"the predictor gave a {type(logits).__name__} of shape {shape} for {batch} windows: "
            f"logits of shape [{batch}, K, {', '.join(map(str, roi))}] are due"
        )
    if logits.device != device:
        raise ValueError(f"the predictor gave logits on {logits.device}, the image lies on {device}: move one of them")


def _check_finite(total: torch.Tensor, image: torch.Tensor) -> None:
    # The extremes carry NaN and infinity along; they take one pass and no memory, isfinite().all() 40 times as long.
    if bool(torch.stack(total.aminmax()).isfinite().all()):
        return
    bad = int((~total.isfinite()).any(dim=0).sum())
    bad_input = int((~image.isfinite()).sum())
    raise ValueError(
        f"the logits of {bad} of {total[0].numel()} voxels are not finite, nor are {bad_input} voxels of the image. "
        "Where the image is finite the network overflows: take bfloat16 or float32 for float16, or look at its weights"
    )
