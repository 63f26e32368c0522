"""DICOM series in: found by their headers, checked slice by slice, read as one volume; no patient is ever named.

A series goes by an alias, a slice by its InstanceNumber; what pydicom says of a file, quoting it, is not passed on.
"""

import hashlib
import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from medspeed.common.data.dicom_slices import (
    GEOMETRY,
    Slice,
    ask,
    files_below,
    inflated,
    quiet_dicom,
    read_slice,
    sequence_of,
)
from medspeed.common.data.threads import map_in_threads
from medspeed.common.data.volumes import ALWAYS_TRIED, Volume, check_affine
from medspeed.common.host_memory import free_memory

MAX_OFF_GRID = 0.1  # of the slice spacing: how far a slice may lie from its place on a regular grid
MAX_TURN = 1e-3  # by how much direction cosines and mm of PixelSpacing may differ; scanners round them
MIN_STEP = 0.01  # mm: slices nearer than this share a place


@dataclass(frozen=True)
class DicomSeries:
    """A series of single-frame DICOM images, as its headers tell of it.

    Attributes:
        name: "series-" and 12 hexadecimal digits of the SHA-256 of the SeriesInstanceUID.
        files: the slices in order of position along the normal, as they become Z; as found where there is a problem.
        shape: X (columns), Y (rows), Z (slices); 0 where the headers do not tell.
        modality: "CT", "MR", ...; "OT" (other) where the headers do not tell.
        notes: what the user should know, without identifiers.
        problem: why `read_series` refuses it; "" where the headers show no reason.
        voxel: volume of a voxel in mm^3; not-a-number where there is a problem.
        is_volume: whether it could be one; not scouts, single images and screen captures, of which any study has some.
        study: "study-" and 12 hexadecimal digits of the SHA-256 of the StudyInstanceUID.
        sequence: what it is called in MRI (see `sequence_of`); "" where nothing tells.
        channels: series of which it is the scan; then name is the study's, and the rest is of the first of them.
    """

    name: str
    files: tuple[Path, ...]
    shape: tuple[int, int, int]
    modality: str
    notes: tuple[str, ...]
    problem: str
    voxel: float
    is_volume: bool
    study: str = ""
    sequence: str = ""
    channels: tuple["DicomSeries", ...] = ()

    @property
    def all_files(self) -> tuple[Path, ...]:
        """The slices of all channels."""
        return tuple(file for each in self.channels for file in each.files) or self.files


def find_series(folder: Path) -> tuple[DicomSeries, ...]:
    """Return the image series of a folder and its subfolders, sorted by name; headers are read, pixels are not.

    Other files, DICOMDIR and objects that are no images are left out; files with a broken header are counted in a log.
    """
    quiet_dicom()
    found = map_in_threads(read_slice, sorted(files_below(folder)), "reading headers", progress=False)
    slices = [one for one in found if one]
    known = [one for one in slices if one.text("SOPClassUID") and one.text("SeriesInstanceUID")]
    if lost := len(slices) - len(known):
        logging.getLogger(__name__).warning(
            "skipped %d DICOM files that are damaged before their series UID: copy them again", lost
        )
    groups: dict[str, list[Slice]] = {}
    for one in known:
        if "Image Storage" in one.kind:
            groups.setdefault(one.text("SeriesInstanceUID"), []).append(one)
    return tuple(sorted((_describe(*group) for group in groups.items()), key=lambda one: one.name))


def read_series(series: DicomSeries) -> Volume:
    """Decode a series into one volume, several slices at a time.

    Returns:
        voxels [X, Y, Z] in Fortran order, rescaled (HU for CT): int16 where slope and intercept are whole numbers and
        all values fit, else float32. affine [4, 4] float64 to RAS mm; its third column is the step between slices,
        sheared where the gantry was tilted. path: the alias.

    Raises:
        ValueError: it is no regular stack of grey images, or pixel data are broken; alias, slices, values and remedy.
    """
    slices = [one for one in map(read_slice, series.files) if one and one.text("SOPClassUID")]
    try:
        if series.problem:
            raise ValueError(series.problem)
        if lost := len(series.files) - len(slices):
            raise ValueError(f"{lost} of {len(series.files)} files can no longer be read: copy them again")
        slices, affine, _ = _stack(slices)
        x, y, z = series.shape
        if 8 * x * y * z > max(free := free_memory(), ALWAYS_TRIED):  # stored values of 4 bytes at most, and float32
            said = f"its {x} x {y} x {z} voxels need {x * y * z / 2**27:.1f} GiB of memory, {free / 2**30:.1f} are free"
            raise ValueError(f"{said}: export fewer slices, or use a machine with more memory")
        frames = map_in_threads(_decode, slices, "slices", progress=False)
        voxels = _rescaled(frames, [_scale(one) for one in slices])
    except ValueError as error:
        raise ValueError(f"{series.name}: {error}") from None
    return Volume(voxels, affine, Path(series.name))


def _describe(uid: str, slices: list[Slice]) -> DicomSeries:
    """Return what is to be known of a series before its pixels are read."""
    name, study = _alias("series", uid), _alias("study", slices[0].text("StudyInstanceUID"))
    sequence = sequence_of(slices[0].text("SeriesDescription")) or sequence_of(slices[0].path.parent.name)
    images = [one for one in slices if "LOCALIZER" not in one.text("ImageType")]
    unique = list({one.text("SOPInstanceUID") or str(number): one for number, one in enumerate(images)}.values())
    counts = {"localizers": len(slices) - len(images), "duplicates": len(images) - len(unique)}
    notes = tuple(f"{count} of {len(slices)} images skipped: {what}" for what, count in counts.items() if count)
    problem, voxel = "" if images else "it contains only localizers, not a volume: choose another series", math.nan
    captured = any("Secondary Capture" in one.kind for one in slices)
    try:
        if unique:
            slices, affine, more = _stack(unique)
            notes, voxel = notes + more, abs(float(np.linalg.det(affine[:3, :3])))
    except ValueError as error:
        problem = str(error)
    x, y = (int(sum(slices[0].numbers(keyword))) for keyword in ("Columns", "Rows"))
    modality = slices[0].text("Modality") if re.fullmatch("[A-Z]{2,16}", slices[0].text("Modality")) else "OT"
    size, is_volume, files = (x, y, len(slices)), len(unique) > 1 and not captured, tuple(one.path for one in slices)
    return DicomSeries(name, files, size, modality, notes, problem, voxel, is_volume, study, sequence)


def _alias(kind: str, uid: str) -> str:
    return f"{kind}-{hashlib.sha256(uid.encode()).hexdigest()[:12]}"


def _stack(slices: list[Slice]) -> tuple[list[Slice], np.ndarray, tuple[str, ...]]:
    """Return the slices in order, the affine and notes; ValueError where they are no regular stack of grey images."""
    for one in slices:
        _check_image(one)
    first, *others = slices
    if not others:
        raise ValueError("it has 1 slice; a volume needs at least 2: copy the whole series")
    for one in others:
        for keyword in ("Rows", "Columns", "PixelSpacing", "ImageOrientationPatient"):
            due, found = first.numbers(keyword), one.numbers(keyword)
            if np.abs(np.subtract(due, found)).max() > MAX_TURN:
                said = f"{first.name} has {keyword} {list(due)}, {one.name} has {list(found)}"
                raise ValueError(f"it mixes stacks: {said} (more than {MAX_TURN} apart); export each separately")
    turn = np.reshape(first.numbers("ImageOrientationPatient"), (2, 3))
    if np.abs(turn @ turn.T - np.eye(2)).max() > MAX_TURN:
        said = f"is not a pair of orthogonal unit vectors (within {MAX_TURN}): export the series again"
        raise ValueError(f"ImageOrientationPatient {turn.tolist()} {said}")
    normal = np.cross(*turn)
    slices = sorted(slices, key=lambda one: float(normal @ one.numbers("ImagePositionPatient")))
    positions = np.array([one.numbers("ImagePositionPatient") for one in slices])
    _check_regular(slices, positions, positions @ normal)
    step = (positions[-1] - positions[0]) / (len(slices) - 1)
    along_column, along_row = turn[::-1] * np.reshape(first.numbers("PixelSpacing"), (2, 1))
    affine = np.vstack((np.column_stack((along_row, along_column, step, positions[0])), (0, 0, 0, 1)))
    notes, distance = [], float(step @ normal)
    tilt = np.degrees(np.arctan2(np.linalg.norm(step - distance * normal), distance))
    if tilt > 0.1:  # less comes from rounded positions
        notes.append(f"gantry tilt of {tilt:.1f} degrees: the affine is sheared")
    thickness = sum(first.numbers("SliceThickness"))
    if thickness and abs(thickness - distance) > MIN_STEP:
        notes.append(f"SliceThickness is {thickness:g} mm but slices are {distance:g} mm apart; the distance is used")
    check_affine(affine)
    return slices, np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine, tuple(notes)  # DICOM's LPS to RAS


def _check_image(one: Slice) -> None:
    """Refuse what is not one grey image with a place in space, values that are known, and a codec that is."""
    from pydicom.pixels.decoders.base import get_decoder
    from pydicom.uid import UID

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
    if not any(_scale(one)[:1]):
        raise ValueError(f"{name} has no usable RescaleSlope and RescaleIntercept: export it again")
    syntax = UID(ask(lambda: str(one.header.file_meta.TransferSyntaxUID), ""))
    if not ask(lambda: get_decoder(syntax).is_available, False):
        raise ValueError(f"{name} uses transfer syntax {syntax.name}, which cannot be decoded: export it uncompressed")


def _check_regular(slices: Sequence[Slice], positions: np.ndarray, along: np.ndarray) -> None:
    """Refuse slices at one place, steps that are too wide, and slices off the grid; `along` is mm along the normal."""
    steps = np.diff(along)
    usual = float(np.median(steps[steps > MIN_STEP])) if steps.max() > MIN_STEP else math.inf
    same, gaps = np.flatnonzero(steps <= MIN_STEP).tolist(), np.flatnonzero(steps > 1.5 * usual).tolist()
    ends = [f"{one.name} at {place:.2f} mm" for one, place in zip(slices, along, strict=True)]
    places = [f"{ends[place]} and {ends[place + 1]}" for place in same or gaps]
    said = "; ".join(places[:5]) + f"; and {len(places) - 5} more" * (len(places) > 5)
    if same:
        said = f"{len(slices)} slices share {len(slices) - len(same)} positions ({said})"
        raise ValueError(f"{said}: several phases or echoes in one series; export each separately")
    if gaps:
        raise ValueError(f"slices are missing between {said} (others are {usual:.2f} mm apart): copy the whole series")
    off = np.linalg.norm(positions - np.linspace(positions[0], positions[-1], len(positions)), axis=1)
    if off.max() > MAX_OFF_GRID * usual:
        found = f"{slices[int(off.argmax())].name} is {off.max():.2f} mm off the regular grid"
        raise ValueError(f"{found} (at most {MAX_OFF_GRID * usual:.2f}): export evenly spaced slices")


def _scale(one: Slice) -> tuple[float, ...]:
    """Return RescaleSlope and RescaleIntercept; 1 and 0 where a modality may go without, () where they are unusable."""
    tags = ("RescaleSlope", "RescaleIntercept", "ModalityLUTSequence")
    if one.text("Modality") not in ("CT", "PT") and not any(keyword in one.header for keyword in tags):
        return 1.0, 0.0  # Source: DICOM PS3.3 C.8.2.1 and C.8.9.1
    found = tuple(number for keyword in tags[:2] for number in one.numbers(keyword))
    return found if len(found) == 2 and tags[2] not in one.header else ()


def _decode(one: Slice) -> np.ndarray:
    """Return the stored values of a slice, [Y, X], any integer type."""
    import pydicom
    from pydicom.encaps import get_frame
    from pydicom.uid import JPEG2000, JPEG2000Lossless

    due = tuple(int(*one.numbers(keyword)) for keyword in ("Rows", "Columns"))

    def decoded() -> np.ndarray:
        image: Any = pydicom.dcmread(inflated(one.path, 4 * math.prod(due)))
        if image.file_meta.TransferSyntaxUID in (JPEG2000, JPEG2000Lossless):  # GDCM would hold Python's lock
            import imagecodecs  # here: compressed slices alone need its 27 MB

            pixels = np.asarray(imagecodecs.jpeg2k_decode(get_frame(image.PixelData, 0, number_of_frames=1)))
            if pixels.shape == due and (pixels.dtype.kind == "i") == bool(image.PixelRepresentation):
                return pixels
        return np.asarray(image.pixel_array)

    pixels = ask(decoded, np.empty(0))
    if pixels.shape != due:
        raise ValueError(f"pixel data of {one.name} are missing, truncated or damaged: copy it again")
    return pixels


def _rescaled(frames: Sequence[np.ndarray], scales: Sequence[tuple[float, ...]]) -> np.ndarray:
    """Return stored values [Y, X] times slope plus intercept as [X, Y, Z], Fortran order, int16 if exact or float32."""
    pairs = list(zip(frames, scales, strict=True))
    ends = [float(end) * slope + shift for frame, (slope, shift) in pairs for end in (frame.min(), frame.max())]
    if max(map(abs, ends)) > np.finfo(np.float32).max:
        raise ValueError(f"values reach {max(map(abs, ends)):.3g}: correct RescaleSlope and RescaleIntercept")
    exact = min(ends) >= -(2**15) and max(ends) < 2**15 and all(value.is_integer() for both in scales for value in both)
    voxels = np.empty((*frames[0].shape[::-1], len(frames)), np.int16 if exact else np.float32, order="F")
    for plane, (frame, (slope, shift)) in zip(voxels.T, pairs, strict=True):
        plane[:] = frame * np.float64(slope) + shift
    return voxels
