import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy.ndimage import label

from apps.pathology.outlines import find_regions


def mask_of(*rows: str) -> np.ndarray:
    return np.array([[cell == "#" for cell in row] for row in rows])


def area(ring: list[tuple[int, int]]) -> float:
    x, y = np.array(ring).T
    return float((x * np.roll(y, -1) - y * np.roll(x, -1)).sum() / 2)


def test_an_l_has_six_corners():
    (found,) = find_regions(mask_of("#..", "###"))
    assert found.outline == [(0, 0), (1, 0), (1, 1), (3, 1), (3, 2), (0, 2)]
    assert found.holes == []
    assert found.cells.tolist() == [0, 3, 4, 5]


def test_a_ring_has_a_hole_that_runs_the_other_way_round():
    (found,) = find_regions(mask_of("###", "#.#", "###"))
    assert sorted(found.outline) == [(0, 0), (0, 3), (3, 0), (3, 3)]
    (hole,) = found.holes
    assert sorted(hole) == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert (area(found.outline), area(hole)) == (9, -1)


def test_cells_that_touch_at_a_corner_are_apart():
    first, second = find_regions(mask_of("#.", ".#"))
    assert sorted(first.outline) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert sorted(second.outline) == [(1, 1), (1, 2), (2, 1), (2, 2)]


def test_nothing_has_no_regions():
    assert find_regions(np.zeros((3, 4), bool)) == []


@given(st.integers(0, 2**20 - 1))
def test_outlines_enclose_just_the_cells_of_their_region(bits):
    mask = np.array([bits >> place & 1 for place in range(20)], bool).reshape(4, 5)
    regions = find_regions(mask)
    assert len(regions) == label(mask)[1]
    assert sorted(cell for region in regions for cell in region.cells) == np.flatnonzero(mask).tolist()
    for region in regions:
        assert area(region.outline) + sum(map(area, region.holes)) == len(region.cells)
        for ring in (region.outline, *region.holes):
            steps = np.diff([*ring, ring[0]], axis=0)
            assert ((steps == 0).sum(1) == 1).all()  # along x or along y
            assert (np.abs(steps[:, 0]) > 0).tolist() == (np.abs(np.roll(steps[:, 1], -1)) > 0).tolist()  # each turns
