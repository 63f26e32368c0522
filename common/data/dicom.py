"""DICOM series in: found by their headers, checked slice by slice, read as one volume; no patient is ever named.

A series goes by an alias, a slice by its InstanceNumber. The series of an MRI study are the channels of one scan.
"""

import hashlib
import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from medspeed.common.data.dicom_slices import (
    Slice,
    check_image,
    decode_slice,
    quiet_dicom,
    read_slice,
    scale_of,
    sequence_of,
)
from medspeed.common.data.threads import map_in_threads
from medspeed.common.data.volumes import ALWAYS_TRIED, Volume, check_affine, check_same_grid
from medspeed.common.files import files_below
from medspeed.common.host_memory import free_memory

MAX_OFF_GRID = 0.1  # of the slice spacing: how far a slice may lie from its place on a regular grid
MAX_TURN = 1e-3  # by how much direction cosines and mm of PixelSpacing may differ; scanners round them
MIN_STEP = 0.01  # mm: slices nearer than this share a place


@dataclass(frozen=True)
class DicomSeries:
    """A series of single-frame DICOM images, as its headers tell of it, or those of a study as channels of one scan."""

    name: str  # "series-" and 12 hexadecimal digits of the SHA-256 of the SeriesInstanceUID; of a scan the study's
    files: tuple[Path, ...]  # its slices, along the normal as they become Z, or as found where there is a problem
    shape: tuple[int, int, int]  # X (columns), Y (rows), Z (slices); 0 where the headers do not tell
    modality: str  # "CT", "MR", ...; "OT" (other) where the headers do not tell
    notes: tuple[str, ...]  # what the user should know, without identifiers
    problem: str  # why `read_series` refuses it; "" where the headers show no reason
    voxel: float  # volume of a voxel in mm^3; not-a-number where there is a problem
    is_volume: bool  # whether it could be one, not a scout, a single image or a screen capture
    study: str = ""  # likewise "study-" and 12 digits, of the StudyInstanceUID
    sequence: str = ""  # what it is called in MRI (see `sequence_of`); "" where nothing tells
    frame: str = ""  # likewise "frame-" and 12 digits, of the FrameOfReferenceUID
    channels: tuple["DicomSeries", ...] = ()  # series of which it is the scan, which is else like the first of them


def find_series(folder: Path) -> tuple[DicomSeries, ...]:
    """Return the image series of a folder and its subfolders, sorted by name; headers are read, pixels are not.

    Other files, DICOMDIR and objects that are no images are left out; files with a broken header are counted in a log.
    """
    quiet_dicom()
    slices = [one for one in map_in_threads(read_slice, sorted(files_below(folder))) if one]
    known = [one for one in slices if one.text("SOPClassUID") and one.text("SeriesInstanceUID")]
    groups: dict[str, list[Slice]] = {}
    for one in known:
        if "Image Storage" in one.kind:
            groups.setdefault(one.text("SeriesInstanceUID"), []).append(one)
    pixels = [one for one in known if one.numbers("Rows") and "Image Storage" not in one.kind]  # its class is damaged
    if lost := len(slices) - len(known) + sum(one.text("SeriesInstanceUID") in groups for one in pixels):
        said = "skipped %d files that are empty, or damaged DICOM: copy them again if their series should be longer"
        logging.getLogger(__name__).warning(said, lost)
    return tuple(sorted((_describe(*group) for group in groups.items()), key=lambda one: one.name))


def read_series(series: DicomSeries) -> Volume:
    """Decode a series, several slices at a time, or the channels of a scan.

    Returns:
        Voxels [X, Y, Z] or [X, Y, Z, C] in Fortran order, rescaled (HU for CT): int16 where slope and intercept are
        whole numbers and all values fit, else float32. The affine is sheared where the gantry was tilted.

    Raises:
        ValueError: it is no regular stack of grey images, its channels lie on several grids, or pixel data are broken.
            Its alias, slices, values and the remedy are named.
    """
    if series.problem:
        raise ValueError(f"{series.name}: {series.problem}")
    if series.channels:
        return _read_channels(series)
    slices = [one for one in map(read_slice, series.files) if one and one.text("SOPClassUID")]
    try:
        if lost := len(series.files) - len(slices):
            raise ValueError(f"{lost} of {len(series.files)} files can no longer be read: copy them again")
        slices, affine, _ = _stack(slices)
        x, y, z = series.shape
        needed = 8 * x * y * z  # stored values of 4 bytes at most, and float32
        if needed > max(free := free_memory(needed), ALWAYS_TRIED):
            said = f"its {x} x {y} x {z} voxels need {x * y * z / 2**27:.1f} GiB of memory, {free / 2**30:.1f} are free"
            raise ValueError(f"{said}: export fewer slices, or use a machine with more memory")
        voxels = _rescaled(map_in_threads(decode_slice, slices), [scale_of(one) for one in slices])
    except ValueError as error:
        raise ValueError(f"{series.name}: {error}") from None
    return Volume(voxels, affine, Path(series.name))


def group_channels(found: Sequence[DicomSeries], channels: Sequence[str]) -> tuple[DicomSeries, ...]:
    """Return a scan of each study (StudyInstanceUID): of its series those that are the channels, in their order.

    A series is the channel that its SeriesDescription names, or else its folder: t1, t1ce (T1 with contrast), t2 or
    flair. A scan with a channel that no series or several are has that as its problem.

    Raises:
        ValueError: the channels are not such, each once.
    """
    wanted = [sequence_of(name) for name in channels]
    if not wanted or "" in wanted or len(set(wanted)) < len(wanted):
        said = "DICOM series are matched to t1, t1ce, t2 and flair, each once; combine the series into a 4-D NIfTI"
        raise ValueError(f"the model's channels ({', '.join(channels)}): {said}")
    studies: dict[str, list[DicomSeries]] = {}
    for series in found:
        studies.setdefault(series.study, []).append(series)
    return tuple(_scan(*study, wanted) for study in sorted(studies.items()))


def _scan(study: str, series: Sequence[DicomSeries], wanted: Sequence[str]) -> DicomSeries:
    named = {name: [each for each in series if each.sequence == name] for name in wanted}
    names = {name: " and ".join(one.name for one in each) or "none" for name, each in named.items()}
    unclear = [f"{name}: {names[name]}" for name, each in named.items() if len(each) != 1]
    parts = tuple(each[0] for each in named.values() if each)
    problems = [f"{each.name}: {each.problem}" for each in parts if each.problem]
    if unclear:
        said = f"of its {len(series)} series, {'; '.join(unclear)}; each channel must match exactly one"
        problems = [f"{said}: name them in SeriesDescription or folders, leave out the others, or write a 4-D NIfTI"]
    clear = [f"{name} {names[name]}" for name, each in named.items() if len(each) == 1]
    notes = [f"channels: {', '.join(clear)}"] if clear else []
    if len({each.frame for each in parts}) > 1:
        notes.append("the channels have several frames of reference: are they registered, and of one patient?")
    notes += [f"{each.name}: {note}" for each in parts for note in each.notes]
    if left := len(series) - sum(map(len, named.values())):
        notes.append(f"{left} other series of the study left out")
    return replace((*parts, *series)[0], name=study, channels=parts, problem="; ".join(problems), notes=tuple(notes))


def _read_channels(scan: DicomSeries) -> Volume:
    first, *others = parts = [read_series(each) for each in scan.channels]
    try:
        for other in others:
            check_same_grid(first, other)
    except ValueError:
        names = ", ".join(each.name for each in scan.channels)
        raise ValueError(f"{scan.name}: {names} are not on one grid: register and resample them first") from None
    voxels = np.stack([part.voxels.T for part in parts]).T  # in Fortran order, as each part is
    return Volume(voxels, first.affine, Path(scan.name))


def _describe(uid: str, slices: list[Slice]) -> DicomSeries:
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
    places = {one.text("ImagePositionPatient") for one in images}
    kinds = " ".join(one.kind for one in images if one.text("PhotometricInterpretation").startswith("MONOCHROME"))
    count = len(re.findall(r"\b(CT|MR|PET|Positron Emission Tomography) Image", kinds))
    unplaced = places == {""} and count + ("Enhanced" in kinds) > 1  # to be refused, not passed over
    x, y = (int(sum(slices[0].numbers(keyword))) for keyword in ("Columns", "Rows"))
    modality = slices[0].text("Modality") if re.fullmatch("[A-Z]{2,16}", slices[0].text("Modality")) else "OT"
    size, files = (x, y, len(slices)), tuple(one.path for one in slices)
    is_volume = (len(places) > 1 or unplaced) and not captured
    frame = _alias("frame", slices[0].text("FrameOfReferenceUID"))
    return DicomSeries(name, files, size, modality, notes, problem, voxel, is_volume, study, sequence, frame)


def _alias(kind: str, uid: str) -> str:
    return f"{kind}-{hashlib.sha256(uid.encode()).hexdigest()[:12]}"


def _stack(slices: list[Slice]) -> tuple[list[Slice], np.ndarray, tuple[str, ...]]:
    """Return the slices in order, the affine and notes; ValueError where they are no regular stack of grey images."""
    for one in slices:
        check_image(one)
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
    if (several := len({one.text("FrameOfReferenceUID") for one in slices} - {""})) > 1:
        said = f"its slices have {several} frames of reference (FrameOfReferenceUID)"
        raise ValueError(f"{said}: export each separately, or convert to NIfTI if they are one scan")
    units = {one.text("RescaleType").strip().upper() for one in slices} - {"", "HU", "US"}
    said = "RescaleType says that its values are not HU: is it the right series?"
    notes = [said] if units and first.text("Modality") == "CT" else []
    distance = float(step @ normal)
    tilt = np.degrees(np.arctan2(np.linalg.norm(step - distance * normal), distance))
    if tilt > 0.1:  # less comes from rounded positions
        notes.append(f"gantry tilt of {tilt:.1f} degrees shears the affine; ITK does not read it: use the DICOM-SEG")
    thickness = sum(first.numbers("SliceThickness"))
    if thickness and abs(thickness - distance) > MIN_STEP:
        notes.append(f"SliceThickness is {thickness:g} mm but slices are {distance:g} mm apart; the distance is used")
    check_affine(affine)
    return slices, np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine, tuple(notes)  # DICOM's LPS to RAS


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
