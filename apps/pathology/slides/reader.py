"""Whole-slide images: regions of any level by one call, whichever of cuCIM, OpenSlide and tifffile reads the file.

All three give equal pixels for raw, deflate and JPEG tiles, and those that take it for LZW; JPEG 2000 within 1 of 255.
OpenSlide interpolates where a level's downsample is no whole number, up to half a pixel off the others. cuCIM leaves
noise for the rest of a JPEG tile with damage in its middle; none sees wrong bits that still decode (cuCIM 26.10,
OpenSlide 4.0.1).
"""

import math
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from medspeed.apps.pathology.config import Reader
from medspeed.apps.pathology.slides.layout import DEFLATE, Box, Layout, Level, checked_mpp, looks_whole, read_layout

WHITE = 255  # what lies outside a slide, was never scanned or cannot be decoded
# TIFF's Compression tag: raw, LZW, JPEG, deflate (two numbers), Aperio's JPEG 2000 (two). cuCIM opens others too, and
# fails at every tile.
_CUCIM_COMPRESSIONS = {1, 5, 7, 8, 32946, 33003, 33005}
_UNREADABLE = (RuntimeError, ValueError)  # what reading damage raises
_CUCIM_OPENS = threading.Lock()  # where two threads open their first slides at once, one start in 100 crashes (26.10)


# A file in one of the libraries: what it has of levels and pixel size, and what reads a box within a level as
# [height, width, 3] uint8, or raises one of _UNREADABLE.
Opened = tuple[tuple[Level, ...], float | None, Callable[[Box, int], np.ndarray]]


def _open_cucim(path: Path, layout: Layout) -> Opened:
    from cucim.clara import CuImage

    if not all(level.page.is_tiled for level in layout.levels):
        raise ValueError("reads tiles, this file has strips")
    if strange := {level.page.compression for level in layout.levels} - _CUCIM_COMPRESSIONS:
        raise ValueError(f"does not decode TIFF compression {sorted(strange)}")
    if layout.predicted:
        raise ValueError("crashes on TIFF predictors, except with LZW")
    try:
        with _CUCIM_OPENS:
            image: Any = CuImage(str(path))
        sizes = [tuple(size) for size in image.resolutions["level_dimensions"]]
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"cuCIM: {error}") from error
    due = [(level.width, level.height) for level in layout.levels]
    if sizes != due:
        raise ValueError(f"cuCIM reads levels {sizes}, the file has {due}")
    downsamples = list(image.resolutions["level_downsamples"])

    def read(box: Box, level: int) -> np.ndarray:
        # cuCIM takes level 0's pixels and rounds x / downsample down: aim a little inside the pixel, not at its edge.
        inside = min(0.25, (downsamples[level] - 1) / 2)
        corner = (math.ceil(side * downsamples[level] + inside) for side in box[:2])
        return np.asarray(image.read_region(tuple(corner), box.size, level))

    return layout.levels, layout.mpp, read


def _open_openslide(path: Path, layout: Layout) -> Opened:
    import openslide

    try:
        slide = openslide.OpenSlide(path)
    except openslide.OpenSlideError as error:
        raise ValueError(f"OpenSlide: {error}") from error
    known = {(level.width, level.height): level for level in layout.levels}
    sizes, downsamples = slide.level_dimensions, slide.level_downsamples
    levels = tuple(known.get(size) or Level(*size, sizes[0]) for size in sizes)
    x, y = (float(slide.properties.get(f"openslide.mpp-{axis}", 0)) for axis in "xy")

    def region(slide: Any, box: Box, level: int) -> np.ndarray:  # noqa: ANN401 - OpenSlide's
        corner = round(box.left * downsamples[level]), round(box.top * downsamples[level])
        pixels = slide.read_region(corner, level, box.size)
        on_white = Image.new("RGB", box.size, "white")
        on_white.paste(pixels, mask=pixels)
        return np.asarray(on_white)

    def read(box: Box, level: int) -> np.ndarray:
        nonlocal slide
        try:
            return region(slide, box, level)
        except openslide.OpenSlideError:
            slide = openslide.OpenSlide(path)  # the old one closes when no thread reads from it any more
        try:
            return region(openslide.OpenSlide(path), box, level)  # another thread's region may have been what failed
        except openslide.OpenSlideError as error:
            raise RuntimeError(str(error)) from error

    return levels, (layout.mpp if sizes[0] in known else None) or checked_mpp(x, y, path), read  # not a thumbnail's


def _open_tifffile(path: Path, layout: Layout) -> Opened:
    import imagecodecs  # noqa: F401 - tifffile decodes with it, and asks for it only at the first tile

    file = os.open(path, os.O_RDONLY)

    def read(box: Box, level: int) -> np.ndarray:
        place = layout.levels[level]
        page, region = place.page, np.empty((*box.size[::-1], 3), np.uint8)
        of_jpeg = {"jpegtables": page.jpegtables, "jpegheader": page.jpegheader, "_fullsize": page.is_tiled}
        for column, row, part in place.parts(box):
            number = row * place.grid[1] + column
            stored = os.pread(file, int(place.counts[number]), int(place.offsets[number]))
            try:
                decoded, _, shape = page.decode(stored, number, **of_jpeg)
            except MemoryError as error:  # of a tile that says to be huge
                raise RuntimeError(str(error)) from error
            tile = np.asarray(decoded).reshape(shape[1:])  # the last strip is shorter
            here = part.within(column * place.tile_width, row * place.tile_height)
            region[part.within(box.left, box.top)] = tile[here]
        return region

    weakref.finalize(read, os.close, file)
    return layout.levels, layout.mpp, read


_LIBRARIES: dict[str, tuple[Callable[[Path, Layout], Opened], str]] = {
    "cucim": (_open_cucim, "pip install --no-deps cucim-cu13 click lazy-loader"),
    "openslide": (_open_openslide, "pip install openslide-python openslide-bin"),
    "tifffile": (_open_tifffile, "pip install tifffile imagecodecs"),
}


class Slide:
    """An open slide, closed when it is let go; threads may read from it at the same time."""

    def __init__(self, path: Path, reader: str, opened: Opened) -> None:
        self.path, self.name, self.reader = path, path.stem, reader  # the library that reads it
        self.levels, self.mpp, self._read = opened  # largest first; um per pixel at level 0, None where not known
        self.damaged: set[tuple[int, int, int]] = set()  # level, column and row of the tiles not decoded so far
        self._seen = [np.zeros(level.grid, bool) for level in self.levels]  # the tiles whose bytes were looked at
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def read(self, x: int, y: int, width: int, height: int, level: int = 0) -> np.ndarray:
        """Return a region as [height, width, 3] uint8 RGB.

        White where it lies outside the slide and where a tile was never scanned or cannot be decoded; the latter
        tiles are remembered in `damaged`. The upper left corner (x, y) is in pixels of level 0, negative or beyond the
        slide too, the size in pixels of `level`; between two pixels of that the left or upper one counts.
        """
        region = np.empty((height, width, 3), np.uint8)
        self._read_into(region, x, y, level)
        return region

    def read_many(
        self, corners: np.ndarray, size: tuple[int, int], level: int = 0, workers: int | None = None
    ) -> np.ndarray:
        """Return regions of size (width, height) at many corners, [N, 2] int64 (see `read`): [N, height, width, 3].

        They are read by threads, one per core unless told.
        """
        regions = np.empty((len(corners), size[1], size[0], 3), np.uint8)
        with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0)), "slide") as pool:
            list(pool.map(self._read_into, regions, *corners.T.tolist(), repeat(level)))
        return regions

    def _read_into(self, region: np.ndarray, x: int, y: int, level: int) -> None:
        place = self.levels[level]
        left, top = (math.floor(corner / place.downsample) for corner in (x, y))
        asked = Box(left, top, left + region.shape[1], top + region.shape[0])
        box = asked.clip(Box(0, 0, place.width, place.height))
        parts = [((level, x, y), part) for x, y, part in place.parts(box)] if min(box.size) > 0 else []
        if box != asked:
            region[...] = WHITE
        if parts and all(self._is_readable(*tile) for tile, _ in parts):
            with suppress(*_UNREADABLE):  # in which of the tiles, is found out below
                region[box.within(left, top)] = self._read(box, level)
                return
        for tile, part in parts:
            inside = region[part.within(left, top)]
            inside[...] = WHITE
            if self._is_readable(*tile):
                try:
                    inside[...] = self._read(part, level)
                except _UNREADABLE:
                    self.damaged.add(tile)

    def _is_readable(self, number: int, column: int, row: int) -> bool:
        """Return whether a tile was scanned and no damage is known, having looked at its bytes once."""
        level, tile, seen = self.levels[number], (number, column, row), self._seen[number]
        place = row * level.grid[1] + column
        if len(level.counts) and not level.counts[place]:
            return False
        if not seen[row, column] and not looks_whole(level, place, self._file):
            self.damaged.add(tile)
        seen[row, column] = True
        return tile not in self.damaged


def open_slide(path: Path, reader: Reader = "auto") -> Slide:
    """Open a tiled or stripped TIFF (.tif, .svs, ...) of 8-bit RGB, or, with OpenSlide, what else this knows.

    The reader "auto" is cuCIM where it is installed and sees all levels of the file, and this has no deflate; else
    OpenSlide if it sees all levels, else tifffile. `Slide.reader` says which it came to be: print and record it.

    Raises:
        FileNotFoundError: there is no such file.
        ModuleNotFoundError: the reader is not installed.
        ValueError: `read_layout` refuses the file, or no reader takes it.
    """
    layout = read_layout(path)
    refused = []
    for name in _LIBRARIES if reader == "auto" else (reader,):
        # cuCIM reads deflate right, but its libtiff prints an error for each level of each slide.
        if reader == "auto" and name == "cucim" and any(level.page.compression in DEFLATE for level in layout.levels):
            continue
        open_it, remedy = _LIBRARIES[name]
        try:
            if name in layout.misread or (name != "openslide" and not layout.levels):
                raise ValueError(layout.misread.get(name, "reads TIFF files only"))
            slide = Slide(path, name, open_it(path, layout))
            if reader == "auto" and len(slide.levels) < len(layout.levels):
                raise ValueError(f"reads {len(slide.levels)} of {len(layout.levels)} levels")
            return slide
        except ModuleNotFoundError as error:
            refused.append(f"the slide reader {name!r} is not installed ({error}): {remedy}")
            if reader != "auto":
                raise ModuleNotFoundError(refused[0]) from error
        except ValueError as error:
            refused.append(f"{name}: {error}")
    with path.open("rb") as file:
        start = "" if layout.levels else f" is not a TIFF (it begins with {file.read(4)!r}) and"
    raise ValueError(f"{path}{start} cannot be read ({'; '.join(refused)}): copy it again, or convert it to tiled TIFF")
