"""The case a report lets its reader scroll through: a small copy of a scan, its truth and its prediction."""

import base64
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.files import atomic_path
from common.observe.planes import Array, oriented_scan

CASE_FILE = "report_case.npz"
_LARGEST = 96  # voxels of a side: more would be megabytes in a mail, and lesions still show


@dataclass(frozen=True)
class ReportCase:
    """A scan in R, A, S for the viewer of a report.

    Args:
        name: of the case.
        image: [X, Y, Z] uint8, black to white.
        label: true labels [X, Y, Z] uint8; 0 is background.
        prediction: predicted labels, the same.
        spacing: sides of a voxel in mm.
    """

    name: str
    image: Array
    label: Array
    prediction: Array
    spacing: tuple[float, float, float]


def write_report_case(
    directory: Path,
    name: str,
    image: Array,
    label: Array,
    prediction: Array,
    affine: NDArray[np.float64],
    window: tuple[float, float] | None = None,
) -> Path:
    """Write `report_case.npz` into a run folder: the case that its report will show, small and in R, A, S.

    Args:
        directory: folder of the run.
        name: of the case.
        image: intensities [X, Y, Z], any real dtype.
        label: true labels [X, Y, Z], integers up to 255; 0 is background.
        prediction: predicted labels, the same.
        affine: voxel index to RAS mm, [4, 4], any orientation.
        window: intensities that are drawn black and white; by default as an overlay chooses them.

    Raises:
        OSError: the folder cannot be written or the disk is full.
    """
    assert image.shape == label.shape == prediction.shape, (image.shape, label.shape, prediction.shape)
    scan = oriented_scan(image, prediction, label, affine, window)
    assert scan.truth is not None
    black, white = scan.window
    grey = np.clip((_shrunk(scan.image) - black) / (white - black), 0, 1) * 255
    small = {
        "name": np.array(name),
        "image": grey.round().astype(np.uint8),
        "label": _sampled(scan.truth).astype(np.uint8),
        "prediction": _sampled(scan.labels).astype(np.uint8),
        "spacing": np.array(_small_spacing(scan.image.shape, scan.spacing.tolist())),
    }
    path = directory / CASE_FILE
    with atomic_path(path) as part:
        np.savez_compressed(part, **small)
    return path


def read_report_case(path: Path) -> ReportCase:
    """Read `report_case.npz`; the name of the case may be missing.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or its arrays do not fit one another.
    """
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path.name}: damaged ({error}); remove it") from error
    missing = {"image", "label", "prediction", "spacing"} - arrays.keys()
    if missing:
        raise ValueError(f"{path.name}: no array {', '.join(sorted(missing))}")
    volumes, spacing = [arrays[name] for name in ("image", "label", "prediction")], arrays["spacing"]
    shapes = {volume.shape for volume in volumes}
    if len(shapes) > 1 or volumes[0].ndim != 3 or not volumes[0].size or any(v.dtype != np.uint8 for v in volumes):
        raise ValueError(f"{path.name}: image, label and prediction must be uint8 [X, Y, Z] of one shape")
    if spacing.shape != (3,) or not np.isfinite(spacing).all() or not (spacing > 0).all():
        raise ValueError(f"{path.name}: spacing {spacing}: must be three lengths in mm")
    x, y, z = (float(side) for side in spacing)
    return ReportCase(str(arrays.get("name", "")), volumes[0], volumes[1], volumes[2], (x, y, z))


def embed_volume(image: Array, label: Array, prediction: Array, spacing: Sequence[float]) -> dict[str, Any]:
    """Return a case for the page's script, at most 96 voxels a side.

    Args:
        image: [X, Y, Z] uint8, in R, A, S; of what becomes one voxel the mean is taken.
        label: true labels, the same; of what becomes one voxel the middle is taken, for both.
        prediction: predicted labels, the same.
        spacing: sides of a voxel in mm.

    Returns:
        `shape`, `spacing`, `start` (for each axis the slice with the largest foreground), `labels` (those that occur),
        and the volumes as base64 of uint8, z running fastest.
    """
    small = {"image": _shrunk(image).round(), "label": _sampled(label), "prediction": _sampled(prediction)}
    foreground = (small["label"] > 0) | (small["prediction"] > 0)
    occurring = np.union1d(small["label"], small["prediction"])
    return {
        "shape": list(foreground.shape),
        "spacing": list(_small_spacing(image.shape, spacing)),
        "start": [_largest(foreground, axis) for axis in range(3)],
        "labels": [int(value) for value in occurring if value > 0],
        **{name: base64.b64encode(volume.astype(np.uint8).tobytes()).decode() for name, volume in small.items()},
    }


def _shrunk(image: Array) -> NDArray[np.float32]:
    """Return the means of blocks of voxels, float32, at most `_LARGEST` to an axis."""
    mean = image.astype(np.float32)
    for axis, side in enumerate(image.shape):
        edges = _edges(side)
        widths = np.diff(edges).reshape([-1 if other == axis else 1 for other in range(3)])
        mean = (np.add.reduceat(mean, edges[:-1], axis=axis) / widths).astype(np.float32)
    return mean


def _sampled(labels: Array) -> Array:
    """Return the labels in the middles of the same blocks."""
    middles = [(edges[:-1] + edges[1:]) // 2 for edges in map(_edges, labels.shape)]
    sampled: Array = labels[np.ix_(*middles)]
    return sampled


def _edges(side: int) -> NDArray[np.int64]:
    """Return where the blocks of an axis begin, and its end."""
    count = min(side, _LARGEST)
    return np.arange(count + 1) * side // count


def _small_spacing(shape: Sequence[int], spacing: Sequence[float]) -> tuple[float, ...]:
    return tuple(mm * side / min(side, _LARGEST) for side, mm in zip(shape, spacing, strict=True))


def _largest(foreground: NDArray[np.bool_], axis: int) -> int:
    area = np.count_nonzero(foreground, axis=tuple(other for other in range(3) if other != axis))
    return int(area.argmax()) if area.any() else len(area) // 2
