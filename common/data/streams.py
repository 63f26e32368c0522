"""Voxels out of plain or compressed streams, checked to the last byte."""

import gzip
import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
from isal import isal_zlib

READ_BLOCK = 2**18  # bytes at a time: igzip copies what it decompresses once more, cheaply while it is in the cache
MAX_GZIP_RATIO = 1032  # no deflate stream expands further. Source: zlib.net/zlib_tech.html
MAX_PADDING = 2**20  # bytes between the header and the voxels, and behind them
Stream = io.RawIOBase | io.BufferedIOBase
# What reading a damaged gzip stream raises; isal's type stub takes its own class for an instance.
DAMAGED = cast(tuple[type[Exception], ...], (EOFError, gzip.BadGzipFile, isal_zlib.error))


class ZlibStream(io.RawIOBase):
    """What a zlib stream in a file holds."""

    def __init__(self, file: io.RawIOBase) -> None:
        self._file, self._inflate = file, isal_zlib.decompressobj()

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - what takes bytes
        """Fill a buffer with what comes next; return how many bytes that were, 0 at the end."""
        while not self._inflate.eof:
            packed = self._inflate.unconsumed_tail or self._file.read(READ_BLOCK)
            if not packed:
                raise EOFError("its zlib stream ends early")
            if found := self._inflate.decompress(packed, len(buffer)):
                buffer[: len(found)] = found
                return len(found)
        return 0


@contextmanager
def undamaged(path: Path) -> Iterator[None]:
    """Turn errors of a compressed stream of a file into ValueError."""
    try:
        yield
    except DAMAGED as error:
        found = f"({path.stat().st_size} bytes) is truncated or damaged ({error}): copy it again"
        if path.suffix.lower() == ".gz" and str(error).startswith(
            "Not a gzipped file"
        ):  # what the first member begins with has been looked at
            found = "has other bytes behind its gzip stream: copy it again, or `gzip -dc FILE | gzip > NEW`"
        raise ValueError(f"{path} {found}") from error


def read_exactly(stream: Stream, buffer: np.ndarray) -> int:
    """Fill `buffer` (uint8) from the stream; return how many bytes there were."""
    view, filled = buffer.data, 0
    while filled < len(buffer):
        count = stream.readinto(view[filled : filled + READ_BLOCK])
        if not count:
            break
        filled += count
    return filled


def take_voxels(stream: Stream, dtype: np.dtype, shape: tuple[int, ...], path: Path, whole: bool) -> np.ndarray:
    """Return the voxels that a stream begins with, Fortran order, native byte order; `whole` looks at what follows."""
    needed = math.prod(shape) * dtype.itemsize
    content = np.empty(needed, np.uint8)
    found = read_exactly(stream, content)
    if found < needed:
        raise ValueError(f"{path}: expected {needed} bytes of voxels ({shape}, {dtype}), found {found}: copy it again")
    # At the end of the stream its format keeps a checksum; a little padding before it does no harm.
    if whole and read_exactly(stream, np.empty(MAX_PADDING, np.uint8)) == MAX_PADDING:
        raise ValueError(f"{path} continues past the {needed} bytes of voxels that its header declares: copy it again")
    voxels = content.view(dtype).reshape(shape, order="F")
    return voxels if dtype.isnative else voxels.astype(dtype.newbyteorder("="), order="K")
