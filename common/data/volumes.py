"""Read NIfTI, NRRD and MetaImage files: one decompression pass, voxels in file order, clear errors for broken files."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import nibabel
import numpy as np
from isal import igzip
from nibabel.spatialimages import HeaderDataError
from nibabel.volumeutils import apply_read_scaling

from medspeed.common.data.streams import (
    MAX_GZIP_RATIO,
    MAX_PADDING,
    Stream,
    ZlibStream,
    read_exactly,
    take_voxels,
    undamaged,
)
from medspeed.common.data.text_headers import ENDINGS, TextHeader, read_text_header
from medspeed.common.host_memory import free_memory

HEADER_BYTES = 348
GZIP_MAGIC = b"\x1f\x8b"
ALWAYS_TRIED = 2**30  # bytes: what the process freed and keeps (`host_memory.keep_freed_memory`) does not count as free
MIN_SIDE, MAX_SIDE = 0.01, 100  # mm, of a voxel; as of `--spacing`
MAX_ORIGIN = 1e5  # mm from a scanner's centre
MAX_DISAGREEMENT = 0.25  # of pixdim; the slices of a tilted gantry lie 15 percent further apart along the shear
MAX_GRID_DISTANCE = 0.1  # of the smallest spacing: how far image and label may lie apart at a corner
_DATATYPES = (2, 4, 8, 16, 64, 256, 512, 768, 1024, 1280)  # integers and floats of 1 to 8 bytes. Source: nifti1.h


@dataclass(frozen=True)
class Volume:
    """A file in memory.

    Attributes:
        voxels: [X, Y, Z] or [X, Y, Z, C] in the file's axes and dtype (float32 where the file scales its values),
            Fortran order as in the file, native byte order.
        affine: [4, 4] float64, voxel index to RAS mm (sform before qform, as nibabel reads it).
        path: The file.
    """

    voxels: np.ndarray
    affine: np.ndarray
    path: Path

    @property
    def voxel_ml(self) -> float:
        """Volume of a voxel in ml."""
        return abs(float(np.linalg.det(self.affine[:3, :3]))) / 1000


def read_volume(path: Path, channels: int = 1, first_only: bool = False) -> Volume:
    """Read a .nii.gz, .nii, .nrrd or .mha file; the suffix may be upper or lower case.

    Args:
        path: The file.
        channels: 1 for a 3-D file; more for a 4-D file with that many volumes.
        first_only: Read only the first volume of a 4-D file, as [X, Y, Z, 1], which is faster; the rest of the file
            is not checked.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is empty, truncated, damaged or no such file; its shape, type, affine or spacing cannot be used;
            it has NaN or infinite voxels. The message names the file, what was expected and what was found.
    """
    if path.name.lower().endswith(ENDINGS):
        text = _text_header(path)
        affine = text.affine
        _check_channels(text.shape, channels, path)
        voxels = _read_text_voxels(text, path, first_only)
    else:
        with _open(path) as stream:
            header, shape, affine = _parse_header(stream, path)
            _check_channels(shape, channels, path)
            voxels = _read_voxels(stream, header, shape, path, first_only and len(shape) == 4)
        voxels = _scaled(voxels, header, path)
    if voxels.dtype.kind == "f" and not (finite := np.isfinite(voxels)).all():
        count = voxels.size - np.count_nonzero(finite)
        raise ValueError(f"{path}: {count} of {voxels.size} voxels are NaN or infinite: repair or drop it")
    return Volume(voxels, affine, path)


def read_header(path: Path) -> tuple[tuple[int, ...], np.ndarray]:
    """Return shape ([X, Y, Z] or [X, Y, Z, C]) and affine ([4, 4] float64) of a file without reading its voxels.

    Raises:
        FileNotFoundError, ValueError: as `read_volume`, for problems visible in the header.
    """
    if path.name.lower().endswith(ENDINGS):
        return (text := _text_header(path)).shape, text.affine
    with _open(path) as stream:
        return _parse_header(stream, path)[1:]


def _check_channels(shape: tuple[int, ...], channels: int, path: Path) -> None:
    if (shape[3] if len(shape) == 4 else 1) != channels:
        due = "3-D, one channel" if channels == 1 else f"4-D, {channels} channels last"
        raise ValueError(f"{path}: expected {due}, found {shape}: correct the file, or `modality` in dataset.json")


def _text_header(path: Path) -> TextHeader:
    header = read_text_header(path)
    check_affine(header.affine, f"{path}: ")
    return header


def _read_text_voxels(header: TextHeader, path: Path, first_only: bool) -> np.ndarray:
    """Read the voxels, [X, Y, Z] or [X, Y, Z, C], which follow a header of text."""
    with path.open("rb", buffering=0) as file, undamaged(path):
        _check_room(header.sizes, header.dtype, path, header.packed != "raw", header.offset)
        file.seek(header.offset)
        stream: Stream = file
        if header.packed != "raw":
            stream = ZlibStream(file) if header.packed == "zlib" else igzip.IGzipFile(fileobj=file, mode="rb")
        voxels = take_voxels(stream, header.dtype, header.sizes, path, whole=True)
    if header.channels is not None:
        voxels = np.moveaxis(voxels, header.channels, 3)[..., : 1 if first_only else None]
    return np.asfortranarray(voxels)


def check_affine(affine: np.ndarray, prefix: str = "") -> None:
    """Reject an affine [4, 4], voxel index to RAS mm, that no scanner produces.

    Raises:
        ValueError: it is singular or not finite, or its voxels are too small, too large or too far away; the message is
            the prefix, then the values and their bounds.
    """
    sides, origin = np.linalg.norm(affine[:3, :3], axis=0), affine[:3, 3]
    if not np.isfinite(affine).all() or abs(np.linalg.det(affine[:3, :3])) <= 1e-6 * sides.prod():
        raise ValueError(f"{prefix}the affine is singular or not finite, {affine.tolist()}: correct it with nibabel")
    if sides.min().round(6) < MIN_SIDE or sides.max().round(6) > MAX_SIDE:
        raise ValueError(f"{prefix}voxel size {_mm(sides)}, expected {MIN_SIDE} to {MAX_SIDE} mm: correct the header")
    if np.abs(origin).max() > MAX_ORIGIN:
        raise ValueError(f"{prefix}first voxel is at {_mm(origin)}, expected within {MAX_ORIGIN:g} mm: correct it")


def check_same_grid(image: Volume, label: Volume, kind: str = "image") -> None:
    """Refuse a label that does not lie voxel on voxel on its image, or on what else `kind` says.

    Raises:
        ValueError: the shapes differ, or corners are over a tenth of a voxel apart; shows files, shapes and affines.
    """
    shape = image.voxels.shape[:3]
    corners = np.array([[x, y, z, 1] for x in (0, shape[0]) for y in (0, shape[1]) for z in (0, shape[2])], np.float64)
    distance = np.abs(corners @ (image.affine - label.affine).T).max()
    smallest = np.linalg.norm(image.affine[:3, :3], axis=0).min()
    if label.voxels.shape == shape and distance <= MAX_GRID_DISTANCE * smallest:
        return
    raise ValueError(
        f"{label.path} is not on the grid of its {kind} {image.path}: shape {label.voxels.shape} against "
        f"{shape}, corners up to {distance:.3g} mm apart (at most {MAX_GRID_DISTANCE * smallest:.3g}); affines "
        f"{label.affine.round(4).tolist()} and {image.affine.round(4).tolist()}; resample the label onto the {kind}"
    )


def _mm(lengths: np.ndarray) -> str:
    return " x ".join(f"{length:.4g}" for length in lengths) + " mm"


@cache
def _warn_once(said: str) -> None:
    logging.getLogger(__name__).warning(said)


@contextmanager
def _open(path: Path) -> Iterator[Stream]:
    """Yield the decompressed bytes of a file; errors of the gzip layer become ValueError."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    if not path.name.lower().endswith((".nii", ".nii.gz")):
        raise ValueError(f"{path}: expected a file named .nii.gz, .nii, .nrrd or .mha (an .mhd: save it as .mha)")
    with path.open("rb", buffering=0) as file:
        magic = file.read(2)
        file.seek(0)
        if not magic:
            raise ValueError(f"{path} is empty (0 bytes): copy it again")
        if (magic == GZIP_MAGIC) != (path.suffix.lower() == ".gz"):
            found, name = ("gzip", ".nii.gz") if magic == GZIP_MAGIC else ("not gzip", ".nii")
            raise ValueError(f"{path} is {found} despite its name: rename it to {name}, or copy it again")
        if path.suffix.lower() == ".nii":
            yield file
            return
        with undamaged(path):
            yield igzip.IGzipFile(fileobj=file, mode="rb")


def _parse_header(stream: Stream, path: Path) -> tuple[nibabel.Nifti1Header, tuple[int, ...], np.ndarray]:
    """Return the header, the shape without axes of length 1 behind the third, and the affine."""
    block = np.empty(HEADER_BYTES, np.uint8)
    found = read_exactly(stream, block)
    if found < HEADER_BYTES:
        raise ValueError(f"{path} has {found} bytes, less than a NIfTI-1 header ({HEADER_BYTES}): copy it again")
    header = nibabel.Nifti1Header(block.tobytes(), check=False)
    if header["sizeof_hdr"] != HEADER_BYTES or header["magic"].item() != b"n+1":
        raise ValueError(
            f"{path} is not a single-file NIfTI-1 (header size {header['sizeof_hdr']}, magic "
            f"{header['magic'].item()!r}; expected {HEADER_BYTES} and b'n+1'): convert it to .nii.gz"
        )
    shape = tuple(int(size) for size in header["dim"][1 : 1 + min(max(int(header["dim"][0]), 0), 7)])
    while len(shape) > 3 and shape[-1] == 1:
        shape = shape[:-1]
    if len(shape) not in (3, 4) or min(shape) < 1:
        raise ValueError(f"{path}: expected a volume with 3 axes (or 4 with channels), found shape {shape}")
    if header["pixdim"][0] not in (-1, 1):
        header["pixdim"][0] = 1  # the standard: 0 reads as 1
    try:
        affine = np.asarray(header.get_best_affine(), np.float64)
    except (HeaderDataError, ValueError) as error:
        raise ValueError(f"{path}: its header has no affine ({error}): correct it with nibabel") from error
    if unit := {1: ("metres", 1000), 3: ("micrometres", 0.001)}.get(int(header["xyzt_units"]) & 7):
        raise ValueError(
            f"{path}: its header has lengths in {unit[0]}, expected mm: with nibabel, multiply the first "
            f'three rows of its affine by {unit[1]} and set_xyzt_units("mm")'
        )
    check_affine(affine, f"{path}: ")
    sides, pixdim = np.linalg.norm(affine[:3, :3], axis=0), header["pixdim"][1:4].astype(np.float64)
    if not np.allclose(sides, pixdim, rtol=MAX_DISAGREEMENT):
        _warn_once(
            f"{path}: voxel size {_mm(sides)} in its sform, which is used, but {_mm(pixdim)} in its pixdim, which "
            "other programs may use: if the sform is right, image.set_qform(image.affine) in nibabel corrects the file"
        )
    return header, shape, affine


def _read_voxels(
    stream: Stream, header: nibabel.Nifti1Header, shape: tuple[int, ...], path: Path, first_only: bool
) -> np.ndarray:
    """Read the voxels into one new array; what the header asks for is checked before memory is taken."""
    if header["datatype"] not in _DATATYPES:
        raise ValueError(
            f"{path}: expected integer or real voxels of 1 to 8 bytes, found NIfTI type {header['datatype']}: "
            "convert it to int16 or float32"
        )
    dtype: np.dtype = np.dtype(header.get_data_dtype())
    _check_room(shape, dtype, path, path.suffix.lower() == ".gz")
    offset = float(header["vox_offset"])  # perhaps not a number
    if not HEADER_BYTES <= offset <= HEADER_BYTES + MAX_PADDING:
        raise ValueError(f"{path}: the header has voxels begin at byte {offset:.0f}, expected 352 or a little more")
    read_exactly(stream, np.empty(int(offset) - HEADER_BYTES, np.uint8))
    return take_voxels(stream, dtype, (*shape[:3], 1) if first_only else shape, path, whole=not first_only)


def _check_room(shape: tuple[int, ...], dtype: np.dtype, path: Path, packed: bool, before: int = 0) -> None:
    """Refuse voxels that the file cannot hold, or the memory."""
    needed = math.prod(shape) * dtype.itemsize
    bound = (path.stat().st_size - before) * (MAX_GZIP_RATIO if packed else 1)
    asked = f"{path}: its header declares {needed} bytes of voxels (shape {shape}, {dtype})"
    if needed > bound:
        raise ValueError(f"{asked}, the file can hold at most {bound}: truncated, or a wrong header; copy it again")
    if needed > max(free := free_memory(), ALWAYS_TRIED):
        raise ValueError(f"{asked}, {free} bytes of memory are free: crop the scan, or use a machine with more memory")


def _scaled(voxels: np.ndarray, header: nibabel.Nifti1Header, path: Path) -> np.ndarray:
    """Apply scl_slope and scl_inter; a slope of 0 or not-a-number means that there are none."""
    if np.isinf(header["scl_slope"]):
        raise ValueError(f"{path}: scl_slope is infinite: correct its header")
    try:
        slope, inter = header.get_slope_inter()
    except HeaderDataError as error:
        raise ValueError(f"{path}: scl_slope is valid but scl_inter is not ({error}): correct its header") from error
    if slope is None or (slope, inter) == (1.0, 0.0):
        return voxels
    return np.asarray(apply_read_scaling(voxels, slope, inter), np.float32)
