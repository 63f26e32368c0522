"""Whole-slide images: regions of any level by one call, whichever of cuCIM, OpenSlide and tifffile reads the file."""

import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple

import numpy as np

from common.data.slide_layout import Layout, looks_whole, read_layout
from common.data.slide_readers import CUCIM_GRUMBLES, HANDLES, Handle, ReaderName, UnreadableError, open_handle

Reader = Literal["auto", "cucim", "openslide", "tifffile"]
WHITE = 255  # what lies outside a slide, was never scanned or cannot be decoded
_UNSEEN, _FINE, _NEVER_SCANNED, _DAMAGED = range(4)  # what is known of a tile


@dataclass(frozen=True)
class Level:
    """One level of the pyramid: its size in pixels, and how many level-0 pixels one of them spans."""

    width: int
    height: int
    downsample: float


class Tile(NamedTuple):
    """Where a tile lies: level, and column and row in that level's grid of tiles."""

    level: int
    column: int
    row: int


class _Box(NamedTuple):
    """A region of a level: first column and row, and the ones behind the last, in that level's pixels."""

    left: int
    top: int
    right: int
    bottom: int


class Slide:
    """An open slide; threads may read from it at the same time.

    Attributes:
        path: the file.
        name: its name without suffix.
        reader: the library that reads it.
        levels: largest first.
        mpp: um per pixel at level 0; None where the file does not say.
    """

    def __init__(self, path: Path, reader: ReaderName, layout: Layout | None) -> None:
        self.path, self.name, self.reader = path, path.stem, reader
        self._layout = layout
        self._handle: Handle | None = open_handle(path, layout, reader)
        self._planes, self.mpp = self._handle.planes, self._handle.mpp
        base = self._planes[0]
        self.levels = tuple(
            Level(plane.width, plane.height, (base.width / plane.width + base.height / plane.height) / 2)
            for plane in self._planes
        )
        self._known = [np.full((plane.rows, plane.columns), _UNSEEN, np.uint8) for plane in self._planes]
        self._file = os.open(path, os.O_RDONLY)
        self._lock = threading.Lock()

    @property
    def damaged_tiles(self) -> tuple[Tile, ...]:
        """Return the tiles that could not be decoded so far, each once, by level, row and column."""
        found = ((level, np.argwhere(known == _DAMAGED).tolist()) for level, known in enumerate(self._known))
        return tuple(Tile(level, column, row) for level, places in found for row, column in places)

    @property
    def damaged(self) -> int:
        """Return how many tiles could not be decoded so far."""
        return sum(int(np.count_nonzero(known == _DAMAGED)) for known in self._known)

    def read(self, x: int, y: int, width: int, height: int, level: int = 0) -> np.ndarray:
        """Return a region as [height, width, 3] uint8 RGB.

        White where it lies outside the slide and where a tile was never scanned or cannot be decoded; the latter
        tiles are remembered in `damaged_tiles`. cuCIM notices less damage than the others: see `slide_readers`.

        Args:
            x: left edge in pixels of level 0, negative or beyond the slide too; between two pixels of `level`, the one
                to the left counts.
            y: upper edge, likewise.
            width: in pixels of `level`.
            height: in pixels of `level`.
            level: index into `levels`.
        """
        region = np.empty((height, width, 3), np.uint8)
        self._read_into(region, x, y, level)
        return region

    def read_many(
        self, corners: np.ndarray, size: tuple[int, int], level: int = 0, workers: int | None = None
    ) -> np.ndarray:
        """Return many regions as [N, height, width, 3] uint8, in the order of `corners`.

        They are read in the order in which their tiles lie in the file, by threads: decoding releases Python's lock.

        Args:
            corners: [N, 2] int64, (x, y) of each upper left corner in pixels of level 0.
            size: (width, height) in pixels of `level`.
            level: index into `levels`.
            workers: threads; by default one per core that this process may use.
        """
        assert corners.shape == (len(corners), 2), corners.shape
        assert np.issubdtype(corners.dtype, np.integer), corners.dtype
        regions = np.empty((len(corners), size[1], size[0], 3), np.uint8)
        plane, downsample = self._planes[level], self.levels[level].downsample
        columns, rows = (corners / (downsample * np.array([plane.tile_width, plane.tile_height]))).T.astype(np.int64)
        order = np.lexsort((columns, rows))

        def read_one(place: int) -> None:
            self._read_into(regions[place], int(corners[place, 0]), int(corners[place, 1]), level)

        with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0)), "slide") as pool:
            for _ in pool.map(read_one, order.tolist()):
                pass
        return regions

    def close(self) -> None:
        """Close the file; closing twice does no harm."""
        with self._lock:
            if self._handle is not None:
                self._handle.close()
                os.close(self._file)
                self._handle = None

    def __enter__(self) -> "Slide":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_into(self, region: np.ndarray, x: int, y: int, level: int) -> None:
        """Fill `region` [height, width, 3] with the slide at (x, y), pixels of level 0."""
        place, plane = self.levels[level], self._planes[level]
        left, top = (math.floor(corner / place.downsample) for corner in (x, y))
        height, width = region.shape[:2]
        box = _Box(max(left, 0), max(top, 0), min(left + width, plane.width), min(top + height, plane.height))
        if box != (left, top, left + width, top + height):
            region[...] = WHITE
        if box.left >= box.right or box.top >= box.bottom:
            return
        inside = region[box.top - top : box.bottom - top, box.left - left : box.right - left]
        tiles = self._tiles(box, level)
        if all(self._state(tile) == _FINE for tile in tiles):
            handle = self._handle
            assert handle is not None, f"{self.path} is closed"
            try:
                inside[...] = _read_box(handle, box, level)
                return
            except UnreadableError:  # in which of the tiles, the next call finds out
                self._renew(handle)
        self._read_by_tile(inside, box, tiles)

    def _tiles(self, box: _Box, level: int) -> list[Tile]:
        """Return the tiles that a box touches, row-major."""
        plane = self._planes[level]
        rows = range(box.top // plane.tile_height, (box.bottom - 1) // plane.tile_height + 1)
        columns = range(box.left // plane.tile_width, (box.right - 1) // plane.tile_width + 1)
        return [Tile(level, column, row) for row in rows for column in columns]

    def _state(self, tile: Tile) -> int:
        """Return what is known of a tile, having looked at its bytes once; threads may find the same twice."""
        known, plane = self._known[tile.level], self._planes[tile.level]
        if known[tile.row, tile.column] == _UNSEEN:
            number = tile.row * plane.columns + tile.column
            state = _FINE
            if len(plane.counts) and not plane.counts[number]:
                state = _NEVER_SCANNED
            elif not looks_whole(plane, number, self._file):
                state = _DAMAGED
            known[tile.row, tile.column] = state
        return int(known[tile.row, tile.column])

    def _read_by_tile(self, inside: np.ndarray, box: _Box, tiles: list[Tile]) -> None:
        """Fill `inside` tile by tile, white where one cannot be read.

        A handle of its own serves: after an error OpenSlide's handles fail for good, also under the other threads.
        """
        plane = self._planes[tiles[0].level]
        inside[...] = WHITE
        private: Handle | None = None
        for tile in tiles:
            if self._state(tile) != _FINE:
                continue
            private = private or open_handle(self.path, self._layout, self.reader)
            left, top = tile.column * plane.tile_width, tile.row * plane.tile_height
            right, bottom = min(left + plane.tile_width, box.right), min(top + plane.tile_height, box.bottom)
            part = _Box(max(left, box.left), max(top, box.top), right, bottom)
            try:
                pixels = _read_box(private, part, tile.level)
            except UnreadableError:
                self._known[tile.level][tile.row, tile.column] = _DAMAGED
                private.close()
                private = None
                continue
            inside[part.top - box.top : part.bottom - box.top, part.left - box.left : part.right - box.left] = pixels
        if private is not None:
            private.close()

    def _renew(self, failed: Handle) -> None:
        """Put a new handle in the place of one that failed; it closes itself when no thread reads from it any more."""
        if self.reader != "openslide":
            return  # the others go on after an error
        with self._lock:
            if self._handle is failed:
                self._handle = open_handle(self.path, self._layout, self.reader)


def _read_box(handle: Handle, box: _Box, level: int) -> np.ndarray:
    return handle.read(box.left, box.top, box.right - box.left, box.bottom - box.top, level)


def open_slide(path: Path | str, reader: Reader = "auto") -> Slide:
    """Open a whole-slide image.

    Args:
        path: a tiled or stripped TIFF (.tif, .svs, ...) of 8-bit RGB; what else OpenSlide knows, with OpenSlide only.
        reader: the library, or "auto": cuCIM where it is installed and sees all levels of the file, and this has no
            deflate; else OpenSlide if it sees all levels, else tifffile. `Slide.reader` says which it came to be:
            print and record it.

    Raises:
        FileNotFoundError: there is no such file.
        ModuleNotFoundError: the reader is not installed; the message says how to.
        ValueError: the file is empty, damaged, cut short or no 8-bit RGB, its pixels are not square, or no
            reader takes it.
    """
    path = Path(path)
    layout = read_layout(path)
    refused = []
    for name in HANDLES:
        if reader not in ("auto", name) or (reader == "auto" and name == "cucim" and _grumbles(layout)):
            continue
        try:
            slide = Slide(path, name, layout)
        except (ModuleNotFoundError, ValueError) as error:
            if isinstance(error, ModuleNotFoundError) and reader != "auto":
                raise
            refused.append(f"{name}: {error}")
            continue
        if reader == "auto" and layout is not None and len(slide.levels) < len(layout.planes):
            refused.append(f"{name}: sees {len(slide.levels)} of {len(layout.planes)} levels")
            slide.close()
            continue
        return slide
    start = "" if layout is not None else f" is no TIFF (it begins with {_first_bytes(path)!r}) and"
    raise ValueError(
        f"{path}{start} cannot be read ({'; '.join(refused)}): fetch it again, or convert it to a tiled RGB TIFF"
    )


def _grumbles(layout: Layout | None) -> bool:
    return layout is not None and any(plane.compression in CUCIM_GRUMBLES for plane in layout.planes)


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4)
