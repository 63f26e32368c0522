"""Write label maps: NIfTI, NRRD or MetaImage, whatever the name says."""

import math
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from isal import isal_zlib

from medspeed.common.data.headers import HEADER_BYTES
from medspeed.common.files import atomic_path

_MEMBER = 2**22  # bytes of voxels in one member of a gzip file
_TO_LPS = np.array([-1.0, -1.0, 1.0])


def write_label(path: Path, labels: np.ndarray, affine: np.ndarray) -> None:
    """Write a label map [X, Y, Z] uint8 as .nii.gz, .nii, .nrrd or .mha, atomically; Fortran order is the fastest.

    The gzip members of NIfTI are compressed in threads; of several in NRRD pynrrd would read only the first. The affine
    [4, 4], voxel index to RAS mm, is a NIfTI file's sform, and also its qform if it has no shear.
    """
    assert labels.dtype == np.uint8, labels.dtype
    ending, voxels = path.suffix.lower(), labels.ravel(order="F")
    parts: list[Any] = [voxels[first : first + _MEMBER] for first in range(0, len(voxels), _MEMBER)]
    header = b""
    if ending == ".nrrd":
        parts, header = [voxels], _nrrd_header(labels.shape, affine)
    elif ending == ".mha":
        parts = [isal_zlib.compress(voxels, level=1)]
        header = _meta_header(labels.shape, affine, len(parts[0]))
    else:
        parts.insert(0, _nifti_header(labels, affine))
    threads = min(len(parts), len(os.sched_getaffinity(0)))
    with atomic_path(path) as part, part.open("wb") as file, ThreadPoolExecutor(threads) as pool:
        file.write(header)
        file.writelines(pool.map(gzipped, parts) if ending in (".gz", ".nrrd") else parts)


def _nifti_header(labels: np.ndarray, affine: np.ndarray) -> bytes:
    header = nibabel.Nifti1Image(labels, affine).header
    header.set_xyzt_units("mm")
    header.set_sform(affine, code="scanner")
    header.set_qform(affine, code="scanner")  # nibabel drops shear here: then the qform must not count
    if not np.allclose(header.get_qform(), affine, rtol=1e-4, atol=1e-3):
        header["qform_code"] = 0
    header.set_data_offset(HEADER_BYTES + 4)
    header.set_slope_inter(1, 0)
    block: bytes = header.binaryblock
    return block.ljust(HEADER_BYTES + 4, b"\0")


def _nrrd_header(shape: tuple[int, ...], affine: np.ndarray) -> bytes:
    *vectors, origin = (f"({_row((_TO_LPS * column).tolist(), ',')})" for column in affine[:3].T)
    return (
        f"NRRD0004\ntype: uint8\ndimension: 3\nspace: left-posterior-superior\nsizes: {_row(shape)}\n"
        f"space directions: {' '.join(vectors)}\nkinds: domain domain domain\nencoding: gzip\n"
        f"space origin: {origin}\n\n"
    ).encode()


def _meta_header(shape: tuple[int, ...], affine: np.ndarray, packed_bytes: int) -> bytes:
    *vectors, origin = ((_TO_LPS * column).tolist() for column in affine[:3].T)
    spacing = [math.hypot(*vector) for vector in vectors]
    turn = [number / side for vector, side in zip(vectors, spacing, strict=True) for number in vector]
    return (
        "ObjectType = Image\nNDims = 3\nBinaryData = True\nBinaryDataByteOrderMSB = False\nCompressedData = True\n"
        f"CompressedDataSize = {packed_bytes}\nTransformMatrix = {_row(turn)}\nOffset = {_row(origin)}\n"
        f"ElementSpacing = {_row(spacing)}\nDimSize = {_row(shape)}\nElementType = MET_UCHAR\nElementDataFile = LOCAL\n"
    ).encode()


def _row(numbers: Iterable[float], between: str = " ") -> str:
    return between.join(map(repr, numbers))


def gzipped(content: bytes | np.ndarray) -> bytes:
    """Return a gzip member without time and name; isal 1.9.1 now and then finds other matches in the same bytes."""
    return isal_zlib.compress(content, level=1, wbits=31)
