"""The memory that scans take while they are segmented: of each one, and of all that are in memory at once."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from medspeed.common.console import say
from medspeed.common.data.dicom import DicomSeries
from medspeed.common.data.volumes import read_header
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


def say_plan(scans: Sequence[Scan], model: VolumeModel, device: torch.device, in_flight: int, room: int) -> None:
    """Say how much memory the scans will take at most; warn where there is less. For the rest see `most_bytes`."""
    host, working = most_bytes(scans, model, in_flight, room)
    gpu = device.type == "cuda"
    needs = {"host": (host if gpu else host + working, free_memory())}
    if gpu:
        needs[str(device)] = working, torch.cuda.mem_get_info(device)[0]
    words = [f"{need / 2**30:.1f} of {free / 2**30:.1f} GiB free on the {name}" for name, (need, free) in needs.items()]
    say(f"memory: at most {in_flight} scans at a time, {', '.join(words)}, plus a batch of windows")
    if any(need > free for need, free in needs.values()):
        text = "WARNING: that may exceed the free memory; segment the largest scans one at a time, or on another host"
        say(text, "warning")


def most_bytes(scans: Sequence[Scan], model: VolumeModel, in_flight: int, room: int) -> tuple[int, int]:
    """Return the bytes on the host of the scans in memory at once, and those on the device of one, at most.

    Args:
        scans: all of them.
        model: what they are segmented with.
        in_flight: scans in memory at once, at most.
        room: bytes that they may take; one scan may take more.
    """
    host, working = zip(*(scan_bytes(scan, model) for scan in scans), strict=True) if scans else ((0,), (0,))
    return max(max(host), min(room, sum(sorted(host)[-in_flight:]))), max(working)


def scan_bytes(scan: Scan, model: VolumeModel) -> tuple[int, int]:
    """Return the bytes that a scan takes on the host, and those on the device while it is computed.

    They are upper bounds from the header, without what the network takes for a batch of windows. A scan that cannot be
    read counts as nothing: it will be set aside.
    """
    try:
        if isinstance(scan, DicomSeries):
            shape, voxel = [*scan.shape, max(1, len(scan.channels))], scan.voxel
        else:
            sides, affine = read_header(scan)
            shape, voxel = list(sides), abs(float(np.linalg.det(affine[:3, :3])))
        voxels, channels = math.prod(shape[:3]), math.prod(shape[3:])
        fine = max(int(voxels * voxel / math.prod(model.preparation.spacing)), math.prod(model.window_size))
    except (*BAD_INPUT, ArithmeticError):
        return 0, 0
    host = voxels * (_DECODED * channels + _NATIVE + _STRUCTURE * len(model.labelling.regions))
    return host, fine * (_WORKING * channels + _LOGITS * model.labelling.channels)
