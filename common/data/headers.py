"""Headers of NIfTI, NRRD and MetaImage files (.nii, .nii.gz, .nrrd, .mha): where the voxels are, and what they mean."""

import gzip
import logging
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, cast

import nibabel
import numpy as np
from isal import igzip, isal_zlib
from nibabel.orientations import aff2axcodes
from nibabel.spatialimages import HeaderDataError

HEADER_BYTES = 348  # of NIfTI
MAX_PADDING = 2**20  # bytes between the header and the voxels, and behind them
_GZIP_MAGIC = b"\x1f\x8b"
_MAX_DISAGREEMENT = 0.25  # of pixdim; the slices of a tilted gantry lie 15 percent further apart along the shear
_DATATYPES = (2, 4, 8, 16, 64, 256, 512, 768, 1024, 1280)  # integers and floats of 1 to 8 bytes. Source: nifti1.h
_MOST_TEXT = 2**16  # bytes of a header that is text
_TRUE = ("T", "t", "1")  # begins what MetaImage takes for true
_REMEDY = "save it as .nii.gz with 3D Slicer or SimpleITK"
_TYPES = {
    "i1": "char int8", "u1": "uchar uint8", "i2": "short int16", "u2": "ushort uint16", "i4": "int int32",
    "u4": "uint uint32", "i8": "longlong int64", "u8": "ulonglong uint64", "f4": "float", "f8": "double",
}  # fmt: skip
_SPACES = {"lps": (-1, -1, 1), "ras": (1, 1, 1), "las": (-1, 1, 1)}  # NRRD's, short for left-posterior-superior, to RAS
# What reading a damaged gzip stream raises; isal's type stub takes its own class for an instance.
_DAMAGED = cast(tuple[type[Exception], ...], (EOFError, gzip.BadGzipFile, isal_zlib.error))
Packed = Literal["raw", "gzip", "zlib"]
_warn_once = cache(logging.getLogger(__name__).warning)


class Header(NamedTuple):
    """What the header of a file says, checked."""

    sizes: tuple[int, ...]  # of the axes as they lie in the file, the fastest first
    channels: int | None  # which of them counts the channels; None where none does
    dtype: np.dtype  # of the voxels as they lie there
    affine: np.ndarray  # [4, 4] float64, voxel index to RAS mm; rounded to float32, as NIfTI keeps it, in every format
    packed: Packed  # how the bytes from `start` on are compressed
    start: int = 0
    skip: int = 0  # bytes of what they hold before the voxels
    scale: tuple[float, float] | None = None  # factor, and what is then added; None where voxels stay as they are

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of [X, Y, Z] or [X, Y, Z, C]."""
        if self.channels is None:
            return self.sizes
        return (*(size for axis, size in enumerate(self.sizes) if axis != self.channels), self.sizes[self.channels])


@contextmanager
def undamaged(path: Path) -> Iterator[None]:
    """Turn errors of a compressed stream of a file into ValueError."""
    try:
        yield
    except _DAMAGED as error:
        found = f"({path.stat().st_size} bytes) is truncated or damaged ({error}): copy it again"
        if path.suffix.lower() == ".gz" and str(error).startswith("Not a gzipped file"):  # the first member was
            found = "has other bytes behind its gzip stream: copy it again, or `gzip -dc FILE | gzip > NEW`"
        raise ValueError(f"{path} {found}") from error


def sides_in_mm(lengths: np.ndarray) -> str:
    """Return lengths in words: "1 x 1 x 2.5 mm"."""
    return " x ".join(f"{length:.4g}" for length in lengths) + " mm"


def nifti_header(path: Path) -> Header:
    """Read the header of a .nii or .nii.gz file that is there; axes of length 1 behind the third are left out."""
    with path.open("rb") as file:
        magic = file.read(2)
    if not magic:
        raise ValueError(f"{path} is empty (0 bytes): copy it again")
    packed = magic == _GZIP_MAGIC
    if packed != (path.suffix.lower() == ".gz"):
        found, name = ("gzip", ".nii.gz") if packed else ("not gzip", ".nii")
        raise ValueError(f"{path} is {found} despite its name: rename it to {name}, or copy it again")
    with undamaged(path), igzip.open(path) if packed else path.open("rb") as stream:
        block = stream.read(HEADER_BYTES)
    if len(block) < HEADER_BYTES:
        raise ValueError(f"{path} has {len(block)} bytes, less than a NIfTI-1 header ({HEADER_BYTES}): copy it again")
    header = nibabel.Nifti1Header(block, check=False)
    if header["sizeof_hdr"] != HEADER_BYTES or header["magic"].item() != b"n+1":
        found = f"header size {header['sizeof_hdr']}, magic {header['magic'].item()!r}; expected {HEADER_BYTES}, b'n+1'"
        raise ValueError(f"{path} is not a single-file NIfTI-1 ({found}): convert it from NIfTI-2 or Analyze")
    if header["datatype"] not in _DATATYPES:
        found = f"expected integer or real voxels of 1 to 8 bytes, found NIfTI type {header['datatype']}"
        raise ValueError(f"{path}: {found}: convert it to int16 or float32")
    shape = tuple(int(size) for size in header["dim"][1 : 1 + min(max(int(header["dim"][0]), 0), 7)])
    while len(shape) > 3 and shape[-1] == 1:
        shape = shape[:-1]
    if len(shape) == 5 and shape[3] == 1:  # vectors, as SimpleITK writes channels
        shape = (*shape[:3], shape[4])
    if len(shape) not in (3, 4) or min(shape) < 1:
        raise ValueError(f"{path}: expected a volume with 3 axes (or 4 with channels), found shape {shape}")
    offset = float(header["vox_offset"])  # perhaps not a number
    if not HEADER_BYTES <= offset <= HEADER_BYTES + MAX_PADDING:
        raise ValueError(f"{path}: the header has voxels begin at byte {offset:.0f}, expected 352 or a little more")
    affine, dtype = _nifti_affine(header, path), np.dtype(header.get_data_dtype())
    channels, scale = (3 if len(shape) == 4 else None), _nifti_scale(header, path)
    return Header(shape, channels, dtype, affine, "gzip" if packed else "raw", 0, int(offset), scale)


def _nifti_affine(header: nibabel.Nifti1Header, path: Path) -> np.ndarray:
    header["pixdim"][1:4] = np.abs(header["pixdim"][1:4])  # as nibabel does
    if header["pixdim"][0] not in (-1, 1):
        header["pixdim"][0] = 1  # the standard: 0 reads as 1
    try:
        affine = np.asarray(header.get_best_affine(), np.float64)
    except (HeaderDataError, ValueError) as error:
        raise ValueError(f"{path}: its header has no affine ({error}): correct it with nibabel") from error
    if not (header["sform_code"] or header["qform_code"]):
        _warn_once(f"{path.parent}: files without orientation are read as LAS: check left and right, and correct them")
    if unit := {1: ("metres", 1000), 3: ("micrometres", 0.001)}.get(int(header["xyzt_units"]) & 7):
        remedy = f'with nibabel, multiply the first three rows of its affine by {unit[1]} and set_xyzt_units("mm")'
        raise ValueError(f"{path}: its header has lengths in {unit[0]}, expected mm: {remedy}")
    sides, pixdim = np.linalg.norm(affine[:3, :3], axis=0), header["pixdim"][1:4].astype(np.float64)
    remedy = "if the sform is right, image.set_qform(image.affine) in nibabel corrects the file"
    if np.isfinite(affine).all() and not np.allclose(sides, pixdim, rtol=_MAX_DISAGREEMENT):
        said = f"voxel size {sides_in_mm(sides)} in its sform, which is used, but {sides_in_mm(pixdim)} in its pixdim"
        _warn_once(f"{path}: {said}, which other programs may use: {remedy}")
    with suppress(HeaderDataError, ValueError):  # a qform that is none
        turned, used = (aff2axcodes(each) if np.isfinite(each).all() else () for each in (header.get_qform(), affine))
        if header["sform_code"] and header["qform_code"] and turned != used and None not in (*turned, *used):
            _warn_once(f"{path}: its qform, which other programs may use, turns the axes otherwise: {remedy}")
    return affine


def _nifti_scale(header: nibabel.Nifti1Header, path: Path) -> tuple[float, float] | None:
    """Return scl_slope and scl_inter; a slope of 0 or not-a-number means that there are none."""
    slope, inter = float(header["scl_slope"]), float(header["scl_inter"])
    if slope == 0 or math.isnan(slope):
        return None
    if not (math.isfinite(slope) and math.isfinite(inter)):
        raise ValueError(f"{path}: scl_slope is {slope:g}, scl_inter {inter:g}, expected numbers: correct its header")
    return None if (slope, inter) == (1.0, 0.0) else (slope, inter)


def text_header(path: Path) -> Header:
    """Read the header of a .nrrd or .mha file that is there; a single channel is none."""
    with path.open("rb") as file:
        start = file.read(_MOST_TEXT)
    nrrd = path.suffix.lower() == ".nrrd"
    kind, end = ("an NRRD", rb"\r?\n\r?\n") if nrrd else ("a MetaImage", rb"(?m)^ElementDataFile\s*=[^\n]*\n")
    ending = re.search(end, start)
    if ending is None or (nrrd and not start.startswith(b"NRRD000")):
        raise ValueError(f"{path}: is not {kind} file with a header of at most {_MOST_TEXT} bytes: copy it again")
    lines = (re.split("[:=]", line, maxsplit=1) for line in start[: ending.end()].decode("latin-1").split("\n"))
    pairs = [map(str.strip, line) for line in lines if len(line) == 2 and not line[0].startswith("#")]
    fields = {key.lower(): value for key, value in pairs if value and value[0] != "="}  # NRRD's own pairs: NAME:=VALUE
    try:
        found = (_nrrd if nrrd else _meta)(fields, ending.end())
        if found.channels is not None and found.sizes[found.channels] == 1:
            found = found._replace(sizes=found.shape[:3], channels=None)
        if min(found.sizes) < 1:
            raise ValueError(f"sizes {found.sizes}, expected 1 or more along each axis")
    except KeyError as error:
        raise ValueError(f"{path}: its header has no {error.args[0]!r}: {_REMEDY}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {str(error)[:200]}: {_REMEDY}") from error
    return found


def _nrrd(fields: Mapping[str, str], start: int) -> Header:
    """Source: teem.sourceforge.net/nrrd/format.html."""
    if "data file" in fields or "datafile" in fields:
        raise ValueError("its voxels lie in another file")
    space, encoding = fields["space"].lower(), fields["encoding"].lower()
    short = "".join(word[:1] for word in space.split("-")) if "-" in space else space
    if short not in _SPACES or encoding not in ("raw", "gzip", "gz"):
        raise ValueError(f"space {space}, encoding {encoding}; LPS, RAS or LAS and raw or gzip are read")
    if any(int(fields.get(skip, "0")) for skip in ("line skip", "lineskip", "byte skip", "byteskip")):
        raise ValueError("voxels do not follow its header")
    _check_mm(*re.findall(r'"([^"]*)"', fields.get("space units", "")))
    sizes, vectors = fields["sizes"], re.findall(r"none|\([^()]*\)", fields["space directions"])
    channels = vectors.index("none") if "none" in vectors else None
    columns = [_numbers(vector.strip("()"), 3) for vector in vectors if vector != "none"]
    if len(columns) != 3 or len(vectors) not in (3, 4) or len(vectors) != len(sizes.split()):
        said = f"sizes {sizes} for {len(vectors)} space directions {fields['space directions']}"
        raise ValueError(f"{said}, expected 3 vectors, and none for channels")
    affine = _to_ras(np.array(columns).T, _numbers(fields["space origin"].strip("()"), 3), _SPACES[short])
    dtype = _dtype(fields["type"], fields.get("endian", "").lower() == "big")
    packed: Packed = "raw" if encoding == "raw" else "gzip"
    return Header(tuple(map(int, sizes.split())), channels, dtype, affine, packed, start)


def _meta(fields: Mapping[str, str], start: int) -> Header:
    """Source: itk.org/Wiki/ITK/MetaIO/Documentation."""
    if fields["elementdatafile"] != "LOCAL" or int(fields.get("headersize", "0")):
        found = f"ElementDataFile {fields['elementdatafile']}, HeaderSize {fields.get('headersize', '0')}"
        raise ValueError(f"{found}: its voxels do not follow its header")
    if fields.get("binarydata", "True")[0] not in _TRUE:
        raise ValueError("its voxels are text")
    _check_mm(fields.get("distanceunits", "mm"))
    sizes, samples = tuple(map(int, fields["dimsize"].split())), int(fields.get("elementnumberofchannels", "1"))
    count = len(sizes)
    if count not in (3, 4) or (count == 4 and samples > 1):
        said = f"DimSize {fields['dimsize']} with {samples} channels"
        raise ValueError(f"{said}, expected 3 axes, or 4 with channels last")
    unturned = " ".join(map(str, np.eye(count, dtype=int).ravel()))
    matrix = fields.get("transformmatrix") or fields.get("rotation") or fields.get("orientation") or unturned
    turn = _numbers(matrix, count**2)
    origin = _numbers(fields.get("offset") or fields.get("origin") or fields.get("position") or "0 " * count, count)
    spacing = _numbers(fields["elementspacing" if "elementspacing" in fields else "elementsize"], count)
    affine = _to_ras((turn.reshape(count, count) * spacing[:, None]).T[:3, :3], origin[:3], _SPACES["lps"])
    big = (fields.get("binarydatabyteordermsb") or fields.get("elementbyteordermsb") or "False")[0] in _TRUE
    channels, sizes = (0, (samples, *sizes)) if samples > 1 else (3 if count == 4 else None, sizes)
    packed: Packed = "zlib" if fields.get("compresseddata", "False")[0] in _TRUE else "raw"
    return Header(sizes, channels, _dtype(fields["elementtype"].removeprefix("MET_"), big), affine, packed, start)


def _check_mm(*units: str) -> None:
    if wrong := {unit.lower() for unit in units} - {"mm", "millimeter", "millimeters", ""}:
        raise ValueError(f"lengths in {', '.join(sorted(wrong))}, expected mm")


def _numbers(text: str, count: int) -> np.ndarray:
    numbers = np.array([float(word) for word in re.split(r"[,\s]+", text.strip())])
    if len(numbers) != count:
        raise ValueError(f"expected {count} numbers, found {text}")
    return numbers


def _dtype(text: str, big: bool) -> np.dtype:
    """Return the type of a name such as "unsigned short", "uint16_t" or USHORT."""
    name = text.lower().removesuffix("_t").replace("_", "").replace("unsigned ", "u").replace("signed ", "")
    name = name.removesuffix(" int").replace(" ", "")
    code = next((code for code, names in _TYPES.items() if name in names.split()), None)
    if code is None:
        raise ValueError(f"voxels of type {text}, expected integers or floats of 1 to 8 bytes")
    return np.dtype(code).newbyteorder(">" if big else "<")


def _to_ras(columns: np.ndarray, origin: np.ndarray, flips: tuple[int, ...]) -> np.ndarray:
    affine = np.eye(4)
    affine[:3] = np.diag(flips) @ np.column_stack((columns, origin))
    with np.errstate(over="ignore"):
        return affine.astype(np.float32).astype(np.float64)
