"""The scans of an input: volumes in files, or DICOM series; found, read, and the memory that they take."""

import math
import re
import resource
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from medspeed.common.console import say
from medspeed.common.data.dataset import SUFFIXES, stem_of
from medspeed.common.data.dicom import DicomSeries, find_series, group_channels, read_series
from medspeed.common.data.volumes import Volume, read_header, read_volume
from medspeed.common.files import plural, printable
from medspeed.common.host_memory import free_memory
from medspeed.common.inference.folder_job import BAD_INPUT
from medspeed.common.inference.model import VolumeModel

Scan = Path | DicomSeries

# Of the memory that a scan takes, in bytes:
_DECODED = 8  # a voxel and channel of the file: as float32, and the file's own numbers that it is made from
_NATIVE = 20  # a voxel of the file: labels, masks and numbered parts, interpolated logits
_STRUCTURE = 2  # a voxel of the file and structure: the masks of a DICOM-SEG
_WORKING = 12  # a voxel and channel of the working grid: resampled, normalised, padded
_LOGITS = 8  # a voxel and channel of the output: the sum over windows, and what is interpolated from it


def find_scans(path: Path, channels: int = 1, names: Sequence[str] = ()) -> list[Scan]:
    """Return a file; or those of a folder: its NIfTI, NRRD and MetaImage files, or the DICOM series in and below it.

    For a model of several channels, whose names are given, the series of a study become one scan.

    Raises:
        FileNotFoundError: there is none.
        ValueError: two files have one name but for the suffix, or the folder holds both kinds.
    """
    if path.is_file():
        return [path]
    files = [*(named := volume_files(path)).values()]
    found = find_series(path) if path.is_dir() else ()
    for series in found:
        if not series.is_volume:
            say(printable(f"{series.name}: skipped, not a volume: {series.problem or series.modality}"))
    volumes = [series for series in found if series.is_volume]
    if files and volumes:  # without the path: folders of DICOM studies are often named after patients
        both = f"{plural(len(files), 'volume file')} and {len(volumes)} DICOM series"
        raise ValueError(f"--input: found {both}; expected one kind")
    if not volumes:  # these fail, with why
        headers = (each for each in path.glob("[!.]*") if each.suffix.lower() in (".mhd", ".nhdr", ".hdr"))
        files += sorted(file for file in headers if file.is_file() and file.stem not in named)
    if not files and not volumes:
        suffixes = ", ".join(SUFFIXES)
        raise FileNotFoundError(f"{path}: no such file, or a folder without {suffixes} files or DICOM series")
    return [*files, *(group_channels(volumes, names) if volumes and channels > 1 else volumes)]


def volume_files(folder: Path) -> dict[str, Path]:
    """Return the NIfTI, NRRD and MetaImage files of a folder by name without suffix; a ValueError if two have one."""
    files = sorted(each for each in folder.glob("[!.]*") if each.name.lower().endswith(SUFFIXES) and not each.is_dir())
    stems = Counter(stem_of(file.name) for file in files)
    if twice := [file.name for file in files if stems[stem_of(file.name)] > 1]:
        raise ValueError(f"{folder}: {' and '.join(twice[:4])} have one name but for the suffix: rename or remove one")
    return {stem_of(file.name): file for file in files}


def read_scan(scan: Scan, channels: int) -> Volume:
    """Read the voxels of a scan, [X, Y, Z] or, of several channels, [X, Y, Z, C]; see `read_volume`, `read_series`."""
    if isinstance(scan, Path):
        return read_volume(scan, channels)
    if channels != max(1, len(scan.channels)) and not scan.problem:
        raise ValueError(f"{scan.name}: one channel, the model expects {channels}: combine the series into a 4-D NIfTI")
    try:
        return read_series(scan)
    except OSError as error:  # its message would hold the path, and with it perhaps the patient's name
        raise ValueError(f"{scan.name}: a file cannot be read ({error.strerror}): copy it again") from None


def say_plan(
    scans: Sequence[Scan], model: VolumeModel, device: torch.device, in_flight: int, room: int
) -> tuple[int, int]:
    """Say how many bytes the scans take at most, warn where fewer are free, and return those of host and device.

    On the host are so many scans at once, of so many bytes (`room`), or one that takes more; on the device is one.
    """
    taken, working = zip(*(scan_bytes(scan, model) for scan in scans), strict=True)
    host, computed, gpu = max(*taken, min(room, sum(sorted(taken)[-in_flight:]))), max(working), device.type == "cuda"
    left = torch.cuda.mem_get_info(device)[0] if gpu else 0
    needs = {"host": (host + computed * (computed > left), free_memory())}
    if gpu:  # what does not fit there is on the host: see `with_room`
        needs[str(device)] = computed, left
    words = [f"{need / 2**30:.1f} GiB ({free / 2**30:.1f} free) on the {name}" for name, (need, free) in needs.items()]
    say(f"memory: at most {in_flight} scans at a time, {', '.join(words)}, plus a batch of windows")
    if needs["host"][0] > needs["host"][1]:
        text = "WARNING: that may exceed the free memory; segment the largest scans one at a time, or on another host"
        say(text, "warning")
    return host, computed


def scan_bytes(scan: Scan, model: VolumeModel) -> tuple[int, int]:
    """Return the bytes that a scan takes on the host, and those on the device while it is computed.

    They are upper bounds from the header, without a batch of windows. A scan that cannot be read counts as nothing.
    """
    try:
        if isinstance(scan, DicomSeries):
            shape, voxel = [*scan.shape, max(1, len(scan.channels))], scan.voxel
        else:
            header = read_header(scan)
            shape, voxel = list(header.shape), abs(float(np.linalg.det(header.affine[:3, :3])))
        voxels, channels = math.prod(shape[:3]), math.prod(shape[3:])
        fine = max(int(voxels * voxel / math.prod(model.preparation.spacing)), math.prod(model.window_size))
    except (*BAD_INPUT, ArithmeticError):
        return 0, 0
    host = voxels * (_DECODED * channels + _NATIVE + _STRUCTURE * len(model.labelling.regions))
    return host, fine * (_WORKING * channels + _LOGITS * model.labelling.channels)


def peak_memory() -> int:
    """Return the most memory that this process has had at once, bytes (its resident set).

    Linux hands getrusage's figure on to children, which would begin with the peak of the process that started them.
    """
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s*(\d+)", status.read_text()) if status.is_file() else None  # a sandbox may leave it out
    return 1024 * (int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
