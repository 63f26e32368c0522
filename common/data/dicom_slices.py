"""DICOM files by themselves: found below a folder, their headers read; no patient is ever named.

Only regular files are opened, and a deflated one is inflated no further than needed. What pydicom says of a file,
quoting it, is not passed on. It is imported where a file is asked for: a host of NIfTI files alone may lack it.
"""

import io
import logging
import math
import os
import re
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

MAX_HEADER = 2**24  # bytes of a deflated file before its pixels
GEOMETRY = {"Rows": 1, "Columns": 1, "PixelSpacing": 2, "ImageOrientationPatient": 6, "ImagePositionPatient": 3}
TAGS = [
    *GEOMETRY, "SOPClassUID", "SOPInstanceUID", "SeriesInstanceUID", "StudyInstanceUID",
    "SeriesDescription", "InstanceNumber", "Modality", "ImageType",
    "NumberOfFrames", "PhotometricInterpretation", "SliceThickness", "RescaleSlope", "RescaleIntercept",
    "ModalityLUTSequence",
]  # fmt: skip
T = TypeVar("T")


@dataclass(frozen=True)
class Slice:
    """A file of a series, and pydicom's dataset of its `TAGS`."""

    path: Path
    header: Any

    @property
    def name(self) -> str:
        """What the slice is called instead of its file."""
        number = self.numbers("InstanceNumber")
        return f"slice {number[0]:.0f}" if number else "a slice without InstanceNumber"

    def numbers(self, keyword: str) -> tuple[float, ...]:
        """Return the numbers of a tag; () where it is missing, or does not hold as many finite ones as it should."""
        numbers: tuple[float, ...] = ask(lambda: tuple(map(float, np.atleast_1d(self.header.get(keyword)))), ())
        return numbers if len(numbers) == GEOMETRY.get(keyword, 1) and all(map(math.isfinite, numbers)) else ()

    def text(self, keyword: str) -> str:
        """Return the text of a tag; "" where it is missing."""
        return ask(lambda: str(self.header.get(keyword) or ""), "")

    @property
    def kind(self) -> str:
        """The name of its SOP class, such as "CT Image Storage"."""
        from pydicom.uid import UID

        return UID(self.text("SOPClassUID")).name


def sequence_of(text: str) -> str:
    """Return what a name says of an MRI sequence: "t1", "t1ce" (with contrast), "t2", "flair"; "" if none of them."""
    text = re.sub(r"[^a-z0-9+*]+", " ", text.lower())
    kinds = [
        kind for kind, signs in (("t1", r"t1|mp ?rage"), ("t2", "t2"), ("flair", "flair")) if re.search(signs, text)
    ]
    if kinds == ["t2", "flair"]:
        return "flair"
    if len(kinds) != 1 or re.search(r"t2 ?(\*|star)|map(ping)?\b|\bsub", text):
        return ""
    contrast = re.search(r"gd|gado|[ck]ontrast|post(?!er)|\bk ?m\b|\+ ?c|t1 ?w? ?ce?\b|\bce\b", text)
    plain = re.search(r"\b(pre|non?|(pre|non)[ck]ontrast|without|w o|ohne|native?)\b", text)
    return "t1ce" if kinds == ["t1"] and contrast and not plain else kinds[0]


def quiet_dicom() -> None:
    """Keep pydicom and highdicom from quoting a file in a log or a warning, from now on: they may name the patient."""
    import pydicom

    for library in ("pydicom", "highdicom"):
        logging.getLogger(library).setLevel(logging.CRITICAL + 1)
    pydicom.config.settings.reading_validation_mode = pydicom.config.IGNORE
    warnings.filterwarnings("ignore", module=r"pydicom|highdicom|medspeed\.common\.(data|inference)\.dicom")


def files_below(folder: Path) -> Iterator[Path]:
    """Yield all files of a folder, through links to folders too, none of which is entered twice."""
    os.scandir(folder).close()  # raises OSError where the folder may not be listed, which `os.walk` takes for empty
    entered = set()
    for place, below, names in os.walk(folder, onerror=_not_listed, followlinks=True):
        if (real := os.path.realpath(place)) in entered:
            below.clear()
        else:
            entered.add(real)
            yield from (Path(place) / name for name in names)


def _not_listed(error: OSError) -> None:
    logging.getLogger(__name__).warning("skipped the files of a folder that cannot be listed (%s)", error.strerror)


def read_slice(path: Path) -> Slice | None:
    """Return what a header says, nothing where it is damaged; None for a file that is no DICOM."""
    import pydicom
    from pydicom.misc import is_dicom

    if not path.is_file() or not ask(lambda: is_dicom(path), True):  # a named pipe would wait for ever
        return None
    header = ask(lambda: pydicom.dcmread(inflated(path, 0), None, True, specific_tags=TAGS), pydicom.Dataset())
    return Slice(path, header)


def inflated(path: Path, pixels: int) -> Path | io.BytesIO:
    """Return what pydicom is to read: a file, or what a deflated one holds up to so many bytes of pixels.

    pydicom would inflate all of it, a thousand times the file's size perhaps, even for a header.
    """
    import pydicom
    from pydicom.uid import DeflatedExplicitVRLittleEndian, ExplicitVRLittleEndian

    meta = pydicom.filereader.read_file_meta_info(path)
    deflated = DeflatedExplicitVRLittleEndian.encode()
    if meta.TransferSyntaxUID.encode() != deflated:
        return path
    content = path.read_bytes()
    start = 144 + meta.FileMetaInformationGroupLength  # behind preamble, "DICM" and that element itself
    plain = content[:start].replace(deflated, ExplicitVRLittleEndian.encode().ljust(len(deflated), b"\0"))
    return io.BytesIO(plain + zlib.decompressobj(-zlib.MAX_WBITS).decompress(content[start:], MAX_HEADER + pixels))


def ask(question: Callable[[], T], otherwise: T) -> T:
    """Return what pydicom answers, or something else where a damaged file makes it raise."""
    try:
        return question()
    except broken():
        return otherwise


def broken() -> tuple[type[Exception], ...]:
    """Return what pydicom and its decoders raise on damaged files; caught where they are called, and nowhere else."""
    from pydicom.errors import BytesLengthException, InvalidDicomError

    usual = (OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError)
    return (*usual, struct.error, zlib.error, BytesLengthException, InvalidDicomError)
