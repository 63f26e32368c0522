"""What an overlay shows: a scan turned to the patient's axes, and the slices to look at."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from nibabel.affines import voxel_sizes
from nibabel.orientations import apply_orientation, inv_ornt_aff, io_orientation
from numpy.typing import NDArray

Array = NDArray[Any]

_PLANES = ("sagittal, x", "coronal, y", "axial, z")  # by the axis they cut
_CLOSE_UPS = 6
_CLOSE_UP_MARGIN = 25.0  # mm around the foreground


@dataclass(frozen=True)
class Scan:
    """What is drawn, its axes turned to R, A, S."""

    image: Array  # [X, Y, Z]
    labels: Array
    truth: Array | None
    affine: NDArray[np.float64]
    window: tuple[float, float]
    extent: tuple[tuple[int, int], ...]  # first and last voxel of the foreground (labels or truth) along each axis
    largest: tuple[int, int, int]  # slice with the largest foreground across each axis

    @property
    def spacing(self) -> NDArray[np.float64]:
        """Return the voxel's sides in mm."""
        return np.asarray(voxel_sizes(self.affine), dtype=np.float64)


@dataclass(frozen=True)
class Panel:
    """A part of one slice: voxels `low` to `high` of the two axes that the slice keeps."""

    plane: int  # the axis that is cut: 0 sagittal, 1 coronal, 2 axial
    index: int
    low: tuple[int, int]
    high: tuple[int, int]

    def millimetres(self, scan: Scan) -> tuple[float, float]:
        """Return width and height."""
        across, up = (axis for axis in range(3) if axis != self.plane)
        spacing = scan.spacing
        return (self.high[0] - self.low[0]) * spacing[across], (self.high[1] - self.low[1]) * spacing[up]

    def picture(self, volume: Array) -> Array:
        """Return the part as rows from the top: R (or A) on the left, A (or S) at the top."""
        part: Array = np.moveaxis(volume, self.plane, 0)[self.index]
        return part[self.low[0] : self.high[0], self.low[1] : self.high[1]].T[::-1, ::-1]

    def caption(self, scan: Scan) -> str:
        """Name the plane and where it lies: the RAS coordinate of the slice's middle."""
        voxel = np.array([*((side - 1) / 2 for side in scan.image.shape), 1.0])
        voxel[self.plane] = self.index
        return f"{_PLANES[self.plane]} = {(scan.affine @ voxel)[self.plane]:.0f} mm"


def oriented_scan(
    image: Array,
    labels: Array,
    truth: Array | None,
    affine: NDArray[np.float64],
    window: tuple[float, float] | None,
) -> Scan:
    """Turn the axes to the nearest of R, A, S (views, no copies) and find the foreground."""
    turn = io_orientation(affine)
    affine = affine @ inv_ornt_aff(turn, image.shape)
    image, labels = apply_orientation(image, turn), apply_orientation(labels, turn)
    truth = None if truth is None else apply_orientation(truth, turn)
    foreground = labels != 0 if truth is None else (labels != 0) | (truth != 0)
    extent, largest = [], []
    for axis in range(3):
        area = np.count_nonzero(foreground, axis=tuple(other for other in range(3) if other != axis))
        filled = np.flatnonzero(area)
        extent.append((int(filled[0]), int(filled[-1])) if len(filled) else (0, len(area) - 1))
        largest.append(int(area.argmax()) if len(filled) else len(area) // 2)
    return Scan(
        image=image,
        labels=labels,
        truth=truth,
        affine=affine,
        window=_window(image) if window is None else window,
        extent=tuple(extent),
        largest=(largest[0], largest[1], largest[2]),
    )


def _window(image: Array) -> tuple[float, float]:
    """Return the percentiles 0.5 and 99.5 of the voxels above the minimum, of about a million voxels."""
    step = max(1, round((image.size / 1e6) ** (1 / 3)))
    sample = image[::step, ::step, ::step].astype(np.float32)
    tissue = sample[sample > sample.min()]
    if not len(tissue):
        return float(sample.min()), float(sample.min()) + 1
    low, high = np.percentile(tissue, [0.5, 99.5])
    return float(low), float(high) if high > low else float(low) + 1


def panel_columns(scan: Scan) -> tuple[list[list[Panel]], list[list[Panel]]]:
    """Return the columns of both rows: axial, coronal and sagittal of the body; axial slices about the foreground."""
    low, high = _body(scan)
    axial, coronal, sagittal = (
        Panel(plane, scan.largest[plane], (low[across], low[up]), (high[across], high[up]))
        for plane, across, up in ((2, 0, 1), (1, 0, 2), (0, 1, 2))
    )
    flat = 2 * coronal.millimetres(scan)[1] < axial.millimetres(scan)[1]
    planes = [[axial], [coronal, sagittal]] if flat else [[axial], [coronal], [sagittal]]
    side = max((last + 1 - first) * mm for (first, last), mm in zip(scan.extent[:2], scan.spacing[:2], strict=True))
    for axis in range(2):
        voxels = min(scan.image.shape[axis], round((side + 2 * _CLOSE_UP_MARGIN) / scan.spacing[axis]))
        centre = (scan.extent[axis][0] + scan.extent[axis][1] + 1) // 2
        low[axis] = int(np.clip(centre - voxels // 2, 0, scan.image.shape[axis] - voxels))
        high[axis] = low[axis] + voxels
    inner = np.linspace(*scan.extent[2], _CLOSE_UPS + 2)[1:-1]  # not the ends, where there is next to nothing to see
    indices = sorted({round(index) for index in inner})
    return planes, [[Panel(2, index, (low[0], low[1]), (high[0], high[1]))] for index in indices]


def _body(scan: Scan) -> tuple[list[int], list[int]]:
    """Return the box that holds the foreground and whatever is brighter than black: no air around a patient."""
    step = max(1, round((scan.image.size / 1e6) ** (1 / 3)))
    bright = scan.image[::step, ::step, ::step] > scan.window[0]
    low, high = [], []
    for axis, (first, last) in enumerate(scan.extent):
        filled = step * np.flatnonzero(bright.any(axis=tuple(other for other in range(3) if other != axis)))
        low.append(min(first, int(filled.min(initial=first))))
        high.append(min(max(last, int(filled.max(initial=last)) + step - 1) + 1, scan.image.shape[axis]))
    return low, high
