"""DICOM series in: found by their headers, checked slice by slice, read as one volume; no patient is ever named.

A series goes by an alias, a slice by its InstanceNumber; what pydicom says of a file, quoting it, is not passed on.
"""

import hashlib
import io
import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pydicom
from pydicom.encaps import get_frame
from pydicom.pixels.decoders.base import get_decoder
from pydicom.uid import JPEG2000, UID, JPEG2000Lossless

from common.data.dicom_headers import GEOMETRY, SIZES, DicomSlice, ask_pydicom, files_below, quiet_dicom, read_slice
from common.data.threads import map_in_threads
from common.data.volumes import Volume

MAX_OFF_GRID = 0.1  # of the slice spacing: how far a slice may lie from its place on a regular grid
MAX_GAP = 1.5  # times the usual spacing: behind a wider step a slice is missing
MAX_TURN = 1e-3  # by how much direction cosines and mm of PixelSpacing may differ; scanners round them
MIN_STEP = 0.01  # mm: slices nearer than this share a place
MIN_TILT = 0.1  # degrees: less comes from rounded positions
SCALED = ("CT", "PT")  # must have RescaleSlope and RescaleIntercept. Source: DICOM PS3.3 C.8.2.1 and C.8.9.1
NAMED = 5  # places that a message names at most
logger = logging.getLogger(__name__)


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
    """

    name: str
    files: tuple[Path, ...]
    shape: tuple[int, int, int]
    modality: str
    notes: tuple[str, ...]
    problem: str = ""
    voxel: float = math.nan
    is_volume: bool = True


def find_series(folder: Path) -> tuple[DicomSeries, ...]:
    """Return the image series of a folder and its subfolders, sorted by name; headers are read, pixels are not.

    Other files, DICOMDIR and objects that are no images are left out; files with a broken header are counted in a log.

    Raises:
        FileNotFoundError: there is no such folder (its name is not repeated).
    """
    if not folder.is_dir():
        raise FileNotFoundError("the folder of DICOM files does not exist")
    quiet_dicom()
    slices = [one for one in map_in_threads(read_slice, sorted(files_below(folder)), "headers", progress=False) if one]
    known = [one for one in slices if one.text("SOPClassUID") and one.text("SeriesInstanceUID")]
    groups: dict[str, list[DicomSlice]] = {}
    for one in known:
        if "Image Storage" in UID(one.text("SOPClassUID")).name:
            groups.setdefault(one.text("SeriesInstanceUID"), []).append(one)
    series = [_describe(uid, group) for uid, group in groups.items()]
    if lost := len(slices) - len(known):
        logger.warning("%d DICOM files left out, broken before they tell their series: copy them again", lost)
    return tuple(sorted(series, key=lambda one: one.name))


def read_series(series: DicomSeries) -> Volume:
    """Decode a series into one volume, several slices at a time.

    Returns:
        voxels [X, Y, Z] in Fortran order, rescaled (HU for CT): int16 where slope and intercept are whole numbers and
        all values fit, else float32. affine [4, 4] float64 to RAS mm; its third column is the step between slices,
        sheared where the gantry was tilted. path: the alias.

    Raises:
        ValueError: it is no regular stack of grey images, or pixel data are broken; alias, slices, values and remedy.
    """
    if series.problem:
        raise ValueError(series.problem)
    quiet_dicom()
    slices = [one for one in map(read_slice, series.files) if one and one.text("SOPClassUID")]
    if lost := len(series.files) - len(slices):
        raise ValueError(f"{series.name}: {lost} of {len(series.files)} files cannot be read now: copy them again")
    slices, affine, _ = _stack(series.name, slices)
    frames = map_in_threads(lambda one: _decode(series.name, one), slices, "slices", progress=False)
    return Volume(_rescaled(frames, [_scale(one) for one in slices]), affine, Path(series.name))


def _describe(uid: str, slices: list[DicomSlice]) -> DicomSeries:
    """Return what is to be known of a series before its pixels are read."""
    name = "series-" + hashlib.sha256(uid.encode()).hexdigest()[:12]
    images = [one for one in slices if "LOCALIZER" not in one.text("ImageType")]
    unique = list({one.text("SOPInstanceUID") or str(number): one for number, one in enumerate(images)}.values())
    counts = {"localizers": len(slices) - len(images), "copies of others": len(images) - len(unique)}
    notes = tuple(f"{count} of {len(slices)} images are {what}: left out" for what, count in counts.items() if count)
    problem = "" if images else f"{name}: its images are localizers, no volume: choose another series"
    captured = any("Secondary Capture" in UID(one.text("SOPClassUID")).name for one in slices)
    voxel, is_volume = math.nan, len(unique) > 1 and not captured
    try:
        if unique:
            slices, affine, more = _stack(name, unique)
            notes, voxel = notes + more, abs(float(np.linalg.det(affine[:3, :3])))
    except ValueError as error:
        problem = str(error)
    x, y = (int(sum(slices[0].numbers(keyword, 1))) for keyword in ("Columns", "Rows"))
    modality = slices[0].text("Modality") if re.fullmatch("[A-Z]{2,16}", slices[0].text("Modality")) else "OT"
    return DicomSeries(
        name, tuple(one.path for one in slices), (x, y, len(slices)), modality, notes, problem, voxel, is_volume
    )


def _stack(name: str, slices: list[DicomSlice]) -> tuple[list[DicomSlice], np.ndarray, tuple[str, ...]]:
    """Return the slices in order, the affine and notes; ValueError where they are no regular stack of grey images."""
    for one in slices:
        _check_image(f"{name}: {one.name}", one)
    if len(slices) < 2:
        raise ValueError(f"{name}: it holds 1 slice, a volume needs 2 or more: copy the whole series")
    _check_alike(name, slices)
    turn = np.reshape(slices[0].numbers("ImageOrientationPatient", 6), (2, 3))
    if np.abs(turn @ turn.T - np.eye(2)).max() > MAX_TURN:
        said = f"not two unit vectors at right angles (within {MAX_TURN})"
        raise ValueError(f"{name}: ImageOrientationPatient {turn.tolist()} is {said}: export the series again")
    normal, positions = np.cross(*turn), np.array([one.numbers("ImagePositionPatient", 3) for one in slices])
    order = np.argsort(positions @ normal, kind="stable")
    slices, positions = [slices[index] for index in order], positions[order]
    _check_regular(name, slices, positions, positions @ normal)
    step = (positions[-1] - positions[0]) / (len(slices) - 1)
    between_rows, between_columns = slices[0].numbers("PixelSpacing", 2)
    affine = np.eye(4)
    affine[:3] = np.column_stack((turn[0] * between_columns, turn[1] * between_rows, step, positions[0]))
    notes, distance = [], float(step @ normal)
    tilt = math.degrees(math.atan2(float(np.linalg.norm(step - distance * normal)), distance))
    if tilt > MIN_TILT:
        notes.append(f"gantry tilt of {tilt:.1f} degrees: the affine is sheared")
    thickness = sum(slices[0].numbers("SliceThickness", 1))
    if thickness and abs(thickness - distance) > MIN_STEP:
        notes.append(f"SliceThickness {thickness:g} mm but slices lie {distance:g} mm apart: the distance counts")
    return slices, np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine, tuple(notes)  # DICOM's LPS to RAS


def _check_image(name: str, one: DicomSlice) -> None:
    """Refuse what is not one grey image with a place in space, values that are known, and a codec that is."""
    frames = sum(one.numbers("NumberOfFrames", 1))
    if "Enhanced" in UID(one.text("SOPClassUID")).name or frames > 1:
        raise ValueError(f"{name} is an enhanced multi-frame image ({frames:.0f} frames): export single-frame slices")
    if not (one.text("PhotometricInterpretation") or "MONOCHROME").startswith("MONOCHROME"):
        raise ValueError(f"{name} is a colour image: choose a series of grey images")
    missing = [keyword for keyword, count in GEOMETRY.items() if not one.numbers(keyword, count)]
    if missing:
        raise ValueError(f"{name} lacks {', '.join(missing)} as numbers: truncated, or no slice; export it again")
    sizes = {keyword: one.numbers(keyword, count) for keyword, count in SIZES.items()}
    if min(map(min, sizes.values())) <= 0:
        raise ValueError(f"{name} has {sizes}, each must be above 0: export it again")
    if not any(_scale(one)[:1]):
        raise ValueError(f"{name} lacks a usable RescaleSlope and RescaleIntercept: export it again")
    syntax = UID(ask_pydicom(lambda: str(one.header.file_meta.TransferSyntaxUID), ""))
    if not ask_pydicom(lambda: get_decoder(syntax).is_available, False):
        said = "unknown" if syntax.name == syntax else syntax.name
        raise ValueError(f"{name} has transfer syntax {said}, which cannot be decoded: export it uncompressed")


def _check_alike(name: str, slices: Sequence[DicomSlice]) -> None:
    """Refuse slices of another size, spacing or direction than the first."""
    for one in slices[1:]:
        for keyword in ("Rows", "Columns", "PixelSpacing", "ImageOrientationPatient"):
            due, found = (np.array(each.numbers(keyword, GEOMETRY[keyword])) for each in (slices[0], one))
            if np.abs(due - found).max() > MAX_TURN:
                said = f"{slices[0].name} has {keyword} {due.tolist()}, {one.name} has {found.tolist()}"
                raise ValueError(f"{name} mixes stacks: {said} (at most {MAX_TURN} apart); export each by itself")


def _check_regular(name: str, slices: Sequence[DicomSlice], positions: np.ndarray, along: np.ndarray) -> None:
    """Refuse slices at one place, gaps, and slices off the regular grid; `along` is mm along the normal, ascending."""
    steps = np.diff(along)
    usual = float(np.median(steps[steps > MIN_STEP])) if steps.max() > MIN_STEP else math.inf
    same, gaps = np.flatnonzero(steps <= MIN_STEP).tolist(), np.flatnonzero(steps > MAX_GAP * usual).tolist()
    ends = [f"{one.name} at {place:.2f} mm" for one, place in zip(slices, along, strict=True)]
    places = [f"{ends[place]} and {ends[place + 1]}" for place in same or gaps]
    said = "; ".join(places[:NAMED] + [f"and {len(places) - NAMED} more"] * (len(places) > NAMED))
    if same:
        found = f"{len(slices)} slices lie at {len(slices) - len(same)} positions ({said})"
        raise ValueError(f"{name}: {found}: several phases or echoes in one series; export each by itself")
    if gaps:
        found = f"slices are missing between {said}, others lie {usual:.2f} mm apart (bound: {MAX_GAP} times that)"
        raise ValueError(f"{name}: {found}: copy the whole series")
    off = np.linalg.norm(positions - np.linspace(positions[0], positions[-1], len(positions)), axis=1)
    if off.max() > MAX_OFF_GRID * usual:
        found = f"{slices[int(off.argmax())].name} lies {off.max():.2f} mm off the regular grid"
        raise ValueError(f"{name}: {found} (at most {MAX_OFF_GRID * usual:.2f}): export it evenly spaced")


def _scale(one: DicomSlice) -> tuple[float, ...]:
    """Return RescaleSlope and RescaleIntercept; 1 and 0 where a modality may go without, () where they are unusable."""
    tags = ("RescaleSlope", "RescaleIntercept", "ModalityLUTSequence")
    if one.text("Modality") not in SCALED and not any(keyword in one.header for keyword in tags):
        return 1.0, 0.0
    found = tuple(number for keyword in tags[:2] for number in one.numbers(keyword, 1))
    return found if len(found) == 2 and tags[2] not in one.header else ()


def _decode(name: str, one: DicomSlice) -> np.ndarray:
    """Return the stored values of a slice, [Y, X], any integer type."""
    due = tuple(int(one.numbers(keyword, 1)[0]) for keyword in ("Rows", "Columns"))
    pixels = ask_pydicom(lambda: _pixels(one.path, due), None)
    if pixels is None or pixels.shape != due:
        raise ValueError(f"{name}: the pixel data of {one.name} are missing, truncated or damaged: copy it again")
    return pixels


def _pixels(path: Path, due: tuple[int, ...]) -> np.ndarray:
    """Return what the decoders make of a file."""
    image: Any = pydicom.dcmread(io.BytesIO(path.read_bytes()))
    if image.file_meta.TransferSyntaxUID in (JPEG2000, JPEG2000Lossless):  # GDCM would hold Python's lock
        pixels = np.asarray(imagecodecs.jpeg2k_decode(get_frame(image.PixelData, 0, number_of_frames=1)))
        if pixels.shape == due and (pixels.dtype.kind == "i") == bool(image.PixelRepresentation):
            return pixels
    return np.asarray(image.pixel_array)


def _rescaled(frames: Sequence[np.ndarray], scales: Sequence[tuple[float, ...]]) -> np.ndarray:
    """Return stored values [Y, X] times slope plus intercept as [X, Y, Z], Fortran order, int16 if exact or float32."""
    pairs = list(zip(frames, scales, strict=True))
    ends = [float(end) * slope + shift for frame, (slope, shift) in pairs for end in (frame.min(), frame.max())]
    exact = min(ends) >= -(2**15) and max(ends) < 2**15 and all(value.is_integer() for both in scales for value in both)
    voxels = np.empty((*frames[0].shape[::-1], len(frames)), np.int16 if exact else np.float32, order="F")
    for plane, (frame, (slope, shift)) in zip(voxels.T, pairs, strict=True):
        plane[:] = frame * np.float64(slope) + shift
    return voxels
