import gc
import io
import os
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openslide
import psutil
import pytest
import tifffile
from PIL import Image

from medspeed.apps.pathology.config import Reader
from medspeed.apps.pathology.slides.layout import Box
from medspeed.apps.pathology.slides.reader import open_slide
from medspeed.data_scripts.make_slides import write_pyramid as write_slide_pyramid
from medspeed.data_scripts.slides_paint import draw_slide
from tests.apps.pathology.slides.ndpi_files import write_ndpi
from tests.apps.pathology.slides.slide_files import TILE, overwrite_tile, painted, write_pyramid

READERS: tuple[Reader, ...] = ("cucim", "openslide", "tifffile")
JPEG: dict[str, Any] = {"compression": "jpeg", "photometric": "ycbcr", "subsampling": (1, 1)}


@pytest.fixture(scope="module")
def pyramid(tmp_path_factory):
    """A slide of three levels, 300 x 210, 150 x 105 and 75 x 52, with the pixels of each."""
    path = tmp_path_factory.mktemp("slide") / "case_3.tif"
    return path, write_pyramid(path)


@pytest.mark.parametrize("reader", READERS)
def test_levels_and_pixel_size(pyramid, reader):
    slide = open_slide(pyramid[0], reader)
    assert (slide.reader, slide.name, slide.path) == (reader, "case_3", pyramid[0])
    assert slide.mpp == pytest.approx(0.25)
    levels = [(level.width, level.height, level.downsample) for level in slide.levels]
    assert levels[:2] == [(300, 210, 1.0), (150, 105, 2.0)]
    assert levels[2][2] == pytest.approx(4)  # 300 / 75, and not 210 / 52, of which half a pixel is cut off


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("corner", [(0, 0), (37, 51), (-20, -31), (251, 180), (60, -8)])
@pytest.mark.parametrize("level", [0, 1])
def test_regions_are_the_pixels_written_and_white_outside(pyramid, reader, corner, level):
    path, images = pyramid
    x, y = corner[0] * 2**level, corner[1] * 2**level
    framed = np.pad(images[level], ((200, 400), (200, 400), (0, 0)), constant_values=255)
    slide = open_slide(path, reader)
    found = slide.read(x, y, 97, 83, level)
    assert found.dtype == np.uint8
    assert np.array_equal(found, framed[200 + corner[1] :, 200 + corner[0] :][:83, :97])


@pytest.mark.parametrize("reader", ["auto", "openslide", "tifffile"])
def test_an_ndpi_is_no_slide_of_damaged_tiles(reader, tmp_path):
    """Its restart intervals, which tifffile takes for tiles, have no JPEG header of their own."""
    pixels = np.random.default_rng(0).integers(0, 256, (16, 32, 3)).repeat(16, 0).repeat(16, 1).astype(np.uint8)
    write_ndpi(tmp_path / "a.ndpi", pixels, mpp=0.5)
    with openslide.OpenSlide(tmp_path / "a.ndpi") as plain:
        assert plain.properties["openslide.vendor"] == "hamamatsu"
        expected = np.asarray(plain.read_region((0, 0), 0, plain.dimensions).convert("RGB"))
    slide = open_slide(tmp_path / "a.ndpi", reader)
    found = slide.read(-8, 0, 512, 256)
    assert not slide.damaged
    assert np.array_equal(found[:, 8:], expected[:, :-8])
    assert (found[:, :8] == 255).all()
    assert slide.mpp == pytest.approx(0.5)
    assert np.abs(found[:, 8:].astype(int) - pixels[:, :-8]).mean() < 3


@pytest.mark.parametrize("reader", READERS)
def test_wholly_outside_is_white(pyramid, reader):
    slide = open_slide(pyramid[0], reader)
    for corner in ((-500, 0), (0, 210), (10**6, 10**6)):
        assert (slide.read(*corner, 12, 7) == 255).all()
    assert not slide.damaged


@pytest.mark.parametrize("reader", READERS)
def test_between_two_pixels_of_a_level_the_left_and_upper_one_counts(pyramid, reader):
    path, images = pyramid
    slide = open_slide(path, reader)
    assert np.array_equal(slide.read(21, 35, 40, 30, 1), images[1][17:47, 10:50])
    assert np.array_equal(slide.read(-1, 0, 2, 1, 1)[0, 0], [255, 255, 255])


@pytest.mark.parametrize("reader", ["cucim", "tifffile"])
def test_a_level_of_an_odd_downsample_is_read_pixel_by_pixel(tmp_path, reader):
    images = write_pyramid(tmp_path / "a.tif", factors=(1, 3), size=(1000, 700))  # 333 x 233: 3.0036
    slide = open_slide(tmp_path / "a.tif", reader)
    downsample = slide.levels[1].downsample
    for left in range(0, 300, 7):
        x = int(np.ceil(left * downsample))
        assert np.array_equal(slide.read(x, 0, 20, 20, 1), images[1][:20, left : left + 20]), left


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("workers", [1, 3])
def test_many_regions_come_in_the_order_asked_for(pyramid, reader, workers):
    corners = np.random.default_rng(0).integers(-40, 300, (50, 2))
    slide = open_slide(pyramid[0], reader)
    found = slide.read_many(corners, (31, 17), level=1, workers=workers)
    assert found.shape == (50, 17, 31, 3)
    for (x, y), region in zip(corners.tolist(), found, strict=True):
        assert np.array_equal(region, slide.read(x, y, 31, 17, 1))
    assert slide.read_many(np.empty((0, 2), np.int64), (31, 17)).shape == (0, 17, 31, 3)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("encoding", [{"compression": "deflate"}, JPEG], ids=["deflate", "jpeg"])
def test_a_damaged_tile_is_white_and_counted_once(tmp_path, reader, encoding):
    path = tmp_path / "a.tif"
    write_pyramid(path, **encoding)
    slide = open_slide(path, "tifffile")
    sound = slide.read(0, 0, 300, 210)
    overwrite_tile(path, column=1, row=1)
    slide = open_slide(path, reader)
    due = sound.copy()
    due[TILE : 2 * TILE, TILE : 2 * TILE] = 255
    for _ in range(2):
        assert np.array_equal(slide.read(0, 0, 300, 210), due)
    assert np.array_equal(slide.read(-10, 3, 60, 60)[:, 10:], sound[3:63, :50])
    assert slide.damaged == {(0, 1, 1)}


@pytest.mark.parametrize("reader", READERS)
def test_other_threads_read_on_beside_a_damaged_tile(tmp_path, reader):
    path = tmp_path / "a.tif"
    images = write_pyramid(path, compression="deflate")
    overwrite_tile(path, column=1, row=1)
    corners = np.tile([[0, 0], [100, 70], [200, 0], [0, 140]], (25, 1))  # every fourth meets the damage
    slide = open_slide(path, reader)
    for _ in range(3):
        found = slide.read_many(corners, (50, 50), workers=4)
    assert slide.damaged == {(0, 1, 1)}
    for (x, y), region in zip(corners.tolist(), found, strict=True):
        if (x, y) != (100, 70):
            assert np.array_equal(region, images[0][y : y + 50, x : x + 50])


@pytest.mark.parametrize("reader", READERS)
def test_after_damage_the_shared_handle_is_sound_again(tmp_path, reader):
    write_pyramid(tmp_path / "a.tif", compression="deflate")
    overwrite_tile(tmp_path / "a.tif", column=1, row=1)
    slide = open_slide(tmp_path / "a.tif", reader)
    slide.read(0, 0, 300, 210)
    assert slide._read(Box(200, 0, 220, 20), 0).shape == (20, 20, 3)  # OpenSlide's own would fail for good


@pytest.mark.parametrize("reader", READERS)
def test_a_jpeg_tile_whose_end_was_lost_is_white(tmp_path, reader):
    write_pyramid(tmp_path / "a.tif", **JPEG)
    overwrite_tile(tmp_path / "a.tif", column=0, row=0, content=bytes(400), at_end=True)
    slide = open_slide(tmp_path / "a.tif", reader)
    assert (slide.read(0, 0, TILE, TILE) == 255).all()
    assert len(slide.damaged) == 1


@pytest.mark.parametrize("reader", READERS)
def test_a_tile_never_scanned_is_white_and_not_damaged(tmp_path, reader):
    images = write_pyramid(tmp_path / "a.tif", factors=(1,), missing=(1, 0))
    slide = open_slide(tmp_path / "a.tif", reader)
    found = slide.read(0, 0, 300, 210)
    assert not slide.damaged
    due = images[0].copy()
    due[:TILE, TILE : 2 * TILE] = 255
    assert np.array_equal(found, due)


def test_auto_takes_the_first_reader_that_fits(pyramid, tmp_path, monkeypatch):
    slide = open_slide(pyramid[0])
    assert slide.reader == "cucim"
    write_pyramid(tmp_path / "sub.tif", subifds=True)  # the native readers see its first level only
    slide = open_slide(tmp_path / "sub.tif")
    assert (slide.reader, len(slide.levels)) == ("tifffile", 3)
    monkeypatch.setitem(sys.modules, "cucim.clara", None)
    slide = open_slide(pyramid[0])
    assert slide.reader == "openslide"
    monkeypatch.setitem(sys.modules, "openslide", None)
    slide = open_slide(pyramid[0])
    assert slide.reader == "tifffile"


@pytest.mark.parametrize(
    ("reader", "module"), [("cucim", "cucim.clara"), ("openslide", "openslide"), ("tifffile", "imagecodecs")]
)
def test_a_missing_reader_is_named_with_its_remedy(pyramid, monkeypatch, reader, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=f"'{reader}' is not installed .*pip install"):
        open_slide(pyramid[0], reader)


def test_readers_are_imported_when_first_asked_for():
    program = "import sys, medspeed.apps.pathology.slides.reader; sys.exit(any(m in sys.modules for m in sys.argv[1:]))"
    modules = ["cucim", "openslide", "tifffile", "imagecodecs", "torch"]
    done = subprocess.run([sys.executable, "-c", program, *modules], cwd=Path(__file__).parents[4], check=False)
    assert done.returncode == 0


def test_cucim_opens_one_slide_at_a_time(pyramid, monkeypatch):
    """Two first slides opened at once crash about one process in a hundred (cuCIM 26.10)."""
    clara = pytest.importorskip("cucim.clara")
    real, alone = clara.CuImage, threading.Lock()

    def opened(path):
        assert alone.acquire(blocking=False), "two open at once"
        time.sleep(0.02)
        alone.release()
        return real(path)

    monkeypatch.setattr(clara, "CuImage", opened)
    with ThreadPoolExecutor(4) as pool:
        slides = list(pool.map(lambda _: open_slide(pyramid[0], "cucim"), range(8)))
    assert {slide.reader for slide in slides} == {"cucim"}


def test_a_slide_is_closed_when_it_is_let_go(pyramid):
    for reader in READERS:
        slide = open_slide(pyramid[0], reader)
        closed, descriptor = weakref.ref(slide), slide._file
        os.fstat(descriptor)
        del slide
        assert closed() is None
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_two_thousand_reads_leave_handles_and_memory_flat(tmp_path, reader):
    paths = [tmp_path / f"{number}.tif" for number in range(5)]
    for path in paths:
        write_pyramid(path, **JPEG)
    overwrite_tile(paths[4], column=1, row=1)
    rng = np.random.default_rng(0)

    def read(count: int) -> tuple[int, int]:
        for index in range(count):
            if index % 10 == 0:
                slide = open_slide(paths[index // 10 % 5], reader)
            x, y = rng.integers(-50, 300, 2)
            slide.read(int(x), int(y), 64, 64, index % 2)
        gc.collect()
        return len(os.listdir("/proc/self/fd")), psutil.Process().memory_info().rss  # noqa: PTH208 - as /proc is read

    handles, memory = read(500)
    later_handles, later_memory = read(2000)
    assert later_handles <= handles + 2
    assert later_memory - memory < 6 * 2**20  # a region has 12 KiB, a slide's tiles 4 KiB each


@pytest.mark.gpu
def test_cucims_plugin_for_gpus_gives_the_same_pixels(pyramid):
    pytest.importorskip("nvidia.nvimgcodec", reason="nvidia-nvimgcodec-cu13 is not installed")
    program = (
        "import sys; from pathlib import Path; from medspeed.apps.pathology.slides.reader import open_slide\n"
        "a, b = (open_slide(Path(sys.argv[1]), reader).read(3, 5, 200, 100) for reader in ('cucim', 'tifffile'))\n"
        "sys.exit(int((a != b).any()))"
    )
    environment = {**os.environ, "ENABLE_CUSLIDE2": "1"}
    command = [sys.executable, "-c", program, str(pyramid[0])]
    assert subprocess.run(command, cwd=Path(__file__).parents[4], env=environment, check=False).returncode == 0


@pytest.mark.real_data
@pytest.mark.parametrize(
    ("name", "sizes", "mpp", "off"),
    [
        ("cmu-1-small-region.svs", [(2220, 2967)], 0.499, 0),
        ("tcga-cr-7395-01a-01-ts1.svs", [(4443, 3567), (2221, 1783)], None, 1),  # JPEG 2000: rounding differs
    ],
)
def test_real_slides_look_the_same_in_all_readers(real_data, name, sizes, mpp, off):
    found = []
    for reader in READERS:
        slide = open_slide(real_data / "slides_real" / name, reader)
        assert [(level.width, level.height) for level in slide.levels] == sizes
        assert slide.mpp == mpp
        last = len(sizes) - 1
        width, height = sizes[0]
        places = [(1000, 900, 300, 200, 0), (-50, -60, 200, 300, last), (0, 0, 99, 99, last)]
        regions = [slide.read(*place) for place in places]
        beyond = slide.read(width - 100, height - 70, 200, 200)
        assert (regions[1][:25] == 255).all()
        assert (beyond[70:] == 255).all()
        assert (beyond[:, 100:] == 255).all()
        assert not slide.damaged
        found.append(np.concatenate([region.ravel() for region in (*regions, beyond)]).astype(int))
    assert np.ptp(found, axis=0).max() <= off
    assert found[0].min() < 100


@pytest.mark.real_data
@pytest.mark.parametrize("reader", ["auto", *READERS])
def test_the_broken_slide_is_refused(real_data, reader):
    with pytest.raises(ValueError, match=r"broken\.svs is not a TIFF .it begins with b'IJrE'.*copy it again"):
        open_slide(real_data / "slides_real" / "broken.svs", reader)


@pytest.mark.parametrize("compression", ["jpeg", "deflate"])
def test_synthetic_slides_have_equal_pixels_in_all_readers_on_every_level(tmp_path, compression):
    """Some places on every level, the border and what lies beyond it among them."""
    draw = np.random.default_rng(0)
    image, _, _ = draw_slide(1024, True, draw)
    write_slide_pyramid(tmp_path / "a.tif", image, compression)
    found: dict[str, list[np.ndarray]] = {}
    for reader in READERS:
        places = np.random.default_rng(1)
        slide = open_slide(tmp_path / "a.tif", reader)
        assert [level.width for level in slide.levels] == [1024, 512, 256, 128, 64]
        regions = []
        for number, level in enumerate(slide.levels):
            for _ in range(12):
                x, y = places.integers(-200, 1024, 2).tolist()
                regions.append(slide.read(x, y, 100, 80, number))
            whole = slide.read(0, 0, level.width + 9, level.height + 9, number)
            assert (whole[level.height :] == 255).all()
            assert (whole[:, level.width :] == 255).all()
            regions.append(whole)
        found[reader] = regions
    if compression == "deflate":
        assert np.array_equal(found["tifffile"][12][:1024, :1024], image)
    for reader in READERS[1:]:
        for one, other in zip(found[READERS[0]], found[reader], strict=True):
            assert np.array_equal(one, other)


def _jpeg(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=100, subsampling=0)
    return file.getvalue()


@pytest.mark.parametrize(
    ("why", "readers", "options"),
    [
        ("Philips pads levels to whole tiles", "openslide", {"software": "Philips DP v1.0"}),
        ("Ventana's tiles overlap", "openslide", {"extratags": [(700, 1, 8, b"<iScan/>", True)]}),
        ("takes YCbCr without JPEG for RGB", "openslide", {"photometric": "ycbcr"}),
        ("takes Aperio's YCbCr for RGB", "cucim openslide", {"compression": 33003, "photometric": "ycbcr"}),
        (
            "it takes JFIF tiles of YCbCr for RGB",
            "tifffile",
            {"compression": 7, "compressionargs": {"outcolorspace": "rgb"}},
        ),
    ],
)
def test_what_readers_would_misread_is_left_to_another(tmp_path, why, readers, options):
    """Written as a slide of one level, the tiles ready made, or the pixels of the colours named."""
    path, image, compression = tmp_path / "a.tif", painted(4 * TILE, 4 * TILE), options.get("compression", 1)
    tiles: Any = (image[y : y + TILE, x : x + TILE] for y in range(0, 4 * TILE, TILE) for x in range(0, 4 * TILE, TILE))
    ycbcr = np.asarray(Image.fromarray(image).convert("YCbCr"))
    encoded: Any = {1: ycbcr if "photometric" in options else image, 7: map(_jpeg, tiles), 33003: ycbcr}[compression]
    about: Any = {"shape": image.shape, "dtype": np.uint8, "tile": (TILE, TILE), "metadata": None}
    tifffile.imwrite(path, encoded, **about, **{"photometric": "rgb", **options})
    for reader in {*READERS} - {*readers.split()}:
        with pytest.raises(ValueError, match=why):
            open_slide(path, reader)
    if "extratags" in options:  # of which OpenSlide wants more than that
        return
    slide = open_slide(path)
    assert slide.reader == readers.split()[0]
    assert np.abs(slide.read(0, 0, *image.shape[:2]).astype(int) - image).mean() < 2


def test_an_xmp_tag_of_another_type_is_no_damage(tmp_path):
    images = write_pyramid(tmp_path / "a.tif", factors=(1,), extratags=[(700, 2, 0, "<x:xmpmeta/>", True)])
    assert np.array_equal(open_slide(tmp_path / "a.tif").read(0, 0, 300, 210), images[0])


@pytest.mark.parametrize("reader", ["auto", *READERS])
@pytest.mark.parametrize("compression", ["lzw", "deflate"])
@pytest.mark.parametrize("start", [0, 500])
def test_damage_within_a_tile_is_seen(tmp_path, reader, compression, start):
    path = tmp_path / "a.tif"
    images = write_pyramid(path, compression=compression)
    overwrite_tile(path, 1, 1, bytes(400), start=start)
    if (reader, compression) == ("cucim", "lzw"):  # it gives another tile's pixels
        with pytest.raises(ValueError, match="other pixels for a damaged LZW tile"):
            open_slide(path, "cucim")
        return
    slide = open_slide(path, reader)
    images[0][TILE : 2 * TILE, TILE : 2 * TILE] = 255
    assert np.array_equal(slide.read(0, 0, 300, 210), images[0])
    assert slide.damaged == {(0, 1, 1)}
