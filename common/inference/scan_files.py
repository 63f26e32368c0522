"""What there is to segment: NIfTI files and DICOM series, found and read in the same way."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

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
        try:
            return read_series(self.source)
        except OSError as error:  # its message would hold the path, and with it perhaps the patient's name
            raise ValueError(f"{self.name}: a file cannot be read ({error.strerror}): copy it again") from None

    def size(self) -> tuple[tuple[int, ...], float]:
        """Return its shape, [X, Y, Z] or [X, Y, Z, C], and the volume of a voxel in mm^3, from the header.

        Raises:
            FileNotFoundError, ValueError: the header cannot be read.
        """
        if isinstance(self.source, DicomSeries):
            return self.source.shape, self.source.voxel
        shape, affine = read_header(self.source)
        return shape, abs(float(np.linalg.det(affine[:3, :3])))

    def stamp(self) -> list[int]:
        """Return numbers that change when its files do: their count, bytes, and the latest change in ns.

        Raises:
            ValueError: a file is gone.
        """
        files = [self.source] if isinstance(self.source, Path) else self.source.files
        try:
            found = [file.stat() for file in files]
        except OSError as error:
            name = self.source if isinstance(self.source, Path) else f"{self.name}: a file of it"
            raise ValueError(f"{name}: {error.strerror}: copy it again") from None
        return [len(found), sum(each.st_size for each in found), max(each.st_mtime_ns for each in found)]


def find_scans(path: Path) -> list[Scan]:
    """Return the scan of a NIfTI file; or those of a folder: its NIfTI files, or the DICOM series in and below it.

    What lies beside the volumes of a DICOM study (scouts, single images, screen captures) is left out with a word.

    Raises:
        FileNotFoundError: there is none.
        ValueError: two files have one name but for the suffix, or the folder holds both kinds.
    """
    if path.is_file():
        return [Scan(path.name, path)]
    files = sorted(file for file in path.glob("*.nii*") if file.name.endswith(_SUFFIXES) and file.name[0] != ".")
    scans = [Scan(file.name, file) for file in files]
    _check_names(path, scans)
    found = find_series(path) if path.is_dir() else ()
    for series in found:
        if not series.is_volume:
            tqdm.write(f"{series.name}: left out, no volume: {series.problem.partition(': ')[2] or series.modality}")
    others = [Scan(series.name, series) for series in found if series.is_volume]
    if scans and others:
        # Without the path: folders of DICOM studies are often named after patients.
        raise ValueError(f"--input: {len(scans)} NIfTI files and {len(others)} DICOM series: give a folder of one kind")
    scans = scans or others
    if not scans:
        raise FileNotFoundError(
            f"{path}: no such file, or a folder without .nii.gz or .nii files and without DICOM series"
        )
    return scans


def _check_names(path: Path, scans: Sequence[Scan]) -> None:
    """Refuse two files whose pictures and label maps would have one name."""
    stems = Counter(scan.stem for scan in scans)
    twice = [scan.name for scan in scans if stems[scan.stem] > 1]
    if twice:
        raise ValueError(f"{path}: {' and '.join(twice[:4])} would share their outputs: rename or remove one")
