"""DICOM files by themselves: their headers read, checked and decoded; no patient is ever named.

What pydicom says of a file, quoting it, is not passed on.
"""

import io
import logging
import math
import re
import struct
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pydicom
from pydicom.encaps import get_frame
from pydicom.errors import BytesLengthException, InvalidDicomError
from pydicom.misc import is_dicom
from pydicom.pixels.decoders.base import get_decoder
from pydicom.uid import JPEG2000, UID, DeflatedExplicitVRLittleEndian, ExplicitVRLittleEndian, JPEG2000Lossless

from medspeed.common.data.dataset import SUFFIXES

MAX_HEADER = 2**24  # bytes of a deflated file before its pixels
_CODESTREAM = b"\xff\x4f\xff\x51"  # how JPEG 2000's begin: SOC, and SIZ with the sides
GEOMETRY = {"Rows": 1, "Columns": 1, "PixelSpacing": 2, "ImageOrientationPatient": 6, "ImagePositionPatient": 3}
TAGS = [
    *GEOMETRY, "SOPClassUID", "SOPInstanceUID", "SeriesInstanceUID", "StudyInstanceUID",
    "FrameOfReferenceUID", "SeriesDescription", "InstanceNumber", "Modality", "ImageType",
    "NumberOfFrames", "PhotometricInterpretation", "SliceThickness", "RescaleSlope", "RescaleIntercept",
    "RescaleType", "ModalityLUTSequence",
]  # fmt: skip
# What pydicom and its decoders raise on damaged files; caught where they are called, and nowhere else.
BROKEN: tuple[type[Exception], ...] = (
    OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, struct.error,
    zlib.error, BytesLengthException, InvalidDicomError,
)  # fmt: skip
# What names say, in small letters, digits, + and *: of a sequence that is none of the four; of contrast; of none.
_OTHER = r"t2w? ?(\*|star|gre|ffe|fl(ash|\d)|ha?emo)|map(ping)?\b|\bsub|\bdiff(usion)?\b|dwi|swan|\bswi(?![a-z])|ep2d"
_OTHER += r"|(?<!post )(?<!after )(perf|\b(adc|asl|dce|dsc)\b)"
_BRANDS = "artirem|clariscan|dotarem|elucirem|eovist|magnevist|omniscan|primovist|vueway"
_GIVEN = rf"gd|gad|hanc|\benh|\binj|[ck]ontrast|\bk ?m\b|\bmdc\b|\bce\b|{_BRANDS}"
_CONTRAST = rf"{_GIVEN}|post(?!er)|\+ ?c|\bc ?\+|t1 ?w? ?ce?\b"
_NO = "w ?o|without|before|ohne|vor|avant|antes|sans|sin|senza|zonder|uten|utan|non?|un|pre"  # contrast, or at the end
_PLAIN = rf"\b(pre|native?)\b|\b({_NO})( de)? ?({_GIVEN}|c\b|enh|inj|$)"
_MINUS = r"(?<![a-z0-9])(t1w?)?(c|ce|gd|km)-(?![a-z0-9+])|(?<![a-z0-9])-(c|ce|gd|km)(?![a-z0-9+])"
T = TypeVar("T")


@dataclass(frozen=True)
class Slice:
    """A file of a series, and pydicom's dataset of its `TAGS`."""

    path: Path
    header: Any

    @property
    def name(self) -> str:
        """The slice's number instead of its file."""
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
        return UID(self.text("SOPClassUID")).name


def sequence_of(text: str) -> str:
    """Return what a name says of an MRI sequence: "t1", "t1ce" (with contrast), "t2", "flair"; "" if none of them."""
    minus = re.search(_MINUS, text.lower())
    text = re.sub(r"[^a-z0-9+*]+", " ", text.lower())
    signs = {"t1": r"t1|mp ?rage", "t2": "t2", "flair": r"flair|t2 ?f\b|dark ?fluid"}
    kinds = [kind for kind, sign in signs.items() if re.search(sign, text)]
    if kinds == ["t2", "flair"]:
        return "flair"
    if len(kinds) != 1 or re.search(_OTHER, text):
        return ""
    if kinds != ["t1"] or not (minus or re.search(_CONTRAST, text)) or re.search(_PLAIN, text):
        return kinds[0]
    if minus:  # "C-" is without contrast, but the dash of "Gd-" may only part words
        return "t1" if "c" in (minus[2], minus[3]) else ""
    return "t1ce"


def quiet_dicom() -> None:
    """Keep pydicom and highdicom from quoting a file in a log or a warning, from now on: they may name the patient."""
    for library in ("pydicom", "highdicom"):
        logging.getLogger(library).setLevel(logging.CRITICAL + 1)
    pydicom.config.settings.reading_validation_mode = pydicom.config.IGNORE
    warnings.filterwarnings("ignore", module=r"pydicom|highdicom|medspeed\.common\.(data|inference)\.dicom")


def read_slice(path: Path) -> Slice | None:
    """Return what a header says, nothing where it is damaged; None for a file that is no DICOM."""
    if not path.is_file() or path.name.lower().endswith(SUFFIXES):
        return None  # a named pipe would wait for ever
    named = path.suffix.lower() == ".dcm" and not path.name.startswith("._")  # as macOS calls its own
    if not (named or ask(lambda: is_dicom(path), True) or ask(lambda: not path.stat().st_size, False)):
        return None  # an empty file, or a part of one, is what a broken copy leaves
    header = ask(lambda: pydicom.dcmread(inflated(path, 0), None, True, specific_tags=TAGS), pydicom.Dataset())
    kind = ask(lambda: str(header.file_meta.MediaStorageSOPClassUID), "")
    return None if kind == pydicom.uid.MediaStorageDirectoryStorage else Slice(path, header)


def inflated(path: Path, pixels: int) -> Path | io.BytesIO:
    """Return what pydicom is to read: a file, or what a deflated one holds up to so many bytes of pixels.

    pydicom would inflate all of it, a thousand times the file's size perhaps, even for a header.
    """
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
    except BROKEN:
        return otherwise


def check_image(one: Slice) -> None:
    """Refuse what is not one grey image with a place in space, values that are known, and a codec that is."""
    name, frames = one.name, sum(one.numbers("NumberOfFrames"))
    if "Enhanced" in one.kind or frames > 1:
        raise ValueError(f"{name} is an enhanced multi-frame image ({frames:.0f} frames): export single-frame slices")
    if not (one.text("PhotometricInterpretation") or "MONOCHROME").startswith("MONOCHROME"):
        raise ValueError(f"{name} is a color image: choose a grayscale series")
    if missing := [keyword for keyword in GEOMETRY if not one.numbers(keyword)]:
        raise ValueError(f"{name} has no valid {', '.join(missing)} (truncated, or not a slice): export it again")
    sizes = {keyword: one.numbers(keyword) for keyword in ("Rows", "Columns", "PixelSpacing")}
    if min(map(min, sizes.values())) <= 0:
        raise ValueError(f"{name} has {sizes}; each must be above 0: export it again")
    if not any(scale_of(one)[:1]):
        raise ValueError(f"{name} has no usable RescaleSlope and RescaleIntercept: export it again")
    syntax = UID(ask(lambda: str(one.header.file_meta.TransferSyntaxUID), ""))
    if not ask(lambda: get_decoder(syntax).is_available, False):
        raise ValueError(f"{name} uses transfer syntax {syntax.name}, which cannot be decoded: export it uncompressed")


def scale_of(one: Slice) -> tuple[float, ...]:
    """Return RescaleSlope and RescaleIntercept; 1 and 0 where a modality may go without, () where they are unusable."""
    tags = ("RescaleSlope", "RescaleIntercept", "ModalityLUTSequence")
    if one.text("Modality") not in ("CT", "PT") and not any(keyword in one.header for keyword in tags):
        return 1.0, 0.0  # Source: DICOM PS3.3 C.8.2.1 and C.8.9.1
    found = tuple(number for keyword in tags[:2] for number in one.numbers(keyword))
    return found if len(found) == 2 and tags[2] not in one.header else ()


def stored(pixels: np.ndarray, image: pydicom.Dataset) -> np.ndarray:
    """Return pixels without what compressed streams hold above the bits that count, such as an overlay's."""
    spare = 8 * pixels.itemsize - int(image.BitsStored) if pixels.dtype.kind in "iu" else 0
    return pixels << spare >> spare if spare > 0 else pixels


def decode_slice(one: Slice) -> np.ndarray:
    """Return the stored values of a slice, [Y, X], any integer type."""
    due = tuple(int(*one.numbers(keyword)) for keyword in ("Rows", "Columns"))

    def decoded() -> np.ndarray:
        image: Any = pydicom.dcmread(inflated(one.path, 4 * math.prod(due)))
        if image.file_meta.TransferSyntaxUID in (JPEG2000, JPEG2000Lossless):  # GDCM would hold Python's lock
            import imagecodecs  # here: compressed slices alone need its 27 MB

            frame = get_frame(image.PixelData, 0, number_of_frames=1)
            start = frame.index(_CODESTREAM) + 8  # of the sides, which decide on the memory
            columns, rows, left, top = struct.unpack(">4I", frame[start : start + 16])
            if (rows - top, columns - left) != due:
                raise ValueError("an image of another size")
            pixels = np.asarray(imagecodecs.jpeg2k_decode(frame))
            if pixels.shape == due and (pixels.dtype.kind == "i") == bool(image.PixelRepresentation):
                return stored(pixels, image)
        return stored(np.asarray(image.pixel_array), image)

    pixels = ask(decoded, np.empty(0))
    if pixels.shape != due:
        raise ValueError(f"pixel data of {one.name} are missing, truncated or damaged: copy it again")
    return pixels
