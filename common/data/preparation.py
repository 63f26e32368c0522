"""Raw scans made ready for the network: oriented, resampled, normalized, cropped to the foreground, in fp16.

Equal to MONAI's LoadImaged, EnsureChannelFirstd, Orientationd("RAS"), Spacingd(mode=("bilinear", "nearest")),
ScaleIntensityRanged(clip=True) or NormalizeIntensityd(nonzero=True, channel_wise=True), CropForegroundd; much faster.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from medspeed.common.data.dataset import Case
from medspeed.common.data.geometry import SLAB_VOXELS, Box, Spacing, WorkingGrid, box_above, to_working, working_grid
from medspeed.common.data.volumes import ALWAYS_TRIED, MAX_SIDE, MIN_SIDE, Volume, check_same_grid, read_volume
from medspeed.common.host_memory import free_memory

CPU = torch.device("cpu")
PREPARATION_VERSION = 5  # raise when the prepared voxels change for the same parameters
_MOST_FINER = 1000  # times as many voxels as the file: 5 mm slices at 0.5 mm take 10, a PET of 8 mm at 1 mm 512
_ROUNDING = 1e-6  # a deviation below this share of the mean is float32's own


@dataclass(frozen=True)
class Preparation:
    """All settings of the preparation."""

    spacing: Spacing  # of the working grid along R, A, S, mm
    normalisation: Literal["window", "zscore"]  # as `windowed` (CT) or `standardised` (MR)
    window: tuple[float, float] | None  # lowest and highest intensity in HU; None for "zscore"
    channels: int = 1  # images per case: 1 for a 3-D file, more for a 4-D one

    def __post_init__(self) -> None:
        assert (self.window is not None) == (self.normalisation == "window"), self
        if not all(MIN_SIDE <= side <= MAX_SIDE for side in self.spacing):
            raise ValueError(f"spacing {self.spacing}: must be {MIN_SIDE} to {MAX_SIDE} mm")
        if self.window is not None and not -math.inf < self.window[0] < self.window[1] < math.inf:
            raise ValueError(f"window {self.window}: the lower bound must be below the upper bound, both in HU")


@dataclass(frozen=True)
class PreparedCase:
    """A case as the network sees it."""

    name: str
    image: torch.Tensor  # [C, X, Y, Z] float16 (float32 on request) along R, A, S, contiguous; in [0, 1] for "window"
    label: torch.Tensor | None  # [X, Y, Z] uint8, contiguous; None for an unlabelled case
    grid: WorkingGrid  # leads back to the grid of the file


def prepare_case(case: Case, preparation: Preparation, allowed: Collection[int]) -> PreparedCase:
    """Read a labelled case by `read_case`, and prepare image and label."""
    volume, labels = read_case(case, preparation.channels, allowed)
    prepared = prepare_volume(case.name, volume, preparation)
    resampled = to_working(_in_memory_order(labels), prepared.grid, nearest=True)
    return replace(prepared, label=resampled[0].to(torch.uint8).contiguous())


def read_case(
    case: Case, channels: int, allowed: Collection[int], first_only: bool = False
) -> tuple[Volume, np.ndarray]:
    """Read the image of a labelled case, and its label values [X, Y, Z] uint8, of those `allowed`, on the same grid."""
    assert case.label is not None
    image, label = read_volume(case.image, channels, first_only), read_volume(case.label)
    check_same_grid(image, label)
    return image, label_map(label, allowed)


def case_grid(path: Path, shape: Sequence[int], affine: np.ndarray, spacing: Spacing) -> WorkingGrid:
    """Return the uncropped working grid of a file; a ValueError says that one of the two spacings must be wrong."""
    grid = working_grid(shape, affine, spacing)
    if math.prod(grid.shape) > _MOST_FINER * math.prod(shape):
        said = f"{path}: its {tuple(shape)} voxels become {grid.shape} at spacing {spacing} mm, more than {_MOST_FINER}"
        raise ValueError(f"{said} times as many: correct its header, or train with a coarser --spacing")
    return grid


def prepare_volume(
    name: str, volume: Volume, preparation: Preparation, device: torch.device = CPU, dtype: torch.dtype = torch.float16
) -> PreparedCase:
    """Prepare a scan that is already in memory, without a label; inference uses float32, without rounding.

    An image without foreground, or a working grid that needs too much memory, is a ValueError, which names the file.
    """
    voxels = _in_memory_order(volume.voxels).to(device)
    native_box = _foreground_box(voxels, preparation)
    if native_box is None:
        bound = f"at or below {preparation.window[0]:g}, the lower bound of the window" if preparation.window else "0"
        raise ValueError(f"{volume.path}: every voxel is {bound}: no foreground; check the intensities and the window")
    grid = case_grid(volume.path, volume.voxels.shape[:3], volume.affine, preparation.spacing)
    grid = _reachable(grid, native_box)
    needed = 8 * len(voxels) * math.prod(grid.crop_shape)  # float32, twice at a time
    if device.type == "cpu" and max(volume.voxels.nbytes, ALWAYS_TRIED) < needed > (free := free_memory(needed)):
        said = f"at spacing {preparation.spacing} mm it needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free"
        remedy = "crop the scan, train with a coarser --spacing, or take a machine with more memory"
        raise ValueError(f"{volume.path}: {said}: {remedy}")
    resampled = to_working(voxels, grid, nearest=False)
    box = _foreground_box(resampled, preparation)
    if box is None:
        said = f"no foreground is left at spacing {preparation.spacing} mm: use a finer one (CT: or a lower --window)"
        raise ValueError(f"{volume.path}: {said}")
    cropped = resampled[(slice(None), *(slice(first, stop) for first, stop in box))]
    start = [outer + first for outer, (first, _) in zip(grid.crop_start, box, strict=True)]
    window = preparation.window
    image = standardised(cropped, dtype) if window is None else windowed(cropped, window, dtype)
    return PreparedCase(name, image, None, grid.cropped(start, cropped.shape[1:]))


def _in_memory_order(voxels: np.ndarray) -> torch.Tensor:
    """Return the voxels as [C, z, y, x], a view of the file's bytes, in a dtype that torch can index."""
    if voxels.dtype in (np.uint16, np.uint32, np.uint64):
        voxels = voxels.astype(np.float32, order="K")
    tensor = torch.from_numpy(voxels.T)
    return tensor if tensor.dim() == 4 else tensor[None]


def _foreground_box(image: torch.Tensor, preparation: Preparation) -> Box | None:
    """Return the box of the voxels of [C, n0, n1, n2] above the window's lower bound, or other than 0."""
    window = preparation.window
    return box_above(image, window[0]) if window else box_above((image != 0).view(torch.uint8), 0)


def _reachable(grid: WorkingGrid, native_box: Box) -> WorkingGrid:
    """Crop the whole grid to what the foreground of the file, its box in the order [z, y, x], is interpolated to."""
    if not grid.separable:
        return grid
    start, shape = [], []
    for positions, size, axis, flipped in zip(
        grid.working_positions(), grid.oriented_shape, grid.file_axes, grid.flipped, strict=True
    ):
        first, stop = native_box[2 - axis]
        first, last = (size - stop, size - 1 - first) if flipped else (first, stop - 1)
        near = np.flatnonzero((positions > first - 1) & (positions < last + 1))
        low, high = (near[0], near[-1] + 1) if len(near) else (0, len(positions))
        start.append(low)
        shape.append(high - low)
    return grid.cropped(start, shape)


def label_map(label: Volume, allowed: Collection[int]) -> np.ndarray:
    """Return the label values, [X, Y, Z] uint8 in file order; a ValueError names those that are not allowed."""
    with np.errstate(invalid="ignore"):  # a value that uint8 cannot hold is seen below
        values = label.voxels.astype(np.uint8, order="K", copy=False)
    listed = np.isin(np.arange(256), list(allowed))
    if not (np.array_equal(values, label.voxels) and listed[values.ravel(order="K")].all()):
        found = np.unique(label.voxels)
        shown = ", ".join(f"{value:.9g}" for value in found[:12]) + (", ..." if len(found) > 12 else "")
        due = ", ".join(map(str, sorted(allowed))) if len(allowed) < 256 else "0 to 255"
        raise ValueError(f"{label.path}: expected label values {due}, found {shown}: correct file or dataset.json")
    return values


# What follows writes each voxel once, into contiguous memory of the dtype that is wanted. On a CPU all steps are done
# on a plane at a time, which stays in its cache: in little more than half the time of steps on the whole volume.


def windowed(image: torch.Tensor, window: tuple[float, float], dtype: torch.dtype) -> torch.Tensor:
    """Scale [C, X, Y, Z] of any real dtype from a window to [0, 1], and clip."""
    low, width = window[0], window[1] - window[0]
    result = torch.empty(image.shape, dtype=dtype, device=image.device)
    for plane, out in _planes(image, result):
        out.copy_(plane.to(torch.float32, copy=True).sub_(low).div_(width).clamp_(0, 1))
    return result


def standardised(image: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Normalize each channel of [C, X, Y, Z] by mean and deviation of its nonzero voxels; a constant one becomes 0."""
    result = torch.empty(image.shape, dtype=dtype, device=image.device)
    for channel, mine in zip(torch.split(image, 1), torch.split(result, 1), strict=True):
        mean, deviation = _moments(channel)
        for plane, out in _planes(channel, mine):
            values = plane.to(torch.float32, copy=True)
            nonzero = values.sign().abs_()  # 1 or 0: quicker than a mask
            out.copy_(values.addcmul_(nonzero, mean, value=-1).div_(deviation))
    return result


def _moments(channel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and deviation of the nonzero voxels, float32; the deviation is infinite where there is none."""
    count, total, squares = (torch.zeros((), dtype=torch.float64, device=channel.device) for _ in range(3))
    for plane, _ in _planes(channel, channel):
        values = plane.to(torch.float64, copy=True)  # float32's squares could not tell a constant image from a flat one
        total += values.sum()
        squares += values.square_().sum()
        count += values.sign_().sum()  # of the squares; quicker than counting what is not zero
    count = count.clamp(min=1)
    mean = total / count
    deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
    return mean.float(), torch.where(deviation > _ROUNDING * mean.abs(), deviation, math.inf).float()


def _planes(image: torch.Tensor, result: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield planes of two images [C, X, Y, Z] that hold both their innermost axes; on a GPU the images as they are."""
    if image.device.type != "cpu":
        yield image, result
        return
    axis = max({1, 2, 3} - {min((1, 2, 3), key=each.stride) for each in (image, result)}) - 1
    depth = max(1, SLAB_VOXELS * image.shape[axis + 1] // max(1, image[0].numel()))
    for channel, mine in zip(image, result, strict=True):
        yield from zip(torch.split(channel, depth, axis), torch.split(mine, depth, axis), strict=True)
