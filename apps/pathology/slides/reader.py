"""Whole-slide images: regions of any level by one call, whichever of cuCIM, OpenSlide and tifffile reads the file."""

import math
import os
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal

import numpy as np

from medspeed.apps.pathology.slides.handles import HANDLES, Handle, UnreadableError, open_handle
from medspeed.apps.pathology.slides.layout import DEFLATE, Box, Tile, looks_whole, read_layout

Reader = Literal["auto", "cucim", "openslide", "tifffile"]
WHITE = 255  # what lies outside a slide, was never scanned or cannot be decoded
_MOST_OPEN = 16  # slides in a pool: each holds two or three file descriptors, with OpenSlide a cache of 32 MiB too


class Slide:
    """An open slide, closed at the latest when it is let go; threads may read from it at the same time.

    Attributes:
        path: the file.
        name: its name without suffix.
        reader: the library that reads it.
        levels: largest first.
        mpp: um per pixel at level 0; None where the file does not say.
        damaged: the tiles that could not be decoded so far.
    """

    def __init__(self, path: Path, reader: str, handle: Handle) -> None:
        self.path, self.name, self.reader = path, path.stem, reader
        self.levels, self.mpp = handle.levels, handle.mpp
        self.damaged: set[Tile] = set()
        self._handle = handle
        self._sound = [np.zeros(level.grid, bool) for level in self.levels]  # tiles seen to be
        self._file = os.open(path, os.O_RDONLY)
        self._close = weakref.finalize(self, os.close, self._file)

    def read(self, x: int, y: int, width: int, height: int, level: int = 0) -> np.ndarray:
        """Return a region as [height, width, 3] uint8 RGB.

        White where it lies outside the slide and where a tile was never scanned or cannot be decoded; the latter
        tiles are remembered in `damaged`. cuCIM notices less damage than the others: see `handles`. The upper left
        corner (x, y) is in pixels of level 0, negative or beyond the slide too, the size in pixels of `level`; between
        two pixels of that the left or upper one counts.
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
        if self._close.alive:
            self._handle.close()
            self._close()

    def __enter__(self) -> "Slide":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read_into(self, region: np.ndarray, x: int, y: int, level: int) -> None:
        """Fill `region` [height, width, 3] with the slide at (x, y), pixels of level 0."""
        place = self.levels[level]
        left, top = (math.floor(corner / place.downsample) for corner in (x, y))
        asked = Box(left, top, left + region.shape[1], top + region.shape[0])
        box = asked.clip(Box(0, 0, place.width, place.height))
        if box != asked:
            region[...] = WHITE
        if min(box.size) <= 0:
            return
        parts = [(Tile(level, column, row), part) for row, column, part in place.parts(box)]
        if all(self._is_readable(tile) for tile, _ in parts):
            with suppress(UnreadableError):  # in which of the tiles, is found out below
                region[box.within(left, top)] = self._handle.read(box, level)
                return
        for tile, part in parts:
            inside = region[part.within(left, top)]
            inside[...] = WHITE
            if self._is_readable(tile):
                try:
                    inside[...] = self._handle.read(part, level)
                except UnreadableError:
                    self._sound[level][tile.row, tile.column] = False
                    self.damaged.add(tile)

    def _is_readable(self, tile: Tile) -> bool:
        """Return whether a tile was scanned and no damage is known, having looked at its bytes once."""
        sound, level = self._sound[tile.level], self.levels[tile.level]
        if not sound[tile.row, tile.column] and tile not in self.damaged:
            number = tile.row * level.grid[1] + tile.column
            if len(level.counts) and not level.counts[number]:
                return False
            if looks_whole(level, number, self._file):
                sound[tile.row, tile.column] = True
            else:
                self.damaged.add(tile)
        return bool(sound[tile.row, tile.column])


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
    for name in HANDLES if reader == "auto" else (reader,):
        # cuCIM reads deflate right, but its libtiff prints an error for each level of each slide.
        if reader == "auto" and name == "cucim" and any(each.compression in DEFLATE for each in layout.levels):
            continue
        try:
            handle = open_handle(path, layout, name)
        except (ModuleNotFoundError, ValueError) as error:
            if isinstance(error, ModuleNotFoundError) and reader != "auto":
                raise
            refused.append(f"{name}: {error}")
            continue
        if reader != "auto" or len(handle.levels) >= len(layout.levels):
            return Slide(path, name, handle)
        handle.close()
        refused.append(f"{name}: reads {len(handle.levels)} of {len(layout.levels)} levels")
    with path.open("rb") as file:
        start = "" if layout.levels else f" is not a TIFF (it begins with {file.read(4)!r}) and"
    raise ValueError(f"{path}{start} cannot be read ({'; '.join(refused)}): copy it again, or convert it to tiled TIFF")


class SlidePool:
    """Slides that stay open between reads; of more than 16, the ones not used for longest are let go.

    Threads may share a pool. A slide that is let go closes when nobody uses it any more: there may be more than 16.
    """

    def __init__(self, reader: Reader = "auto") -> None:
        self._opened = lru_cache(_MOST_OPEN)(partial(open_slide, reader=reader))
        self._damaged: dict[Path, set[Tile]] = {}  # of slides closed since, too

    @contextmanager
    def use(self, path: Path) -> Iterator[Slide]:
        """Yield the slide, opened where it is not yet; it stays open within the block.

        Raises:
            FileNotFoundError, ModuleNotFoundError, ValueError: as `open_slide`.
        """
        slide = self._opened(path)
        slide.damaged = self._damaged.setdefault(path, slide.damaged)
        yield slide

    @property
    def damaged(self) -> dict[Path, tuple[Tile, ...]]:
        """Return the tiles that could not be decoded so far, by slide; slides without any are left out."""
        return {path: tuple(sorted(tiles)) for path, tiles in self._damaged.copy().items() if tiles}

    def close(self) -> None:
        """Let go of all slides."""
        self._opened.cache_clear()
