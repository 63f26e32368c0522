"""What there is to segment: NIfTI files and DICOM series, found and read in the same way."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.data.dicom import DicomSeries, find_series, read_series
from common.data.volumes import Volume, read_header, read_volume

_SUFFIXES = (".nii.gz", ".nii")


@dataclass(frozen=True)
class Scan:
    """One scan that is to be segmented.

    Attributes:
        name: what it is called in outputs, logs and tables: the file's name, or an alias of the series that tells
            nothing about the patient.
        source: the file, or the series.
    """

    name: str
    source: Path | DicomSeries

    @property
    def series(self) -> DicomSeries | None:
        """The DICOM series, where it is one."""
        return self.source if isinstance(self.source, DicomSeries) else None

    @property
    def stem(self) -> str:
        """The name without the suffix of a NIfTI file."""
        return next((self.name.removesuffix(end) for end in _SUFFIXES if self.name.endswith(end)), self.name)

    @property
    def label_name(self) -> str:
        """Name of the file of its label map."""
        return self.name if self.series is None else f"{self.name}.nii.gz"

    def read(self, channels: int) -> Volume:
        """Read its voxels.

        Raises:
            FileNotFoundError, ValueError: as `read_volume` and `read_series`; a series has one channel.
        """
        if isinstance(self.source, Path):
            return read_volume(self.source, channels)
        if channels > 1:
            raise ValueError(
                f"{self.name}: a DICOM series has one channel, the model takes {channels}: put its series into one 4-D "
                "NIfTI file"
            )
        return read_series(self.source)

    def size(self) -> tuple[tuple[int, ...], float]:
        """Return its shape, [X, Y, Z] or [X, Y, Z, C], and the volume of a voxel in mm^3, from the header.

        Raises:
            FileNotFoundError, ValueError: the header cannot be read.
        """
        if isinstance(self.source, DicomSeries):
            return self.source.shape, math.nan
        shape, affine = read_header(self.source)
        return shape, abs(float(np.linalg.det(affine[:3, :3])))

    def stamp(self) -> list[int]:
        """Return numbers that change when its files do: their count, bytes, and the latest change in ns.

        Raises:
            FileNotFoundError: a file is gone.
        """
        files = [self.source] if isinstance(self.source, Path) else self.source.files
        found = [file.stat() for file in files]
        return [len(found), sum(each.st_size for each in found), max(each.st_mtime_ns for each in found)]


def find_scans(path: Path) -> list[Scan]:
    """Return the scan of a NIfTI file; or those of a folder: its NIfTI files, else the DICOM series in and below it.

    Raises:
        FileNotFoundError: there is none.
    """
    if path.is_file():
        return [Scan(path.name, path)]
    files = sorted(file for file in path.glob("*.nii*") if file.name.endswith(_SUFFIXES) and file.name[0] != ".")
    scans = [Scan(file.name, file) for file in files]
    if not scans and path.is_dir():
        scans = [Scan(series.name, series) for series in find_series(path)]
    if not scans:
        raise FileNotFoundError(
            f"{path}: no such file, or a folder without .nii.gz or .nii files and without DICOM series"
        )
    return scans
