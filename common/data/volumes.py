"""Read NIfTI, NRRD and MetaImage files: one decompression pass, voxels in file order, clear errors for broken files."""

import io
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from isal import igzip, isal_zlib
from nibabel.volumeutils import apply_read_scaling

from medspeed.common.data.dataset import SUFFIXES
from medspeed.common.data.headers import MAX_PADDING, Header, nifti_header, sides_in_mm, text_header, undamaged
from medspeed.common.host_memory import free_memory

ALWAYS_TRIED = 2**30  # bytes: what the process freed and keeps (`host_memory.keep_freed_memory`) does not count as free
MIN_SIDE, MAX_SIDE = 0.01, 100  # mm, of a voxel; as of `--spacing`
MAX_ORIGIN = 1e5  # mm from a scanner's centre
MAX_GRID_DISTANCE = 0.1  # of the smallest spacing: how far image and label may lie apart at a corner
_READ_BLOCK = 2**18  # bytes at a time: igzip copies what it decompresses once more, cheaply while it is in the cache
_MAX_RATIO = 1032  # no deflate stream expands further. Source: zlib.net/zlib_tech.html


@dataclass(frozen=True)
class Volume:
    """A file in memory."""

    # [X, Y, Z] or [X, Y, Z, C] in the file's axes, order (Fortran) and dtype, but native; scaled ones are float32
    voxels: np.ndarray
    affine: np.ndarray  # [4, 4] float64, voxel index to RAS mm (sform before qform, as nibabel reads it)
    path: Path  # the file

    @property
    def voxel_ml(self) -> float:
        """Volume of a voxel in ml."""
        return abs(float(np.linalg.det(self.affine[:3, :3]))) / 1000


def read_volume(path: Path, channels: int = 1, first_only: bool = False) -> Volume:
    """Read a .nii.gz, .nii, .nrrd or .mha file of one channel, or a 4-D one of so many.

    If `first_only`, of a 4-D file only the first channel is returned, as [X, Y, Z, 1], and what follows is not checked.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is empty, truncated, damaged or no such file; its shape, type, affine or spacing cannot be used;
            it has NaN or infinite voxels. The message names the file, what was expected and what was found.
    """
    header = read_header(path)
    if (header.shape[3] if len(header.shape) == 4 else 1) != channels:
        due = "3-D, one channel" if channels == 1 else f"4-D, {channels} channels last (`to-msd` joins single ones)"
        said = f"{path}: expected {due}, found {header.shape}"
        raise ValueError(f"{said}: correct the file, or in a training set `modality` in dataset.json")
    voxels = _voxels(header, path, first_only)
    if header.scale is not None:
        voxels = np.asarray(apply_read_scaling(voxels, *header.scale), np.float32)
    if voxels.dtype.kind == "f":
        with np.errstate(over="ignore"):  # float64 that float32, in which all is computed, does not hold
            finite = np.isfinite(voxels.astype(np.float32, copy=False))
        if count := voxels.size - np.count_nonzero(finite):
            said = f"{count} of {voxels.size} voxels are NaN or infinite in float32"
            raise ValueError(f"{path}: {said}: repair or drop it")
    return Volume(voxels, header.affine, path)


def read_header(path: Path) -> Header:
    """Return the header of a file that `read_volume` reads; raise as it does for what is visible there."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    if not path.name.lower().endswith(SUFFIXES):
        raise ValueError(f"{path}: expected a file named .nii.gz, .nii, .nrrd or .mha: save it as one of these")
    header = (text_header if path.suffix.lower() in (".nrrd", ".mha") else nifti_header)(path)
    check_affine(header.affine, f"{path}: ")
    return header


def check_affine(affine: np.ndarray, prefix: str = "") -> None:
    """Raise a ValueError for an affine [4, 4], voxel index to RAS mm, that no scanner produces."""
    sides, origin = np.linalg.norm(affine[:3, :3], axis=0), affine[:3, 3]
    if not np.isfinite(affine).all() or abs(np.linalg.det(affine[:3, :3])) <= 1e-6 * sides.prod():
        raise ValueError(f"{prefix}the affine is singular or not finite, {affine.tolist()}: correct it with nibabel")
    if sides.min().round(6) < MIN_SIDE or sides.max().round(6) > MAX_SIDE:
        said = f"{prefix}voxel size {sides_in_mm(sides)}, expected {MIN_SIDE} to {MAX_SIDE} mm"
        raise ValueError(f"{said}: correct the header")
    if np.abs(origin).max() > MAX_ORIGIN:
        said = f"{prefix}first voxel is at {sides_in_mm(origin)}, expected within {MAX_ORIGIN:g} mm"
        raise ValueError(f"{said}: correct it")


def check_same_grid(image: Volume, label: Volume, kind: str = "image") -> None:
    """Raise a ValueError for a label of another shape than its image (or other `kind`), or over a tenth voxel off."""
    shape = image.voxels.shape[:3]
    corners = np.array([[x, y, z, 1] for x in (0, shape[0]) for y in (0, shape[1]) for z in (0, shape[2])], np.float64)
    distance = np.abs(corners @ (image.affine - label.affine).T).max()
    smallest = np.linalg.norm(image.affine[:3, :3], axis=0).min()
    if label.voxels.shape == shape and distance <= MAX_GRID_DISTANCE * smallest:
        return
    said = f"{label.path} is not on the grid of its {kind} {image.path}: shape {label.voxels.shape} against {shape}"
    if distance > MAX_GRID_DISTANCE * smallest:
        said += f", corners up to {distance:.3g} mm apart (at most {MAX_GRID_DISTANCE * smallest:.3g}); affines "
        said += f"{label.affine.round(4).tolist()} and {image.affine.round(4).tolist()}"
    raise ValueError(f"{said}; resample it onto the {kind}")


def _voxels(header: Header, path: Path, first_only: bool) -> np.ndarray:
    """Read the voxels, [X, Y, Z] or [X, Y, Z, C], into one array; refuse what the file cannot hold, or the memory."""
    declared = math.prod(header.sizes) * header.dtype.itemsize
    bound = (path.stat().st_size - header.start) * (1 if header.packed == "raw" else _MAX_RATIO)
    asked = f"{path}: its header declares {declared} bytes of voxels (shape {header.sizes}, {header.dtype})"
    if declared > bound:
        raise ValueError(f"{asked}, the file can hold at most {bound}: truncated, or a wrong header; copy it again")
    if declared * (1 + (header.packed == "zlib")) > max(free := free_memory(2 * declared), ALWAYS_TRIED):
        raise ValueError(f"{asked}, {free} bytes of memory are free: crop the scan, or use a machine with more memory")
    first_alone = first_only and header.channels == 3
    sizes = (*header.sizes[:3], 1) if first_alone else header.sizes
    needed = math.prod(sizes) * header.dtype.itemsize
    content = np.empty(needed, np.uint8)
    with path.open("rb", buffering=0) as file, undamaged(path):
        file.seek(header.start)
        stream: io.RawIOBase | io.BufferedIOBase = file
        if header.packed == "gzip":
            stream = igzip.IGzipFile(fileobj=file, mode="rb")
        elif header.packed == "zlib":
            inflate, most = isal_zlib.decompressobj(), needed + MAX_PADDING
            inflated = inflate.decompress(file.read(), most)
            if not inflate.eof and len(inflated) < most:
                raise EOFError("its zlib stream ends early")
            stream = io.BytesIO(inflated)
        _fill(stream, np.empty(header.skip, np.uint8))
        if (found := _fill(stream, content)) < needed:
            said = f"{path}: expected {needed} bytes of voxels ({sizes}, {header.dtype}), found {found}"
            raise ValueError(f"{said}: copy it again")
        # At the end of the stream its format keeps a checksum; a little padding before it does no harm.
        if not first_alone and _fill(stream, np.empty(MAX_PADDING, np.uint8)) == MAX_PADDING:
            said = f"{path} continues past the {needed} bytes of voxels that its header declares"
            raise ValueError(f"{said}: copy it again")
    voxels = content.view(header.dtype).reshape(sizes, order="F")
    voxels = voxels if header.dtype.isnative else voxels.astype(header.dtype.newbyteorder("="), order="K")
    if header.channels is not None:
        voxels = np.moveaxis(voxels, header.channels, 3)[..., : 1 if first_only else None]
    return np.asfortranarray(voxels)


def _fill(stream: io.RawIOBase | io.BufferedIOBase, buffer: np.ndarray) -> int:
    """Fill a buffer (uint8) from the stream; return how many bytes there were."""
    view, filled = buffer.data, 0
    while filled < len(buffer):
        count = stream.readinto(view[filled : filled + _READ_BLOCK])
        if not count:
            break
        filled += count
    return filled
