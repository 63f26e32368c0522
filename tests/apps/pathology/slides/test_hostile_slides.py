"""Slides whose headers lie: named or taken as damaged, before a native library meets them."""

import struct
from collections.abc import Iterator
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
import tifffile

from apps.pathology.slides.layout import read_layout
from apps.pathology.slides.reader import Reader, open_slide
from tests.apps.pathology.slides.slide_files import TILE, painted, write_pyramid

READERS: tuple[Reader, ...] = ("cucim", "openslide", "tifffile")
APERIO_JPEG_2000 = 33005  # Compression tag


def written(
    path: Path, compression: str, tables: bytes = b"", taken: tuple[bytes, ...] = (), boxed: bool = False
) -> Path:
    """Write a slide of 3 x 3 tiles, each its own encoded bytes, with JPEG tables; what is `taken` tiles lack."""
    image = painted(3 * TILE, 3 * TILE)

    def tiles() -> Iterator[bytes]:
        for row in range(0, 3 * TILE, TILE):
            for column in range(0, 3 * TILE, TILE):
                tile = image[row : row + TILE, column : column + TILE]
                if compression == "jpeg2000":
                    yield bytes(imagecodecs.jpeg2k_encode(tile, level=100, codecformat="jp2" if boxed else "j2k"))
                    continue
                coded = bytes(imagecodecs.jpeg8_encode(tile, level=90))
                for part in taken:
                    coded = coded.replace(part, b"")
                yield coded

    tifffile.imwrite(
        path,
        tiles(),
        shape=image.shape,
        dtype=np.uint8,
        tile=(TILE, TILE),
        compression=compression,
        photometric="ycbcr" if compression == "jpeg" else "rgb",
        metadata=None,
        extratags=[(347, 7, len(tables), tables, True)] if tables else [],
    )
    if compression == "jpeg2000":
        with tifffile.TiffFile(path, mode="r+") as tiff:
            tiff.pages.first.tags["Compression"].overwrite(APERIO_JPEG_2000)
    return path


def change_tiles(path: Path, mark: bytes, at: int, content: bytes) -> None:
    """Overwrite bytes of each tile, so many behind a mark."""
    with tifffile.TiffFile(path) as tiff:
        places = tiff.pages.first.dataoffsets
    data = bytearray(path.read_bytes())
    for place in places:
        begin = data.index(mark, place) + at
        data[begin : begin + len(content)] = content
    path.write_bytes(data)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("compression", "mark", "at", "content"),
    [
        ("jpeg", b"\xff\xc0", 5, struct.pack(">HH", 65500, 65500)),
        ("jpeg", b"\xff\xc0", 5, struct.pack(">HH", TILE, TILE + 16)),
        ("jpeg", b"\xff\xc0", 4, b"\x0c"),
        ("jpeg", b"\xff\xdb", 2, b"\0\0"),
        ("jpeg", b"\xff\xdb", 0, b"\xff\xd0"),
        ("jpeg2000", b"\xff\x51", 6, struct.pack(">II", 200000, 200000)),
        ("jpeg2000", b"\xff\x51", 38, struct.pack(">H", 4)),
    ],
    ids=["bomb", "wider", "12 bits", "no length", "hidden segment", "J2K bomb", "J2K samples"],
)
def test_a_tile_that_says_another_size_is_damaged(tmp_path, reader, compression, mark, at, content):
    if (compression, reader) == ("jpeg2000", "openslide"):
        pytest.skip("OpenSlide reads JPEG 2000 of Aperio's files alone")
    path = written(tmp_path / "a.tif", compression)
    change_tiles(path, mark, at, content)
    with open_slide(path, reader) as slide:
        assert (slide.read(0, 0, 3 * TILE, 3 * TILE) == 255).all()
        assert len(slide.damaged) == 9


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("compression", "boxed"), [("jpeg", False), ("jpeg2000", False), ("jpeg2000", True)])
def test_tiles_of_the_size_they_say_are_read(tmp_path, reader, compression, boxed):
    if compression == "jpeg2000" and (reader == "openslide" or (reader == "cucim" and boxed)):
        pytest.skip("reads less of JPEG 2000")
    with open_slide(written(tmp_path / "a.tif", compression, boxed=boxed), reader) as slide:
        read = slide.read(0, 0, 3 * TILE, 3 * TILE).astype(int)
        assert not slide.damaged
    assert np.abs(read - painted(3 * TILE, 3 * TILE)).mean() < 12


def test_jpeg_tables_hold_no_image(tmp_path):
    coded = bytes(imagecodecs.jpeg8_encode(painted(TILE, TILE), level=90))
    tables = coded[coded.index(b"\xff\xdb") : coded.index(b"\xff\xc0")]
    frame = coded[coded.index(b"\xff\xc0") :][:19]
    path = written(tmp_path / "tables.tif", "jpeg", b"\xff\xd8" + tables + b"\xff\xd9", (tables,))
    with open_slide(path) as slide:
        slide.read(0, 0, 3 * TILE, 3 * TILE)
        assert not slide.damaged
    path = written(tmp_path / "frame.tif", "jpeg", b"\xff\xd8" + tables + frame + b"\xff\xd9", (tables,))
    with pytest.raises(ValueError, match=r"frame\.tif .*its JPEG tables are none"):
        open_slide(path)


def test_cucim_gets_no_deflate_with_a_predictor(tmp_path):
    (image,) = write_pyramid(tmp_path / "a.tif", factors=(1,), compression="zlib", predictor=True)
    with pytest.raises(ValueError, match="does not decode deflate with a predictor"):
        open_slide(tmp_path / "a.tif", "cucim")
    with open_slide(tmp_path / "a.tif") as slide:
        assert np.array_equal(slide.read(0, 0, 300, 210), image)


def test_a_tile_at_the_end_of_all_numbers_lies_beyond_the_file(tmp_path):
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, painted(64, 64), tile=(64, 64), photometric="rgb", metadata=None, bigtiff=True)
    with tifffile.TiffFile(path, mode="r+") as tiff:
        tiff.pages.first.tags["TileOffsets"].overwrite(2**63 - 1)
    with pytest.raises(ValueError, match=r"a\.tif is cut short"):
        read_layout(path)
