"""What an overlay shows: orientation, the slices chosen, the parts of them."""

import itertools

import nibabel as nib
import numpy as np
import pytest
from nibabel.orientations import apply_orientation, inv_ornt_aff

from common.observe.planes import Panel, oriented_scan, panel_columns

AXIAL, CORONAL, SAGITTAL = 2, 1, 0
ORIENTATIONS = [
    np.array([*zip(axes, flips, strict=True)])
    for axes in itertools.permutations(range(3))
    for flips in itertools.product((1, -1), repeat=3)
]


def marked() -> tuple[np.ndarray, np.ndarray]:
    """Return an R, A, S image whose brightest voxel is far right, anterior and superior, and its affine."""
    image = np.zeros((9, 8, 7), dtype=np.float32)
    image[7, 6, 5] = 100
    affine = np.diag([2.0, 3.0, 4.0, 1.0])
    affine[:3, 3] = (-10, 20, -300)
    return image, affine


def whole(plane: int, index: int, shape: tuple[int, ...]) -> Panel:
    across, up = (shape[axis] for axis in range(3) if axis != plane)
    return Panel(plane, index, (0, 0), (across, up))


@pytest.mark.parametrize("turn", ORIENTATIONS, ids=lambda turn: "".join(nib.orientations.ornt2axcodes(turn)))
def test_every_orientation_is_shown_alike(turn: np.ndarray):
    image, affine = marked()
    labels = (image > 0).astype(np.uint8)
    turned = oriented_scan(
        apply_orientation(image, turn),
        apply_orientation(labels, turn),
        None,
        affine @ inv_ornt_aff(turn, image.shape),
        (0, 100),
    )
    assert np.array_equal(turned.image, image)
    assert np.allclose(turned.affine, affine)
    assert turned.largest == (7, 6, 5)
    # The patient's right is on the left, anterior (in sagittal planes: left) and superior are up.
    for plane, index, row, column in ((AXIAL, 5, 1, 1), (CORONAL, 6, 1, 1), (SAGITTAL, 7, 1, 1)):
        picture = whole(plane, index, image.shape).picture(turned.image)
        assert picture[row, column] == 100


def test_pictures_are_rows_by_columns_and_sized_in_mm():
    image, affine = marked()
    scan = oriented_scan(image, np.zeros(image.shape, np.uint8), None, affine, None)
    assert whole(AXIAL, 0, image.shape).picture(image).shape == (8, 9)
    assert whole(CORONAL, 0, image.shape).picture(image).shape == (7, 9)
    assert whole(SAGITTAL, 0, image.shape).picture(image).shape == (7, 8)
    assert whole(AXIAL, 0, image.shape).millimetres(scan) == (18, 24)
    assert Panel(SAGITTAL, 0, (1, 2), (4, 7)).millimetres(scan) == (9, 20)
    assert whole(AXIAL, 3, image.shape).caption(scan) == "axial, z = -288 mm"
    assert whole(SAGITTAL, 3, image.shape).caption(scan) == "sagittal, x = -4 mm"


def test_slices_cut_the_foreground_where_it_is_largest():
    image, labels, truth = np.zeros((20, 20, 30)), np.zeros((20, 20, 30), np.uint8), np.zeros((20, 20, 30), np.uint8)
    labels[4:9, 5:12, 6] = 1
    labels[4, 5, 6:16] = 2
    truth[2, 3, 20] = 1  # the truth counts for the extent as well
    scan = oriented_scan(image, labels, truth, np.eye(4), None)
    assert scan.largest == (4, 5, 6)
    assert scan.extent == ((2, 8), (3, 11), (6, 20))
    _, close_ups = panel_columns(scan)
    assert [column[0].index for column in close_ups] == [8, 10, 12, 14, 16, 18]


def test_without_foreground_the_middle_is_shown():
    scan = oriented_scan(np.zeros((20, 10, 30)), np.zeros((20, 10, 30), np.uint8), None, np.eye(4), None)
    planes, close_ups = panel_columns(scan)
    assert [(panel.plane, panel.index) for column in planes for panel in column] == [(2, 15), (1, 5), (0, 10)]
    assert len(close_ups) == 6


def test_close_ups_hold_the_foreground_and_stay_inside():
    image, labels = np.zeros((200, 180, 40), np.int16), np.zeros((200, 180, 40), np.uint8)
    labels[170:200, 100:140, 10:30] = 1
    _, close_ups = panel_columns(oriented_scan(image, labels, None, np.diag([1.0, 1, 5, 1]), None))
    for (panel,) in close_ups:
        assert panel.low == (110, 75)  # 40 voxels and 25 mm on each side; shifted back from the border
        assert panel.high == (200, 165)


def test_one_slice_gives_one_close_up():
    image, labels = np.ones((30, 30, 1)), np.ones((30, 30, 1), np.uint8)
    _, close_ups = panel_columns(oriented_scan(image, labels, None, np.eye(4), None))
    assert [column[0].index for column in close_ups] == [0]


def test_planes_leave_the_air_out_and_stack_for_flat_volumes():
    image, labels = np.full((100, 90, 10), -1000), np.zeros((100, 90, 10), np.uint8)
    image[20:81, 30:71] = 40
    labels[10:15, 40:50, 4:6] = 1  # outside of the body, yet shown
    planes, _ = panel_columns(oriented_scan(image, labels, None, np.eye(4), (-57, 164)))
    assert [[panel.plane for panel in column] for column in planes] == [[AXIAL], [CORONAL, SAGITTAL]]
    assert planes[0][0].low == (10, 30)
    assert planes[0][0].high == (81, 71)
    planes, _ = panel_columns(oriented_scan(image, labels, None, np.diag([1.0, 1, 10, 1]), (-57, 164)))
    assert [[panel.plane for panel in column] for column in planes] == [[AXIAL], [CORONAL], [SAGITTAL]]


def test_window_from_percentiles_without_the_darkest():
    image = np.zeros((10, 10, 20), np.float16)
    image[:, :, 10:] = np.arange(1000).reshape(10, 10, 10) + 1
    low, high = oriented_scan(image, np.zeros(image.shape, np.uint8), None, np.eye(4), None).window
    assert low == pytest.approx(6, abs=1)
    assert high == pytest.approx(995, abs=1.5)
    assert oriented_scan(0 * image, np.zeros(image.shape, np.uint8), None, np.eye(4), None).window == (0, 1)
    assert oriented_scan(image, np.zeros(image.shape, np.uint8), None, np.eye(4), (1, 2)).window == (1, 2)
