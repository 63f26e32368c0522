"""Write label maps: NIfTI, NRRD or MetaImage, whatever the name says."""

import io
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from isal import isal_zlib

from medspeed.common.data.text_headers import label_header
from medspeed.common.data.volumes import HEADER_BYTES
from medspeed.common.files import atomic_path

_MEMBER = 2**22  # bytes of voxels in one member of a gzip file


def write_label(path: Path, labels: np.ndarray, affine: np.ndarray) -> None:
    """Write a label map [X, Y, Z] uint8 as .nii.gz, .nii, .nrrd or .mha, atomically; Fortran order is the fastest.

    The gzip members are compressed in threads; their number does not change the bytes of the file.

    The affine [4, 4], voxel index to RAS mm, is stored as sform, and also as qform if it has no shear.
    """
    assert labels.dtype == np.uint8, labels.dtype
    ending, voxels = path.suffix.lower(), labels.ravel(order="F")
    members = [voxels[first : first + _MEMBER] for first in range(0, len(voxels), _MEMBER)]
    if ending == ".mha":
        packer = isal_zlib.compressobj(level=1, wbits=15)
        packed = packer.compress(voxels) + packer.flush()
        parts: list[Any] = [label_header(ending, labels.shape, affine, len(packed)), packed]
    else:
        parts = [label_header(ending, labels.shape, affine, 0) if ending == ".nrrd" else _nifti_header(labels, affine)]
        parts += members
    threads = min(len(parts), len(os.sched_getaffinity(0)))
    with atomic_path(path) as part, part.open("wb") as file, ThreadPoolExecutor(threads) as pool:
        if ending == ".nrrd":
            file.write(parts.pop(0))
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
    stored = io.BytesIO()
    header.write_to(stored)
    return stored.getvalue().ljust(HEADER_BYTES + 4, b"\0")


def gzipped(content: bytes | np.ndarray) -> bytes:
    """Return a gzip member without time and name, so that equal input gives equal bytes."""
    # igzip.compress now and then finds other matches in the same bytes in a new thread (isal 1.9.1).
    member = isal_zlib.compressobj(level=1, wbits=31)
    return member.compress(content) + member.flush()
