"""How a slide lies in its TIFF file: levels, tiles and where their bytes are; broken files are refused here.

Every reader goes through `read_layout` first, since the native ones print, guess or read on when a file is wrong.
"""

import math
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

TIFF_MAGICS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # classic and BigTIFF, both byte orders
MAX_ANISOTROPY = 0.05  # of the smaller side: patches would be stretched by more
# um; objectives of 100x and 1x give 0.05 to 0.1 and 10. More is a printer's resolution (96 per inch: 265).
MIN_MPP, MAX_MPP = 0.02, 20.0
ASPECT_TOLERANCE = 0.01  # by which a level's shape may differ from level 0's, beside rounding to whole pixels
_LZW, JPEG, DEFLATE, _JPEG_2000 = 5, 7, (8, 32946), (33003, 33005, 34712)  # TIFF's Compression tags
_JPEG_START, _JPEG_END, _CODESTREAM = b"\xff\xd8", b"\xff\xd9", b"\xff\x4f\xff\x51"  # the last: JPEG 2000's SOC and SIZ
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # the markers that say an image's size
_JPEG_BARE = frozenset((0, 1, *range(0xD0, 0xDB)))  # of no length, or the end of the header
_MOST_PIXELS = 2**27  # of a tile: each thread holds one
_MOST_PER_BYTE = 4096  # pixels of level 0 for each byte of the file: blank deflate has 344, blank JPEG 170
_MOST_SEGMENTS = 64  # that a tile has before the one that says its size
_JPEG_TAIL = 64  # bytes in which the end mark is looked for: some writers pad
_UM_PER_UNIT = {2: 25400.0, 3: 10000.0}  # TIFF's ResolutionUnit: inch, centimetre
# Who reads what wrong, and why, by tifffile's page of any level.
_MISREAD: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("cucim tifffile", "Philips pads levels to whole tiles by an amount it does not read", lambda page: (
        str(page.tags.valueof("Software", "")).startswith("Philips")
    )),
    ("cucim tifffile", "Ventana's tiles overlap", lambda page: (
        any(root in str(page.tags.valueof("XMP", "")) for root in ("<iScan", "<EncodeInfo"))
    )),
    ("cucim tifffile", "it takes YCbCr without JPEG for RGB", lambda page: (
        page.photometric == 6 and page.compression not in (JPEG, 33003)
    )),
    ("tifffile", "it takes Aperio's YCbCr for RGB", lambda page: page.compression == 33003),
    ("cucim", "it gives other pixels for a damaged LZW tile", lambda page: page.compression == _LZW),
    ("cucim openslide", "it takes JFIF tiles of YCbCr for RGB, as the tags say", lambda page: (
        page.photometric == 2 and page.compression == JPEG and page.is_jfif
    )),
)  # fmt: skip
# tifffile meets damage with whatever error its parsing runs into: these have been seen. Codecs' are RuntimeErrors.
DAMAGE = (LookupError, ArithmeticError, TypeError, ValueError, RuntimeError, MemoryError, struct.error)


class Box(NamedTuple):
    """A region of a level: first column and row, and the ones behind the last, in that level's pixels."""

    left: int
    top: int
    right: int
    bottom: int

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return self.right - self.left, self.bottom - self.top

    def clip(self, other: "Box") -> "Box":
        """Return what both have in common."""
        return Box(*map(max, self[:2], other[:2]), *map(min, self[2:], other[2:]))

    def within(self, left: int, top: int) -> tuple[slice, slice]:
        """Return where the box lies in an array [H, W, ...] whose first pixel is at (left, top)."""
        return slice(self.top - top, self.bottom - top), slice(self.left - left, self.right - left)


@dataclass(frozen=True, eq=False)
class Level:
    """One level of the pyramid, all in its own pixels."""

    width: int
    height: int
    base: tuple[int, int]  # width and height of level 0
    tile_width: int = 256  # a strip counts as a tile of the level's width; ours where the file tells none
    tile_height: int = 256
    page: Any = None  # tifffile's; None where the file is no TIFF
    # [rows * columns] int64, where each tile's bytes begin, row-major, and how many they are: 0 of one never scanned
    offsets: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    counts: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def downsample(self) -> float:
        """Level-0 pixels that one of them spans."""
        return max(self.base) / max(self.width, self.height)  # the shorter side's rest, cut off, weighs more

    @property
    def grid(self) -> tuple[int, int]:
        """Return how many rows and columns of tiles there are."""
        return -(-self.height // self.tile_height), -(-self.width // self.tile_width)

    def parts(self, box: Box) -> Iterator[tuple[int, int, Box]]:
        """Yield column and row of each tile that a box touches, row-major, and the part of the box in it."""
        wide, high = self.tile_width, self.tile_height
        for row in range(box.top // high, (box.bottom - 1) // high + 1):
            for column in range(box.left // wide, (box.right - 1) // wide + 1):
                yield column, row, box.clip(Box(column * wide, row * high, (column + 1) * wide, (row + 1) * high))


@dataclass(frozen=True)
class Layout:
    """The levels of a slide, largest first, and its pixel size in um at level 0 (None where the file is silent)."""

    levels: tuple[Level, ...]
    mpp: float | None
    misread: dict[str, str] = field(default_factory=dict)  # by reader: why not by it
    predicted: bool = False  # some image, be it a label, has a TIFF predictor and is not LZW


def read_layout(path: Path) -> Layout:
    """Read and check the directories of a TIFF file, without labels and thumbnails; another file has no levels here.

    Raises:
        OSError: there is no such file.
        ValueError: it is empty, damaged or cut short, says more than its bytes hold, has tiles too large for the
            memory or no 8-bit RGB image, or its pixels are not square.
    """
    if not (size := path.stat().st_size):
        raise ValueError(f"{path} is empty (0 bytes): copy it again")
    with path.open("rb") as file:
        if file.read(4) not in TIFF_MAGICS:
            return Layout((), None)
    import tifffile

    try:
        with tifffile.TiffFile(path) as tiff:
            top: list[Any] = list(tiff.pages)
            pages = top + [sub for page in top if getattr(page, "subifds", None) for sub in page.pages]
            tiff.filehandle.seek(tiff.pages.next_page_offset or 0)
            (following,) = struct.unpack(tiff.tiff.offsetformat, tiff.filehandle.read(tiff.tiff.offsetsize))
            if any(sum(page.databytecounts) and not page.imagewidth * page.imagelength for page in pages):
                raise ValueError("one has no width or height")
            found = _pyramid(pages)
            levels = tuple(_level(page, found[0]) for page in found)
            sides = _pixel_sides(found[0]) if found else None
            predicted = any(page.predictor != 1 and page.compression != _LZW for page in pages)
            wrong = [(names, why) for names, why, holds in _MISREAD if any(map(holds, found))]
            if found and any(3 * page.imagewidth * page.imagelength > found[0].size for page in pages):
                wrong.append(("cucim tifffile", "its largest image is not 8-bit RGB, only smaller ones are"))
    except DAMAGE as error:
        raise ValueError(f"{path} ({size} bytes) has damaged TIFF directories ({error}): copy it again") from error
    if following:  # to a directory that cannot be read, which tifffile only logs
        raise ValueError(f"{path} ({size} bytes) is truncated or damaged, no directory at {following}: copy it again")
    if not levels:
        raise ValueError(f"{path}: contains no 8-bit RGB image (three interleaved samples): convert it to an RGB TIFF")
    if (turn := levels[0].page.tags.valueof("Orientation", 1)) != 1:
        raise ValueError(f"{path}: Orientation {turn}: readers differ in how they turn it: save it upright (1)")
    _require_sound(path, size, levels)
    misread = {name: why for names, why in wrong for name in names.split()}
    return Layout(levels, checked_mpp(*sides, path) if sides else None, misread, predicted)


def _require_sound(path: Path, size: int, levels: tuple[Level, ...]) -> None:
    for level in levels:
        wide, high, listed = level.tile_width, level.tile_height, len(level.offsets)
        if min(wide, high) < 1 or not listed == len(level.counts) == math.prod(level.grid):
            found = f"a level of {level.width} x {level.height} lists {listed} tiles of {wide} x {high}"
            raise ValueError(f"{path}: {found}, which do not fill it: copy it again")
        if wide * high > _MOST_PIXELS:
            found = f"a tile or strip has {wide} x {high} pixels, and at most {_MOST_PIXELS} are read"
            raise ValueError(f"{path}: {found}: convert it to a TIFF with small tiles")
    if levels[0].width * levels[0].height > _MOST_PER_BYTE * size:
        found = f"{size} bytes cannot hold its {levels[0].width} x {levels[0].height} pixels"
        raise ValueError(f"{path}: {found} (at most {_MOST_PER_BYTE} per byte): copy it again")
    if beyond := sum(int(np.count_nonzero(level.offsets > size - level.counts)) for level in levels):
        tiles = sum(len(level.offsets) for level in levels)
        raise ValueError(f"{path} is truncated, {beyond} of {tiles} tiles are beyond its {size} bytes: copy it again")


def looks_whole(level: Level, tile: int, file: int) -> bool:
    """Return False where a JPEG or JPEG 2000 tile (numbered row by row) has no start or end, or another size than said.

    Native decoders give a tile without end as noise or grey without a word, and write one that is larger than the
    directory says beyond the memory they keep for it; OpenSlide gives garbage behind damage in deflate, which is not
    whole either. Damage within other tiles is not seen here, nor any in NDPI, where a tile is a part of one JPEG.
    """
    if level.page is None or level.page.jpegheader or level.page.compression not in (JPEG, *DEFLATE, *_JPEG_2000):
        return True
    offset, count = int(level.offsets[tile]), int(level.counts[tile])
    if level.page.compression in DEFLATE:
        try:
            return bool(zlib.decompress(os.pread(file, count, offset)))
        except zlib.error:
            return False
    left = level.height - tile * level.tile_height  # for a strip, which the last one may not fill
    due = (8, level.tile_width, level.tile_height if level.page.is_tiled else min(level.tile_height, left), 3)
    if level.page.compression != JPEG:
        return _jpeg_2000_frame(file, offset) == due
    if jpeg_frame(partial(os.pread, file), offset) != due:
        return False
    tail = os.pread(file, min(_JPEG_TAIL, count), offset + max(0, count - _JPEG_TAIL))
    return _JPEG_END in tail or not tail.endswith(b"\0\0")


def jpeg_frame(read: Callable[[int, int], bytes], offset: int) -> tuple[int, ...]:
    """Return bits, width, height and samples of a JPEG that `read(count, offset)` reads; () of tables, (0,) of none."""
    at = offset + len(_JPEG_START)
    for _ in range(_MOST_SEGMENTS if read(2, offset) == _JPEG_START else 0):
        head = read(10, at).ljust(10, b"\0")
        mark, kind, length, bits, height, width, samples = struct.unpack(">BBHBHHB", head)
        if mark == 0xFF and kind == _JPEG_END[1]:
            return ()
        if mark != 0xFF or kind in _JPEG_BARE or (kind != 0xFF and length < 2):
            break
        if kind in _JPEG_FRAMES:
            return bits, width, height, samples
        at += 1 if kind == 0xFF else 2 + length  # a mark may be filled up in front
    return (0,)


def _jpeg_2000_frame(file: int, offset: int) -> tuple[int, ...]:
    """Return bits, width, height and samples that a JPEG 2000 codestream, bare or in boxes, says; else (0,)."""
    for _ in range(_MOST_SEGMENTS):
        head = os.pread(file, 43, offset).ljust(43, b"\0")
        if head.startswith(_CODESTREAM):
            right, bottom, left, top, samples, bits = struct.unpack(">8x4I16xHB", head)
            return bits + 1, right - left, bottom - top, samples
        length, kind = struct.unpack_from(">I4s", head)
        offset += 8 if kind == b"jp2c" else max(8, length)
    return (0,)


def _pyramid(pages: list[Any]) -> list[Any]:
    """Return the largest 8-bit RGB page, and smaller ones (or SubIFDs) of its shape, tiled as it is, largest first."""
    rgb = [page for page in pages if page.dtype == np.uint8 and page.shape == (page.imagelength, page.imagewidth, 3)]
    images = sorted((page for page in rgb if page.size), key=lambda page: page.size, reverse=True)
    levels: dict[int, Any] = {}
    for page in images:
        base, (width, height) = images[0], (page.imagewidth, page.imagelength)
        ratio = width / base.imagewidth * base.imagelength / height
        alike = abs(ratio - 1) <= ASPECT_TOLERANCE + 1.5 / min(width, height) and page.is_tiled == base.is_tiled
        if width <= base.imagewidth and alike:  # of one width the largest, which comes first
            levels.setdefault(width, page)
    return [levels[width] for width in sorted(levels, reverse=True)]


def _level(page: Any, base: Any) -> Level:  # noqa: ANN401 - tifffile's
    width, height = page.imagewidth, page.imagelength
    tile = (page.tilewidth, page.tilelength) if page.is_tiled else (width, min(page.rowsperstrip, height))
    tables = page.jpegtables or b""
    if tables and jpeg_frame(lambda count, at: tables[at : at + count], 0):  # cuCIM gives its pixels for each tile's
        raise ValueError("its JPEG tables are none")
    page.init_decode()  # looks into the file for what decodes its tiles: now, while it is open
    places = (np.array(each, np.int64) for each in (page.dataoffsets, page.databytecounts))
    return Level(width, height, (base.imagewidth, base.imagelength), *tile, page, *places)


def _pixel_sides(page: Any) -> tuple[float, float] | None:  # noqa: ANN401 - tifffile's
    """Return Aperio's MPP where the description has one, else what the resolution tags say: width and height in um."""
    said = re.search(r"\bMPP\s*=\s*(\d+(?:[.,]\d+)?(?:[eE][-+]?\d+)?)", page.description or "")
    if said:
        return (float(said[1].replace(",", ".")),) * 2
    unit, (x, y) = _UM_PER_UNIT.get(int(page.tags.valueof("ResolutionUnit", 2))), page.resolution
    return (unit / x, unit / y) if unit and x and y else None


def checked_mpp(mpp_x: float, mpp_y: float, path: Path) -> float | None:
    """Return the mean pixel side in um, None of no microscope's; a ValueError where they differ by over 5 percent."""
    if not (MIN_MPP <= mpp_x <= MAX_MPP and MIN_MPP <= mpp_y <= MAX_MPP):
        return None
    if max(mpp_x, mpp_y) > (1 + MAX_ANISOTROPY) * min(mpp_x, mpp_y):
        found = f"pixels of {mpp_x:.4g} x {mpp_y:.4g} um are not square (at most {MAX_ANISOTROPY:.0%} apart)"
        raise ValueError(f"{path}: {found}: resample the slide or correct its resolution tags")
    return (mpp_x + mpp_y) / 2
