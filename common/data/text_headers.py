"""Headers of NRRD and MetaImage files (.nrrd, .mha), which are text: where the voxels are, and what they mean.

They are read here, not by SimpleITK: ITK 5.4 takes a damaged compressed .mha without an error, some voxels wrong, and
opens whatever other file a header names.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

ENDINGS = (".nrrd", ".mha")
_MOST = 2**16  # bytes of a header
_REMEDY = "save it again with 3D Slicer or SimpleITK"
_TYPES = {
    "i1": "char int8", "u1": "uchar uint8", "i2": "short int16", "u2": "ushort uint16", "i4": "int int32",
    "u4": "uint uint32", "i8": "longlong int64", "u8": "ulonglong uint64", "f4": "float", "f8": "double",
}  # fmt: skip
_SPACES = {  # NRRD's, to RAS
    "left-posterior-superior": (-1, -1, 1), "right-anterior-superior": (1, 1, 1), "left-anterior-superior": (-1, 1, 1),
    "lps": (-1, -1, 1), "ras": (1, 1, 1), "las": (-1, 1, 1),
}  # fmt: skip


class TextHeader(NamedTuple):
    """What the header of a file says, checked.

    Attributes:
        sizes: of the axes as they lie in the file, the fastest first.
        channels: which of them counts the channels; None where none does.
        dtype: of the voxels as they lie there.
        affine: [4, 4] float64, voxel index to RAS mm, rounded to float32 as NIfTI keeps it: a scan is the same in each.
        packed: how the voxels are compressed.
        offset: bytes before them.
    """

    sizes: tuple[int, ...]
    channels: int | None
    dtype: np.dtype
    affine: np.ndarray
    packed: Literal["raw", "gzip", "zlib"]
    offset: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of [X, Y, Z] or [X, Y, Z, C]."""
        if self.channels is None:
            return self.sizes
        return (*(size for axis, size in enumerate(self.sizes) if axis != self.channels), self.sizes[self.channels])


def read_text_header(path: Path) -> TextHeader:
    """Read the header of a .nrrd or .mha file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no such file, or says what cannot be used; names it, and the remedy.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    with path.open("rb") as file:
        start = file.read(_MOST)
    nrrd = path.suffix.lower() == ".nrrd"
    kind, end = ("an NRRD", rb"\r?\n\r?\n") if nrrd else ("a MetaImage", rb"(?m)^ElementDataFile\s*=[^\n]*\n")
    ending = re.search(end, start)
    if ending is None or (nrrd and not start.startswith(b"NRRD000")):
        raise ValueError(f"{path}: is not {kind} file with a header of at most {_MOST} bytes: copy it again")
    lines = (re.split("[:=]", line, maxsplit=1) for line in start[: ending.end()].decode("latin-1").split("\n"))
    pairs = [map(str.strip, line) for line in lines if len(line) == 2 and not line[0].startswith("#")]
    fields = {key.lower(): value for key, value in pairs if value and value[0] != "="}  # NRRD's own pairs: NAME:=VALUE
    try:
        found = (_nrrd if nrrd else _meta)(fields, ending.end())
        if found.channels is not None and found.sizes[found.channels] == 1:
            found = found._replace(sizes=found.shape[:3], channels=None)
        if len(found.shape) not in (3, 4) or min(found.sizes) < 1:
            raise ValueError(f"sizes {found.sizes}, expected 3 axes of space and at most one of channels")
    except KeyError as error:
        raise ValueError(f"{path}: its header has no {error.args[0]!r}: {_REMEDY}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {str(error)[:200]}: {_REMEDY}") from error
    return found


def _nrrd(fields: Mapping[str, str], offset: int) -> TextHeader:
    """Source: teem.sourceforge.net/nrrd/format.html."""
    if "data file" in fields or "datafile" in fields:
        raise ValueError("its voxels lie in another file")
    flips = _SPACES.get(fields["space"].lower())
    packed: Literal["raw", "gzip"] | None = {"raw": "raw", "gzip": "gzip", "gz": "gzip"}.get(fields["encoding"].lower())  # type: ignore[assignment]
    if flips is None or packed is None:
        raise ValueError(
            f"space {fields['space']}, encoding {fields['encoding']}; LPS, RAS or LAS and raw or gzip are read"
        )
    if any(int(fields.get(skip, "0")) for skip in ("line skip", "lineskip", "byte skip", "byteskip")):
        raise ValueError("voxels do not follow its header")
    units = set(re.findall(r'"([^"]*)"', fields.get("space units", "")))
    _check_mm(*units)
    vectors = re.findall(r"none|\([^()]*\)", fields["space directions"])
    places = [number for number, vector in enumerate(vectors) if vector != "none"]
    if len(places) != 3 or len(vectors) > 4:
        raise ValueError(f"space directions {fields['space directions']}, expected 3 vectors")
    columns = np.array([_numbers(vectors[place].strip("()"), 3) for place in places]).T
    sizes = tuple(map(int, fields["sizes"].split()))
    if len(sizes) != len(vectors):
        raise ValueError(f"sizes {fields['sizes']} for {len(vectors)} space directions")
    channels = next((number for number in range(len(vectors)) if number not in places), None)
    affine = _to_ras(columns, _numbers(fields["space origin"].strip("()"), 3), flips)
    dtype = _dtype(fields["type"], fields.get("endian", "").lower() == "big")
    return TextHeader(sizes, channels, dtype, affine, packed, offset)


def _meta(fields: Mapping[str, str], offset: int) -> TextHeader:
    """Source: itk.org/Wiki/ITK/MetaIO/Documentation."""
    if fields["elementdatafile"] != "LOCAL" or int(fields.get("headersize", "0")):
        raise ValueError(f"its voxels lie in another file, {fields['elementdatafile']}")
    if not _true(fields.get("binarydata", "True")):
        raise ValueError("its voxels are text")
    _check_mm(fields.get("distanceunits", "mm"))
    sizes, samples = tuple(map(int, fields["dimsize"].split())), int(fields.get("elementnumberofchannels", "1"))
    count = len(sizes)
    if count not in (3, 4) or (count == 4 and samples > 1):
        raise ValueError(
            f"DimSize {fields['dimsize']} with {samples} channels, expected 3 axes, or 4 with channels last"
        )
    turn, origin = (
        next((fields[name] for name in names.split() if name in fields), default)
        for names, default in (
            ("transformmatrix rotation orientation", " ".join(map(str, np.eye(count, dtype=int).ravel()))),
            ("offset origin position", "0 " * count),
        )
    )
    spacing = _numbers(fields["elementspacing" if "elementspacing" in fields else "elementsize"], count)
    columns = (_numbers(turn, count**2).reshape(count, count) * spacing[:, None]).T[:3, :3]
    affine = _to_ras(columns, _numbers(origin, count)[:3], _SPACES["lps"])
    big = _true(fields.get("binarydatabyteordermsb", fields.get("elementbyteordermsb", "False")))
    channels, sizes = (0, (samples, *sizes)) if samples > 1 else (3 if count == 4 else None, sizes)
    packed: Literal["zlib", "raw"] = "zlib" if _true(fields.get("compresseddata", "False")) else "raw"
    return TextHeader(sizes, channels, _dtype(fields["elementtype"].removeprefix("MET_"), big), affine, packed, offset)


def _true(text: str) -> bool:
    return text[:1] in ("T", "t", "1")


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


def label_header(ending: str, shape: tuple[int, ...], affine: np.ndarray, packed_bytes: int) -> bytes:
    """Return the header of a label map [X, Y, Z] uint8 of a shape, on a grid given by its affine to RAS mm.

    Args:
        ending: ".nrrd", whose voxels follow as gzip, or ".mha", whose voxels follow as zlib.
        shape: sizes X, Y, Z.
        affine: [4, 4] float64.
        packed_bytes: of the compressed voxels.
    """
    columns, origin = (np.diag((-1.0, -1.0, 1.0)) @ affine[:3])[:, :3].T, affine[:3, 3] * (-1.0, -1.0, 1.0)
    sizes = " ".join(map(str, shape))
    if ending == ".nrrd":
        vectors = " ".join(f"({','.join(map(repr, column))})" for column in columns.tolist())
        return (
            f"NRRD0004\ntype: uint8\ndimension: 3\nspace: left-posterior-superior\nsizes: {sizes}\n"
            f"space directions: {vectors}\nkinds: domain domain domain\nencoding: gzip\n"
            f"space origin: ({','.join(map(repr, origin.tolist()))})\n\n"
        ).encode()
    spacing = [math.hypot(*column) for column in columns.tolist()]
    turn = " ".join(map(repr, (columns / np.array(spacing)[:, None]).ravel().tolist()))
    return (
        "ObjectType = Image\nNDims = 3\nBinaryData = True\nBinaryDataByteOrderMSB = False\nCompressedData = True\n"
        f"CompressedDataSize = {packed_bytes}\nTransformMatrix = {turn}\n"
        f"Offset = {' '.join(map(repr, origin.tolist()))}\n"
        f"ElementSpacing = {' '.join(map(repr, spacing))}\nDimSize = {sizes}\nElementType = MET_UCHAR\n"
        "ElementDataFile = LOCAL\n"
    ).encode()
