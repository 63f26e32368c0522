"""What a DICOM file's header says, read so that nothing of it is quoted: what it holds may name the patient."""

import logging
import math
import os
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pydicom
from pydicom.errors import BytesLengthException, InvalidDicomError

SIZES = {"Rows": 1, "Columns": 1, "PixelSpacing": 2}
GEOMETRY = {**SIZES, "ImageOrientationPatient": 6, "ImagePositionPatient": 3}
TAGS = (
    *GEOMETRY, "SOPClassUID", "SOPInstanceUID", "SeriesInstanceUID", "InstanceNumber", "Modality", "ImageType",
    "NumberOfFrames", "PhotometricInterpretation", "SliceThickness", "RescaleSlope", "RescaleIntercept",
    "ModalityLUTSequence",
)  # fmt: skip
# What pydicom and its decoders raise on damaged files; caught where they are called, and nowhere else.
BROKEN = (
    OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, struct.error,
    zlib.error, BytesLengthException, InvalidDicomError,
)  # fmt: skip
T = TypeVar("T")


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
    name: str = "a slice without InstanceNumber"

    def numbers(self, keyword: str, count: int) -> tuple[float, ...]:
        """Return the numbers of a tag; () where it is missing, or does not hold so many finite numbers."""
        value: Any = ask_pydicom(lambda: self.header.get(keyword), None)
        try:
            numbers = tuple(map(float, value if count > 1 else [value]))
        except (TypeError, ValueError):
            return ()
        return numbers if len(numbers) == count and all(map(math.isfinite, numbers)) else ()

    def text(self, keyword: str) -> str:
        """Return a tag as text; "" where it is missing or cannot be read."""
        return ask_pydicom(lambda: str(self.header.get(keyword) or ""), "")


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
    header: Any = None
    with suppress(OSError), path.open("rb") as stream:
        if stream.read(132)[128:] != b"DICM":
            return None
        stream.seek(0)
        header = ask_pydicom(lambda: pydicom.dcmread(stream, stop_before_pixels=True, specific_tags=list(TAGS)), None)
    one = DicomSlice(path, pydicom.Dataset() if header is None else header)
    number = one.numbers("InstanceNumber", 1)
    return one if not number else replace(one, name=f"slice {number[0]:.0f}")


def ask_pydicom(question: Callable[[], T], otherwise: T) -> T:
    """Return what pydicom answers, or something else where a damaged file makes it raise."""
    try:
        return question()
    except BROKEN:
        return otherwise
