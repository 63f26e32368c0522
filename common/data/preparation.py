"""From a raw scan to the voxels a network sees: oriented, resampled, normalised, cropped to the foreground, fp16.

Equal to MONAI's LoadImaged, EnsureChannelFirstd, Orientationd("RAS"), Spacingd(mode=("bilinear", "nearest")),
ScaleIntensityRanged(clip=True) or NormalizeIntensityd(nonzero=True, channel_wise=True), and
CropForegroundd(allow_smaller=True), in a small part of their time: the file is decompressed in one go, only what
lies in the foreground's box is resampled, each axis alone, and float64 is kept for coordinates and sheared affines.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from common.data.geometry import Box, WorkingGrid, box_above, working_grid
from common.data.normalisation import contiguous, standardised, windowed
from common.data.resample import SLAB_VOXELS, to_working
from common.data.volumes import Volume, check_same_grid, read_volume

CPU = torch.device("cpu")
PREPARATION_VERSION = 1  # raise when the prepared voxels change for the same parameters


@dataclass(frozen=True)
class Preparation:
    """Everything that decides the prepared voxels.

    Attributes:
        spacing: Working spacing along R, A, S, mm.
        normalisation: "window" clips to `window` and scales it to [0, 1] (CT); "zscore" subtracts the mean and divides
            by the deviation of the nonzero voxels of each channel, and leaves zeros as they are (MR).
        window: Lowest and highest intensity in HU; None for "zscore".
        channels: Images per case: 1 for a 3-D file, more for a 4-D one.
    """

    spacing: tuple[float, float, float]
    normalisation: Literal["window", "zscore"]
    window: tuple[float, float] | None
    channels: int = 1

    def __post_init__(self) -> None:
        """Refuse figures that cannot be meant."""
        if not all(0 < value < float("inf") for value in self.spacing):
            raise ValueError(f"spacing {self.spacing}: three lengths in mm, each above 0")
        if (self.window is not None) != (self.normalisation == "window"):
            raise ValueError(
                f"window {self.window} with normalisation {self.normalisation!r}: give a window for 'window'"
                " and none for 'zscore'"
            )
        if self.window is not None and not self.window[0] < self.window[1]:
            raise ValueError(f"window {self.window}: the lower bound must lie below the upper one")
        if self.channels < 1:
            raise ValueError(f"channels {self.channels}: at least 1")


@dataclass(frozen=True)
class PreparedCase:
    """A case as the network sees it.

    Attributes:
        name: Name of the case.
        image: [C, X, Y, Z] float16 (float32 where asked for) along R, A, S, contiguous; in [0, 1] for "window".
        label: [X, Y, Z] uint8, contiguous; None where there is none.
        grid: The way back to the file.
    """

    name: str
    image: torch.Tensor
    label: torch.Tensor | None
    grid: WorkingGrid


def prepare_case(
    name: str,
    image: Path,
    label: Path | None,
    preparation: Preparation,
    classes: int | Collection[int] | None = None,
    device: torch.device = CPU,
) -> PreparedCase:
    """Read and prepare one case.

    Args:
        name: Name of the case.
        image: Its scan, .nii.gz or .nii.
        label: Its label map, on the same grid; or None.
        preparation: What to make of it.
        classes: Label values must lie in range(classes), or be among those given; None allows 0 to 255.
        device: Where to resample and where the result lies.

    Raises:
        FileNotFoundError, ValueError: from reading; nothing of the image counts as foreground; the label lies on
            another grid or holds a value outside the classes. Each names the file.
    """
    volume = read_volume(image, preparation.channels)
    prepared = prepare_volume(name, volume, preparation, device)
    if label is None:
        return prepared
    truth = read_volume(label)
    check_same_grid(volume, truth)
    check_values(truth, classes)
    voxels = _in_memory_order(truth.voxels.astype(np.uint8, order="K", copy=False)).to(device)
    carried = contiguous(to_working(voxels, prepared.grid, nearest=True), torch.uint8)
    return replace(prepared, label=carried[0])


def prepare_volume(
    name: str,
    volume: Volume,
    preparation: Preparation,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float16,
) -> PreparedCase:
    """Prepare a scan that was read already; the result has no label.

    Inference takes float32, which spares the rounding; what is kept for training takes float16, half the memory.

    Raises:
        ValueError: nothing of the image counts as foreground; the file is named.
    """
    voxels = _in_memory_order(volume.voxels).to(device)
    native_box = _foreground_box(voxels, preparation)
    if native_box is None:
        bound = f"at or below {preparation.window[0]:g}, the lower bound of the window" if preparation.window else "0"
        raise ValueError(f"{volume.path}: every voxel is {bound}: no foreground; check the intensities and the window")
    whole = working_grid(volume.voxels.shape[:3], volume.affine, preparation.spacing)
    grid = _reachable(whole, native_box)
    resampled = to_working(voxels, grid, nearest=False)
    inside = voxels[(slice(None), *(slice(first, stop) for first, stop in native_box))]
    inside = inside.permute(0, *(3 - axis for axis in grid.file_axes))
    found = resampled.data_ptr() == inside.data_ptr() and resampled.shape == inside.shape
    box = tuple((0, size) for size in inside.shape[1:]) if found else _foreground_box(resampled, preparation)
    if box is None:
        raise ValueError(
            f"{volume.path}: its foreground is lost at spacing {preparation.spacing} mm: choose a finer one"
        )
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
    if preparation.window:
        return box_above(image, preparation.window[0])
    anywhere = torch.empty(image.shape[1:], dtype=torch.bool, device=image.device)
    depth = max(1, SLAB_VOXELS // max(1, anywhere[0].numel()))
    for part, out in zip(torch.split(image, depth, 1), torch.split(anywhere, depth), strict=True):
        bits = (part != 0) if part.is_floating_point() else part
        torch.ne(reduce(torch.bitwise_or, bits), 0, out=out)
    return box_above(anywhere.view(torch.uint8)[None], 0)


def _reachable(grid: WorkingGrid, native_box: Box) -> WorkingGrid:
    """Crop the grid to the voxels that a foreground voxel of the file can reach.

    Outside, every voxel interpolates between background voxels and is background: the foreground crop will not miss it.

    Args:
        grid: The whole working grid.
        native_box: The foreground's box in memory order [z, y, x].
    """
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


def check_values(label: Volume, classes: int | Collection[int] | None) -> None:
    """Refuse label values that are no class number: of range(classes), or of those given."""
    voxels = label.voxels
    listed = range(256 if classes is None else classes) if classes is None or isinstance(classes, int) else classes
    bound = max(listed) + 1
    whole = voxels.dtype.kind in "iu" or bool((voxels == np.rint(voxels)).all())
    if whole and voxels.min() >= 0 and voxels.max() < bound and len(listed) == bound:
        return
    found = np.unique(voxels)
    if whole and set(found.tolist()) <= set(listed):
        return
    if len(listed) < bound:
        raise ValueError(
            f"{label.path}: expected label values {', '.join(map(str, sorted(listed)))}, found "
            f"{', '.join(f'{value:g}' for value in found[:12])}: correct the file, or the labels in dataset.json"
        )
    shown = ", ".join(f"{value:g}" for value in found[:12]) + (", ..." if len(found) > 12 else "")
    raise ValueError(
        f"{label.path}: expected label values 0 to {bound - 1}, found {shown}: correct the file, or list the "
        "labels in dataset.json"
    )
