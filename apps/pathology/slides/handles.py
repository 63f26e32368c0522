"""The three libraries that read slides, behind one call: pixels of one level, wholly inside it.

Each is imported when its reader is first asked for. Seen with cuCIM 26.10, OpenSlide 4.0.1, tifffile 2026.3.3:

- All three give equal pixels for raw, deflate, LZW and JPEG tiles (4:4:4, 4:2:2, 4:2:0); JPEG 2000 within 1 of 255.
- cuCIM decodes a JPEG tile with damage in its middle as far as it gets and leaves noise for the rest, without an error
  (it prints a line to stdout); damaged deflate and JPEG 2000 raise. OpenSlide and tifffile raise on most damage to
  JPEG too. None of them sees wrong bits that still decode, nor damage to raw tiles; OpenSlide alone passes a deflate
  tile whose end was overwritten with zeros. Tiles that are no JPEG from start to end are found before any reader
  (`layout.looks_whole`).
- After an error OpenSlide's handle fails for good; the others go on.
- OpenSlide interpolates where a level's downsample is no whole number, up to half a pixel off the other two.

cuCIM's decoding on the GPU (its plugin cuslide2, switched on by ENABLE_CUSLIDE2=1 before the first slide is opened) is
unproven: no record shows it. tiffslide 3.0 does not replace our use of tifffile: it opens files that are cut short,
gives tiles that were never scanned as black, takes a thumbnail for a level, and reads at a third of the speed.
"""

import math
import os
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from apps.pathology.slides.layout import Layout, Level, checked_mpp, downsample_of

ReaderName = Literal["cucim", "openslide", "tifffile"]
INSTALL: dict[ReaderName, str] = {
    "cucim": "pip install --no-deps cucim-cu13 click lazy-loader",
    "openslide": "pip install openslide-python openslide-bin",
    "tifffile": "pip install tifffile imagecodecs",
}
# TIFF's Compression tag: raw, LZW, JPEG, deflate (two numbers), Aperio's JPEG 2000 (two). cuCIM opens others too, and
# fails at every tile.
CUCIM_COMPRESSIONS = (1, 5, 7, 8, 32946, 33003, 33005)
CUCIM_GRUMBLES = (8, 32946)  # deflate: read right, but its libtiff prints an error for each level of each slide


class UnreadableError(Exception):
    """A library could not read a region; the message is its own."""


class CucimHandle:
    """A slide in cuCIM, decoded on the CPU; see `open_handle`."""

    def __init__(self, path: Path, layout: Layout | None) -> None:
        from cucim.clara import CuImage

        if layout is None:
            raise ValueError("cuCIM reads TIFF files only")
        if layout.padded:
            raise ValueError(
                "Philips pads its levels to whole tiles, and tiles could not be checked for damage by cuCIM"
            )
        if not all(level.tiled for level in layout.levels):
            raise ValueError("cuCIM reads tiles, this file has strips")
        if strange := {level.compression for level in layout.levels} - set(CUCIM_COMPRESSIONS):
            raise ValueError(f"cuCIM does not decode TIFF compression {sorted(strange)}")
        # cuCIM has crashed on no file we know; its errors come as either of these.
        try:
            self._image: Any = CuImage(str(path))
            sizes = [tuple(size) for size in self._image.resolutions["level_dimensions"]]
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"cuCIM: {error}") from error
        due = [(level.width, level.height) for level in layout.levels]
        if sizes != due:
            raise ValueError(f"cuCIM sees levels {sizes}, the file has {due}")
        self._downsamples: list[float] = list(self._image.resolutions["level_downsamples"])
        self.levels, self.mpp = layout.levels, layout.mpp

    def read(self, x: int, y: int, width: int, height: int, level: int) -> np.ndarray:
        """Return the region, as `open_handle` says."""
        # cuCIM takes level 0's pixels and rounds x / downsample down: aim a little inside the pixel, not at its edge.
        downsample = self._downsamples[level]
        inside = min(0.25, (downsample - 1) / 2)
        corner = (math.ceil(x * downsample + inside), math.ceil(y * downsample + inside))
        try:
            return np.asarray(self._image.read_region(corner, (width, height), level))
        except (RuntimeError, ValueError) as error:
            raise UnreadableError(str(error)) from error

    def close(self) -> None:
        """Close the file."""
        self._image.close()


class OpenSlideHandle:
    """A slide in OpenSlide, the one reader for formats that are no TIFF; see `open_handle`."""

    def __init__(self, path: Path, layout: Layout | None) -> None:
        import openslide

        self._error: type[Exception] = openslide.OpenSlideError
        try:
            self._slide: Any = openslide.OpenSlide(path)
        except openslide.OpenSlideError as error:
            raise ValueError(f"OpenSlide: {error}") from error
        known = {(level.width, level.height): level for level in (layout.levels if layout else ())}
        sizes: list[tuple[int, int]] = list(self._slide.level_dimensions)
        self.levels = tuple(known.get(size) or Level(*size, downsample_of(*sizes[0], *size)) for size in sizes)
        self._downsamples: list[float] = list(self._slide.level_downsamples)
        self.mpp = layout.mpp if layout else None
        properties = self._slide.properties
        if self.mpp is None and openslide.PROPERTY_NAME_MPP_X in properties:
            sides = [float(properties[key]) for key in (openslide.PROPERTY_NAME_MPP_X, openslide.PROPERTY_NAME_MPP_Y)]
            self.mpp = checked_mpp(sides[0], sides[1], path)

    def read(self, x: int, y: int, width: int, height: int, level: int) -> np.ndarray:
        """Return the region, as `open_handle` says; transparent pixels are laid over white."""
        downsample = self._downsamples[level]
        corner = (round(x * downsample), round(y * downsample))
        try:
            pixels = np.asarray(self._slide.read_region(corner, level, (width, height)))
        except self._error as error:
            raise UnreadableError(str(error)) from error
        colour, alpha = pixels[..., :3], pixels[..., 3:]
        if alpha.min() == 255:
            return np.asarray(colour)
        mixed = colour.astype(np.uint16) * alpha + 255 * (255 - alpha.astype(np.uint16)) + 127
        return np.asarray(mixed // 255, np.uint8)

    def close(self) -> None:
        """Close the file."""
        self._slide.close()


class TifffileHandle:
    """A slide in tifffile: the tiles that a region touches are read and decoded, no others; see `open_handle`."""

    def __init__(self, path: Path, layout: Layout | None) -> None:
        import imagecodecs  # noqa: F401 - tifffile decodes with it, and asks for it only at the first tile

        if layout is None:
            raise ValueError("tifffile reads TIFF files only")
        if layout.padded:
            raise ValueError("Philips pads its levels to whole tiles, and tifffile does not know by how much")
        self.levels, self.mpp = layout.levels, layout.mpp
        self._file = os.open(path, os.O_RDONLY)

    def read(self, x: int, y: int, width: int, height: int, level: int) -> np.ndarray:
        """Return the region, as `open_handle` says."""
        place = self.levels[level]
        region = np.empty((height, width, 3), np.uint8)
        for row in range(y // place.tile_height, (y + height - 1) // place.tile_height + 1):
            for column in range(x // place.tile_width, (x + width - 1) // place.tile_width + 1):
                top, left = row * place.tile_height - y, column * place.tile_width - x
                rows, columns = slice(max(0, -top), height - top), slice(max(0, -left), width - left)
                part = self._tile(place, row * place.grid[1] + column)[rows, columns]
                top, left = max(0, top), max(0, left)
                region[top : top + part.shape[0], left : left + part.shape[1]] = part
        return region

    def _tile(self, level: Level, number: int) -> np.ndarray:
        """Return one decoded tile [tile_height, tile_width, 3] (the last strip is shorter)."""
        assert level.decode is not None, "a TIFF's level has a decoder"
        stored = os.pread(self._file, int(level.counts[number]), int(level.offsets[number]))
        # imagecodecs' errors are RuntimeErrors; ValueError: decoded bytes that do not fill a tile.
        try:
            decoded, _, shape = level.decode(stored, number)
        except (RuntimeError, ValueError) as error:
            raise UnreadableError(str(error)) from error
        return np.asarray(decoded).reshape(shape[1:])

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


Handle: TypeAlias = CucimHandle | OpenSlideHandle | TifffileHandle
"""An open file in one of the libraries; `levels` and `mpp` are what it has of them."""
HANDLES: dict[ReaderName, type[Handle]] = {
    "cucim": CucimHandle,
    "openslide": OpenSlideHandle,
    "tifffile": TifffileHandle,
}


def open_handle(path: Path, layout: Layout | None, name: ReaderName) -> Handle:
    """Open a file with one of the libraries.

    Returns:
        A handle whose `read(x, y, width, height, level)` returns [height, width, 3] uint8; the region is in pixels of
        `level` and inside it. Where the library fails it raises UnreadableError, and a new handle is needed to go on.

    Raises:
        ModuleNotFoundError: the library is missing; the message says how to install it.
        ValueError: the library does not take the file.
    """
    try:
        return HANDLES[name](path, layout)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"the slide reader {name!r} is not installed ({error}): {INSTALL[name]}") from error
