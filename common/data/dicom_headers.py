"""What a DICOM file's header says, read so that nothing of it is quoted: what it holds may name the patient."""

import logging
import math
import os
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydicom
from pydicom.errors import BytesLengthException, InvalidDicomError

SIZES = {"Rows": 1, "Columns": 1, "PixelSpacing": 2}
GEOMETRY = {**SIZES, "ImageOrientationPatient": 6, "ImagePositionPatient": 3}
TAGS = (
    *GEOMETRY, "SOPClassUID", "SOPInstanceUID", "SeriesInstanceUID", "InstanceNumber", "Modality", "ImageType",
    "NumberOfFrames", "PhotometricInterpretation", "SliceThickness", "RescaleSlope", "RescaleIntercept",
    "ModalityLUTSequence",
)  # fmt: skip
# What pydicom and the decoders raise on damaged files; their messages may quote values or paths.
BROKEN = (
    OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, struct.error,
    zlib.error, BytesLengthException, InvalidDicomError,
)  # fmt: skip


@dataclass(frozen=True)
class DicomSlice:
    """A file of a series.

    Attributes:
        path: where it lies.
        header: pydicom's dataset of `TAGS`.
        name: "slice 7" by its InstanceNumber, which viewers show.
    """

    path: Path
    header: Any
    name: str


def quiet_dicom() -> None:
    """Keep pydicom and highdicom from quoting a file in a log or a warning, from now on: they may name the patient."""
    for library in ("pydicom", "highdicom"):
        logging.getLogger(library).setLevel(logging.CRITICAL + 1)
    pydicom.config.settings.reading_validation_mode = pydicom.config.IGNORE
    # Not for a block: series are read and segmentations written at the same time, and filters are the process's.
    warnings.filterwarnings("ignore", module=r"pydicom|highdicom|common\.(data|inference)\.dicom")


def files_below(folder: Path) -> Iterator[Path]:
    """Yield all files of a folder, through links to folders too, none of which is entered twice."""
    entered = set()
    for place, below, names in os.walk(folder, followlinks=True):
        if os.path.realpath(place) in entered:
            below.clear()
            continue
        entered.add(os.path.realpath(place))
        yield from (Path(place) / name for name in names)


def read_slice(path: Path) -> DicomSlice | None:
    """Return what a header says, nothing where it is damaged; None for a file that is no DICOM."""
    header: Any = pydicom.Dataset()
    with suppress(*BROKEN), path.open("rb") as stream:
        if stream.read(132)[128:] != b"DICM":
            return None
        stream.seek(0)
        header = pydicom.dcmread(stream, stop_before_pixels=True, specific_tags=list(TAGS))
    number = numbers_of(header, "InstanceNumber", 1)
    return DicomSlice(path, header, f"slice {number[0]:.0f}" if number else "a slice without InstanceNumber")


def numbers_of(header: Any, keyword: str, count: int) -> tuple[float, ...]:  # noqa: ANN401 - a dataset of pydicom
    """Return the numbers of a tag; () where it is missing, or does not hold so many finite numbers."""
    with suppress(*BROKEN):
        value = header.get(keyword)
        numbers = tuple(float(each) for each in (value if count > 1 else [value]))
        if len(numbers) == count and all(map(math.isfinite, numbers)):
            return numbers
    return ()


def text_of(one: DicomSlice, keyword: str) -> str:
    """Return a tag as text; "" where it is missing or cannot be read."""
    with suppress(*BROKEN):
        return str(one.header.get(keyword) or "")
    return ""
