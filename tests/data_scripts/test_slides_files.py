"""Pyramids as readers expect them."""

from pathlib import Path

import numpy as np
import pytest
import tifffile

from data_scripts.slides_files import Compression, halved, pyramid, write_pyramid


def test_halving_takes_means_and_leaves_an_odd_line_out() -> None:
    level = np.array([[0, 1, 9], [1, 0, 9], [10, 20, 9], [30, 41, 9], [7, 7, 7]], np.uint8)
    assert halved(level).tolist() == [[1], [25]]  # 2 / 4 is rounded up, 101 / 4 down
    assert halved(np.array([[0, 0], [0, 1]], np.uint8)).tolist() == [[0]]


def test_a_slide_of_3072_px_has_level_6() -> None:
    shapes = [level.shape for level in pyramid(np.zeros((3072, 3100), np.uint8))]
    assert shapes == [(3072 >> n, 3100 >> n) for n in range(7)]


@pytest.mark.parametrize(("compression", "number"), [("jpeg", 7), ("deflate", 8)])
def test_levels_are_directories_of_their_own(tmp_path: Path, compression: Compression, number: int) -> None:
    base = np.full((600, 700, 3), 240, np.uint8)
    base[100:300, 200:500] = (200, 90, 160)
    write_pyramid(tmp_path / "a.tif", base, compression)
    with tifffile.TiffFile(tmp_path / "a.tif") as file:
        assert not file.is_bigtiff
        assert len(file.pages) == 4
        for order, (page, level) in enumerate(zip(file.pages, pyramid(base), strict=True)):
            assert isinstance(page, tifffile.TiffPage)
            assert (page.subfiletype, page.compression, page.subifds) == (int(order > 0), number, None)
            assert (page.tilewidth, page.tilelength) == (256, 256)
            assert page.get_resolution("MICROMETER") == pytest.approx((2 / 2**order,) * 2)  # pixels per um
            difference = np.abs(page.asarray().astype(int) - level)
            assert difference.mean() < (1.5 if compression == "jpeg" else 1e-9)


def test_a_mask_keeps_its_values(tmp_path: Path) -> None:
    mask = (np.add.outer(np.arange(300), np.arange(260)) % 97 < 40).astype(np.uint8)
    write_pyramid(tmp_path / "m.tif", mask, "deflate")
    assert np.array_equal(tifffile.imread(tmp_path / "m.tif", key=0), mask)
    assert set(np.unique(tifffile.imread(tmp_path / "m.tif", key=1))) == {0, 1}
