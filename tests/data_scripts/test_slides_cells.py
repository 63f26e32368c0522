"""Cells: sizes by which tumour differs from lymphocytes."""

import math

import numpy as np
import pytest

from data_scripts.slides_cells import LOOKS, Cells, draw_stamps, stamp


def diameters(kind: str) -> np.ndarray:
    """Return the diameters of discs as large as the stained area of each picture, px."""
    pictures = draw_stamps(LOOKS[kind], np.random.default_rng(0)).haematoxylin
    across: np.ndarray = np.sqrt((pictures > 0.2).sum(axis=(1, 2)) * 4 / math.pi)
    return across


def test_nuclei_have_the_sizes_of_textbooks() -> None:
    lymphocytes, tumour = diameters("lymphocyte"), diameters("tumour")
    assert 12 < np.median(lymphocytes) < 15.5  # 7 um
    assert 22 < np.median(tumour) < 32  # 11 to 16 um
    assert tumour.min() > lymphocytes.max()
    assert np.median(tumour) / np.median(lymphocytes) == pytest.approx(1.9, abs=0.3)
    assert tumour.std() > 2 * lymphocytes.std()


@pytest.mark.parametrize("kind", LOOKS)
def test_pictures_hold_the_whole_cell(kind: str) -> None:
    stamps = draw_stamps(LOOKS[kind], np.random.default_rng(1))
    for dye in (stamps.haematoxylin, stamps.eosin):
        assert max(dye[:, edge].max() for edge in (0, -1)) == 0
        assert max(dye[:, :, edge].max() for edge in (0, -1)) == 0


def test_a_cell_is_the_same_whichever_part_of_the_slide_is_drawn() -> None:
    stamps = draw_stamps(LOOKS["tumour"], np.random.default_rng(2))
    places = np.array([[3.0, 60], [64, 64], [90, 125], [200, 200]], np.float32)
    cells = Cells(stamps, places, np.arange(4), np.array([1, 0.8, 1.2, 1], np.float32))

    def drawn(top: int, left: int, height: int, width: int) -> np.ndarray:
        dyes = np.zeros((2, height, width), np.float32)
        stamp(cells, dyes[0], dyes[1], top, left)
        return dyes

    whole = drawn(0, 0, 128, 128)
    assert (whole.max(axis=(1, 2)) > 0.3).all()
    assert np.array_equal(drawn(50, 40, 60, 88), whole[:, 50:110, 40:128])
