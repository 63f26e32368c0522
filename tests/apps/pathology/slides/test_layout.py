import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from medspeed.apps.pathology.config import Reader
from medspeed.apps.pathology.slides.layout import read_layout
from medspeed.apps.pathology.slides.reader import open_slide
from tests.apps.pathology.slides.slide_files import TILE, painted, write_pyramid

READERS_OF_TILES: tuple[Reader, ...] = ("cucim", "openslide")
PLAIN: dict[str, Any] = {"photometric": "rgb", "metadata": None}


def sizes_of(path: Path) -> list[tuple[int, int]]:
    return [(level.width, level.height) for level in read_layout(path).levels]


def mpp_of(path: Path, **options: Any) -> float | None:
    tifffile.imwrite(path, painted(64, 64), tile=(64, 64), **{**PLAIN, **options})
    return read_layout(path).mpp


def test_labels_macros_and_thumbnails_are_no_levels(tmp_path):
    path = tmp_path / "a.svs"
    tiled = {**PLAIN, "tile": (TILE, TILE)}
    with tifffile.TiffWriter(path) as writer:
        writer.write(painted(400, 300), **tiled)
        writer.write(painted(100, 75), **PLAIN)  # a thumbnail: not tiled
        writer.write(painted(200, 150), **tiled)
        writer.write(painted(128, 128), **tiled)  # another shape
        writer.write(painted(50, 37)[..., 0], photometric="minisblack", tile=(64, 64), metadata=None)  # not RGB
        writer.write(painted(99, 74), **tiled)  # the same shape, rounded
        writer.write(painted(120, 40), subfiletype=9, **PLAIN)  # macro
    assert sizes_of(path) == [(400, 300), (200, 150), (99, 74)]


def test_a_level_is_as_much_smaller_as_its_longer_side_tells(tmp_path):
    """Of 63 rows 1 is left at a 32nd: by the rows it would be 63 times smaller, by the mean of both 47 times."""
    write_pyramid(tmp_path / "a.tif", factors=(1, 32), size=(4096, 63))
    assert [level.downsample for level in read_layout(tmp_path / "a.tif").levels] == [1, 32]


def test_a_thumbnails_pixel_size_is_not_the_slides(tmp_path):
    """The base is no 8-bit RGB in one plane, so that only OpenSlide reads it."""
    with tifffile.TiffWriter(tmp_path / "a.tif") as writer:
        sides = {"resolution": (40000, 40000), "planarconfig": "separate", "tile": (64, 64)}
        writer.write(painted(256, 192).transpose(2, 0, 1), **PLAIN | sides, resolutionunit="CENTIMETER")
        writer.write(painted(64, 48), **PLAIN, resolution=(5000, 5000), resolutionunit="CENTIMETER")
    slide = open_slide(tmp_path / "a.tif")
    assert (slide.reader, slide.levels[0].width) == ("openslide", 256)
    assert slide.mpp == pytest.approx(0.25)


@pytest.mark.parametrize("kind", ["rgba", "uint16", "grey"])
def test_a_thumbnail_is_not_read_in_place_of_the_slide(tmp_path, kind):
    whole = painted(256, 192)
    kinds = {"rgba": np.dstack([whole, whole[..., :1]]), "uint16": whole.astype(np.uint16), "grey": whole[..., 0]}
    colors = {"grey": {**PLAIN, "photometric": "minisblack"}}
    with tifffile.TiffWriter(tmp_path / "a.tif") as writer:
        # With zstd, which OpenSlide does not take.
        writer.write(kinds[kind], **{**colors.get(kind, PLAIN), "compression": "zstd", "predictor": True})
        writer.write(whole[::3, ::3], **PLAIN, tile=(64, 64))
    with pytest.raises(ValueError, match="tifffile: its largest image is not 8-bit RGB"):
        open_slide(tmp_path / "a.tif")


def test_strips_serve_in_place_of_tiles(tmp_path):
    image = painted(130, 101)
    tifffile.imwrite(tmp_path / "a.tif", image, rowsperstrip=16, compression="deflate", **PLAIN)
    slide = open_slide(tmp_path / "a.tif")
    assert slide.reader == "tifffile"
    assert np.array_equal(slide.read(0, 0, 130, 101), image)
    assert np.array_equal(slide.read(5, 90, 20, 11), image[90:, 5:25])
    for reader in READERS_OF_TILES:
        with pytest.raises(ValueError, match="cannot be read"):
            open_slide(tmp_path / "a.tif", reader)


def test_subifds_are_levels(tmp_path):
    write_pyramid(tmp_path / "a.tif", subifds=True)
    assert sizes_of(tmp_path / "a.tif") == [(300, 210), (150, 105), (75, 52)]


def test_the_pixel_size_comes_from_aperios_words_or_the_resolution_tags(tmp_path):
    path = tmp_path / "a.tif"
    aperio = "Aperio Image Library v11.2.1\r\n64x64 Q=30|AppMag = 20|MPP = 0.4990|Left = 25"
    assert mpp_of(path, description=aperio, resolution=(1, 1), resolutionunit="CENTIMETER") == 0.499
    assert mpp_of(path, description=aperio.replace("0.4990", "0,4990")) == 0.499
    assert mpp_of(path, description=aperio.replace("0.4990", "4.99e-01")) == 0.499
    assert mpp_of(path, resolution=(40000, 40000), resolutionunit="CENTIMETER") == pytest.approx(0.25)
    assert mpp_of(path, resolution=(50800, 50800), resolutionunit="INCH") == pytest.approx(0.5)
    assert mpp_of(path, resolution=(96, 96), resolutionunit="INCH") is None  # a printer's
    assert mpp_of(path, resolution=(40000, 40000), resolutionunit="NONE") is None
    assert mpp_of(path) is None
    assert mpp_of(path, resolution=(40000, 39000), resolutionunit="CENTIMETER") == pytest.approx((0.25 + 10 / 39) / 2)
    with pytest.raises(ValueError, match=r"a\.tif: pixels of 0\.25 x 0\.3333 um are not square .at most 5% apart"):
        mpp_of(path, resolution=(40000, 30000), resolutionunit="CENTIMETER")


def test_a_slide_that_is_to_be_turned_is_refused(tmp_path):
    """cuCIM and tifffile pass over the tag, and OpenSlide turns each tile by itself."""
    write_pyramid(tmp_path / "a.tif", extratags=[(274, 3, 1, 3, True)])
    with pytest.raises(ValueError, match=r"a\.tif: Orientation 3: readers differ in how they turn it"):
        read_layout(tmp_path / "a.tif")


def write_wrong(kind: str, path: Path) -> None:
    write_pyramid(path, compression="deflate")
    whole = path.read_bytes()
    with tifffile.TiffFile(path) as tiff:
        width = tiff.pages.first.tags["ImageWidth"].offset
    contents = {
        "empty": b"",
        "text": b"no slide at all\n" * 40,
        "magic alone": whole[:4],
        "half": whole[: len(whole) // 2],
        "last tile": whole[:-100],
        "no width": whole[:width] + bytes([whole[width] ^ 2]) + whole[width + 1 :],  # of the largest image
    }
    if kind in contents:
        path.write_bytes(contents[kind])
    elif kind == "grey":
        tifffile.imwrite(path, painted(64, 64)[..., 0], tile=(64, 64))
    elif kind == "16 bit":
        tifffile.imwrite(path, painted(64, 64).astype(np.uint16), tile=(64, 64), **PLAIN)
    elif kind == "rgba":
        tifffile.imwrite(path, np.zeros((64, 64, 4), np.uint8), tile=(64, 64), extrasamples=["unassalpha"], **PLAIN)


@pytest.mark.parametrize("reader", ["auto", "cucim", "openslide", "tifffile"])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("empty", r"is empty \(0 bytes\): copy it again"),
        ("text", r"is not a TIFF \(it begins with b'no s'\).*copy it again"),
        ("magic alone", "damaged TIFF directories.*copy it again"),
        ("no width", r"damaged TIFF directories \(one has no width or height\): copy it again"),
        ("half", "truncated.*copy it again"),
        ("last tile", "truncated.*copy it again"),
        ("grey", "contains no 8-bit RGB image.*convert it"),
        ("16 bit", "contains no 8-bit RGB image.*convert it"),
        ("rgba", "contains no 8-bit RGB image.*convert it"),
    ],
)
def test_a_file_that_is_no_slide_is_named(tmp_path, kind, said, reader):
    write_wrong(kind, tmp_path / "case_07.tif")
    with pytest.raises(ValueError, match=rf"case_07\.tif.* {said}"):
        open_slide(tmp_path / "case_07.tif", reader)


def test_an_empty_directory_behind_the_levels_is_no_damage(tmp_path):
    """Some programs leave one, without any tags."""
    path = tmp_path / "a.tif"
    write_pyramid(path, factors=(1, 2), size=(300, 200), compression="deflate")
    with tifffile.TiffFile(path) as tiff:
        link, sizes = tiff.pages.next_page_offset or 0, [page.shape[:2] for page in tiff.pages]
        wide = tiff.tiff.offsetsize == 8
    content = bytearray(path.read_bytes())
    content[link : link + (8 if wide else 4)] = struct.pack("<Q" if wide else "<I", len(content))
    path.write_bytes(content + struct.pack("<QQ" if wide else "<HI", 0, 0))
    assert [(level.height, level.width) for level in read_layout(path).levels] == sizes[:2]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone\.svs"):
        open_slide(tmp_path / "gone.svs")


def test_flipped_bytes_in_the_directories_are_refused_or_read(tmp_path):
    path = tmp_path / "a.tif"
    write_pyramid(path, factors=(1, 2), size=(150, 100), compression="deflate")
    whole = path.read_bytes()
    with tifffile.TiffFile(path) as tiff:
        first = tiff.pages.first
        start, end = first.offset, first.dataoffsets[0]
    rng = np.random.default_rng(0)
    refused = unnamed = 0
    for _ in range(150):
        content = bytearray(whole)
        content[rng.integers(start, end)] ^= int(rng.integers(1, 256))
        path.write_bytes(content)
        try:
            layout = read_layout(path)
        except ValueError as error:
            refused += 1
            unnamed += "a.tif" not in str(error)
            continue
        assert all(min(level.width, level.height, *level.grid) > 0 for level in layout.levels)
    assert unnamed == 0
    assert refused > 30
