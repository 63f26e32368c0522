"""The three libraries that read slides, behind one call: pixels of one level, wholly inside it.

Each is imported when its reader is first asked for. Seen with cuCIM 26.10, OpenSlide 4.0.1, tifffile 2026.3.3:

- All three give equal pixels for raw, deflate, LZW and JPEG tiles (4:4:4, 4:2:2, 4:2:0); JPEG 2000 within 1 of 255.
- cuCIM decodes a JPEG tile with damage in its middle as far as it gets and leaves noise for the rest, without an error
  (it prints a line to stdout); damaged deflate and JPEG 2000 raise. OpenSlide and tifffile raise on most damage to
  JPEG too. None of them sees wrong bits that still decode, nor damage to raw tiles; OpenSlide alone passes a deflate
  tile whose end was overwritten with zeros. Tiles that are no JPEG from start to end, or of another size than the
  directory says, are found before any reader (`layout.looks_whole`): cuCIM dies of larger ones.
- After an error OpenSlide's handle fails for good, under all threads; the others go on.
- OpenSlide interpolates where a level's downsample is no whole number, up to half a pixel off the other two.

cuCIM's decoding on the GPU (its plugin cuslide2, switched on by ENABLE_CUSLIDE2=1 before the first slide is opened) is
unproven: no record shows it. tiffslide 3.0 does not replace our use of tifffile: it opens files that are cut short,
gives tiles that were never scanned as black, takes a thumbnail for a level, and reads at a third of the speed.
"""

import math
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from PIL import Image

from medspeed.apps.pathology.slides.layout import Box, Layout, Level, checked_mpp, downsample_of

ReaderName = Literal["cucim", "openslide", "tifffile"]
# TIFF's Compression tag: raw, LZW, JPEG, deflate (two numbers), Aperio's JPEG 2000 (two). cuCIM opens others too, and
# fails at every tile.
_CUCIM_COMPRESSIONS = {1, 5, 7, 8, 32946, 33003, 33005}


class UnreadableError(Exception):
    """A library could not read a region; the message is its own."""


class CucimHandle:
    """A slide in cuCIM, decoded on the CPU; see `open_handle`."""

    def __init__(self, path: Path, layout: Layout) -> None:
        from cucim.clara import CuImage

        # Errors come as either of these.
        try:
            self._image: Any = CuImage(str(path))
            sizes = [tuple(size) for size in self._image.resolutions["level_dimensions"]]
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"cuCIM: {error}") from error
        due = [(level.width, level.height) for level in layout.levels]
        if sizes != due:
            raise ValueError(f"cuCIM reads levels {sizes}, the file has {due}")
        self.levels, self.mpp = layout.levels, layout.mpp
        self._downsamples: list[float] = list(self._image.resolutions["level_downsamples"])
        self.close: Callable[[], None] = self._image.close

    def read(self, box: Box, level: int) -> np.ndarray:
        """Return the region, as `open_handle` says."""
        # cuCIM takes level 0's pixels and rounds x / downsample down: aim a little inside the pixel, not at its edge.
        downsample = self._downsamples[level]
        inside = min(0.25, (downsample - 1) / 2)
        corner = (math.ceil(box.left * downsample + inside), math.ceil(box.top * downsample + inside))
        try:
            return np.asarray(self._image.read_region(corner, box.size, level))
        except (RuntimeError, ValueError) as error:
            raise UnreadableError(str(error)) from error


class OpenSlideHandle:
    """A slide in OpenSlide, the one reader for formats that are no TIFF; see `open_handle`."""

    def __init__(self, path: Path, layout: Layout) -> None:
        import openslide

        self._error: type[Exception] = openslide.OpenSlideError
        self._open: Callable[[], Any] = lambda: openslide.OpenSlide(path)
        try:
            self._slide = self._open()
        except openslide.OpenSlideError as error:
            raise ValueError(f"OpenSlide: {error}") from error
        known = {(level.width, level.height): level for level in layout.levels}
        sizes: list[tuple[int, int]] = list(self._slide.level_dimensions)
        self.levels = tuple(known.get(size) or Level(*size, downsample_of(*sizes[0], *size)) for size in sizes)
        self._downsamples: list[float] = list(self._slide.level_downsamples)
        sides = [float(self._slide.properties.get(f"openslide.mpp-{axis}", 0)) for axis in "xy"]
        self.mpp = layout.mpp or checked_mpp(sides[0], sides[1], path)

    def read(self, box: Box, level: int) -> np.ndarray:
        """Return the region, as `open_handle` says; transparent pixels are laid over white."""
        try:
            return self._region(self._slide, box, level)
        except self._error:
            self._slide = self._open()  # the old one closes when no thread reads from it any more
        # Another thread's region may have been what failed.
        try:
            with self._open() as own:
                return self._region(own, box, level)
        except self._error as error:
            raise UnreadableError(str(error)) from error

    def close(self) -> None:
        """Close the file."""
        self._slide.close()

    def _region(self, slide: Any, box: Box, level: int) -> np.ndarray:  # noqa: ANN401 - OpenSlide's
        downsample = self._downsamples[level]
        corner = (round(box.left * downsample), round(box.top * downsample))
        pixels = slide.read_region(corner, level, box.size)
        region = Image.new("RGB", box.size, "white")
        region.paste(pixels, mask=pixels)
        return np.asarray(region)


class TifffileHandle:
    """A slide in tifffile: the tiles that a region touches are read and decoded, no others; see `open_handle`."""

    def __init__(self, path: Path, layout: Layout) -> None:
        import imagecodecs  # noqa: F401 - tifffile decodes with it, and asks for it only at the first tile

        self.levels, self.mpp = layout.levels, layout.mpp
        self._file = os.open(path, os.O_RDONLY)
        self.close = weakref.finalize(self, os.close, self._file)

    def read(self, box: Box, level: int) -> np.ndarray:
        """Return the region, as `open_handle` says."""
        place = self.levels[level]
        assert place.decode is not None, "a TIFF's level has a decoder"
        region = np.empty((*box.size[::-1], 3), np.uint8)
        for row, column, part in place.parts(box):
            number = row * place.grid[1] + column
            stored = os.pread(self._file, int(place.counts[number]), int(place.offsets[number]))
            # imagecodecs' errors are RuntimeErrors; ValueError: decoded bytes that do not fill a tile.
            try:
                decoded, _, shape = place.decode(stored, number)
            except (RuntimeError, ValueError, MemoryError) as error:
                raise UnreadableError(str(error)) from error
            tile = np.asarray(decoded).reshape(shape[1:])  # the last strip is shorter
            here = part.within(column * place.tile_width, row * place.tile_height)
            region[part.within(box.left, box.top)] = tile[here]
        return region


Handle: TypeAlias = CucimHandle | OpenSlideHandle | TifffileHandle
"""An open file in one of the libraries; `levels` and `mpp` are what it has of them."""
HANDLES: dict[ReaderName, tuple[type[Handle], str]] = {
    "cucim": (CucimHandle, "pip install --no-deps cucim-cu13 click lazy-loader"),
    "openslide": (OpenSlideHandle, "pip install openslide-python openslide-bin"),
    "tifffile": (TifffileHandle, "pip install tifffile imagecodecs"),
}


def open_handle(path: Path, layout: Layout, name: ReaderName) -> Handle:
    """Open a file with one of the libraries.

    Returns:
        A handle whose `read(box, level)` returns [height, width, 3] uint8; the box is inside the level. Where the
        library fails it raises UnreadableError.

    Raises:
        ModuleNotFoundError: the library is missing; the message says how to install it.
        ValueError: the library does not take the file.
    """
    if name != "openslide" and not layout.levels:
        raise ValueError("reads TIFF files only")
    if name != "openslide" and layout.padded:
        raise ValueError("Philips pads levels to whole tiles by an amount it does not read")
    if name == "cucim" and not all(level.tiled for level in layout.levels):
        raise ValueError("reads tiles, this file has strips")
    if name == "cucim" and (strange := {level.compression for level in layout.levels} - _CUCIM_COMPRESSIONS):
        raise ValueError(f"does not decode TIFF compression {sorted(strange)}")
    if name == "cucim" and layout.predicted:
        raise ValueError("does not decode deflate with a predictor: it crashes")
    kind, remedy = HANDLES[name]
    try:
        return kind(path, layout)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"the slide reader {name!r} is not installed ({error}): {remedy}") from error
