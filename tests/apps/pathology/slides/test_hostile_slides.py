"""Slides whose headers lie: named or taken as damaged, before a native library meets them."""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import imagecodecs
import numpy as np
import psutil
import pytest
import tifffile

from medspeed.apps.pathology.config import Reader
from medspeed.apps.pathology.slides.layout import read_layout
from medspeed.apps.pathology.slides.masks import low_power
from medspeed.apps.pathology.slides.reader import open_slide
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
    slide = open_slide(path, reader)
    assert (slide.read(0, 0, 3 * TILE, 3 * TILE) == 255).all()
    assert len(slide.damaged) == 9


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("compression", "boxed"), [("jpeg", False), ("jpeg2000", False), ("jpeg2000", True)])
def test_tiles_of_the_size_they_say_are_read(tmp_path, reader, compression, boxed):
    if compression == "jpeg2000" and (reader == "openslide" or (reader == "cucim" and boxed)):
        pytest.skip("reads less of JPEG 2000")
    slide = open_slide(written(tmp_path / "a.tif", compression, boxed=boxed), reader)
    read = slide.read(0, 0, 3 * TILE, 3 * TILE).astype(int)
    assert not slide.damaged
    assert np.abs(read - painted(3 * TILE, 3 * TILE)).mean() < 12


def test_jpeg_tables_hold_no_image(tmp_path):
    coded = bytes(imagecodecs.jpeg8_encode(painted(TILE, TILE), level=90))
    tables = coded[coded.index(b"\xff\xdb") : coded.index(b"\xff\xc0")]
    frame = coded[coded.index(b"\xff\xc0") :][:19]
    path = written(tmp_path / "tables.tif", "jpeg", b"\xff\xd8" + tables + b"\xff\xd9", (tables,))
    slide = open_slide(path)
    slide.read(0, 0, 3 * TILE, 3 * TILE)
    assert not slide.damaged
    path = written(tmp_path / "frame.tif", "jpeg", b"\xff\xd8" + tables + frame + b"\xff\xd9", (tables,))
    with pytest.raises(ValueError, match=r"frame\.tif .*its JPEG tables are none"):
        open_slide(path)


def test_cucim_gets_no_deflate_with_a_predictor(tmp_path):
    (image,) = write_pyramid(tmp_path / "a.tif", factors=(1,), compression="zlib", predictor=True)
    with pytest.raises(ValueError, match="crashes on TIFF predictors"):
        open_slide(tmp_path / "a.tif", "cucim")
    slide = open_slide(tmp_path / "a.tif")
    assert np.array_equal(slide.read(0, 0, 300, 210), image)


@pytest.mark.parametrize("compression", ["zstd", "lzma"])
def test_cucim_gets_no_label_with_a_predictor(tmp_path, compression):
    """Whatever the slide's own compression: the process would end there, and with it the slides to come."""
    image = painted(300, 210)
    with tifffile.TiffWriter(tmp_path / "a.tif") as writer:
        writer.write(image, photometric="rgb", tile=(64, 64), metadata=None)
        writer.write(image[:50, :40], photometric="rgb", compression=compression, predictor=True, metadata=None)
    slide = open_slide(tmp_path / "a.tif")
    assert slide.reader == "openslide"
    assert np.array_equal(slide.read(0, 0, 300, 210), image)


def test_a_tile_at_the_end_of_all_numbers_lies_beyond_the_file(tmp_path):
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, painted(64, 64), tile=(64, 64), photometric="rgb", metadata=None, bigtiff=True)
    with tifffile.TiffFile(path, mode="r+") as tiff:
        tiff.pages.first.tags["TileOffsets"].overwrite(2**63 - 1)
    with pytest.raises(ValueError, match=r"a\.tif is truncated"):
        read_layout(path)


def write_bomb(path: Path, side: int, tile: int) -> None:
    """Write a slide all of whose tiles are the same blank one."""
    blank, tiles = zlib.compress(bytes(min(tile, 256) ** 2 * 3), 9), (-(-side // tile)) ** 2  # refused before decoding
    head = struct.pack("<2sHI", b"II", 42, 8 + len(blank) + len(blank) % 2 + 8 * tiles + 6)
    data = head + blank + bytes(len(blank) % 2)
    offsets = len(data)
    data += struct.pack(f"<{tiles}I", *[8] * tiles) + struct.pack(f"<{tiles}I", *[len(blank)] * tiles)
    bits, data = len(data), data + struct.pack("<3H", 8, 8, 8)
    places = (offsets, offsets + 4 * tiles) if tiles > 1 else (8, len(blank))
    shape = [(256, 4, 1, side), (257, 4, 1, side), (258, 3, 3, bits), (259, 3, 1, 8), (262, 3, 1, 2), (277, 3, 1, 3)]
    shape += [(322, 4, 1, tile), (323, 4, 1, tile), (324, 4, tiles, places[0]), (325, 4, tiles, places[1])]
    data += struct.pack("<H", len(shape)) + b"".join(struct.pack("<HHII", *tag) for tag in shape) + bytes(4)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("side", "tile", "said"),
    [
        (65536, 1024, "bytes cannot hold its 65536 x 65536 pixels"),
        (1_000_000, 8192, "bytes cannot hold its 1000000 x 1000000 pixels"),
        (12288, 12288, "a tile or strip has 12288 x 12288 pixels"),
    ],
)
def test_a_slide_of_more_pixels_than_its_bytes_hold_is_refused(tmp_path, side, tile, said):
    write_bomb(tmp_path / "a.tif", side, tile)
    with pytest.raises(ValueError, match=rf"a\.tif: .*{said}"):
        open_slide(tmp_path / "a.tif")


def test_a_blank_slide_is_read(tmp_path):
    write_bomb(tmp_path / "a.tif", 512, 256)
    slide = open_slide(tmp_path / "a.tif")
    assert not slide.read(0, 0, 512, 512).any()


def test_low_power_takes_no_more_than_is_free(tmp_path, monkeypatch):
    write_pyramid(tmp_path / "a.tif")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000))
    slide = open_slide(tmp_path / "a.tif")
    with pytest.raises(ValueError, match=r"a\.tif: .* and needs 0\.0 GiB"):
        low_power(slide, 1.0)


@pytest.mark.parametrize("mpp", [1e-9, 0.019, 21.0])
def test_pixels_of_no_microscope_have_no_size(tmp_path, mpp):
    write_pyramid(tmp_path / "a.tif", description=f"Aperio|MPP = {mpp:.9f}")
    assert read_layout(tmp_path / "a.tif").mpp is None
