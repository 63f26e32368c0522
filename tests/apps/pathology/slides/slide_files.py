"""Small slides for the tests of slide reading."""

from pathlib import Path
from typing import Any

import numpy as np
import tifffile

TILE = 64


def painted(width: int, height: int) -> np.ndarray:
    """Return [height, width, 3] uint8: waves and noise, so that no two tiles are alike."""
    y, x = np.mgrid[:height, :width].astype(np.float64)
    waves = np.stack([180 + 60 * np.sin(x / 17), 120 + 80 * np.sin(x / 11 + y / 29), 190 + 50 * np.cos(y / 13)], -1)
    noise = np.random.default_rng(0).normal(0, 12, waves.shape)
    return np.clip(waves + noise, 0, 254).astype(np.uint8)


def reduced(image: np.ndarray, factor: int) -> np.ndarray:
    """Return the means over blocks of factor x factor pixels; what is left over at the edges is dropped."""
    height, width = image.shape[0] // factor, image.shape[1] // factor
    blocks = image[: height * factor, : width * factor].reshape(height, factor, width, factor, 3)
    return np.asarray(blocks.mean((1, 3)).round(), np.uint8)


def write_pyramid(
    path: Path,
    factors: tuple[int, ...] = (1, 2, 4),
    size: tuple[int, int] = (300, 210),
    mpp: tuple[float, float] = (0.25, 0.25),
    missing: tuple[int, int] | None = None,
    subifds: bool = False,
    **options: Any,
) -> list[np.ndarray]:
    """Write a tiled slide with tiles of 64 pixels, one directory a level; return the pixels of each level.

    Args:
        path: the file.
        factors: downsample of each level, 1 first.
        size: (width, height) of level 0.
        mpp: um per pixel at level 0, x and y.
        missing: column and row of a tile of level 0 that is left out, as scanners do with background.
        subifds: put the levels behind the first into its SubIFDs.
        options: what `TiffWriter.write` takes: compression, photometric, subsampling.
    """
    images = [reduced(painted(*size), factor) for factor in factors]
    with tifffile.TiffWriter(path) as writer:
        for index, (image, factor) in enumerate(zip(images, factors, strict=True)):
            writer.write(
                image,
                tile=(TILE, TILE),
                subfiletype=1 if index else 0,
                subifds=len(factors) - 1 if subifds and not index else None,
                resolution=(1e4 / mpp[0] / factor, 1e4 / mpp[1] / factor),
                resolutionunit="CENTIMETER",
                metadata=None,
                **{"photometric": "rgb", **options},
            )
    if missing is not None:
        _drop_tile(path, *missing)
    return images


def overwrite_tile(
    path: Path, column: int, row: int, content: bytes | None = None, at_end: bool = False, start: int = 0
) -> None:
    """Overwrite the bytes of a tile of level 0, by default all of them with noise."""
    with tifffile.TiffFile(path) as tiff:
        page = tiff.pages.first
        tile = row * -(-page.imagewidth // page.tilewidth) + column
        offset, count = page.dataoffsets[tile], page.databytecounts[tile]
    content = content or np.random.default_rng(1).bytes(count)
    with path.open("r+b") as file:
        file.seek(offset + (count - len(content) if at_end else start))
        file.write(content)


def _drop_tile(path: Path, column: int, row: int) -> None:
    with tifffile.TiffFile(path, mode="r+") as tiff:
        page = tiff.pages.first
        tile = row * -(-page.imagewidth // page.tilewidth) + column
        for name in ("TileOffsets", "TileByteCounts"):
            tag = page.tags[name]
            values = list(tag.value)
            values[tile] = 0
            tag.overwrite(values)
