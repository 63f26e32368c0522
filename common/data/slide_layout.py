"""How a slide lies in its TIFF file: levels, tiles and where their bytes are; broken files are refused here.

Every reader goes through this check first, since the native ones print, guess or read on when a file is wrong.
"""

import os
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffPage

INSTALL = {
    "cucim": "pip install --no-deps cucim-cu13 click lazy-loader",
    "openslide": "pip install openslide-python openslide-bin",
    "tifffile": "pip install tifffile imagecodecs",
}
TIFF_MAGICS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # classic and BigTIFF, both byte orders
MAX_ANISOTROPY = 0.05  # of the smaller side: patches would be stretched by more
MAX_MPP = 20.0  # um; an objective of 1x gives 10. More is a printer's resolution (96 per inch: 265)
ASPECT_TOLERANCE = 0.01  # by which a level's shape may differ from level 0's, beside rounding to whole pixels
DEFAULT_TILE = 256  # where a file does not tell
JPEG = 7  # TIFF's Compression tag
JPEG_START, JPEG_END = b"\xff\xd8", b"\xff\xd9"
_JPEG_TAIL = 64  # bytes in which the end mark is looked for: some writers pad
_UM_PER_UNIT = {2: 25400.0, 3: 10000.0}  # TIFF's ResolutionUnit: inch, centimetre


class _RefusedError(ValueError):
    """What a file is refused for in our own words, told apart from what tifffile raises."""


@dataclass(frozen=True)
class Plane:
    """One level of the pyramid as it lies in the file.

    Attributes:
        width, height: pixels of this level.
        tile_width, tile_height: pixels; a strip counts as a tile of the level's width.
        offsets, counts: [rows * columns] int64, where each tile's bytes begin and how many they are, row-major; empty
            where the file is no TIFF. A tile of 0 bytes was never scanned.
        compression: TIFF's Compression tag; 0 where there is none.
        tiled: False where the file has strips.
        decode: tifffile's decoder for this level: (bytes, tile number) -> (pixels or None, place, shape [1, height,
            width, 3]); None where the file is no TIFF.
    """

    width: int
    height: int
    tile_width: int
    tile_height: int
    offsets: np.ndarray
    counts: np.ndarray
    compression: int
    tiled: bool
    decode: Callable[..., Any] | None

    @property
    def columns(self) -> int:
        """Return how many tiles lie side by side."""
        return -(-self.width // self.tile_width)

    @property
    def rows(self) -> int:
        """Return how many tiles lie one below the other."""
        return -(-self.height // self.tile_height)


@dataclass(frozen=True)
class Layout:
    """The levels of a slide, largest first, and its pixel size in um at level 0 (None where the file is silent)."""

    planes: tuple[Plane, ...]
    mpp: float | None
    padded: bool = False  # levels are padded to whole tiles, so that their sizes do not tell how far they are reduced


def read_layout(path: Path) -> Layout | None:
    """Read and check the directories of a TIFF file; return None for a file that is no TIFF.

    Level 0 is the largest 8-bit RGB page. Its other levels are smaller pages (or SubIFDs) of the same shape, tiled as
    it is; labels, macro images and thumbnails are left out.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is empty, damaged or cut short, holds no 8-bit RGB image, or its pixels are not square.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    size = path.stat().st_size
    if not size:
        raise ValueError(f"{path} is empty (0 bytes): copy it again")
    with path.open("rb") as file:
        if file.read(4) not in TIFF_MAGICS:
            return None
    tifffile = _import_tifffile()
    # tifffile meets damage in a directory with whatever error its parsing runs into: all of these have been seen.
    damage = (tifffile.TiffFileError, LookupError, OverflowError, TypeError, ValueError, MemoryError, struct.error)
    try:
        with tifffile.TiffFile(path) as tiff:
            pages = list(tiff.pages)
            _check_chain(tiff, pages, path)
            planes, base = _levels_of(_images(pages), path)
            mpp = _mpp_of(base, path)
            padded = str(base.tags.valueof("Software", "")).startswith("Philips")
    except _RefusedError:
        raise
    except damage as error:
        raise ValueError(f"{path} ({size} bytes) has damaged TIFF directories ({error}): copy it again") from error
    _check_ends(planes, path, size)
    return Layout(planes, mpp, padded)


def bare_plane(width: int, height: int) -> Plane:
    """Return a level of which only the size is known; the grid is then ours, 256 pixels wide."""
    nothing = np.empty(0, np.int64)
    return Plane(width, height, DEFAULT_TILE, DEFAULT_TILE, nothing, nothing, 0, True, None)


def checked_mpp(mpp_x: float, mpp_y: float, path: Path) -> float | None:
    """Return the mean pixel side in um, or None where the numbers cannot be a microscope's.

    Raises:
        ValueError: the sides differ by more than 5 percent.
    """
    if not (0 < mpp_x <= MAX_MPP and 0 < mpp_y <= MAX_MPP):
        return None
    if max(mpp_x, mpp_y) > (1 + MAX_ANISOTROPY) * min(mpp_x, mpp_y):
        raise _RefusedError(
            f"{path}: pixels of {mpp_x:.4g} x {mpp_y:.4g} um are not square (at most {MAX_ANISOTROPY:.0%} apart): "
            "resample the slide or correct its resolution tags"
        )
    return (mpp_x + mpp_y) / 2


def looks_whole(plane: Plane, tile: int, file: int) -> bool:
    """Return False where the bytes of a JPEG tile cannot be one: no start mark, or zeros in place of its end.

    Native decoders give such tiles as noise or grey without a word. Damage within a tile is not seen here.

    Args:
        plane: the level.
        tile: number of the tile, row-major.
        file: descriptor of the open slide.
    """
    if plane.compression != JPEG:
        return True
    offset, count = int(plane.offsets[tile]), int(plane.counts[tile])
    if os.pread(file, 2, offset) != JPEG_START:
        return False
    tail = os.pread(file, min(_JPEG_TAIL, count), offset + max(0, count - _JPEG_TAIL))
    return JPEG_END in tail or not tail.endswith(b"\0\0")


def _import_tifffile() -> ModuleType:
    try:
        import tifffile
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"slides need tifffile ({error}): {INSTALL['tifffile']}") from error
    return tifffile


def _check_chain(tiff: "TiffFile", pages: Sequence[Any], path: Path) -> None:
    """Refuse a file whose last directory points to another one that cannot be read: tifffile only logs that."""
    form, last, file = tiff.tiff, pages[-1].offset, tiff.filehandle
    file.seek(last)
    (tags,) = struct.unpack(form.tagnoformat, file.read(form.tagnosize))
    file.seek(last + form.tagnosize + tags * form.tagsize)
    (following,) = struct.unpack(form.offsetformat, file.read(form.offsetsize))
    if following:
        raise _RefusedError(
            f"{path} ({file.size} bytes) is cut short or damaged: no TIFF directory at {following}: copy it again"
        )


def _images(pages: Sequence[Any]) -> list[Any]:
    """Return the 8-bit RGB pages, SubIFDs among them."""
    within = [sub for page in pages if getattr(page, "subifds", None) for sub in page.pages]
    return [
        page
        for page in (*pages, *within)
        if page.dtype == np.uint8
        and page.samplesperpixel == 3
        and min(page.imagelength, page.imagewidth) > 0
        and page.shape == (page.imagelength, page.imagewidth, 3)
    ]


def _levels_of(images: list[Any], path: Path) -> tuple[tuple[Plane, ...], Any]:
    if not images:
        raise _RefusedError(f"{path}: holds no 8-bit RGB image (three interleaved samples): convert it to an RGB TIFF")
    base = max(images, key=lambda page: page.imagewidth * page.imagelength)
    levels = {base.imagewidth: base}
    for page in images:
        if page.imagewidth < base.imagewidth and page.is_tiled == base.is_tiled and _same_shape(page, base):
            levels.setdefault(page.imagewidth, page)
    return tuple(_plane(levels[width], path) for width in sorted(levels, reverse=True)), base


def _same_shape(page: "TiffPage", base: "TiffPage") -> bool:
    ratio = page.imagewidth / base.imagewidth * base.imagelength / page.imagelength
    return abs(ratio - 1) <= ASPECT_TOLERANCE + 1.5 / min(page.imagewidth, page.imagelength)


def _plane(page: "TiffPage", path: Path) -> Plane:
    width, height = page.imagewidth, page.imagelength
    tile = (page.tilewidth, page.tilelength) if page.is_tiled else (width, min(page.rowsperstrip, height))
    if min(tile) < 1:
        raise _RefusedError(f"{path}: a level of {width} x {height} has tiles of {tile[0]} x {tile[1]}: copy it again")
    plane = replace(
        bare_plane(width, height), tile_width=tile[0], tile_height=tile[1], compression=int(page.compression)
    )
    plane = replace(plane, offsets=np.array(page.dataoffsets, np.int64), counts=np.array(page.databytecounts, np.int64))
    due = plane.rows * plane.columns
    if not len(plane.offsets) == len(plane.counts) == due:
        found = min(len(plane.offsets), len(plane.counts))
        raise _RefusedError(f"{path}: a level of {width} x {height} lists {found} tiles, expected {due}: copy it again")
    # tifffile looks into the file when the decoder and its tables are first asked for: now, while it is open.
    jpeg = {"jpegtables": page.jpegtables, "jpegheader": page.jpegheader} if page.compression == JPEG else {}
    return replace(plane, tiled=page.is_tiled, decode=partial(page.decode, _fullsize=page.is_tiled, **jpeg))


def _check_ends(planes: Sequence[Plane], path: Path, size: int) -> None:
    beyond = sum(int(np.count_nonzero(plane.offsets + plane.counts > size)) for plane in planes)
    if beyond:
        tiles = sum(len(plane.offsets) for plane in planes)
        raise _RefusedError(
            f"{path} is cut short: {beyond} of {tiles} tiles lie beyond its {size} bytes: copy it again"
        )


def _mpp_of(page: "TiffPage", path: Path) -> float | None:
    """Return Aperio's MPP where the description has one, else what the resolution tags say."""
    said = re.search(r"\bMPP\s*=\s*(\d+(?:\.\d+)?)", page.description or "")
    if said:
        return checked_mpp(float(said[1]), float(said[1]), path)
    unit = _UM_PER_UNIT.get(int(page.tags.valueof("ResolutionUnit", 2)))
    densities = [page.tags.valueof(name, (0, 1)) for name in ("XResolution", "YResolution")]
    if unit is None or not all(above and below for above, below in densities):
        return None
    mpp_x, mpp_y = (unit * below / above for above, below in densities)
    return checked_mpp(mpp_x, mpp_y, path)
