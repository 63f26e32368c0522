"""What there is to segment: NIfTI files and DICOM series, found and read in the same way, and the memory they take."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from common.clock import free_memory
from common.data.dicom import DicomSeries, find_series, read_series
from common.data.volumes import Volume, read_header, read_volume
from common.inference.folder_job import BAD_INPUT, IN_FLIGHT
from common.inference.model import VolumeModel

Scan = Path | DicomSeries

_SUFFIXES = (".nii.gz", ".nii")
# Of the memory that a scan takes, in bytes:
_DECODED = 8  # a voxel and channel of the file: as float32, and the file's own numbers that it is made from
_NATIVE = 20  # a voxel of the file: labels, masks and numbered parts, interpolated logits
_STRUCTURE = 2  # a voxel of a series and structure: the masks of the DICOM-SEG
_WORKING = 12  # a voxel and channel of the working grid: resampled, normalised, padded
_LOGITS = 8  # a voxel and channel of the output: the sum over windows, and what is interpolated from it


def find_scans(path: Path) -> list[Scan]:
    """Return a NIfTI file; or those of a folder: its NIfTI files, or the DICOM series in and below it.

    What lies beside the volumes of a DICOM study (scouts, single images, screen captures) is left out with a word.

    Raises:
        FileNotFoundError: there is none.
        ValueError: two files have one name but for the suffix, or the folder holds both kinds.
    """
    if path.is_file():
        return [path]
    files = sorted(file for file in path.glob("*.nii*") if file.name.endswith(_SUFFIXES) and file.name[0] != ".")
    stems = Counter(stem_of(file) for file in files)
    if twice := [file.name for file in files if stems[stem_of(file)] > 1]:
        raise ValueError(f"{path}: {' and '.join(twice[:4])} would share their outputs: rename or remove one")
    found = find_series(path) if path.is_dir() else ()
    for series in found:
        if not series.is_volume:
            tqdm.write(f"{series.name}: left out, no volume: {series.problem or series.modality}")
    volumes = [series for series in found if series.is_volume]
    if files and volumes:
        # Without the path: folders of DICOM studies are often named after patients.
        raise ValueError(
            f"--input: {len(files)} NIfTI files and {len(volumes)} DICOM series: give a folder of one kind"
        )
    if not files and not volumes:
        raise FileNotFoundError(
            f"{path}: no such file, or a folder without .nii.gz or .nii files and without DICOM series"
        )
    return [*files, *volumes]


def read_scan(scan: Scan, channels: int) -> Volume:
    """Read the voxels of a scan, [X, Y, Z] or, of several channels, [X, Y, Z, C].

    Raises:
        FileNotFoundError, ValueError: as `read_volume` and `read_series`; a series has one channel.
    """
    if isinstance(scan, Path):
        return read_volume(scan, channels)
    if channels > 1:
        raise ValueError(
            f"{scan.name}: a DICOM series has one channel, the model takes {channels}: put its series into one 4-D "
            "NIfTI file"
        )
    try:
        return read_series(scan)
    except OSError as error:  # its message would hold the path, and with it perhaps the patient's name
        raise ValueError(f"{scan.name}: a file cannot be read ({error.strerror}): copy it again") from None


def stem_of(scan: Scan) -> str:
    """Return the name without the suffix of a NIfTI file."""
    return next((scan.name.removesuffix(end) for end in _SUFFIXES if scan.name.endswith(end)), scan.name)


def scan_bytes(scan: Scan, model: VolumeModel) -> tuple[int, int]:
    """Return upper bounds of the bytes that a scan takes, on the host and where its windows are computed.

    From its header; what the network itself takes for a batch of windows is not counted.

    Raises:
        FileNotFoundError, ValueError: its header cannot be read.
    """
    if isinstance(scan, DicomSeries):
        shape: Sequence[int] = scan.shape
        voxel, segments = scan.voxel, len(model.labelling.regions)
    else:
        shape, affine = read_header(scan)
        voxel, segments = abs(float(np.linalg.det(affine[:3, :3]))), 0
    voxels, channels = math.prod(shape[:3]), math.prod(shape[3:])
    finer = 1.0 if math.isnan(voxel) else voxel / math.prod(model.preparation.spacing)
    working = max(voxels * finer, math.prod(model.window_size))
    host = voxels * (_DECODED * channels + _NATIVE + _STRUCTURE * segments)
    return host, int(working * (_WORKING * channels + _LOGITS * model.labelling.channels))


def say_plan(scans: Sequence[Scan], model: VolumeModel, device: torch.device) -> None:
    """Say how much memory the scans will take at most, as many in flight as there are; warn where there is less."""
    host, working, largest = most_bytes(scans, model)
    gpu = device.type == "cuda"
    needs = {"host": (host if gpu else host + working, free_memory())}
    if gpu:
        needs[str(device)] = working, int(torch.cuda.mem_get_info(device)[0])
    words = [
        f"{needed / 2**30:.1f} of {free / 2**30:.1f} GiB free on the {name}" for name, (needed, free) in needs.items()
    ]
    tqdm.write(
        f"plan: at most {IN_FLIGHT} scans in memory (the largest is {largest}): at most {', '.join(words)}, besides "
        "what the network takes for a batch of windows"
    )
    if any(needed > free for needed, free in needs.values()):
        tqdm.write("WARNING: that may be more than there is; segment the largest scans one by one, or on another host")


def most_bytes(scans: Sequence[Scan], model: VolumeModel) -> tuple[int, int, str]:
    """Return the bytes on the host of the largest scans in flight at once, those on the device of one, and its name.

    Scans that cannot be read count as nothing: they will be set aside.
    """
    found = []
    for scan in scans:
        try:
            found.append((*scan_bytes(scan, model), scan.name))
        except BAD_INPUT:
            continue
    host = sorted((each[0] for each in found), reverse=True)[:IN_FLIGHT]
    _, working, name = max(found, key=lambda each: each[1], default=(0, 0, ""))
    return sum(host), working, name
