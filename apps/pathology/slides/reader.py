"""Whole-slide images: regions of any level by one call, whichever of cuCIM, OpenSlide and tifffile reads the file."""

import math
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Literal

import numpy as np

from apps.pathology.slides.handles import CUCIM_GRUMBLES, HANDLES, Handle, ReaderName, UnreadableError, open_handle
from apps.pathology.slides.layout import Box, Layout, Tile, looks_whole, read_layout

Reader = Literal["auto", "cucim", "openslide", "tifffile"]
WHITE = 255  # what lies outside a slide, was never scanned or cannot be decoded
_UNSEEN, _FINE, _NEVER_SCANNED, _DAMAGED = range(4)  # what is known of a tile
_MOST_OPEN = 16  # slides in a pool: each holds two or three file descriptors, with OpenSlide a cache of 32 MiB too


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
        self.levels, self.mpp = self._handle.levels, self._handle.mpp
        self._known = [np.full(level.grid, _UNSEEN, np.uint8) for level in self.levels]
        self._file = os.open(path, os.O_RDONLY)
        self._lock = threading.Lock()

    @property
    def damaged_tiles(self) -> tuple[Tile, ...]:
        """Return the tiles that could not be decoded so far, each once, by level, row and column."""
        found = ((level, np.argwhere(known == _DAMAGED).tolist()) for level, known in enumerate(self._known))
        return tuple(Tile(level, column, row) for level, places in found for row, column in places)

    def read(self, x: int, y: int, width: int, height: int, level: int = 0) -> np.ndarray:
        """Return a region as [height, width, 3] uint8 RGB.

        White where it lies outside the slide and where a tile was never scanned or cannot be decoded; the latter
        tiles are remembered in `damaged_tiles`. cuCIM notices less damage than the others: see `handles`.

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
        regions = np.empty((len(corners), size[1], size[0], 3), np.uint8)
        place = self.levels[level]
        tile = place.downsample * np.array([place.tile_width, place.tile_height])
        columns, rows = (corners / tile).T.astype(np.int64)

        def read_one(number: int) -> None:
            self._read_into(regions[number], int(corners[number, 0]), int(corners[number, 1]), level)

        with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0)), "slide") as pool:
            for _ in pool.map(read_one, np.lexsort((columns, rows)).tolist()):
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
        place = self.levels[level]
        left, top = (math.floor(corner / place.downsample) for corner in (x, y))
        height, width = region.shape[:2]
        box = Box(max(left, 0), max(top, 0), min(left + width, place.width), min(top + height, place.height))
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

    def _tiles(self, box: Box, level: int) -> list[Tile]:
        """Return the tiles that a box touches, row-major."""
        place = self.levels[level]
        rows = range(box.top // place.tile_height, (box.bottom - 1) // place.tile_height + 1)
        columns = range(box.left // place.tile_width, (box.right - 1) // place.tile_width + 1)
        return [Tile(level, column, row) for row in rows for column in columns]

    def _state(self, tile: Tile) -> int:
        """Return what is known of a tile, having looked at its bytes once; threads may find the same twice."""
        known, place = self._known[tile.level], self.levels[tile.level]
        if known[tile.row, tile.column] == _UNSEEN:
            number = tile.row * place.grid[1] + tile.column
            state = _FINE
            if len(place.counts) and not place.counts[number]:
                state = _NEVER_SCANNED
            elif not looks_whole(place, number, self._file):
                state = _DAMAGED
            known[tile.row, tile.column] = state
        return int(known[tile.row, tile.column])

    def _read_by_tile(self, inside: np.ndarray, box: Box, tiles: list[Tile]) -> None:
        """Fill `inside` tile by tile, white where one cannot be read.

        A handle of its own serves: after an error OpenSlide's handles fail for good, also under the other threads.
        """
        place = self.levels[tiles[0].level]
        inside[...] = WHITE
        private: Handle | None = None
        for tile in tiles:
            if self._state(tile) != _FINE:
                continue
            private = private or open_handle(self.path, self._layout, self.reader)
            left, top = tile.column * place.tile_width, tile.row * place.tile_height
            right, bottom = min(left + place.tile_width, box.right), min(top + place.tile_height, box.bottom)
            part = Box(max(left, box.left), max(top, box.top), right, bottom)
            target = inside[part.top - box.top : bottom - box.top, part.left - box.left : right - box.left]
            try:
                target[...] = _read_box(private, part, tile.level)
            except UnreadableError:
                self._known[tile.level][tile.row, tile.column] = _DAMAGED
                private.close()
                private = None
        if private is not None:
            private.close()

    def _renew(self, failed: Handle) -> None:
        """Put a new handle in the place of one that failed; it closes itself when no thread reads from it any more."""
        if self.reader != "openslide":
            return  # the others go on after an error
        with self._lock:
            if self._handle is failed:
                self._handle = open_handle(self.path, self._layout, self.reader)


def _read_box(handle: Handle, box: Box, level: int) -> np.ndarray:
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
        if reader == "auto" and layout is not None and len(slide.levels) < len(layout.levels):
            refused.append(f"{name}: sees {len(slide.levels)} of {len(layout.levels)} levels")
            slide.close()
            continue
        return slide
    with path.open("rb") as file:
        start = "" if layout is not None else f" is no TIFF (it begins with {file.read(4)!r}) and"
    raise ValueError(
        f"{path}{start} cannot be read ({'; '.join(refused)}): fetch it again, or convert it to a tiled RGB TIFF"
    )


def _grumbles(layout: Layout | None) -> bool:
    return layout is not None and any(level.compression in CUCIM_GRUMBLES for level in layout.levels)


class SlidePool:
    """Slides that stay open between reads; of more than 16, the ones not used for longest are closed.

    Threads may share a pool. Slides in use are never closed: there may be more than 16 of them meanwhile.

    Args:
        reader: as `open_slide`.
    """

    def __init__(self, reader: Reader = "auto") -> None:
        self._reader = reader
        self._open: OrderedDict[Path, Slide] = OrderedDict()  # least recently used first
        self._users: dict[Path, int] = {}
        self._damaged: dict[Path, set[Tile]] = {}  # of slides closed since
        self._lock = threading.Lock()

    @contextmanager
    def use(self, path: Path) -> Iterator[Slide]:
        """Yield the slide, opened where it is not yet; it stays open within the block.

        Raises:
            FileNotFoundError, ModuleNotFoundError, ValueError: as `open_slide`.
        """
        with self._lock:
            if path not in self._open:
                self._open[path] = open_slide(path, self._reader)
            slide = self._open[path]
            self._open.move_to_end(path)
            self._users[path] = self._users.get(path, 0) + 1
        try:
            yield slide
        finally:
            with self._lock:
                self._users[path] -= 1
                self._close_idle(_MOST_OPEN)

    @property
    def damaged(self) -> dict[Path, tuple[Tile, ...]]:
        """Return the tiles that could not be decoded so far, by slide; slides without any are left out."""
        with self._lock:
            found = {path: set(tiles) for path, tiles in self._damaged.items()}
            for path, slide in self._open.items():
                found.setdefault(path, set()).update(slide.damaged_tiles)
        return {path: tuple(sorted(tiles)) for path, tiles in found.items() if tiles}

    def close(self) -> None:
        """Close all slides that are not in use."""
        with self._lock:
            self._close_idle(0)

    def _close_idle(self, limit: int) -> None:
        idle = [path for path in self._open if not self._users[path]]
        for path in idle[: max(0, len(self._open) - limit)]:
            slide = self._open.pop(path)
            del self._users[path]
            self._damaged.setdefault(path, set()).update(slide.damaged_tiles)
            slide.close()
